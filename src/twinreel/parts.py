"""What a run is built of: rows, plan, model, task, optimizer. `start_line.py` says so beforehand."""

from __future__ import annotations

import hashlib
import inspect
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from twinreel.assembly import (
    build_model,
    build_task,
    describe_model,
    evaluates,
    evaluation_rows,
    model_from_checkpoint,
    training_rows,
)
from twinreel.checkpoint import read_model_json
from twinreel.data.augment import check_augment
from twinreel.data.captions import collection_captions
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ClipDataset
from twinreel.data.loader import load_batches, refuse_missing_files
from twinreel.data.manifest import missing_videos
from twinreel.data.negatives import NegativeCaptions
from twinreel.data.plan import Plan, Shares
from twinreel.data.read_ahead import clip_bytes
from twinreel.data.tables import did_you_mean
from twinreel.data.training_sample import TrainingRules
from twinreel.distributed import alike, gather_objects, together, world
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.evaluation import build_gallery, class_measures, view_rules
from twinreel.models.preferred import preferred
from twinreel.models.training_modes import apply_batch_norm, batch_norms, checkpoint_activations
from twinreel.optim import Schedule, WeightAverage, build_optimizer, build_schedule, freeze, parameter_groups
from twinreel.recipe import OptimSection, Recipe
from twinreel.tasks import ActionRecognition, Contrastive, Task, VideoTextMatching, WholeModel

__all__ = [
    "PLAIN_SCHEDULE",
    "Parts",
    "build_parts",
    "for_device",
    "read_batches",
    "sample_bytes",
    "training_rules",
]

