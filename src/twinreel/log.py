"""What a run says: start line, progress line, log.txt, metrics.jsonl, TensorBoard.

Progress and messages go to stderr; results belong to stdout and are printed by the command line.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from twinreel.errors import ConfigError, TrainingError

__all__ = ["Meter", "Progress", "RunLog", "format_seconds", "peak_memory_gb", "read_metrics"]


def format_seconds(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`, `3d04h`."""
    seconds = max(0, round(seconds))
    for unit, small, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{small}"
    return f"{seconds}s"


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held so far: of the GPU, or of this process (resident set)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Progress:
    """One line on stderr that rewrites itself on a terminal; elsewhere a line every `every_seconds`."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.terminal = sys.stderr.isatty()
        self.every_seconds = 0.2 if self.terminal else every_seconds
        self.last = 0.0
        self.width = 0

    def show(self, text: str, *, force: bool = False) -> None:
        """Show the newest state, if it is time to."""
        now = time.monotonic()
        if not force and now - self.last < self.every_seconds:
            return
        self.last = now
        if self.terminal:
            text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be rewritten
            sys.stderr.write(f"\r{text:<{self.width}}")
            self.width = len(text)
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """End the line, so that the next message starts on its own."""
        if self.terminal and self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            self.width = 0


class RunLog:
    """The log files of a run folder; with `folder=None` only stderr is written.

    On resume, `metrics.jsonl` and `faults.jsonl` are cut back to the checkpoint's step, so that they read as one
    uninterrupted run.
    """

    def __init__(self, folder: Path | None, *, resume_step: int | None = None, quiet: bool = False) -> None:
        self.folder = folder
        self.quiet = quiet
        self.progress = Progress()
        self.warned: set[str] = set()
        self.writer: Any = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: no run folder can be made there: {error.strerror}; choose another") from error
        if resume_step is not None:
            for name in ("metrics.jsonl", "faults.jsonl"):
                _cut_back(folder / name, resume_step)
        from torch.utils.tensorboard import SummaryWriter  # half a second, paid only by runs

        purge = None if resume_step is None else resume_step + 1
        self.excepthook, threading.excepthook = threading.excepthook, _without_a_traceback
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.clear()
        if self.writer is None:
            return
        threading.excepthook = self.excepthook
        try:
            with _named(self.folder):
                self.writer.close()
        except TrainingError:
            if kind is None:
                raise

    def say(self, text: str) -> None:
        """A message: stderr and log.txt."""
        self.progress.clear()
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)
        if self.folder is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            with _named(self.folder), (self.folder / "log.txt").open("a", encoding="utf-8") as file:
                file.writelines(f"{stamp} {line}\n" for line in text.splitlines())

    def warn(self, text: str, *, once: str | None = None) -> None:
        """A warning; those with the same `once` key are said one time."""
        if once is not None:
            if once in self.warned:
                return
            self.warned.add(once)
        self.say(f"warning: {text}")

    def show_progress(self, text: str, *, force: bool = False) -> None:
        """The live line on stderr; log.txt has the numbers in metrics.jsonl beside it."""
        if not self.quiet:
            self.progress.show(text, force=force)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of this kind."""
        return [] if self.folder is None else [line for line in read_metrics(self.folder) if line["kind"] == kind]

    def record(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        """A line of metrics.jsonl, and its numbers in TensorBoard under `kind/`."""
        if self.folder is None:
            return
        with _named(self.folder), (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            finite = {  # JSON knows neither NaN nor infinity
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in values.items()
            }
            file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        with _named(self.folder):
            self._draw(kind, step, values)

    def _draw(self, kind: str, step: int, values: Mapping[str, float | int | str]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.writer.add_scalar(f"{kind}/{name}", value, step)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, but for half a line that was written while the run was killed."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [record for line in lines if (record := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


@contextmanager
def _named(folder: Path | None) -> Iterator[None]:
    """The file system's refusal as a sentence; TensorBoard's thread, which raises it again here, says nothing."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{folder}: the log could not be written: {error.strerror}. The last checkpoint is intact; free space or "
            "mend the folder, then go on with --resume."
        ) from error


def _without_a_traceback(died: threading.ExceptHookArgs) -> None:
    if not type(died.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(died)


PENDING = ("losses", "norms", "steps", "clips", "masked_captions", "captions", "seconds", "waited")


class Meter:
    """Means since the last line of metrics.jsonl, and a speed over the last steps for the progress line."""

    def __init__(self, device: torch.device, state: Mapping[str, Any] | None = None) -> None:
        self.device = device
        self.recent: deque[tuple[int, float]] = deque(maxlen=20)
        self.loss = 0.0
        self._reset()
        for name, value in (state or {}).items():
            setattr(self, name, value)

    def state(self) -> dict[str, Any]:
        """What was noted since the last line: a resumed run goes on with it, so that its next line is the same."""
        return {name: getattr(self, name) for name in PENDING}

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.steps = self.clips = self.masked_captions = self.captions = 0
        self.seconds = self.waited = 0.0

    def add(
        self, loss: float | None, norm: float, *, clips: int, captions: int, masked: int, waited: float, seconds: float
    ) -> None:
        """Note a step: its loss (None = none), gradient norm, clips and captions of the global batch, how many of the
        captions are masked, seconds that it waited for data and took in all.
        """
        if loss is not None:
            self.losses.append(loss)
            self.loss = loss
        if math.isfinite(norm):
            self.norms.append(norm)
        self.steps += 1
        self.clips += clips
        self.captions += captions
        self.masked_captions += masked
        self.seconds += seconds
        self.waited += waited
        self.recent.append((clips, seconds))

    @property
    def waiting_share(self) -> float:
        """Seconds waited for data per second of computing."""
        return self.waited / max(self.seconds - self.waited, 1e-9)

    def line(self, step: int, total_steps: int, learning_rate: float) -> str:
        """The progress line."""
        seconds = sum(seconds for _, seconds in self.recent)
        speed = sum(clips for clips, _ in self.recent) / max(seconds, 1e-9)
        left = seconds / len(self.recent) * (total_steps - step)
        return (
            f"step {step}/{total_steps}  loss {self.loss:.3f}  lr {learning_rate:.2e}  {speed:.0f} clips/s  "
            f"waiting {self.waiting_share:.0%}  peak {peak_memory_gb(self.device):.1f} GB  "
            f"left {format_seconds(left)}"
        )

    def take(self, learning_rate: float) -> dict[str, float]:
        """The means since the last take, for metrics.jsonl."""
        values = {
            "loss": sum(self.losses) / len(self.losses) if self.losses else math.nan,
            "learning_rate": learning_rate,
            "gradient_norm": sum(self.norms) / len(self.norms) if self.norms else math.nan,
            "clips_per_second": self.clips / max(self.seconds, 1e-9),
            "step_seconds": self.seconds / max(self.steps, 1),
            "data_seconds": self.waited / max(self.steps, 1),
            "waiting_share": self.waiting_share,
            "masked_captions": self.masked_captions / max(1, self.captions),
            "memory_gb": peak_memory_gb(self.device),
        }
        self._reset()
        return values


def _cut_back(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):  # a reason may hold U+2028, which splitlines cuts at
        record = _parsed(line)
        if record is not None and record["step"] <= step:
            kept.append(line + "\n")
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    os.replace(part, path)
