"""Whether the processes are still one, and what is kept when a number is not finite."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from twinreel.distributed import exchange, gather_objects, on_main, world
from twinreel.errors import CheckpointError, ConfigError, TrainingError
from twinreel.gradients import Compared, StepResult
from twinreel.parts import Parts
from twinreel.recipe import Recipe
from twinreel.run_folder import flat

__all__ = ["NON_FINITE", "check_equal_weights", "check_same_run", "check_shares", "non_finite_error", "whole_loss"]

NON_FINITE = "non_finite"  # folder in the run folder
SHARES_TOLERANCE = 1e-3
MOST_SCORES = 2**22  # that are taken at once
OF_A_MACHINE = (
    *("data.root", "data.manifest", "data.num_workers", "data.worker_start", "eval.root", "eval.manifest"),
    *("model.weights", "model.vocabulary"),
)


@torch.no_grad()
def whole_loss(parts: Parts, seen: Compared, clips_at_once: int = 64) -> float:
    """The mean loss of what all processes compared, computed by this one alone, a few clips at a time."""
    task: Any = parts.task
    facts, scale = seen.facts, task.log_scale
    everyone = torch.arange(len(facts.valid))
    if math.prod(len(part.flatten(0, -2)) for part in seen.outputs) <= MOST_SCORES:
        # As one process takes it: a loss that uses `own` wrongly does so in pieces too.
        return float(task.share(seen.outputs, facts, log_scale=scale, negative_seed=seen.negative_seed))
    total = 0.0
    for own in everyone.split(clips_at_once if "own" in task.takes else len(everyone)):  # type: ignore[no-untyped-call]
        total += float(task.share(seen.outputs, facts, own=own, log_scale=scale, negative_seed=seen.negative_seed))
    return total


def check_shares(parts: Parts, result: StepResult) -> None:
    """After a run's first step: the shares of all processes must add up to the loss of the whole batch.

    Raises:
        TrainingError: they do not: labels or candidates are counted from the wrong place in some process.
    """
    if world().size == 1 or not result.rows:
        return
    wanted = on_main(lambda: sum(whole_loss(parts, seen) * seen.usable for seen in result.compared))
    if not math.isclose(result.loss, wanted, rel_tol=SHARES_TOLERANCE, abs_tol=SHARES_TOLERANCE):
        raise TrainingError(
            f"the {world().size} processes' shares of the loss add up to {result.loss / result.rows:.6g}, but the loss "
            f"of the whole batch is {wanted / result.rows:.6g}: in some process labels or candidates are counted from "
            "the wrong place. If task.loss is your own function, look at how it uses `own`; `twinreel check RECIPE "
            "--steps 50` says more. No checkpoint was written after this step."
        )


def check_same_run(recipe: Recipe, device: torch.device) -> None:
    """All processes must do the same; only where things lie and how they are read may differ from machine to machine.

    Raises:
        ConfigError: a process has another recipe, torch or kind of device.
    """
    own = flat(recipe.model_dump(mode="json")) | {"torch": torch.__version__, "device": device.type}
    own = {key: value for key, value in own.items() if key not in OF_A_MACHINE}
    everyone = gather_objects((socket.gethostname(), own))
    main = everyone[0][1]
    for rank, (host, other) in enumerate(everyone):
        differs = [key for key in sorted(main.keys() | other.keys()) if main.get(key) != other.get(key)]
        if differs:
            shown = "; ".join(f"{key}: {other.get(key)!r}, not {main.get(key)!r}" for key in differs[:5])
            raise ConfigError(
                f"process {rank} on {host} does not do what process 0 does: {shown}. Start every machine with the same "
                "line, recipe and versions"
            )


def check_equal_weights(parts: Parts, step: int) -> None:
    """All processes must hold the same weights; a sum of their bits tells.

    Raises:
        TrainingError: they differ: gradients were not exchanged, or a machine computes wrongly.
    """
    if world().size == 1:
        return
    sums = exchange([float(_sum_of_bits(parts) % 2**52)])[:, 0].tolist()
    if len(set(sums)) > 1:
        others = [str(rank) for rank, value in enumerate(sums) if value != sums[0]]
        raise TrainingError(
            f"step {step}: the processes hold different weights (not those of process 0: {', '.join(others[:8])}): "
            "gradients are not exchanged, or the "
            "processes do not run the same code on the same torch. Go on from the last checkpoint with --resume once "
            "that is mended; `twinreel check RECIPE --steps 50` says which part differs"
        )


def _sum_of_bits(parts: Parts) -> int:
    """Exact and in no order, unlike a norm, which depends on the device that takes it."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [p.detach().contiguous().view(whole[p.element_size()]).sum(dtype=torch.int64) for p in parts.parameters]
    return int(torch.stack(bits).sum())


def non_finite_error(
    what: str,
    value: float,
    run: Path,
    parts: Parts,
    result: StepResult,
    step: int,
    save: Callable[[Path], object],
) -> TrainingError:
    """What all processes raise when a loss or a gradient is not finite, before anyone steps.

    Samples and keys are written to `RUN/non_finite/step_N.json`, and the weights as they are to
    `RUN/non_finite/checkpoints`, so that `twinreel replay` has the very step.
    """
    rows = _rows(parts, result, step)
    path = run / NON_FINITE / f"step_{step + 1:07d}.json"

    def write() -> None:
        save(run / NON_FINITE)
        record = {"step": step + 1, "what": what, "value": str(value), "num_processes": world().size, "batch": rows}
        try:
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(str(error)) from error

    kept = f"All are in {path}. `twinreel replay {run} --step {step + 1}` rebuilds this batch and shows each loss term"
    try:
        on_main(write)
    except CheckpointError as error:
        kept = f"They could not be written to {path}: {error}"
    names = parts.task.output_names
    things = "logits" if names == ("logits",) else "embeddings"
    bad = [row["id"] for row in rows if not all(row[f"{name}_finite"] for name in names)]
    blamed = f"{things} that are not finite: {', '.join(bad[:8])}" if bad else f"all {things} are finite"
    ids = ", ".join(row["id"] for row in rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    return TrainingError(
        f"step {step + 1}: the {what} is {value}; no weight was changed. Samples: {ids}; {blamed}. {kept}. "
        "Then, in this order: "
        "look at those files; lower optim.learning_rate or set optim.clip_norm; train.precision=fp32. "
        "The last checkpoint is intact."
    )


def _rows(parts: Parts, result: StepResult, step: int) -> list[dict[str, Any]]:
    """Each clip of the global batch: id, key, and whether its embeddings are finite."""
    batch = parts.plan.batch(step)
    rows = []
    for seen in result.compared:
        clips = len(seen.positions)
        finite = [part.reshape(clips, -1).isfinite().all(1).tolist() for part in seen.outputs]
        for at, *flags in zip(seen.positions, *finite, strict=True):
            epoch, index = batch[at]
            row = parts.rows[index]
            key = {"position": at, "id": row.id, "video": row.video, "epoch": epoch, "row": index}
            names = [f"{name}_finite" for name in parts.task.output_names]
            rows.append(key | dict(zip(names, flags, strict=True)))
    return rows
