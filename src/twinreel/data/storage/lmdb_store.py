"""Values of an LMDB by key, opened where they are read.

A store is a folder that holds `data.mdb`, or anything whose name ends in `.lmdb`. Its keys are file names without
extension, its values the bytes of the files, as ClipBERT has them. A store that `twinreel data pack --keys path` wrote
has the files' whole relative paths for keys, and a `twinreel.json` beside `data.mdb` that says so.

A process has a store open, once, for as long as it holds one of its values: LMDB allows no second time, and opening
takes some 50 microseconds. A forked child drops what it inherited and opens its own. Nothing is locked: a store is not
written once it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lmdb

from twinreel.data.tables import VIDEO_SUFFIXES
from twinreel.errors import DataError

__all__ = [
    "FACTS",
    "IMAGE_SUFFIXES",
    "Stored",
    "find_store",
    "is_store",
    "key_of",
    "many_looked_up",
    "open_error",
    "store_keys",
    "stored",
]

FACTS = "twinreel.json"
IMAGE_SUFFIXES = frozenset(".bmp .jpeg .jpg .png .ppm .tif .tiff .webp".split())


class Stored:
    """A value where it lies: `data` is read-only memory of the store, `name` says `store.lmdb: key`.

    The store stays open for as long as one of these is alive.
    """

    def __init__(self, store: str, key: str, data: memoryview) -> None:
        self.name = f"{store}: {key}"
        self.key = key
        self.data = data


@dataclass(slots=True, eq=False)
class _Opened:
    store: str
    real: str
    file: tuple[int, int]  # device and inode of its data
    by_path: bool
    environment: Any
    transaction: Any
    users: int = 0


_opened: dict[str, _Opened] = {}
_lock = threading.RLock()  # a value may be let go of while its thread opens another


def _forget_inherited() -> None:
    """In a forked child: close what the parent had open. The parent's own is another mapping, and stays."""
    global _lock, _many
    _lock, _many = threading.RLock(), 0
    for opened in _opened.values():
        opened.environment.close()
    _opened.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def is_store(path: str) -> bool:
    """Whether there is an LMDB at `path`, by its name or by what it holds."""
    if path.rstrip(os.sep).lower().endswith(".lmdb"):
        return os.path.exists(path)
    return os.path.isfile(os.path.join(path, "data.mdb"))


def find_store(path: str) -> tuple[str, str] | None:
    """The store that a path leads into and the rest of the path: `/a/X.lmdb/b/c.mp4` -> (`/a/X.lmdb`, `b/c.mp4`).

    None if no folder on the way is a store. One that is named `.lmdb` and is not there counts: reading says so.
    """
    parent, rest = os.path.split(path.rstrip(os.sep))
    while parent and rest:
        if parent.lower().endswith(".lmdb") or is_store(parent):
            return parent, rest
        upper, name = os.path.split(parent)
        if upper == parent:
            return None
        parent, rest = upper, f"{name}/{rest}"
    return None


def key_of(path: str, *, by_path: bool) -> str:
    """The key of a file: its name without extension, or with `by_path` its relative path without extension."""
    stem = os.path.splitext(path)[0].replace(os.sep, "/")
    return stem if by_path else stem.rpartition("/")[2]


def stored(store: str, asked: str) -> Stored | None:
    """What a store holds for a path inside it; None if it has no such key.

    A name that ends like a video or an image (`.mp4`) means the key without that ending, or else with it; any other
    name means itself, or else the name without what follows its last dot.

    Raises:
        DataError: the store is missing, damaged, not an LMDB or being replaced, or two keys could be meant.
    """
    with _used(store) as opened:
        wanted = asked.replace(os.sep, "/") if opened.by_path else os.path.basename(asked)
        stem, suffix = os.path.splitext(wanted)
        names = [name for name in dict.fromkeys((stem, wanted)) if name and len(name.encode("utf-8", "replace")) <= 511]
        found = {name: data for name in names if (data := _get(opened, name)) is not None}
        if len(found) > 1 and suffix.lower() not in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
            raise DataError(f"{store}: {wanted!r} may mean the key {stem!r} or {wanted!r}, and both are there")
        if not found:
            return None
        name, data = next(iter(found.items()))
        value = Stored(store, name, data)
        opened.users += 1
        weakref.finalize(value, _release, opened).atexit = False
        return value


def store_keys(store: str) -> list[str]:
    """The keys of a store, sorted as LMDB sorts: by their bytes.

    Raises:
        DataError: as for `stored`, or a key that is not UTF-8 text.
    """
    with _used(store) as opened:
        keys = [bytes(key) for key in opened.transaction.cursor().iternext(keys=True, values=False)]
    try:
        return [key.decode("utf-8") for key in keys]
    except UnicodeDecodeError as error:
        raise DataError(f"{store}: the key {error.object!r} is not UTF-8 text; no manifest can name it") from None


