"""Scores of videos out of those of their clips, and what is reported of them, against the founding inference.

The founding code ranks probabilities that it rounded to 4 decimals, and a tie may count for the model; we rank
unrounded log-odds. The reported numbers agree but for one caption, whose rank a tie of the rounding improved.
"""

import json
from pathlib import Path

import clipbert_fill
import numpy as np
import pytest
import torch

from twinreel.losses import pool_clips
from twinreel.metrics import answers_metrics, retrieval_metrics, retrieval_ranks

GOLDEN = Path(__file__).parent / "golden"
SPEC = json.loads((GOLDEN / "clipbert_aggregate.json").read_text())
POOLINGS = pytest.mark.parametrize("pooling", ["lse", "mean", "max"])


def clip_logits():
    """(videos, clips, captions, 2): noise, and a bonus for a video's own caption."""
    name, shape, role = SPEC["inputs"]["clip_logits"]
    logits = 2 * clipbert_fill.fill(name, shape, role)
    own = torch.arange(shape[0])
    logits[own, :, own, 1] += 1.5
    return logits


def qa_logits():
    """(questions, clips, answers)."""
    name, shape, role = SPEC["inputs"]["qa_logits"]
    return clipbert_fill.fill(name, shape, role.split()[0]).transpose(0, 1)


def golden(key):
    with np.load(GOLDEN / "clipbert_aggregate.npz") as arrays:
        return torch.from_numpy(arrays[key])


@POOLINGS
def test_scores_are_the_founding_ones_before_rounding(pooling):  # ClipBERT defect 10
    pooled = pool_clips(clip_logits(), pooling, 1)
    chance = (pooled[..., 1] - pooled[..., 0]).sigmoid()
    torch.testing.assert_close(chance, golden(f"score_{pooling}"), rtol=0, atol=5.1e-5)
    assert len(chance.unique()) > len(golden(f"score_{pooling}").unique())  # rounding makes ties


def numbers(ranks):
    found = retrieval_metrics(ranks, num_candidates=24)
    recalls = [100 * found[f"recall_at_{k}"] for k in (1, 5, 10)]
    return pytest.approx([*recalls, found["median_rank"], found["mean_rank"]])


@POOLINGS
@pytest.mark.parametrize("direction", ["text2video", "video2text"])
def test_recalls_and_ranks_are_the_founding_ones_but_for_a_tie_of_its_rounding(
    pooling, direction
):  # ClipBERT defect 10
    pooled = pool_clips(clip_logits(), pooling, 1)
    right, videos_first = [[place] for place in range(24)], direction == "video2text"
    log_odds, rounded = pooled[..., 1] - pooled[..., 0], golden(f"score_{pooling}")
    ranks = retrieval_ranks(log_odds if videos_first else log_odds.T, right)
    tied = {
        key: retrieval_ranks(rounded if videos_first else rounded.T, right, ties=key)
        for key in ("pessimistic", "expected")
    }
    flattered = 2 * tied["expected"] - tied["pessimistic"]  # a tie counts for the model
    want = SPEC[f"metrics_{pooling}"][direction]
    want = [want["r1"], want["r5"], want["r10"], want["medianR"], want["meanR"]]
    assert want == numbers(flattered)
    if (pooling, direction) != ("lse", "video2text"):
        assert want == numbers(ranks)
        return
    # Caption 13 is sixth of video 13, by log-odds of 1.71475 and 1.71485; rounded they are equal: fifth.
    assert (ranks != flattered).nonzero().flatten().tolist() == [13]
    assert (ranks[13], flattered[13]) == (6, 5) and torch.equal(ranks, tied["pessimistic"])


def test_saturated_probabilities_do_not_tie_here():  # ClipBERT defect 10
    log_odds = torch.tensor([[30.0, 31.0], [40.0, 39.0]])
    assert (log_odds.sigmoid() == 1).all()  # in float32 already, before any rounding to 4 decimals
    assert retrieval_ranks(log_odds, [[1], [0]]).tolist() == [1, 1]
    assert retrieval_ranks(log_odds.sigmoid(), [[1], [0]]).tolist() == [2, 2]


@POOLINGS
def test_answers_are_pooled_like_the_founding_ones(pooling):
    torch.testing.assert_close(pool_clips(qa_logits(), pooling, 1), golden(f"qa_{pooling}"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["frameqa", "msrvtt_qa", "action"])
def test_accuracies_are_the_founding_ones(name):  # ClipBERT defect 14: an answer outside the table counts as wrong
    case, table = SPEC["qa_metrics"][name], SPEC["qa_metrics"]["ans2label"]
    answers = [row["answer"] if isinstance(row["answer"], int) else table.get(row["answer"]) for row in case["rows"]]
    types = [row.get("answer_type") for row in case["rows"]]
    scores = torch.nn.functional.one_hot(torch.tensor(case["preds"]), 5).float()
    found, want = answers_metrics(scores, answers, types=types), case["metrics"]
    assert found.pop("unanswerable_share") == (0.2 if name == "frameqa" else 0.0)
    assert found.pop("accuracy") == pytest.approx(want["overall_acc"])
    for kind in dict.fromkeys(kind for kind in types if kind):
        assert found.pop(f"accuracy/{kind}") == pytest.approx(want[f"{kind}_acc"])
        assert found.pop(f"share/{kind}") == pytest.approx(want["ratios"][f"{kind}_ratio"][0])
    assert not found  # a type without questions has no accuracy; the founding code reports 0
