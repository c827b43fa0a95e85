"""Retrieval: a similarity matrix, or embeddings, and what is right -> ranks and the numbers made of them.

A similarity matrix is (queries, candidates), larger is better, and `positives` lists for every query which
candidates are right. One query gives exactly one rank; a tie counts against the model; a score that is not finite
is an error, never a miss and never a hit.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from twinreel.errors import ConfigError, DataError
from twinreel.metrics.common import check_ids, check_k, finite_rows, named

__all__ = [
    "RECALL_AT",
    "chance_retrieval",
    "embedding_ranks",
    "mean_rank",
    "median_rank",
    "recall_at_k",
    "recall_from_ranks",
    "retrieval_metrics",
    "retrieval_ranks",
]

RECALL_AT = (1, 5, 10)
BLOCK_SCORES = 1 << 20  # scores of a matrix compared together: flags and their sum take 9 MB
LARGEST_NORM = 1e150  # the product of two such norms, and so every score, is still finite in float64

Ties = Literal["pessimistic", "expected"]


def retrieval_ranks(
    similarity: Tensor,
    positives: Sequence[Sequence[int]],
    *,
    ties: Ties = "pessimistic",
    query_ids: Sequence[str] | None = None,
    candidate_ids: Sequence[str] | None = None,
) -> Tensor:
    """The rank of each query's best positive; 1 is best.

    `pessimistic`: 1 + the number of candidates that are not positives and score at least as high as the best
    positive. `expected`: the mean rank when equal scores are put in random order. Scores are compared exactly as
    given; a matrix product may give equal candidates scores that differ in the last bit, `embedding_ranks` does not.
    Nothing is sorted; beside a floating-point matrix the memory is about 10 MB, for it is compared in blocks of rows.

    Args:
        similarity: (Q, C), larger is better.
        positives: For each query the positions of its right candidates, one or more.
        ties: What a tie counts.
        query_ids: Q names for error messages; None: positions.
        candidate_ids: C names for error messages; None: positions.

    Returns:
        Float64 (Q,) on the CPU.

    Raises:
        DataError: A score is NaN or infinite; the queries and candidates are named.
        ConfigError: Shapes do not fit, a query has no positive, a position is repeated or out of range.
    """
    if similarity.ndim != 2:
        raise ConfigError(f"similarity must be (queries, candidates), got shape {tuple(similarity.shape)}.")
    _check_ties(ties)
    num_queries, num_candidates = similarity.shape
    check_ids("query_ids", query_ids, num_queries)
    check_ids("candidate_ids", candidate_ids, num_candidates)
    rows, columns = _flat_positives(positives, num_queries, num_candidates, query_ids)
    similarity = similarity.detach()
    _refuse_nonfinite(similarity, query_ids, candidate_ids)
    rows, columns = rows.to(similarity.device), columns.to(similarity.device)
    positive_scores = similarity[rows, columns]
    best = _best(positive_scores, rows, num_queries)
    tied_positives = torch.zeros(num_queries, dtype=torch.long, device=rows.device)
    tied_positives.index_add_(0, rows, (positive_scores == best[rows]).long())
    # Back to the type it came from, which loses nothing; else every score would be converted to float64.
    thresholds = best.to(similarity.dtype) if similarity.is_floating_point() else best
    at_least = _count_scores(similarity, torch.ge, thresholds) - tied_positives
    above = _count_scores(similarity, torch.gt, thresholds) if ties == "expected" else None
    return _ranks(at_least, above, tied_positives)


def embedding_ranks(
    query_embeddings: Tensor,
    candidate_embeddings: Tensor,
    positives: Sequence[Sequence[int]],
    *,
    block_size: int = 512,
    ties: Ties = "pessimistic",
    query_ids: Sequence[str] | None = None,
    candidate_ids: Sequence[str] | None = None,
) -> Tensor:
    """`retrieval_ranks` of dot products, without ever holding the (Q, C) matrix and without sorting.

    Products are computed in float64 where the embeddings live, in blocks of queries and candidates. Two scores
    closer than the rounding error of the product (D * 2.2e-16 * the norms) cannot be told apart and count as equal.
    So equal embeddings always tie, whatever block they fall into, and the result does not depend on `block_size`.

    Args:
        query_embeddings: (Q, D).
        candidate_embeddings: (C, D).
        positives: For each query the positions of its right candidates, one or more.
        block_size: Rows of a block on both sides; at 512 and D = 512 the tensors beside the embeddings take about 10 MB
            (a process was seen to grow by 12 to 48 MB, depending on what its allocator keeps).
        ties: As in `retrieval_ranks`.
        query_ids: Q names for error messages; None: positions.
        candidate_ids: C names for error messages; None: positions.

    Returns:
        Float64 (Q,) on the CPU.

    Raises:
        DataError: An embedding is not finite; the rows are named.
        ConfigError: As in `retrieval_ranks`, or `block_size` is below 1.
    """
    _check_embeddings(query_embeddings, candidate_embeddings)
    _check_ties(ties)
    if block_size < 1:
        raise ConfigError(f"block_size={block_size}: must be at least 1.")
    queries, candidates = query_embeddings.detach(), candidate_embeddings.detach()
    num_queries, num_candidates = queries.shape[0], candidates.shape[0]
    check_ids("query_ids", query_ids, num_queries)
    check_ids("candidate_ids", candidate_ids, num_candidates)
    rows, columns = _flat_positives(positives, num_queries, num_candidates, query_ids)
    rows, columns = rows.to(queries.device), columns.to(queries.device)
    candidate_norms = _norms(candidates, block_size, "candidate", candidate_ids)
    # slack * (norm of the candidate) bounds the rounding error of a score, whatever the order of summation.
    slack = _norms(queries, block_size, "query", query_ids) * (queries.shape[1] * torch.finfo(torch.float64).eps)
    # So the true score of the best positive lies between `lowest` and `highest`.
    scores = _pair_scores(queries, candidates, rows, columns, block_size)
    errors = slack[rows] * candidate_norms[columns]
    lowest, highest = _best(scores - errors, rows, num_queries), _best(scores + errors, rows, num_queries)
    tied_positives = torch.zeros(num_queries, dtype=torch.long, device=rows.device)
    tied_positives.index_add_(0, rows, (scores + errors >= lowest[rows]).long())

    def count(shift: Tensor, thresholds: Tensor) -> Tensor:
        return _count_others(queries, candidates, rows, columns, shift, candidate_norms, thresholds, block_size)

    at_least = count(slack, lowest)
    above = count(-slack, torch.nextafter(highest, highest + torch.inf)) if ties == "expected" else None
    return _ranks(at_least, above, tied_positives)


def recall_at_k(similarity: Tensor, positives: Sequence[Sequence[int]], k: int) -> float:
    """The fraction of queries with a positive among their first k candidates, ties counted against the model.

    Args:
        similarity: (Q, C), larger is better.
        positives: For each query the positions of its right candidates, one or more.
        k: 1 to C. A larger k would give 1 whatever the scores, and is refused.

    Raises:
        DataError: A score is not finite.
        ConfigError: As in `retrieval_ranks`, or k is out of range.
    """
    if similarity.ndim == 2:
        check_k(k, similarity.shape[1], "candidates")
    return recall_from_ranks(retrieval_ranks(similarity, positives), k)


def recall_from_ranks(ranks: Tensor, k: int) -> float:
    """The fraction of ranks that are at most k.

    Raises:
        ConfigError: There are no ranks, one is below 1 or not finite, or k is below 1.
    """
    check_k(k)
    return float((_checked_ranks(ranks) <= k).double().mean())


def median_rank(ranks: Tensor) -> float:
    """The median of the ranks; for an even number of queries the mean of the two middle ones.

    Raises:
        ConfigError: There are no ranks, or one is below 1 or not finite.
    """
    ordered = _checked_ranks(ranks).sort().values
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def mean_rank(ranks: Tensor) -> float:
    """The mean of the ranks.

    Raises:
        ConfigError: There are no ranks, or one is below 1 or not finite.
    """
    return float(_checked_ranks(ranks).mean())


def retrieval_metrics(ranks: Tensor, *, num_candidates: int | None = None) -> dict[str, float]:
    """`recall_at_1`, `recall_at_5`, `recall_at_10` (fractions), `median_rank`, `mean_rank`.

    Args:
        ranks: (Q,), 1 is best.
        num_candidates: If given, a `recall_at_k` with k above it is left out: it would be 1 whatever the model.

    Raises:
        ConfigError: There are no ranks, or one is below 1 or not finite, or above `num_candidates`.
    """
    ranks = _checked_ranks(ranks)
    if num_candidates is not None and float(ranks.max()) > num_candidates:
        raise ConfigError(f"a rank of {float(ranks.max()):g} among num_candidates={num_candidates} is impossible.")
    cuts = [k for k in RECALL_AT if num_candidates is None or k <= num_candidates]
    metrics = {f"recall_at_{k}": recall_from_ranks(ranks, k) for k in cuts}
    return metrics | {"median_rank": median_rank(ranks), "mean_rank": mean_rank(ranks)}


def chance_retrieval(positives: Sequence[Sequence[int]], num_candidates: int) -> dict[str, float]:
    """What a random ranking scores: the keys of `retrieval_metrics(ranks, num_candidates=...)`.

    Recall and mean rank are exact expectations: a query with p positives among C candidates is found in the first k
    with probability 1 - binomial(C - p, k) / binomial(C, k), and its mean rank is (C + 1) / (p + 1). The median is
    that of the distribution of all queries' ranks together, which the median rank approaches for many queries.

    Args:
        positives: For each query the positions of its right candidates, one or more.
        num_candidates: C.

    Raises:
        ConfigError: There is no query, or the positives are wrong as in `retrieval_ranks`.
    """
    _flat_positives(positives, len(positives), num_candidates, None)
    places = torch.arange(num_candidates, dtype=torch.float64)
    found = torch.zeros(num_candidates, dtype=torch.float64)  # at position k - 1: probability of a rank of at most k
    mean = 0.0
    for number, queries in Counter(len(own) for own in positives).items():
        share = queries / len(positives)
        missed = ((num_candidates - number - places) / (num_candidates - places)).cumprod(dim=0)
        found += share * (1.0 - missed)
        mean += share * (num_candidates + 1) / (number + 1)
    rounding = 1e-9
    lower = int(torch.searchsorted(found, 0.5 - rounding))
    upper = int(torch.searchsorted(found, 0.5 + rounding, right=True))
    chance = {f"recall_at_{k}": float(found[k - 1]) for k in RECALL_AT if k <= num_candidates}
    return chance | {"median_rank": 1 + (lower + upper) / 2, "mean_rank": mean}


def _ranks(at_least: Tensor, above: Tensor | None, tied_positives: Tensor) -> Tensor:
    """Ranks from the numbers of other candidates at or above the best positive, and strictly above it.

    Of t others tied with p positives, t / (p + 1) are expected before the first positive of a random order.
    """
    if above is None:
        return (1 + at_least).cpu().double()
    return (1 + above).cpu().double() + (at_least - above).cpu().double() / (tied_positives + 1).cpu().double()


def _best(scores: Tensor, rows: Tensor, num_queries: int) -> Tensor:
    """The highest of each query's scores, float64 (Q,)."""
    lowest = torch.full((num_queries,), -torch.inf, dtype=torch.float64, device=scores.device)
    return lowest.scatter_reduce(0, rows, scores.double(), "amax")