# Of a short trial, whose few steps a recipe's epochs do not fit into.
PLAIN_SCHEDULE: dict[str, Any] = {
    "warmup_steps": None, "warmup_epochs": None, "warmup_fraction": None, "decay": "none", "decay_epochs": (),
    "decay_factors": (),
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is built of.

    `whole` is what computes: model and task as one module, wrapped for several processes. `idle` are the modules
    that stay in eval mode while the others train; `norms` the batch norms that learn statistics; `negatives` gives a
    batch wrong captions, where the task wants some of other videos.
    """

    rows: list[Clip]
    rows_digest: str
    eval_rows: list[Clip]
    missing: list[Clip]
    caption_faults: list[Fault]
    plan: Plan
    shares: Shares
    total_steps: int
    schedule: Schedule
    model: nn.Module
    task: Task
    whole: nn.Module
    idle: list[nn.Module]
    norms: list[nn.Module]
    negatives: NegativeCaptions | None = None
    average: WeightAverage | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    description: dict[str, Any]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that is trained, a learned temperature included."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def train_mode(self) -> None:
        """Train mode, but for what is frozen."""
        self.whole.train()
        for module in self.idle:
            module.eval()


def for_device(recipe: Recipe, device: torch.device) -> Recipe:
    """The same with what `auto` means for this model on this device; equal runs get equal choices."""
    train = recipe.train
    memory_format, precision = preferred(recipe.model.name, device.type, train.precision)
    chosen = {
        "memory_format": memory_format if train.memory_format == "auto" else train.memory_format,
        "precision": precision,
    }
    return recipe.model_copy(update={"train": train.model_copy(update=chosen)})


def build_parts(recipe: Recipe, device: torch.device, checkpoint: Path | None = None) -> Parts:
    """Data, model, task and optimizer of a run, from the start or with the weights of a checkpoint.

    Every process builds its own; they go on together or not at all.
    """
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with together():
        if recipe.data.rand_augment is not None:
            check_augment()
        parts = _build(recipe, device, checkpoint)
    with alike():
        _refuse_other_data(parts)
    parts.whole = _wrapped(parts.whole)
    return parts


def _build(recipe: Recipe, device: torch.device, checkpoint: Path | None) -> Parts:
    train, optim = recipe.train, recipe.optim
    views = recipe.data.repeated_augmentation
    shares = Shares.cut(train.global_batch_size, world().size, train.micro_batch_size, recipe.clips_together)
    if checkpoint is not None and not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} cannot be seen from {socket.gethostname()}: the run folder must be on storage that all "
            "machines share"
        )
    if recipe.rerank.run is not None:
        raise ConfigError("rerank.run: a run is trained by itself; give it to `twinreel eval` or `twinreel search`")
    rows = training_rows(recipe)
    _check_flip_labels(recipe, rows)
    eval_rows = evaluation_rows(recipe) if evaluates(recipe) else []
    missing = refuse_missing_files(rows, recipe.data.max_faults)
    plan = Plan(num_rows=len(rows), seed=train.seed, global_batch_size=train.global_batch_size, views_per_row=views)
    total_steps = train.num_steps or (train.num_epochs or 0) * plan.steps_per_epoch
    schedule = _schedule(optim, total_steps, plan.steps_per_epoch)
    task = build_task(recipe, checkpoint, rows)
    _check_evaluation_rows(recipe, task, eval_rows)
    if isinstance(task, VideoTextMatching):
        task.check(rows, "training")
    task.chance_loss(2)  # options that the loss refuses are found here
    _refuse_own_negatives(recipe, task)
    caption_faults: list[Fault] = []
    if checkpoint is None:
        options = (option for row in rows for option in row.options)
        model = build_model(recipe, task, chain(collection_captions(rows, caption_faults), options))
        description = describe_model(recipe, model, task)
    else:
        model = model_from_checkpoint(checkpoint)
        description = read_model_json(checkpoint)
    preprocessing: Any = model.preprocessing
    rules = training_rules(recipe, model, rows)  # what does not go with this model is found here
    view_rules(preprocessing, recipe.eval)
    if optim.layer_decay < 1 and isinstance(task, Contrastive) and not hasattr(model, "layer_groups"):
        raise ConfigError(
            f"optim.layer_decay={optim.layer_decay:g}: of two towers none is deeper than the other; set "
            "optim.learning_rates={video_tower: ...}, or give your model a method layer_groups"
        )
    model.to(device)
    task.to(device)
    if train.memory_format == "channels_last":
        _channels_last(model)
    if eval_rows and recipe.eval.crop_size not in (None, preprocessing.crop_size):
        _try_evaluation_size(recipe, task, model)
    apply_batch_norm(model, train.batch_norm, device, world().size)
    idle = freeze(model, recipe.model.freeze)
    norms = _learning_norms(model, recipe, idle)
    if train.precise_bn_batches and not norms:
        raise ConfigError(
            f"train.precise_bn_batches={train.precise_bn_batches}: no batch norm of this model learns statistics; "
            "leave it out"
        )
    if train.activation_checkpointing:
        checkpoint_activations(model)
    whole = WholeModel(model, task)
    return Parts(
        rows=rows,
        rows_digest=_rows_digest(rows),
        eval_rows=eval_rows,
        missing=missing,
        caption_faults=caption_faults,
        plan=plan,
        shares=shares,
        total_steps=total_steps,
        schedule=schedule,
        model=model,
        task=task,
        whole=whole,
        idle=idle,
        norms=norms,
        negatives=_negatives(recipe, task, model, rows, plan, rules),
        average=None if train.ema_decay is None else WeightAverage(model, train.ema_decay),
        optimizer=_optimizer(recipe.optim, model, task),
        scaler=torch.amp.GradScaler(device.type, enabled=train.precision == "fp16"),
        device=device,
        description=description,
    )


def _negatives(
    recipe: Recipe, task: Task, model: nn.Module, rows: Sequence[Clip], plan: Plan, rules: TrainingRules
) -> NegativeCaptions | None:
    if not isinstance(task, VideoTextMatching) or task.goal != "retrieval":
        return None
    return NegativeCaptions(
        rows,
        plan,
        rules,
        num_negatives=task.num_negatives,
        in_batch=recipe.task.negatives == "in_batch",
        reads=partial(task.reading, model),
    )


def _optimizer(optim: OptimSection, model: nn.Module, task: Task) -> torch.optim.Optimizer:
    groups = parameter_groups(
        model,
        learning_rate=optim.learning_rate,
        learning_rates=optim.learning_rates,
        weight_decay=optim.weight_decay,
        norm_weight_decay=optim.norm_weight_decay,
        decay_one_dimensional=optim.decay_one_dimensional,
        layer_decay=optim.layer_decay,
        extra=list(task.parameters()),
    )
    return build_optimizer(
        optim.name,
        groups,
        betas=optim.betas,
        eps=optim.eps,
        momentum=optim.momentum,
        dampening=optim.dampening,
        nesterov=optim.nesterov,
        eps_before_correction=optim.eps_before_correction,
    )


def _schedule(optim: OptimSection, total_steps: int, steps_per_epoch: int) -> Schedule:
    return build_schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        learning_rate=optim.learning_rate,
        warmup_steps=optim.warmup_steps,
        warmup_epochs=optim.warmup_epochs,
        warmup_fraction=optim.warmup_fraction,
        warmup_start_factor=optim.warmup_start_factor,
        warmup_start_learning_rate=optim.warmup_start_learning_rate,
        warmup_target=optim.warmup_target,
        decay=optim.decay,
        cosine_after_warmup=optim.cosine_after_warmup,
        final_learning_rate=optim.final_learning_rate,
        decay_epochs=optim.decay_epochs,
        decay_factors=optim.decay_factors,
    )


def _refuse_own_negatives(recipe: Recipe, task: Task) -> None:
    """Several views of a row have equal captions, which the loss must not take for wrong ones."""
    if isinstance(task, Contrastive) and recipe.data.repeated_augmentation > 1 and "text_ids" not in task.takes:
        raise ConfigError(
            f"data.repeated_augmentation={recipe.data.repeated_augmentation}: the views of a row share its captions, "
            f"and task.loss={recipe.task.loss} would take them for wrong ones: it does not take `text_ids`. Let it "
            "take them, or set data.repeated_augmentation=1"
        )


def _rows_digest(rows: Sequence[Clip]) -> str:
    """What the training rows say, wherever their files lie now."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        captions: Any = row.captions
        if row.caption_file is not None:  # its content is not read here: a HowTo100M has a million of them
            size = os.path.getsize(row.caption_file) if os.path.exists(row.caption_file) else None
            captions = (os.path.basename(row.caption_file), size)
        said = (row.id, row.start_seconds, row.end_seconds, captions, row.labels)
        digest.update(repr(said + ((row.options,) if row.options else ())).encode())
    return f"{len(rows)} rows, {digest.hexdigest()}"


def _refuse_other_data(parts: Parts) -> None:
    """All processes must have the same rows, and towers of the same size (a vocabulary comes from captions)."""
    said = f"{parts.rows_digest}, {sum(parameter.numel() for parameter in parts.whole.parameters())} parameters"
    everyone = gather_objects((socket.gethostname(), said))
    main = everyone[0][1]
    for rank, (host, other) in enumerate(everyone):
        if other != main:
            raise DataError(
                f"process {rank} on {host} has other training rows than process 0 ({other}, not {main}): give every "
                "machine the same manifest and captions"
            )


def _wrapped(whole: nn.Module) -> nn.Module:
    """Model and task as a module that exchanges gradients, where there are several processes.

    `find_unused_parameters` lets a user's towers have parts that take no part. It also keeps DDP from sorting its
    buckets anew after the first step: a resumed run, which starts with the first sort again, would add up the
    gradients of three or more processes in another order than a run that was never stopped. One parameter that never
    takes part is added, because DDP warns of a search that finds none.
    """
    if world().size == 1:
        return whole
    # Kernels of one position have the same numbers in any layout, and gradients come in another one than they lie in.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    whole.register_parameter("takes_no_part", nn.Parameter(torch.zeros(1, device=next(whole.parameters()).device)))
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # in torch 2.13
    buffers: Any = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(whole, find_unused_parameters=True, **buffers)


def _check_evaluation_rows(recipe: Recipe, task: Task, rows: Sequence[Clip]) -> None:
    """What the end of the run needs is looked at before its first step."""
    if not rows:
        return
    if isinstance(task, Contrastive):
        _check_gallery(recipe, rows)
    elif isinstance(task, VideoTextMatching):
        _check_matching_rows(recipe, task, rows)
    else:
        task.classes.check(rows, "evaluation")
        if recipe.best_metric not in class_measures(task):
            raise ConfigError(
                f"eval.best_metric={recipe.best_metric}: with {len(task.classes)} classes there are "
                f"{', '.join(class_measures(task))}"
            )
    missing = missing_videos(rows)
    if missing and not recipe.eval.allow_missing:
        raise DataError(
            f"{len(missing)} of {len(rows)} evaluation rows have no video file (first: {missing[0].video}); mend them, "
            "or pass eval.allow_missing=true"
        )


def _check_matching_rows(recipe: Recipe, task: VideoTextMatching, rows: Sequence[Clip]) -> None:
    task.check(rows, "evaluation")
    choices = sum(bool(row.options) for row in rows)
    if choices not in (0, len(rows)):
        raise DataError(f"{choices} of {len(rows)} evaluation rows have options; all or none must have them")
    if task.goal != "retrieval":
        return
    if choices:
        raise ConfigError(
            "the rows to judge by have options, and task.goal=retrieval is judged by captions while it trains; judge "
            "the choices afterwards, with `twinreel eval`, and give rows with captions here"
        )
    _check_gallery(recipe, rows)


def _check_gallery(recipe: Recipe, rows: Sequence[Clip]) -> None:
    gallery = build_gallery(rows, merge_equal_captions=recipe.eval.merge_equal_captions)
    direction, _, name = recipe.best_metric.partition("/")
    candidates = gallery.candidates if direction == "text_to_video" else gallery.queries
    if int(name.rpartition("_")[2]) > len(candidates):
        raise ConfigError(
            f"eval.best_metric={direction}/{name}: there are only {len(candidates)} candidates; take a smaller k"
        )


@torch.no_grad()
def _try_evaluation_size(recipe: Recipe, task: Task, model: nn.Module) -> None:
    """One clip of nothing at the size that is judged: what does not fit is found before the first step."""
    preprocessing: Any = model.preprocessing
    prep = view_rules(preprocessing, recipe.eval).preprocessing
    was_training = model.training
    model.eval()
    if isinstance(task, ActionRecognition):
        device = next(model.parameters()).device
        task.scores(model, torch.zeros(1, 3, prep.num_frames, prep.crop_size, prep.crop_size, device=device))
    model.train(was_training)


def _channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 5 and parameter[0, 0].numel() > 1:  # else all layouts are one, and DDP warns of them
            parameter.data = parameter.data.to(memory_format=torch.channels_last_3d)


def _learning_norms(model: nn.Module, recipe: Recipe, idle: list[nn.Module]) -> list[nn.Module]:
    """The batch norms that learn statistics; others are added to `idle`.

    Raises:
        ConfigError: their mode does not go with cached negatives.
    """
    mode = recipe.train.batch_norm
    if mode == "frozen":
        idle += batch_norms(model)
    still = {id(norm) for module in idle for norm in batch_norms(module)}
    learning = [norm for norm in batch_norms(model) if id(norm) not in still]
    if recipe.train.cached_negatives and learning and mode == "per_process":
        raise ConfigError(
            f"train.cached_negatives=true with {len(learning)} batch norms in train.batch_norm=per_process: each "
            "micro-batch would be normalized by its own few clips, and the gradient would not be that of the global "
            "batch. Set train.batch_norm=frozen (or sync, on GPUs), or train.cached_negatives=false"
        )
    return learning


def training_rules(recipe: Recipe, model: nn.Module, rows: Sequence[Clip]) -> TrainingRules:
    """How this recipe draws a training sample of these rows for this model."""
    preprocessing: Any = model.preprocessing
    data = recipe.data
    if recipe.task.name == VideoTextMatching.name:  # a caption, or the question; options may come without one
        candidates = int(any(row.captions or row.caption_file for row in rows))
    else:
        candidates = recipe.task.num_candidates if recipe.task.name == Contrastive.name else 0
    return TrainingRules(
        preprocessing=preprocessing,
        seed=recipe.train.seed,
        num_candidates=candidates,
        num_clips=data.num_clips,
        min_window_seconds=data.min_window_seconds,
        clip_start=data.clip_start,
        crop=data.crop,
        crop_area=data.crop_area,
        crop_aspect=data.crop_aspect,
        short_side=data.short_side,
        short_side_draw=data.short_side_draw,
        flip=data.flip,
        flip_labels=data.flip_labels,
        views_per_decode=data.repeated_augmentation,
    )


def read_batches(recipe: Recipe, parts: Parts, step: int = 0, most: int | None = None) -> list[Batch]:
    """This process's micro-batches of a step, from 0, or the first few of them, read here and now."""
    keys = islice(parts.plan.micro_batches(step, step + 1, parts.shares, world().rank), most)
    rules = training_rules(recipe, parts.model, parts.rows)
    return list(load_batches(ClipDataset(parts.rows, rules), keys, num_workers=0))


def sample_bytes(recipe: Recipe, model: nn.Module) -> int:
    """Bytes of the frames of one sample, all clips of it."""
    preprocessing: Any = model.preprocessing
    return clip_bytes(preprocessing) * recipe.data.num_clips


def _check_flip_labels(recipe: Recipe, rows: Sequence[Clip]) -> None:
    """Labels whose meaning a mirror image changes must be labels of some row: a typing error would mirror them.

    Raises:
        ConfigError: one of them is none.
    """
    named = recipe.data.flip_labels
    there = {str(label) for row in rows for label in row.labels}
    wrong = [name for pair in named.items() for name in pair if name is not None and name not in there]
    if wrong:
        raise ConfigError(f"data.flip_labels: no row has the label {wrong[0]!r}{did_you_mean(wrong[0], there)}")
