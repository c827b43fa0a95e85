"""What all losses promise alike: who takes part, shares that add up, precision, refusals; and the ids of texts."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from torch import Tensor

from twinreel import losses
from twinreel.errors import ConfigError
from twinreel.losses import CLASS_LOSSES, LOSSES, MATCHING_LOSSES, SEGMENT_LOSSES, clip_bag, common, milnce, text_ids

MATCHING = {name for names in MATCHING_LOSSES.values() for name in names}
NAMES = [name for name, loss in LOSSES.items() if loss not in CLASS_LOSSES and name not in MATCHING]
PAIR_LOSSES = ["info_nce", "clip_bag", "binary_nce"]


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def embeddings(
    name: str, num_clips: int, num_candidates: int = 1, size: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    segments = (3,) if LOSSES[name] in SEGMENT_LOSSES else ()
    return rand(num_clips, *segments, size, seed=seed), rand(num_clips * num_candidates, size, seed=seed + 10_000)


def random_case(name: str, seed: int) -> tuple[Tensor, Tensor, dict]:
    """Masks of all kinds; what is excluded holds NaN and infinities."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    b, k = rng.randint(1, 9), rng.randint(1, 3) if name == "milnce" else 1
    v, t = embeddings(name, b, k, seed=seed)
    options: dict = {}
    if rng.random() < 0.7:
        options["mask"] = torch.rand(b, k, generator=generator) < 0.7
        t[~options["mask"].flatten()] = rng.choice([math.nan, math.inf])
    if rng.random() < 0.7:
        options["valid"] = torch.rand(b, generator=generator) < 0.8
        v[~options["valid"]] = math.nan
        t.view(b, k, -1)[~options["valid"]] = math.nan
    if rng.random() < 0.7:
        options["text_ids"] = torch.randint(0, 2 * b * k, (b * k,), generator=generator)
    if name == "milnce":
        options |= {"positives_twice": rng.random() < 0.5, "normalize": rng.random() < 0.5}
    if name == "clip_bag":
        options["pooling"] = rng.choice(["max", "attention", "logsumexp"])
    if name == "binary_nce":
        options |= {"num_negatives": rng.randint(1, 5), "negative_seed": rng.randint(0, 9)}
    return v, t, options | {"temperature": rng.choice([0.1, 0.5])}


