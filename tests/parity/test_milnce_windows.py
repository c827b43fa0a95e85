"""Windows, starts and candidate captions against tables that the founding MIL-NCE code returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinreel.data.founding_sampling import (
    milnce_evaluation_starts,
    milnce_hmdb_starts,
    milnce_start,
    milnce_window,
)
from twinreel.data.sampling import nearest_candidates, widen_window

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "milnce_data.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["clip_window"]["cases"], ids=str)
def test_training_windows(case: list[float]) -> None:
    min_seconds, start, end, golden_start, golden_end = case
    assert milnce_window(start, end, min_seconds) == (golden_start, golden_end)
    exact_start, exact_end = widen_window(start, end, min_seconds)  # ours differs by the cut to whole seconds alone
    assert (int(exact_start), int(exact_end)) == (golden_start, golden_end)


@pytest.mark.parametrize("case", GOLDEN["clip_window"]["cases"], ids=str)
def test_training_starts_lie_in_the_founding_range(case: list[float]) -> None:
    *_, start, end = case
    last = int(max(start, end - 16 / 5))
    rng = np.random.default_rng(0)
    starts = {milnce_start(rng, int(start), int(end), 16, 5.0) for _ in range(500)}
    assert starts == set(range(int(start), last + 1))


@pytest.mark.parametrize("case", GOLDEN["eval_windows"]["cases"], ids=str)
def test_evaluation_starts(case: dict[str, Any]) -> None:
    starts = milnce_evaluation_starts(case["start"], case["end"], case["num_frames"], case["fps"], case["num_clip"])
    assert starts == pytest.approx(case["seeks"], abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["hmdb_windows"]["cases"], ids=str)
def test_hmdb_starts(case: dict[str, Any]) -> None:
    assert milnce_hmdb_starts(case["video_frames"], case["num_frames"], case["num_clip"]) == case["starts"]


@pytest.mark.parametrize("case", GOLDEN["nearest_candidates"]["cases"], ids=lambda case: str(case["num_candidates"]))
def test_candidate_captions(case: dict[str, Any]) -> None:
    table = GOLDEN["nearest_candidates"]
    for index, _, golden in case["result"]:
        assert nearest_candidates(table["start"], table["end"], index, case["num_candidates"]) == golden
