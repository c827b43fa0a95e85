"""A manifest or a folder as what `pack` and `extract` make of it: its rows, and its files with their relative paths."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from twinreel.data.clip import Clip, Fault
from twinreel.data.manifest import read_folder, read_manifest, walk_files, write_manifest
from twinreel.data.storage import is_store
from twinreel.data.tables import LISTED, write_whole
from twinreel.errors import ConfigError, DataError

__all__ = [
    "Listed",
    "check_place",
    "claim",
    "disk_failure",
    "flush_folder",
    "list_collection",
    "refuse_inside",
    "refuse_same_names",
    "stopped",
    "write_lists",
]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is too big",
}
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What is to be stored: `files` from each video of the rows to its path within the collection, with `/`.

    `left_out` counts the other files of a folder, by suffix.
    """

    rows: list[Clip]
    files: dict[str, str]
    left_out: dict[str, int]


def list_collection(
    source: str | Path,
    *,
    root: str | Path | None = None,
    suffixes: Collection[str] | None = None,
    what: str = "video",
) -> Listed:
    """The rows of a manifest or of a folder, and their files.

    Args:
        source: a manifest, or a folder (an LMDB, folders of images).
        root: folder that a manifest's paths start from; default: its own.
        suffixes: keep files with these suffixes alone (`.mp4`); default: of a folder the known ones, of a manifest all.
        what: what a file is called in errors.

    Raises:
        DataError: nothing there, or nothing with such a suffix.
    """
    base = os.path.abspath(os.path.expanduser(source))
    if not os.path.isdir(base) and not is_store(base):
        rows = read_manifest(source, root=root)
        base = os.path.abspath(os.path.expanduser(root)) if root is not None else os.path.dirname(base)
        kept = [row for row in rows if suffixes is None or _suffix(row.video) in suffixes]
        if not kept:
            raise DataError(
                f"{source}: none of its {len(rows)} rows has {_a(what)} that ends in {' '.join(sorted(suffixes or ()))}"
            )
        left_out = Counter(_suffix(video) for video in {row.video for row in rows} - {row.video for row in kept})
        return Listed(rows=kept, files=_relative({row.video for row in kept}, base), left_out=dict(left_out))
    if root is not None:
        raise DataError(f"{source} is a folder: --root goes with a manifest; leave it out")
    if suffixes is not None and not is_store(base):
        _refuse_none(base, suffixes, what)
    kept = read_folder(base) if suffixes is None else read_folder(base, suffixes)
    files = {row.video: row.id for row in kept}
    others = [] if is_store(base) else [path for path in walk_files(base) if path not in files]
    return Listed(rows=kept, files=files, left_out=dict(Counter(map(_suffix, others))))


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _refuse_none(folder: str, suffixes: Collection[str], what: str) -> None:
    there = Counter(map(_suffix, walk_files(folder)))
    if not there.keys() & set(suffixes):
        others = ", ".join(f"{number} {suffix or 'without ending'}" for suffix, number in there.most_common(LISTED))
        raise DataError(
            f"{folder}: no {what} in this folder: no file ends in {' '.join(sorted(suffixes))}; "
            f"there are {others or 'no files at all'}"
        )


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _relative(videos: set[str], base: str) -> dict[str, str]:
    """Paths within the collection: from `base` if it holds them all, else from the folder that does."""
    real = {video: os.path.normpath(video) for video in sorted(videos)}
    if not all(path.startswith(base.rstrip(os.sep) + os.sep) for path in real.values()):
        base = os.path.commonpath([os.path.dirname(path) for path in real.values()])
    return {video: os.path.relpath(path, base).replace(os.sep, "/") for video, path in real.items()}


def refuse_same_names(names: Mapping[str, str], what: str, advice: str) -> None:
    """Refuse files that would be stored under one name.

    Args:
        names: of each file its name in the store.
        what: what a name is called: "key".
        advice: what to do.

    Raises:
        DataError: names all files of the first few such names.
    """
    files: dict[str, list[str]] = defaultdict(list)
    for file, name in names.items():
        files[name].append(file)
    same = {name: those for name, those in files.items() if len(those) > 1}
    if same:
        lines = [f"  {name}: {' and '.join(those)}" for name, those in list(same.items())[:LISTED]]
        more = f"\n  ... and {len(same) - LISTED} more" if len(same) > LISTED else ""
        raise DataError(
            f"{len(same)} {what}s would stand for several files each:\n" + "\n".join(lines) + f"{more}\n{advice}"
        )


