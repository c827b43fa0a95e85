"""The learning rate as a pure function of the step: nothing to step, nothing to save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from twinreel.errors import ConfigError

__all__ = ["Decay", "Schedule", "WarmupTarget", "build_schedule"]

Decay: TypeAlias = Literal["cosine", "linear", "steps", "none"]
WarmupTarget: TypeAlias = Literal["highest", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the base learning rate is multiplied by at each step: linear warm-up, then the decay.

    Steps are given from 0 and may be fractions; any unit will do (epochs), if all are in it.

    Args:
        total_steps: of the run.
        warmup_steps: steps before the decay has its say.
        warmup_start_factor: the factor at step 0, where there is a warm-up. With 0 and a cosine, this is the schedule
            of the MIL-NCE code: its first step has learning rate 0.
        warmup_target: what the warm-up rises to: `highest`, the base learning rate itself, or `schedule`, what the
            decay has reached when the warm-up ends (PySlowFast's rule).
        decay: `cosine`, half a cosine from 1 to `final_factor` at `total_steps`; `linear`, a straight line from 1,
            where the warm-up ends, to `final_factor` at `total_steps`; `steps`, the factor of the last of
            `decay_steps` that is not later than the step; `none`, 1.
        cosine_after_warmup: whether the cosine begins where the warm-up ends, or at step 0 (PySlowFast's default).
        final_factor: where the cosine or the line ends.
        decay_steps: where each of `decay_factors` begins; rising, the first is 0.
        decay_factors: as many.
        first_step: as which step the first one counts. 1 is the rule of ClipBERT, which counts an update before it
            asks for its learning rate: a warm-up from 0 of W steps then begins with 1 / W, and the last step has
            `final_factor` itself.

    Raises:
        ConfigError: the warm-up or a decay lies beyond the end of the run.
    """

    total_steps: float
    warmup_steps: float = 0
    warmup_start_factor: float = 0.1
    warmup_target: WarmupTarget = "highest"
    decay: Decay = "cosine"
    cosine_after_warmup: bool = True
    final_factor: float = 0.0
    decay_steps: tuple[float, ...] = ()
    decay_factors: tuple[float, ...] = ()
    first_step: Literal[0, 1] = 0

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"optim: a warm-up of {self.warmup_steps:g} steps is not shorter than the run of {self.total_steps:g} "
                "steps; shorten it (optim.warmup_steps, warmup_epochs or warmup_fraction), or train for longer"
            )
        if self.decay == "steps":
            self._check_decay_steps()

    def _check_decay_steps(self) -> None:
        steps, factors = self.decay_steps, self.decay_factors
        rising = all(first < second for first, second in pairwise(steps))
        if not steps or steps[0] != 0 or len(steps) != len(factors) or not rising:
            raise ConfigError(
                f"optim.decay=steps: {_listed(steps)} with factors {_listed(factors)}; there must be as many factors "
                "as times, and the times must rise from 0"
            )
        late = [step for step in steps if step > self.total_steps]
        if late:
            raise ConfigError(
                f"optim.decay_epochs: {_listed(late)} of {_listed(steps)} (in steps) would come after the end of the "
                f"run of {self.total_steps:g} steps; leave them out with their optim.decay_factors, or train for longer"
            )

    def factor(self, step: float) -> float:
        """The factor at a step, from 0. Past the end a cosine goes on, as the founding ones do: no run gets there."""
        step += self.first_step
        if step >= self.warmup_steps:
            return self._decayed(step)
        target = 1.0 if self.warmup_target == "highest" else self._decayed(self.warmup_steps)
        return self.warmup_start_factor + (target - self.warmup_start_factor) * step / self.warmup_steps

    def _decayed(self, step: float) -> float:
        if self.decay == "none":
            return 1.0
        if self.decay == "steps":
            return next(
                factor for start, factor in zip(self.decay_steps[::-1], self.decay_factors[::-1], strict=True)
                if start <= step
            )  # fmt: skip
        first = 0 if self.decay == "cosine" and not self.cosine_after_warmup else self.warmup_steps
        progress = (step - first) / (self.total_steps - first)
        if self.decay == "linear":
            return max(0.0, 1 - progress) + self.final_factor * min(1.0, progress)
        return self.final_factor + (1 - self.final_factor) * (0.5 * (1 + math.cos(math.pi * progress)))

    def landmarks(self) -> list[int]:
        """The steps that tell the curve, rising: first, end of the warm-up, where it falls, last.

        Of a cosine or a line the quarters, of decay steps the last step before each and the step itself.
        """
        last = math.ceil(self.total_steps) - 1
        warm = math.ceil(self.warmup_steps) - self.first_step
        found = {0, warm, last}
        if self.decay in ("cosine", "linear"):
            found |= {warm + round((last - warm) * part / 4) for part in (1, 2, 3)}
        if self.decay == "steps":
            found |= {math.ceil(start) - self.first_step + shift for start in self.decay_steps for shift in (-1, 0)}
        return sorted(step for step in found if 0 <= step <= last)

    @property
    def highest(self) -> float:
        """The largest factor of the run."""
        return max(self.factor(step) for step in self.landmarks())


