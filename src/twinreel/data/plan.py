"""Which sample comes when: pure functions of (seed, epoch, position).

Nothing here has state, so a loader's whole state is one integer (the step, that is the samples seen), the order does
not depend on workers, and the global batch sequence does not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from twinreel.errors import ConfigError

__all__ = ["Plan", "Shares", "keyed_rng", "keyed_seed"]


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed that is a pure function of the key, e.g. (seed, epoch, sample id, purpose)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") >> 1


def keyed_rng(*key: int | str) -> np.random.Generator:
    """A random generator that belongs to a key and to nothing else."""
    return np.random.Generator(np.random.PCG64(keyed_seed(*key)))


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return keyed_rng(seed, epoch, "order").permutation(num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order of a run: every epoch a new permutation of the rows, cut into whole global batches.

    The rows that are left at the end of an epoch's permutation wait for a later epoch: others each time, so that none
    is left out for long and no batch draws a row twice. With `views_per_row` (repeated augmentation) a batch holds so
    many views of each of its rows, side by side; `global_batch_size` counts views, an epoch goes once over the rows.
    """

    num_rows: int
    seed: int
    global_batch_size: int
    views_per_row: int = 1

    def __post_init__(self) -> None:
        _refuse_torn_groups(self.global_batch_size, None, self.views_per_row)
        if self.num_rows < self.rows_per_batch:
            views = f" x {self.views_per_row} views of each" * (self.views_per_row > 1)
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is more than the {self.num_rows} rows{views} there "
                f"are to train on; set train.global_batch_size to {max(1, self.num_rows) * self.views_per_row} or less"
            )

    @property
    def rows_per_batch(self) -> int:
        """Rows of a global batch."""
        return self.global_batch_size // self.views_per_row

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches an epoch."""
        return self.num_rows // self.rows_per_batch

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(epoch, row index) of every sample of the global batch of a step, from 0; the views of a row in turn."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.rows_per_batch
        order = _epoch_order(self.num_rows, self.seed, epoch)[first : first + self.rows_per_batch]
        return [(epoch, int(row)) for row in order for _ in range(self.views_per_row)]

    def micro_batches(
        self, first_step: int, last_step: int, shares: Shares, process: int = 0
    ) -> Iterator[list[tuple[int, int]]]:
        """What one process reads in the steps [first_step, last_step), in order: a list of keys a micro-batch.

        A key is read once and gives all views of its row, so it stands for `views_per_row` positions of the batch.
        """
        for step in range(first_step, last_step):
            batch = self.batch(step)
            for positions in shares.of_process(process):
                yield batch[positions.start : positions.stop : self.views_per_row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Which positions of a global batch are whose: `positions[micro-batch][process]`, in rising order.

    A micro-batch is what all processes compute at once; its clips lie side by side in the global batch, so the
    sample order does not depend on the number of processes.
    """

    positions: list[list[range]]

    @classmethod
    def cut(
        cls,
        global_batch_size: int,
        num_processes: int = 1,
        micro_batch_size: int | None = None,
        clips_together: int = 1,
    ) -> Shares:
        """Cut a global batch.

        Args:
            global_batch_size: clips a step.
            num_processes: how many compute at once.
            micro_batch_size: clips a process computes at once; None = the batch is cut into one piece a process, as
                evenly as can be.
            clips_together: so many neighbors stay together: views of one row, pairs that are mixed.

        Raises:
            ConfigError: a process without a clip, or a remainder.
        """
        _refuse_torn_groups(global_batch_size, micro_batch_size, clips_together)
        if global_batch_size < num_processes * clips_together:
            least = num_processes * clips_together
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} on {num_processes} processes leaves "
                f"{num_processes - global_batch_size // clips_together} of them without a clip; raise it to {least} or "
                "more, or start fewer processes"
            )
        pieces = num_processes if micro_batch_size is None else global_batch_size // micro_batch_size
        if micro_batch_size is not None and (global_batch_size % micro_batch_size or pieces % num_processes):
            share = global_batch_size // num_processes
            sizes = [
                size
                for size in range(clips_together, share + 1, clips_together)
                if global_batch_size % (size * num_processes) == 0
            ]
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} is not a whole number of {num_processes} processes x "
                f"train.micro_batch_size={micro_batch_size}; "
                + (f"micro-batches that fit: {', '.join(map(str, sizes))}; " if sizes else "")
                + "or leave train.micro_batch_size out: the batch is then cut as evenly as can be"
            )
        num_rows = global_batch_size // clips_together
        edges = [piece * num_rows // pieces * clips_together for piece in range(pieces + 1)]
        ranges = [range(start, stop) for start, stop in pairwise(edges)]
        return cls(positions=[ranges[first : first + num_processes] for first in range(0, pieces, num_processes)])

    @property
    def num_processes(self) -> int:
        """How many processes share the batch."""
        return len(self.positions[0])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches a step."""
        return len(self.positions)

    @property
    def largest(self) -> int:
        """The most clips a process computes at once."""
        return max(len(own) for everyone in self.positions for own in everyone)

    def of_process(self, process: int) -> list[range]:
        """One process's positions, a range a micro-batch."""
        return [everyone[process] for everyone in self.positions]


def _refuse_torn_groups(global_batch_size: int, micro_batch_size: int | None, clips_together: int) -> None:
    for name, size in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if size is not None and size % clips_together:
            nearest = max(1, round(size / clips_together)) * clips_together
            raise ConfigError(
                f"train.{name}={size} is not a whole number of {clips_together} clips that stay together (views of "
                f"data.repeated_augmentation, pairs of data.mixup or data.cutmix); {nearest} is"
            )
