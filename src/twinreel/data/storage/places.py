"""Where the bytes of a video live: in a file, in an LMDB, or as a folder of images.

A row names its video by a path. What lies there decides how it is read:

- a file: that file;
- a folder of images: `frame_folder.py`;
- a path into an LMDB (`/data/X.lmdb/videos/a.mp4`): the value under the key `a`, see `lmdb_store.py`;
- nothing, but a folder of images of the same name without extension (`videos/a/` for `videos/a.mp4`): those images.

So `data.root=X.lmdb`, or the folder that `twinreel data extract` wrote, serves every manifest, and nothing else has to
be set. `open_video` is the one door through which rows are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from twinreel.data.decode import Frames, VideoInfo, VideoReader
from twinreel.data.storage.frame_folder import TIMES_FILE, FrameFolder, is_frame_folder, is_image
from twinreel.data.storage.lmdb_store import find_store, is_store, many_looked_up, store_keys, stored
from twinreel.data.transforms import Cut
from twinreel.errors import DataError

__all__ = ["Reader", "collection_members", "content_digest", "is_store", "missing_paths", "open_video", "video_state"]


class Reader(Protocol):
    """What `open_video` gives: an open video, to be used as a context manager. See `VideoReader` for each door."""

    @property
    def info(self) -> VideoInfo:
        """What the video holds."""
        ...

    @property
    def tolerance(self) -> float:
        """By how many seconds a time may miss the frame that is meant."""
        ...

    @property
    def clock(self) -> tuple[float, bool]:
        """Seconds of a tick of the video's times, and whether it declares a duration."""
        ...

    @property
    def missing_bytes(self) -> int:
        """By how many bytes the file is shorter than it declares."""
        ...

    def frames_at(self, times: Sequence[float], *, hold_last: bool = False, cut: Cut | None = None) -> Frames:
        """The frame on show at each of `times`."""
        ...

    def frames_between(self, start_seconds: float | None = None, end_seconds: float | None = None) -> Frames:
        """The frames that appear within a window."""
        ...

    def frame_times(self) -> list[float]:
        """When each frame appears, seconds."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    def __enter__(self) -> Self:
        """The reader."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        ...


def open_video(video: str) -> Reader:
    """A reader of a row's video, to be used as a context manager.

    Raises:
        DataError: nothing is there, or it can't be read; names the file, the folder, or the store and the key.
    """
    if os.path.isfile(video):
        return VideoReader(video)
    if os.path.isdir(video) and not is_store(video):
        return FrameFolder(video)
    if os.path.exists(video) and not os.path.isdir(video):
        raise DataError(f"{video}: not a regular file (a pipe, a socket or a device)")
    place = find_store(video)
    if place is not None:
        value = stored(*place)
        if value is None:
            raise DataError(_no_such_key(video, *place))
        return VideoReader(value)
    frames = os.path.splitext(video)[0]
    return FrameFolder(frames) if is_frame_folder(frames) else VideoReader(video)


def _no_such_key(video: str, store: str, asked: str) -> str:
    return (
        f"{store}: no key for {asked!r} in this store (row video: {video}); keys are file names without extension "
        "(`twinreel data pack` writes them), pack the file or correct the row"
    )


def missing_paths(videos: Iterable[str]) -> set[str]:
    """Those of some paths at which `open_video` would find nothing; nothing is decoded.

    Raises:
        DataError: a store that paths lead into is missing or damaged.
    """
    with many_looked_up():
        return {video for video in sorted(set(videos)) if not _exists(video)}


def _exists(video: str) -> bool:
    if os.path.isfile(video):
        return True
    if os.path.isdir(video) and not is_store(video):
        return is_frame_folder(video)
    place = find_store(video)
    return stored(*place) is not None if place is not None else is_frame_folder(os.path.splitext(video)[0])


def video_state(video: str) -> tuple[int, int] | None:
    """Size in bytes and time of change (ns) of what is read for a path; None if it is missing.

    For a folder of images: how many entries it has, and when it or its `frames.json` changed last.
    """
    place = None if os.path.exists(video) else find_store(video)
    try:
        if place is not None:
            value = stored(*place)
            data = os.path.join(place[0], "data.mdb")
            changed = os.stat(data if os.path.isfile(data) else place[0]).st_mtime_ns
            return None if value is None else (len(value.data), changed)
        folder = video if os.path.isdir(video) else os.path.splitext(video)[0]
        if os.path.isfile(video) or not os.path.isdir(folder):
            stat = os.stat(video)
            return stat.st_size, stat.st_mtime_ns
        times = os.path.join(folder, TIMES_FILE)
        changes = [os.stat(path).st_mtime_ns for path in (folder, times) if os.path.exists(path)]
        return len(os.listdir(folder)), max(changes)
    except (OSError, DataError):
        return None


def content_digest(video: str) -> str | None:
    """BLAKE2b of a video's bytes, 32 hex digits; None for a folder of images.

    Raises:
        DataError: the file or its store can't be read.
    """
    place = None if os.path.exists(video) else find_store(video)
    value = None if place is None else stored(*place)
    try:
        if value is not None:
            return hashlib.blake2b(value.data, digest_size=16).hexdigest()
        if not os.path.isfile(video):
            return None
        with open(video, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{video}: can't be read ({error.strerror})") from error


def collection_members(folder: str) -> list[tuple[str, str]]:
    """(id, video) of every key of a store, or of every folder of images in a folder, itself included; sorted by id.

    Raises:
        DataError: the store is damaged.
    """
    if is_store(folder):
        return [(key, os.path.join(folder, key)) for key in store_keys(folder)]
    found = []
    for current, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if any(map(is_image, names)):
            id = os.path.relpath(current, folder) if current != folder else os.path.basename(folder)
            found.append((id.replace(os.sep, "/"), current))
    return sorted(found)