def refuse_inside(folder: Path, source: str | Path, videos: Iterable[str], done: str) -> None:
    """Refuse to write into what is read, links followed.

    Args:
        folder: to be written.
        source: a manifest or folder.
        videos: the paths of its files.
        done: what is done with them: "packed".

    Raises:
        ConfigError: the folder lies in the source, or one of the files in the folder.
    """
    real = Path(os.path.realpath(folder))
    source = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(source) and real.is_relative_to(os.path.realpath(source)):
        raise ConfigError(f"--out {folder} lies in {source}, which is {done}; choose a place beside it")
    first = {os.path.dirname(os.path.abspath(video)): video for video in videos}
    for parent, video in first.items():
        if Path(os.path.realpath(parent)).is_relative_to(real):
            raise ConfigError(f"--out {folder} holds {video}, which is to be {done}; choose a place beside it")


def check_place(folder: Path, what: str = "a folder") -> None:
    """See that what is there, if anything, can be gone on with.

    Args:
        folder: to be written.
        what: what it is to become.

    Raises:
        DataError: there is a file, or a link to nothing, or the place can't be looked at.
    """
    try:
        if folder.is_symlink() and not folder.exists():
            raise DataError(f"{folder} is a link to {os.readlink(folder)}, which is not there; choose another --out")
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file, not {what}; choose another --out")
    except OSError as error:
        raise DataError(f"{folder}: can't be made ({error.strerror or error}); choose another --out") from error


def _open_lock(folder: Path) -> IO[str]:
    check_place(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / ".lock", "w")
    except OSError as error:
        why = disk_failure(error) or error.strerror
        raise DataError(f"{folder}: can't be made or written ({why}); choose another --out") from error


def disk_failure(error: OSError) -> str | None:
    """Why nothing more can be written, in words; None if another file may fare better."""
    if error.errno in _REFUSED:
        return str(error.strerror or error)
    return _FULL.get(error.errno or 0)


def stopped(folder: Path, why: str, done: int, total: int) -> str:
    """What to say where a run can't write any more."""
    return (
        f"{folder}: {why}; {done} of {total} videos are done and stay. Make room or mend it, and run the same command "
        "again: it goes on from there"
    )


@contextmanager
def claim(folder: Path, made_from: Mapping[str, object], name: str) -> Iterator[None]:
    """Make a folder, or go on in it, as the only process; it notes in `name` what it is made from, to be asked again.

    Raises:
        DataError: another process works there, the folder was begun from something else or it can't be made.
    """
    with _open_lock(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{folder}: another process is at work there ({error.strerror}); wait for it") from error
        path = folder / name
        if path.exists():
            _refuse_other_origin(folder, json.loads(path.read_text(encoding="utf-8")), made_from)
        else:
            write_whole(path, json.dumps(dict(made_from), ensure_ascii=False, indent=1) + "\n")
        yield


def _refuse_other_origin(folder: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    changed = [
        f"{key}: {'not given' if before.get(key) is None else before[key]} there, "
        f"{'not given' if value is None else value} now"
        for key, value in now.items()
        if before.get(key) != value
    ]
    if changed:
        raise DataError(
            f"{folder} was begun otherwise ({'; '.join(changed)}); choose another --out, or delete that folder"
        )


def write_lists(folder: Path, rows: Sequence[Clip], stored: Mapping[str, str], faults: Sequence[Fault]) -> None:
    """`manifest.jsonl` of the rows whose video is stored, under its new path; `faults.jsonl` of the others.

    Ids, windows, captions, labels and splits are kept, so a run draws the same samples from the new place.
    """
    kept = [replace(row, video=stored[row.video]) for row in rows if row.video in stored]
    if kept:
        write_manifest(folder / "manifest.jsonl", kept)
    else:  # one of an earlier run would name what is no longer listed
        (folder / "manifest.jsonl").unlink(missing_ok=True)
    text = "".join(json.dumps(asdict(fault), ensure_ascii=False) + "\n" for fault in faults)
    if text:
        write_whole(folder / "faults.jsonl", text)
    else:
        (folder / "faults.jsonl").unlink(missing_ok=True)


def flush_folder(folder: Path, names: Iterable[str] = ()) -> None:
    """See that a folder's entries, and these files in it, are on the disk."""
    for path in (*(folder / name for name in names), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
