"""Pickles as Python 2 with an old NumPy wrote them: every text a byte string, modules under their old names."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["write_python2_pickle"]


class _Python2(pickle._Pickler):  # type: ignore[name-defined,misc]  # the pickler in Python: parts can be replaced
    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_text(self, value: str | bytes) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(data)) + data)  # BINSTRING
        self.memoize(value)

    def save_global(self, value: Any, name: str | None = None) -> None:
        module = str(value.__module__).replace("numpy._core", "numpy.core").replace("builtins", "__builtin__")
        self.write(b"c" + f"{module}\n{name or value.__name__}\n".encode())
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text
    dispatch[type] = dispatch[type(len)] = save_global


def write_python2_pickle(value: Any, path: Path) -> None:
    buffer = io.BytesIO()
    _Python2(buffer, 2).dump(value)
    path.write_bytes(buffer.getvalue())
