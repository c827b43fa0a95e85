"""MIL-NCE against its formula, its properties, and what it holds in memory."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_losses import assert_same, rand, value_and_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinreel.errors import ConfigError
from twinreel.losses import common, milnce


def naive(
    v: Tensor,
    t: Tensor,
    mask=None,
    valid=None,
    text_ids=None,
    own=None,
    positives_twice=False,
    normalize=False,
    temperature=1.0,
) -> Tensor:
    """The formula word by word, one pair at a time."""
    num_clips = len(v)
    num_candidates = len(t) // num_clips

    def score(i: int, j: int, k: int) -> Tensor:
        a, b = v[i], t[j * num_candidates + k]
        if normalize:
            a, b = a / a.norm(), b / b.norm()
        return (a * b).sum() / temperature

    def real(j: int, k: int) -> bool:
        return (valid is None or bool(valid[j])) and (mask is None or bool(mask[j, k]))

    def takes_part(i: int, j: int, k: int) -> bool:
        if not real(j, k) or not (valid is None or valid[i]):
            return False
        if text_ids is None or i == j:
            return True
        said = [int(text_ids[i * num_candidates + c]) for c in range(num_candidates) if real(i, c)]
        return int(text_ids[j * num_candidates + k]) not in said

    losses = []
    contributing = 0
    for i in range(num_clips):
        positives = [score(i, i, k) for k in range(num_candidates) if takes_part(i, i, k)]
        contributing += bool(positives)
        if not positives or (own is not None and i not in own.tolist()):
            continue
        terms = list(positives) * (2 if positives_twice else 1)
        for j in range(num_clips):
            for k in range(num_candidates):
                if j != i and takes_part(i, j, k):
                    terms.append(score(i, j, k))
                if j != i and takes_part(j, i, k):
                    terms.append(score(j, i, k))
        losses.append(torch.stack(terms).logsumexp(0) - torch.stack(positives).logsumexp(0))
    return torch.stack(losses).sum() / contributing if losses else v.new_zeros(())


def random_case(seed: int) -> tuple[Tensor, Tensor, dict]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    b, k, d = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 6)

    def flags(*shape: int, share: float) -> Tensor:
        return torch.rand(*shape, generator=generator) < share

    options: dict = {"positives_twice": rng.random() < 0.5, "normalize": rng.random() < 0.5}
    options["temperature"] = rng.choice([1.0, 0.5, 0.1] if options["normalize"] else [1.0, 0.5, 7.0])
    if rng.random() < 0.75:
        options["mask"] = flags(b, k, share=0.6)
    if rng.random() < 0.75:
        options["valid"] = flags(b, share=0.7)
    if rng.random() < 0.75:
        options["text_ids"] = torch.randint(-9, rng.choice([-5, 9]), (b * k,), generator=generator)
    if rng.random() < 0.5:
        options["own"] = torch.randperm(b, generator=generator)[: rng.randint(0, b)]
    return rand(b, d, seed=seed), rand(b * k, d, seed=seed + 10_000), options


# --- against the formula ---


@pytest.mark.parametrize("chunk", [5, 2**19], ids=["small chunks", "one chunk"])
@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 120, 20)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_value_and_gradients_equal_the_naive_formula(seeds: range, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "CHUNK_ELEMENTS", chunk)
    for seed in seeds:
        v, t, options = random_case(seed)
        assert_same(value_and_gradients(milnce, v, t, **options), value_and_gradients(naive, v, t, **options), 1e-11)


def test_random_cases_cover_what_they_should() -> None:
    cases = [random_case(seed) for seed in range(120)]
    somebody = [c for c in cases if naive(c[0], c[1], **c[2])]
    assert 60 <= len(somebody) <= 117  # in the others no own clip contributes, or a clip is alone
    assert any(len({"mask", "valid", "text_ids", "own"} & set(c[2])) == 4 for c in somebody)
    with_ids = [c for c in cases if "text_ids" in c[2]]
    without = [naive(v, t, **{k: x for k, x in o.items() if k != "text_ids"}) for v, t, o in with_ids]
    assert sum(naive(v, t, **o) != other for (v, t, o), other in zip(with_ids, without, strict=True)) > 20


def test_by_hand_two_clips_two_candidates() -> None:
    # One dimension, v = (1, 2): the score of video i with caption c is v[i] * t[c].
    v = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    t = torch.tensor([[0.0], [1.0], [-1.0], [0.5]], dtype=torch.float64)
    e = math.exp
    positives = [e(0) + e(1), e(-2) + e(1)]
    row = [e(-1) + e(0.5), e(0) + e(2)]  # video i against the other clip's captions
    column = [row[1], row[0]]  # the other video against the captions of clip i
    once = sum(math.log((positives[i] + row[i] + column[i]) / positives[i]) for i in range(2)) / 2
    twice = sum(math.log((2 * positives[i] + row[i] + column[i]) / positives[i]) for i in range(2)) / 2
    assert float(milnce(v, t)) == pytest.approx(once, rel=1e-14)
    assert float(milnce(v, t, positives_twice=True)) == pytest.approx(twice, rel=1e-14)

    # Captions 1 (of clip 0) and 2 (of clip 1) are equal: each is no negative with the other clip's video.
    rows = [e(0.5), e(0)]  # video 0 without caption 2, video 1 without caption 1
    columns = [e(0), e(0.5)]  # caption 1 without video 1, caption 2 without video 0
    want = sum(math.log((positives[i] + rows[i] + columns[i]) / positives[i]) for i in range(2)) / 2
    ids = torch.tensor([1, 5, 5, 2])
    assert float(milnce(v, t, text_ids=ids)) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("own", [None, torch.tensor([2, 0])], ids=["all", "own"])
@pytest.mark.parametrize("positives_twice", [False, True])
def test_gradcheck_with_all_masks(positives_twice: bool, own: Tensor | None) -> None:
    options: dict = {
        "mask": torch.tensor([[True, False], [True, True], [True, False], [False, False], [True, True]]),
        "valid": torch.tensor([True, True, True, True, False]),
        "text_ids": torch.tensor([1, 2, 3, 1, 4, 5, 6, 7, 8, 9]),
        "own": own,
        "positives_twice": positives_twice,
    }
    v, t = rand(5, 3).requires_grad_(), rand(10, 3, seed=1).requires_grad_()
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    for normalize in (False, True):

        def loss(v: Tensor, t: Tensor, temperature: Tensor, normalize: bool = normalize) -> Tensor:
            return milnce(v, t, temperature=temperature, normalize=normalize, **options)

        assert torch.autograd.gradcheck(loss, (v, t, temperature))


# --- properties ---


def test_order_of_clips_and_of_candidates_does_not_matter() -> None:
    v, t = rand(5, 4), rand(15, 4, seed=1)
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(2)) < 0.7
    ids = torch.randint(0, 20, (15,), generator=torch.Generator().manual_seed(3))
    want = milnce(v, t, mask=mask, text_ids=ids)
    clips = torch.randperm(5, generator=torch.Generator().manual_seed(4))
    inside = torch.randperm(3, generator=torch.Generator().manual_seed(5))
    columns = (clips[:, None] * 3 + inside[None, :]).flatten()
    got = milnce(v[clips], t[columns], mask=mask[clips][:, inside], text_ids=ids[columns])
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_masking_captions_is_removing_them() -> None:
    v, t = rand(3, 4), rand(12, 4, seed=1)
    mask = torch.tensor([[True, False, True, False]] * 3)
    kept = t.view(3, 4, 4)[:, [0, 2]].reshape(6, 4)
    torch.testing.assert_close(milnce(v, t, mask=mask), milnce(v, kept), rtol=1e-13, atol=0)


def test_excluding_a_clip_is_removing_it_whatever_it_holds() -> None:
    v, t = rand(4, 3), rand(8, 3, seed=1)
    keep = torch.tensor([True, False, True, True])
    want = value_and_gradients(milnce, v[keep], t.view(4, 2, 3)[keep].reshape(6, 3))
    v[1], t[2], t[3] = math.nan, math.inf, -math.inf
    loss, gv, gt = value_and_gradients(milnce, v, t, valid=keep)
    assert_same((loss, gv[keep], gt.view(4, 2, 3)[keep].reshape(6, 3)), want)
    assert not gv[1].any()
    assert not gt[2:4].any()


def test_a_clip_without_real_caption_gives_no_term_but_stays_a_negative() -> None:
    v, t = rand(3, 3), rand(6, 3, seed=1)
    mask = torch.tensor([[True, True], [False, False], [True, True]])
    with_it = milnce(v, t, mask=mask)
    torch.testing.assert_close(with_it, naive(v, t, mask=mask), rtol=1e-12, atol=0)
    without_it = milnce(v, t, mask=mask, valid=torch.tensor([True, False, True]))
    assert with_it > without_it


def test_equal_texts_never_remove_a_positive() -> None:
    v, t = rand(3, 3), rand(6, 3, seed=1)
    twins = torch.tensor([1, 1, 2, 2, 3, 3])  # equal within each clip only
    torch.testing.assert_close(milnce(v, t, text_ids=twins), milnce(v, t), rtol=0, atol=0)
    assert float(milnce(v, t, text_ids=torch.zeros(6, dtype=torch.int64))) == 0.0  # no negative is left


@pytest.mark.parametrize(("positives_twice", "floor"), [(False, 0.0), (True, math.log(2.0))])
def test_floor(positives_twice: bool, floor: float) -> None:
    perfect = 100 * torch.eye(4, dtype=torch.float64)
    assert float(milnce(perfect, perfect, positives_twice=positives_twice)) == pytest.approx(floor, abs=1e-15)
    alone = milnce(rand(1, 4), rand(3, 4, seed=1), positives_twice=positives_twice)
    assert float(alone) == pytest.approx(floor, abs=1e-15)
    for seed in range(20):
        value = milnce(rand(3, 4, seed=seed), rand(6, 4, seed=seed + 99), positives_twice=positives_twice)
        assert float(value) > floor


def test_small_losses_keep_their_digits_in_float32() -> None:
    # Every clip has two negatives 20 below its only positive.
    embeddings = math.sqrt(20.0) * torch.eye(2)
    loss, gv, gt = value_and_gradients(milnce, embeddings, embeddings)
    assert float(loss) == pytest.approx(2 * math.exp(-20), rel=1e-4)
    # Of each video: its positive wants twice exp(-20), its negative is in two terms; over two clips.
    want = math.exp(-20) * math.sqrt(20.0) * torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    for gradient in (gv, gt):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("positives_twice", [False, True])
@pytest.mark.parametrize("which", ["mask", "valid", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nobody_contributes(which: str, positives_twice: bool, dtype: torch.dtype) -> None:
    options = {}
    if which != "valid":
        options["mask"] = torch.zeros(3, 2, dtype=torch.bool)
    if which != "mask":
        options["valid"] = torch.zeros(3, dtype=torch.bool)
    v, t = rand(3, 4).to(dtype), rand(6, 4, seed=1).to(dtype)
    loss, gv, gt = value_and_gradients(milnce, v, t, positives_twice=positives_twice, **options)
    assert float(loss) == 0.0
    assert not gv.any()
    assert not gt.any()


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_finite_with_masked_rows(normalize: bool) -> None:
    v, t = rand(4, 3).float(), rand(12, 3, seed=1).float()
    v[3] = 0.0
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False], [True, True, True]])
    valid = torch.tensor([True, True, True, False])
    loss, gv, gt = value_and_gradients(milnce, v, t, mask=mask, valid=valid, normalize=normalize)
    assert loss.isfinite()
    assert gv.isfinite().all()
    assert gt.isfinite().all()
    assert not gt.view(4, 3, 3)[~mask].any()


def test_large_scores_do_not_overflow() -> None:
    v, t = rand(4, 8, scale=200.0).float(), rand(8, 8, seed=1, scale=200.0).float()
    got = value_and_gradients(milnce, v, t)
    want = value_and_gradients(milnce, v.double(), t.double())
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-5)
    assert all(x.isfinite().all() for x in got)


# --- what is held ---


class Created(TorchDispatchMode):
    """Sizes of the tensors that operations create, views and results in place left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            given = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
            if result.untyped_storage().data_ptr() not in given:
                self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("masked", [False, True])
