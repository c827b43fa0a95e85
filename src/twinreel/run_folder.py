"""A run folder: whether a run may begin or go on there, and the files that say what it is.

`recipe.yaml` (resolved), `versions.json`, `log.txt`, `metrics.jsonl`, `faults.jsonl`, `tensorboard/`, `checkpoints/`.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from twinreel.checkpoint import find_checkpoint
from twinreel.errors import CheckpointError, ConfigError
from twinreel.recipe import Recipe, load_recipe

__all__ = ["LOCK_WAIT_SECONDS", "flat", "locked", "open_run", "refuse_held", "write_run_files"]

# What may differ on resume: where things are and how they are read, not what is computed.
RESUME_FREE = (
    *("data.root", "data.manifest", "data.num_workers", "data.worker_start", "data.max_faults", "eval."),
    *("train.device", "train.log_every", "train.save_every", "train.keep_last", "model.weights", "model.vocabulary"),
    # Another number of processes may need another micro-batch; the start line says what it does to the negatives.
    *("train.micro_batch_size", "train.activation_checkpointing"),
)
LOCK = "lock"
LOCK_WAIT_SECONDS = 15.0  # what a killed run may need to save and end


def open_run(run: Path, recipe: Recipe, resume: bool | str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, or None for a new run; refuses to mix two runs in one folder."""
    has_checkpoints = (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("step_*"))
    if not resume:
        if has_checkpoints:
            raise ConfigError(f"{run} already holds a run; go on with --resume, or choose another --out")
        if run.exists() and not run.is_dir():
            raise ConfigError(f"{run} is a file: no run folder can be made there; choose another --out")
        if run.exists() and any(item.name != LOCK and not item.name.startswith(".part_") for item in run.iterdir()):
            raise ConfigError(f"{run} is not an empty folder; choose another --out (or --resume, if it is a run)")
        return None, []
    if not (run / "recipe.yaml").is_file():
        raise CheckpointError(f"{run}: nothing to resume here (no recipe.yaml); leave --resume out to start")
    if isinstance(resume, str) and resume.startswith("aside_"):
        raise CheckpointError(
            f"{run}: {resume} was moved aside when the run went another way; to go on from it, start a new run with "
            "model.weights, or rename it to step_N in a copy of the run"
        )
    _refuse_changed_recipe(run, recipe)
    if not has_checkpoints and resume is True:
        return None, [f"{run} has no checkpoint yet; starting from step 0"]
    return find_checkpoint(run, None if resume is True else resume)


@contextmanager
def locked(run: Path, *, wait_seconds: float = 0.0, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold a run folder: one job writes to it at a time. The lock ends with its process, however that ends.

    Args:
        run: the folder; made if need be.
        wait_seconds: how long to wait for who holds it.
        say: told that it waits, and for whom.

    Raises:
        ConfigError: another job holds it, or no lock can be made there.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    last = time.monotonic() + wait_seconds
    told = False
    while True:
        with _open_lock(run) as file:
            if _take(file, run):
                try:
                    _sign(file, run)
                    yield
                finally:
                    _leave_nothing(run, made)
                return
        if time.monotonic() >= last:
            raise _in_use(run)
        if not told:
            say(f"{run} is held by {_holder(run)}; waiting up to {wait_seconds:g} s for it to end")
        told = True
        time.sleep(0.2)


def refuse_held(run: Path) -> None:
    """Raises:
    ConfigError: another job holds the run folder.
    """
    if (run / LOCK).is_file():
        with _open_lock(run) as file:
            if not _take(file, run):
                raise _in_use(run)


def _in_use(run: Path) -> ConfigError:
    return ConfigError(f"{run} is in use: {_holder(run)} trains there. Wait for it, stop it, or choose another --out")


def _open_lock(run: Path) -> IO[str]:
    try:
        run.mkdir(parents=True, exist_ok=True)
        return (run / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{run}: no run folder can be made there: {error.strerror}; choose another --out") from error


def _sign(file: IO[str], run: Path) -> None:
    held = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), json.dumps(held).encode())  # not through a buffer, which would try again when closed
    except OSError as error:
        raise ConfigError(
            f"{run}: cannot be written to: {error.strerror}; free space, or choose another --out"
        ) from error


def _leave_nothing(run: Path, made: Sequence[Path]) -> None:
    """A run that was refused leaves neither its lock nor the folders made for it."""
    with suppress(OSError):
        if [item.name for item in run.iterdir()] == [LOCK]:
            (run / LOCK).unlink()
            for folder in made:
                folder.rmdir()


def _take(file: IO[str], run: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: readers that are forked off do not hold it
    except (BlockingIOError, PermissionError):  # POSIX leaves it open which
        return False
    except OSError as error:
        raise ConfigError(
            f"{run}: this file system cannot lock files ({error.strerror}), so nothing would keep two jobs from "
            "writing to one run; choose an --out on another one"
        ) from error
    try:
        return os.fstat(file.fileno()).st_ino == (run / LOCK).stat().st_ino
    except FileNotFoundError:  # its holder was refused and took it away in between
        return False


def _holder(run: Path) -> str:
    try:
        held = json.loads((run / LOCK).read_text(encoding="utf-8"))
        return f"process {held['pid']} on {held['host']} (since {held['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"


def _refuse_changed_recipe(run: Path, recipe: Recipe) -> None:
    before = flat(load_recipe(run / "recipe.yaml").model_dump(mode="json"))
    now = flat(recipe.model_dump(mode="json"))
    changed = [
        f"  {key}: {before.get(key)!r} in the run, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(RESUME_FREE)
    ]
    if changed:
        raise ConfigError(
            f"{run}: the recipe differs from the run's:\n" + "\n".join(changed) + "\nResume with the same recipe "
            "(`twinreel train RUN/recipe.yaml --out RUN --resume`), or start a new run with model.weights."
        )


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        dotted: value
        for key, below in values.items()
        for dotted, value in flat(below, f"{prefix}.{key}" if prefix else key).items()
    }


def write_run_files(run: Path, recipe: Recipe) -> None:
    """Write the resolved recipe and the versions of what computes."""
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("twinreel", "torch", "numpy", "av")},
    }
    for name, text in (
        ("recipe.yaml", recipe.with_absolute_paths().to_yaml()),
        ("versions.json", json.dumps(versions, indent=1)),
    ):
        part = run / f".part_{name}"
        part.write_text(text, encoding="utf-8")
        os.replace(part, run / name)
