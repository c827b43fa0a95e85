"""What may go wrong during a step, and what is done about it: numbers, kernels, memory, signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.distributed import world
from twinreel.errors import TrainingError
from twinreel.log import peak_memory_gb
from twinreel.models.half_on_cpu import RoomyConvolutions
from twinreel.recipe import Recipe

__all__ = ["Signals", "half_on_cpu", "out_of_memory_ladder", "repeatable_kernels", "watched_signals"]


def half_on_cpu(recipe: Recipe, device: torch.device) -> bool:
    """Whether towers run in half precision on a CPU."""
    return device.type == "cpu" and recipe.train.precision != "fp32"


@contextmanager
def repeatable_kernels(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """On a CPU in half precision, convolutions that give the same gradient every time (`models/half_on_cpu.py`)."""
    with RoomyConvolutions() if half_on_cpu(recipe, device) else nullcontext():
        yield


@contextmanager
def out_of_memory_ladder(recipe: Recipe, device: torch.device, clips_at_once: int) -> Iterator[None]:
    """Out of memory becomes advice: what was needed, and the knobs in the order to turn them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if "does not have a deterministic implementation" in text:
            raise TrainingError(
                f"train.deterministic=true: torch has no repeatable version of a part of this model on {device} "
                f"({text.splitlines()[0]}). Set train.deterministic=false: a resumed run is then equal to rounding only"
            ) from error
        ours = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
        if not ours:
            raise
        whole, size = recipe.train.global_batch_size, world().size
        smaller = next((n for n in range(clips_at_once // 2, 0, -1) if whole % (n * size) == 0), None)
        halved = "" if smaller is None else f"train.micro_batch_size={smaller} (the global batch stays {whole}); "
        frugal = "" if recipe.train.activation_checkpointing else "train.activation_checkpointing=true; "
        narrow = "train.precision=bf16; " if recipe.train.precision == "fp32" else ""
        clips = recipe.data.num_clips
        sparse = f"data.num_clips={clips // 2} (of {clips} clips a video); " if clips > 1 else ""
        raise TrainingError(
            f"out of memory on {device} (peak {peak_memory_gb(device):.1f} GB) with {clips_at_once} clips at once. In "
            f"this order: {halved}{frugal}{narrow}{sparse}a smaller model; fewer frames last. "
            f"The last checkpoint is intact: go on with --resume. ({text.splitlines()[0] if text else 'MemoryError'})"
        ) from error


@dataclass(slots=True)
class Signals:
    """What signals ask for: to stop, or to save and go on.

    `stop` (the signal's name) and `save` are what all processes have agreed on; a signal that comes while they do is
    told the next time.
    """

    stop: str | None = None
    save: bool = False
    asked_stop: str | None = None
    asked_save: bool = False

    def told(self) -> tuple[float, float]:
        """What this process was asked for since it was told last, as two numbers for the others."""
        save, self.asked_save = self.asked_save, False
        return float(signal.Signals[self.asked_stop] if self.asked_stop else 0), float(save)

    def agree(self, told: Tensor) -> None:
        """Take over what any process was asked for: (processes, 2)."""
        number, self.save = int(told[:, 0].max()), bool(told[:, 1].any())
        self.stop = signal.Signals(number).name if number else None


@contextmanager
def watched_signals() -> Iterator[Signals]:
    """SIGTERM, SIGHUP and SIGINT ask a run to stop, SIGUSR1 to save and go on; the loop looks after every step.

    A SIGHUP that is ignored (nohup) stays so.
    """
    asked = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if number == signal.SIGUSR1:
            asked.asked_save = True
        elif asked.asked_stop and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C means now
        else:
            asked.asked_stop = signal.Signals(number).name

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked.stop and "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as one has ended
