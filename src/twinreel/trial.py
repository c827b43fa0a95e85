"""A short trial: does the loss fall smoothly on one batch that is seen again and again?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from twinreel.assembly import pick_device, training_rows
from twinreel.data.clip import Batch
from twinreel.errors import ConfigError, DataError
from twinreel.gradients import StepResult, clip_gradient, global_gradient
from twinreel.guards import out_of_memory_ladder, repeatable_kernels
from twinreel.monitors import output_statistics
from twinreel.parts import PLAIN_SCHEDULE, Parts, build_parts, for_device, read_batches
from twinreel.recipe import EvalSection, Recipe

__all__ = ["Trial", "judge", "try_steps"]

BATCH = 32
WARMUP_STEPS = 10
WINDOW = 5  # losses that are averaged
LEAST_STEPS = WARMUP_STEPS + 2 * WINDOW
LEAST_FALL = 0.1  # of the first losses
LARGEST_RISE = 0.25  # of the fall, above the lowest so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Losses of the steps, what embeddings look like after them, and what is wrong with that."""

    losses: list[float]
    num_clips: int
    chance_loss: float
    statistics: dict[str, float]
    problem: str | None

    def fact(self) -> str:
        """One line."""
        first, last = mean(self.losses[:WINDOW]), mean(self.losses[-WINDOW:])
        said = (
            f"loss {first:.3f} -> {last:.3f} over {len(self.losses)} steps on the same {self.num_clips} clips (chance "
            f"{self.chance_loss:.3f})"
        )
        if "train_top_1_accuracy" in self.statistics:
            return f"{said}, {100 * self.statistics['train_top_1_accuracy']:.0f} % of them named right"
        if "similarity_gap" in self.statistics:
            return f"{said}, right minus wrong pairs {self.statistics['similarity_gap']:+.2f} in cosine"
        return said


def try_steps(recipe: Recipe, steps: int) -> Trial:
    """Train on one batch for some steps in this process, without a run folder.

    The batch is the first of the epoch, 32 clips or as many as there are, read once; the learning rate is the recipe's
    highest after ten steps of warm-up. Weights, samples and dropout follow from the recipe's seed.

    Args:
        recipe: what to try.
        steps: how many.

    Raises:
        DataError: no clip of the batch can be used.
        ConfigError: too few steps to judge by.
    """
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"--steps {steps}: {LEAST_STEPS} or more are needed to see whether the loss falls; 50 is usual"
        )
    device = pick_device(recipe.train.device)
    small = _small(for_device(recipe, device), steps)
    parts = build_parts(small, device)
    batches = read_batches(small, parts)
    losses: list[float] = []
    result = StepResult()
    for step in range(steps):
        for group in parts.optimizer.param_groups:
            group["lr"] = group["base_learning_rate"] * min(1.0, (step + 1) / WARMUP_STEPS)
        result = _step(small, parts, batches, step)
        if result.mean_loss is None:
            first = next((fault.reason for batch in batches for fault in batch.faults), "no caption says anything")
            raise DataError(f"no clip of the first {small.train.global_batch_size} can be used; first: {first}")
        losses.append(result.mean_loss)
        if not math.isfinite(result.mean_loss):
            break
    seen = result.compared[-1]
    return Trial(
        losses=losses,
        num_clips=small.train.global_batch_size,
        chance_loss=parts.task.chance_loss(len(seen.positions)),
        statistics=output_statistics(parts.task, seen.outputs, seen.facts),
        problem=judge(losses),
    )


def _small(recipe: Recipe, steps: int) -> Recipe:
    size = min(BATCH, len(training_rows(recipe)))
    micro = recipe.train.micro_batch_size
    fits = micro is not None and size % micro == 0 and not recipe.train.cached_negatives
    train: dict[str, Any] = {"global_batch_size": size, "num_steps": steps, "num_epochs": None, "ema_decay": None}
    train["micro_batch_size"] = micro if fits else None
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"repeated_augmentation": 1, "mixup": 0.0, "cutmix": 0.0}),
            "train": recipe.train.model_copy(update=train),
            "optim": recipe.optim.model_copy(update=PLAIN_SCHEDULE),
            "eval": EvalSection.model_validate({}),
        }
    )


def _step(recipe: Recipe, parts: Parts, batches: Sequence[Batch], step: int) -> StepResult:
    parts.train_mode()
    with out_of_memory_ladder(recipe, parts.device, parts.shares.largest), repeatable_kernels(recipe, parts.device):
        result = global_gradient(parts, recipe, batches, step)
    clip_gradient(parts, recipe)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.task.after_step()
    return result


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers."""
    return sum(values) / len(values)


def judge(losses: Sequence[float]) -> str | None:
    """What is wrong with a curve of losses; None if it falls smoothly.

    Losses are averaged over five steps. They must fall by a tenth, and never rise above their lowest so far by more
    than a quarter of the whole fall.
    """
    if not math.isfinite(losses[-1]):
        return (
            f"the loss is {losses[-1]} at step {len(losses)}: lower optim.learning_rate, set optim.clip_norm, or use "
            "train.precision=fp32"
        )
    smooth = [mean(losses[max(0, i - WINDOW + 1) : i + 1]) for i in range(WINDOW - 1, len(losses))] or list(losses)
    first, last = smooth[0], smooth[-1]
    if last > (1 - LEAST_FALL) * first:
        return (
            f"the loss does not fall ({first:.3f} -> {last:.3f}) though it sees one batch again and again: look at the "
            "contact sheet and its captions or labels, at model.freeze, at optim.learning_rate (too low or too high), "
            "at task.temperature"
        )
    lowest, rise = first, 0.0
    for _, now in pairwise(smooth):
        rise = max(rise, now - lowest)
        lowest = min(lowest, now)
    if rise > LARGEST_RISE * (first - last):
        return (
            f"the loss falls ({first:.3f} -> {last:.3f}) but jumps up by {rise:.3f} on its way: lower "
            "optim.learning_rate"
        )
    return None