def value_and_gradients(loss, v: Tensor, t: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    v, t = v.clone().requires_grad_(), t.clone().requires_grad_()
    value = loss(v, t, **options)
    if not value.requires_grad:  # a formula without a clip that contributes
        return value, torch.zeros_like(v), torch.zeros_like(t)
    gradients = torch.autograd.grad(value, (v, t), allow_unused=True, materialize_grads=True)
    return value.detach(), *gradients


def assert_same(got, want, tolerance: float = 1e-12) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- shares of processes ---


@pytest.mark.parametrize("chunk", [7, 2**19], ids=["small chunks", "one chunk"])
@pytest.mark.parametrize("name", NAMES)
def test_shares_of_any_partition_add_up(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "CHUNK_ELEMENTS", chunk)
    contributing = 0
    for seed in range(40):
        v, t, options = random_case(name, seed)
        whole = value_and_gradients(LOSSES[name], v, t, **options)
        assert all(part.isfinite().all() for part in whole)
        generator = torch.Generator().manual_seed(seed)
        process = torch.randint(0, 3, (len(v),), generator=generator)  # some processes may have no clip at all
        shuffled = torch.randperm(len(v), generator=generator)
        shares = [
            value_and_gradients(LOSSES[name], v, t, own=shuffled[process[shuffled] == rank], **options)
            for rank in range(3)
        ]
        assert_same([sum(parts) for parts in zip(*shares, strict=True)], whole)
        contributing += bool(whole[0])
    assert 20 <= contributing < 40  # most batches say something, some nothing


@pytest.mark.parametrize("name", NAMES)
def test_all_clips_in_any_order_are_the_whole(name: str) -> None:
    v, t, options = random_case(name, 3)
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(0))
    want = value_and_gradients(LOSSES[name], v, t, **options)
    assert_same(value_and_gradients(LOSSES[name], v, t, own=order, **options), want, tolerance=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_share_is_of_the_whole_batchs_number_of_clips(name: str) -> None:
    v, t = embeddings(name, 4)
    mask = torch.tensor([[True], [True], [False], [True]])
    terms = [float(LOSSES[name](v, t, mask=mask, own=torch.tensor([i]))) * 3 for i in range(4)]
    assert terms[2] == 0.0
    assert sum(terms) / 3 == pytest.approx(float(LOSSES[name](v, t, mask=mask)), rel=1e-12)


# --- who takes part ---


@pytest.mark.parametrize("name", ["milnce", "info_nce", "clip_bag"])
def test_excluding_a_clip_is_removing_it_whatever_it_holds(name: str) -> None:
    v, t = embeddings(name, 4)
    ids = torch.tensor([5, 6, 5, 7])
    keep = torch.tensor([True, False, True, True])
    want = value_and_gradients(LOSSES[name], v[keep], t[keep], text_ids=ids[keep])
    v[1], t[1] = math.nan, math.inf
    loss, gv, gt = value_and_gradients(LOSSES[name], v, t, valid=keep, text_ids=ids)
    assert_same((loss, gv[keep], gt[keep]), want)
    assert not gv[1].any() and not gt[1].any()


@pytest.mark.parametrize("name", ["milnce", "info_nce", "clip_bag"])
def test_a_clip_without_real_caption_gives_no_term_but_stays_a_negative(name: str) -> None:
    v, t = embeddings(name, 3)
    mask = torch.tensor([[True], [False], [True]])
    with_it, gradient, _ = value_and_gradients(LOSSES[name], v, t, mask=mask)
    without_it = LOSSES[name](v, t, mask=mask, valid=mask[:, 0])
    assert with_it > without_it and gradient[1].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", ["mask", "valid", "both"])
def test_nobody_contributes(name: str, which: str, dtype: torch.dtype) -> None:
    options = {}
    if which != "valid":
        options["mask"] = torch.zeros(3, 1, dtype=torch.bool)
    if which != "mask":
        options["valid"] = torch.zeros(3, dtype=torch.bool)
    v, t = (part.to(dtype) for part in embeddings(name, 3))
    temperature = torch.tensor(0.1, dtype=dtype, requires_grad=True)
    loss, gv, gt = value_and_gradients(LOSSES[name], v, t, temperature=temperature, **options)
    assert float(loss) == 0.0 and not gv.any() and not gt.any()
    leaves = (v.requires_grad_(), t.requires_grad_(), temperature)
    loss = LOSSES[name](v, t, temperature=temperature, **options)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))  # none is missing


@pytest.mark.parametrize("name", ["milnce", "info_nce", "clip_bag"])
def test_one_clip_alone(name: str) -> None:
    loss, gv, gt = value_and_gradients(LOSSES[name], *embeddings(name, 1))
    assert float(loss) == 0.0 and not gv.any() and not gt.any()


@pytest.mark.parametrize("name", ["milnce", "info_nce", "clip_bag"])
def test_equal_texts_everywhere_leave_no_negative(name: str) -> None:
    v, t = embeddings(name, 4)
    ids = torch.full((4,), 9)
    assert float(LOSSES[name](v, t, text_ids=ids)) == 0.0
    ids[2] = 8
    assert float(LOSSES[name](v, t, text_ids=ids)) > 0.0


