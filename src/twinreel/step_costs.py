"""What measured times and bytes of a training step mean, and which knob to turn: arithmetic, nothing is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PartCosts", "StepCosts"]

FILLED = 0.9  # of the free memory: allocators keep some, and neighbors come and go
LARGE_SHARE = 0.35  # of the time of a step: a part that takes more is named
MEGABYTE = 2**20


@dataclass(slots=True, kw_only=True)
class PartCosts:
    """One part of a step, a clip: milliseconds forward and backward, bytes kept for the backward pass."""

    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0

    @property
    def milliseconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """A training step of a recipe on a device.

    Attributes:
        parts: what computes, in order; costs a clip.
        optimizer_milliseconds: clipping and the optimizer's step, once a step.
        parameter_bytes: of the model, trained or not, with its buffers.
        gradient_bytes: of what is trained.
        optimizer_bytes: of the optimizer's state.
        kept_per_clip: bytes that the backward pass needs of each clip, by saved tensors.
        peak_per_clip: by how much the memory held grows with each clip; None where it cannot be measured.
        fixed_bytes: of a step, whatever the clips (working copies of weights in half precision); None likewise.
        free_bytes: left for clips once parameters, gradients and optimizer state are there.
        micro_batch: clips at once, as the recipe has it.
        process_batch: clips of a step that one process computes.
        unit: of which any number of clips at once is a multiple.
        measured_clips: clips at once that times were measured on.
        settings: of the recipe: precision, memory_format, activation_checkpointing.
        preferred: what `auto` means for memory_format and precision.
    """

    parts: dict[str, PartCosts]
    optimizer_milliseconds: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_per_clip: float
    peak_per_clip: float | None
    fixed_bytes: float | None
    free_bytes: int
    micro_batch: int
    process_batch: int
    unit: int
    measured_clips: int
    settings: dict[str, Any]
    preferred: dict[str, str]
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Of one clip, forward and backward."""
        return sum(part.milliseconds for part in self.parts.values())

    @property
    def bytes_per_clip(self) -> float:
        """The larger of what is kept and of what memory was seen to grow by."""
        return max(self.kept_per_clip, self.peak_per_clip or 0.0)

    @property
    def largest_micro_batch(self) -> int:
        """Clips at once that fit, a multiple of `unit`; 0 if not even these do."""
        room = FILLED * self.free_bytes - (self.fixed_bytes or 0.0)
        return max(0, int(room / max(self.bytes_per_clip, 1.0)) // self.unit * self.unit)

    @property
    def best_micro_batch(self) -> int:
        """The largest that fits and divides the process's share of the global batch; 0 if none does."""
        most = min(self.largest_micro_batch, self.process_batch)
        fitting = [n for n in range(self.unit, most + 1, self.unit) if self.process_batch % n == 0]
        return max(fitting, default=0)

    def advice(self) -> list[str]:
        """What to turn, the best first; one line that says so where nothing is to be gained."""
        found = []
        best = self.best_micro_batch
        if self.micro_batch > self.largest_micro_batch:
            found += self._smaller(best)
        elif best > self.micro_batch:
            found.append(
                f"train.micro_batch_size={best} fits (now {self.micro_batch}): fewer, larger pieces of the global batch"
            )
        slower = {key: value for key, value in self.preferred.items() if self.settings[key] != value}
        if slower:
            keys = " ".join(f"train.{key}={value}" for key, value in slower.items())
            found.append(f"{keys}: was faster for this model (benchmarks/train_step.py)")
        if self.settings["activation_checkpointing"] and self._fits_without_checkpoints:
            found.append("train.activation_checkpointing=false: a third faster, and it may fit; measure it")
        return found or [f"nothing: {self._dearest()}"]

    @property
    def _fits_without_checkpoints(self) -> bool:
        return self.largest_micro_batch >= 8 * self.micro_batch

    def _smaller(self, best: int) -> list[str]:
        needed = self.micro_batch * self.bytes_per_clip + (self.fixed_bytes or 0.0)
        short = f"{self.micro_batch} clips at once need {_gb(needed)}, {_gb(self.free_bytes)} are free"
        found = [f"train.micro_batch_size={best} (the global batch stays): {short}"] if best else [short]
        if not self.settings["activation_checkpointing"]:
            found.append("train.activation_checkpointing=true: less memory, a third slower")
        if self.settings["precision"] == "fp32" and not best:
            found.append("train.precision=bf16: half the memory of activations")
        if not best:
            found.append("a smaller model; a smaller crop_size, fewer num_frames of model.preprocessing last")
        return found

    def _dearest(self) -> str:
        name, part = max(self.parts.items(), key=lambda item: item[1].milliseconds)
        share = part.milliseconds / max(self.milliseconds, 1e-9)
        held = f"the micro-batch of {self.micro_batch} fits"
        if share < LARGE_SHARE:
            return held
        return f"{held}; {share:.0%} of the time is {name}, which a smaller crop_size or fewer num_frames make cheaper"

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`: milliseconds a clip, bytes."""
        values = asdict(self)
        return values | {
            "milliseconds_a_clip": self.milliseconds,
            "bytes_per_clip": self.bytes_per_clip,
            "largest_micro_batch": self.largest_micro_batch,
            "best_micro_batch": self.best_micro_batch,
            "turn": self.advice(),
        }

    def to_table(self) -> str:
        """For people: a line a part, then memory, then what to turn."""
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += ["", f"{'a clip':16}{'forward ms':>12}{'backward ms':>12}{'share':>8}{'kept MB':>10}"]
        whole = max(self.milliseconds, 1e-9)
        for name, part in self.parts.items():
            lines.append(
                f"{name:16}{part.forward:12.2f}{part.backward:12.2f}{part.milliseconds / whole:8.0%}"
                f"{part.kept / MEGABYTE:10.1f}"
            )
        forward, backward = (sum(getattr(part, way) for part in self.parts.values()) for way in ("forward", "backward"))
        lines.append(f"{'all':16}{forward:12.2f}{backward:12.2f}{1:8.0%}{self.kept_per_clip / MEGABYTE:10.1f}")
        lines += [
            f"{'optimizer':16}{self.optimizer_milliseconds:12.2f} ms a step",
            "",
            f"buffers: parameters {_mb(self.parameter_bytes)}, gradients {_mb(self.gradient_bytes)}, optimizer state "
            f"{_mb(self.optimizer_bytes)}, activations kept {_mb(self.kept_per_clip)} a clip",
            self._growth(),
            f"clips at once: the recipe has {self.micro_batch}; at most {self.largest_micro_batch} fit into "
            f"{_gb(self.free_bytes)} of free memory ({FILLED:.0%} of it filled)",
        ]
        return "\n".join([*lines, *(f"turn: {text}" for text in self.advice()), *self.notes])

    def _growth(self) -> str:
        if self.peak_per_clip is None:
            return "memory held at the peak: cannot be measured here; the activations kept are what is counted with"
        return (
            f"memory held at the peak grows by {_mb(self.peak_per_clip)} a clip, beside {_mb(self.fixed_bytes or 0)} "
            "that a step needs anyway"
        )


def _mb(number: float) -> str:
    return f"{number / MEGABYTE:.1f} MB"


def _gb(number: float) -> str:
    return f"{number / 2**30:.2f} GB"
