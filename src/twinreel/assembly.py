"""From a recipe, or from a run folder, to the parts of a run: rows, model, task."""

from __future__ import annotations

import inspect
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinreel import losses
from twinreel.checkpoint import find_checkpoint, read_model_json, read_task_weights, read_weights, weights_file
from twinreel.config import import_function
from twinreel.data.caption_rows import caption_rows, paragraph_rows
from twinreel.data.classes import ClassTable
from twinreel.data.clip import Clip
from twinreel.data.manifest.class_names import read_class_names
from twinreel.data.plan import keyed_seed
from twinreel.data.sources import load_rows, source_notes
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.models import TwoTowers, check_classifier, check_matcher, check_towers, create_model, find_builder
from twinreel.models.weights import Weights, load_partial, sizes_of_parts
from twinreel.recipe import DataSection, EvalSection, ModelSection, Recipe, load_recipe
from twinreel.tasks import ActionRecognition, Contrastive, Mixing, Task, VideoTextMatching
from twinreel.text import Vocabulary
from twinreel.wordpiece import WordPiece, load_vocabulary

__all__ = [
    "Run",
    "build_model",
    "build_task",
    "describe_model",
    "evaluates",
    "evaluation_rows",
    "load_model",
    "load_run",
    "pick_device",
    "refuse_idle_overrides",
    "training_notes",
    "training_rows",
]


_log = logging.getLogger(__name__)

# What a trained run can be asked to do otherwise: how it is judged, where data lie, where it computes.
CHANGEABLE = ("eval.", "rerank.", "data.root", "data.manifest", "data.num_workers", "data.worker_start", "train.device")


