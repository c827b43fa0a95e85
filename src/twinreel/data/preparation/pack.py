"""Many files -> one LMDB, as ClipBERT has them: key = file name without extension, value = the file's bytes.

The store is written as `X.lmdb.partial` in pieces that are each safe on the disk, so a killed run goes on where it
was; it becomes `X.lmdb` when every value has been read again and compared with its file. Beside `data.mdb` it has
`manifest.jsonl` (its rows: `data.manifest=X.lmdb/manifest.jsonl` trains on them) and `twinreel.json`.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lmdb

from twinreel.data.clip import Fault
from twinreel.data.decode.filetype import describe_file
from twinreel.data.preparation.collection import (
    Listed,
    check_place,
    claim,
    disk_failure,
    flush_folder,
    list_collection,
    refuse_inside,
    refuse_same_names,
    write_lists,
)
from twinreel.data.storage.frame_folder import image_size
from twinreel.data.storage.lmdb_store import FACTS, IMAGE_SUFFIXES, is_store, key_of, open_error
from twinreel.errors import DataError

__all__ = ["PackResult", "pack_collection"]

COMMIT_BYTES = 64 * 2**20  # what a killed run may have to write again
MOST_VALUE_BYTES = 2**32 - 1  # of LMDB
MOST_KEY_BYTES = 511  # of LMDB
SPARE_BYTES = 2**26  # of the map, beside what the files take
_PAGE = 4096
_HEADER = 16  # bytes of a page before a value's own
_COMPARED = 8 * 2**20
_FREE_BYTES = 2**20  # on a disk that is called full: LMDB writes what fits before it gives up
_AGAIN = "make room or mend it, and run the same command again: it goes on from there"

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What was packed: `listed` files = `packed` now + `already_there` + the number of `faults`.

    `bytes` counts all values of the store; `left_out` the files that were not listed, by suffix.
    """

    store: str
    manifest: str
    listed: int
    packed: int
    already_there: int
    bytes: int
    left_out: dict[str, int]
    faults: list[Fault]


def pack_collection(
    source: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    suffixes: Collection[str] | None = None,
    kind: Literal["video", "image"] = "video",
    keys: Literal["name", "path"] = "name",
    report: Report | None = None,
) -> PackResult:
    """Put the files of a folder or manifest into an LMDB; goes on where a killed run stopped.

    Args:
        source: a folder, or a manifest.
        out: the store to be, a folder; best named `.lmdb`.
        root: folder that the manifest's paths start from; default: its own.
        suffixes: take files with these suffixes alone (`.mp4`); default: those of videos or images.
        kind: what the files are; a file that plainly is something else is not packed but reported.
        keys: `name` as ClipBERT has them; `path` keeps the folders (`train/a`), for collections that have one file
            name in several of them.
        report: called with (what is done, bytes done, bytes in all).

    Raises:
        ConfigError: `out` is inside the folder that is packed.
        DataError: nothing to pack, two files with one key, `out` is there and holds something else, or the disk fails.
    """
    target = Path(os.path.abspath(os.path.expanduser(out)))
    _refuse_store(source)
    suffixes = suffixes or (IMAGE_SUFFIXES if kind == "image" else None)
    listed = list_collection(source, root=root, suffixes=suffixes, what=kind)
    refuse_inside(target, source, listed.files, "packed")
    check_place(target, "an LMDB in a folder")
    by_path = keys == "path"
    names = {file: key_of(path, by_path=by_path) for file, path in listed.files.items()}
    refuse_same_names(names, "key", _SAME_KEYS if keys == "name" else "Rename one of each.")
    faults = {file: reason for file in names if (reason := _why_not(file, names[file], kind))}
    wanted = {key: file for file, key in names.items() if file not in faults}
    if not wanted:
        first = next(iter(faults.items()))
        raise DataError(f"{source}: none of its {len(names)} files can be packed (first: {first[0]}: {first[1]})")
    found = [Fault(id=listed.files[file], video=file, reason=f"{file}: {why}") for file, why in faults.items()]
    show = _Meter(report, sum(map(os.path.getsize, wanted.values())))
    if target.exists():
        _refuse_other_content(target, wanted, show)
        write_lists(target, listed.rows, _places(listed, wanted, by_path), found)
        return _result(target, listed, 0, len(wanted), show.total, found)
    partial = target.with_name(target.name + ".partial")
    made_from = {"keys": keys, "kind": kind, "source": os.path.abspath(source)}
    with _disk_errors(partial), claim(partial, made_from, FACTS):
        packed = _write(partial, wanted, show)
        _verify(partial, wanted, show)
        write_lists(partial, listed.rows, _places(listed, wanted, by_path), found)
        flush_folder(partial, ["data.mdb"])
        os.rename(partial, target)
    (target / ".lock").unlink(missing_ok=True)
    flush_folder(target.parent)
    return _result(target, listed, packed, len(wanted) - packed, show.total, found)


