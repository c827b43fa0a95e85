"""A duration and a rule -> which seconds to look at. Pure functions, exact seconds, windows half open `[start, end)`.

Random ones draw from the `numpy.random.Generator` that they are given. Where a model counts in frames of the file
(`frame_stride`), the `strided_...` functions work on the file's own presentation times; nothing here multiplies a time
by a frame rate. What the founding systems do differently is in `founding_sampling.py`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from twinreel.data.clip import Clip
from twinreel.errors import ConfigError, DataError

__all__ = [
    "center_start",
    "clip_times",
    "consecutive_windows",
    "cut_rows",
    "intersect_window",
    "last_strided_start",
    "nearest_candidates",
    "random_start",
    "random_times",
    "sparse_starts",
    "strided_starts",
    "strided_times",
    "uniform_starts",
    "uniform_times",
    "widen_window",
    "window_indices",
]

_SLACK_SECONDS = 1e-6  # by how much a computed time may miss the frame that is meant; frames are far longer


def clip_times(start_seconds: float, num_frames: int, frame_rate: float) -> list[float]:
    """Times of the frames of a clip: `num_frames` of them at `frame_rate` Hz, the first at `start_seconds`."""
    _at_least_one("num_frames", num_frames)
    if not 0 < frame_rate < math.inf:
        raise ConfigError(f"frame_rate: got {frame_rate}; give a rate in Hz above 0")
    return [start_seconds + index / frame_rate for index in range(num_frames)]


def intersect_window(start: float, end: float, duration: float) -> tuple[float, float]:
    """The part of the window `[start, end)` that lies in a video of `duration` seconds.

    Raises:
        DataError: the window is empty, not a number, or wholly outside the video.
    """
    if not start < end:  # also true of NaN
        raise DataError(f"the window [{start:g}, {end:g}) s is empty; it must end after it starts")
    low, high = max(0.0, start), min(duration, end)  # in this order a duration that is no number fails too
    if not low < high:
        raise DataError(f"the window [{start:g}, {end:g}) s lies outside the video, which has {duration:.3f} s")
    return low, high


def widen_window(start: float, end: float, min_seconds: float) -> tuple[float, float]:
    """The window, widened evenly to both sides to `min_seconds` if it is shorter; it never starts before 0.

    A window that meets 0 keeps its length: it grows at its end instead.
    """
    if end - start >= min_seconds:
        return start, end
    widened = max(0.0, start - (min_seconds - (end - start)) / 2)
    return widened, widened + min_seconds


def random_start(rng: np.random.Generator, window_start: float, window_end: float, clip_seconds: float) -> float:
    """Where a clip starts that lies in the window, uniform in exact seconds; the window's start if it is too short."""
    return float(rng.uniform(window_start, _last_start(window_start, window_end, clip_seconds)))


def center_start(window_start: float, window_end: float, clip_seconds: float) -> float:
    """Where a clip starts that lies in the middle of the window; the window's start if it is too short."""
    return (window_start + _last_start(window_start, window_end, clip_seconds)) / 2


def uniform_starts(window_start: float, window_end: float, clip_seconds: float, num_clips: int) -> list[float]:
    """Starts of `num_clips` evenly spread clips: the first begins with the window, the last ends with it.

    One clip lies in the middle. In a window shorter than the clip all of them begin with the window.
    """
    _at_least_one("num_clips", num_clips)
    if num_clips == 1:
        return [center_start(window_start, window_end, clip_seconds)]
    last = _last_start(window_start, window_end, clip_seconds)
    step = (last - window_start) / (num_clips - 1)
    return [window_start + index * step for index in range(num_clips - 1)] + [last]


def uniform_times(window_start: float, window_end: float, num_frames: int) -> list[float]:
    """Times of `num_frames` frames spread over the whole window: the middle of each of as many equal segments."""
    _at_least_one("num_frames", num_frames)
    segment = (window_end - window_start) / num_frames
    return [window_start + (index + 0.5) * segment for index in range(num_frames)]


def nearest_candidates(starts: Sequence[float], ends: Sequence[float], index: int, num_candidates: int) -> list[int]:
    """Indices of the captions nearest in time to caption `index`, which is among them, in order of time.

    The founding rule: the run of captions around `index` grows by the neighbor that keeps it shorter in seconds (the
    later one on a tie). Once it touches the first caption the rest comes from behind, once it touches the last, from
    before. A track of fewer captions than `num_candidates` repeats its first or last one.

    Args:
        starts: seconds at which the captions start, ascending.
        ends: seconds at which they end.
        index: the caption in the middle.
        num_candidates: how many to return.
    """
    _at_least_one("num_candidates", num_candidates)
    if not 0 <= index < len(starts) == len(ends):
        raise ConfigError(f"nearest_candidates: index {index} of {len(starts)} starts and {len(ends)} ends")
    last = len(starts) - 1
    low = high = index
    while high - low + 1 < num_candidates and 0 < low and high < last:
        if ends[high] - starts[low - 1] < ends[high + 1] - starts[low]:
            low -= 1
        else:
            high += 1
    missing = num_candidates - (high - low + 1)
    if missing and low > 0:  # it touches the last caption; where it touches the first, the missing ones follow it
        low -= missing
    return [min(max(low + offset, 0), last) for offset in range(num_candidates)]


