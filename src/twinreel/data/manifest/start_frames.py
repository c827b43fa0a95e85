"""Rows that begin at a frame of their video -> windows in seconds.

A row begins when that frame (from 0, in the order of showing) appears and ends where the next row of the same video
begins, or with the video. The seconds are the presentation times of the frames themselves, so every video is opened
once. What was found is kept beside the manifest as `<name>.seconds.json`; a video whose size or time of change differs
is looked at anew.

A first frame that the video doesn't have is put after its end: the row is excluded where it is read, with that reason.
A video that cannot be opened gives its rows no window: reading them fails with the reason.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from twinreel.data.storage import open_video, video_state
from twinreel.data.tables import bad_rows, write_whole
from twinreel.errors import DataError

__all__ = ["FrameRow", "frame_windows", "start_frame"]

_VERSION = 1  # of the file of seconds
_log = logging.getLogger(__name__)

Window = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRow:
    """Where a row is written (`file:line`), its resolved video and its first frame."""

    where: str
    video: str
    frame: int


def start_frame(value: Any) -> int:
    """The number of a frame. Raises ValueError if the value is none."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise ValueError(f"start_frame {value!r} must be a number of a frame: 0, 1, 2, ...")
    return int(text)


def frame_windows(manifest: Path, rows: Sequence[FrameRow]) -> list[Window]:
    """The window of each row in seconds, in the order of the rows.

    Args:
        manifest: their file; the seconds are kept beside it, where its folder can be written.
        rows: all rows of the file.

    Raises:
        DataError: two rows of a video begin at the same frame.
    """
    by_video: defaultdict[str, dict[int, FrameRow]] = defaultdict(dict)
    problems = []
    for row in rows:
        earlier = by_video[row.video].setdefault(row.frame, row)
        if earlier is not row:
            problems.append(f"{row.where}: begins at frame {row.frame} of its video, as the row at {earlier.where}")
    if problems:
        raise bad_rows(manifest, problems, len(rows))
    seconds = _all_seconds(manifest, {video: sorted(frames) for video, frames in by_video.items()})
    windows: dict[tuple[str, int], Window] = {}
    for video, frames in by_video.items():
        for frame, following in pairwise([*sorted(frames), None]):
            assert frame is not None
            found = seconds.get(video)
            end = found[following] if found and following is not None else None
            windows[video, frame] = (found[frame], end) if found else (None, None)
    return [windows[row.video, row.frame] for row in rows]


def _all_seconds(manifest: Path, wanted: dict[str, list[int]]) -> dict[str, dict[int, float]]:
    """For each video that can be opened, the seconds of the wanted frames."""
    kept_in = manifest.with_name(f"{manifest.name}.seconds.json")
    kept = _read_kept(kept_in)
    states = {video: state for video in wanted if (state := video_state(video)) is not None}
    known: dict[str, dict[int, float]] = {}
    for video, state in states.items():
        entry = kept.get(video, {})
        found = {int(frame): float(time) for frame, time in entry.get("seconds", {}).items()}
        if entry.get("state") == list(state) and set(wanted[video]) <= set(found):
            known[video] = found
    new = [video for video in states if video not in known]
    opened: dict[str, dict[int, float]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for video, found_now in zip(new, pool.map(lambda video: _seconds(video, wanted[video]), new), strict=True):
            if found_now is not None:
                opened[video] = found_now
    known |= opened
    if opened:
        _log.warning("%s: start frames became seconds: %d videos were opened for it", manifest, len(opened))
        _keep(kept_in, {video: {"state": states[video], "seconds": known[video]} for video in sorted(known)})
    return known


def _keep(path: Path, entries: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps({"version": _VERSION, "videos": entries}, ensure_ascii=False, indent=0) + "\n")
    except DataError as error:
        _log.warning("the seconds are not kept, so that every start opens the videos again: %s", error)


def _read_kept(path: Path) -> dict[str, Any]:
    """What was found earlier; nothing where the file is missing, damaged or of another version."""
    try:
        content = json.loads(path.read_bytes())
        return dict(content["videos"]) if content["version"] == _VERSION else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("%s cannot be used and is made anew: %s", path, error)
        return {}


def _seconds(video: str, frames: Sequence[int]) -> dict[int, float] | None:
    """The seconds at which frames appear; those that the video doesn't have lie after its end."""
    try:
        with open_video(video) as reader:
            times = reader.frame_times()
            duration = max(reader.info.duration_seconds, times[-1])
    except DataError:
        return None
    step = duration / len(times)
    return {frame: times[frame] if frame < len(times) else duration + (frame - len(times)) * step for frame in frames}
