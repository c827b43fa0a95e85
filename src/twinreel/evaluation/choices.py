"""Multiple choice judged: every option is scored as a text of its video, the highest score is the answer.

The scores are a trained multiple choice's, or those of a run of retrieval, which needs no further training (MSRVTT-MC).
A video that several rows ask about goes through the CNN once. Nothing of a row is changed by being read, so that the
same rows can be judged as often as one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.captions import row_captions
from twinreel.data.clip import Clip
from twinreel.data.dataset import ViewRules
from twinreel.distributed import alike, on_main, together
from twinreel.evaluation.pairs import Lists, TextTable, compare_pairs, log_odds, views_facts
from twinreel.evaluation.report import AnswerResults, PredictedRow, Report, top_of
from twinreel.evaluation.views import refuse_missing, refuse_other_rows
from twinreel.recipe import EvalSection
from twinreel.tasks import MatchFacts, VideoTextMatching

__all__ = ["Asked", "asked_of", "judge_choices", "question_of", "several_types"]

TOP = 5  # options of a row that are written down


class Asked(NamedTuple):
    """Rows by what they show: videos, each once; for each row its video; for each video the texts it is asked."""

    videos: list[Clip]
    video_of: list[int]
    lists: Lists


def question_of(row: Clip) -> str:
    """What a row asks: its first caption; empty if it has none."""
    captions = row_captions(row)
    return captions[0].text if captions else ""


def asked_of(rows: Sequence[Clip], places: Sequence[Sequence[int]]) -> Asked:
    """Rows with the same video and window are one video.

    Args:
        rows: what is judged.
        places: for each row the texts that its video is compared with.
    """
    windows: dict[tuple[str, float | None, float | None], int] = {}
    videos: list[Clip] = []
    video_of: list[int] = []
    texts: list[dict[int, None]] = []
    for row, own in zip(rows, places, strict=True):
        window = (row.video, row.start_seconds, row.end_seconds)
        if window not in windows:
            windows[window] = len(videos)
            videos.append(row)
            texts.append({})
        video_of.append(windows[window])
        texts[windows[window]].update(dict.fromkeys(own))
    return Asked(videos, video_of, [list(own) for own in texts])


def several_types(rows: Sequence[Clip]) -> list[str | None]:
    """The kind of answer of each row, where the rows have more than one kind; else None for each."""
    kinds = {row.answer_type for row in rows}
    return [row.answer_type if len(kinds) > 1 else None for row in rows]


def judge_choices(
    model: nn.Module,
    task: VideoTextMatching,
    rows: Sequence[Clip],
    section: EvalSection,
    rules: ViewRules,
    how: Mapping[str, Any],
) -> Report:
    """Accuracy of choices among the options of each row; `how` is passed on to `compare_pairs`."""
    with together():
        texts = [task.choice_texts(question_of(row), row.options) for row in rows]
    with alike():
        refuse_other_rows([(row.id, row.labels, own) for row, own in zip(rows, texts, strict=True)], "manifest")
    table = TextTable.of(model, [text for own in texts for text in own])
    places = [table.places(own) for own in texts]
    asked = asked_of(rows, places)
    found = [torch.full((len(own),), torch.nan) for own in asked.lists]
    compared = compare_pairs(
        model, asked.videos, rules, table.tokens, partial(log_odds, task), found, wanted=asked.lists, **how
    )  # fmt: skip
    with together():
        refuse_missing(compared.faults, compared.valid, section)
    readable = compared.valid.tolist()
    kept = [place for place, video in enumerate(asked.video_of) if readable[video]]
    scores = _scores(asked, places, found, kept)
    values, answers = on_main(lambda: _judge(task, [rows[place] for place in kept], scores))
    equal = sum(len(set(own)) < len(own) for own in places)
    counts = sorted({len(row.options) for row in rows})
    protocol = {
        "evaluated": f"{len(kept)}/{len(rows)} questions",
        "options": f"{' or '.join(map(str, counts))} a question, the one with the highest score is the answer",
        "pairs": f"{compared.num_pairs} of {len(asked.videos)} videos and their options, each once",
        "scores": _scores_fact(task),
        "ties": "count against the model" + (f"; in {equal} rows the model reads two options alike" if equal else ""),
    }
    return Report(
        metrics=values, protocol=protocol | views_facts(task, section, rules, compared), faults=compared.faults,
        answers=answers,
    )  # fmt: skip


def _scores_fact(task: VideoTextMatching) -> str:
    if task.goal == "retrieval":
        return f"of each option as a caption, by a run trained for retrieval; {task.score_words}"
    return "of each option, by a run trained for choices; logits"


def _scores(
    asked: Asked, places: Sequence[Sequence[int]], found: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """For each row that is kept the scores of its options, in their order."""
    at = [dict(zip(own, range(len(own)), strict=True)) for own in asked.lists]
    return [
        found[video][[at[video][text] for text in places[row]]]
        for row, video in ((row, asked.video_of[row]) for row in kept)
    ]


def _judge(
    task: VideoTextMatching, rows: Sequence[Clip], scores: Sequence[Tensor]
) -> tuple[dict[str, float], AnswerResults]:
    right = [int(row.labels[0]) for row in rows]
    types = several_types(rows)
    found = metrics.chosen_right(scores, right, ids=[row.id for row in rows])
    values = metrics.accuracy_by_type(found, types)
    chance = torch.tensor([1 / len(row.options) for row in rows], dtype=torch.float64)
    for kind in (None, *sorted({kind for kind in types if kind is not None})):
        own = torch.tensor([kind is None or other == kind for other in types])
        values["chance/accuracy" + (f"/{kind}" if kind else "")] = float(chance[own].mean())
    predictions = [_prediction(*each) for each in zip(rows, scores, right, strict=True)]
    return values | _loss(task, scores, right), AnswerResults(predictions=predictions)


def _prediction(row: Clip, scores: Tensor, right: int) -> PredictedRow:
    targets = torch.zeros(1, len(scores), dtype=torch.long)
    targets[0, right] = 1
    ranked = metrics.ranked_classes(scores[None], targets)[0]
    return PredictedRow(
        id=row.id,
        video=row.video,
        labels=(row.options[right],),
        rank=ranked.tolist().index(right) + 1,
        top=top_of(row.options, scores, ranked, TOP),
    )


@torch.no_grad()
def _loss(task: VideoTextMatching, scores: Sequence[Tensor], right: Sequence[int]) -> dict[str, float]:
    """The loss of a run that was trained for choices; one clip stands for all, see `matching._validation_loss`."""
    if task.goal != "multiple_choice":
        return {}
    total = 0.0
    for count in {len(own) for own in scores}:
        same = [place for place, own in enumerate(scores) if len(own) == count]
        logits = torch.stack([scores[place] for place in same])[:, None, :, None]
        targets = torch.zeros(len(same), count)
        targets[range(len(same)), [right[place] for place in same]] = 1.0
        everyone = torch.ones(len(same), dtype=torch.bool)
        total += float(task.share((logits,), MatchFacts(everyone, everyone, targets))) * len(same)
    return {"loss": total / len(scores)}
