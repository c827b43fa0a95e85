"""The losses of one caption a clip against their formulas, and which negatives are drawn."""

from __future__ import annotations

import math

import pytest
import torch
from test_losses import PAIR_LOSSES, assert_same, embeddings, rand, random_case, value_and_gradients
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.losses import LOSSES, binary_nce, clip_bag, info_nce, pooled_similarity

POOLINGS = ["max", "attention", "logsumexp"]


def pooled(scores: list[Tensor], pooling: str, p: float) -> Tensor:
    x = torch.stack(scores)
    if pooling == "max":
        return x.max()
    if pooling == "attention":
        return (x * (x / p).exp()).sum() / (x / p).exp().sum()
    return p * (x / p).exp().mean().log()


def naive(
    v: Tensor,
    t: Tensor,
    mask=None,
    valid=None,
    text_ids=None,
    own=None,
    temperature=0.07,
    pooling="max",
    pooling_temperature=0.1,
    num_negatives=None,
    negative_seed=0,
) -> Tensor:
    """The formulas word by word; those of binary_nce if `num_negatives` is given, with all negatives."""

    def score(i: int, j: int) -> Tensor:
        segments = v[i] if v.ndim == 3 else v[i : i + 1]
        cosines = [(s / s.norm() * t[j] / t[j].norm()).sum() for s in segments]
        return pooled(cosines, pooling, pooling_temperature) / temperature

    clips = [i for i in range(len(v)) if valid is None or valid[i]]
    captions = [j for j in clips if mask is None or mask[j, 0]]

    def negative(i: int, j: int) -> bool:
        return i != j and not (text_ids is not None and i in captions and text_ids[i] == text_ids[j])

    terms = []
    for i in captions:
        positive = score(i, i)
        texts = [score(i, j) for j in captions if negative(i, j)]
        videos = [score(j, i) for j in clips if negative(j, i)]
        if num_negatives is not None:
            rejected = [x.exp().log1p() for x in texts] or [torch.zeros_like(positive)]
            term = (-positive).exp().log1p() + sum(rejected) / len(rejected)
        else:
            term = sum(torch.stack([positive, *xs]).logsumexp(0) - positive for xs in (texts, videos)) / 2
        if own is None or i in own.tolist():
            terms.append(term)
    return sum(terms) / len(captions) if terms else v.new_zeros(())


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_value_and_gradients_equal_the_naive_formula(name: str) -> None:
    for seed in range(60):
        v, t, options = random_case(name, seed)
        if seed % 2:
            options["own"] = torch.arange(seed % 3, len(v), 2)
        if name == "binary_nce":
            options["num_negatives"] = len(v)
        if name == "clip_bag":
            options["pooling_temperature"] = 0.2
        got, want = (value_and_gradients(loss, v, t, **options) for loss in (LOSSES[name], naive))
        # What is excluded holds NaN, and the formula in loops never touches it.
        assert_same(got, want, 1e-11)


# --- by hand, two clips ---

