"""A duration and a rule -> which seconds to look at. Pure functions, exact seconds, windows half open `[start, end)`.

Random ones draw from the `numpy.random.Generator` that they are given. The functions named `milnce_...` keep the rules
of the founding MIL-NCE code (whole seconds, reserved slack, frame indices) for parity; nothing else rounds a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from twinreel.errors import ConfigError, DataError

__all__ = [
    "center_start",
    "clip_times",
    "intersect_window",
    "milnce_evaluation_starts",
    "milnce_hmdb_starts",
    "milnce_start",
    "milnce_window",
    "nearest_candidates",
    "random_start",
    "uniform_starts",
    "uniform_times",
    "widen_window",
]

_MILNCE_SLACK_SECONDS = 0.4  # what the founding evaluation leaves free at the end of a window


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


def milnce_window(start: float, end: float, min_seconds: float) -> tuple[int, int]:
    """The founding training window of a caption: widened to `min_seconds`, then both ends cut to whole seconds."""
    widened_start, widened_end = widen_window(start, end, min_seconds)
    return int(widened_start), int(widened_end)


def milnce_start(rng: np.random.Generator, start: int, end: int, num_frames: int, frame_rate: float) -> int:
    """The founding training start: a whole second, uniform from `start` to the last one at which the clip fits."""
    return int(rng.integers(start, int(max(start, end - num_frames / frame_rate)), endpoint=True))


def milnce_evaluation_starts(
    start: float, end: float, num_frames: int, frame_rate: float, num_clips: int
) -> list[float]:
    """The founding evaluation starts: evenly spread, the last clip ends 0.4 s before the window does.

    One clip starts with the window. In a window that is too short all clips do.
    """
    _at_least_one("num_clips", num_clips)
    last = max(start, end - num_frames / frame_rate - _MILNCE_SLACK_SECONDS)
    return [float(value) for value in np.linspace(start, last, num_clips)]


def milnce_hmdb_starts(num_video_frames: int, num_frames: int, num_clips: int) -> list[int]:
    """The founding HMDB51 starts: frame indices at the file's own rate, evenly spread, cut to whole numbers.

    A video shorter than `num_frames` counts as that long; the founding code fills it up.
    """
    _at_least_one("num_clips", num_clips)
    last = max(num_video_frames, num_frames) - num_frames
    return [int(value) for value in np.linspace(0, last, num_clips)]


def _last_start(window_start: float, window_end: float, clip_seconds: float) -> float:
    return max(window_start, window_end - clip_seconds)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: got {value}; give at least 1")
