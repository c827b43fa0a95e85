"""THE loop. It reads from top to bottom: no hooks, a new behavior is a line that the reader sees.

Every line is run by every process; what only one of them may do is inside `on_main`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from twinreel.assembly import pick_device, training_notes
from twinreel.audit import check_equal_weights, check_same_run, check_shares, non_finite_error
from twinreel.checkpoint import (
    list_checkpoints,
    prune_checkpoints,
    set_aside,
    set_link,
)
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ClipDataset
from twinreel.data.device_feed import feed_device
from twinreel.data.loader import FaultLog, load_batches, readers_watched
from twinreel.data.read_ahead import ReadAhead, plan_ahead
from twinreel.distributed import (
    alike,
    exchange,
    gather_objects,
    on_main,
    process_group,
    share_buffers,
    together,
    world,
)
from twinreel.errors import TwinreelError
from twinreel.evaluation import Report, evaluate_task, evaluation_ahead, spoken, view_rules
from twinreel.grad_cam import find_layer
from twinreel.gradients import StepResult, clip_gradient, global_gradient
from twinreel.guards import Signals, out_of_memory_ladder, repeatable_kernels, watched_signals
from twinreel.log import Meter, RunLog, format_seconds
from twinreel.monitors import Monitor, output_statistics
from twinreel.parts import (
    Parts,
    build_parts,
    for_device,
    sample_bytes,
    training_rules,
)
from twinreel.precise_norms import take_precise_statistics
from twinreel.recipe import Recipe, cadence_steps
from twinreel.run_folder import LOCK_WAIT_SECONDS, locked, open_run, refuse_held, write_run_files
from twinreel.run_state import State, restore, write_checkpoint
from twinreel.start_line import FEW_NEGATIVES, collection_notes, compared_clips, num_negatives, start_line
from twinreel.tasks import ActionRecognition, Contrastive
from twinreel.visual import write_confusion, write_grad_cam, write_histograms

__all__ = ["TrainResult", "train"]

GRAD_CAM_ROWS = 4
LEAST_LOSS_SCALE = 1.0  # of fp16: below it a gradient that is not finite has another cause
PATIENCE_STEPS = 100  # after the warm-up, before a loss at chance is said to be stuck there


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. `stopped_by` names the signal that ended it early, with everything saved."""

    folder: Path
    steps: int
    total_steps: int
    report: Report | None = None
    stopped_by: str | None = None


