"""Checkpoints: written whole or not at all, loaded strictly, resumed bit for bit.

`checkpoints/step_0001000/` holds `weights.safetensors`, `averaged.safetensors` if weights are averaged,
`task.safetensors` if the task learns something, `model.json` (what to build), `vocabulary.json` if the model has one,
`training.pt` (optimizer, scaler, counters; loads with weights_only) and `contents.json` (size and checksum of each,
written last). It is made under a temporary name, flushed and renamed; links `last` and `best` follow.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twinreel.errors import CheckpointError

__all__ = [
    "find_checkpoint",
    "list_checkpoints",
    "load_training_state",
    "prune_checkpoints",
    "read_model_json",
    "read_task_weights",
    "read_weights",
    "save_checkpoint",
    "set_aside",
    "set_link",
    "weights_file",
]

AVERAGED = "averaged.safetensors"


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    description: Mapping[str, Any],
    training_state: Mapping[str, Any],
    *,
    averaged: Mapping[str, Tensor] | None = None,
    task_weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint of a step and point `last` at it.

    Args:
        run: the run folder.
        step: optimizer steps done.
        model: its whole state dict is saved.
        description: what `load_model` needs to build the model again (JSON).
        training_state: tensors, numbers, strings, lists and dicts only.
        averaged: parameters averaged over steps, by name.
        task_weights: what the task has learned beside the model (a temperature).

    Raises:
        CheckpointError: the file system refuses; the checkpoints before this one are untouched.
    """
    folder = run / "checkpoints"
    final = folder / f"step_{step:07d}"
    part = folder / f".part_{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        weights = model.state_dict()
        _save_tensors(weights, part / "weights.safetensors")
        if averaged is not None:
            _save_tensors({**weights, **averaged}, part / AVERAGED)
        if task_weights:
            _save_tensors(task_weights, part / "task.safetensors")
        (part / "model.json").write_text(json.dumps(description, indent=1, ensure_ascii=False), encoding="utf-8")
        vocabulary = getattr(model, "vocabulary", None)
        if vocabulary is not None:
            vocabulary.save(part / "vocabulary.json")
        torch.save(dict(training_state), part / "training.pt")
        contents = {item.name: [item.stat().st_size, _checksum(item)] for item in sorted(part.iterdir())}
        (part / "contents.json").write_text(json.dumps(contents, indent=1), encoding="utf-8")
        for item in part.iterdir():
            _flush(item)
        _flush(part)
        older = folder / f".part_old_{final.name}"
        if final.exists():
            os.replace(final, older)
        os.replace(part, final)
        _flush(folder)
        shutil.rmtree(older, ignore_errors=True)
        set_link(run, "last", final)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if str(error).startswith("DataLoader worker"):  # torch says that from a signal handler, wherever we are
            raise
        raise CheckpointError(
            f"{final}: the checkpoint could not be written: {error}. The checkpoints before it are intact; free space "
            "or mend the folder, then go on with --resume."
        ) from error
    return final


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def set_link(run: Path, name: str, checkpoint: Path) -> None:
    """Point `checkpoints/<name>` at a checkpoint, in one step."""
    part = checkpoint.parent / f".part_{name}"
    part.unlink(missing_ok=True)
    part.symlink_to(checkpoint.name)
    os.replace(part, run / "checkpoints" / name)


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, by step."""
    return sorted(item for item in (run / "checkpoints").glob("step_*") if item.is_dir())


def prune_checkpoints(run: Path, keep_last: int) -> None:
    """Delete all but the last `keep_last` checkpoints and the one `best` points at."""
    best = run / "checkpoints" / "best"
    kept = best.resolve().name if best.is_symlink() else None
    for old in list_checkpoints(run)[:-keep_last]:
        if old.name != kept:
            shutil.rmtree(old)
    for left_over in (run / "checkpoints").glob(".part_*"):
        if left_over.is_symlink():
            left_over.unlink()
        else:
            shutil.rmtree(left_over, ignore_errors=True)


def set_aside(run: Path, checkpoint: Path) -> list[str]:
    """Move checkpoints after the one that a run goes on from to `aside_step_N`, so that they are not taken for its own.

    They are of a way that was left, or broken; the links `last` and `best` no longer point at them.

    Returns:
        What was moved, by name.
    """
    folder = run / "checkpoints"
    later = [item for item in list_checkpoints(run) if item.name > checkpoint.name]
    for item in later:
        aside = folder / f"aside_{item.name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(item, aside)
    for name in ("last", "best"):
        link = folder / name
        if link.is_symlink() and not link.exists():
            link.unlink()
    if later:
        set_link(run, "last", checkpoint)
    return [item.name for item in later]


def check_intact(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    try:
        contents = json.loads((checkpoint / "contents.json").read_text(encoding="utf-8"))
        for name, (size, checksum) in contents.items():
            path = checkpoint / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if _checksum(path) != checksum:
                return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def find_checkpoint(run: Path, name: str | None = None) -> tuple[Path, list[str]]:
    """The checkpoint to use, and warnings about newer broken ones.

    Args:
        run: a run folder.
        name: `last`, `best`, `step_0001000`, `step_1000` or a number; None = the newest that is intact.

    Raises:
        CheckpointError: there is none, or the named one is broken.
    """
    found = list_checkpoints(run)
    if not found:
        raise CheckpointError(
            f"{run}: no checkpoint here; a run folder has checkpoints/step_*/ (made by `twinreel train --out`)"
        )
    if name in (None, "last"):
        warnings: list[str] = []
        for checkpoint in reversed(found):
            reason = check_intact(checkpoint)
            if reason is None:
                return checkpoint, warnings
            warnings.append(f"{checkpoint.name} is broken ({reason}); the one before it is taken")
        raise CheckpointError(f"{run}: every checkpoint is broken: {'; '.join(warnings)}")
    wanted = run / "checkpoints" / str(name)
    if name != "best":
        digits = str(name).removeprefix("step_")
        wanted = run / "checkpoints" / (f"step_{int(digits):07d}" if digits.isdigit() else str(name))
    if not wanted.exists():
        choices = ", ".join(["last", "best", *(item.name for item in found)])
        raise CheckpointError(f"{run}: no checkpoint {name!r}; there are: {choices}")
    wanted = wanted.resolve()
    reason = check_intact(wanted)
    if reason is not None:
        raise CheckpointError(f"{wanted}: broken: {reason}; choose another one")
    return wanted, []


def read_model_json(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of the model it holds."""
    return dict(json.loads((checkpoint / "model.json").read_text(encoding="utf-8")))


def weights_file(checkpoint: Path, *, averaged: bool = False) -> Path:
    """The file of a checkpoint's state dict; of the averaged one if that is wanted and there."""
    path = checkpoint / AVERAGED
    return path if averaged and path.exists() else checkpoint / "weights.safetensors"


def read_weights(checkpoint: Path, *, averaged: bool = False) -> dict[str, Tensor]:
    """The whole state dict of a checkpoint, on the CPU; with averaged parameters if they are wanted and there."""
    return dict(load_file(weights_file(checkpoint, averaged=averaged)))


def read_task_weights(checkpoint: Path) -> dict[str, Tensor]:
    """What the task has learned by a checkpoint.

    Raises:
        CheckpointError: the checkpoint has nothing of the kind.
    """
    path = checkpoint / "task.safetensors"
    if not path.exists():
        raise CheckpointError(f"{checkpoint}: no learned temperature in it; it was trained without one")
    return dict(load_file(path))


def load_training_state(checkpoint: Path) -> dict[str, Any]:
    """Optimizer, scaler and counters of a checkpoint."""
    return dict(torch.load(checkpoint / "training.pt", weights_only=True, map_location="cpu"))