_SAME_KEYS = (
    "A key is the file name without extension, as ClipBERT has it. Rename one of each, choose with --ext, or keep the "
    "folders in the keys: --keys path (ClipBERT then finds them by such keys alone)."
)


def _refuse_store(source: str | Path) -> None:
    path = os.path.abspath(os.path.expanduser(source))
    if is_store(path):
        raise DataError(f"{source} is an LMDB already; copy it, or pack the folder or manifest that it was made from")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """What the system refuses becomes a DataError."""
    try:
        yield
    except OSError as error:
        why = disk_failure(error) or error.strerror or str(error)
        raise DataError(f"{error.filename or folder}: {why}; {_AGAIN}") from error


def _result(store: Path, listed: Listed, packed: int, already_there: int, size: int, faults: list[Fault]) -> PackResult:
    return PackResult(
        store=str(store),
        manifest=str(store / "manifest.jsonl"),
        listed=len(listed.files),
        packed=packed,
        already_there=already_there,
        bytes=size,
        left_out=listed.left_out,
        faults=faults,
    )


def _places(listed: Listed, wanted: Mapping[str, str], by_path: bool) -> dict[str, str]:
    """Of each packed file the path by which the store's own manifest names it."""
    return {file: listed.files[file] if by_path else os.path.basename(file) for file in wanted.values()}


def _why_not(file: str, key: str, kind: str) -> str | None:
    """Why a file can't be packed; only its beginning is looked at."""
    if not os.path.isfile(file):
        return "a folder or an entry of a store, not a file" if os.path.exists(file) else "no such file"
    if os.path.getsize(file) > MOST_VALUE_BYTES:
        return f"{os.path.getsize(file)} bytes; LMDB holds up to {MOST_VALUE_BYTES} a value"
    if len(key.encode("utf-8", "surrogateescape")) > MOST_KEY_BYTES:
        return f"its key is longer than LMDB's {MOST_KEY_BYTES} bytes; give the file a shorter name"
    if kind == "video":
        return describe_file(file)
    try:
        image_size(file)
    except DataError as error:
        return str(error).removeprefix(f"{file}: ")
    return None


class _Meter:
    """Bytes done of all, for the one who waits."""

    def __init__(self, report: Report | None, total: int) -> None:
        self.report = report
        self.total = total
        self.done = 0

    def start(self) -> None:
        self.done = 0

    def add(self, what: str, size: int) -> None:
        self.done += size
        if self.report is not None:
            self.report(what, self.done, self.total)


@contextmanager
def _content(file: str) -> Iterator[Any]:
    """The bytes of a file where the system keeps them."""
    with open(file, "rb") as handle:
        if os.fstat(handle.fileno()).st_size == 0:
            raise DataError(f"{file}: an empty file (0 bytes)")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            yield view


