"""A classifier on rows with labels: scores of all views, each once, combined by row -> accuracies or mAP.

The scores of a view are the head's activation at every pooled position, averaged (see models/classifier.py). They are
combined by row in float64. The number of processes changes no bit of them; another batch size may change the last one
of a view's float32 scores, because a convolution picks another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.clip import Batch, Clip
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.distributed import alike, on_main, together
from twinreel.errors import DataError
from twinreel.evaluation.report import ClassResults, PredictedRow, Report, top_of
from twinreel.evaluation.views import (
    Viewed,
    frames_fact,
    refuse_missing,
    refuse_other_rows,
    view_rows,
    view_rules,
)
from twinreel.recipe import EvalSection
from twinreel.tasks import ActionRecognition

__all__ = ["class_measures", "evaluate_classification", "score_videos"]

TOP = 5  # classes of a row that are looked at


def class_measures(task: ActionRecognition) -> tuple[str, ...]:
    """The scores that `evaluate_classification` gives for a task, larger is better: by which a best one is chosen."""
    if task.classes.multi_label:
        return ("mean_average_precision",)
    ks = dict.fromkeys(min(k, len(task.classes)) for k in (1, TOP))
    return (*(f"top_{k}_accuracy" for k in ks), "mean_class_accuracy")


def score_videos(
    model: nn.Module,
    task: ActionRecognition,
    rows: Sequence[Clip],
    rules: ViewRules,
    *,
    how: Literal["mean", "max"] = "mean",
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Viewed:
    """Scores float64 (N, C) of rows, each view once, in order; in every process those of all processes.

    Args:
        model: in eval mode, on the device.
        task: says how clips are scored.
        rows: what to score.
        rules: which views.
        how: views are combined: `mean` or `max`.
        device: where the model is.
        batch_size: clips at once (rows x views).
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        report: called with (rows done, rows in all).
    """

    def combine(scores: Tensor) -> Tensor:
        num_rows, num_views = scores.shape[:2]
        views = [(str(row), view) for row in range(num_rows) for view in range(num_views)]
        return metrics.aggregate_views(scores.flatten(0, 1), views, num_views=num_views, how=how).scores

    return view_rows(
        rows, rules, lambda video: task.scores(model, video), combine, device=device, batch_size=batch_size,
        num_workers=num_workers, worker_start=worker_start, transform=transform, report=report,
    )  # fmt: skip


def evaluate_classification(
    model: nn.Module,
    task: ActionRecognition,
    rows: Sequence[Clip],
    section: EvalSection,
    *,
    device: torch.device,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """How well a classifier names what happens in rows.

    Raises:
        DataError: a label is no class, a video could not be read (unless `section.allow_missing`), no row is left, or
            a score is not finite.
    """
    was_training = model.training
    model.eval()
    own_preprocessing: Any = model.preprocessing
    rules = view_rules(own_preprocessing, section)
    with together():
        if not rows:
            raise DataError("there is no row to evaluate on; look at eval.split and the manifest")
        task.classes.check(rows, "evaluation")
    with alike():
        refuse_other_rows([(row.id, row.labels) for row in rows], "manifest")
    viewed = score_videos(
        model, task, rows, rules, how=section.combine_views, device=device, batch_size=section.batch_size,
        num_workers=num_workers, worker_start=worker_start, transform=transform, report=report,
    )  # fmt: skip
    with together():
        refuse_missing(viewed.faults, viewed.valid, section)
    model.train(was_training)
    kept = [row for row, valid in zip(rows, viewed.valid.tolist(), strict=True) if valid]
    values, classes = on_main(lambda: _judge(model, task, kept, viewed.values[viewed.valid]))
    protocol = _protocol(model, task, section, rules, viewed) | _classes_fact(task, classes, kept)
    return Report(metrics=values, protocol=protocol, faults=viewed.faults, classes=classes)


def _judge(
    model: nn.Module, task: ActionRecognition, rows: Sequence[Clip], scores: Tensor
) -> tuple[dict[str, float], ClassResults]:
    """Metrics and results by class and by row, from scores (N, C)."""
    targets = task.classes.targets([row.labels for row in rows])
    ids = [row.id for row in rows]
    counts = targets.sum(0)
    confusion: Tensor | None = None
    if task.classes.multi_label:
        precision = metrics.mean_average_precision(scores, targets, ids=ids)
        per_class = precision.per_class
        occurring = counts[counts > 0]
        values = {
            "mean_average_precision": precision.mean,
            "chance/mean_average_precision": float(occurring.mean()) / len(rows),
        }
    else:
        labels = targets.argmax(1)
        per_class = metrics.per_class_accuracy(scores, labels, ids=ids)
        confusion = metrics.confusion_matrix(scores, labels, ids=ids)
        values = _accuracies(scores, labels, per_class, ids)
    loss = task.loss_of_scores(model, scores, targets)
    results = ClassResults(
        names=task.classes.names,
        counts=tuple(map(int, counts.tolist())),
        per_class=per_class,
        confusion=confusion,
        predictions=_predictions(task, rows, scores, targets),
    )
    return values | ({} if math.isnan(loss) else {"loss": loss}), results


def _accuracies(scores: Tensor, labels: Tensor, per_class: dict[int, float], ids: Sequence[str]) -> dict[str, float]:
    """Accuracies, and beside them those of a guess among all classes and of naming the largest class always."""
    num_classes = scores.shape[1]
    found = metrics.top_k_accuracies(scores, labels, ks=(1, TOP), ids=ids)
    largest = int(labels.bincount().max()) / len(labels)
    chance = {f"chance/{name}": int(name.split("_")[1]) / num_classes for name in found}
    mean = sum(per_class.values()) / len(per_class)
    return found | {"mean_class_accuracy": mean} | chance | {"majority/top_1_accuracy": largest}


def _predictions(task: ActionRecognition, rows: Sequence[Clip], scores: Tensor, targets: Tensor) -> list[PredictedRow]:
    names = task.classes.names
    ranked = metrics.ranked_classes(scores, targets)
    ranks = targets.gather(1, ranked).argmax(1) + 1
    return [
        PredictedRow(
            id=row.id,
            video=row.video,
            labels=tuple(names[place] for place in task.classes.places(row.labels)),
            rank=int(ranks[index]) if row.labels else None,
            top=top_of(names, scores[index], ranked[index], TOP),
        )
        for index, row in enumerate(rows)
    ]


def _protocol(
    model: nn.Module, task: ActionRecognition, section: EvalSection, rules: ViewRules, viewed: Viewed
) -> dict[str, Any]:
    expected, prep = len(viewed.valid), rules.preprocessing
    crops = "1 crop" if rules.num_crops == 1 else f"{rules.num_crops} crops"
    windows = "1 window" if rules.windows_a_row == 1 else f"{rules.windows_a_row} windows"
    return {
        "evaluated": f"{int(viewed.valid.sum())}/{expected} videos",
        "views": f"{windows} ({section.windows}) x {crops} a video, combined by {section.combine_views} of the scores",
        "scores": _scores_fact(model, task),
        "frames": frames_fact(prep, section.windows),
        "repeated_frames": f"{viewed.repeated_frames} of {expected * rules.windows_a_row * prep.num_frames}"
        " (the last one of a video shorter than a clip)",
        "crop": rules.framing,
        "ties": "pass a threshold together" if task.classes.multi_label else "count against the model",
    }


def _scores_fact(model: nn.Module, task: ActionRecognition) -> str:
    activation = getattr(model, "head_activation", None)
    if activation is None:
        return f"{'sigmoid' if task.classes.multi_label else 'softmax'} of the model's logits"
    if activation == "none":
        return "logits, averaged over positions"
    return f"{activation} at every pooled position, then averaged over positions"


def _classes_fact(task: ActionRecognition, classes: ClassResults, rows: Sequence[Clip]) -> dict[str, Any]:
    occurring = sum(count > 0 for count in classes.counts)
    fact = f"{len(classes.names)}, of which {occurring} occur"
    if task.classes.multi_label and occurring < len(classes.names):
        fact += f"; the {len(classes.names) - occurring} without a positive are left out of the mean"
    numbers = any(isinstance(label, int) for row in rows for label in row.labels)
    if numbers and task.classes.names != tuple(map(str, range(len(task.classes)))):
        fact += f"; the labels are numbers: places among the classes, 0 = {task.classes.names[0]}"
    return {"classes": fact}
