"""Our losses of matching and pretraining against those that the founding code computed, on its logits.

Tolerance: absolute 1e-6 on losses of about 1, and relative 2e-6 for the summed one of VQA: rounding errors of float32.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_clipbert_aggregate import clip_logits, qa_logits
from torch.nn import functional

from twinreel.losses import LOSSES, match_hinge, pretraining_loss

GOLDEN = Path(__file__).parent / "golden"
POOLINGS = pytest.mark.parametrize("pooling", ["lse", "mean", "max"])
CLOSE = {"rtol": 0.0, "atol": 1e-6}


def golden(name):
    """Inputs and arrays of a golden file."""
    inputs = json.loads((GOLDEN / f"clipbert_{name}.json").read_text())["inputs"]
    with np.load(GOLDEN / f"clipbert_{name}.npz") as arrays:
        return inputs, {key: torch.from_numpy(arrays[key]) for key in arrays.files if arrays[key].dtype.kind in "fi"}


def by_video(logits, counts):
    """Logits (clips, rows, K) of equally many rows a video -> (videos, clips, rows, K)."""
    assert len(set(counts)) == 1
    return logits.unflatten(1, (len(counts), counts[0])).transpose(0, 1)


def one_by_one(name, logits, targets, pooling):
    """The loss of each row by itself."""
    loss = LOSSES[name]
    if name == "match_cross_entropy":
        pairs = [(b, r) for b in range(logits.shape[0]) for r in range(logits.shape[2])]
        return torch.stack(
            [loss(logits[b : b + 1, :, r : r + 1], targets[b : b + 1, r : r + 1], pooling=pooling) for b, r in pairs]
        )
    return torch.stack([loss(logits[b : b + 1], targets[b : b + 1], pooling=pooling) for b in range(len(logits))])


@POOLINGS
def test_retrieval_by_cross_entropy(pooling):
    inputs, arrays = golden("retrieval_tiny")
    logits = by_video(arrays["logits"], inputs["n_examples_list"])
    targets = torch.tensor(inputs["labels"]).view(2, 2)
    wanted = arrays[f"train_{pooling}_loss_each"]
    torch.testing.assert_close(one_by_one("match_cross_entropy", logits, targets, pooling), wanted, **CLOSE)
    whole = LOSSES["match_cross_entropy"](logits, targets, pooling=pooling)
    torch.testing.assert_close(whole, wanted.mean(), **CLOSE)


def test_retrieval_of_one_clip_at_a_time():
    inputs, arrays = golden("retrieval_tiny")
    targets = torch.tensor(inputs["labels"]).view(2, 2)
    for clip, wanted in zip(arrays["logits"], arrays["ce_loss_per_clip"], strict=True):
        logits = by_video(clip[None], inputs["n_examples_list"])
        for pooling in ("lse", "mean", "max"):
            found = one_by_one("match_cross_entropy", logits, targets, pooling)
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_retrieval_by_hinge(pooling):
    inputs, arrays = golden("retrieval_rank_tiny")
    logits = by_video(arrays["logits"][None], inputs["n_examples_list"])
    targets = torch.tensor(inputs["labels"]).view(2, 3)
    assert float(match_hinge(logits, targets, pooling=pooling)) == pytest.approx(float(arrays["loss_mean"]), abs=1e-6)
    pairs = [[match_hinge(logits[b : b + 1, :, [0, r]], targets[b : b + 1, [0, r]]) for r in (1, 2)] for b in (0, 1)]
    torch.testing.assert_close(torch.tensor(pairs), arrays["hinge"], **CLOSE)


@POOLINGS
@pytest.mark.parametrize("name", ["tgif_mc_tiny", "msrvtt_qa_tiny", "frameqa_tiny"])
def test_choices_and_answers(name, pooling):
    inputs, arrays = golden(name)
    logits = arrays["logits"].transpose(0, 1)  # (videos, clips, 5 options or all answers)
    targets = functional.one_hot(torch.tensor(inputs["labels"]), logits.shape[2])
    loss = "choice_cross_entropy" if name == "tgif_mc_tiny" else "answer_cross_entropy"
    logits = logits[..., None] if name == "tgif_mc_tiny" else logits[:, :, None]
    wanted = arrays[f"train_{pooling}_loss_each"]
    torch.testing.assert_close(one_by_one(loss, logits, targets, pooling), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(LOSSES[loss](logits, targets, pooling=pooling), wanted.mean(), rtol=1e-6, atol=1e-6)


def test_soft_answers_of_vqa():
    inputs, arrays = golden("vqa_tiny")
    logits, targets = arrays["logits"].transpose(0, 1)[:, :, None], torch.tensor(inputs["labels"])
    wanted = arrays["loss_per_clip"].mean() * targets.shape[1]  # the founding training loss: mean * num_labels
    found = LOSSES["answer_binary_cross_entropy"](logits, targets)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    each = one_by_one("answer_binary_cross_entropy", logits, targets, "lse")
    torch.testing.assert_close(each, arrays["loss_per_clip"][0].sum(1), rtol=2e-6, atol=0)


def test_pretraining():
    """From the probabilities of the masked words: the golden file has not the logits of all words."""
    inputs, arrays = golden("pretrain_tiny")
    words = torch.tensor(inputs["mlm_labels"])
    masked = words >= 0
    log_chance = torch.where(masked, -arrays["mlm_loss_each"], 0.0)
    # Two words: the masked one with its founding probability, and all others together.
    logits = torch.stack([torch.log1p(-log_chance.exp() * masked), torch.where(masked, log_chance, -1e4)], dim=2)
    targets = torch.where(masked, 1, -100)
    loss = pretraining_loss(
        logits.view(2, 2, 12, 2), targets.view(2, 2, 12), arrays["itm_scores"].view(2, 2, 2),
        torch.tensor(inputs["itm_labels"]).view(2, 2),
    )  # fmt: skip
    assert float(loss) == pytest.approx(float(arrays["train_loss"]), abs=2e-6)
    # Not the mean over masked words, by which the founding validation divides.
    share = float(masked.double().mean())
    assert float(arrays["train_loss_mlm"]) == pytest.approx(
        share * float(arrays["mlm_loss_per_masked_token"]), rel=1e-6
    )


@POOLINGS
def test_losses_of_a_table_of_logits(pooling):
    with np.load(GOLDEN / "clipbert_aggregate.npz") as arrays:
        wanted, qa_wanted = torch.from_numpy(arrays[f"{pooling}_loss40"]), torch.from_numpy(arrays["qa_lse_loss"])
        answers = torch.from_numpy(arrays["qa_labels"])
    logits = clip_logits()[:2]  # the first 40 pairs in the order of videos, alternately matching and not
    targets = torch.tensor([1, 0] * 24).view(2, 24)
    found = one_by_one("match_cross_entropy", logits, targets, pooling)[:40]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6)
    if pooling == "lse":
        found = one_by_one("answer_cross_entropy", qa_logits()[:, :, None], functional.one_hot(answers, 5), "lse")
        torch.testing.assert_close(found, qa_wanted, rtol=1e-6, atol=1e-6)
