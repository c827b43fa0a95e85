"""The next batch on its way to the device while the device computes.

Where batches stay on the CPU nothing is done: no thread, no copy. On a GPU the frames of the next batch are copied on a
stream of their own, from page-locked memory, as soon as the batch before it is handed out. Which batches come, in which
order and with which values is the same.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor

from twinreel.data.clip import Batch

__all__ = ["SideStream", "feed_device", "hold_ahead"]


class Mover(Protocol):
    """Begins to move frames, and waits on the device until they are there."""

    def begin(self, frames: Tensor) -> Any:
        """Start; returns at once."""

    def finish(self, moving: Any) -> Tensor:
        """The frames, safe to compute with."""


class SideStream:
    """Copies beside the computing: a CUDA stream that does nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device)

    def begin(self, frames: Tensor) -> tuple[Tensor, Any]:
        """Start to copy; the source, if it is page-locked, is kept by torch until the copy is done."""
        with torch.cuda.stream(self.stream):
            return frames.to(self.device, non_blocking=True), self.stream.record_event()

    def finish(self, moving: tuple[Tensor, Any]) -> Tensor:
        """What computes next waits for the copy; this process does not."""
        frames, copied = moving
        computing: Any = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        frames.record_stream(computing)  # its memory is not given away while that still reads it
        return frames


def feed_device(
    batches: Generator[Batch, None, None], device: torch.device, every: int = 1
) -> Generator[Batch, None, None]:
    """The same batches; on a GPU the first of each step is already there when it is asked for.

    Args:
        batches: of `load_batches`.
        device: what computes.
        every: micro-batches a step. Only the first of each step is moved ahead, which costs little of the device's
            memory; the others are moved when it is their turn.
    """
    if device.type != "cuda":
        return batches
    return hold_ahead(batches, SideStream(device), every)


def hold_ahead(batches: Generator[Batch, None, None], mover: Mover, every: int = 1) -> Generator[Batch, None, None]:
    """`feed_device` with any mover. `wait_seconds` is what the one who asks has waited, as it is without a feed.

    A batch is handed out when the next one has come: who computes slower than the readers read never notices, and who
    computes faster waits as long as before, one batch earlier.
    """
    with closing(batches):
        waited, began = 0.0, time.perf_counter()
        ahead, index = next(batches, None), 0
        moving = None if ahead is None else mover.begin(ahead.frames)
        while ahead is not None:
            batch, held = ahead, moving
            ahead, index = next(batches, None), index + 1
            moving = mover.begin(ahead.frames) if ahead is not None and index % every == 0 else None
            waited = time.perf_counter() - began
            if held is not None:
                batch.frames = mover.finish(held)
            batch.wait_seconds = waited
            yield batch
            began = time.perf_counter()