def build_schedule(
    *,
    total_steps: int,
    steps_per_epoch: int,
    learning_rate: float,
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    warmup_fraction: float | None = None,
    warmup_start_factor: float = 0.1,
    warmup_start_learning_rate: float | None = None,
    warmup_target: WarmupTarget = "highest",
    decay: Decay = "cosine",
    cosine_after_warmup: bool = True,
    final_learning_rate: float = 0.0,
    decay_epochs: Sequence[float] = (),
    decay_factors: Sequence[float] = (),
) -> Schedule:
    """The schedule of a run out of what its recipe says in epochs and in learning rates.

    Learning rates of their own (per module, per layer) follow the same curve: the first and the final learning rate
    are those of the base, and theirs are in proportion.

    Args:
        total_steps: of the run.
        steps_per_epoch: turns epochs into steps; a warm-up of a fraction of a step stays one.
        learning_rate: the base, which belongs to the global batch.
        warmup_steps: steps of warm-up, or
        warmup_epochs: epochs of it, or
        warmup_fraction: W = int(share of `total_steps`) steps of it by ClipBERT's rule, 0 to below 1: the first step
            has 1 / W of the rate, the W-th all of it, and the decay ends with the last step. The next four arguments
            are then not used.
        warmup_start_factor: the first learning rate as a share of the base, or
        warmup_start_learning_rate: itself.
        warmup_target: as in `Schedule`.
        decay: as in `Schedule`.
        cosine_after_warmup: as in `Schedule`.
        final_learning_rate: where the cosine or the line ends.
        decay_epochs: where each of `decay_factors` begins; the first is 0.
        decay_factors: as in `Schedule`.

    Raises:
        ConfigError: the warm-up starts above the base learning rate, or as in `Schedule`.
    """
    if warmup_fraction is not None:
        return Schedule(
            total_steps=total_steps,
            warmup_steps=int(warmup_fraction * total_steps),
            warmup_start_factor=0.0,
            decay=decay,
            final_factor=final_learning_rate / learning_rate,
            first_step=1,
        )
    warmup = float(warmup_steps or (warmup_epochs or 0) * steps_per_epoch)
    if warmup_start_learning_rate is not None:
        if warmup and warmup_start_learning_rate > learning_rate:
            raise ConfigError(
                f"optim.warmup_start_learning_rate={warmup_start_learning_rate:g} is above optim.learning_rate="
                f"{learning_rate:g}: a warm-up rises. Lower it, or leave it out and set optim.warmup_start_factor"
            )
        warmup_start_factor = warmup_start_learning_rate / learning_rate
    return Schedule(
        total_steps=total_steps,
        warmup_steps=warmup,
        warmup_start_factor=warmup_start_factor,
        warmup_target=warmup_target,
        decay=decay,
        cosine_after_warmup=cosine_after_warmup,
        final_factor=final_learning_rate / learning_rate,
        decay_steps=tuple(epoch * steps_per_epoch for epoch in decay_epochs),
        decay_factors=tuple(decay_factors),
    )


def _listed(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