def random_times(rng: np.random.Generator, window_start: float, window_end: float, num_frames: int) -> list[float]:
    """Times of `num_frames` frames spread over the whole window: one at random in each of as many equal segments."""
    _at_least_one("num_frames", num_frames)
    segment = (window_end - window_start) / num_frames
    return [window_start + (index + float(rng.random())) * segment for index in range(num_frames)]


def sparse_starts(
    window_start: float, window_end: float, clip_seconds: float, num_clips: int, rng: np.random.Generator | None = None
) -> list[float]:
    """Starts of `num_clips` clips of which each has its own part of the window, in order of time.

    Where a clip may start is cut into `num_clips` equal parts; a clip starts in the middle of its part or, with `rng`,
    anywhere in it. So the clips are spread over the whole window, and a random draw never takes one place twice.
    """
    _at_least_one("num_clips", num_clips)
    part = (_last_start(window_start, window_end, clip_seconds) - window_start) / num_clips
    return [window_start + (index + (0.5 if rng is None else float(rng.random()))) * part for index in range(num_clips)]


def consecutive_windows(start: float, end: float, window_seconds: float) -> list[tuple[float, float]]:
    """The span [start, end) cut into windows of `window_seconds`, each beginning where the one before ends.

    Nothing is left out: what remains at the end is a window of its own if it is at least half as long as the others,
    else the last window is that much longer. A span shorter than a window is one window.
    """
    if not 0 < window_seconds < math.inf:
        raise ConfigError(f"window_seconds: got {window_seconds}; give a length above 0")
    if not start < end < math.inf:
        raise DataError(f"the window [{start:g}, {end:g}) s can't be cut: it must end, and after it starts")
    whole = max(1, math.floor((end - start) / window_seconds + 0.5 + _SLACK_SECONDS / window_seconds))
    starts = [start + index * window_seconds for index in range(whole)]
    return list(zip(starts, [*starts[1:], end], strict=True))


def cut_rows(rows: Iterable[Clip], durations: Mapping[str, float], window_seconds: float) -> list[Clip]:
    """Every row cut into consecutive windows, a row a window; `consecutive_windows` says how.

    Args:
        rows: what to cut; a row's own window is respected.
        durations: of each video, seconds, by `Clip.video`.
        window_seconds: how long a window is.

    Returns:
        Rows with ids `<id>@<start>` (seconds to the millisecond), each once, in order.

    Raises:
        DataError: a row's window lies outside its video, or two rows would get one id.
    """
    cut: dict[str, Clip] = {}
    for row in rows:
        begin = 0.0 if row.start_seconds is None else row.start_seconds
        end = math.inf if row.end_seconds is None else row.end_seconds
        for first, last in consecutive_windows(*intersect_window(begin, end, durations[row.video]), window_seconds):
            piece = dataclasses.replace(row, id=f"{row.id}@{first:.3f}", start_seconds=first, end_seconds=last)
            if piece.id in cut:
                raise DataError(f"{piece.id}: two windows would have this id; give rows of one video other ids")
            cut[piece.id] = piece
    return list(cut.values())


def window_indices(frame_times: Sequence[float], start: float, end: float) -> range:
    """Indices of the frames that appear in the window `[start, end)`; the one on show at its start if none does.

    Args:
        frame_times: presentation times of all frames of a video, seconds, ascending.
        start: seconds.
        end: seconds.

    Raises:
        DataError: there is no frame at all.
    """
    if not frame_times:
        raise DataError("the video has no frames to choose from")
    first = bisect.bisect_left(frame_times, start - _SLACK_SECONDS)
    stop = bisect.bisect_left(frame_times, end - _SLACK_SECONDS)
    if first < stop:
        return range(first, stop)
    shown = max(0, bisect.bisect_right(frame_times, start + _SLACK_SECONDS) - 1)
    return range(shown, shown + 1)


def strided_starts(window: range, num_frames: int, frame_stride: int, num_clips: int) -> list[int]:
    """First frames of `num_clips` evenly spread clips: the first clip begins with the window's first frame, the last
    one ends with its last.

    One clip lies in the middle. In a window shorter than a clip all of them begin with the window.
    """
    _at_least_one("num_clips", num_clips)
    first, last = window.start, last_strided_start(window, num_frames, frame_stride)
    if num_clips == 1:
        return [(first + last) // 2]
    return [first + round(index * (last - first) / (num_clips - 1)) for index in range(num_clips)]


def last_strided_start(window: range, num_frames: int, frame_stride: int) -> int:
    """The last frame at which a clip may start that ends within the window; the window's first if it is too short."""
    _at_least_one("num_frames", num_frames)
    _at_least_one("frame_stride", frame_stride)
    return max(window.start, window.stop - 1 - (num_frames - 1) * frame_stride)


def strided_times(
    frame_times: Sequence[float], first: int, num_frames: int, frame_stride: int
) -> tuple[list[float], int]:
    """Times of every `frame_stride`-th frame from frame `first` on, and how many of them repeat the video's last one.

    The indices of the chosen frames differ by exactly the stride. A clip that is longer than the video holds its last
    frame.
    """
    indices = [first + index * frame_stride for index in range(num_frames)]
    last = len(frame_times) - 1
    return [frame_times[min(index, last)] for index in indices], sum(index > last for index in indices)


def _last_start(window_start: float, window_end: float, clip_seconds: float) -> float:
    return max(window_start, window_end - clip_seconds)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: got {value}; give at least 1")
