"""Losses of classifiers, by hand, against torch, and over processes."""

import math

import pytest
import torch
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.losses import CLASS_LOSSES, LOSSES, binary_cross_entropy, cross_entropy

BOTH = pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy"])


def problem(batch=7, classes=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(batch, classes, generator=generator, dtype=dtype) * 3).requires_grad_()
    targets = torch.rand(batch, classes, generator=generator, dtype=dtype).pow(3)
    return logits, targets / targets.sum(dim=1, keepdim=True)


def value_and_gradient(name, logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = LOSSES[name](leaf, targets, **options)
    loss.backward()
    return loss.detach(), leaf.grad


def test_cross_entropy_of_two_clips_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]], dtype=torch.float64)
    hard = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert float(cross_entropy(logits, hard)) == pytest.approx((-math.log(3 / 4) - math.log(1 / 5)) / 2, rel=1e-12)
    soft = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    first = -0.25 * math.log(1 / 4) - 0.75 * math.log(3 / 4)
    second = -0.5 * math.log(4 / 5) - 0.5 * math.log(1 / 5)
    assert float(cross_entropy(logits, soft)) == pytest.approx((first + second) / 2, rel=1e-12)
    smoothed = -0.05 * math.log(1 / 4) - 0.95 * math.log(3 / 4)  # 0.1 spread over both classes
    ours = cross_entropy(logits[:1], hard[:1], label_smoothing=0.1)
    assert float(ours) == pytest.approx(smoothed, rel=1e-12)


def test_binary_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert float(binary_cross_entropy(logits, targets)) == pytest.approx(-(math.log(0.5) + math.log(0.25)) / 2)
    smoothed = -math.log(0.5) - 0.1 * math.log(0.75) - 0.9 * math.log(0.25)  # 0.2: 0.9 and 0.1
    assert float(binary_cross_entropy(logits, targets, label_smoothing=0.2)) == pytest.approx(smoothed / 2)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_torchs(label_smoothing):
    logits, targets = problem()
    classes = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    one_hot = functional.one_hot(classes, 5).double()
    for wanted, theirs in ((targets, targets), (one_hot, one_hot), (one_hot, classes)):
        reference = functional.cross_entropy(logits, theirs, label_smoothing=label_smoothing)
        [gradient] = torch.autograd.grad(reference, logits)
        loss, ours = value_and_gradient("cross_entropy", logits, wanted, label_smoothing=label_smoothing)
        torch.testing.assert_close(loss, reference.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-14)


def test_binary_cross_entropy_is_torchs():
    logits, targets = problem()
    for wanted in (targets, (targets > 0.2).double(), torch.zeros_like(targets)):
        reference = functional.binary_cross_entropy_with_logits(logits, wanted)
        [gradient] = torch.autograd.grad(reference, logits)
        loss, ours = value_and_gradient("binary_cross_entropy", logits, wanted)
        torch.testing.assert_close(loss, reference.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-14)


@BOTH
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_smoothing_before_and_after_mixing_are_one(name, label_smoothing):
    logits, targets = problem()
    mixed = 0.3 * targets + 0.7 * targets.flip(0)
    loss = LOSSES[name](logits, mixed, label_smoothing=label_smoothing)
    apart = [LOSSES[name](logits, each, label_smoothing=label_smoothing) for each in (targets, targets.flip(0))]
    torch.testing.assert_close(loss, 0.3 * apart[0] + 0.7 * apart[1], rtol=1e-12, atol=0)


@BOTH
def test_shares_of_processes_add_up(name):
    logits, targets = problem()
    valid = torch.tensor([True, False, True, True, False, True, True])
    whole, gradient = value_and_gradient(name, logits, targets, valid=valid, label_smoothing=0.1)
    for shares in ([[0, 1, 2], [3, 4, 5, 6]], [[5, 0], [1, 4], [2, 3, 6]], [[1, 4], [0, 2, 3, 5, 6]]):
        parts = [
            value_and_gradient(name, logits, targets, valid=valid, own=torch.tensor(share), label_smoothing=0.1)
            for share in shares
        ]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-14, atol=0)
        torch.testing.assert_close(sum(part for _, part in parts), gradient, rtol=1e-14, atol=0)
    alone, _ = value_and_gradient(name, logits, targets, valid=valid, own=torch.tensor([1, 4]))
    assert float(alone) == 0.0