def train(recipe: Recipe, out_dir: str | Path, *, resume: bool | str = False, quiet: bool = False) -> TrainResult:
    """Train a recipe into a run folder; under torchrun as one of its processes.

    Args:
        recipe: what to do.
        out_dir: the run folder; must be new or empty unless resuming. With several machines on storage they share.
        resume: True = go on from the newest intact checkpoint; a name (`step_1000`) = from that one.
        quiet: no messages on stderr.

    Raises:
        ConfigError, DataError, CheckpointError, TrainingError: with what to do; nothing is lost.
    """
    run, device = Path(out_dir), pick_device(recipe.train.device)
    written, recipe = recipe, for_device(recipe, device)
    with process_group(device), ExitStack() as held:
        with alike():
            check_same_run(recipe, device)
        checkpoint, warnings = on_main(lambda: _open(run, written, resume, held))
        parts = build_parts(recipe, device, checkpoint)
        with together():
            ahead = _plan_ahead(recipe, parts)
        state, changes = restore(recipe, parts, checkpoint)
        if checkpoint is not None and (moved := on_main(lambda: set_aside(run, checkpoint))):
            changes += [f"going on from {checkpoint.name}: {', '.join(moved)} moved to checkpoints/aside_..."]
        if state.step < parts.total_steps:
            on_main(lambda: write_run_files(run, written))
        with together():
            folder = run if world().is_main else None
            log = held.enter_context(
                RunLog(folder, resume_step=state.step if resume else None, quiet=quiet or not folder)
            )
        signals = held.enter_context(watched_signals())
        held.enter_context(readers_watched())
        for warning in [*warnings, *changes]:
            log.warn(warning)
        report: Report | None = None
        if (
            checkpoint is not None
            and _evaluation_due(recipe, parts, state)
            and on_main(lambda: all(record["step"] != state.step for record in log.records("eval")))
        ):
            report = _judge(run, recipe, parts, state, log)  # the run was stopped between saving and judging
        if state.step >= parts.total_steps:
            log.say(f"{run} is finished ({state.step} of {parts.total_steps} steps): nothing to do")
            return TrainResult(folder=run, steps=state.step, total_steps=parts.total_steps, report=report)
        _say_what_will_happen(recipe, parts, state, ahead, log)
        log.record("start", state.step, _layout(recipe, parts))
        faults = FaultLog(folder and folder / "faults.jsonl", recipe.data.max_faults, len(parts.rows), state.faults)
        loader = load_batches(
            ClipDataset(parts.rows, training_rules(recipe, parts.model, parts.rows)),
            parts.plan.micro_batches(state.step, parts.total_steps, parts.shares, world().rank),
            num_workers=recipe.data.num_workers,
            worker_start=recipe.data.worker_start,
            ahead=ahead.batches,
            pin_memory=device.type == "cuda",
        )
        batches = held.enter_context(closing(feed_device(loader, device, parts.shares.num_micro_batches)))
        meter = Meter(device, state.meter)
        monitor = _monitor(recipe, parts, log)
        saved, first_step = checkpoint, state.step

        while state.step < parts.total_steps and not signals.stop:
            began = time.perf_counter()
            factor = parts.schedule.factor(state.step - state.skipped_steps)
            for group in parts.optimizer.param_groups:
                group["lr"] = group["base_learning_rate"] * factor
            micro_batches = list(islice(batches, parts.shares.num_micro_batches))
            with out_of_memory_ladder(recipe, device, parts.shares.largest):
                result = _gradient(run, parts, recipe, micro_batches, state, signals)
            with alike(), out_of_memory_ladder(recipe, device, parts.shares.largest):
                if state.step == first_step:
                    check_shares(parts, result)
                norm = _step(run, parts, recipe, result, state, log)
                if recipe.train.histograms_every and world().is_main:
                    _draw_histograms(recipe, parts, state.step + 1, log)
                _note_faults(faults, parts, micro_batches, result, state.step + 1, log)
            state.step += 1
            state.repeated_frames += result.repeated_frames
            state.faults = faults.state()
            state.seconds += time.perf_counter() - began

            meter.add(
                result.mean_loss, norm, clips=recipe.train.global_batch_size, captions=result.captions,
                masked=result.masked_captions, waited=result.waited, seconds=time.perf_counter() - began,
            )  # fmt: skip
            rate = max(group["lr"] for group in parts.optimizer.param_groups)
            log.show_progress(meter.line(state.step, parts.total_steps, rate))
            if state.step % recipe.train.log_every == 0 or state.step == parts.total_steps:
                with alike():
                    check_equal_weights(parts, state.step)
                values = meter.take(rate) | {"faults": faults.total} | state.counters() | _health(parts, result)
                log.record("train", state.step, values)
                monitor.look(state.step, values)

            state.meter = meter.state()
            eval_due = _evaluation_due(recipe, parts, state)
            save_due = eval_due or _due(recipe.train.save_every, state.step, parts)
            if save_due and recipe.train.precise_bn_batches:
                take_precise_statistics(parts, recipe, state.step)
            if save_due or signals.save:
                saved = _save(run, recipe, parts, state)  # before evaluation: that may fail
            if signals.save:
                log.say(f"step {state.step}: saved, because of SIGUSR1")
            if eval_due:
                report = _judge(run, recipe, parts, state, log)

        if signals.stop:
            if saved is None or saved.name != f"step_{state.step:07d}":
                _save(run, recipe, parts, state)
            log.say(f"stopped by {signals.stop} after step {state.step}; saved. Go on with --resume")
        else:
            left_out = f"; {faults.total} samples were left out, see {run / 'faults.jsonl'}" if faults.total else ""
            log.say(f"done: {state.step} steps in {format_seconds(state.seconds)} of training; {run}{left_out}")
        return TrainResult(
            folder=run,
            steps=state.step,
            total_steps=parts.total_steps,
            report=report,
            stopped_by=signals.stop,
        )


