"""What an evaluation found: scores, how they were made, and for people a table. Fractions; per cent in the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from twinreel.data.clip import Fault
from twinreel.log import format_seconds
from twinreel.recipe import EvalSection, Recipe
from twinreel.tasks import Task, VideoTextMatching

__all__ = ["AnswerResults", "ClassResults", "PredictedRow", "Report", "spoken"]

DIRECTIONS = ("text_to_video", "video_to_text")
MOST_CLASSES = 30  # in a table for people


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """What a row was taken for: the names of the best classes with their scores, and the rank of the (best) right one.

    `rank` is None for a row without a class. A tie counts against the model: of equal scores the wrong ones come first.
    """

    id: str
    video: str
    labels: tuple[str, ...]
    rank: int | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResults:
    """Results of single classes and rows.

    `counts` says how many rows have a class; `per_class` its accuracy (average precision where `confusion` is None,
    that is for several labels a row), for classes that occur. `confusion` int64 (C, C): rows what is right, columns
    what was predicted.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    per_class: dict[int, float]
    confusion: Tensor | None
    predictions: list[PredictedRow]

    def confused_with(self, place: int) -> str | None:
        """What a class is most often taken for wrongly, and how often; None if it never is."""
        if self.confusion is None:
            return None
        wrong = self.confusion[place].clone()
        wrong[place] = 0
        most = int(wrong.argmax())
        return f"{self.names[most]} ({int(wrong[most])})" if wrong[most] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResults:
    """What each row was answered, by choice among its options or out of a table of answers."""

    predictions: list[PredictedRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Scores and how they were made. Fractions in `metrics`; per cent in the table.

    `classes` is for classifiers, `answers` for multiple choice and question answering.
    """

    metrics: dict[str, float]
    protocol: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)
    classes: ClassResults | None = None
    answers: AnswerResults | None = None

    @property
    def predictions(self) -> list[PredictedRow] | None:
        """What each row was taken for, or answered; None for retrieval."""
        judged = self.classes or self.answers
        return None if judged is None else judged.predictions

    def to_json(self, *, predictions: bool = False) -> dict[str, Any]:
        """Everything, ready for `json.dumps`; what each row was taken for only if asked for."""
        values: dict[str, Any] = {
            "metrics": self.metrics,
            "protocol": self.protocol,
            "faults": [asdict(fault) for fault in self.faults],
        }
        if self.classes is not None:
            measure = "accuracy" if self.classes.confusion is not None else "average_precision"
            values["classes"] = [
                {"name": name, "rows": count, measure: self.classes.per_class.get(place)}
                for place, (name, count) in enumerate(zip(self.classes.names, self.classes.counts, strict=True))
            ]
        if predictions and self.predictions is not None:
            values["predictions"] = [asdict(row) for row in self.predictions]
        return values

    def placed(self, recipe: Recipe, section: EvalSection, checkpoint: str, *, averaged: bool) -> Report:
        """The same with what was judged, and on what, in the protocol."""
        checkpoint += " (averaged weights)" if averaged else ""
        source = section.manifest or section.source or recipe.data.manifest or recipe.data.source
        named = ", ".join(source) if isinstance(source, tuple) else source
        head = {"source": named, "split": section.split or "all"}
        return replace(self, protocol=head | self.protocol | {"checkpoint": checkpoint})

    def headline(self) -> str:
        """One line: the scores that matter, beside chance, and the loss."""
        retrieval = self.classes is None and self.answers is None
        parts = _retrieval_headline(self.metrics) if retrieval else _classes_headline(self.metrics)
        loss = [f"loss {self.metrics['loss']:.3f}"] if "loss" in self.metrics else []
        return "; ".join([*parts, *loss, self.protocol["evaluated"]])

    def to_table(self) -> str:
        """For people: scores with chance beneath, classes if they are few, the protocol last."""
        if self.answers is not None:
            lines = _answers_table(self.metrics)
        elif self.classes is not None:
            lines = _classes_table(self.metrics, self.classes)
        else:
            lines = _retrieval_table(self.metrics)
        lines += ["", *(f"{name.replace('_', ' ')}: {value}" for name, value in self.protocol.items())]
        return "\n".join(lines)


def spoken(task: Task, say: Callable[[str, bool], None]) -> Callable[[int, int], None]:
    """What an evaluation reports to, in words: `say` gets `300/5000 pairs, 3m05s left`, say, and whether that is all.

    Args:
        task: one that compares videos with texts counts pairs, the others videos.
        say: shows it.
    """
    what, began = "pairs" if isinstance(task, VideoTextMatching) else "videos", time.monotonic()

    def report(done: int, total: int) -> None:
        left = (time.monotonic() - began) * (total - done) / done if done else 0.0
        say(f"{done}/{total} {what}" + (f", {format_seconds(left)} left" if left >= 1 else ""), done == total)

    return report


def _retrieval_headline(metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{direction.replace('_', ' ')} R@1 {100 * metrics[f'{direction}/recall_at_1']:.1f} "
        f"(chance {100 * metrics[f'chance/{direction}/recall_at_1']:.1f}), "
        f"median rank {metrics[f'{direction}/median_rank']:g}"
        for direction in DIRECTIONS
        if f"{direction}/recall_at_1" in metrics
    ]


def _retrieval_table(metrics: Mapping[str, float]) -> list[str]:
    columns = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank", "mean_rank")
    kinds = [f"{kind}{direction}" for kind in ("", "first_stage/", "chance/") for direction in DIRECTIONS]
    labels = [label for label in kinds if f"{label}/mean_rank" in metrics]
    space = max(22, *(len(label) + 2 for label in labels))
    lines = [f"{'':{space}}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'MedR':>9}{'MeanR':>9}"]
    for label in labels:
        values = [metrics.get(f"{label}/{column}") for column in columns]
        cells = [
            " " * width if value is None else f"{100 * value:{width}.1f}" if width == 8 else f"{value:{width}.1f}"
            for value, width in zip(values, (8, 8, 8, 9, 9), strict=True)
        ]
        lines.append(f"{label.replace('_', ' ').replace('/', ', '):{space}}" + "".join(cells))
    return lines


def _answers_table(metrics: Mapping[str, float]) -> list[str]:
    """Accuracy, of each kind of answer too, with chance beside it and the share of the rows."""
    kinds = [name.partition("/")[2] for name in metrics if name.startswith("accuracy/")]
    width = max(22, *(len(kind) + 4 for kind in kinds), 22)
    lines = [f"{'':{width}}{'accuracy':>12}{'chance':>12}{'of the rows':>14}"]
    for label, kind in (("all", ""), *((f"  {kind}", f"/{kind}") for kind in kinds)):
        values = metrics.get(f"accuracy{kind}"), metrics.get(f"chance/accuracy{kind}")
        share = metrics.get(f"share{kind}") if kind else 1.0
        cells = [" " * 12 if value is None else f"{100 * value:12.1f}" for value in values]
        lines.append(f"{label:{width}}" + "".join(cells) + ("" if share is None else f"{100 * share:14.1f}"))
    if "majority/accuracy" in metrics:
        lines.append(f"{'most frequent answer':{width}}{100 * metrics['majority/accuracy']:12.1f}")
    if "unanswerable_share" in metrics:
        cell = f"{100 * metrics['unanswerable_share']:{24 + 14}.1f}"
        lines.append(f"{'answer not in table':{width}}{cell}")
    return lines + ([f"loss {metrics['loss']:.3f}"] if "loss" in metrics else [])


def _short(name: str) -> str:
    """`top_1_accuracy` as `top 1`, and so on: columns of a table."""
    return {"mean_average_precision": "mAP"}.get(name, name.removesuffix("_accuracy").replace("_", " "))


def _measures(metrics: Mapping[str, float]) -> list[str]:
    return [name for name in metrics if "/" not in name and name not in ("loss", "unanswerable_share")]


_LARGEST = {"accuracy": "most frequent answer"}


def _classes_headline(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    for name in _measures(metrics):
        beside = [
            f"{words} {100 * metrics[f'{kind}/{name}']:.1f}"
            for kind, words in (("chance", "chance"), ("majority", _LARGEST.get(name, "largest class")))
            if f"{kind}/{name}" in metrics and name != "top_5_accuracy"
        ]
        parts.append(f"{_short(name)} {100 * metrics[name]:.1f}" + (f" ({', '.join(beside)})" if beside else ""))
    return parts


def _classes_table(metrics: Mapping[str, float], classes: ClassResults) -> list[str]:
    measures = _measures(metrics)
    lines = [f"{'':22}" + "".join(f"{_short(name):>12}" for name in measures)]
    for label, prefix in (("model", ""), ("chance", "chance/"), ("largest class", "majority/")):
        values = [metrics.get(prefix + name) for name in measures]
        if any(value is not None for value in values):
            cells = [" " * 12 if value is None else f"{100 * value:12.1f}" for value in values]
            lines.append((f"{label:22}" + "".join(cells)).rstrip())
    if "loss" in metrics:
        lines.append(f"loss {metrics['loss']:.3f}")
    return lines + _each_class(classes)


def _each_class(classes: ClassResults) -> list[str]:
    if len(classes.names) > MOST_CLASSES:
        return ["", f"{len(classes.names)} classes: results of each are in --json, or --confusion FILE.csv"]
    width = min(40, max(5, *map(len, classes.names)))
    single = classes.confusion is not None
    lines = ["", f"{'class':{width}}{'rows':>7}" + (f"{'right':>8}  most often taken for" if single else f"{'AP':>8}")]
    for place, (name, count) in enumerate(zip(classes.names, classes.counts, strict=True)):
        value = classes.per_class.get(place)
        cell = f"{'-':>8}" if value is None else f"{100 * value:8.1f}"
        lines.append(f"{_cut(name, width):{width}}{count:7}{cell}  {classes.confused_with(place) or ''}".rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def top_of(names: Sequence[str], scores: Tensor, ranked: Tensor, most: int) -> tuple[tuple[str, float], ...]:
    """The best few classes by name with their scores, from scores (C,) and `ranked` places, best first."""
    return tuple((names[place], float(scores[place])) for place in ranked[:most].tolist())
