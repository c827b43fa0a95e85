"""MIL-NCE values and gradients, and retrieval ranks, against the numbers that the founding code returned."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fill import fill
from torch import Tensor

from twinreel.errors import DataError
from twinreel.losses import milnce
from twinreel.metrics import embedding_ranks, retrieval_metrics, retrieval_ranks

GOLDEN = Path(__file__).parent / "golden"
SPEC = json.loads((GOLDEN / "milnce_loss.json").read_text(encoding="utf-8"))
RANKS, TIES = SPEC["metrics"]["cases"], SPEC["ties"]["cases"]


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "milnce_loss.npz") as arrays:
        return dict(arrays)


def tower_outputs(case: dict) -> tuple[Tensor, Tensor]:
    video, text = ((fill(*case[side]).double() * case["input_scale"]).requires_grad_() for side in ("video", "text"))
    return video, text


@pytest.mark.parametrize("case", SPEC["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "nothing masked"])
def test_value_and_gradients(case: dict, masked: bool, reference: dict[str, np.ndarray]) -> None:
    video, text = tower_outputs(case)
    options = {}
    if masked:  # masks that leave everything in must change nothing
        options["mask"] = torch.ones(case["B"], case["K"], dtype=torch.bool)
        options["valid"] = torch.ones(case["B"], dtype=torch.bool)
        options["text_ids"] = torch.arange(case["B"] * case["K"])
    loss = milnce(video, text, positives_twice=True, **options)
    loss.backward()
    # Both sides are float64: only the order of summation differs.
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=1e-12)
    for name, got in (("loss", loss), ("grad_video", video.grad), ("grad_text", text.grad)):
        want = torch.from_numpy(reference[f"f64.{case['name']}.{name}"])
        torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-11 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("case", SPEC["cases"], ids=lambda case: case["name"])
def test_shares_of_two_processes_add_up_to_it(case: dict, reference: dict[str, np.ndarray]) -> None:
    video, text = tower_outputs(case)
    clips = torch.arange(case["B"])
    shares = [milnce(video, text, positives_twice=True, own=own) for own in (clips[::2], clips[1::2])]
    for loss in shares:
        loss.backward()
    assert float(sum(loss.detach() for loss in shares)) == pytest.approx(case["loss"], rel=1e-12)
    for name, got in (("grad_video", video.grad), ("grad_text", text.grad)):
        want = torch.from_numpy(reference[f"f64.{case['name']}.{name}"])
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("case", SPEC["cases"], ids=lambda case: case["name"])
def test_counting_positives_once_removes_just_one_copy(case: dict) -> None:
    # With sums P and N over positives and negatives, exp(loss) of a clip is 1 + N / P, or 2 + N / P counted twice.
    video, text = tower_outputs(case)
    captions = torch.zeros(case["B"], case["K"], dtype=torch.bool)
    captions[0] = True  # only clip 0 has captions, so the mean is its loss alone
    once = float(milnce(video, text, mask=captions).detach())
    twice = float(milnce(video, text, mask=captions, positives_twice=True).detach())
    assert twice == pytest.approx(np.logaddexp(once, 0.0), rel=1e-9)


def matrix_of(case: dict) -> Tensor:
    matrix = fill(*case["matrix"]).double()
    return matrix + case["add_identity"] * torch.eye(len(matrix), dtype=torch.float64)


@pytest.mark.parametrize("case", RANKS, ids=lambda case: case["matrix"][0])
def test_metrics_without_ties(case: dict) -> None:
    similarity = matrix_of(case)
    positives = [[i] for i in range(len(similarity))]
    ranks = retrieval_ranks(similarity, positives)
    assert (ranks - 1).tolist() == case["ranks"]  # the founding ranks start at 0
    assert torch.equal(retrieval_ranks(similarity, positives, ties="expected"), ranks)
    assert torch.equal(embedding_ranks(similarity, torch.eye(len(similarity)), positives, block_size=7), ranks)
    got = retrieval_metrics(ranks)
    names = {"R1": "recall_at_1", "R5": "recall_at_5", "R10": "recall_at_10", "MR": "median_rank"}
    assert {short: got[name] for short, name in names.items()} == pytest.approx(case["result"], rel=1e-12)


@pytest.mark.parametrize("case", TIES, ids=lambda case: case["label"])
def test_one_rank_a_query_with_ties(case: dict) -> None:
    similarity = torch.tensor([[math.nan if x is None else x for x in row] for row in case["matrix"]])
    positives = [[i] for i in range(case["n_queries"])]
    if similarity.isnan().any():
        with pytest.raises(DataError, match="all scores of query 'caption 1'"):
            retrieval_ranks(similarity, positives, query_ids=[f"caption {i}" for i in range(case["n_queries"])])
        return
    assert (retrieval_ranks(similarity, positives) - 1).tolist() == case["rank_pessimistic"]
    assert (retrieval_ranks(similarity, positives, ties="expected") - 1).tolist() == case["rank_mean_of_ties"]


def test_all_golden_cases_are_here(reference: dict[str, np.ndarray]) -> None:
    assert {name.split(".")[1] for name in reference} == {case["name"] for case in SPEC["cases"]}
    assert any(None in row for case in TIES for row in case["matrix"])
