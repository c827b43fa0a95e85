"""Classification: scores of classes and which are right -> accuracies, a confusion matrix, mean average precision.

Scores are (samples, classes), larger is better. The rank of the right class is 1 + the number of other classes that
score at least as high, so a tie counts against the model and a collapsed model is right nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError, DataError
from twinreel.metrics.common import check_ids, check_k, finite_rows, named
from twinreel.metrics.retrieval import recall_from_ranks, retrieval_ranks

__all__ = [
    "AveragePrecision",
    "CombinedViews",
    "aggregate_views",
    "confusion_matrix",
    "mean_average_precision",
    "per_class_accuracy",
    "predicted_classes",
    "ranked_classes",
    "top_k_accuracies",
    "top_k_accuracy",
]

Labels = Sequence[int] | Tensor
Ids = Sequence[str] | None
How = Literal["mean", "max"]


def top_k_accuracy(scores: Tensor, labels: Labels, k: int, *, ids: Ids = None) -> float:
    """The fraction of samples whose class is among the k highest scores, ties counted against the model.

    Args:
        scores: (N, C), larger is better.
        labels: The N right classes, 0 to C - 1.
        k: 1 to C. A larger k would give 1 whatever the scores, and is refused.
        ids: N names for error messages; None: positions.

    Raises:
        DataError: A score is not finite; the samples are named.
        ConfigError: Shapes do not fit, a label is out of range, or k is.
    """
    classes = _checked_labels(scores, labels, ids)
    check_k(k, scores.shape[1], "classes")
    return recall_from_ranks(_ranks(scores, classes), k)


def top_k_accuracies(
    scores: Tensor, labels: Labels, *, ks: Sequence[int] = (1, 5), ids: Ids = None
) -> dict[str, float]:
    """`top_1_accuracy`, `top_5_accuracy`; with fewer than 5 classes, say 3, `top_3_accuracy`: the name says what it is.

    Args:
        scores: (N, C), larger is better.
        labels: The N right classes, 0 to C - 1.
        ks: Which; one above C becomes C.
        ids: N names for error messages; None: positions.

    Raises:
        DataError, ConfigError: As in `top_k_accuracy`.
    """
    classes = _checked_labels(scores, labels, ids)
    ranks = _ranks(scores, classes)
    return {f"top_{k}_accuracy": recall_from_ranks(ranks, k) for k in (min(k, scores.shape[1]) for k in ks)}


def predicted_classes(scores: Tensor, labels: Labels, *, ids: Ids = None) -> Tensor:
    """The class that each sample is taken for: the highest score; of equal ones, a wrong one.

    So what is predicted right is exactly what `top_k_accuracy` with k = 1 counts.

    Args:
        scores: (N, C), larger is better.
        labels: The N right classes, 0 to C - 1.
        ids: N names for error messages; None: positions.

    Returns:
        Int64 (N,) on the CPU.

    Raises:
        DataError, ConfigError: As in `top_k_accuracy`.
    """
    right = torch.tensor(_checked_labels(scores, labels, ids))
    return ranked_classes(scores, functional.one_hot(right, scores.shape[1]))[:, 0]


def ranked_classes(scores: Tensor, targets: Tensor) -> Tensor:
    """The classes of each sample, highest score first; of equal scores the wrong ones first, then by place.

    So the place of the first right one is its rank, with ties counted against the model.

    Args:
        scores: (N, C), larger is better.
        targets: (N, C), not 0 where a sample has a class.

    Returns:
        Int64 (N, C) on the CPU.
    """
    wrong_first = (targets.detach().cpu() != 0).long().argsort(dim=1, stable=True)
    by_score = scores.detach().cpu().gather(1, wrong_first).argsort(dim=1, descending=True, stable=True)
    return wrong_first.gather(1, by_score)


def per_class_accuracy(scores: Tensor, labels: Labels, *, ids: Ids = None) -> dict[int, float]:
    """The accuracy of each class that occurs among the labels, by class, ascending; the others have none.

    Their mean is the mean class accuracy, over the classes that occur.

    Args:
        scores: (N, C), larger is better.
        labels: The N right classes, 0 to C - 1.
        ids: N names for error messages; None: positions.

    Raises:
        DataError, ConfigError: As in `top_k_accuracy`.
    """
    matrix = confusion_matrix(scores, labels, ids=ids)
    right, there = matrix.diagonal().tolist(), matrix.sum(1).tolist()
    return {place: right[place] / count for place, count in enumerate(there) if count}


def confusion_matrix(scores: Tensor, labels: Labels, *, ids: Ids = None) -> Tensor:
    """How often each class was taken for each: int64 (C, C), rows what is right, columns what was predicted.

    Args:
        scores: (N, C), larger is better.
        labels: The N right classes, 0 to C - 1.
        ids: N names for error messages; None: positions.

    Raises:
        DataError, ConfigError: As in `top_k_accuracy`.
    """
    predicted = predicted_classes(scores, labels, ids=ids)
    num_classes = scores.shape[1]
    pairs = torch.as_tensor(labels).cpu().long() * num_classes + predicted
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePrecision:
    """Average precisions: of each class that has a positive, their unweighted mean, and the classes without one."""

    mean: float
    per_class: dict[int, float]
    left_out: tuple[int, ...]


def mean_average_precision(scores: Tensor, targets: Tensor, *, ids: Ids = None) -> AveragePrecision:
    """The mean over classes of the average precision, by scikit-learn's definition.

    Of a class: the sum over thresholds, highest first, of (recall gained) x (precision there). Samples with equal
    scores pass a threshold together, so their order does not matter. It is not interpolated.

    Args:
        scores: (N, C), larger is better.
        targets: (N, C), 1 where a sample has a class, else 0.
        ids: N names for error messages; None: positions.

    Raises:
        DataError: A score is not finite; the samples are named. Or no class has a positive.
        ConfigError: Shapes do not fit, or a target is neither 0 nor 1.
    """
    if scores.ndim != 2 or targets.shape != scores.shape:
        raise ConfigError(
            f"scores and targets must both be (samples, classes), got {tuple(scores.shape)} and {tuple(targets.shape)}."
        )
    _check_scores(scores, ids, "mean average precision")
    positive = targets.detach().cpu() == 1
    wrong = (~positive & (targets.detach().cpu() != 0)).any(1).nonzero().flatten().tolist()
    if wrong:
        raise ConfigError(f"targets must be 0 or 1; those of {named(wrong, ids)} are not.")
    scores = scores.detach().cpu()
    there = positive.any(0).tolist()
    if not any(there):
        raise DataError(
            f"none of {len(scores)} samples has any of the {scores.shape[1]} classes, so there is no average precision."
        )
    per_class = {
        place: _average_precision(scores[:, place], positive[:, place]) for place, has in enumerate(there) if has
    }
    left_out = tuple(place for place, has in enumerate(there) if not has)
    return AveragePrecision(mean=sum(per_class.values()) / len(per_class), per_class=per_class, left_out=left_out)


def _average_precision(scores: Tensor, positive: Tensor) -> float:
    """That of one class from scores (N,) and bool (N,) with at least one True."""
    ordered, order = scores.sort(descending=True)
    found = positive[order].double().cumsum(0)
    last = torch.ones(len(ordered), dtype=torch.bool)  # of those with equal scores
    last[:-1] = ordered[1:] != ordered[:-1]
    found = found[last]
    precision = found / (last.nonzero()[:, 0] + 1)
    gained = found.diff(prepend=found.new_zeros(1)) / found[-1]
    return float((gained * precision).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedViews:
    """Scores of whole videos, float64 (N, C) in the order of `ids`, and the `missing` views of those that lack some."""

    ids: list[str]
    scores: Tensor
    missing: dict[str, list[int]]


def aggregate_views(
    scores: Tensor, views: Sequence[tuple[str, int]], *, num_views: int, how: How = "mean"
) -> CombinedViews:
    """The scores of videos from those of their views: the mean, or for each class the highest.

    A view that is not there takes no part: the mean is over those that are, and the missing ones are listed. The order
    of the views does not matter, to the last bit. The mean times the number of views is the sum that PySlowFast takes.
    A view with NaN makes the score of its video NaN, which every metric refuses by name.

    Args:
        scores: (V, C), one row a view: probabilities, or logits.
        views: Whose view a row is, and which: (id, 0 to num_views - 1). Ids are returned in the order of their first.
        num_views: How many a video has.
        how: `mean` or `max`.

    Raises:
        DataError: A view is there twice, or has no such number.
        ConfigError: Shapes do not fit, there is no view, or another `how`.
    """
    if how not in get_args(How):
        raise ConfigError(f"how={how!r}: views are combined by 'mean' or 'max'.")
    if scores.ndim != 2 or len(scores) != len(views) or not len(views):
        raise ConfigError(
            f"scores must be (views, classes) with one view a row, and at least one; got {tuple(scores.shape)} and "
            f"{len(views)} views."
        )
    _check_views(views, num_views)
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in views))}
    order = sorted(range(len(views)), key=lambda row: (places[views[row][0]], views[row][1]))
    rows = torch.tensor([places[views[row][0]] for row in order])
    values = scores.detach().cpu().double()[order]
    shape = (len(places), scores.shape[1])
    if how == "max":
        into = torch.full(shape, -torch.inf, dtype=torch.float64)
        combined = into.scatter_reduce(0, rows[:, None].expand_as(values), values, "amax")
    else:
        counts = rows.bincount(minlength=len(places))
        combined = torch.zeros(shape, dtype=torch.float64).index_add(0, rows, values) / counts[:, None]
    return CombinedViews(ids=list(places), scores=combined, missing=_missing_views(views, num_views))


def _check_views(views: Sequence[tuple[str, int]], num_views: int) -> None:
    seen: set[tuple[str, int]] = set()
    for name, view in views:
        if not 0 <= view < num_views:
            raise DataError(f"{name!r} has a view {view}; with {num_views} views allowed are 0 to {num_views - 1}.")
        if (name, view) in seen:
            raise DataError(f"view {view} of {name!r} is there twice; each view counts once.")
        seen.add((name, view))


def _missing_views(views: Sequence[tuple[str, int]], num_views: int) -> dict[str, list[int]]:
    there: dict[str, set[int]] = {}
    for name, view in views:
        there.setdefault(name, set()).add(view)
    return {name: sorted(set(range(num_views)) - own) for name, own in there.items() if len(own) < num_views}


def _ranks(scores: Tensor, classes: Sequence[int]) -> Tensor:
    return retrieval_ranks(scores, [[place] for place in classes])


def _check_scores(scores: Tensor, ids: Ids, what: str) -> None:
    if not scores.numel():
        raise ConfigError(f"scores of shape {tuple(scores.shape)}: there is nothing to judge.")
    check_ids("ids", ids, scores.shape[0])
    bad = (~finite_rows(scores)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {len(scores)} samples have scores that are not finite: {named(bad, ids)}. "
            f"No {what} is computed. Look at the weights and at these samples."
        )


def _checked_labels(scores: Tensor, labels: Labels, ids: Ids) -> list[int]:
    """The labels as a list; refused if they or the scores cannot be judged."""
    if scores.ndim != 2 or len(labels) != scores.shape[0]:
        raise ConfigError(
            f"scores must be (samples, classes) with one label a sample, "
            f"got shape {tuple(scores.shape)} and {len(labels)} labels."
        )
    _check_scores(scores, ids, "accuracy")
    classes: list[int] = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    for sample, label in enumerate(classes):
        if not 0 <= label < scores.shape[1]:
            raise ConfigError(
                f"sample {named([sample], ids)} has label {label}; with {scores.shape[1]} classes allowed are "
                f"0 to {scores.shape[1] - 1}."
            )
    return classes
