"""Every video of a collection opened and looked at, before anything is trained.

How deep: a video is opened, its first and its last frame are decoded, and every row's window is compared with its
length. `deep` decodes every frame. Where that finds damage, the windows of the video's rows are decoded whole, so that
rows in front of or behind the damage stay. Videos with the same bytes are found by size, a hash of both ends, and,
where these are equal, a hash of everything.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from twinreel.data.clip import Clip
from twinreel.data.dataset import window_in_video
from twinreel.data.preparation.per_file import Died, each_file
from twinreel.data.storage import Reader, missing_paths, open_video
from twinreel.data.storage.lmdb_store import Stored, find_store, stored
from twinreel.data.transforms import Cut
from twinreel.errors import ConfigError, DataError

__all__ = ["VideoReport", "inspect_videos", "same_content"]

Window = tuple[float | None, float | None]

_END_BYTES = 1 << 16  # of each end, for the first hash
_BLOCK_BYTES = 1 << 22
_FRAMES_AT_ONCE = 32
_SIDE = 8  # pixels that frames are scaled to: they are decoded to see whether that works
_LATE_SECONDS = 0.1  # by which a window may end after its video without a word
_SHALLOW_SECONDS, _DEEP_SECONDS = 300.0, 7200.0  # that one video may take


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReport:
    """What was found in a video. `fault` says why it cannot be read, or what is damaged in it.

    `bad_windows` are those of the rows that cannot be read, with the reason; `late_windows` counts those that end after
    the video. `ends` is a hash of size and both ends, None for what is no file; frames and seconds are 0 where unknown.
    """

    video: str
    fault: str | None = None
    opened: bool = False
    bad_windows: dict[Window, str] = field(default_factory=dict)
    late_windows: int = 0
    duration_seconds: float = 0.0
    num_frames: int = 0
    frame_rate: float = 0.0
    height: int = 0
    width: int = 0
    codec: str = ""
    warnings: tuple[str, ...] = ()
    num_bytes: int = 0
    ends: str | None = None


def inspect_videos(
    rows: Sequence[Clip],
    *,
    num_workers: int,
    deep: bool = False,
    most_seconds: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, VideoReport]:
    """A report of each distinct video of the rows, in the order of the rows.

    A video on which the decoder ends its process, or which takes too long, is a fault as any other.

    Args:
        rows: the collection.
        num_workers: processes, 1 or more.
        deep: decode every frame.
        most_seconds: that a video may take; default 300, with `deep` 7200.
        progress: is told (done, all) after each video.

    Raises:
        ConfigError: fewer than one process, or no time.
        DataError: a store that rows name is missing or damaged.
    """
    most = most_seconds if most_seconds is not None else _DEEP_SECONDS if deep else _SHALLOW_SECONDS
    if num_workers < 1 or not most > 0:
        raise ConfigError(f"a check needs 1 process or more and some seconds a video; got {num_workers} and {most:g}")
    windows: dict[str, dict[Window, None]] = {}
    for row in rows:
        windows.setdefault(row.video, {})[row.start_seconds, row.end_seconds] = None
    missing = missing_paths(windows)
    reports = {video: VideoReport(video=video, fault="no such file" if video in missing else None) for video in windows}
    tasks = [(video, tuple(asked)) for video, asked in windows.items() if video not in missing]
    work = partial(_inspect, deep=deep)
    for done, (index, result) in enumerate(_each(work, tasks, num_workers, most), start=len(missing) + 1):
        video = tasks[index][0]
        reports[video] = VideoReport(video=video, fault=result.reason) if isinstance(result, Died) else result
        if progress is not None:
            progress(done, len(windows))
    return reports


def same_content(
    reports: dict[str, VideoReport], *, num_workers: int, progress: Callable[[int, int], None] | None = None
) -> list[tuple[str, ...]]:
    """Groups of videos whose bytes are the same, each in the order of the reports."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for video, report in reports.items():
        if report.ends is not None:
            alike[report.ends].append(video)
    candidates = [video for group in alike.values() if len(group) > 1 for video in group]
    same: defaultdict[str, list[int]] = defaultdict(list)
    for done, (index, digest) in enumerate(_each(_digest, candidates, num_workers, _DEEP_SECONDS), start=1):
        if isinstance(digest, str):
            same[digest].append(index)
        if progress is not None:
            progress(done, len(candidates))
    groups = sorted(sorted(group) for group in same.values() if len(group) > 1)
    return [tuple(candidates[index] for index in group) for group in groups]