def _open(run: Path, recipe: Recipe, resume: bool | str, held: ExitStack) -> tuple[Path | None, list[str]]:
    """Refuse before anything is written, lock, and look again: another job may have been there in between."""
    try:
        open_run(run, recipe, resume)
    except TwinreelError:
        refuse_held(run)  # who trains in the folder says more than what lies there
        raise
    wait = LOCK_WAIT_SECONDS if resume else 0.0
    held.enter_context(locked(run, wait_seconds=wait, say=lambda text: print(text, file=sys.stderr, flush=True)))
    return open_run(run, recipe, resume)


def _save(run: Path, recipe: Recipe, parts: Parts, state: State) -> Path:
    """A checkpoint of this step, and fewer of the old ones."""
    with alike():
        check_equal_weights(parts, state.step)

    def write() -> Path:
        saved = write_checkpoint(run, parts, state)
        prune_checkpoints(run, recipe.train.keep_last)
        return saved

    return on_main(write)


def _plan_ahead(recipe: Recipe, parts: Parts) -> ReadAhead:
    """How far the readers run ahead of the loop, which holds the micro-batches of a step, a GPU one more."""
    preprocessing: Any = parts.model.preprocessing
    held = parts.shares.num_micro_batches + (parts.device.type == "cuda")
    workers = recipe.data.num_workers
    if parts.eval_rows:  # what cannot be evaluated at the end is refused now
        evaluation_ahead(view_rules(preprocessing, recipe.eval), recipe.eval.batch_size, workers)
    return plan_ahead(sample_bytes(recipe, parts.model), parts.shares.largest, num_workers=workers, held=held)


def _say_what_will_happen(recipe: Recipe, parts: Parts, state: State, ahead: ReadAhead, log: RunLog) -> None:
    for note in training_notes(recipe):
        log.say(note)
    for note in collection_notes(parts):
        log.warn(note)
    if recipe.eval.grad_cam_layer is not None:
        find_layer(parts.model, recipe.eval.grad_cam_layer)  # another name is refused now, not at the first judgment
    for fault in parts.caption_faults[:5]:
        log.warn(f"not in the vocabulary, and a fault when it is drawn: {fault.reason}")
    log.say(start_line(recipe, parts, state.step))
    sparse = recipe.data.clip_start in ("uniform", "segments")
    if parts.eval_rows and sparse != (recipe.eval.windows == "whole"):
        log.warn(
            f"trained on clips by data.clip_start={recipe.data.clip_start}, judged by eval.windows="
            f"{recipe.eval.windows}: one spreads its frames over the window, the other does not"
        )
    if said := ahead.line():
        log.say(said)
    if short := ahead.warning():
        log.warn(short)
    negatives = num_negatives(recipe, parts)
    few = isinstance(parts.task, Contrastive) and parts.task.drawn_negatives is None
    if few and negatives is not None and negatives < FEW_NEGATIVES:
        split = parts.shares.num_micro_batches > 1 and not recipe.train.cached_negatives
        more = "train.micro_batch_size, or set train.cached_negatives=true" if split else "train.global_batch_size"
        log.warn(
            f"only {negatives} negative captions a clip; a contrastive loss learns little from fewer than "
            f"{FEW_NEGATIVES}: raise {more}"
        )
    if recipe.train.batch_norm == "sync" and world().size == 1:
        log.warn("train.batch_norm=sync with one process is the same as per_process")


def _layout(recipe: Recipe, parts: Parts) -> dict[str, int]:
    """How batches are shared out from here on; `twinreel replay` looks it up."""
    shares, negatives = parts.shares, num_negatives(recipe, parts)
    layout = {"processes": shares.num_processes, "micro_batches": shares.num_micro_batches}
    return layout if negatives is None else layout | {"negatives": negatives}


def _draw_histograms(recipe: Recipe, parts: Parts, step: int, log: RunLog) -> None:
    """Of weights and of the gradients that they were just changed by, where they are due."""
    if _due(recipe.train.histograms_every, step, parts):
        for text in write_histograms(log.writer, parts.model, step):
            log.warn(text, once=text)


