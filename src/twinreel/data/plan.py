"""Which sample comes when: pure functions of (seed, epoch, position).

Nothing here has state, so a loader's whole state is one integer (the step, that is the samples seen), the order does
not depend on workers, and the global batch sequence does not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twinreel.errors import ConfigError

__all__ = ["Plan", "keyed_rng", "keyed_seed"]


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

    The `num_rows % global_batch_size` rows at the end of an epoch's permutation wait for a later epoch: others each
    time, so that none is left out for long and no batch holds a row twice.
    """

    num_rows: int
    seed: int
    global_batch_size: int

    def __post_init__(self) -> None:
        if self.num_rows < self.global_batch_size:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is more than the {self.num_rows} rows there are to "
                f"train on; set train.global_batch_size to {max(1, self.num_rows)} or less"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches an epoch."""
        return self.num_rows // self.global_batch_size

    def batch(self, step: int) -> list[tuple[int, int]]:
        """(epoch, row index) of every sample of the global batch of a step, from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.global_batch_size
        order = _epoch_order(self.num_rows, self.seed, epoch)
        return [(epoch, int(row)) for row in order[first : first + self.global_batch_size]]

    def micro_batches(self, first_step: int, last_step: int, micro_batch_size: int) -> Iterator[list[tuple[int, int]]]:
        """The micro-batches of the steps [first_step, last_step), in order."""
        for step in range(first_step, last_step):
            batch = self.batch(step)
            for first in range(0, len(batch), micro_batch_size):
                yield batch[first : first + micro_batch_size]
