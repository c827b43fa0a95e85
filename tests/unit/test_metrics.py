from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twinreel.errors import ConfigError, DataError
from twinreel.metrics import (
    chance_retrieval,
    embedding_ranks,
    mean_rank,
    median_rank,
    recall_at_k,
    recall_from_ranks,
    retrieval_metrics,
    retrieval_ranks,
    top_k_accuracy,
)

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(similarity: list[list[float]], positives: list[list[int]]) -> list[int]:
    """Put every candidate in its worst place and look where the first positive stands."""
    ranks = []
    for scores, own in zip(similarity, positives, strict=True):
        order = sorted(range(len(scores)), key=lambda c: (-scores[c], c in own))
        ranks.append(1 + next(place for place, c in enumerate(order) if c in own))
    return ranks


def expected_oracle(scores: list[float], own: list[int]) -> float:
    """The mean over all orders of the candidates that are sorted by score."""
    ranks = []
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            ranks.append(1 + next(place for place, c in enumerate(order) if c in own))
    return statistics.mean(ranks)


def random_case(seed: int, most: int = 12) -> tuple[Tensor, list[list[int]]]:
    """A rectangle of few distinct scores (many ties), or of many, with one or several positives a query."""
    rng = random.Random(seed)
    num_queries, num_candidates = rng.randint(1, most), rng.randint(1, most)
    levels = rng.choice([1, 2, 4, 1000])
    values = [[rng.randrange(levels) / 4 - 1 for _ in range(num_candidates)] for _ in range(num_queries)]
    positives = [rng.sample(range(num_candidates), rng.randint(1, min(4, num_candidates))) for _ in range(num_queries)]
    return torch.tensor(values), positives


# --- ranks ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ranks_equal_the_oracle_on_200_random_cases(dtype: torch.dtype) -> None:
    tied = several = 0
    for seed in range(200):
        similarity, positives = random_case(seed)
        similarity = similarity.to(dtype)
        got = retrieval_ranks(similarity, positives)
        assert got.dtype == torch.float64
        assert got.tolist() == oracle(similarity.tolist(), positives), seed
        tied += bool((retrieval_ranks(similarity, positives, ties="expected") < got).any())
        several += any(len(own) > 1 for own in positives)
    assert tied > 50
    assert several > 100


def test_expected_ranks_equal_the_mean_over_all_orders() -> None:
    for seed in range(40):
        similarity, positives = random_case(seed, most=6)
        got = retrieval_ranks(similarity, positives, ties="expected").tolist()
        want = [expected_oracle(row, own) for row, own in zip(similarity.tolist(), positives, strict=True)]
        assert got == pytest.approx(want, rel=1e-12)


def whole_ranks(similarity: Tensor, positives: list[list[int]], ties: str) -> Tensor:
    """The same ranks from comparisons of the whole matrix, in float64."""
    similarity = similarity.double()
    best = torch.stack([row[own].max() for row, own in zip(similarity, positives, strict=True)])[:, None]
    tied = torch.stack([(row[own] == row[own].max()).sum() for row, own in zip(similarity, positives, strict=True)])
    at_least, above = (similarity >= best).sum(1) - tied, (similarity > best).sum(1)
    return 1.0 + at_least.double() if ties == "pessimistic" else 1.0 + above + (at_least - above) / (tied + 1).double()


@pytest.mark.parametrize("ties", ["pessimistic", "expected"])
@pytest.mark.parametrize("block_scores", [1, 20, 1 << 20])
def test_ranks_in_blocks_equal_those_of_the_whole_matrix(
    block_scores: int, ties: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinreel.metrics.retrieval.BLOCK_SCORES", block_scores)
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64] * 12):
        similarity, positives = random_case(seed, most=30)
        if seed % 3:  # not in steps of a quarter, so that a type of few bits rounds
            similarity = similarity + torch.randn(similarity.shape, generator=torch.Generator().manual_seed(seed))
        similarity = similarity.to(dtype)
        assert torch.equal(retrieval_ranks(similarity, positives, ties=ties), whole_ranks(similarity, positives, ties))
        columns_first = similarity.T.contiguous().T
        assert torch.equal(
            retrieval_ranks(columns_first, positives, ties=ties), whole_ranks(similarity, positives, ties)
        )