def _write(folder: Path, wanted: Mapping[str, str], show: _Meter) -> int:
    """Write what is not there yet, or differs from its file; how many."""
    pages = sum(os.path.getsize(file) // _PAGE + 2 for file in wanted.values())
    packed = 0
    show.start()
    with _opened(folder, map_size=int(1.1 * pages * _PAGE) + SPARE_BYTES) as environment:
        for key in _foreign_keys(environment, wanted):
            with environment.begin(write=True) as transaction:
                transaction.delete(key)  # its file was there when the killed run began, and is not now
        for piece in _pieces(environment, wanted, show):
            _commit(environment, piece)
            packed += len(piece)
            show.add("packing", sum(os.path.getsize(file) for file in piece.values()))
    return packed


def _pieces(environment: Any, wanted: Mapping[str, str], show: _Meter) -> Iterator[dict[str, str]]:
    piece: dict[str, str] = {}
    size = 0
    for key, file in wanted.items():
        with environment.begin(buffers=True) as transaction, _content(file) as content:
            there = transaction.get(key.encode("utf-8", "surrogateescape"))
            if there is not None and _same(there, content):
                show.add("packing", len(content))
                continue
            size += len(content)
        piece[key] = file
        if size >= COMMIT_BYTES or len(piece) >= 1000:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


def _foreign_keys(environment: Any, wanted: Mapping[str, str]) -> list[bytes]:
    ours = {key.encode("utf-8", "surrogateescape") for key in wanted}
    with environment.begin() as transaction:
        return [key for key in transaction.cursor().iternext(keys=True, values=False) if bytes(key) not in ours]


def _commit(environment: Any, piece: Mapping[str, str]) -> None:
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, file in piece.items():
                    with _content(file) as content:
                        transaction.put(key.encode("utf-8", "surrogateescape"), content)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])


def _verify(folder: Path, wanted: Mapping[str, str], show: _Meter) -> None:
    """Read every value again from the closed and reopened store.

    Raises:
        DataError: one is not what its file holds.
    """
    show.start()
    with _opened(folder, readonly=True) as environment, environment.begin(buffers=True) as transaction:
        if transaction.stat()["entries"] != len(wanted):
            raise DataError(f"{folder}: {transaction.stat()['entries']} keys for {len(wanted)} files; delete it")
        for key, file in wanted.items():
            with _content(file) as content:
                there = transaction.get(key.encode("utf-8", "surrogateescape"))
                if there is None or not _same(there, content):
                    raise DataError(
                        f"{folder}: what is stored under {key!r} is not what {file} holds now: the file is being "
                        "changed, or the disk fails; run the same command again"
                    )
                show.add("verifying", len(content))


def _same(one: memoryview, other: memoryview) -> bool:
    return len(one) == len(other) and all(
        one[at : at + _COMPARED].tobytes() == other[at : at + _COMPARED].tobytes()
        for at in range(0, len(one), _COMPARED)
    )


def _refuse_other_content(target: Path, wanted: Mapping[str, str], show: _Meter) -> None:
    """A store that is there already is left alone, if it is what would be packed."""
    try:
        _verify(target, wanted, show)
    except DataError as error:
        raise DataError(
            f"{target} is there already and is not this collection: {error}. Choose another --out"
        ) from error


@contextmanager
def _opened(folder: Path, *, readonly: bool = False, map_size: int = 0) -> Iterator[Any]:
    """The store in a folder; what LMDB complains about becomes a DataError."""
    try:
        if readonly:
            environment = lmdb.open(str(folder), readonly=True, lock=False, create=False, readahead=True)
        else:
            environment = lmdb.open(str(folder), map_size=map_size, readahead=True)
        try:
            yield environment
        finally:
            environment.close()
    except (lmdb.Error, MemoryError) as error:
        if not readonly and _is_full(folder, error):
            raise DataError(f"{folder}: the disk is full ({error}); {_AGAIN}") from error
        raise open_error(str(folder), error) from error


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether the disk is what LMDB complains about: it calls a short write an input/output error."""
    said = isinstance(error, lmdb.DiskError) or "Input/output error" in str(error)
    return said and shutil.disk_usage(folder).free < _FREE_BYTES
