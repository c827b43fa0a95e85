"""Several processes as one: the process group, gathers with exact gradients, and agreement before anyone goes on.

Started by torchrun; gloo on CPUs, NCCL on GPUs. With one process everything here is a no-op, so callers have one code.
Small things (numbers, messages) travel over gloo on the CPU even where tensors travel over NCCL.

Who says what: what all processes find out alike (`alike`), or agree on (`together`, `on_main`), the main one says. What
one process finds alone it says itself; the others lose contact with it and say that.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinreel.errors import ConfigError, TrainingError, TwinreelError

__all__ = [
    "World",
    "alike",
    "exchange",
    "gather_objects",
    "gather_rows",
    "leave",
    "on_main",
    "process_group",
    "scatter_order",
    "share_buffers",
    "together",
    "world",
]

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)  # the main process may judge, or write to slow storage, while the others wait
START_PATIENCE = 20.0  # seconds until a process says for whom it waits
# How gloo, NCCL and their store say that somebody else is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "/gloo/")


class World(NamedTuple):
    """Who this process is among how many."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0


def world() -> World:
    """The processes of this run; one outside of `process_group`."""
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


@contextmanager
def process_group(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started (environment RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Args:
        device: where this process computes; it decides between gloo and NCCL.

    Raises:
        ConfigError: the others do not come.
        TrainingError: inside, where contact with another process is lost.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield world()
        return
    rank, place = int(os.environ["RANK"]), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host = socket.gethostname()
    late = threading.Timer(
        START_PATIENCE,
        print,
        [f"process {rank} of {size} on {host}: still waiting for the others at {place}"],
        {"file": sys.stderr, "flush": True},
    )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        late.start()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT, rank=rank, world_size=size
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"process {rank} of {size} on {host} could not join the others at {place}: {error}. Look "
            "at docs/many-machines.md: every machine needs the same torchrun line, and must reach that address"
        ) from error
    finally:
        late.cancel()
    try:
        with _lost_contact(rank, size):
            yield world()
    except BaseException as error:
        if isinstance(error, TwinreelError) and error.speaker == "machine":
            error.speaker = "process"
        if device.type != "cuda":  # NCCL would wait for the others, and what is wrong would not be said
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def _lost_contact(rank: int, size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in LOST):
            raise
        raise TrainingError(
            f"process {rank} of {size} lost contact with another process, which says itself why it ended, or was "
            f"killed ({str(error).splitlines()[0][:200]}). The last checkpoint is intact: go on with --resume."
        ) from error


def leave(code: int) -> NoReturn:
    """End this process; under torchrun without the interpreter's own clearing up.

    Threads of gloo may give back a tensor at any moment, for which they want the interpreter; where that is going
    away they end the process with SIGABRT, and torchrun calls a run failed that is complete.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def gather_objects(value: T) -> list[T]:
    """The value of every process, by rank."""
    size = world().size
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def exchange(values: Sequence[float]) -> Tensor:
    """The same few numbers of every process: float64 (processes, numbers) on the CPU."""
    own = torch.tensor(values, dtype=torch.float64)
    size = world().size
    if size == 1:
        return own[None]
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own)
    return torch.stack(everyone)


@contextmanager
def alike() -> Iterator[None]:
    """What is raised inside is raised by all processes alike: the main one speaks for all."""
    try:
        yield
    except TwinreelError as error:
        error.speaker = "main"
        raise


@contextmanager
def together() -> Iterator[None]:
    """What is done inside succeeds in all processes, or all of them raise the first one's error."""
    problem: TwinreelError | None = None
    try:
        yield
    except TwinreelError as error:
        problem = error
    except OSError as error:  # a full disk, a folder that is gone: the others must not wait for this process
        problem = TrainingError(
            f"{error.filename or 'the file system'}: {error.strerror}. What was saved before is intact: mend it and "
            "go on with --resume"
        )
        problem.__cause__ = error
    if world().size == 1:
        if problem is not None:
            raise problem
        return
    said = None if problem is None else (type(problem), str(problem))
    failed = {rank: other for rank, other in enumerate(gather_objects(said)) if other is not None}
    if failed:
        rank, (kind, text) = next(iter(failed.items()))
        shared = kind(text if rank == 0 else f"process {rank}: {text}")
        shared.speaker = "main"
        raise shared from problem


def on_main(work: Callable[[], T]) -> T:
    """Do something in the main process; every process gets its result, or its error."""
    result: list[Any] = [None]
    with together():
        if world().is_main:
            result[0] = work()
    if world().size > 1:
        dist.broadcast_object_list(result, src=0)
    return result[0]  # type: ignore[no-any-return]


def gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of every process, by rank, with exact gradients.

    Backward adds up what every process wants of a row and gives each its own rows back, so that the gradients of all
    processes' shares of a loss add up to those of the whole (a gather that returns the local slice gives 1/processes
    of it).

    Args:
        rows: (b, ...), other sizes equal in all processes.
        sizes: number of rows of every process, known to all.

    Returns:
        (sum of sizes, ...); in each process the same.
    """
    if len(sizes) == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows, tuple(sizes))  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.sizes = sizes
        own = _padded(rows, max(sizes))
        everyone = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(everyone, own)
        return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = [_padded(part, max(ctx.sizes)) for part in torch.split(gradient, ctx.sizes)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own[: ctx.sizes[dist.get_rank()]], None


def _padded(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def scatter_order(positions: Sequence[Sequence[int]]) -> Tensor:
    """What puts rows that were gathered by rank into the order of their positions: `gathered[scatter_order(...)]`.

    Args:
        positions: of each process, the positions of its rows in the order it has them; together 0, 1, 2, ...
    """
    return torch.tensor([position for own in positions for position in own]).argsort()


def share_buffers(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    """Give every process the mean of all processes' running statistics, and the main one's other buffers.

    Done after every step, so that what is saved and judged does not depend on who saves, nor on when.
    """
    if world().size == 1:
        return
    _average_statistics(norms)
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    groups: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        expanded = buffer.numel() > 1 and 0 in buffer.stride()  # a constant: it cannot be written to
        if id(buffer) not in statistics and not expanded:
            groups.setdefault(buffer.dtype, []).append(buffer)
    for buffers in groups.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat.view(torch.uint8), src=0)  # bytes: gloo does not know every type
        _spread(flat, buffers)


def _spread(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _average_statistics(norms: Sequence[nn.Module]) -> None:
    size = world().size
    buffers = [
        buffer
        for norm in norms
        for buffer in (getattr(norm, "running_mean", None), getattr(norm, "running_var", None))
        if isinstance(buffer, Tensor)
    ]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers]) / size
    dist.all_reduce(flat)
    _spread(flat, buffers)
