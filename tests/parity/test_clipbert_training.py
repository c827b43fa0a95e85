"""Three updates, and the gradients of pretraining, against the founding code: network, loss, groups, rates, clipping.

Tolerances: losses 1e-5; the norm of the whole gradient 2e-4 relative, of a parameter's 4e-3 relative with an absolute
floor, below which it is rounding (a key's bias moves no softmax: its gradient is 0 in exact arithmetic); afterwards
norms 1e-5 relative and single weights 1e-5. What was reached is said where it is asserted; the norms' rest, 6e-6 of the
grid encoder at its rate of 2e-3, is the order of weight decay and update, which is torch's here.
"""

import json
from pathlib import Path

import clipbert_fill
import numpy as np
import pytest
import torch

from twinreel.losses import match_cross_entropy, pretraining_loss
from twinreel.models.clipbert import clipbert_tiny
from twinreel.models.training_modes import checkpoint_activations
from twinreel.optim import build_optimizer, build_schedule, clip_gradients, parameter_groups

GOLDEN = Path(__file__).parent / "golden"
FLOOR = 1e-7  # of a parameter's gradient


def read(name):
    spec = json.loads((GOLDEN / f"clipbert_{name}.json").read_text())
    with np.load(GOLDEN / f"clipbert_{name}.npz") as arrays:
        return spec, {key: arrays[key] for key in arrays.files}


def pixels(inputs, key):
    """A golden picture or video (B, T, 3, H, W) in RGB as the network wants it: (B, 3, T, H, W), BGR, less its mean."""
    values = clipbert_fill.fill(*inputs[key])
    mean = torch.tensor(inputs["img_pixel_mean"])[:, None, None]
    return (values - mean)[:, :, [2, 1, 0]].transpose(1, 2)


def norm(values):
    return float(values.detach().double().norm())


def built(hyper, model):
    """Optimizer and schedule of the golden run; its two weight decays are two calls here, one a part of the model."""
    text, own = hyper["learning_rate"], hyper["cnn_learning_rate"]
    groups = parameter_groups(
        model.transformer, learning_rate=text, learning_rates={}, weight_decay=hyper["weight_decay"]
    ) + parameter_groups(
        model.cnn,
        learning_rate=own,
        learning_rates={hyper["cnn_lr_mul_prefix"]: hyper["cnn_lr_mul"] * own},
        weight_decay=hyper["cnn_weight_decay"],
    )
    betas = tuple(hyper["betas"])
    optimizer = build_optimizer("adamw", groups, betas=betas, eps=1e-6, eps_before_correction=True)
    return optimizer, build_schedule(
        total_steps=20, steps_per_epoch=1, learning_rate=text, warmup_fraction=0.1, decay="linear"
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_updates(checkpointing):  # ClipBERT defect 2: float32, several videos and clips at once
    spec, wanted = read("trainstep_tiny")
    base, _ = read("retrieval_tiny")
    model = clipbert_tiny(num_outputs=2, dropout=0.0)
    model.load_state_dict(clipbert_fill.used(base))
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    optimizer, schedule = built(spec["hyper"], model)
    video = pixels(base["inputs"], "video")
    tokens = torch.tensor(base["inputs"]["text_ids"]).unflatten(0, (2, 2))
    targets = torch.tensor(base["inputs"]["labels"]).view(2, 2)
    weights = dict(model.named_parameters())
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = group["base_learning_rate"] * schedule.factor(step)
        rates = {group["lr"] for group in optimizer.param_groups}
        text, own = wanted["lr"][step]
        assert sorted(rates) == pytest.approx(sorted([text, own, 10 * own]), rel=1e-12)
        loss = match_cross_entropy(model(video, tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        assert loss.item() == pytest.approx(wanted["loss"][step], abs=1e-5)  # 3e-6
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        for name, theirs in zip(spec["grad_norm_names"], wanted["grad_norm"][step], strict=True):
            if name in trained:
                assert norm(trained[name].grad) == pytest.approx(theirs, rel=4e-3, abs=FLOOR), (step, name)
            else:
                assert theirs == 0, name  # detector heads, the visual position table
        whole = clip_gradients([weight.grad for weight in trained.values()], clip_norm=spec["clip_grad_norm"])
        assert whole == pytest.approx(wanted["total_grad_norm"][step], rel=2e-4)  # 1e-5
        optimizer.step()
    for name, (size, *first) in spec["after_step3"].items():
        if name in weights:
            assert norm(weights[name]) == pytest.approx(size, rel=1e-5), name  # 6e-6
            found = weights[name].detach().flatten()[: len(first)].tolist()
            assert found == pytest.approx(first, rel=0, abs=1e-5), name  # 3e-6
    assert trained.keys() == {name for name in spec["grad_norm_names"] if name in weights}


@pytest.mark.parametrize("sampled", [False, True])
def test_pretraining_loss_and_its_gradients(sampled):
    spec, wanted = read("pretrain_tiny")
    inputs = spec["inputs"]
    model = clipbert_tiny(pretraining_heads=True, dropout=0.0)
    model.load_state_dict(clipbert_fill.used(spec))
    tokens, words = (torch.tensor(inputs[key]).unflatten(0, (2, 2)) for key in ("text_ids", "mlm_labels"))
    pairs, chosen = torch.tensor(inputs["itm_labels"]).view(2, 2), torch.from_numpy(wanted["sample_idx"])
    word_logits, pair_logits = model.pretraining(pixels(inputs, "image"), tokens, chosen if sampled else None)
    loss = pretraining_loss(word_logits, words, pair_logits, pairs)
    parts = [wanted[f"sampled_{part}_mean"] for part in ("mlm", "itm")] if sampled else [wanted["train_loss"]]
    assert loss.item() == pytest.approx(float(sum(parts)), abs=1e-5)  # 1e-6
    if sampled:
        loss.backward()
        tied = model.transformer.bert.embeddings.word_embeddings.weight  # of words and of the head's decoder
        assert norm(tied.grad) == pytest.approx(float(wanted["grad_norm_word_emb"]), rel=2e-4)
        assert norm(model.cnn.grid_encoder[0].weight.grad) == pytest.approx(float(wanted["grad_norm_grid"]), rel=2e-4)