def pick_device(name: str) -> torch.device:
    """The device of this process; under torchrun the GPU of its LOCAL_RANK.

    Raises:
        ConfigError: a GPU is asked for and there is none, or none for this process.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but PyTorch sees no GPU here; use train.device=cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    wanted, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if wanted > there:
        raise ConfigError(
            f"{socket.gethostname()}: {wanted} processes on this machine, but PyTorch sees {there} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start torchrun with "
            f"--nproc-per-node {there}, or make more GPUs visible"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _rows(section: DataSection | EvalSection, source: str, root: str | None, split: str | None) -> list[Clip]:
    options = dict(section.options)
    if source == "manifest" and section.manifest is None:
        raise ConfigError("data.manifest is missing: name your CSV or JSONL, e.g. data.manifest=my_videos.csv")
    if source == "manifest":
        options |= {"manifest": section.manifest, "caption_template": section.caption_template}
    elif section.caption_template is not None:
        options["caption_template"] = section.caption_template
    if split == "all":
        return load_rows(source, root, None, **options)
    rows = load_rows(source, root, split, **options)
    splits = sorted({row.split for row in rows if row.split is not None})
    if split is None and splits:
        key = "data.split" if isinstance(section, DataSection) else "eval.split"
        raise ConfigError(f"the rows have splits ({', '.join(splits)}): choose with {key}=NAME, or {key}=all")
    return rows


def training_rows(recipe: Recipe) -> list[Clip]:
    """The rows that a recipe trains on."""
    data = recipe.data
    rows = _rows(data, data.source, data.root, data.split)
    if data.caption_rows == "video":
        return rows
    return paragraph_rows(rows) if data.caption_rows == "paragraph" else caption_rows(rows)


def training_notes(recipe: Recipe) -> list[str]:
    """What the training source leaves unused, a line each."""
    data = recipe.data
    options = data.options | ({"manifest": data.manifest} if data.source == "manifest" else {})
    return source_notes(data.source, **options)


def evaluates(recipe: Recipe) -> bool:
    """Whether the recipe names something to be judged by."""
    return bool(recipe.eval.split or recipe.eval.source or recipe.eval.manifest)


def evaluation_rows(recipe: Recipe, section: EvalSection | None = None, *, own_root: bool = False) -> list[Clip]:
    """The rows that a recipe is judged by; what `eval` leaves out is that of `data`.

    Args:
        recipe: the recipe.
        section: what to judge on instead of the recipe's own `eval`.
        own_root: no root means the manifest's own folder, not the root of `data`.
    """
    data, section = recipe.data, section or recipe.eval
    manifest = section.manifest or (data.manifest if section.source is None else None)
    source = section.source or ("manifest" if section.manifest else data.source)
    inherited = (data.options if source == data.source else {}) | section.options
    root = data.root if section.root is None and source == data.source and not own_root else section.root
    filled = EvalSection(
        source=source,
        manifest=manifest,
        root=root,
        split=section.split,
        caption_template=section.caption_template or data.caption_template,
        **inherited,
    )
    rows = _rows(filled, source, root, section.split)
    form = section.caption_rows or data.caption_rows
    return paragraph_rows(rows) if form == "paragraph" else _timed_rows(rows) if form == "caption" else rows


def _timed_rows(rows: Sequence[Clip]) -> list[Clip]:
    """Captions with seconds of their own as rows; else each is a query of its video already."""
    found: list[Clip] = []
    for row in rows:
        timed = row.captions and all(caption.start_seconds is not None for caption in row.captions)
        found += caption_rows([row]) if timed or row.caption_file is not None else [row]
    return found


def build_task(recipe: Recipe, checkpoint: Path | None = None, rows: Sequence[Clip] = ()) -> Task:
    """The task with its loss; with what it has learned by a checkpoint.

    Args:
        recipe: the recipe.
        checkpoint: says which classes there are; None = a new run.
        rows: of a new run, whose labels say it.
    """
    section, data = recipe.task, recipe.data
    loss = import_function(section.loss, "task.loss") if ":" in section.loss else losses.LOSSES[section.loss]
    if section.name == ActionRecognition.name:
        return ActionRecognition(
            loss=loss,
            classes=_new_classes(recipe, rows) if checkpoint is None else _classes_of(recipe, checkpoint),
            loss_options=section.options,
            mixing=Mixing(
                mixup_alpha=data.mixup,
                cutmix_alpha=data.cutmix,
                probability=data.mix_probability,
                switch_probability=data.mix_switch_probability,
            ),
            views_per_row=data.repeated_augmentation,
        )
    if section.name == VideoTextMatching.name:
        return VideoTextMatching(
            loss=loss,
            goal=section.goal,
            num_negatives=section.num_negatives,
            answers=_answers(recipe, rows, checkpoint) if section.goal == "question_answering" else (),
            loss_options=section.options,
        )
    task = Contrastive(
        loss=loss,
        num_candidates=section.num_candidates,
        max_words=section.max_words,
        loss_options=section.options,
        learn_temperature=section.learn_temperature,
    )
    if checkpoint is not None and section.learn_temperature:
        task.load_state_dict(read_task_weights(checkpoint))
    return task


def _new_classes(recipe: Recipe, rows: Sequence[Clip]) -> ClassTable:
    """The classes of a file of names, in the order of their numbers, or else of the labels of the rows."""
    multi_label, names = recipe.task.multi_label, recipe.data.options.get("class_names")
    if not isinstance(names, str):
        if not any(row.labels for row in rows) and (unused := training_notes(recipe)):
            raise DataError(f"no row has a label; {'; '.join(unused)}: is one of them meant as `label`?")
        return ClassTable.from_rows(rows, multi_label=multi_label, num_classes=recipe.model.num_classes)
    by_number = read_class_names(names)
    if recipe.model.num_classes not in (None, len(by_number)):
        raise ConfigError(f"model.num_classes={recipe.model.num_classes}, but {names} names {len(by_number)} classes")
    table = ClassTable(tuple(by_number[number] for number in sorted(by_number)), multi_label)
    table.check(rows, "training")
    return table


def _answers(recipe: Recipe, rows: Sequence[Clip], checkpoint: Path | None) -> tuple[str, ...]:
    """The answers that a model can give, the most frequent ones of the training rows first; ties by the alphabet."""
    if checkpoint is not None:
        return tuple(read_model_json(checkpoint)["answers"])
    counts = Counter(str(label) for row in rows for label in row.labels)
    if len(counts) < 2:
        raise DataError(
            f"the training rows have {len(counts)} different answers; task.goal=question_answering needs a column "
            "answer with at least two"
        )
    ranked = sorted(counts, key=lambda answer: (-counts[answer], answer))
    return tuple(ranked[: recipe.model.num_classes])


def _classes_of(recipe: Recipe, checkpoint: Path) -> ClassTable:
    names = read_model_json(checkpoint).get("class_names")
    if not names:
        raise CheckpointError(f"{checkpoint}: names no classes; it was not trained with task.name=action_recognition")
    return ClassTable(tuple(names), recipe.task.multi_label)


def build_model(recipe: Recipe, task: Task, captions: Iterable[str]) -> nn.Module:
    """A new model for training: seeded by the recipe, with its starting weights and its vocabulary or classes.

    Args:
        recipe: the recipe.
        task: says which classes there are.
        captions: what a vocabulary is built from if the recipe names none.
    """
    section = recipe.model
    if section.weights_scope == "backbone" and section.weights is None:
        raise ConfigError(
            "model.weights_scope=backbone, but there are no weights: name their file, model.weights=FILE, or train "
            "from random weights with model.weights_scope=all"
        )
    if recipe.train.batch_norm == "frozen" and section.weights is None and isinstance(task, ActionRecognition):
        raise ConfigError(
            "train.batch_norm=frozen with random weights: statistics of 0 and 1 would stay for good; name "
            "model.weights, or set train.batch_norm=per_process"
        )
    vocabulary: Vocabulary | WordPiece | None
    if isinstance(task, VideoTextMatching):
        vocabulary = _word_pieces(section, captions)
    elif section.vocabulary is not None:
        vocabulary = Vocabulary.load(section.vocabulary, fold_case=section.fold_case)
    elif ":" in section.name or isinstance(task, ActionRecognition):
        vocabulary = None  # the user's own towers bring what they need, a classifier needs none
    else:
        try:
            vocabulary = Vocabulary.build(captions, min_count=section.min_word_count, fold_case=section.fold_case)
        except DataError as error:
            raise DataError(
                f"no vocabulary can be built from the training rows: {error}. Look at the captions, lower "
                "model.min_word_count, or give model.vocabulary. Rows with labels alone need data.caption_template"
            ) from error
    whole = section.weights if isinstance(section.weights, str) else None
    sizes = _sizes(section, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_seed(recipe.train.seed, "weights"))
        model = create_model(
            section.name,
            weights=whole,
            weights_scope=section.weights_scope,
            vocabulary=vocabulary,
            preprocessing=section.preprocessing.model_dump(exclude_none=True),
            num_classes=len(task.classes) if isinstance(task, ActionRecognition) else None,
            num_outputs=task.num_outputs if isinstance(task, VideoTextMatching) else None,
            **(sizes | section.options),
        )
    checks = {ActionRecognition.name: check_classifier, VideoTextMatching.name: check_matcher}
    checks.get(task.name, check_towers)(model, section.name)
    if isinstance(task, VideoTextMatching):
        _warn_of_random_frozen(section, model)
    if sizes:
        model.imported_options = sizes  # type: ignore[assignment]
    if isinstance(section.weights, dict):
        for prefix, path in section.weights.items():
            report = load_partial(model, prefix, path, scope=section.weights_scope)
            _log.log(logging.WARNING if report.dropped or report.kept else logging.INFO, "%s", report)
    return model


def _warn_of_random_frozen(section: ModelSection, model: nn.Module) -> None:
    """A published network has parts that never train; without its weights they stay what chance made them."""
    cnn: Any = getattr(model, "cnn", None)
    started = isinstance(section.weights, str) or any(name.startswith("cnn") for name in section.weights or ())
    frozen = 0 if cnn is None else sum(not parameter.requires_grad for parameter in cnn.parameters())
    if frozen and not started and section.options.get("image_tower") is None:
        _log.warning(
            "%d tensors of the CNN are frozen by design and random: no weights were named for it, so they stay so; "
            "name model.weights, or train all of it with model.freeze_stages=0 model.cnn_norm=group", frozen,
        )  # fmt: skip


def _sizes(section: ModelSection, task: Task) -> dict[str, Any]:
    """Sizes of a cross-modal model that the weights of its parts state, but for those that the recipe gives."""
    if not isinstance(task, VideoTextMatching) or not isinstance(section.weights, dict):
        return {}
    takes = inspect.signature(find_builder(section.name)).parameters
    sizes = sizes_of_parts(section.weights)
    return {key: size for key, size in sizes.items() if key in takes and key not in section.options}


def _word_pieces(section: ModelSection, captions: Iterable[str]) -> WordPiece | None:
    """What a cross-modal model reads: a file, or for our own models one made of the captions."""
    if section.vocabulary is not None:
        return WordPiece.load(section.vocabulary, fold_case=None if section.fold_case else False)
    if ":" in section.name:
        return None  # the user's own brings what it needs
    weights = section.weights
    beside = Path(weights).parent / "vocabulary.json" if isinstance(weights, str) else None
    if beside is not None and beside.is_file():
        _log.info("the words are those of %s, beside the weights", beside)
        return WordPiece.load(beside)  # of a checkpoint of ours
    if isinstance(weights, str) or any(prefix.startswith("transformer") for prefix in weights or ()):
        raise ConfigError(
            "model.vocabulary is missing: the text side of these weights was trained with a vocab.txt, whose order of "
            "words is the order of its table; name that file"
        )
    return WordPiece.build(captions, fold_case=section.fold_case, min_count=section.min_word_count)


def describe_model(recipe: Recipe, model: nn.Module, task: Task) -> dict[str, Any]:
    """What `load_model` needs to build this model again; saved with the weights. Asked before parts are frozen."""
    vocabulary = getattr(model, "vocabulary", None)
    preprocessing: Any = model.preprocessing
    options = {**getattr(model, "imported_options", {}), **recipe.model.options}
    if isinstance(model, TwoTowers) and model.text_tower is not None:
        table: Any = model.text_tower.word_embd
        options["train_word_vectors"] = bool(table.weight.requires_grad)  # as decided, perhaps by the starting weights
    return {
        "name": recipe.model.name,
        "options": options,
        "preprocessing": preprocessing.to_dict(),
        "has_vocabulary": vocabulary is not None,
        "class_names": list(task.classes.names) if isinstance(task, ActionRecognition) else None,
    } | _matching_description(task)


def _matching_description(task: Task) -> dict[str, Any]:
    if not isinstance(task, VideoTextMatching):
        return {}
    return {"num_outputs": task.num_outputs, "answers": list(task.answers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trained run, loaded."""

    folder: Path
    checkpoint: Path
    recipe: Recipe
    model: nn.Module
    task: Task

    @property
    def towers(self) -> Contrastive:
        """The task of two towers.

        Raises:
            ConfigError: the run is of another task.
        """
        if not isinstance(self.task, Contrastive):
            own = "`twinreel predict RUN VIDEO` names what happens in a video"
            if isinstance(self.task, VideoTextMatching):
                own = f"rerank.run={self.folder} lets this one judge the first answers of such a run"
            raise ConfigError(
                f"{self.folder}: trained with task.name={self.task.name}, it has no embeddings of sentences; embed and "
                f"search need a run of task.name=contrastive. {own}"
            )
        return self.task

    @property
    def averaged(self) -> bool:
        """Whether the model has averaged weights."""
        return weights_file(self.checkpoint, averaged=True) != weights_file(self.checkpoint)