@pytest.mark.parametrize("name", NAMES)
def test_different_texts_and_masks_that_hide_nothing_change_nothing(name: str) -> None:
    v, t = embeddings(name, 5)
    want = value_and_gradients(LOSSES[name], v, t)
    options = {"mask": torch.ones(5, 1).bool(), "valid": torch.ones(5).bool(), "text_ids": torch.arange(5)}
    assert_same(value_and_gradients(LOSSES[name], v, t, **options), want, tolerance=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_id_of_a_masked_caption_says_nothing(name: str) -> None:
    v, t = embeddings(name, 4)
    mask = torch.tensor([[True], [True], [False], [True]])
    ids = torch.tensor([1, 2, 1, 3])
    assert_same([LOSSES[name](v, t, mask=mask, text_ids=ids)], [LOSSES[name](v, t, mask=mask)], tolerance=0.0)
    assert LOSSES[name](v, t, text_ids=ids) != LOSSES[name](v, t)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_that_takes_part_is_not_hidden(name: str) -> None:
    for side in (0, 1):
        both = embeddings(name, 3)
        both[side][0] = math.nan
        assert LOSSES[name](*both).isnan()


# --- temperature ---


@pytest.mark.parametrize("name", NAMES)
def test_a_learned_temperature_gets_its_gradient(name: str) -> None:
    v, t = embeddings(name, 4)
    options: dict = {"mask": torch.tensor([[True], [True], [False], [True]]), "text_ids": torch.tensor([1, 2, 3, 1])}
    learned = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    leaves = (v.requires_grad_(), t.requires_grad_(), learned)
    assert torch.autograd.gradcheck(lambda v, t, p: LOSSES[name](v, t, temperature=p, **options), leaves)
    number = LOSSES[name](v, t, temperature=0.3, **options)
    assert_same([LOSSES[name](v, t, temperature=learned, **options)], [number], tolerance=0.0)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("temperature", [0.0, math.nan, -0.1])
def test_a_temperature_must_be_above_0(name: str, temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}: temperature={temperature} refused; .*must be above 0"):
        LOSSES[name](*embeddings(name, 2), temperature=temperature)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("temperature", [0.009, 1.5])
def test_a_temperature_of_unit_vectors_has_limits(name: str, temperature: float) -> None:
    words = rf"{name}: temperature={temperature} refused; allowed are 0.01 to 1.0 .*0.05 to 0.2 is a safe choice"
    with pytest.raises(ConfigError, match=words):
        LOSSES[name](*embeddings(name, 2), temperature=temperature)
    unchecked = torch.tensor(temperature, dtype=torch.float64)
    assert LOSSES[name](*embeddings(name, 2), temperature=unchecked).isfinite()


# --- precision ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        ((torch.float16, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float32, torch.float32), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_precision_is_float32_at_least(name: str, dtypes: tuple, want: torch.dtype) -> None:
    v, t = (part.to(dtype) for part, dtype in zip(embeddings(name, 3), dtypes, strict=True))
    got = LOSSES[name](v, t)
    assert got.dtype == want
    assert float(got) == pytest.approx(float(LOSSES[name](v.double(), t.double())), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name: str) -> None:
    v, t = (part.float() for part in embeddings(name, 4, size=8))
    want = value_and_gradients(LOSSES[name], v, t)
    v, t = v.requires_grad_(), t.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](v, t)
    # The backward pass belongs outside of autocast, as PyTorch advises.
    assert_same((loss, *torch.autograd.grad(loss, (v, t))), want, tolerance=0.0)


# --- what is refused, and the words ---


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_several_captions_a_clip_are_refused(name: str) -> None:
    words = rf"{name}: 2 captions a clip; it takes one. Set task.num_candidates=1, or take task.loss=milnce"
    with pytest.raises(ConfigError, match=words):
        LOSSES[name](*embeddings(name, 3, 2))


