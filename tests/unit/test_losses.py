from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from twinreel.errors import ConfigError
from twinreel.losses import equal_texts, milnce


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def naive(
    v: Tensor, t: Tensor, mask=None, valid=None, same_text=None, positives_twice=False, normalize=False, temperature=1.0
) -> Tensor:
    """The formula word by word, one pair at a time."""
    num_clips = len(v)
    num_candidates = len(t) // num_clips

    def score(i: int, j: int, k: int) -> Tensor:
        a, b = v[i], t[j * num_candidates + k]
        if normalize:
            a, b = a / a.norm(), b / b.norm()
        return (a * b).sum() / temperature

    def takes_part(i: int, j: int, k: int) -> bool:
        if valid is not None and not (valid[i] and valid[j]):
            return False
        if mask is not None and not mask[j, k]:
            return False
        return not (same_text is not None and i != j and same_text[i, j * num_candidates + k])

    losses = []
    for i in range(num_clips):
        own = [score(i, i, k) for k in range(num_candidates) if takes_part(i, i, k)]
        if not own:
            continue
        terms = list(own) * (2 if positives_twice else 1)
        for j in range(num_clips):
            for k in range(num_candidates):
                if j != i and takes_part(i, j, k):
                    terms.append(score(i, j, k))
                if j != i and takes_part(j, i, k):
                    terms.append(score(j, i, k))
        losses.append(torch.stack(terms).logsumexp(0) - torch.stack(own).logsumexp(0))
    return torch.stack(losses).mean() if losses else v.new_zeros(())


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
        options["same_text"] = flags(b, b * k, share=0.3)
    return rand(b, d, seed=seed), rand(b * k, d, seed=seed + 10_000), options


def value_and_gradients(loss, v: Tensor, t: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    v, t = v.clone().requires_grad_(), t.clone().requires_grad_()
    value = loss(v, t, **options)
    if not value.requires_grad:  # the oracle without a contributing clip
        return value, torch.zeros_like(v), torch.zeros_like(t)
    gv, gt = torch.autograd.grad(value, (v, t), allow_unused=True)
    return value.detach(), torch.zeros_like(v) if gv is None else gv, torch.zeros_like(t) if gt is None else gt


def assert_same(got, want, tolerance: float = 1e-11) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- against the formula ---


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 120, 20)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_value_and_gradients_equal_the_naive_formula(seeds: range) -> None:
    for seed in seeds:
        v, t, options = random_case(seed)
        assert_same(value_and_gradients(milnce, v, t, **options), value_and_gradients(naive, v, t, **options))


def test_random_cases_cover_what_they_should() -> None:
    cases = [random_case(seed) for seed in range(120)]
    nobody = [c for c in cases if not naive(c[0], c[1], **c[2])]
    assert 3 <= len(nobody) <= 60  # some batches in which no clip contributes, or a clip alone
    assert any(len({"mask", "valid", "same_text"} & set(c[2])) == 3 for c in cases)


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

    # Caption 2 (of clip 1) says what a caption of clip 0 says: it leaves the row of clip 0 and the column of clip 1.
    same = torch.zeros(2, 4, dtype=torch.bool)
    same[0, 2] = True
    want = (
        math.log((positives[0] + e(0.5) + column[0]) / positives[0])
        + math.log((positives[1] + row[1] + e(0.5)) / positives[1])
    ) / 2
    assert float(milnce(v, t, same_text=same)) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("positives_twice", [False, True])
def test_gradcheck_with_all_masks(positives_twice: bool) -> None:
    mask = torch.tensor([[True, False], [True, True], [False, False], [True, True]])
    valid = torch.tensor([True, True, True, False])
    same = torch.zeros(4, 8, dtype=torch.bool)
    same[0, 2] = same[1, 0] = True
    v, t = rand(4, 3).requires_grad_(), rand(8, 3, seed=1).requires_grad_()

    def loss(v: Tensor, t: Tensor) -> Tensor:
        return milnce(
            v,
            t,
            mask=mask,
            valid=valid,
            same_text=same,
            positives_twice=positives_twice,
            normalize=True,
            temperature=0.2,
        )

    assert torch.autograd.gradcheck(loss, (v, t))


# --- properties ---


def test_order_of_clips_and_of_candidates_does_not_matter() -> None:
    v, t = rand(5, 4), rand(15, 4, seed=1)
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(2)) < 0.7
    same = torch.rand(5, 15, generator=torch.Generator().manual_seed(3)) < 0.2
    want = milnce(v, t, mask=mask, same_text=same)
    clips = torch.randperm(5, generator=torch.Generator().manual_seed(4))
    inside = torch.randperm(3, generator=torch.Generator().manual_seed(5))
    columns = (clips[:, None] * 3 + inside[None, :]).flatten()
    got = milnce(v[clips], t[columns], mask=mask[clips][:, inside], same_text=same[clips][:, columns])
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


def test_same_text_never_removes_a_positive() -> None:
    v, t = rand(3, 3), rand(6, 3, seed=1)
    own = torch.eye(3, dtype=torch.bool).repeat_interleave(2, dim=1)
    torch.testing.assert_close(milnce(v, t, same_text=own), milnce(v, t), rtol=0, atol=0)
    everything = torch.ones(3, 6, dtype=torch.bool)
    assert float(milnce(v, t, same_text=everything)) == 0.0  # no negative is left


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
    assert float(milnce(embeddings, embeddings)) == pytest.approx(2 * math.exp(-20), rel=1e-4)


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