def _each(work: Callable[[Any], Any], items: Sequence[Any], num_workers: int, most: float) -> Iterator[tuple[int, Any]]:
    return each_file(work, items, num_workers=num_workers, most_seconds=most)


# ---- in the other processes


def _inspect(task: tuple[str, tuple[Window, ...]], *, deep: bool) -> VideoReport:
    video, windows = task
    report = VideoReport(video=video)
    try:
        num_bytes, ends = _ends(video)
        report = replace(report, num_bytes=num_bytes, ends=ends)
        with open_video(video) as reader:
            info, times = reader.info, reader.frame_times()
            report = replace(
                report,
                opened=True,
                duration_seconds=info.duration_seconds,
                num_frames=len(times),
                frame_rate=info.frame_rate,
                height=info.height,
                width=info.width,
                codec=info.codec,
            )
            damage = _damage(reader, times if deep else [times[0], times[-1]])
            bad = {window: reason for window in windows if (reason := _bad_window(reader, window, times, damage))}
            latest = info.duration_seconds + _LATE_SECONDS
            late = sum(end is not None and end > latest for start, end in windows if (start, end) not in bad)
            warnings = reader.frames_at(times[:1], cut=_small(reader)).warnings
    except DataError as error:
        return replace(report, fault=_without_path(video, error), bad_windows=dict.fromkeys(windows, "unreadable"))
    warnings = tuple(dict.fromkeys((*info.warnings, *warnings)))
    return replace(report, fault=damage, bad_windows=bad, late_windows=late, warnings=warnings)


def _without_path(video: str, error: DataError) -> str:
    return str(error).removeprefix(f"{video}: ")


def _small(reader: Reader) -> Cut:
    return Cut(0, 0, reader.info.height, reader.info.width, _SIDE)


def _damage(reader: Reader, times: Sequence[float]) -> str | None:
    """Why some frame of these times cannot be decoded, None if all can."""
    try:
        for first in range(0, len(times), _FRAMES_AT_ONCE):
            reader.frames_at(times[first : first + _FRAMES_AT_ONCE], hold_last=True, cut=_small(reader))
    except DataError as error:
        return _without_path(reader.info.path, error)
    return None


def _bad_window(reader: Reader, window: Window, times: Sequence[float], damage: str | None) -> str | None:
    """Why a row with this window cannot be read, None if it can."""
    if window == (None, None):
        return damage
    try:
        start, end = window_in_video(reader.info.path, window, reader.info.duration_seconds)
    except DataError as error:
        return _without_path(reader.info.path, error)
    if damage is None:
        return None
    return _damage(reader, [start, *(time for time in times if start < time < end)])


def _in_store(video: str) -> Stored | None:
    """A video of a store, None for a file or a folder. Its bytes are there for as long as the result is kept."""
    place = None if os.path.exists(video) else find_store(video)
    return None if place is None else stored(*place)


def _ends(video: str) -> tuple[int, str | None]:
    """The size in bytes, and a hash of it and both ends; (0, None) for a folder of images."""
    value = _in_store(video)
    if value is None:
        if not os.path.isfile(video):
            return 0, None
        try:
            with open(video, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                first = file.read(_END_BYTES)
                file.seek(max(0, size - _END_BYTES))
                last = file.read(_END_BYTES)
        except OSError as error:
            raise DataError(f"{video}: not readable ({error.strerror})") from error
    else:
        size = len(value.data)
        first, last = bytes(value.data[:_END_BYTES]), bytes(value.data[-_END_BYTES:])
    return size, hashlib.blake2b(b"%d " % size + first + last, digest_size=16).hexdigest()


def _digest(video: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    value = _in_store(video)
    if value is not None:
        digest.update(value.data)
        return digest.hexdigest()
    with open(video, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