@BOTH
def test_an_excluded_clip_is_as_good_as_absent_whatever_it_holds(name):
    logits, targets = problem()
    valid = torch.tensor([True, False, True, True, True, True, False])
    want, want_gradient = value_and_gradient(name, logits[valid], targets[valid])
    broken, wrong = logits.detach().clone(), targets.clone()
    broken[~valid], wrong[1], wrong[6] = math.nan, math.nan, 0.0
    loss, gradient = value_and_gradient(name, broken, wrong, valid=valid)
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient[valid], want_gradient, rtol=1e-14, atol=0)
    assert torch.equal(gradient[~valid], torch.zeros(2, 5, dtype=torch.float64))


@BOTH
def test_nothing_valid_is_zero_and_never_nan(name):
    logits, targets = problem(dtype=torch.float32)
    logits = torch.full_like(logits, math.inf)
    loss, gradient = value_and_gradient(name, logits, targets, valid=torch.zeros(7, dtype=torch.bool))
    assert float(loss) == 0.0 and torch.equal(gradient, torch.zeros_like(logits))


@BOTH
def test_a_valid_clip_that_is_not_finite_is_not_hidden(name):
    logits, targets = problem()
    broken = logits.detach().clone()
    broken[2, 1] = math.nan
    assert not torch.isfinite(LOSSES[name](broken, targets))


@BOTH
def test_large_logits_stay_finite(name):
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    loss, gradient = value_and_gradient(name, logits, torch.tensor([[0.0, 1.0, 0.0]]), label_smoothing=0.1)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and float(loss) > 1e3


@BOTH
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_is_float32_at_least_and_float64_is_kept(name, dtype, wide):
    logits, targets = problem()
    logits = logits.detach().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](logits, targets.to(wide))
    want = torch.promote_types(torch.promote_types(dtype, wide), torch.float32)
    assert loss.dtype == want
    reference = LOSSES[name](logits.double(), targets)
    assert float(loss) == pytest.approx(float(reference), rel=1e-13 if wide is torch.float64 else 1e-5)


@BOTH
def test_gradients_are_right(name):
    logits, targets = problem(batch=3)
    valid = torch.tensor([True, False, True])
    options = {"valid": valid, "own": torch.tensor([2, 1]), "label_smoothing": 0.1}
    assert torch.autograd.gradcheck(lambda scores: LOSSES[name](scores, targets, **options), logits)


@pytest.mark.parametrize(
    ("logits", "targets", "options", "words"),
    [
        (torch.zeros(2), torch.zeros(2), {}, r"logits must be a floating-point matrix .* got torch.float32 of shape"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 3), {}, r"logits must be .* got torch.int64 of shape \(2, 3\)"),
        (torch.zeros(0, 3), torch.zeros(0, 3), {}, r"that is not empty, got torch.float32 of shape \(0, 3\)"),
        (torch.zeros(2, 3), torch.zeros(2, 4), {}, r"targets must be .*\(2, 3\), got torch.float32 of shape \(2, 4\)"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), {}, r"torch.int64 of shape \(2,\). ClassTable.targets makes them"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"label_smoothing": 1.0}, r"label_smoothing=1.0 refused; .* to below 1"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"label_smoothing": -0.1}, r"label_smoothing=-0.1 refused"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"label_smoothing": math.nan}, r"label_smoothing=nan refused"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"valid": torch.ones(3, dtype=torch.bool)}, "valid must be bool of"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"own": torch.tensor([2])}, r"own has positions from 2 to 2 .* 2 clips"),
        (torch.zeros(2, 3), torch.eye(3)[:2], {"own": torch.tensor([1, 1])}, r"own names a clip twice"),
    ],
)  # fmt: skip
@BOTH
def test_what_does_not_fit_is_refused_in_words(name, logits, targets, options, words):
    with pytest.raises(ConfigError, match=f"^{name}: .*{words}"):
        LOSSES[name](logits, targets, **options)


def test_several_labels_in_a_softmax_are_refused_and_the_other_loss_is_named():
    targets = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    with pytest.raises(ConfigError, match=r"targets of clip 1 sum to 2, not 1.*task.loss=binary_cross_entropy"):
        cross_entropy(torch.zeros(2, 3), targets)
    targets[1] = math.nan
    with pytest.raises(ConfigError, match="targets of clip 1 sum to nan"):
        cross_entropy(torch.zeros(2, 3), targets)
    cross_entropy(torch.zeros(2, 3), targets, valid=torch.tensor([True, False]))


def test_the_table_names_them():
    assert [loss for loss in LOSSES.values() if loss in CLASS_LOSSES] == [cross_entropy, binary_cross_entropy]