# Unit vectors in the plane: the cosines of video i and caption j are [[1.0, 0.0], [0.6, 0.8]].
VIDEOS = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
TEXTS = torch.tensor([[2.0, 0.0], [0.0, 7.0]], dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def test_info_nce_by_hand() -> None:
    # At temperature 0.5 the scores are [[2, 0], [1.2, 1.6]]; clip 0 has row (2, 0) and column (2, 1.2), and so on.
    want = (softplus(0 - 2) + softplus(1.2 - 2) + softplus(1.2 - 1.6) + softplus(0 - 1.6)) / 4
    assert float(info_nce(VIDEOS, TEXTS, temperature=0.5)) == pytest.approx(want, rel=1e-14)
    first = info_nce(VIDEOS, TEXTS, temperature=0.5, own=torch.tensor([0]))
    assert float(first) == pytest.approx((softplus(0 - 2) + softplus(1.2 - 2)) / 4, rel=1e-14)
    # Without caption 1, clip 1 has no term; its video is a negative of caption 0.
    masked = info_nce(VIDEOS, TEXTS, temperature=0.5, mask=torch.tensor([[True], [False]]))
    assert float(masked) == pytest.approx(softplus(1.2 - 2) / 2, rel=1e-14)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("max", max),
        ("attention", lambda a, b: (a * math.exp(2 * a) + b * math.exp(2 * b)) / (math.exp(2 * a) + math.exp(2 * b))),
        ("logsumexp", lambda a, b: math.log((math.exp(2 * a) + math.exp(2 * b)) / 2) / 2),
    ],
)
def test_clip_bag_by_hand(pooling: str, pool) -> None:
    # The segments of video 0 are both of VIDEOS, those of video 1 are (0, 1) and (0.6, 0.8).
    segments = torch.stack([VIDEOS, torch.tensor([[0.0, 5.0], [0.6, 0.8]], dtype=torch.float64)])
    x = [[2 * pool(1.0, 0.6), 2 * pool(0.0, 0.8)], [2 * pool(0.0, 0.6), 2 * pool(1.0, 0.8)]]
    rows = softplus(x[0][1] - x[0][0]) + softplus(x[1][0] - x[1][1])
    columns = softplus(x[1][0] - x[0][0]) + softplus(x[0][1] - x[1][1])
    got = clip_bag(segments, TEXTS, pooling=pooling, pooling_temperature=0.5, temperature=0.5)
    assert float(got) == pytest.approx((rows + columns) / 4, rel=1e-14)


def test_binary_nce_by_hand() -> None:
    want = (softplus(-2) + softplus(0) + softplus(-1.6) + softplus(1.2)) / 2
    assert float(binary_nce(VIDEOS, TEXTS, temperature=0.5)) == pytest.approx(want, rel=1e-14)
    equal = binary_nce(VIDEOS, TEXTS, temperature=0.5, text_ids=torch.tensor([4, 4]))
    assert float(equal) == pytest.approx((softplus(-2) + softplus(-1.6)) / 2, rel=1e-14)
    alone = binary_nce(VIDEOS, TEXTS, temperature=0.5, valid=torch.tensor([True, False]))
    assert float(alone) == pytest.approx(softplus(-2), rel=1e-14)


@pytest.mark.parametrize("loss", [info_nce, binary_nce])
def test_small_losses_keep_their_digits_in_float32(loss) -> None:
    # Opposite pairs: cosines 1 and -1, scores 20 and -20.
    unit = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    want = math.exp(-40) if loss is info_nce else 2 * math.exp(-20)
    assert float(loss(unit, unit, temperature=0.05)) == pytest.approx(want, rel=1e-4)


