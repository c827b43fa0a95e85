"""Model + rows -> scores, each row once, and how they were made: of two towers, a classifier, a cross-modal model.

The same code judges a run during training and in `twinreel eval`. Nothing is substituted: what could not be read is
named, and scores over fewer videos are given only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from twinreel.assembly import Run, evaluation_rows, load_run, pick_device, training_rows
from twinreel.data.clip import Batch, Clip
from twinreel.data.loader import WorkerStart
from twinreel.distributed import on_main, process_group, together
from twinreel.errors import ConfigError, DataError
from twinreel.evaluation.classification import class_measures, evaluate_classification
from twinreel.evaluation.files import check_result_files, write_confusion, write_predictions
from twinreel.evaluation.matching import PairScores, evaluate_matching, score_pairs
from twinreel.evaluation.report import Report, spoken
from twinreel.evaluation.rerank import SecondStage, load_second_stage
from twinreel.evaluation.retrieval import Gallery, build_gallery, embed_sentences, embed_videos, evaluate_retrieval
from twinreel.evaluation.views import evaluation_ahead, view_rules
from twinreel.recipe import EvalSection, Recipe
from twinreel.tasks import ActionRecognition, Task, VideoTextMatching

__all__ = [
    "Gallery",
    "PairScores",
    "Report",
    "build_gallery",
    "class_measures",
    "embed_sentences",
    "embed_videos",
    "evaluate",
    "evaluate_classification",
    "evaluate_matching",
    "evaluate_retrieval",
    "evaluate_task",
    "evaluation_ahead",
    "rows_in_common",
    "score_pairs",
    "spoken",
    "view_rules",
    "write_confusion",
    "write_predictions",
]


def evaluate_task(
    model: nn.Module,
    task: Task,
    rows: Sequence[Clip],
    section: EvalSection,
    *,
    device: torch.device,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    loss_batch_size: int = 32,
    transform: Callable[[Batch], Batch] | None = None,
    second: SecondStage | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """The evaluation that belongs to a task: of two towers, a classifier, or a cross-modal model.

    Args:
        model: on the device; it is left in the mode it is in.
        task: of the model.
        rows: what to judge on.
        section: how.
        device: where the model is.
        num_workers: reader processes.
        worker_start: how they are started.
        loss_batch_size: pairs that a contrastive loss compares at once.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        second: of two towers, a matching model that judges their first answers again.
        report: called with (rows done, rows in all), of a cross-modal model (pairs done, pairs in all); see `spoken`.
    """
    if isinstance(task, VideoTextMatching):
        return evaluate_matching(
            model, task, rows, section, device=device, num_workers=num_workers, worker_start=worker_start,
            transform=transform, report=report,
        )  # fmt: skip
    if isinstance(task, ActionRecognition):
        return evaluate_classification(
            model, task, rows, section, device=device, num_workers=num_workers, worker_start=worker_start,
            transform=transform, report=report,
        )  # fmt: skip
    return evaluate_retrieval(
        model, task, rows, section, device=device, num_workers=num_workers, worker_start=worker_start,
        loss_batch_size=loss_batch_size, transform=transform, second=second, report=report,
    )  # fmt: skip


def evaluate(
    run: str | Path | Run,
    *,
    checkpoint: str | None = None,
    manifest: str | Sequence[str] | None = None,
    source: str | None = None,
    split: str | None = None,
    root: str | None = None,
    overrides: Sequence[str] = (),
    predictions: str | Path | None = None,
    confusion: str | Path | None = None,
    report: Callable[[int, int], None] | None = None,
    say: Callable[[str, bool], None] | None = None,
) -> Report:
    """Judge a trained run on a manifest or a source; by default on what its recipe names under `eval`.

    Under torchrun the processes share the videos; each gets the same report as one process alone.

    Args:
        run: a run folder, or a loaded run.
        checkpoint: `last`, `best`, `step_N`; None = best if there is one, else last.
        manifest: CSV or JSONL to judge on.
        source: or a name of SOURCES.
        split: the split of it; None = all rows that have no split.
        root: the folder that its paths are relative to.
        overrides: `eval.num_clips=10` and the like.
        predictions: of a classifier, of choices and of answers, a CSV to write: what each row was taken for, by id.
        confusion: of a classifier, a file to write: which classes are taken for which; .csv, or .png, a picture.
        report: called with (videos done, videos in all), or pairs, see `evaluate_task`.
        say: called instead with the same in words and whether that is all, see `spoken`.

    Raises:
        ConfigError, DataError, CheckpointError, DependencyError: with what to do.
    """
    files = [None if path is None else Path(path) for path in (predictions, confusion)]
    check_result_files(*files)
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint, overrides, eval_source=source)
    _refuse_files(loaded, *files)
    second = load_second_stage(loaded.recipe.rerank, loaded)
    asked = {override.partition("=")[0] for override in overrides}
    split = loaded.recipe.eval.split if split is None and "eval.split" in asked else split
    root = loaded.recipe.eval.root if root is None and "eval.root" in asked else root
    section = _section(loaded.recipe, manifest, source, split, root)
    rows = evaluation_rows(loaded.recipe, section, own_root=manifest is not None or source is not None)
    if predictions is not None:
        _refuse_predictions(loaded, rows)
    device = pick_device(loaded.recipe.train.device)
    with process_group(device):
        chosen = on_main(lambda: loaded.checkpoint.name)
        with together():
            if chosen != loaded.checkpoint.name:  # a run that still trains has moved `best` in between
                loaded = load_run(loaded.folder, chosen, overrides, eval_source=source)
        if second is not None:
            second = replace(second.agreed(), say=say)
        result = evaluate_task(
            loaded.model.to(device), loaded.task, rows, section, device=device,
            num_workers=loaded.recipe.data.num_workers, worker_start=loaded.recipe.data.worker_start,
            loss_batch_size=loaded.recipe.train.global_batch_size,
            second=second,
            report=report if say is None else spoken(loaded.task, say),
        )  # fmt: skip
        on_main(lambda: _write_files(result, *files))
    placed = result.placed(
        loaded.recipe, section, f"{loaded.folder.name}/{loaded.checkpoint.name}", averaged=loaded.averaged
    )
    seen = {"trained_on": loaded} | ({} if second is None else {"second_stage_trained_on": second.run})
    shared = {name: _trained_on(one, rows) for name, one in seen.items()}
    facts = {name: f"{count} of these {len(rows)} rows" for name, count in shared.items() if count}
    return replace(placed, protocol=placed.protocol | facts)


def _trained_on(run: Run, rows: Sequence[Clip]) -> int:
    """How many rows are training rows of the run, where its manifest can still be read."""
    if run.recipe.data.source != "manifest" or run.recipe.data.manifest is None:
        return 0
    try:
        return rows_in_common(training_rows(run.recipe), rows)
    except (ConfigError, DataError):
        return 0


def rows_in_common(training: Sequence[Clip], rows: Sequence[Clip]) -> int:
    """How many rows show what a training row shows: the same file in the same window."""
    asked = [(row.video, row.start_seconds, row.end_seconds) for row in rows]
    wanted = set(asked)
    seen = {window for row in training if (window := (row.video, row.start_seconds, row.end_seconds)) in wanted}
    return sum(window in seen for window in asked)


def _refuse_files(run: Run, predictions: Path | None, confusion: Path | None) -> None:
    asked = [name for name, path in (("--predictions", predictions), ("--confusion", confusion)) if path is not None]
    if isinstance(run.task, VideoTextMatching):
        if confusion is not None:
            raise ConfigError(f"--confusion: of a classifier, and {run.folder} matches videos and texts; leave it out")
        return
    if not isinstance(run.task, ActionRecognition) and asked:
        raise ConfigError(
            f"{' and '.join(asked)}: of a classifier, and {run.folder} is a run of two towers; leave it out"
        )
    if isinstance(run.task, ActionRecognition) and run.task.classes.multi_label and confusion is not None:
        raise ConfigError(
            f"--confusion needs one label a row, and {run.folder} has task.multi_label=true; leave it out"
        )


def _refuse_predictions(run: Run, rows: Sequence[Clip]) -> None:
    retrieval = isinstance(run.task, VideoTextMatching) and run.task.goal == "retrieval"
    if retrieval and not any(row.options for row in rows):
        raise ConfigError(
            "--predictions: of classes, choices and answers, and these rows have captions and no options, which are "
            "judged by retrieval; leave it out"
        )


def _write_files(report: Report, predictions: Path | None, confusion: Path | None) -> None:
    if predictions is not None:
        write_predictions(report, predictions)
    if confusion is not None:
        write_confusion(report, confusion)


def _section(
    recipe: Recipe, manifest: str | Sequence[str] | None, source: str | None, split: str | None, root: str | None
) -> EvalSection:
    if manifest is not None and source is not None:
        raise ConfigError("give a manifest (--input) or a source (--source), not both")
    if manifest is None and source is None:
        if split is None and recipe.eval.split is None and recipe.eval.source is None and recipe.eval.manifest is None:
            raise ConfigError(
                "what shall be evaluated? The recipe names nothing under eval: give --input MANIFEST, "
                "--source NAME --root DIR, or --split of the training collection"
            )
        return recipe.eval.model_copy(
            update={name: value for name, value in (("split", split), ("root", root)) if value is not None}
        )
    kept = {name: getattr(recipe.eval, name) for name in EvalSection.model_fields}
    if source is not None and source == (recipe.eval.source or recipe.data.source):
        kept |= recipe.eval.options  # of the same source
    names = tuple([manifest] if isinstance(manifest, str) else manifest) if manifest is not None else None
    return EvalSection(**(kept | {"manifest": names, "source": source, "split": split, "root": root}))