def test_the_square_of_scores_is_held_once(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "CHUNK_ELEMENTS", 100)
    b, k, d = 24, 2, 3
    v, t = rand(b, d).requires_grad_(), rand(b * k, d, seed=1).requires_grad_()
    options = {}
    if masked:
        options = {"mask": torch.rand(b, k) < 0.8, "valid": torch.rand(b) < 0.8}
        options["text_ids"] = torch.randint(0, 40, (b * k,))
    with Created() as created:
        milnce(v, t, **options).backward()
    large = sorted(size for size in created.sizes if size > b * k * d)
    assert large == [b * b * k]

    own = torch.tensor([3, 9, 17, 4])
    with Created() as created:
        milnce(v, t, own=own, **options).backward()
    large = sorted(size for size in created.sizes if size > b * k * d)
    assert large == [len(own) * b * k] * 2


def test_only_gradients_that_are_wanted_are_worked_out() -> None:
    v, t = rand(4, 3).requires_grad_(), rand(8, 3, seed=1).requires_grad_()
    with torch.no_grad(), Created() as evaluation:
        value = milnce(v, t)
    with Created() as frozen_text:
        milnce(v, t.detach())
    with Created() as both:
        wanted = milnce(v, t)
    assert not value.requires_grad and float(value) == float(wanted.detach())
    made = [(v.numel() in created.sizes, t.numel() in created.sizes) for created in (evaluation, frozen_text, both)]
    assert made == [(False, False), (True, False), (True, True)]