# --- pooling ---


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooled_similarity_against_loops(pooling: str) -> None:
    segments, texts = rand(4, 3, 5), rand(6, 5, seed=1)
    got = pooled_similarity(segments, texts, pooling=pooling, pooling_temperature=0.7)
    want = [[pooled([(s * text).sum() for s in video], pooling, 0.7) for text in texts] for video in segments]
    torch.testing.assert_close(got, torch.stack([torch.stack(row) for row in want]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_equal_segments_is_one_segment(pooling: str) -> None:
    video, texts = rand(2, 1, 5), rand(3, 5, seed=1)
    for repeated in (video, video.expand(-1, 4, -1)):
        got = pooled_similarity(repeated, texts, pooling=pooling)
        torch.testing.assert_close(got, video[:, 0] @ texts.T, rtol=1e-12, atol=1e-12)
    assert pooled_similarity(video[:0], texts, pooling=pooling).shape == (0, 3)
    assert pooled_similarity(video, texts[:0], pooling=pooling).shape == (2, 0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_cold_pooling_is_the_maximum(pooling: str) -> None:
    segments, texts = functional.normalize(rand(4, 3, 5), dim=2), functional.normalize(rand(6, 5, seed=1), dim=1)
    got = pooled_similarity(segments, texts, pooling=pooling, pooling_temperature=1e-5)
    torch.testing.assert_close(got, (segments @ texts.T).amax(1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("own", [None, torch.tensor([3, 1])], ids=["all", "own"])
def test_a_bag_of_one_segment_is_info_nce(pooling: str, own: Tensor | None) -> None:
    v, t = embeddings("info_nce", 5)
    options = {"own": own, "valid": torch.tensor([True, True, False, True, True])}
    loss, gv, gt = value_and_gradients(clip_bag, v[:, None], t, pooling=pooling, **options)
    assert_same((loss, gv[:, 0], gt), value_and_gradients(info_nce, v, t, **options))


# --- negatives that are drawn ---


def negatives_of(clip: int, num_clips: int = 9, seed: int = 0, **options) -> set[int]:
    """What clip `clip` is compared with: the captions that its term gives a gradient."""
    v, t = embeddings("binary_nce", num_clips, seed=seed)
    _, _, gradient = value_and_gradients(binary_nce, v, t, own=torch.tensor([clip]), **options)
    compared = set(gradient.any(dim=1).nonzero().flatten().tolist())
    assert clip in compared or not compared
    return compared - {clip}


def test_negatives_are_of_other_clips_that_take_part_and_say_something_else() -> None:
    mask = torch.tensor([[i != 4] for i in range(9)])
    valid = torch.tensor([i != 7 for i in range(9)])
    ids = torch.tensor([1, 2, 3, 1, 1, 4, 5, 6, 2])
    options = {"mask": mask, "valid": valid, "text_ids": ids}
    assert negatives_of(0, num_negatives=99, **options) == {1, 2, 5, 6, 8}
    assert negatives_of(1, num_negatives=5, **options) == {0, 2, 3, 5, 6}
    assert negatives_of(4, **options) == negatives_of(7, **options) == set()
    for seed in range(20):
        drawn = negatives_of(0, num_negatives=3, negative_seed=seed, **options)
        assert len(drawn) == 3 and drawn < {1, 2, 5, 6, 8}


def test_negatives_depend_on_seed_and_position_alone() -> None:
    drawn = [negatives_of(2, num_negatives=3, negative_seed=7, seed=seed) for seed in (0, 1)]  # other embeddings
    assert drawn[0] == drawn[1]
    assert len({frozenset(negatives_of(2, num_negatives=3, negative_seed=seed)) for seed in range(20)}) > 10
    assert len({frozenset(negatives_of(clip, num_negatives=3)) for clip in range(9)}) > 5


def test_every_negative_is_drawn_about_as_often() -> None:
    v, t = embeddings("binary_nce", 6)
    counts = torch.zeros(6)
    for seed in range(300):
        gradient = value_and_gradients(binary_nce, v, t, num_negatives=2, negative_seed=seed, own=torch.tensor([1]))[2]
        counts += gradient.any(dim=1)
    assert counts[1] == 300 and counts.sum() == 900
    others = counts[[0, 2, 3, 4, 5]]  # 120 expected, standard deviation 8.5
    assert ((others - 120).abs() < 40).all()


# --- what is refused, and the words ---


def test_options_refused() -> None:
    v, t = embeddings("clip_bag", 2)
    with pytest.raises(ConfigError, match="clip_bag: pooling='mean' is unknown; there are: max, attention, logsumexp"):
        clip_bag(v, t, pooling="mean")
    for temperature in (0.0, math.nan):
        with pytest.raises(ConfigError, match=rf"clip_bag: pooling_temperature={temperature} refused; .*above 0"):
            clip_bag(v, t, pooling_temperature=temperature)
    with pytest.raises(ConfigError, match="binary_nce: num_negatives=0 refused; a clip needs at least 1"):
        binary_nce(v[:, 0], t, num_negatives=0)


@pytest.mark.parametrize(
    ("segments", "texts"), [((2, 3), (2, 3)), ((2, 0, 3), (2, 3)), ((2, 4, 3), (2, 5)), ((2, 4, 3), (3,))]
)
def test_pooled_similarity_refuses_shapes(segments: tuple, texts: tuple) -> None:
    with pytest.raises(
        ConfigError, match=rf"pooled_similarity: got video segments of shape \({segments[0]}, .*\(N, S, D\)"
    ):
        pooled_similarity(torch.ones(segments), torch.ones(texts))
    with pytest.raises(ConfigError, match="pooled_similarity: pooling='sum' is unknown"):
        pooled_similarity(torch.ones(2, 4, 3), torch.ones(2, 3), pooling="sum")
