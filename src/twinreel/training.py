"""THE loop. It reads from top to bottom: no hooks, a new behavior is a line that the reader sees."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinreel.assembly import (
    build_model,
    build_task,
    describe_model,
    evaluates,
    evaluation_rows,
    model_from_checkpoint,
    pick_device,
    training_notes,
    training_rows,
)
from twinreel.checkpoint import (
    load_training_state,
    prune_checkpoints,
    read_model_json,
    save_checkpoint,
    set_link,
)
from twinreel.data.captions import collection_captions
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ClipDataset, TrainingRules
from twinreel.data.loader import FaultLog, load_batches, refuse_missing_files
from twinreel.data.manifest import missing_videos
from twinreel.data.plan import Plan, keyed_seed
from twinreel.data.transforms import network_input
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.evaluation import Report, build_gallery, evaluate_retrieval
from twinreel.guards import half_on_cpu, non_finite_error, out_of_memory_ladder, repeatable_kernels, stop_signals
from twinreel.log import Meter, RunLog, format_seconds
from twinreel.optim import build_optimizer, freeze, learning_rate_factor, parameter_groups
from twinreel.recipe import Recipe, cadence_steps
from twinreel.run_folder import open_run, write_run_files
from twinreel.tasks import Contrastive

__all__ = ["Parts", "TrainResult", "build_parts", "train", "training_rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. `stopped_by` names the signal that ended it early, with everything saved."""

    folder: Path
    steps: int
    total_steps: int
    report: Report | None = None
    stopped_by: str | None = None


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is built of."""

    rows: list[Clip]
    eval_rows: list[Clip]
    missing: list[Clip]
    caption_faults: list[Fault]
    plan: Plan
    total_steps: int
    warmup_steps: int
    model: nn.Module
    frozen: list[nn.Module]
    task: Contrastive
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    description: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _State:
    """Everything a run carries from step to step, beside weights and optimizer."""

    step: int = 0
    best_value: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    repeated_frames: int = 0
    seconds: float = 0.0
    faults: dict[str, Any] = field(default_factory=dict)
    meter: dict[str, Any] = field(default_factory=dict)
    rows_digest: str = ""

    def counters(self) -> dict[str, float]:
        """What metrics.jsonl says of the run so far."""
        return {"skipped_steps": self.skipped_steps, "repeated_frames": self.repeated_frames}

    def keep_best(self, metric: str, report: Report) -> bool:
        """Whether this report is the best so far by the named metric (larger is better)."""
        value = report.metrics[metric]
        if self.best_value is not None and value <= self.best_value and self.best_step != self.step:
            return False
        self.best_value, self.best_step = value, self.step
        return True


def train(recipe: Recipe, out_dir: str | Path, *, resume: bool | str = False, quiet: bool = False) -> TrainResult:
    """Train a recipe into a run folder.

    Args:
        recipe: what to do.
        out_dir: the run folder; must be new or empty unless resuming.
        resume: True = go on from the newest intact checkpoint; a name (`step_1000`) = from that one.
        quiet: no messages on stderr.

    Raises:
        ConfigError, DataError, CheckpointError, TrainingError: with what to do; nothing is lost.
    """
    run = Path(out_dir)
    checkpoint, warnings = open_run(run, recipe, resume)
    parts = build_parts(recipe, checkpoint)
    model, optimizer, device = parts.model, parts.optimizer, parts.device
    state = _restore(parts, checkpoint)

    with (
        RunLog(run, resume_step=state.step if resume else None, quiet=quiet) as log,
        stop_signals() as stop,
        ExitStack() as readers,
    ):
        for warning in warnings:
            log.warn(warning)
        report: Report | None = None
        if checkpoint is not None and _evaluation_due(recipe, parts, state) and not log.has_record("eval", state.step):
            report = _judge(run, recipe, parts, state, log)  # the run was stopped between saving and judging
        if state.step >= parts.total_steps:
            log.say(f"{run} is finished ({state.step} of {parts.total_steps} steps): nothing to do")
            return TrainResult(folder=run, steps=state.step, total_steps=parts.total_steps, report=report)
        write_run_files(run, recipe)
        for note in training_notes(recipe):
            log.say(note)
        if half_on_cpu(recipe, device):
            log.warn(
                f"train.precision={recipe.train.precision} is slower than fp32 on a CPU (only exact kernels are used)"
            )
        for fault in parts.caption_faults[:5]:
            log.warn(f"not in the vocabulary, and a fault when it is drawn: {fault.reason}")
        log.say(_start_line(recipe, parts, state))
        faults = FaultLog(run / "faults.jsonl", recipe.data.max_faults, len(parts.rows), state.faults)
        micro_batch_size = recipe.train.micro_batch_size or recipe.train.global_batch_size
        loader = load_batches(
            ClipDataset(parts.rows, training_rules(recipe, model)),
            parts.plan.micro_batches(state.step, parts.total_steps, micro_batch_size),
            num_workers=recipe.data.num_workers,
            worker_start=recipe.data.worker_start,
            pin_memory=device.type == "cuda",
        )
        batches = readers.enter_context(closing(loader))
        meter = Meter(device, state.meter)
        saved: Path | None = checkpoint

        while state.step < parts.total_steps and not stop:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = group["base_learning_rate"] * _factor(recipe, parts, state.step)
            micro_batches = list(islice(batches, recipe.train.global_batch_size // micro_batch_size))
            for batch in micro_batches:
                for fault in batch.faults:
                    log.warn(f"step {state.step + 1}: left out: {fault.reason}", once=f"fault of {fault.id}")
                faults.record(batch, state.step + 1)

            loss, norm = _optimize(parts, recipe, micro_batches, state, log)
            state.step += 1
            state.repeated_frames += sum(batch.repeated_frames for batch in micro_batches)
            state.faults = faults.state()
            state.seconds += time.perf_counter() - began

            meter.add(loss, norm, micro_batches, time.perf_counter() - began)
            rate = max(group["lr"] for group in optimizer.param_groups)
            log.show_progress(meter.line(state.step, parts.total_steps, rate))
            if state.step % recipe.train.log_every == 0 or state.step == parts.total_steps:
                values = meter.take(rate) | {"faults": faults.total} | state.counters()
                log.record("train", state.step, values)
                _warn_if_waiting(log, recipe, values)

            state.meter = meter.state()
            eval_due = _evaluation_due(recipe, parts, state)
            if eval_due or _due(recipe.train.save_every, state.step, parts):  # saved first: evaluation may fail
                saved = _save(run, parts, state)
                prune_checkpoints(run, recipe.train.keep_last)
            if eval_due:
                report = _judge(run, recipe, parts, state, log)
                prune_checkpoints(run, recipe.train.keep_last)  # again: the best may be another one now

        if stop:
            if saved is None or saved.name != f"step_{state.step:07d}":
                _save(run, parts, state)
            log.say(f"stopped by {stop[0]} after step {state.step}; saved. Go on with --resume")
        else:
            left_out = f"; {faults.total} samples were left out, see {run / 'faults.jsonl'}" if faults.total else ""
            log.say(f"done: {state.step} steps in {format_seconds(state.seconds)} of training; {run}{left_out}")
        return TrainResult(
            folder=run,
            steps=state.step,
            total_steps=parts.total_steps,
            report=report,
            stopped_by=stop[0] if stop else None,
        )


def build_parts(recipe: Recipe, checkpoint: Path | None = None) -> Parts:
    """Data, model, task and optimizer of a run, from the start or with the weights of a checkpoint."""
    device = pick_device(recipe.train.device)
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    rows = training_rows(recipe)
    eval_rows = _checked_evaluation_rows(recipe) if evaluates(recipe) else []
    missing = refuse_missing_files(rows, recipe.data.max_faults)
    plan = Plan(num_rows=len(rows), seed=recipe.train.seed, global_batch_size=recipe.train.global_batch_size)
    total_steps = recipe.train.num_steps or (recipe.train.num_epochs or 0) * plan.steps_per_epoch
    caption_faults: list[Fault] = []
    if checkpoint is None:
        model = build_model(recipe, collection_captions(rows, caption_faults))
    else:
        model = model_from_checkpoint(checkpoint)
    preprocessing: Any = model.preprocessing
    preprocessing.clip_seconds  # noqa: B018  (a model that samples by frame_stride is refused here)
    description = describe_model(recipe, model) if checkpoint is None else read_model_json(checkpoint)
    model.to(device)
    if recipe.train.channels_last:
        _channels_last(model)
    frozen = freeze(model, recipe.model.freeze)
    optim = recipe.optim
    groups = parameter_groups(
        model,
        learning_rate=optim.learning_rate,
        learning_rates=optim.learning_rates,
        weight_decay=optim.weight_decay,
    )
    optimizer = build_optimizer(
        optim.name, groups, betas=optim.betas, eps=optim.eps, momentum=optim.momentum, nesterov=optim.nesterov
    )
    warmup = optim.warmup_steps or round((optim.warmup_epochs or 0) * plan.steps_per_epoch)
    if warmup >= total_steps:
        raise ConfigError(f"optim: a warm-up of {warmup} steps is not shorter than the run of {total_steps} steps")
    task = build_task(recipe)
    task.pair_loss(torch.eye(2), torch.eye(2), [["a"], ["b"]])  # options that the loss refuses, before anything is made
    return Parts(
        rows=rows,
        eval_rows=eval_rows,
        missing=missing,
        caption_faults=caption_faults,
        plan=plan,
        total_steps=total_steps,
        warmup_steps=warmup,
        model=model,
        frozen=frozen,
        task=task,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=recipe.train.precision == "fp16"),
        device=device,
        description=description,
    )


def _checked_evaluation_rows(recipe: Recipe) -> list[Clip]:
    """What the end of the run needs is looked at before its first step."""
    rows = evaluation_rows(recipe)
    gallery = build_gallery(rows, merge_equal_captions=recipe.eval.merge_equal_captions)
    direction, _, name = recipe.eval.best_metric.partition("/")
    candidates = gallery.candidates if direction == "text_to_video" else gallery.queries
    if int(name.rpartition("_")[2]) > len(candidates):
        raise ConfigError(
            f"eval.best_metric={direction}/{name}: there are only {len(candidates)} candidates; take a smaller k"
        )
    missing = missing_videos(rows)
    if missing and not recipe.eval.allow_missing:
        raise DataError(
            f"{len(missing)} of {len(rows)} evaluation rows have no video file (first: {missing[0].video}); mend them, "
            "or pass eval.allow_missing=true"
        )
    return rows


def _channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.to(memory_format=torch.channels_last_3d)


def _rows_digest(rows: Sequence[Clip]) -> str:
    """What the training rows say, wherever their files lie now."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        captions: Any = row.captions
        if row.caption_file is not None:  # its content is not read here: a HowTo100M has a million of them
            size = os.path.getsize(row.caption_file) if os.path.exists(row.caption_file) else None
            captions = (os.path.basename(row.caption_file), size)
        digest.update(repr((row.id, row.start_seconds, row.end_seconds, captions, row.labels)).encode())
    return f"{len(rows)} rows, {digest.hexdigest()}"


