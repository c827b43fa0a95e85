"""From a recipe, or from a run folder, to the parts of a run: rows, model, task."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinreel import losses
from twinreel.checkpoint import find_checkpoint, read_model_json, read_task_weights, read_weights, weights_file
from twinreel.config import import_function
from twinreel.data.classes import ClassTable
from twinreel.data.clip import Clip
from twinreel.data.manifest.class_names import read_class_names
from twinreel.data.plan import keyed_seed
from twinreel.data.sources import load_rows, source_notes
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.models import TwoTowers, check_classifier, check_towers, create_model
from twinreel.models.weights import Weights, load_partial
from twinreel.recipe import DataSection, EvalSection, Recipe, load_recipe
from twinreel.tasks import ActionRecognition, Contrastive, Mixing, Task
from twinreel.text import Vocabulary

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
CHANGEABLE = ("eval.", "data.root", "data.manifest", "data.num_workers", "data.worker_start", "train.device")


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
    return _rows(data, data.source, data.root, data.split)


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
    return _rows(filled, source, root, section.split)


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
    vocabulary: Vocabulary | None
    if section.vocabulary is not None:
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_seed(recipe.train.seed, "weights"))
        model = create_model(
            section.name,
            weights=whole,
            weights_scope=section.weights_scope,
            vocabulary=vocabulary,
            preprocessing=section.preprocessing.model_dump(exclude_none=True),
            num_classes=len(task.classes) if isinstance(task, ActionRecognition) else None,
            **section.options,
        )
    if isinstance(task, ActionRecognition):
        check_classifier(model, section.name)
    else:
        check_towers(model, section.name)
    if isinstance(section.weights, dict):
        for prefix, path in section.weights.items():
            load_partial(model, prefix, path, scope=section.weights_scope)
    return model


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
    }


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
            raise ConfigError(
                f"{self.folder}: trained with task.name={self.task.name}, it has no embeddings of sentences; embed and "
                "search need a run of task.name=contrastive. `twinreel predict RUN VIDEO` names what happens in a video"
            )
        return self.task

    @property
    def averaged(self) -> bool:
        """Whether the model has averaged weights."""
        return weights_file(self.checkpoint, averaged=True) != weights_file(self.checkpoint)


def load_run(folder: str | Path, checkpoint: str | None = None, overrides: Sequence[str] = ()) -> Run:
    """Load a run folder: its recipe (with overrides), model and task.

    Args:
        folder: what `twinreel train --out` wrote.
        checkpoint: `last`, `best`, `step_N`; None = best if there is one, else last.
        overrides: `section.key=value`.

    Raises:
        CheckpointError: no run there, or no such checkpoint.
    """
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (no recipe.yaml); give what `twinreel train --out` wrote")
    recipe = load_recipe(folder / "recipe.yaml", overrides)
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
    vocabulary = Vocabulary.load(path / "vocabulary.json") if saved["has_vocabulary"] else None
    model = create_model(
        saved["name"],
        weights=Weights(source=str(path), layout="twinreel", tensors=read_weights(path, averaged=averaged)),
        vocabulary=vocabulary,
        preprocessing=saved["preprocessing"],
        num_classes=len(saved["class_names"]) if saved.get("class_names") else None,
        **saved["options"],
    )
    if saved.get("class_names"):
        model.class_names = tuple(saved["class_names"])  # type: ignore[assignment]
    return model


def load_model(folder: str | Path, checkpoint: str | None = None) -> nn.Module:
    """The model of a trained run: best, else last; eval mode, CPU."""
    return load_run(folder, checkpoint).model
