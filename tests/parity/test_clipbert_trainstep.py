"""Three updates of ClipBERT against the founding code's: loss, gradients, learning rates, parameters afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clipbert_fill
import numpy as np
import pytest
import torch
from torch import Tensor

from twinreel.losses import match_cross_entropy
from twinreel.models.clipbert import ClipBert, clipbert_tiny
from twinreel.optim import build_optimizer, build_schedule, clip_gradients, parameter_groups

FOLDER = Path(__file__).parent / "golden"
STEP = json.loads((FOLDER / "clipbert_trainstep_tiny.json").read_text())
BASE = json.loads((FOLDER / "clipbert_retrieval_tiny.json").read_text())
ARRAYS = dict(np.load(FOLDER / "clipbert_trainstep_tiny.npz"))
UNUSED = set(BASE["unused_keys"])


def make_optimizer(model: ClipBert) -> torch.optim.Optimizer:
    """The eight groups, of which two are empty: here the two parts have weight decays of their own."""
    hyper = STEP["hyper"]
    cnn_rate = hyper["cnn_learning_rate"]
    groups = [
        *parameter_groups(
            model.transformer,
            learning_rate=hyper["learning_rate"],
            learning_rates={},
            weight_decay=hyper["weight_decay"],
        ),
        *parameter_groups(
            model.cnn,
            learning_rate=cnn_rate,
            learning_rates={hyper["cnn_lr_mul_prefix"]: hyper["cnn_lr_mul"] * cnn_rate},
            weight_decay=hyper["cnn_weight_decay"],
        ),
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ours = [sorted(names[id(parameter)] for parameter in group["params"]) for group in groups]
    theirs = [sorted(name for name in group["names"] if name not in UNUSED) for group in STEP["groups"]]
    assert sorted(ours) == sorted(filter(None, theirs)) and len(ours) == 4  # the detector's heads have no biases here
    return build_optimizer(hyper["optim"], groups, betas=tuple(hyper["betas"]), eps=1e-6, eps_before_correction=True)


def run_steps(model: ClipBert, video: Tensor, tokens: Tensor, targets: Tensor) -> dict[str, list[Any]]:
    optimizer = make_optimizer(model)
    schedule = build_schedule(
        total_steps=STEP["total_steps"],
        learning_rate=STEP["hyper"]["learning_rate"],
        warmup_fraction=STEP["warmup_ratio"],
        decay="linear",
        final_learning_rate=0.0,
        steps_per_epoch=1,
    )
    found: dict[str, list[Any]] = {"loss": [], "lr": [], "norms": [], "total": []}
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = group["base_learning_rate"] * schedule.factor(step)
        optimizer.zero_grad()
        loss = match_cross_entropy(model(video, tokens), targets, pooling="lse")
        loss.backward()
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        found["loss"].append(loss.item())
        found["lr"].append(
            [schedule.factor(step) * STEP["hyper"][key] for key in ("learning_rate", "cnn_learning_rate")]
        )
        found["norms"].append({name: value.grad.double().norm().item() for name, value in trained.items()})
        gradients = [value.grad for value in trained.values()]
        found["total"].append(clip_gradients(gradients, clip_norm=STEP["clip_grad_norm"]))
        optimizer.step()
    return found


def test_three_updates() -> None:
    model = clipbert_tiny(dropout=0.0).train()
    model.load_state_dict(clipbert_fill.used(BASE), strict=True)
    inputs = BASE["inputs"]
    frames = clipbert_fill.fill(*inputs["video"]).to(torch.uint8).permute(0, 1, 3, 4, 2)
    tokens = torch.tensor(inputs["text_ids"]).reshape(2, 2, -1)
    targets = torch.tensor(inputs["labels"]).reshape(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = run_steps(model, model.preprocessing.normalize(frames), tokens, targets)

    np.testing.assert_allclose(found["lr"], ARRAYS["lr"], rtol=1e-12)
    # Measured: 0, 3e-6 and 8e-6, and 4e-7 at most with norms that are not folded into convolutions: rounding, which
    # Adam blows up where gradients are near its eps.
    np.testing.assert_allclose(found["loss"], ARRAYS["loss"], atol=3e-5)
    np.testing.assert_allclose(found["total"], ARRAYS["total_grad_norm"], rtol=2e-4)  # measured: 2e-5
    assert set(found["norms"][0]) == {name for name in STEP["grad_norm_names"] if name not in UNUSED}
    for norms, row in zip(found["norms"], ARRAYS["grad_norm"], strict=True):
        for name, theirs in zip(STEP["grad_norm_names"], row, strict=True):
            if name not in UNUSED:  # measured: 4e-3; the gradients of key biases are 0 in exact arithmetic
                assert norms[name] == pytest.approx(theirs, rel=1e-2, abs=1e-6), name
    after = model.state_dict()
    for name, (norm, *first) in STEP["after_step3"].items():
        if name not in UNUSED:
            # Measured: 3e-7. The grid encoder, at ten times the rate and five times the decay, shows that torch decays
            # weights before the update and the founding code after it: 5e-6, and 3e-7 in the founding order.
            limit = 2e-5 if "grid_encoder" in name else 2e-6
            assert after[name].double().norm().item() == pytest.approx(norm, rel=limit), name
            np.testing.assert_allclose(after[name].flatten()[:3], first[: after[name].numel()], atol=5e-5, err_msg=name)
    frozen = [name for name in before if name not in STEP["after_step3"]]
    assert len(frozen) > 200 and all(torch.equal(before[name], after[name]) for name in frozen)