def _restore(parts: Parts, checkpoint: Path | None) -> _State:
    digest = _rows_digest(parts.rows)
    if checkpoint is None:
        return _State(rows_digest=digest)
    saved = load_training_state(checkpoint)
    if saved["state"]["rows_digest"] != digest:
        raise CheckpointError(
            f"{checkpoint}: the training rows have changed since ({saved['state']['rows_digest']} then, {digest} now: "
            "ids, windows, captions, sizes of caption files, order). Restore the manifest, or start a new run with "
            "model.weights"
        )
    try:
        parts.optimizer.load_state_dict(saved["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: its optimizer state does not fit this recipe: {error}") from error
    parts.scaler.load_state_dict(saved["scaler"])
    return _State(**saved["state"])


def _save(run: Path, parts: Parts, state: _State) -> Path:
    training_state = {
        "optimizer": parts.optimizer.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "state": asdict(state),
    }
    return save_checkpoint(run, state.step, parts.model, parts.description, training_state)


def training_rules(recipe: Recipe, model: nn.Module) -> TrainingRules:
    """How this recipe draws a training sample for this model."""
    preprocessing: Any = model.preprocessing
    data = recipe.data
    return TrainingRules(
        preprocessing=preprocessing,
        seed=recipe.train.seed,
        num_candidates=recipe.task.num_candidates,
        min_window_seconds=data.min_window_seconds,
        clip_start=data.clip_start,
        crop=data.crop,
        short_side=data.short_side,
        flip=data.flip,
    )


def _factor(recipe: Recipe, parts: Parts, step: int) -> float:
    return learning_rate_factor(
        step,
        parts.total_steps,
        warmup_steps=parts.warmup_steps,
        warmup_start_factor=recipe.optim.warmup_start_factor,
        decay=recipe.optim.decay,
    )


def _due(cadence: str | None, step: int, parts: Parts) -> bool:
    """Whether something is due after a step; everything is due after the last."""
    if step == parts.total_steps:
        return True
    return cadence is not None and step % cadence_steps(cadence, parts.plan.steps_per_epoch) == 0


def _optimize(
    parts: Parts, recipe: Recipe, micro_batches: list[Batch], state: _State, log: RunLog
) -> tuple[float | None, float]:
    """Forward, backward, clip, step: (mean loss, norm of the gradient before clipping)."""
    parts.model.train()
    for module in parts.frozen:
        module.eval()
    with out_of_memory_ladder(recipe, parts.device), repeatable_kernels(recipe, parts.device):
        loss = _forward_backward(parts, recipe, micro_batches, state.step)
        if loss is None:
            state.skipped_steps += 1
            log.warn(f"step {state.step + 1}: no sample of this batch could be used; the weights stay as they are")
            return None, 0.0
        norm = _unscale_and_clip(parts, recipe, micro_batches, state.step)
    scale = parts.scaler.get_scale()
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    state.skipped_steps += int(parts.scaler.get_scale() < scale)
    return loss, norm


def _forward_backward(parts: Parts, recipe: Recipe, micro_batches: list[Batch], step: int) -> float | None:
    """Gradients of the mean loss over the usable rows of the global batch; None if there is no such row."""
    parts.optimizer.zero_grad(set_to_none=True)
    global_batch_size = recipe.train.global_batch_size
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.train.precision]
    total, rows = 0.0, 0
    for index, batch in enumerate(micro_batches):
        torch.manual_seed(keyed_seed(recipe.train.seed, step, index, "dropout"))
        preprocessing: Any = parts.model.preprocessing
        video = network_input(batch, preprocessing, parts.device)
        if recipe.train.channels_last:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast(parts.device.type, dtype=dtype, enabled=recipe.train.precision != "fp32"):
            loss, count = parts.task.compute_loss(parts.model, video, batch)
        if not math.isfinite(loss.item()):
            raise non_finite_error("loss", loss.item(), step, micro_batches)
        torch.autograd.backward(parts.scaler.scale(loss * (count / global_batch_size)))
        total += loss.item() * count
        rows += count
    if rows and rows != global_batch_size:
        for parameter in parts.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(global_batch_size / rows)
    return total / rows if rows else None


