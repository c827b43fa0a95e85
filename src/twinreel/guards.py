"""What may go wrong during a step, and what is done about it: numbers, kernels, memory, signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from twinreel.data.clip import Batch
from twinreel.errors import TrainingError
from twinreel.log import peak_memory_gb
from twinreel.recipe import Recipe

__all__ = ["half_on_cpu", "non_finite_error", "out_of_memory_ladder", "repeatable_kernels", "stop_signals"]


def non_finite_error(what: str, value: float, step: int, micro_batches: Sequence[Batch]) -> TrainingError:
    """What to raise when a loss or a gradient is not finite: before anyone steps, naming step and samples."""
    ids = [sample for batch in micro_batches for sample in batch.ids]
    return TrainingError(
        f"step {step + 1}: the {what} is {value}; no weight was changed. Samples: {', '.join(ids[:64])}. "
        "Look at these files first (`twinreel check`), then lower optim.learning_rate, set optim.clip_norm, or use "
        "train.precision=fp32. The last checkpoint is intact."
    )


def half_on_cpu(recipe: Recipe, device: torch.device) -> bool:
    """Whether towers run in half precision on a CPU."""
    return device.type == "cpu" and recipe.train.precision != "fp32"


@contextmanager
def repeatable_kernels(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """On a CPU, oneDNN's half-precision 3-D convolutions are left out.

    In torch 2.13 their gradient differs from call to call for some small shapes (96 -> 160 channels at 2 x 4 x 4, on
    AVX-512 with bf16), and is NaN now and then: memory that was never written. PyTorch's own kernels repeat exactly.
    """
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = before and not half_on_cpu(recipe, device)
    try:
        yield
    finally:
        onednn.enabled = before


@contextmanager
def out_of_memory_ladder(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Out of memory becomes advice: what was needed, and the knobs in the order to turn them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        ours = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
        if not ours:
            raise
        micro = recipe.train.micro_batch_size or recipe.train.global_batch_size
        smaller = next((size for size in range(micro // 2, 0, -1) if recipe.train.global_batch_size % size == 0), 1)
        raise TrainingError(
            f"out of memory on {device} (peak {peak_memory_gb(device):.1f} GB) with {micro} clips at once. In this "
            f"order: train.micro_batch_size={smaller} (the global batch stays {recipe.train.global_batch_size}); "
            "train.precision=bf16; a smaller model; fewer frames last. "
            f"The last checkpoint is intact: go on with --resume. ({text.splitlines()[0] if text else 'MemoryError'})"
        ) from error


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Names of the signals that asked the run to stop; the loop looks after every step."""
    asked: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C means now
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
