"""What a run carries from step to step beside weights and optimizer, and how it is saved and taken up again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from twinreel.checkpoint import load_training_state, read_weights, save_checkpoint
from twinreel.distributed import together, world
from twinreel.errors import CheckpointError
from twinreel.parts import Parts
from twinreel.recipe import Recipe
from twinreel.start_line import num_negatives

__all__ = ["State", "restore", "write_checkpoint"]


@dataclass(slots=True, kw_only=True)
class State:
    """Everything a run carries from step to step, beside weights and optimizer.

    The same in every process, but for `seconds` and the times in `meter`: those of the main process are kept.
    """

    step: int = 0
    skipped_steps: int = 0
    repeated_frames: int = 0
    seconds: float = 0.0
    faults: dict[str, Any] = field(default_factory=dict)
    meter: dict[str, Any] = field(default_factory=dict)
    rows_digest: str = ""
    num_processes: int = 1
    num_negatives: int | None = None
    computes: str = ""

    def counters(self) -> dict[str, float]:
        """What metrics.jsonl says of the run so far."""
        return {"skipped_steps": self.skipped_steps, "repeated_frames": self.repeated_frames}


def restore(recipe: Recipe, parts: Parts, checkpoint: Path | None) -> tuple[State, list[str]]:
    """The state to go on with, and what is different from the run that saved it.

    Raises:
        CheckpointError: the rows have changed since, or the checkpoint does not fit.
    """
    now: dict[str, Any] = {"num_processes": world().size, "num_negatives": num_negatives(recipe, parts)}
    now["computes"] = f"{recipe.train.precision}, {recipe.train.memory_format}"  # what `auto` was, too
    if checkpoint is None:
        return State(rows_digest=parts.rows_digest, **now), []
    with together():
        state = _load(parts, checkpoint)
    changes = [
        f"{name.removeprefix('num_')}: {before} in the run, {value} now: the order of the samples stays, the bits "
        "do not"
        for name, value in now.items()
        if (before := getattr(state, name)) not in (value, None)
    ]
    state.num_processes, state.num_negatives = now["num_processes"], now["num_negatives"]
    state.computes = now["computes"]
    return state, changes


def _load(parts: Parts, checkpoint: Path) -> State:
    saved = load_training_state(checkpoint)
    if "state" not in saved:
        raise CheckpointError(
            f"{checkpoint}: imported weights, no training to go on with; start a new run with model.weights="
            f"{checkpoint / 'weights.safetensors'}"
        )
    if saved["state"]["rows_digest"] != parts.rows_digest:
        raise CheckpointError(
            f"{checkpoint}: the training rows have changed since ({saved['state']['rows_digest']} then, "
            f"{parts.rows_digest} now: ids, windows, captions, sizes of caption files, order). Restore the manifest, "
            "or start a new run with model.weights"
        )
    try:
        parts.optimizer.load_state_dict(saved["optimizer"])
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: its optimizer state does not fit this recipe: {error}") from error
    parts.scaler.load_state_dict(saved["scaler"])
    if parts.average is not None:
        parts.average.load(read_weights(checkpoint, averaged=True))
    if saved["state"].keys() != {item.name for item in fields(State)}:
        raise CheckpointError(f"{checkpoint}: of another version of twinreel; start a new run with model.weights")
    return State(**saved["state"])


def write_checkpoint(run: Path, parts: Parts, state: State) -> Path:
    """Write one, whatever is there; by the main process."""
    training_state = {
        "optimizer": parts.optimizer.state_dict(),
        "scaler": parts.scaler.state_dict(),
        "state": asdict(state),
    }
    return save_checkpoint(
        run,
        state.step,
        parts.model,
        parts.description,
        training_state,
        averaged=None if parts.average is None else parts.average.weights,
        task_weights=parts.task.state_dict(),
    )
