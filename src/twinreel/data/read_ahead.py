"""How far readers run ahead of the device, and what the batches that are under way take of shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["ReadAhead", "clip_bytes", "free_shared_memory", "plan_ahead", "usable_cores"]

SHARED_MEMORY = "/dev/shm"
MOST_AHEAD = 4  # batches a reader: a slow file is then made up for by those that wait
USUALLY_AHEAD = 2  # less holds a reader up while its batch waits for its turn
PLENTY = 2 * 2**30  # bytes under way on a machine; more than two batches a reader are not worth more than this
USABLE = 0.8  # of what is free; others write there too
WORTH_SAYING = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """What is under way on this machine at most.

    `batches` ahead a reader (1 to 4), `batch_bytes` of one, `readers` a process, `held` batches that a process has in
    its hands, `processes` on this machine; `free_bytes` of shared memory, None where the system does not say; `cores`
    that may be used.
    """

    batches: int
    batch_bytes: int
    readers: int
    held: int
    processes: int
    free_bytes: int | None
    cores: int

    @property
    def bytes_under_way(self) -> int:
        """Shared memory that all batches read and not yet used take on this machine, at most."""
        return self.processes * (self.readers * self.batches + self.held) * self.batch_bytes

    def line(self) -> str | None:
        """For the start of a run, where it is much, was cut down, or there are more readers than cores; else None."""
        if not self.readers:
            return None
        crowded = self.readers * self.processes > self.cores
        if self.bytes_under_way < WORTH_SAYING and self.batches > 1 and not crowded:
            return None
        several = f" in each of {self.processes} processes" if self.processes > 1 else ""
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        return (
            f"{self.readers} readers{several} run up to {batches} of {_amount(self.batch_bytes)} ahead: at most "
            f"{_amount(self.bytes_under_way)} of shared memory"
            + f"; more readers than the {self.cores} cores are of use only where they wait for storage"
            * crowded
        )

    def warning(self) -> str | None:
        """Where there may be too little, with what to lower; else None."""
        if self.free_bytes is None or self.bytes_under_way <= USABLE * self.free_bytes:
            return None
        fit = int(USABLE * self.free_bytes / self.batch_bytes / self.processes - self.held)
        fewer = f"{fit} fit" if fit > 0 else "0 reads without any"
        return (
            f"readers may run out of shared memory, which ends them: up to {_amount(self.bytes_under_way)} under way "
            f"({self.processes} x ({self.readers} readers + {self.held} in use) x batches of "
            f"{_amount(self.batch_bytes)}), and {SHARED_MEMORY} has {_amount(self.free_bytes)} free. Lower "
            f"data.num_workers (now {self.readers}; {fewer}), train.micro_batch_size (eval.batch_size), or num_frames "
            f"or crop_size of model.preprocessing; or enlarge {SHARED_MEMORY} (docker: --shm-size=8g)"
        )


def clip_bytes(preprocessing: Preprocessing) -> int:
    """Bytes of the uint8 frames of one clip, as readers hand it over."""
    return preprocessing.num_frames * preprocessing.crop_size**2 * 3


def plan_ahead(
    one_clip: int, clips: int, *, num_workers: int, held: int = 1, processes: int | None = None
) -> ReadAhead:
    """As many batches ahead as are of use and fit: the same samples in the same order, whatever this says.

    Args:
        one_clip: bytes of one clip.
        clips: of a batch, at most.
        num_workers: readers of this process.
        held: batches that are in use at once: the micro-batches of a step, one more where the next is moved ahead.
        processes: that read on this machine; None = as many as torchrun has started here.

    Raises:
        ConfigError: not even one batch fits into the free shared memory.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if processes is None else processes
    free = free_shared_memory() if num_workers else None
    shared: dict[str, Any] = {
        "batch_bytes": one_clip * clips, "readers": num_workers, "held": held, "processes": processes,
        "free_bytes": free, "cores": usable_cores(),
    }  # fmt: skip
    if free is not None and one_clip * clips > free:
        raise ConfigError(
            f"a batch of {clips} clips is {_amount(one_clip * clips)}, but {SHARED_MEMORY}, through which readers "
            f"hand it over, has {_amount(free)} free: lower train.micro_batch_size (eval.batch_size), or num_frames or "
            f"crop_size of model.preprocessing; or enlarge {SHARED_MEMORY} (docker: --shm-size=8g); or "
            "data.num_workers=0, which needs none"
        )
    chosen = ReadAhead(batches=1, **shared)
    for batches in range(2, MOST_AHEAD + 1):
        more = ReadAhead(batches=batches, **shared)
        plenty = batches > USUALLY_AHEAD and more.bytes_under_way > PLENTY
        if plenty or (free is not None and more.bytes_under_way > USABLE * free):
            break
        chosen = more
    return chosen


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_shared_memory() -> int | None:
    """Free bytes of the file system through which processes share tensors; None where there is none to ask."""
    try:
        stat = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.0f} MB"