def _draw_judgment(recipe: Recipe, parts: Parts, report: Report, step: int, log: RunLog) -> None:
    """The confusion matrix, and where the model looks, for TensorBoard; what is left out is said."""
    if not isinstance(parts.task, ActionRecognition) or report.classes is None:
        return
    if report.classes.confusion is not None:
        write_confusion(log.writer, report.classes.confusion, report.classes.names, step)
    if recipe.eval.grad_cam_layer is not None:
        preprocessing: Any = parts.model.preprocessing
        averaged = parts.average.swapped_in(parts.model) if parts.average is not None else nullcontext()
        with averaged:
            left_out = write_grad_cam(
                log.writer,
                parts.model,
                _of_different_classes(parts.eval_rows)[:GRAD_CAM_ROWS],
                view_rules(preprocessing, recipe.eval),
                layer=recipe.eval.grad_cam_layer,
                step=step,
                device=parts.device,
                names=parts.task.classes.names,
            )
        for text in left_out:
            log.warn(text, once=text)


def _of_different_classes(rows: Sequence[Clip]) -> list[Clip]:
    """The first row of each set of labels, then the others."""
    firsts = {row.labels: row for row in reversed(rows)}
    first_ids = {row.id for row in firsts.values()}
    return [row for row in rows if row.id in first_ids] + [row for row in rows if row.id not in first_ids]


def _monitor(recipe: Recipe, parts: Parts, log: RunLog) -> Monitor:
    clips = compared_clips(recipe, parts)
    pairs = parts.task if isinstance(parts.task, Contrastive) else None
    monitor = Monitor(
        lambda text, key: log.warn(text, once=key),
        normalize=pairs is not None and pairs.normalize,
        temperature=None if pairs is None or pairs.log_scale is not None else pairs.temperature,
        num_clips=clips,
        num_workers=recipe.data.num_workers,
        patience_steps=round(parts.schedule.warmup_steps) + PATIENCE_STEPS,
        chance_loss=parts.task.chance_loss(clips),
    )
    monitor.look(0, {})
    return monitor


def _due(cadence: str | None, step: int, parts: Parts) -> bool:
    """Whether something is due after a step; everything is due after the last."""
    if step == parts.total_steps:
        return True
    return cadence is not None and step % cadence_steps(cadence, parts.plan.steps_per_epoch) == 0


def _gradient(
    run: Path, parts: Parts, recipe: Recipe, micro_batches: Sequence[Batch], state: State, signals: Signals
) -> StepResult:
    """Forward and backward of all processes, and what they tell each other about it.

    Raises:
        TrainingError: the loss is not finite, in all processes; out of memory.
    """
    parts.train_mode()
    with repeatable_kernels(recipe, parts.device):
        result = global_gradient(parts, recipe, micro_batches, state.step)
    repeated = sum(batch.repeated_frames for batch in micro_batches)
    waited = sum(batch.wait_seconds for batch in micro_batches)
    told = exchange([result.loss, repeated, waited, *signals.told()])
    result.loss = float(told[:, 0].sum())
    result.repeated_frames, result.waited = int(told[:, 1].sum()), float(told[:, 2].max())  # the slowest decides
    signals.agree(told[:, 3:])
    if not math.isfinite(result.loss):
        with alike():
            raise non_finite_error(
                "loss", result.loss, run, parts, result, state.step, lambda at: write_checkpoint(at, parts, state)
            )
    return result


def _step(run: Path, parts: Parts, recipe: Recipe, result: StepResult, state: State, log: RunLog) -> float:
    """Clip and step; the norm of the gradient before clipping."""
    share_buffers(parts.model, parts.norms)
    if not result.rows:
        state.skipped_steps += 1
        log.warn(f"step {state.step + 1}: no sample of this batch could be used; the weights stay as they are")
        return 0.0
    norm = clip_gradient(parts, recipe)
    skipped = not math.isfinite(norm)
    if skipped and (recipe.train.precision != "fp16" or parts.scaler.get_scale() < LEAST_LOSS_SCALE):
        # In fp16 a loss scale that is too large does that now and then: the scaler skips the step and halves it.
        raise non_finite_error(
            "gradient norm", norm, run, parts, result, state.step, lambda at: write_checkpoint(at, parts, state)
        )
    if not skipped:
        parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    state.skipped_steps += int(skipped)
    parts.task.after_step()
    if parts.average is not None and not skipped:
        parts.average.update(parts.model, state.step + 1)
    return norm