def test_a_nan_that_takes_part_is_not_hidden() -> None:
    v, t = rand(3, 4), rand(3, 4, seed=1)
    v[0, 0] = math.nan
    assert milnce(v, t).isnan()


# --- precision ---


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        ((torch.float16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float32, torch.float32), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_precision_is_float32_at_least(dtypes: tuple[torch.dtype, torch.dtype], want: torch.dtype) -> None:
    v, t = rand(3, 4).to(dtypes[0]), rand(6, 4, seed=1).to(dtypes[1])
    got = milnce(v, t)
    assert got.dtype == want
    assert float(got) == pytest.approx(float(milnce(v.double(), t.double())), rel=1e-6)


def test_autocast_changes_nothing() -> None:
    v, t = rand(4, 8).float(), rand(8, 8, seed=1).float()
    want = value_and_gradients(milnce, v, t)
    v, t = v.requires_grad_(), t.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = milnce(v, t)
    # The backward pass belongs outside of autocast, as PyTorch advises.
    assert_same((loss, *torch.autograd.grad(loss, (v, t))), want, tolerance=0.0)


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


@pytest.mark.parametrize(
    ("v", "t", "options", "words"),
    [
        ((2, 3), (7, 3), {}, r"7 text embeddings for 2 clips.*multiple of 2 \(nearest: 6 or 8\)"),
        ((4, 3), (2, 3), {}, r"2 text embeddings for 4 clips.*nearest: 4\)"),
        ((2, 3), (0, 3), {}, "0 text embeddings for 2 clips"),
        ((0, 3), (0, 3), {}, "the batch is empty"),
        ((2, 3), (4, 5), {}, "video_embeddings have 3 dimensions and text_embeddings 5"),
        ((2, 3, 1), (4, 3), {}, r"video_embeddings must be a floating-point matrix.*\(2, 3, 1\)"),
        ((2, 3), (4,), {}, "text_embeddings must be a floating-point matrix"),
        ((2, 3), (4, 3), {"mask": torch.ones(2, 2)}, r"mask must be bool of shape \(2, 2\), got torch.float32"),
        (
            (2, 3),
            (4, 3),
            {"mask": torch.ones(4, dtype=torch.bool)},
            r"mask must be bool.*got torch.bool of shape \(4,\)",
        ),
        ((2, 3), (4, 3), {"valid": torch.ones(3, dtype=torch.bool)}, r"valid must be bool of shape \(2,\)"),
        (
            (2, 3),
            (4, 3),
            {"same_text": torch.ones(2, 2, dtype=torch.bool)},
            r"same_text must be bool of shape \(2, 4\)",
        ),
    ],
)
def test_shapes_refused(v: tuple, t: tuple, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        milnce(torch.ones(v), torch.ones(t), **options)


def test_whole_numbers_refused() -> None:
    with pytest.raises(ConfigError, match=r"floating-point matrix \(rows, D\), got torch.int64"):
        milnce(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3))


# --- equal_texts ---


def test_equal_texts_folds_case_and_space() -> None:
    captions = [
        ["Cut the onion", "stir"],
        ["  cut  THE onion ", "whisk"],
        ["STIR", "stir"],
        ["stir!", "cut the\tonion"],
    ]
    got = equal_texts(captions)
    want = torch.tensor(
        [
            [0, 0, 1, 0, 1, 1, 0, 1],
            [1, 0, 0, 0, 0, 0, 0, 1],
            [0, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0, 0, 0],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(got, want)


def test_equal_texts_leaves_out_masked_captions() -> None:
    captions = [["a", ""], ["a", ""], ["", "a"]]
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    want = torch.zeros(3, 6, dtype=torch.bool)
    want[0, 2] = want[1, 0] = True
    assert torch.equal(equal_texts(captions, mask), want)


def test_equal_texts_against_all_pairs() -> None:
    rng = random.Random(0)
    for _ in range(30):
        b, k = rng.randint(1, 6), rng.randint(1, 3)
        captions = [[rng.choice("abcDd") for _ in range(k)] for _ in range(b)]
        mask = torch.tensor([[rng.random() < 0.8 for _ in range(k)] for _ in range(b)])
        got = equal_texts(captions, mask)
        for i in range(b):
            own = {captions[i][k_].lower() for k_ in range(k) if mask[i, k_]}
            for c in range(b * k):
                j, k_ = divmod(c, k)
                assert bool(got[i, c]) == (i != j and bool(mask[j, k_]) and captions[j][k_].lower() in own)


def test_equal_texts_end_to_end() -> None:
    # Four clips of two labels: with the equal captions taken out, the loss is that of telling the labels apart.
    captions = [["a person is running"], ["a person is jumping"], ["a person is running"], ["a person is jumping"]]
    embeddings = 10 * torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 2)
    assert float(milnce(embeddings, embeddings, same_text=equal_texts(captions))) < 1e-6
    assert float(milnce(embeddings, embeddings)) > 1.0


def test_equal_texts_refuses_ragged_lists_and_wrong_masks() -> None:
    with pytest.raises(ConfigError, match="clip 1 has 1 captions and clip 0 has 2"):
        equal_texts([["a", "b"], ["c"]])
    with pytest.raises(ConfigError, match=r"equal_texts: mask must be bool of shape \(1, 2\)"):
        equal_texts([["a", "b"]], torch.ones(2, 1, dtype=torch.bool))
    assert equal_texts([]).shape == (0, 0)
