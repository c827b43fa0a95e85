"""Question answering judged: the answer of the table with the highest score, for the question of each row.

All rows count. A row whose answer the table does not hold is wrong whatever the model says; how many these are is a
number beside the accuracy. A video that several questions are about goes through the CNN once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.clip import Clip
from twinreel.data.dataset import ViewRules
from twinreel.distributed import alike, on_main, together
from twinreel.evaluation.choices import asked_of, question_of, several_types
from twinreel.evaluation.pairs import TextTable, check_outputs, compare_pairs, views_facts
from twinreel.evaluation.report import AnswerResults, PredictedRow, Report, top_of
from twinreel.evaluation.views import refuse_missing, refuse_other_rows
from twinreel.losses import answer_binary_cross_entropy
from twinreel.recipe import EvalSection
from twinreel.tasks import MatchFacts, VideoTextMatching

__all__ = ["judge_answers"]

TOP = 5  # answers of a row that are written down
ROWS_AT_ONCE = 512  # whose scores are looked at together


def judge_answers(
    model: nn.Module,
    task: VideoTextMatching,
    rows: Sequence[Clip],
    section: EvalSection,
    rules: ViewRules,
    how: Mapping[str, Any],
) -> Report:
    """Accuracy of answers out of the task's table; `how` is passed on to `compare_pairs`."""
    with together():
        questions = [question_of(row) for row in rows]
    with alike():
        refuse_other_rows([(row.id, row.labels, asked) for row, asked in zip(rows, questions, strict=True)], "manifest")
    table = TextTable.of(model, questions)
    places = [[place] for place in table.places(questions)]
    asked = asked_of(rows, places)
    scores = torch.full((sum(map(len, asked.lists)), len(task.answers)), torch.nan)
    found = torch.split(scores, [len(own) for own in asked.lists])
    compared = compare_pairs(
        model, asked.videos, rules, table.tokens, partial(_read, task), found, wanted=asked.lists, **how
    )
    with together():
        refuse_missing(compared.faults, compared.valid, section)
    readable, lines = compared.valid.tolist(), _lines(asked.lists)
    kept = [row for row, video in enumerate(asked.video_of) if readable[video]]
    at = [lines[asked.video_of[row], places[row][0]] for row in kept]
    values, answers = on_main(lambda: _judge(task, [rows[row] for row in kept], scores, at))
    missing = round(values["unanswerable_share"] * len(kept))
    protocol = {
        "evaluated": f"{len(kept)}/{len(rows)} questions",
        "answers": f"{len(task.answers)} in the table, the one with the highest score is given; {missing} of "
        f"{len(kept)} rows have another answer and are wrong whatever the model says",
        "pairs": f"{compared.num_pairs} of {len(asked.videos)} videos and their questions, each once",
        "ties": "count against the model",
    }
    return Report(
        metrics=values, protocol=protocol | views_facts(task, section, rules, compared), faults=compared.faults,
        answers=answers,
    )  # fmt: skip


def _read(task: VideoTextMatching, logits: Tensor) -> Tensor:
    """Scores (n, R, A) of answers from logits (n, clips, R, A) of R questions about each of n videos."""
    check_outputs(task, logits)
    return task.answer_scores(logits.transpose(1, 2)[:, :, :, None])


def _lines(lists: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """Where the scores of (video, question) stand."""
    pairs = [(video, text) for video, own in enumerate(lists) for text in own]
    return {pair: line for line, pair in enumerate(pairs)}


def _judge(
    task: VideoTextMatching, rows: Sequence[Clip], scores: Tensor, at: Sequence[int]
) -> tuple[dict[str, float], AnswerResults]:
    """Metrics and what each row was answered, from scores (lines, A); `at` says which line a row has."""
    right, predictions, total, count = [], [], 0.0, 0
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        own, targets = scores[list(at[first : first + ROWS_AT_ONCE])], _targets(task, some)
        right.append(metrics.answered_right(own, _best_right(own, targets), ids=[row.id for row in some]))
        predictions += _predictions(task, some, own, targets)
        share, known = _loss(task, own, targets)
        total, count = total + share * known, count + known
    types = several_types(rows)
    values = metrics.accuracy_by_type(torch.cat(right), types)
    known = sum(row.rank is not None for row in predictions)
    values["unanswerable_share"] = 1 - known / len(rows)
    values["chance/accuracy"] = known / len(rows) / len(task.answers)
    values["majority/accuracy"] = _majority(task, rows) / len(rows)
    loss = {"loss": total / count} if count else {}
    return values | loss, AnswerResults(predictions=predictions)


def _targets(task: VideoTextMatching, rows: Sequence[Clip]) -> Tensor:
    """Int64 (n, A): 1 where an answer of the table is right."""
    targets = torch.zeros(len(rows), len(task.answers), dtype=torch.long)
    for line, row in enumerate(rows):
        for label in row.labels:
            if (place := task.answer_places.get(str(label))) is not None:
                targets[line, place] = 1
    return targets


def _best_right(scores: Tensor, targets: Tensor) -> list[int | None]:
    """Of each row the right answer with the highest score; None where the table has none."""
    best = scores.masked_fill(targets == 0, -torch.inf).argmax(1).tolist()
    return [place if known else None for place, known in zip(best, targets.any(1).tolist(), strict=True)]


def _predictions(task: VideoTextMatching, rows: Sequence[Clip], scores: Tensor, targets: Tensor) -> list[PredictedRow]:
    ranked = metrics.ranked_classes(scores, targets)
    ranks = targets.gather(1, ranked).argmax(1) + 1
    return [
        PredictedRow(
            id=row.id,
            video=row.video,
            labels=tuple(map(str, row.labels)),
            rank=int(ranks[line]) if bool(targets[line].any()) else None,
            top=top_of(task.answers, scores[line], ranked[line], TOP),
        )
        for line, row in enumerate(rows)
    ]


def _majority(task: VideoTextMatching, rows: Sequence[Clip]) -> int:
    """How many rows the answer that is right most often answers."""
    counts = Counter(label for row in rows for label in {str(label) for label in row.labels})
    return max((number for label, number in counts.items() if label in task.answer_places), default=0)


@torch.no_grad()
def _loss(task: VideoTextMatching, scores: Tensor, targets: Tensor) -> tuple[float, int]:
    """The mean loss of the rows whose answer is in the table, and how many these are; none of several right answers a
    row under a loss that knows one.
    """
    known = targets.any(1)
    if task.loss is not answer_binary_cross_entropy:
        known &= targets.sum(1) == 1
    facts = MatchFacts(torch.ones_like(known), known, targets.float())
    return float(task.share((scores[:, None, None],), facts)), int(known.sum())