def test_one_tower_may_be_frozen() -> None:
    v, t = rand(4, 3), rand(8, 3, seed=1)
    for own in (None, torch.tensor([1, 3])):
        _, gv, gt = value_and_gradients(milnce, v, t, own=own)
        free = v.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(milnce(free, t, own=own), free)[0], gv)
        free = t.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(milnce(v, free, own=own), free)[0], gt)


def test_backward_twice_and_no_second_derivative() -> None:
    v = rand(4, 3).requires_grad_()
    loss = milnce(v, rand(4, 3, seed=1))
    first, second = (torch.autograd.grad(factor * loss, v, retain_graph=True)[0] for factor in (1.0, -2.0))
    torch.testing.assert_close(second, -2.0 * first, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss**2, v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- what is refused, and the words ---


@pytest.mark.parametrize(
    ("temperature", "normalize", "words"),
    [
        (0.0, False, "above 0"),
        (-1.0, True, "above 0"),
        (math.nan, False, "above 0"),
        (math.inf, False, "above 0"),
        (0.009, True, r"refused with normalize=True; allowed are 0.01 to 1"),
        (1.5, True, r"temperature=1.5 refused"),
    ],
)
def test_temperature_refused(temperature: float, normalize: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        milnce(rand(2, 3), rand(2, 3), temperature=temperature, normalize=normalize)


def test_temperature_limits_are_allowed() -> None:
    for temperature in (0.01, 1.0):
        assert milnce(rand(2, 3), rand(2, 3), temperature=temperature, normalize=True).isfinite()
    assert milnce(rand(2, 3), rand(2, 3), temperature=50.0).isfinite()
