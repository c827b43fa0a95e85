"""The benchmark of what judging costs: it runs, and it counts one look at each video."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "matching_cost.py"


@pytest.mark.slow
def test_it_counts_looks_and_pairs(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--videos", "3", "--captions", "1", "4", "--num-clips", "2", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    values = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["captions"] for row in values] == ["3", "12"] and [row["pairs"] for row in values] == ["9", "36"]
    assert [row["CNN passes"] for row in values] == ["6", "6"]