class LargestNew(TorchDispatchMode):
    """Remembers the most bytes of a tensor that an operation made; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_make_nothing_of_the_size_of_the_matrix(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinreel.metrics.retrieval.BLOCK_SCORES", 3000)
    similarity = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    with LargestNew() as largest:
        retrieval_ranks(similarity, [[i] for i in range(300)], ties="expected")
    assert largest.bytes == 3000  # a flag a score of a block; the flags of the whole matrix would be 300 000
    with LargestNew() as largest:
        top_k_accuracy(similarity, list(range(300)), 5)
    assert largest.bytes == 3000


@pytest.mark.parametrize("ties", ["pessimistic", "expected"])
@pytest.mark.parametrize("block_size", [1, 3, 5, 1024])
def test_embedding_ranks_equal_the_full_matrix(block_size: int, ties: str) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        q, c, d = rng.randint(1, 12), rng.randint(1, 12), rng.choice([1, 2, 33])
        if seed % 2:  # whole numbers: scores are exact, so ties between different embeddings are exact too
            queries, candidates = (torch.randint(-2, 3, (n, d), generator=generator).double() for n in (q, c))
        else:
            queries, candidates = (torch.randn(n, d, generator=generator) for n in (q, c))
        positives = [rng.sample(range(c), rng.randint(1, min(3, c))) for _ in range(q)]
        got = embedding_ranks(queries, candidates, positives, block_size=block_size, ties=ties)
        want = retrieval_ranks(queries.double() @ candidates.double().T, positives, ties=ties)
        assert torch.equal(got, want), seed


@pytest.mark.parametrize("block_size", [7, 64, 100, 1024])
def test_equal_embeddings_tie_in_every_block(block_size: int) -> None:
    # Ten videos, each stored 13 times, scattered over the blocks: a rank is 1 + 13 * (better videos) + 12 twins.
    generator = torch.Generator().manual_seed(0)
    distinct, queries = torch.randn(10, 301, generator=generator), torch.randn(90, 301, generator=generator)
    place = torch.randperm(130, generator=generator)
    candidates = distinct.repeat(13, 1)[place]
    right = torch.randint(130, (90,), generator=generator)
    got = embedding_ranks(queries, candidates, right[:, None].tolist(), block_size=block_size)
    scores = queries.double() @ distinct.double().T
    better = (scores > scores.gather(1, (place[right] % 10)[:, None])).sum(1)
    assert torch.equal(got, (1 + 13 * better + 12).double())


def test_scores_equal_but_for_rounding_tie() -> None:
    # The same products in another order: equal by algebra, often not in the last bit.
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 500, generator=generator)
    query = torch.cat([half, half], dim=1)
    first = torch.randn(200, 500, generator=generator)
    second = torch.randn(200, 500, generator=generator)
    a, b = torch.cat([first, second], dim=1), torch.cat([second, first], dim=1)
    for i in range(200):
        assert embedding_ranks(query, torch.cat([a[i : i + 1], b[i : i + 1]]), [[0]]).item() == 2
        assert embedding_ranks(query, torch.cat([a[i : i + 1], b[i : i + 1]]), [[0]], ties="expected").item() == 1.5


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e20])
def test_a_collapsed_model_is_at_or_below_chance(scale: float) -> None:
    embedding = scale * torch.randn(1, 77, generator=torch.Generator().manual_seed(0))
    queries, candidates = embedding.repeat(50, 1), embedding.repeat(40, 1)
    positives = [[i % 40] for i in range(50)]
    for block_size in (7, 1024):
        ranks = embedding_ranks(queries, candidates, positives, block_size=block_size)
        assert ranks.tolist() == [40.0] * 50
        assert retrieval_metrics(ranks)["recall_at_1"] == 0.0 <= chance_retrieval(positives, 40)["recall_at_1"]
    constant = torch.full((50, 40), 0.25)
    assert recall_at_k(constant, positives, 1) == recall_at_k(constant, positives, 10) == 0.0
    assert retrieval_ranks(constant, positives, ties="expected").tolist() == [20.5] * 50


def test_one_rank_per_query_when_scores_tie_with_the_diagonal() -> None:  # B074
    similarity = torch.tensor([[0.9, 0.9, 0.1], [0.2, 0.8, 0.8], [0.1, 0.2, 0.7]])
    ranks = retrieval_ranks(similarity, [[0], [1], [2]])
    assert ranks.tolist() == [2, 2, 1]
    assert recall_from_ranks(ranks, 1) == pytest.approx(1 / 3)
    assert retrieval_ranks(similarity, [[0], [1], [2]], ties="expected").tolist() == [1.5, 1.5, 1]


def test_one_two_and_three_captions_a_video_by_hand() -> None:  # B076
    # Captions 0 | 1 2 | 3 4 5 belong to videos 0 | 1 | 2.
    text_to_video = torch.tensor(
        [
            [0.9, 0.1, 0.2],  # 1
            [0.3, 0.8, 0.1],  # 1
            [0.7, 0.2, 0.4],  # 3: videos 0 and 2 are better
            [0.1, 0.5, 0.6],  # 1
            [0.4, 0.4, 0.4],  # 3: two ties
            [0.2, 0.9, 0.3],  # 2
        ]
    )
    owner = [0, 1, 1, 2, 2, 2]
    ranks = retrieval_ranks(text_to_video, [[video] for video in owner])
    assert ranks.tolist() == [1, 1, 3, 1, 3, 2]
    assert retrieval_metrics(ranks, num_candidates=3) == {
        "recall_at_1": 0.5,
        "median_rank": 1.5,
        "mean_rank": pytest.approx(11 / 6),
    }
    # The other direction: a video's rank is that of its best own caption.
    # Video 0: caption 0 (0.9) first. Video 1: caption 1 (0.8) behind caption 5 (0.9). Video 2: caption 3 (0.6) first.
    back = retrieval_ranks(text_to_video.T, [[0], [1, 2], [3, 4, 5]])
    assert back.tolist() == [1, 2, 1]
    assert retrieval_metrics(back, num_candidates=6) == {
        "recall_at_1": pytest.approx(2 / 3),
        "recall_at_5": 1.0,
        "median_rank": 1.0,
        "mean_rank": pytest.approx(4 / 3),
    }


def test_own_captions_do_not_push_each_other_down() -> None:
    assert retrieval_ranks(torch.tensor([[3.0, 3.0, 2.0, 1.0]]), [[0, 1, 2]]).tolist() == [1]
    assert embedding_ranks(torch.ones(1, 2), torch.ones(4, 2), [[0, 1, 2]], block_size=2).tolist() == [2]


def test_ranks_keep_nothing_for_a_backward_pass() -> None:
    queries, candidates = torch.ones(2, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    similarity = queries @ candidates.T

    def saved(tensor: Tensor) -> Tensor:
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} was kept")

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        embedding_ranks(queries, candidates, [[0], [1]])
        retrieval_ranks(similarity, [[0], [1]], ties="expected")


# --- what is refused, and the words ---


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_score_that_is_not_finite_is_named(value: float) -> None:
    similarity = torch.eye(3)
    similarity[1, 2] = value
    names = {"query_ids": ["q-a", "q-b", "q-c"], "candidate_ids": ["v-a", "v-b", "v-c"]}
    with pytest.raises(
        DataError, match=rf"1 of 9 scores are not finite \(first query 'q-b' with candidate 'v-c': {value}"
    ):
        retrieval_ranks(similarity, [[0], [1], [2]], **names)
    with pytest.raises(DataError, match="first query at position 1 with candidate at position 2"):
        recall_at_k(similarity, [[0], [1], [2]], 1)
    similarity[1] = value
    with pytest.raises(DataError, match=r"3 of 9 scores are not finite \(all scores of query 'q-b'\)"):
        retrieval_ranks(similarity, [[0], [1], [2]], **names)
    similarity[:, 0] = value
    with pytest.raises(DataError, match="all scores of query 'q-b'; all scores of candidate 'v-a'"):
        retrieval_ranks(similarity, [[0], [1], [2]], **names)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e200])
def test_an_embedding_that_is_not_finite_is_named(value: float) -> None:
    good, bad = torch.eye(9, dtype=torch.float64), torch.eye(9, dtype=torch.float64)
    bad[3, 1] = value
    positives = [[i] for i in range(9)]
    ids = [f"clip{i}" for i in range(9)]
    with pytest.raises(DataError, match=r"1 of 9 query embeddings are not finite .*: 'clip3'\. No rank"):
        embedding_ranks(bad, good, positives, query_ids=ids, block_size=2)
    with pytest.raises(DataError, match=r"1 of 9 candidate embeddings are not finite .*: at position 3\."):
        embedding_ranks(good, bad, positives, block_size=2)
    bad[:, 1] = value
    with pytest.raises(DataError, match=r"9 of 9 .*: 'clip0', 'clip1', 'clip2', 'clip3', 'clip4' and 4 more\."):
        embedding_ranks(bad, good, positives, query_ids=ids)


@pytest.mark.parametrize(
    ("positives", "words"),
    [
        ([[0], [], [2]], "query 'b' has no positive candidate"),
        ([[0], [1], [3]], r"query 'c' has positives \[3\]; allowed are 0 to 2"),
        ([[0], [-1], [2]], r"query 'b' has positives \[-1\]"),
        ([[0, 0], [1], [2]], r"query 'a' lists a positive more than once: \[0, 0\]"),
        ([[0], [1.0], [2]], r"query 'b' has positives \[1.0\]; they must be whole numbers"),
        ([[0], 1, [2]], "query 'b' has positives 1; they must be whole numbers, a list a query"),
        ([[0], [1]], "positives has 2 entries for 3 queries"),
    ],
)
def test_wrong_positives_are_refused(positives: list, words: str) -> None:
    for ranks in (
        lambda **k: retrieval_ranks(torch.eye(3), **k),
        lambda **k: embedding_ranks(*[torch.eye(3)] * 2, **k),
    ):
        with pytest.raises(ConfigError, match=words):
            ranks(positives=positives, query_ids=["a", "b", "c"])


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(queries, candidates\), got shape \(3,\)"):
        retrieval_ranks(torch.ones(3), [[0]])
    with pytest.raises(ConfigError, match="there are no candidates"):
        retrieval_ranks(torch.ones(1, 0), [[0]])
    with pytest.raises(ConfigError, match="0 entries for 0 queries"):
        retrieval_ranks(torch.ones(0, 2), [])
    with pytest.raises(ConfigError, match="ties='optimistic': allowed are"):
        retrieval_ranks(torch.eye(2), [[0], [1]], ties="optimistic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="query_ids has 1 names for 2 rows"):
        retrieval_ranks(torch.eye(2), [[0], [1]], query_ids=["a"])
    with pytest.raises(ConfigError, match="candidate_ids has 3 names for 2 rows"):
        embedding_ranks(torch.eye(2), torch.eye(2), [[0], [1]], candidate_ids=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"got torch.float32 \(2, 2\) and torch.float32 \(3, 3\)"):
        embedding_ranks(torch.eye(2), torch.eye(3), [[0], [1]])
    with pytest.raises(ConfigError, match="must be floating-point"):
        embedding_ranks(torch.ones(2, 2, dtype=torch.long), torch.eye(2), [[0], [1]])
    with pytest.raises(ConfigError, match="block_size=0"):
        embedding_ranks(torch.eye(2), torch.eye(2), [[0], [1]], block_size=0)


# --- summaries ---


def test_recall_median_and_mean_by_hand() -> None:
    ranks = torch.tensor([11.0, 1.0, 6.0, 2.0])
    assert retrieval_metrics(ranks) == {
        "recall_at_1": 0.25,
        "recall_at_5": 0.5,
        "recall_at_10": 0.75,
        "median_rank": 4.0,
        "mean_rank": 5.0,
    }
    assert median_rank(torch.tensor([3, 1, 2])) == 2.0
    assert mean_rank(torch.tensor([1, 2])) == 1.5
    assert recall_from_ranks(torch.tensor([1.5, 2.0]), 1) == 0.0


def test_median_and_mean_equal_the_statistics_module() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        ranks = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 9))]
        assert median_rank(torch.tensor(ranks)) == statistics.median(ranks)
        assert mean_rank(torch.tensor(ranks)) == pytest.approx(statistics.mean(ranks))


def test_public_door() -> None:
    # Two sentences, one video: each finds it.
    text, video = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 1.0]])
    assert recall_at_k(text @ video.T, positives=[[0], [0]], k=1) == 1.0


def test_k_beyond_the_candidates_is_refused_or_left_out() -> None:
    with pytest.raises(ConfigError, match=r"k=5 with 3 candidates: .* Use k <= 3"):
        recall_at_k(torch.eye(3), [[0], [1], [2]], 5)
    assert recall_at_k(torch.eye(3), [[0], [1], [2]], 3) == 1.0
    with pytest.raises(ConfigError, match="k=0: must be at least 1"):
        recall_at_k(torch.eye(3), [[0], [1], [2]], 0)
    with pytest.raises(ConfigError, match="k=-1"):
        recall_from_ranks(torch.ones(2), -1)
    ranks = torch.tensor([1.0, 7.0])
    assert set(retrieval_metrics(ranks, num_candidates=7)) == {"recall_at_1", "recall_at_5", "median_rank", "mean_rank"}
    assert "recall_at_10" in retrieval_metrics(ranks, num_candidates=10)
    with pytest.raises(ConfigError, match="a rank of 7 among num_candidates=6 is impossible"):
        retrieval_metrics(ranks, num_candidates=6)


@pytest.mark.parametrize("ranks", [[], [[1.0]], [1.0, NAN], [1.0, INF], [0.0]])
def test_ranks_that_cannot_be_are_refused(ranks: list) -> None:
    for summary in (median_rank, mean_rank, retrieval_metrics, lambda r: recall_from_ranks(r, 1)):
        with pytest.raises(ConfigError, match="ranks must be"):
            summary(torch.tensor(ranks))


# --- chance ---


def test_chance_recall_and_mean_are_exact() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        num_candidates = rng.randint(10, 60)
        positives = [rng.sample(range(num_candidates), rng.randint(1, 9)) for _ in range(rng.randint(1, 7))]
        got = chance_retrieval(positives, num_candidates)
        for k in (1, 5, 10):
            missed = [math.comb(num_candidates - len(p), k) / math.comb(num_candidates, k) for p in positives]
            assert got[f"recall_at_{k}"] == pytest.approx(1 - statistics.mean(missed), abs=1e-12)
        assert got["mean_rank"] == pytest.approx(
            statistics.mean((num_candidates + 1) / (len(p) + 1) for p in positives)
        )


@pytest.mark.parametrize(("num_candidates", "median"), [(1, 1.0), (2, 1.5), (9, 5.0), (1000, 500.5), (3350, 1675.5)])
def test_chance_with_one_positive(num_candidates: int, median: float) -> None:
    got = chance_retrieval([[0]] * 3, num_candidates)
    assert got["median_rank"] == median
    assert got["recall_at_1"] == pytest.approx(1 / num_candidates)
    assert got["mean_rank"] == (num_candidates + 1) / 2
    assert ("recall_at_5" in got) == (num_candidates >= 5)


def test_chance_equals_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    positives = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11]] * 500
    num_candidates, rounds = 25, 20
    ranks = torch.cat(
        [retrieval_ranks(torch.rand(2000, num_candidates, generator=generator), positives) for _ in range(rounds)]
    )
    got, want = retrieval_metrics(ranks), chance_retrieval(positives, num_candidates)
    for k in (1, 5, 10):
        standard_error = 0.5 / math.sqrt(len(ranks))
        assert got[f"recall_at_{k}"] == pytest.approx(want[f"recall_at_{k}"], abs=4 * standard_error)
    assert got["mean_rank"] == pytest.approx(want["mean_rank"], abs=4 * float(ranks.std()) / math.sqrt(len(ranks)))
    assert got["median_rank"] == want["median_rank"]


def test_chance_with_every_candidate_right() -> None:
    assert chance_retrieval([[0, 1]], 2) == {"recall_at_1": 1.0, "median_rank": 1.0, "mean_rank": 1.0}


def test_chance_refuses_wrong_positives() -> None:
    with pytest.raises(ConfigError, match="has no positive"):
        chance_retrieval([[]], 3)
    with pytest.raises(ConfigError, match="0 entries for 0 queries"):
        chance_retrieval([], 3)


# --- accuracy ---


def test_top_k_accuracy_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.4, 0.2]])
    labels = [1, 1, 0, 0]  # ranks 1, 2, 3 (tied with class 1), 2 (tied)
    assert [top_k_accuracy(scores, labels, k) for k in (1, 2, 3)] == [0.25, 0.75, 1.0]
    assert top_k_accuracy(scores, torch.tensor(labels), 2) == 0.75


def test_top_k_accuracy_stays_in_order_and_range() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, 4, (30, 11), generator=generator).float()
        labels = torch.randint(0, 11, (30,), generator=generator)
        accuracies = [top_k_accuracy(scores, labels, k) for k in range(1, 12)]
        assert accuracies == sorted(accuracies)
        assert accuracies[-1] == 1.0
    equal = torch.zeros(30, 11)
    assert top_k_accuracy(equal, labels, 5) == 0.0
    distinct = torch.rand(30, 11, generator=generator)
    hits = (distinct.topk(5).indices == labels[:, None]).any(1).double().mean()
    assert top_k_accuracy(distinct, labels, 5) == float(hits)


def test_top_k_accuracy_refusals() -> None:
    scores = torch.eye(3)
    with pytest.raises(ConfigError, match=r"k=5 with 3 classes: .* Use k <= 3"):
        top_k_accuracy(scores, [0, 1, 2], 5)
    with pytest.raises(ConfigError, match="2 labels"):
        top_k_accuracy(scores, [0, 1], 1)
    with pytest.raises(ConfigError, match="sample at position 2 has label 3; with 3 classes allowed are 0 to 2"):
        top_k_accuracy(scores, [0, 1, 3], 1)
    scores[2, 0] = NAN
    with pytest.raises(DataError, match=r"1 of 3 samples have scores that are not finite: 'v3'\."):
        top_k_accuracy(scores, [0, 1, 2], 1, ids=["v1", "v2", "v3"])