def load_run(
    folder: str | Path,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
    *,
    eval_source: str | None = None,
) -> Run:
    """Load a run folder: its recipe (with overrides), model and task.

    Args:
        folder: what `twinreel train --out` wrote.
        checkpoint: `last`, `best`, `step_N`; None = best if there is one, else last.
        overrides: `section.key=value`.
        eval_source: what it is judged by instead of its `eval.source`; `overrides` may hold options of it.

    Raises:
        CheckpointError: no run there, or no such checkpoint.
    """
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (no recipe.yaml); give what `twinreel train --out` wrote")
    recipe = load_recipe(folder / "recipe.yaml", overrides, eval_source=eval_source)
    refuse_idle_overrides(folder, overrides)
    if checkpoint is None and (folder / "checkpoints" / "best").exists():
        checkpoint = "best"
    path, warnings = find_checkpoint(folder, checkpoint)
    for warning in warnings:
        _log.warning("%s: %s", folder, warning)
    model = model_from_checkpoint(path, averaged=True)
    return Run(folder=folder, checkpoint=path, recipe=recipe, model=model, task=build_task(recipe, path))


def refuse_idle_overrides(folder: Path, overrides: Sequence[str]) -> None:
    """Raises:
    ConfigError: an override would change what a trained run is.
    """
    idle = [override for override in overrides if not override.startswith(CHANGEABLE)]
    if idle:
        raise ConfigError(
            f"{folder}: {', '.join(idle)} cannot change a trained run (its checkpoint holds model and task); "
            f"what can be changed: {', '.join(CHANGEABLE)}"
        )


def model_from_checkpoint(path: Path, *, averaged: bool = False) -> nn.Module:
    """The model of a checkpoint, in eval mode, on the CPU; strict. A classifier has its `class_names`.

    Args:
        path: the checkpoint.
        averaged: with the averaged weights if it has them (`train.ema_decay`), else with those that are trained.
    """
    saved: Mapping[str, Any] = read_model_json(path)
    vocabulary = load_vocabulary(path / "vocabulary.json") if saved["has_vocabulary"] else None
    model = create_model(
        saved["name"],
        weights=Weights(source=str(path), layout="twinreel", tensors=read_weights(path, averaged=averaged)),
        vocabulary=vocabulary,
        preprocessing=saved["preprocessing"],
        num_classes=len(saved["class_names"]) if saved.get("class_names") else None,
        num_outputs=saved.get("num_outputs"),
        **saved["options"],
    )
    if saved.get("class_names"):
        model.class_names = tuple(saved["class_names"])  # type: ignore[assignment]
    return model


def load_model(folder: str | Path, checkpoint: str | None = None) -> nn.Module:
    """The model of a trained run: best, else last; eval mode, CPU."""
    return load_run(folder, checkpoint).model