FLAGS = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": torch.ones(2, 1)}, r"mask must be bool of shape \(2, 1\), got torch.float32 of shape \(2, 1\)"),
        ({"mask": FLAGS}, r"mask must be bool of shape \(2, 1\), got torch.bool of shape \(2,\)"),
        ({"valid": FLAGS[:1]}, r"valid must be bool of shape \(2,\), got torch.bool of shape \(1,\)"),
        (
            {"text_ids": torch.ones(2)},
            r"text_ids must be int64 of shape \(2,\), got torch.float32.*twinreel.losses.text",
        ),
        ({"text_ids": torch.arange(3)}, r"text_ids must be int64 of shape \(2,\), got torch.int64 of shape \(3,\)"),
        ({"own": FLAGS}, r"own must be int64 of shape \(b,\), got torch.bool of shape \(2,\)"),
        ({"own": torch.tensor(1)}, r"own must be int64 of shape \(b,\), got torch.int64 of shape \(\)"),
        (
            {"own": torch.tensor([1, 2])},
            r"own has positions from 1 to 2 and the batch has 2 clips; positions of 0 to 1",
        ),
        ({"own": torch.tensor([-1])}, "own has positions from -1 to -1"),
        ({"own": torch.tensor([1, 1])}, "own names a clip twice"),
        (
            {"temperature": torch.ones(1)},
            r"must be one floating-point number of shape \(\), got torch.float32 of .*\(1,\)",
        ),
        ({"temperature": torch.tensor(1)}, r"must be one floating-point number of shape \(\), got torch.int64"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused(name: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*{words}"):
        LOSSES[name](*embeddings(name, 2), **options)


@pytest.mark.parametrize(
    ("v", "t", "words"),
    [
        ((2, 3), (7, 3), r"7 text embeddings for 2 clips.*multiple of 2 \(nearest: 6 or 8\)"),
        ((4, 3), (2, 3), r"2 text embeddings for 4 clips.*nearest: 4\)"),
        ((2, 3), (0, 3), "0 text embeddings for 2 clips"),
        ((0, 3), (0, 3), "the batch is empty"),
        ((2, 3), (4, 5), "video_embeddings have 3 dimensions and text_embeddings 5"),
        ((2, 3, 1), (4, 3), r"video_embeddings must be a floating-point matrix \(rows, D\), got.*\(2, 3, 1\)"),
        ((2, 3), (4,), "text_embeddings must be a floating-point matrix"),
    ],
)
def test_sizes_refused(v: tuple, t: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^milnce: {words}"):
        milnce(torch.ones(v), torch.ones(t))


@pytest.mark.parametrize(
    ("v", "words"),
    [
        ((2, 3), r"video_embeddings must be floating-point embeddings of segments \(rows, S, D\), got.*\(2, 3\)"),
        ((2, 0, 3), "the videos have 0 segments"),
        ((2, 4, 5), "video_embeddings have 5 dimensions and text_embeddings 3"),
    ],
)
def test_sizes_of_segments_refused(v: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^clip_bag: {words}"):
        clip_bag(torch.ones(v), torch.ones(2, 3))


def test_whole_numbers_refused() -> None:
    with pytest.raises(ConfigError, match=r"floating-point matrix \(rows, D\), got torch.int64"):
        milnce(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3))


# --- the table ---


def test_every_loss_is_called_alike() -> None:
    for name, loss in LOSSES.items():
        parameters = inspect.signature(loss).parameters
        wanted = ["video_embeddings", "text_embeddings", "mask", "valid", "text_ids", "own"]
        if loss in CLASS_LOSSES or name in MATCHING:
            wanted = ["logits", "targets", "valid", "own"]
        assert list(parameters)[: len(wanted)] == wanted
        assert loss.__name__ == name and name in losses.__all__
        optional = [item for item in parameters.values() if item.kind is item.KEYWORD_ONLY]
        assert len(optional) == len(parameters) - 2
        assert not [item.name for item in optional if item.default is item.empty]


# --- text_ids ---


def test_text_ids_fold_case_and_space() -> None:
    captions = [
        ["Cut the onion", "stir"],
        ["  cut  THE onion ", "whisk"],
        ["STIR", "stir!"],
        ["stra\u00dfe", "STRASSE"],
    ]
    a, stir, a_again, whisk, stir_again, stir_loudly, street, street_again = text_ids(captions).tolist()
    assert (a, stir, street) == (a_again, stir_again, street_again)
    assert len({a, stir, whisk, stir_loudly, street}) == 5


def test_text_ids_depend_on_the_text_alone() -> None:
    ids = text_ids([["stir"], ["\ud800"]])  # half a character, as broken files have it
    assert ids.dtype == torch.int64 and (ids >= 0).all()
    assert ids[0] == text_ids([["whisk", " Stir"]])[1] != ids[1]
    assert text_ids([]).shape == (0,) and text_ids([[], []]).shape == (0,)


def test_ragged_captions_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_ids: clip 1 has 1 captions and clip 0 has 2.*Pad the shorter lists"):
        text_ids([["a", "b"], ["c"]])