def _note_faults(
    faults: FaultLog, parts: Parts, micro_batches: Sequence[Batch], result: StepResult, step: int, log: RunLog
) -> None:
    """Samples of any process that failed are counted by all and written by the main one, in the batch's order."""
    valid = result.valid()
    found: list[tuple[int, Fault]] = []
    if not all(valid):
        for positions, batch in zip(parts.shares.of_process(world().rank), micro_batches, strict=True):
            failed = [at for at, ok in zip(positions, batch.valid.tolist(), strict=True) if not ok]
            found += zip(failed, batch.faults, strict=True)
        found = sorted((pair for own in gather_objects(found) for pair in own), key=lambda pair: pair[0])
    for _, fault in found:
        log.warn(f"step {step}: left out: {fault.reason}", once=f"fault of {fault.id}")
    faults.record(valid, [fault for _, fault in found], step)


def _health(parts: Parts, result: StepResult) -> dict[str, float]:
    """Embeddings, temperature and loss scale of the last micro-batch, for metrics.jsonl and the monitors."""
    if not world().is_main:
        return {}
    seen = result.compared[-1]
    values = output_statistics(parts.task, seen.outputs, seen.facts)
    if isinstance(parts.task, Contrastive) and parts.task.temperature is not None:
        values["logit_scale"] = 1 / parts.task.temperature
    if parts.scaler.is_enabled():
        values["loss_scale"] = parts.scaler.get_scale()
    return values


def _evaluation_due(recipe: Recipe, parts: Parts, state: State) -> bool:
    return bool(parts.eval_rows) and _due(recipe.eval.every, state.step, parts)


def _judge(run: Path, recipe: Recipe, parts: Parts, state: State, log: RunLog) -> Report:
    """Evaluate the step that was just saved; if it is the best so far, point `best` at it."""
    report = _evaluate(parts, recipe, log).placed(
        recipe, recipe.eval, f"{run.name}/step_{state.step:07d}", averaged=parts.average is not None
    )
    log.say(f"step {state.step}: {report.headline()}")
    on_main(lambda: _crown(run, recipe, state, report, log))
    on_main(lambda: _draw_judgment(recipe, parts, report, state.step, log))
    log.record("eval", state.step, report.metrics)  # last: a step without this line is judged again on resume
    return report


def _crown(run: Path, recipe: Recipe, state: State, report: Report, log: RunLog) -> None:
    """Point `best` at this step if that is better than the one it points at now (larger is better)."""
    metric, best = recipe.best_metric, run / "checkpoints" / "best"
    kept = {item.name for item in list_checkpoints(run)}
    now = f"step_{state.step:07d}"
    records = {f"step_{record['step']:07d}": record.get(metric) for record in log.records("eval")}
    scores = {name: value for name, value in records.items() if name in kept - {now} and value is not None}
    rival = best.resolve().name if best.exists() else max(scores, key=lambda name: scores[name], default=now)
    if scores.get(rival, -math.inf) >= report.metrics[metric]:
        set_link(run, "best", run / "checkpoints" / rival)
        return
    set_link(run, "best", run / "checkpoints" / now)
    prune_checkpoints(run, recipe.train.keep_last)  # the best was another one until now


def _evaluate(parts: Parts, recipe: Recipe, log: RunLog) -> Report:
    """Of the averaged weights, if weights are averaged."""
    with ExitStack() as stack:
        if parts.average is not None:
            stack.enter_context(parts.average.swapped_in(parts.model))
        return evaluate_task(
            parts.model,
            parts.task,
            parts.eval_rows,
            recipe.eval,
            device=parts.device,
            num_workers=recipe.data.num_workers,
            worker_start=recipe.data.worker_start,
            loss_batch_size=recipe.train.global_batch_size,
            report=spoken(parts.task, lambda words, _: log.show_progress(f"evaluating {words}")),
        )