def _get(opened: _Opened, key: str) -> memoryview | None:
    try:
        data: memoryview | None = opened.transaction.get(key.encode("utf-8", "surrogateescape"))
    except lmdb.Error as error:
        raise open_error(opened.store, error) from error
    return data


@contextmanager
def _used(store: str) -> Iterator[_Opened]:
    """The store as this process has it open, opened now if it is not, and closed after if no value is held."""
    with _lock:
        opened = _open(store)
        try:
            yield opened
        finally:
            _release(opened)


def _release(opened: _Opened) -> None:
    with _lock:
        opened.users -= 1
        _close_unused(opened)


def _close_unused(opened: _Opened) -> None:
    if not opened.users and not _many and _opened.get(opened.real) is opened:
        del _opened[opened.real]
        opened.environment.close()


_many = 0


@contextmanager
def many_looked_up() -> Iterator[None]:
    """For the length of a `with`, stores stay open from one key to the next."""
    global _many
    with _lock:
        _many += 1
    try:
        yield
    finally:
        with _lock:
            _many -= 1
            for opened in list(_opened.values()):
                _close_unused(opened)


def _open(store: str) -> _Opened:
    real = os.path.realpath(store)
    data = os.path.join(real, "data.mdb") if os.path.isdir(real) else real
    try:
        stat = os.stat(data)
    except OSError as error:
        raise DataError(_why_missing(store, error)) from error
    file = (stat.st_dev, stat.st_ino)
    opened = _opened.get(real)
    if opened is not None:
        opened.users += 1
        if opened.file == file:
            return opened
        _release(opened)
        raise DataError(f"{store}: the store was replaced while it was being read; start again")
    try:
        # One value is many pages side by side: from a cold disk they come seven times as fast with readahead.
        environment = lmdb.open(real, subdir=data != real, readonly=True, lock=False, create=False, readahead=True)
    except (lmdb.Error, MemoryError) as error:
        raise open_error(store, error) from error
    try:
        _refuse_cut_short(store, data, stat, environment)
        transaction = environment.begin(buffers=True)
        opened = _Opened(store, real, file, _keys_are_paths(store), environment, transaction, users=1)
    except BaseException:
        environment.close()
        raise
    _opened[real] = opened
    return opened


def _refuse_cut_short(store: str, data: str, stat: os.stat_result, environment: Any) -> None:
    """Refuse a store whose file lacks a part that is in use: reading beyond its end would end the process."""
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if stat.st_size >= needed:
        return
    # The last pages may be free ones that were never written (a value that was written twice in one go).
    state = (data, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if state not in _whole:
        _whole[state] = subprocess.run([sys.executable, "-c", _TOUCH_ALL, data], capture_output=True).returncode == 0
    if not _whole[state]:
        raise DataError(
            f"{store}: the store is cut short: {needed - stat.st_size} of {needed} bytes are missing; copy or pack it "
            "again"
        )


_whole: dict[tuple[str, int, int, int], bool] = {}
_TOUCH_ALL = """
import lmdb, sys
with lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False) as store, store.begin(buffers=True) as values:
    for key, value in values.cursor():
        bytes(value[-1:])
"""


def _keys_are_paths(store: str) -> bool:
    path = os.path.join(store, FACTS)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            keys = json.load(file)["keys"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: can't be read ({error}); it says what the keys of the store are") from error
    if keys not in ("name", "path"):
        raise DataError(f"{path}: keys is {keys!r}; allowed are 'name' and 'path'")
    return bool(keys == "path")


def _why_missing(store: str, error: OSError) -> str:
    unfinished = store.rstrip(os.sep) + ".partial"
    if not os.path.exists(store) and os.path.exists(unfinished):
        return f"{store}: no such store, but {unfinished} is there: packing was stopped; run `twinreel data pack` again"
    what = f"no such store ({error.strerror})" if not os.path.exists(store) else "not an LMDB: it has no data.mdb"
    return f"{store}: {what}; make one with `twinreel data pack FOLDER --out {os.path.basename(store)}`"


def open_error(store: str, error: BaseException) -> DataError:
    """What LMDB complains about, with what to do."""
    said = str(error).removeprefix(f"{os.path.realpath(store)}: ") or type(error).__name__
    if isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.VersionMismatchError):
        return DataError(f"{store}: not an LMDB that can be read here, or a damaged one ({said}); pack it again")
    if isinstance(error, MemoryError | lmdb.MemoryError):
        return DataError(f"{store}: no address space to map it ({said}); raise the limit (`ulimit -v unlimited`)")
    if isinstance(error, lmdb.DiskError):
        return DataError(f"{store}: the disk is full or fails ({said}); free space and run the same command again")
    if "already open" in said:
        return DataError(f"{store}: this process has it open by other means; close that, LMDB allows one at a time")
    return DataError(f"{store}: LMDB says: {said}")