def _count_scores(similarity: Tensor, compare: Callable[[Tensor, Tensor], Tensor], thresholds: Tensor) -> Tensor:
    """For each query the number of scores that compare so with its threshold, `BLOCK_SCORES` scores at a time."""
    block_size = max(1, BLOCK_SCORES // similarity.shape[1])
    spans = [slice(top, top + block_size) for top in range(0, len(similarity), block_size)]
    return torch.cat([compare(similarity[span], thresholds[span, None]).sum(dim=1) for span in spans])


def _count_others(
    queries: Tensor,
    candidates: Tensor,
    rows: Tensor,
    columns: Tensor,
    shift: Tensor,
    candidate_norms: Tensor,
    thresholds: Tensor,
    block_size: int,
) -> Tensor:
    """For each query the number of candidates, positives aside, with score + shift * norm >= its threshold."""
    counts = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    for top in range(0, len(queries), block_size):
        span = slice(top, min(top + block_size, len(queries)))
        query_block = queries[span].double()
        first, last = torch.searchsorted(rows, torch.tensor([top, span.stop], device=rows.device)).tolist()
        own_rows, own_columns = rows[first:last] - top, columns[first:last]
        for left in range(0, len(candidates), block_size):
            right = min(left + block_size, len(candidates))
            block = query_block @ candidates[left:right].double().T
            inside = (own_columns >= left) & (own_columns < right)
            block[own_rows[inside], own_columns[inside] - left] = -torch.inf
            block.addcmul_(shift[span, None], candidate_norms[None, left:right])
            counts[span] += (block >= thresholds[span, None]).sum(dim=1)
    return counts


def _pair_scores(queries: Tensor, candidates: Tensor, rows: Tensor, columns: Tensor, block_size: int) -> Tensor:
    """Dot products of the listed pairs in float64, `block_size` pairs at a time."""
    blocks = [
        (queries[rows[first : first + block_size]].double() * candidates[columns[first : first + block_size]]).sum(1)
        for first in range(0, len(rows), block_size)
    ]
    return torch.cat(blocks)


def _norms(embeddings: Tensor, block_size: int, what: str, ids: Sequence[str] | None) -> Tensor:
    """Euclidean norms in float64. Where they are finite, so is every number of the row."""
    # In blocks, because the conversion to float64 copies what it is given.
    blocks = [embeddings[first : first + block_size] for first in range(0, len(embeddings), block_size)]
    norms = torch.cat([torch.linalg.vector_norm(block, dim=1, dtype=torch.float64) for block in blocks])
    bad = (~(norms <= LARGEST_NORM)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {len(norms)} {what} embeddings are not finite (or above {LARGEST_NORM:g} in norm): "
            f"{named(bad, ids)}. No rank is computed. Look at the weights and at these samples."
        )
    return norms


def _refuse_nonfinite(similarity: Tensor, query_ids: Sequence[str] | None, candidate_ids: Sequence[str] | None) -> None:
    """Raise if a score is NaN or infinite, naming what is common to the bad ones."""
    if bool(finite_rows(similarity).all()):
        return
    bad = ~similarity.isfinite()
    bad_queries = bad.all(dim=1).nonzero().flatten().tolist()
    bad_candidates = bad.all(dim=0).nonzero().flatten().tolist()
    parts = []
    if bad_queries:
        parts.append(f"all scores of query {named(bad_queries, query_ids)}")
    if bad_candidates:
        parts.append(f"all scores of candidate {named(bad_candidates, candidate_ids)}")
    if not parts:
        row, column = bad.nonzero()[0].tolist()
        score = similarity[row, column].item()
        parts.append(f"first query {named([row], query_ids)} with candidate {named([column], candidate_ids)}: {score}")
    raise DataError(
        f"{int(bad.sum())} of {bad.numel()} scores are not finite ({'; '.join(parts)}). No rank is computed. "
        "Look at the weights and at these samples."
    )


def _flat_positives(
    positives: Sequence[Sequence[int]], num_queries: int, num_candidates: int, query_ids: Sequence[str] | None
) -> tuple[Tensor, Tensor]:
    """The right pairs as two lists of positions, queries in rising order."""
    if num_candidates == 0:
        raise ConfigError("there are no candidates to rank; at least one is needed.")
    if num_queries == 0 or len(positives) != num_queries:
        raise ConfigError(
            f"positives has {len(positives)} entries for {num_queries} queries; it needs one list of positions for "
            "each query, and at least one query."
        )
    rows: list[int] = []
    columns: list[int] = []
    for query, own in enumerate(positives):
        name = f"query {named([query], query_ids)}"
        try:
            listed = [operator.index(position) for position in own]
        except TypeError as error:
            raise ConfigError(f"{name} has positives {own!r}; they must be whole numbers, a list a query.") from error
        if not listed:
            raise ConfigError(f"{name} has no positive candidate, so it has no rank. Leave it out of the queries.")
        if min(listed) < 0 or max(listed) >= num_candidates:
            raise ConfigError(f"{name} has positives {listed}; allowed are 0 to {num_candidates - 1}.")
        if len(set(listed)) != len(listed):
            raise ConfigError(f"{name} lists a positive more than once: {listed}. List each candidate once.")
        rows += [query] * len(listed)
        columns += listed
    return torch.tensor(rows), torch.tensor(columns)


def _check_embeddings(queries: Tensor, candidates: Tensor) -> None:
    floating = queries.is_floating_point() and candidates.is_floating_point()
    if not floating or queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        raise ConfigError(
            "query and candidate embeddings must be floating-point (Q, D) and (C, D) with one D, "
            f"got {queries.dtype} {tuple(queries.shape)} and {candidates.dtype} {tuple(candidates.shape)}."
        )


def _check_ties(ties: str) -> None:
    if ties not in ("pessimistic", "expected"):
        raise ConfigError(f"ties={ties!r}: allowed are 'pessimistic' (a tie counts against the model) and 'expected'.")


def _checked_ranks(ranks: Tensor) -> Tensor:
    """Ranks as float64; refused if they cannot be ranks."""
    ranks = ranks.detach().cpu().double()
    if ranks.ndim != 1 or len(ranks) == 0:
        raise ConfigError(f"ranks must be a non-empty vector, got shape {tuple(ranks.shape)}.")
    wrong = (~(ranks.isfinite() & (ranks >= 1))).nonzero().flatten().tolist()
    if wrong:
        raise ConfigError(f"ranks must be finite and at least 1; the rank {named(wrong, None)} is not.")
    return ranks