def _unscale_and_clip(parts: Parts, recipe: Recipe, micro_batches: list[Batch], step: int) -> float:
    """The norm of the whole gradient, free of the fp16 loss scale; clipped if the recipe says so."""
    parts.scaler.unscale_(parts.optimizer)
    gradients = [parameter.grad for parameter in parts.model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    if not math.isfinite(norm) and recipe.train.precision != "fp16":  # fp16: the scaler skips this step and says so
        raise non_finite_error("gradient norm", norm, step, micro_batches)
    if recipe.optim.clip_norm is not None and math.isfinite(norm):
        scale = min(1.0, recipe.optim.clip_norm / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def _evaluation_due(recipe: Recipe, parts: Parts, state: _State) -> bool:
    return bool(parts.eval_rows) and _due(recipe.eval.every, state.step, parts)


def _judge(run: Path, recipe: Recipe, parts: Parts, state: _State, log: RunLog) -> Report:
    """Evaluate the step that was just saved; if it is the best so far, save that and point `best` at it."""
    report = _evaluate(parts, recipe, log).placed(recipe, recipe.eval, f"{run.name}/step_{state.step:07d}")
    log.say(f"step {state.step}: {report.headline()}")
    if state.keep_best(recipe.eval.best_metric, report):
        set_link(run, "best", _save(run, parts, state))
    log.record("eval", state.step, report.metrics)  # last: a step without this line is judged again on resume
    return report


def _evaluate(parts: Parts, recipe: Recipe, log: RunLog) -> Report:
    return evaluate_retrieval(
        parts.model,
        parts.task,
        parts.eval_rows,
        recipe.eval,
        device=parts.device,
        num_workers=recipe.data.num_workers,
        worker_start=recipe.data.worker_start,
        loss_batch_size=recipe.train.global_batch_size,
        report=lambda done, total: log.show_progress(f"evaluating {done}/{total} videos"),
    )


def _start_line(recipe: Recipe, parts: Parts, state: _State) -> str:
    """What will happen, before it happens."""
    train, prep = recipe.train, parts.model.preprocessing
    micro = train.micro_batch_size or train.global_batch_size
    negatives = recipe.task.num_candidates * (micro - 1)
    base = max(group["base_learning_rate"] for group in parts.optimizer.param_groups)
    rates = [base * _factor(recipe, parts, step) for step in (0, parts.warmup_steps, parts.total_steps - 1)]
    own = "".join(f", {name} at {rate:g}" for name, rate in recipe.optim.learning_rates.items())
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in parts.model.parameters() if not p.requires_grad)
    left_out = len(parts.rows) % train.global_batch_size
    lines = [
        f"rows {len(parts.rows)} (evaluated on {len(parts.eval_rows)}), missing files {len(parts.missing)}, "
        f"{parts.plan.steps_per_epoch} steps an epoch ({left_out} rows wait for a later epoch, others each time), "
        f"{parts.total_steps} steps in all",
        f"global batch {train.global_batch_size} = 1 process x {train.global_batch_size // micro} micro-batches x "
        f"{micro} clips on {parts.device}, {negatives} negative captions a clip, precision {train.precision}, "
        f"seed {train.seed}",
        f"a clip is {prep.num_frames} frames at {prep.frame_rate:g} a second = {prep.clip_seconds:g} s, "  # type: ignore[union-attr]
        f"{prep.crop_size} x {prep.crop_size} pixels",  # type: ignore[union-attr]
        f"learning rate first {rates[0]:.3g}, highest {rates[1]:.3g}, last {rates[2]:.3g} ({recipe.optim.name}{own}, "
        f"warm-up {parts.warmup_steps} steps); it belongs to the global batch and is never scaled",
        f"parameters {trained:,} trained, {frozen:,} frozen; "
        + (f"going on from step {state.step}" if state.step else "from step 0"),
    ]
    return "\n".join(lines)


def _warn_if_waiting(log: RunLog, recipe: Recipe, values: dict[str, float]) -> None:
    if values["waiting_share"] > 0.2:
        log.warn(
            f"the step waited for data {values['waiting_share']:.0%} of its computing time; raise data.num_workers "
            f"(now {recipe.data.num_workers}), or store smaller videos (short side near the crop size)",
            once="waiting",
        )
