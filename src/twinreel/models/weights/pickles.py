"""Plain pickles, such as the `.pkl` files of Caffe2, without running anything that is in them.

A pickle can name any function and have it called. This unpickler knows how NumPy writes arrays, and ordered dicts;
every other name is refused. Pickles of Python 2 hold byte strings where names are meant: they are read as latin1.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from twinreel.errors import CheckpointError

__all__ = ["read_pickle"]

_CONTAINERS = {"dict": dict, "list": list, "set": set, "tuple": tuple, "frozenset": frozenset}


def read_pickle(path: Path) -> Any:
    """What a pickle of arrays, numbers, texts and containers holds.

    Raises:
        CheckpointError: it names something else.
        Exception: of any kind where the file is damaged.
    """
    with path.open("rb") as file:
        return _ArraysOnly(file, path).load()


class _ArraysOnly(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file, encoding="latin1")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for.

        Raises:
            CheckpointError: it is none of the few that are allowed.
        """
        if module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy") and name in _ARRAYS:
            return _ARRAYS[name]
        if module in ("__builtin__", "builtins") and name in _CONTAINERS:
            return _CONTAINERS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in a pickle that Python 2 can read
            return _latin1
        raise CheckpointError(
            f"{self.path}: the pickle names {module}.{name}, refused because unpickling it can run code; read are "
            "arrays of numbers, numbers, texts, lists and dicts. Where you trust the file, convert it once with the "
            'program that wrote it: keep {"blobs": {name: numpy.asarray(value)}} and pickle that'
        )


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
    return text.encode("latin1")


def _array(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    # NumPy's own function would take any subclass and any size; the contents follow, so it may start empty.
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"an array of the kind {kind!r}")
    return np.ndarray((0,), dtype=np.uint8)


def _dtype(*arguments: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(*arguments)
    if dtype.kind not in "biuf":
        raise pickle.UnpicklingError(f"an array of {dtype}, which holds no numbers")
    return dtype


def _number(dtype: np.dtype[Any], data: bytes | str = b"") -> Any:
    data = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(data, dtype=dtype, count=1)[0]


_ARRAYS: dict[str, Callable[..., Any]] = {
    "_reconstruct": _array,
    "ndarray": np.ndarray,
    "dtype": _dtype,
    "scalar": _number,
}
