"""Question answering: scores of answers and which are right -> accuracies, over all questions and of each type.

The questions of a data set are all counted. One whose answer the model has no output for is wrong whatever the model
says, and how many these are is a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinreel.errors import ConfigError, DataError
from twinreel.metrics.common import check_ids, finite_rows, named
from twinreel.metrics.retrieval import retrieval_ranks

__all__ = ["accuracy_by_type", "answered_right", "answers_metrics", "chosen_right", "soft_accuracy"]

Ids = Sequence[str] | None


def answered_right(scores: Tensor, answers: Sequence[int | None], *, ids: Ids = None) -> Tensor:
    """Whether each question is answered right: its answer scores higher than any other of the table.

    Args:
        scores: (N, A), larger is better; A at least 2.
        answers: For each question the place of its answer, 0 to A - 1; None: the answer is not in the table.
        ids: N names for error messages; None: positions.

    Returns:
        Bool (N,) on the CPU; False where the answer is None.

    Raises:
        DataError: A score is not finite; the questions are named.
        ConfigError: Shapes do not fit, a place is out of range, or there is nothing to choose from.
    """
    if scores.ndim != 2 or len(answers) != scores.shape[0]:
        raise ConfigError(
            f"scores must be (questions, answers) with one right answer a question, got shape {tuple(scores.shape)} "
            f"and {len(answers)} answers."
        )
    _check(scores, answers, ids)
    found = torch.zeros(len(answers), dtype=torch.bool)
    known = [place for place, answer in enumerate(answers) if answer is not None]
    if known:
        positives = [[answer] for answer in answers if answer is not None]
        found[torch.tensor(known)] = retrieval_ranks(scores.detach()[known], positives) == 1
    return found


def chosen_right(scores: Sequence[Tensor], answers: Sequence[int], *, ids: Ids = None) -> Tensor:
    """`answered_right` of questions that each have options of their own, in any number.

    Args:
        scores: For each question (R,), its options' scores, larger is better; R at least 2.
        answers: For each question the place of the right option.
        ids: N names for error messages; None: positions.

    Returns:
        Bool (N,) on the CPU.

    Raises:
        DataError, ConfigError: As in `answered_right`.
    """
    check_ids("ids", ids, len(scores))
    if len(scores) != len(answers) or not len(scores):
        raise ConfigError(f"{len(scores)} rows of scores and {len(answers)} right options; give one for each, some.")
    found = torch.zeros(len(answers), dtype=torch.bool)
    sizes: dict[int, list[int]] = {}
    for place, row in enumerate(scores):
        if row.ndim != 1:
            raise ConfigError(f"the scores of question {named([place], ids)} must be (options,), got {row.shape}.")
        sizes.setdefault(len(row), []).append(place)
    for places in sizes.values():
        own = None if ids is None else [ids[place] for place in places]
        matrix = torch.stack([scores[place].detach().cpu() for place in places])
        found[torch.tensor(places)] = answered_right(matrix, [answers[place] for place in places], ids=own)
    return found


def accuracy_by_type(right: Tensor, types: Sequence[str | None]) -> dict[str, float]:
    """`accuracy` over all questions and `accuracy/what`, ... over those of each type, with their `share/what`.

    A type that no question has gets no number: there is no accuracy of nothing. Questions without a type count in
    `accuracy` only.

    Args:
        right: Bool (N,), N at least 1.
        types: Of each question, None where it has none.

    Raises:
        ConfigError: There is no question, or not one type for each.
    """
    if right.ndim != 1 or not len(right) or len(types) != len(right):
        raise ConfigError(f"right must be bool of one question or more, got {tuple(right.shape)}, {len(types)} types.")
    found = {"accuracy": float(right.double().mean())}
    for kind in sorted({kind for kind in types if kind is not None}):
        own = torch.tensor([other == kind for other in types])
        found[f"accuracy/{kind}"] = float(right[own].double().mean())
        found[f"share/{kind}"] = float(own.double().mean())
    return found


def answers_metrics(
    scores: Tensor, answers: Sequence[int | None], *, types: Sequence[str | None] | None = None, ids: Ids = None
) -> dict[str, float]:
    """`accuracy_by_type` of answers out of a table, and `unanswerable_share`: questions whose answer is not in it.

    `accuracy` counts all questions, so 1 - `unanswerable_share` is the most that it can be.

    Args:
        scores: (N, A), larger is better.
        answers: As in `answered_right`.
        types: Of each question; None: no types.
        ids: N names for error messages; None: positions.

    Raises:
        DataError, ConfigError: As in `answered_right`.
    """
    right = answered_right(scores, answers, ids=ids)
    found = accuracy_by_type(right, types if types is not None else [None] * len(right))
    return found | {"unanswerable_share": sum(answer is None for answer in answers) / len(answers)}


def soft_accuracy(scores: Tensor, targets: Tensor, *, ids: Ids = None) -> float:
    """The accuracy of VQA: the mean over questions of how right the answer with the highest score is.

    Of answers with the same, highest score the one that is least right counts.

    Args:
        scores: (N, A), larger is better.
        targets: (N, A), each 0 to 1: how right an answer is; people gave several.
        ids: N names for error messages; None: positions.

    Raises:
        DataError: A score is not finite; the questions are named.
        ConfigError: Shapes do not fit, or a target is outside 0 to 1.
    """
    if scores.ndim != 2 or targets.shape != scores.shape:
        raise ConfigError(
            f"scores and targets must both be (questions, answers), got {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}."
        )
    _check(scores, None, ids)
    targets = targets.detach().to(scores.device, torch.float64)
    outside = (~((targets >= 0) & (targets <= 1))).any(dim=1).nonzero().flatten().tolist()
    if outside:
        raise ConfigError(f"targets must be 0 to 1; those of {named(outside, ids)} are not.")
    best = scores.detach() == scores.detach().amax(dim=1, keepdim=True)
    return float(torch.where(best, targets, 1.0).amin(dim=1).mean())


def _check(scores: Tensor, answers: Sequence[int | None] | None, ids: Ids) -> None:
    """Refuse what cannot be judged."""
    check_ids("ids", ids, scores.shape[0])
    if scores.shape[0] == 0 or scores.shape[1] < 2:
        raise ConfigError(
            f"scores of shape {tuple(scores.shape)}: there must be a question and two answers to choose from; one "
            "answer would be right whatever the scores."
        )
    bad = (~finite_rows(scores)).nonzero().flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {len(scores)} questions have scores that are not finite: {named(bad, ids)}. No accuracy "
            "is computed. Look at the weights and at these videos."
        )
    for question, answer in enumerate(answers or ()):
        if answer is not None and not 0 <= answer < scores.shape[1]:
            raise ConfigError(
                f"question {named([question], ids)} has answer {answer}; with {scores.shape[1]} answers allowed are "
                f"0 to {scores.shape[1] - 1}, and None for one that is not among them."
            )
