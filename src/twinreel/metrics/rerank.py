"""Two stages: a quick model orders all candidates, a slow one the first k of them -> the ranks of both.

Ties count against the model in both stages. A right answer is among the first k only if its place by the first stage,
behind all it ties with, is at most k; one that is not keeps its first rank, for the others stay behind the first k in
the order that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.errors import ConfigError, DataError
from twinreel.metrics.common import check_ids, check_k, named
from twinreel.metrics.retrieval import retrieval_ranks

__all__ = ["FirstStage", "first_candidates", "reranked_ranks"]

BLOCK_SCORES = 1 << 20  # scores that are sorted together


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStage:
    """What the quick model found: `candidates` int64 (Q, k), the first k of each query, best first; `ranks` float64
    (Q,) of the best positive among all candidates; both as if ties had fallen against the model.
    """

    candidates: Tensor
    ranks: Tensor


def first_candidates(
    similarity: Tensor,
    positives: Sequence[Sequence[int]],
    k: int,
    *,
    errors: Tensor | None = None,
    query_ids: Sequence[str] | None = None,
    candidate_ids: Sequence[str] | None = None,
) -> FirstStage:
    """The first k candidates of each query, and the rank of its best positive.

    A positive stands behind everything that scores as high; of other equal scores the first position comes first.

    Args:
        similarity: (Q, C), larger is better.
        positives: For each query the positions of its right candidates, one or more.
        k: 1 or more; above C it is C.
        errors: (Q, C), 0 or more: two scores closer than their errors together cannot be told apart and tie; None: 0.
        query_ids: Q names for error messages; None: positions.
        candidate_ids: C names for error messages; None: positions.

    Raises:
        DataError: A score is NaN or infinite.
        ConfigError: As in `retrieval_ranks`, or k is below 1.
    """
    check_k(k)
    if errors is not None and errors.shape != similarity.shape:
        raise ConfigError(
            f"errors has shape {tuple(errors.shape)}, similarity {tuple(similarity.shape)}; one belongs to each score."
        )
    scores = similarity.detach()
    if errors is not None and scores.ndim == 2 and len(positives) == len(scores):
        scores = scores + torch.where(_right(positives, scores.shape).to(scores.device), -errors, errors)
    ranks = retrieval_ranks(scores, positives, query_ids=query_ids, candidate_ids=candidate_ids)
    num_queries, num_candidates = scores.shape
    size = max(1, BLOCK_SCORES // num_candidates)
    chosen = [
        _order(scores[first : first + size].cpu(), positives[first : first + size])[:, :k].clone()
        for first in range(0, num_queries, size)
    ]
    return FirstStage(candidates=torch.cat(chosen), ranks=ranks)


def reranked_ranks(
    first: FirstStage,
    scores: Tensor,
    positives: Sequence[Sequence[int]],
    *,
    query_ids: Sequence[str] | None = None,
    candidate_ids: Sequence[str] | None = None,
) -> Tensor:
    """The rank of each query's best positive after the first k were put in the order of new scores; 1 is best.

    With k = C it is what `retrieval_ranks` gives for the new scores alone.

    Args:
        first: The first k and the ranks by the quick model.
        scores: (Q, k), larger is better: of the slow model, for `first.candidates`.
        positives: For each query the positions of its right candidates, one or more.
        query_ids: Q names for error messages; None: positions.
        candidate_ids: C names for error messages; None: positions.

    Returns:
        Float64 (Q,) on the CPU.

    Raises:
        DataError: A score is NaN or infinite.
        ConfigError: Shapes do not fit.
    """
    shape = first.candidates.shape
    if scores.shape != shape or len(positives) != shape[0]:
        raise ConfigError(
            f"scores has shape {tuple(scores.shape)} and positives has {len(positives)} entries; {shape[0]} queries "
            f"with {shape[1]} candidates each need {tuple(shape)} and {shape[0]}."
        )
    check_ids("query_ids", query_ids, shape[0])
    scores = scores.detach().cpu()
    _refuse_nonfinite(first, scores, query_ids, candidate_ids)
    right = _listed(first.candidates, positives)
    best = scores.double().masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    again = 1 + ((scores >= best) & ~right).sum(1).double()
    return torch.where(right.any(1), again, first.ranks)


def _right(positives: Sequence[Sequence[int]], shape: Sequence[int]) -> Tensor:
    """Bool of a shape (Q, C): the candidate is a positive. Positions that cannot be are left for others to refuse."""
    right = torch.zeros(tuple(shape), dtype=torch.bool)
    for query, own in enumerate(positives):
        right[query, [place for place in own if 0 <= place < shape[1]]] = True
    return right


def _listed(candidates: Tensor, positives: Sequence[Sequence[int]]) -> Tensor:
    """Bool (Q, k): the listed candidate is a positive of its query."""
    most = max(len(own) for own in positives)
    padded = torch.tensor([[*own, *[-1] * (most - len(own))] for own in positives])
    return torch.cat([(padded[:, place, None] == candidates)[None] for place in range(most)]).any(0)


def _order(scores: Tensor, positives: Sequence[Sequence[int]]) -> Tensor:
    """Positions (Q, C), best first; of equal scores those of positives last, else in rising order."""
    wrong_first = _right(positives, scores.shape).byte().argsort(dim=1, stable=True)
    order = scores.gather(1, wrong_first).argsort(dim=1, descending=True, stable=True)
    return wrong_first.gather(1, order)


def _refuse_nonfinite(
    first: FirstStage, scores: Tensor, query_ids: Sequence[str] | None, candidate_ids: Sequence[str] | None
) -> None:
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        query, place = bad[0].tolist()
        candidate = int(first.candidates[query, place])
        raise DataError(
            f"{len(bad)} of {scores.numel()} scores of the second stage are not finite (first: query "
            f"{named([query], query_ids)} with candidate {named([candidate], candidate_ids)}: "
            f"{scores[query, place].item()}). No rank is computed. Look at the weights and at these samples."
        )
