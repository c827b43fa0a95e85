"""Which stretches of which videos are kept, where each goes, and where its rows are in it. Nothing is opened here.

Without `clip_seconds` every video is kept whole. With it, a row with a window keeps that window (and the windows of its
own timed captions) and `clip_seconds` more on either side, so that a clip of up to this length that starts in the
window finds the frames that it would find in the whole video; stretches of a video that meet are one. A row without
a window, or with a caption file, keeps the whole video, and then so do all rows of that video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinreel.data.clip import Caption, Clip
from twinreel.data.preparation.collection import Listed, refuse_same_names
from twinreel.errors import ConfigError

__all__ = ["Plan", "Stretch", "moved_row", "plan_stretches"]

_DIGITS = 9  # of seconds: what subtracting adds behind them is no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part `[start_seconds, end_seconds)` of a video, None = its end, and the file that it goes to.

    `needed_from` is where the first of its rows begins: if the video ends before, the stretch is not written.
    """

    video: str
    output: str
    start_seconds: float = 0.0
    end_seconds: float | None = None
    needed_from: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`stretches` of each video in the order of the rows, and for each row's id its own one."""

    stretches: dict[str, list[Stretch]]
    of_row: dict[str, Stretch]


def plan_stretches(listed: Listed, clip_seconds: float | None) -> Plan:
    """What is kept of every video of a collection.

    Raises:
        ConfigError: `clip_seconds` is no length, or no row has a window.
        DataError: two videos would go to one file.
    """
    if clip_seconds is not None and not 0 < clip_seconds < math.inf:
        raise ConfigError(f"clip_seconds {clip_seconds:g} must be a number of seconds above 0")
    rows: dict[str, list[Clip]] = {}
    for row in listed.rows:
        rows.setdefault(row.video, []).append(row)
    stretches: dict[str, list[Stretch]] = {}
    of_row: dict[str, Stretch] = {}
    for video, those in rows.items():
        chosen = _of_video(video, listed.files[video], those, clip_seconds)
        stretches[video] = list(dict.fromkeys(chosen))
        of_row.update({row.id: stretch for row, stretch in zip(those, chosen, strict=True)})
    if clip_seconds is not None and all(row.start_seconds is None for row in listed.rows):
        raise ConfigError(
            "--clip-seconds keeps the windows of rows and what is around them, and no row has a window; leave it out "
            "(a long video in one file is read as quickly as its pieces would be)"
        )
    names = {f"{s.video} from {s.start_seconds:g} s": s.output for those in stretches.values() for s in those}
    refuse_same_names(names, "output", "rename one of the videos, or prepare them into folders of their own")
    return Plan(stretches=stretches, of_row=of_row)


def _of_video(video: str, path: str, rows: Sequence[Clip], clip_seconds: float | None) -> list[Stretch]:
    """For each row of a video its stretch."""
    spans = [_span(row) for row in rows]
    if clip_seconds is None or None in spans:
        whole = Stretch(video=video, output=_output(path, None))
        return [whole] * len(rows)
    merged: list[list[float]] = []  # start, end, where the first row begins
    for first, last in sorted(span for span in spans if span is not None):
        start, end = max(0.0, first - clip_seconds), last + clip_seconds
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end, first])
    chosen = []
    for span in spans:
        assert span is not None
        start, end, first = next(those for those in reversed(merged) if those[2] <= span[0])
        chosen.append(
            Stretch(
                video=video,
                output=_output(path, start),
                start_seconds=start,
                end_seconds=None if math.isinf(end) else end,
                needed_from=first,
            )
        )
    return chosen


def _span(row: Clip) -> tuple[float, float] | None:
    """From the first to the last second that a row is about; None if that is the whole video."""
    if row.start_seconds is None or row.caption_file is not None:
        return None
    starts = [row.start_seconds]
    ends = [math.inf if row.end_seconds is None else row.end_seconds]
    for caption in row.captions:
        if caption.start_seconds is not None:
            starts.append(caption.start_seconds)
            ends.append(caption.start_seconds if caption.end_seconds is None else caption.end_seconds)
    return min(starts), max(ends)


def _output(path: str, start: float | None) -> str:
    """The file of a video, or of its stretch from `start` on: the video's own path and name, with `.mp4` in the end."""
    stem = path.removesuffix(".mp4")
    if start is None:
        return f"videos/{stem}.mp4"
    return f"videos/{stem}.from{round(1000 * start):08d}ms.mp4"


def moved_row(row: Clip, output: str, start_seconds: float) -> Clip:
    """A row in the file that holds its stretch: the window, and captions' own windows, count from that file's start."""
    captions = tuple(
        Caption(
            text=caption.text,
            start_seconds=_moved(caption.start_seconds, start_seconds),
            end_seconds=_moved(caption.end_seconds, start_seconds),
        )
        for caption in row.captions
    )
    return replace(
        row,
        video=output,
        start_seconds=_moved(row.start_seconds, start_seconds),
        end_seconds=_moved(row.end_seconds, start_seconds),
        captions=captions,
    )


def _moved(seconds: float | None, by: float) -> float | None:
    if seconds is None or not by:
        return seconds
    return max(0.0, round(seconds - by, _DIGITS))
