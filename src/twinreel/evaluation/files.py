"""Results as files: what each row was taken for or answered, and which classes are taken for which."""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from twinreel.data.tables import write_whole
from twinreel.errors import ConfigError, DependencyError
from twinreel.evaluation.report import PredictedRow, Report

__all__ = ["check_result_files", "write_confusion", "write_predictions"]

PICTURE_SIDE = 560  # pixels of the matrix itself, where classes are few
LEAST_CELL = 3  # pixels
CELL_WITH_COUNT = 26  # pixels; in smaller ones a number cannot be read
MOST_NAMES = 60  # beside a picture; of more classes none can be read
NAME_LENGTH = 24
LABEL_SEPARATOR = "|"  # of several in one cell


def check_result_files(predictions: Path | None, confusion: Path | None) -> None:
    """Refuse names of files that could not be written later, before anything is computed.

    Raises:
        ConfigError: another suffix, or a folder that is not there.
        DependencyError: a picture is asked for and matplotlib is missing.
    """
    for path, option, suffixes in (
        (predictions, "--predictions", (".csv",)),
        (confusion, "--confusion", (".csv", ".png")),
    ):
        if path is None:
            continue
        if path.suffix.lower() not in suffixes:
            raise ConfigError(f"{option} {path}: the name must end in {' or '.join(suffixes)}")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file in it")
    if confusion is not None and confusion.suffix.lower() == ".png":
        _matplotlib_figure()


def write_predictions(report: Report, path: Path) -> None:
    """A CSV with a line a row: id, video, label, rank of the right class, the five best classes and their scores.

    Several labels stand in one cell with `|` between them. Scores are fractions. For choices and answers the columns
    are id, video, answer, rank, `answer_1`, `score_1` and so on; scores are log-odds or logits.

    Raises:
        ConfigError: the report is of retrieval.
        DataError: the file cannot be written.
    """
    rows = report.predictions
    if rows is None:
        raise ConfigError(
            "predictions can be written of classes, choices and answers, and these are scores of retrieval"
        )
    label, best = ("label", "class") if report.answers is None else ("answer", "answer")
    places = range(1, 1 + max((len(row.top) for row in rows), default=0))
    header = ["id", "video", label, "rank", *(f"{what}_{place}" for place in places for what in (best, "score"))]
    write_whole(path, _csv([header, *(_prediction_cells(row) for row in rows)]))


def _prediction_cells(row: PredictedRow) -> list[str]:
    best = [cell for name, score in row.top for cell in (name, f"{score:.6g}")]
    return [row.id, row.video, LABEL_SEPARATOR.join(row.labels), "" if row.rank is None else str(row.rank), *best]


def write_confusion(report: Report, path: Path) -> None:
    """The confusion matrix as CSV (a line a right class, a column a predicted one, counts), or as a picture (.png).

    Raises:
        ConfigError: the report is not of a classifier of one label a row.
        DependencyError: a picture needs matplotlib.
        DataError: the file cannot be written.
    """
    classes = report.classes
    if classes is None:
        raise ConfigError("a confusion matrix can be written of classes, task.name=action_recognition; leave it out")
    if classes.confusion is None:
        raise ConfigError("a confusion matrix needs one label a row, and task.multi_label=true; leave --confusion out")
    if path.suffix.lower() == ".png":
        _draw_figure(classes.confusion, classes.names, path)
        return
    counts = classes.confusion.tolist()
    rows = [[name, *map(str, own)] for name, own in zip(classes.names, counts, strict=True)]
    write_whole(path, _csv([["right / predicted", *classes.names], *rows]))


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    """A name a class; its number where there is none."""
    known = list(names or ())[:count]
    shown = known + [str(place) for place in range(len(known), count)]
    return [name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 3] + "..." for name in shown]


def _shares(matrix: Tensor) -> Tensor:
    """Counts as shares of each right class, 0 to 1; a class that does not occur has zeros."""
    return matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)


def _matplotlib_figure() -> Any:
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise DependencyError(
            "a picture of the confusion matrix needs matplotlib: pip install 'twinreel[plots]', or name a .csv"
        ) from error
    return figure


def _draw_figure(matrix: Tensor, names: Sequence[str], path: Path) -> None:
    count = len(matrix)
    side = min(30.0, 3.0 + 0.3 * count)  # inches
    figure = _matplotlib_figure().Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(_shares(matrix).numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
    shown = _names(names, count)
    axes.set_xticks(range(count), shown, rotation=90)
    axes.set_yticks(range(count), shown)
    axes.set_xlabel("predicted")
    axes.set_ylabel("right")
    figure.colorbar(drawn, ax=axes, shrink=0.7, label="share of the right class")
    if count <= MOST_NAMES:
        for row, column in matrix.nonzero().tolist():
            color = "white" if float(_shares(matrix[row : row + 1])[0, column]) > 0.5 else "black"
            axes.text(column, row, int(matrix[row, column]), ha="center", va="center", color=color, fontsize=7)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
