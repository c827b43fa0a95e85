"""ClipBERT's optimizer against ours: learning rates, who decays, and the order of its update.

Tolerance of learning rates: relative 1e-12, rounding errors of a double.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from twinreel.models.clipbert import clipbert_tiny
from twinreel.optim import build_optimizer, build_schedule, clip_gradients, parameter_groups

SPEC = json.loads((Path(__file__).parent / "golden" / "clipbert_schedule.json").read_text())
UNUSED = (
    "cnn.feature.proposal_generator.",
    "cnn.feature.roi_heads.",
    "transformer.bert.visual_embeddings.position_emb",
)
OURS = {"decay": "linear", "final_learning_rate": 0.0, "steps_per_epoch": 1}


@pytest.mark.parametrize(
    ("name", "total", "fraction", "rate"),
    [
        ("linear_1000_w0.1_lr5e-5", 1000, 0.1, 5e-5),
        ("linear_7_w0.1_lr1", 7, 0.1, 1.0),
        ("linear_1000_w0_lr1", 1000, 0.0, 1.0),
    ],
)
def test_every_learning_rate(name, total, fraction, rate):
    schedule = build_schedule(total_steps=total, learning_rate=rate, warmup_fraction=fraction, **OURS)
    seen = 0
    for count, wanted in ((int(count), wanted) for count, wanted in SPEC[name].items()):
        if not 1 <= count <= total:
            continue  # the founding code counts an update first: no update has rate 0 or what comes after the end
        ours = rate * schedule.factor(count - 1)
        if count == total:
            assert (ours, wanted) == (0.0, 1e-8)  # it replaces a rate of 0 by 1e-8: nothing moves either way
        else:
            assert ours == pytest.approx(wanted, rel=1e-12), count
        seen += 1
    assert seen >= 3


def test_the_first_update_has_a_share_of_the_rate_and_the_highest_is_the_rate():
    schedule = build_schedule(total_steps=1000, learning_rate=5e-5, warmup_fraction=0.1, **OURS)
    factors = [schedule.factor(step) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / 100) and factors[99] == schedule.highest == 1.0 and factors[-1] == 0.0
    assert schedule.landmarks() == [0, 99, 324, 549, 774, 999]
    assert factors[:100] == sorted(factors[:100]) and factors[99:] == sorted(factors[99:], reverse=True)


def ours(groups, model):
    """{name: (learning rate, weight decay)} of our groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["base_learning_rate"], group["weight_decay"])
        for group in groups for parameter in group["params"]
    }  # fmt: skip


def founding(case):
    return {
        name: (group["lr"], group["weight_decay"])
        for group in SPEC[case]["groups"] for name in group["names"] if not name.startswith(UNUSED)
    }  # fmt: skip


# What the founding keys become: transformer_lr_mul of a prefix is a rate of that part, cnn_lr_mul likewise.
CASES = {
    "groups_default": {"cnn": 5e-5},
    "groups_prefix_classifier": {"cnn": 5e-5, "cnn.grid_encoder": 1.5e-4, "transformer.classifier": 5e-4},
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_groups_are_the_founding_eight(case):
    sizes = {"groups_default": [0, 0, 22, 27, 1, 0, 52, 9], "groups_prefix_classifier": [2, 2, 20, 25, 1, 0, 52, 9]}
    assert [group["n"] for group in SPEC[case]["groups"]] == sizes[case]
    model = clipbert_tiny(num_outputs=2)
    groups = parameter_groups(model, learning_rate=5e-5, learning_rates=CASES[case], weight_decay=1e-3)
    found, wanted = ours(groups, model), founding(case)
    assert found.keys() == wanted.keys()
    assert found == {name: pytest.approx(values, rel=1e-12) for name, values in wanted.items()}
    dropped = [name for group in SPEC[case]["groups"] for name in group["names"] if name.startswith(UNUSED)]
    assert len(wanted) + len(dropped) == 111 and len(dropped) == 20


def test_a_frozen_cnn_leaves_the_grid_encoder_to_train():
    model = clipbert_tiny(num_outputs=2, freeze_stages=5)
    groups = parameter_groups(model, learning_rate=5e-5, learning_rates={"cnn": 5e-5}, weight_decay=1e-3)
    assert ours(groups, model) == founding("groups_freeze_cnn")


def founding_adamw(weights, gradients, rates, *, decay, betas=(0.9, 0.98), eps=1e-6):
    """The update of ClipBERT: eps is added before the bias correction, decay is taken from what is updated already."""
    first = second = torch.zeros_like(weights)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        size = rate * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
        weights = weights - size * first / (second.sqrt() + eps)
        weights = weights - rate * decay * weights
    return weights


def both_updates(scale, steps, rate, decay, eps_before_correction):
    """Weights after the same gradients: by the founding order, and by ours."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(500, generator=generator, dtype=torch.float64)
    gradients = scale * torch.randn(steps, 500, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    group = {"params": [parameter], "lr": rate, "weight_decay": decay}
    optimizer = build_optimizer(
        "adamw", [group], betas=(0.9, 0.98), eps=1e-6, eps_before_correction=eps_before_correction
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return founding_adamw(start, gradients, [rate] * steps, decay=decay), parameter.detach(), start


def test_the_order_of_decay_and_update_moves_a_weight_by_less_than_rate_squared_times_decay():
    # One step differs by rate * (rate * decay) * (the update in units of the rate, at most 1 / sqrt(1 - 0.98)).
    steps, rate, decay = 200, 5e-5, 1e-3
    bound = steps * rate * rate * decay / math.sqrt(1 - 0.98)
    for scale in (1.0, 1e-6):
        theirs, mine, start = both_updates(scale, steps, rate, decay, True)
        assert 0 < (theirs - mine).abs().max() < bound < 4e-9
        assert (mine - start).abs().max() > 1e-3  # which is a million times more


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5, 1e-7])
def test_without_decay_the_update_is_the_founding_one(scale):
    theirs, mine, _ = both_updates(scale, 50, 5e-4, 0.0, True)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("scale", "low", "high"), [(1.0, 0, 1e-4), (1e-3, 1e-3, 0.01), (1e-5, 0.1, 0.15)])
def test_where_eps_is_added_matters_for_gradients_near_eps_only(scale, low, high):
    theirs, mine, start = both_updates(scale, 50, 5e-4, 0.0, False)
    assert low < (theirs - mine).norm() / (theirs - start).norm() < high


def test_what_summed_micro_batches_did_to_the_founding_optimizer():
    """The founding code sums the gradients of A micro-batches, here they are averaged.

    Adam divides by the size of the gradient, so the learning rate meant the same; but the sum was clipped at 5, which
    is the mean at 5 / A, and eps stood beside sums.
    """
    accumulation, clip, eps = 4, 5.0, 1e-6
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(30, 50, generator=generator, dtype=torch.float64) * 0.4  # norms of about 3; sums of about 11
    weights = []
    for factor, own_clip, own_eps in [
        (accumulation, clip, eps),
        (1, clip / accumulation, eps / accumulation),
        (1, clip, eps),
    ]:
        parameter = torch.nn.Parameter(torch.ones(50, dtype=torch.float64))
        group = {"params": [parameter], "lr": 1e-3, "weight_decay": 1e-3}
        optimizer = build_optimizer("adamw", [group], betas=(0.9, 0.98), eps=own_eps, eps_before_correction=True)
        for mean in means:
            parameter.grad = factor * mean
            clip_gradients([parameter.grad], clip_norm=own_clip)
            optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-9)
    assert (weights[0] - weights[2]).abs().max() > 1e-4
