"""Top-k accuracy, mean average precision and the ensembling of views against the SlowFast code's own numbers.

`golden/slowfast_data.json` says under `topk`, `map` and `multi_view` what the founding code returned (top-k and
ensembling in float32; average precisions are those of its scikit-learn), `slowfast_data.npz` has the arrays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinreel.metrics import aggregate_views, mean_average_precision, top_k_accuracy

FOLDER = Path(__file__).parent / "golden"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "slowfast_data.json").read_text())
VIEWS: dict[str, Any] = GOLDEN["multi_view"]


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    with np.load(FOLDER / "slowfast_data.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def views_of(videos: int, each: int) -> list[tuple[str, int]]:
    """The founding order: view index = video * views + (clip * crops + crop)."""
    return [(f"video {i // each}", i % each) for i in range(videos * each)]


def test_top_k_accuracy(arrays: dict[str, Tensor]) -> None:
    scores, labels = arrays["metrics.preds"], arrays["metrics.labels"]
    # No scores of a row are equal here. Where they are, the founding code takes the order of torch.topk, ours counts
    # the tie against the model: B8 number 17.
    assert all(len(set(row)) == len(row) for row in scores.tolist())
    for k, percent in zip(GOLDEN["topk"]["ks"], GOLDEN["topk"]["accuracy_percent"], strict=True):
        assert 100 * top_k_accuracy(scores, labels, k) == pytest.approx(percent, rel=1e-6)  # theirs are float32


def test_ties_where_the_founding_code_takes_the_order_of_topk() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.0]])
    first = int(scores.topk(1).indices)
    assert top_k_accuracy(scores, [first], 1) == 0.0  # theirs: 1, by luck
    assert top_k_accuracy(scores, [first], 2) == 1.0


def test_mean_average_precision(arrays: dict[str, Tensor]) -> None:
    found = mean_average_precision(arrays["map.preds"], arrays["map.labels"])
    assert list(found.per_class.values()) == pytest.approx(GOLDEN["map"]["per_class"], rel=1e-12)
    assert found.mean == pytest.approx(GOLDEN["map"]["map"], rel=1e-12)
    assert len(found.left_out) == arrays["map.labels"].shape[1] - len(GOLDEN["map"]["per_class"])
    tied = mean_average_precision(arrays["map.preds_tied"], arrays["map.labels"])
    assert tied.mean == pytest.approx(GOLDEN["map"]["map_tied"], rel=1e-12)


def test_the_sum_over_views_is_the_mean_times_their_number(arrays: dict[str, Tensor]) -> None:
    each = VIEWS["views_per_video"]
    found = aggregate_views(arrays["views.probs"], views_of(VIEWS["videos"], each), num_views=each)
    torch.testing.assert_close(found.scores * each, arrays["views.sum"].double(), rtol=1e-6, atol=0)  # float32 sums
    for k in (1, 5):
        accuracy = top_k_accuracy(found.scores, arrays["views.labels"], k)
        assert f"{100 * accuracy:.2f}" == VIEWS["stats"]["sum"][f"top{k}_acc"]


def test_the_highest_over_views(arrays: dict[str, Tensor]) -> None:
    each = VIEWS["views_per_video"]
    found = aggregate_views(arrays["views.probs"], views_of(VIEWS["videos"], each), num_views=each, how="max")
    assert torch.equal(found.scores.float(), arrays["views.max"])
    for k in (1, 5):
        accuracy = top_k_accuracy(found.scores, arrays["views.labels"], k)
        assert f"{100 * accuracy:.2f}" == VIEWS["stats"]["max"][f"top{k}_acc"]


def test_multi_label_views_keep_their_scores_under_both_rules(arrays: dict[str, Tensor]) -> None:
    """B8 number 5: the founding accumulator starts at -1e10, in which sums of probabilities are lost."""
    each = VIEWS["views_per_video"]
    views = views_of(VIEWS["videos"], each)
    highest = aggregate_views(arrays["views.probs"], views, num_views=each, how="max")
    assert torch.equal(highest.scores.float(), arrays["views.multilabel_max"])
    assert VIEWS["bug_multilabel_sum"]["min_max_after_all_views"] == [-1e10, -1e10]
    targets = torch.nn.functional.one_hot(arrays["views.labels"], highest.scores.shape[1])
    found = mean_average_precision(highest.scores, targets)
    assert f"{100 * found.mean:.2f}" == VIEWS["multilabel_max_map_percent"]
    mean = aggregate_views(arrays["views.probs"], views, num_views=each)
    assert 0 < float(mean.scores.min()) < float(mean.scores.max()) < 1
