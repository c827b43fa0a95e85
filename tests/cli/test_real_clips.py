"""The whole command line on real clips, shortened to two epochs; numbers are for the benchmark itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_clips.py"


@pytest.mark.slow
def test_check_train_eval_embed_and_search_run_on_real_clips(tmp_path):
    data = os.environ.get("TWINREEL_TEST_DATA")
    if not data:
        pytest.skip("TWINREEL_TEST_DATA names no folder of real clips")
    command = [sys.executable, str(SCRIPT), "--data", data, "--out", str(tmp_path), "--epochs", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for words in ("| caption, training rows | 158 | 132 |", "| caption, validation rows | 76 | 44 |",
                  "| action, training rows | 10 | ", "| action, validation rows | 10 | "):  # fmt: skip
        assert words in result.stdout, result.stdout
    assert result.stdout.count(".mp4") + result.stdout.count(".avi") >= 6
