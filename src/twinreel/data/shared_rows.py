"""Rows that many reader processes hold once.

A list of a million rows is dear to share: under fork each reader copies, page by page, what it looks at (a look
changes a reference count), under spawn and forkserver the list is pickled for each reader and built again in it.
Here all rows lie side by side in one block of memory, which is mapped by all, and a row is built when it is read.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from operator import attrgetter
from typing import Any, overload

import numpy as np

from twinreel.data.clip import Clip

__all__ = ["SharedRows"]

_NAMES = tuple(field.name for field in fields(Clip))
_values: Callable[[Clip], tuple[Any, ...]] = attrgetter(*_NAMES)


class SharedRows(Sequence[Clip]):
    """The same rows as those of a list, read only, in about 160 bytes each.

    Pickled while a process is started (as an argument of `multiprocessing.Process`), what travels is the descriptor
    of an unnamed file that lies in memory (where the system has none, in the folder of temporary files).
    """

    def __init__(self, rows: Sequence[Clip]) -> None:
        descriptor = _unnamed_file()
        ends = np.zeros(len(rows) + 1, dtype=np.int64)
        with os.fdopen(os.dup(descriptor), "wb") as file:
            for number, row in enumerate(rows, start=1):
                written = file.write(pickle.dumps(_values(row), pickle.HIGHEST_PROTOCOL))
                ends[number] = ends[number - 1] + written
            file.write(b"\0" * (-int(ends[-1]) % ends.itemsize))
            file.write(ends.tobytes())
        self._map(descriptor, len(rows))

    def _map(self, descriptor: int, num_rows: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._block = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        size = 8 * (num_rows + 1)
        self._ends = np.frombuffer(self._block, np.int64, num_rows + 1, len(self._block) - size)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Clip: ...
    @overload
    def __getitem__(self, index: slice) -> list[Clip]: ...
    def __getitem__(self, index: int | slice) -> Clip | list[Clip]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        values = pickle.loads(self._block[int(self._ends[at]) : int(self._ends[at + 1])])
        return Clip(**dict(zip(_NAMES, values, strict=True)))

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return SharedRows, (list(self),)
        return _received, (DupFd(self._descriptor), len(self))


def _received(descriptor: Any, num_rows: int) -> SharedRows:
    rows = SharedRows.__new__(SharedRows)
    rows._map(descriptor.detach(), num_rows)
    return rows


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("twinreel rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
