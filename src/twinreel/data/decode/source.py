"""Where the bytes of a video come from: a path, bytes in memory, or a file object. No decoder is touched here.

A file may be read by several at once: each reader that `open` gives has its own place in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, TypeAlias, cast

from twinreel.errors import ConfigError

__all__ = ["FileSource", "NamedBytes", "Reader", "VideoSource", "file_source"]


class NamedBytes(Protocol):
    """Bytes in memory with a name for errors."""

    name: str
    data: memoryview


class Reader(Protocol):
    """What is read from: a place in a file that moves on with reading."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move; the new place."""
        ...

    def tell(self) -> int:
        """The place."""
        ...


VideoSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | NamedBytes


class FileSource:
    """A video's bytes by name.

    Attributes:
        name: the path, `<bytes>`, or a file object's own name: what errors call it.
        path: the path, None for bytes and file objects.
    """

    def __init__(self, name: str, path: str | None = None, content: NamedBytes | BinaryIO | None = None) -> None:
        self.name = name
        self.path = path
        self._content = content  # whoever owns the memory stays alive with it

    def reader(self) -> Reader:
        """A new place in bytes or a file object, at their beginning; it needs no closing. Not for paths."""
        content = self._content
        assert content is not None
        if hasattr(content, "read"):
            return _SharedReader(cast("BinaryIO", content))
        return _MemoryReader(content.data)

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        """A new place at the beginning, for the length of a `with`."""
        if self.path is None:
            yield self.reader()
        else:
            with open(self.path, "rb") as file:
                yield file

    @property
    def size(self) -> int:
        """Number of bytes."""
        return os.path.getsize(self.path) if self.path is not None else self.reader().seek(0, os.SEEK_END)


def file_source(source: VideoSource | FileSource) -> FileSource:
    """The bytes that are meant by a path, bytes, or a seekable binary file object (read from its beginning).

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(source, FileSource):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = os.fsdecode(source)
        return FileSource(path, path)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return FileSource("<bytes>", None, _Memory("<bytes>", memoryview(source).cast("B")))
    if isinstance(getattr(source, "data", None), memoryview) and hasattr(source, "name"):
        return FileSource(str(source.name), None, source)
    return FileSource(_checked_name(source), None, cast("BinaryIO", source))


class _Memory:
    def __init__(self, name: str, data: memoryview) -> None:
        self.name = name
        self.data = data


def _checked_name(file: object) -> str:
    """The name of a file object; ConfigError if it can't serve as a source."""
    allowed = "give a path, bytes, or a seekable file object opened for reading in binary mode"
    read, seek, seekable = (getattr(file, name, None) for name in ("read", "seek", "seekable"))
    if not callable(read):
        raise ConfigError(f"a video can't be read from {type(file).__name__} {file!r:.80}; {allowed}")
    name = str(getattr(file, "name", f"<{type(file).__name__}>"))
    try:
        if not callable(seek) or (callable(seekable) and not seekable()):
            raise ConfigError(f"{name}: this file object can't seek; {allowed}, or read it whole and give the bytes")
        if not isinstance(read(0), bytes):
            raise ConfigError(f"{name}: this file object gives text, not bytes; {allowed}")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: this file object can't be read ({error}); {allowed}") from error
    return name


class _MemoryReader:
    """A place in bytes that stay where they are: nothing is copied but what is read."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def read(self, size: int, /) -> bytes:
        part = bytes(self._content[self._at : self._at + size])
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, len(self._content))[whence])
        return self._at

    def tell(self) -> int:
        return self._at


class _SharedReader:
    """A place of its own in a file object that others read too. It never closes the file object."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0

    def read(self, size: int, /) -> bytes:
        self._file.seek(self._at)
        part = self._file.read(size)
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == os.SEEK_END:
            self._at = self._file.seek(0, os.SEEK_END) + offset
        else:
            self._at = max(0, offset + (self._at if whence else 0))
        return self._at

    def tell(self) -> int:
        return self._at
