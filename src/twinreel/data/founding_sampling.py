"""Which frames the founding systems look at, rule by rule, for parity; `sampling.py` is what twinreel does itself.

MIL-NCE (`milnce_...`): whole seconds, reserved slack. PySlowFast (`slowfast_...`): fractional frame indices from the
file's average rate, cut to whole ones; its last test view never reaches the end of the video. ClipBERT
(`clipbert_...`): likewise, and its "middle" clip starts at a third of the free range. Against the numbers of their own
code: tests/parity/test_founding_sampling.py and tests/parity/test_milnce_windows.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twinreel.data.sampling import widen_window
from twinreel.errors import ConfigError, DataError

__all__ = [
    "clipbert_clip",
    "clipbert_frames",
    "clipbert_range",
    "milnce_evaluation_starts",
    "milnce_hmdb_starts",
    "milnce_start",
    "milnce_window",
    "slowfast_clip_size",
    "slowfast_frames",
    "slowfast_segments",
    "slowfast_slow_indices",
    "slowfast_start",
    "slowfast_test_start",
]

_MILNCE_SLACK_SECONDS = 0.4  # what the founding evaluation leaves free at the end of a window


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
    _check_count("num_clips", num_clips)
    last = max(start, end - num_frames / frame_rate - _MILNCE_SLACK_SECONDS)
    return [float(value) for value in np.linspace(start, last, num_clips)]


def milnce_hmdb_starts(num_video_frames: int, num_frames: int, num_clips: int) -> list[int]:
    """The founding HMDB51 starts: frame indices at the file's own rate, evenly spread, cut to whole numbers.

    A video shorter than `num_frames` counts as that long; the founding code fills it up.
    """
    _check_count("num_clips", num_clips)
    last = max(num_video_frames, num_frames) - num_frames
    return [int(value) for value in np.linspace(0, last, num_clips)]


def slowfast_clip_size(num_frames: int, sampling_rate: int, frame_rate: float, target_frame_rate: float = 30) -> float:
    """How many frames of the file a clip of PySlowFast spans: T x rate, counted at `target_frame_rate` Hz."""
    _check_count("num_frames", num_frames)
    return max(1.0, sampling_rate * num_frames / target_frame_rate * frame_rate)


def slowfast_start(rng: np.random.Generator, num_video_frames: int, clip_size: float) -> float:
    """The founding training start: a fractional frame index, uniform over all at which the clip fits."""
    return float(rng.uniform(0, max(num_video_frames - clip_size, 0)))


def slowfast_test_start(
    num_video_frames: int, clip_size: float, clip: int, num_clips: int, *, use_offset: bool = False
) -> float:
    """The founding start of test clip `clip` of `num_clips`, a fractional frame index.

    Without `use_offset` the clips start at `clip / num_clips` of the free range: one clip starts with the video, and
    the last one never reaches the end. With it (USE_OFFSET_SAMPLING) one clip lies in the middle, and several are
    whole frames apart.
    """
    _check_count("num_clips", num_clips)
    free = max(num_video_frames - clip_size, 0)
    if not use_offset:
        return free * clip / num_clips
    return float(math.floor(free / 2) if num_clips == 1 else clip * math.floor(free / (num_clips - 1)))


def slowfast_frames(num_video_frames: int, start: float, clip_size: float, num_frames: int) -> list[int]:
    """The founding choice of frames: float32 steps from `start` to `start + clip_size - 1`, held inside, cut to whole.

    In float32 as there: a float64 line chooses other frames here and there.
    """
    return _cut(_line(start, start + clip_size - 1, num_frames), num_video_frames)


def slowfast_slow_indices(num_frames: int, alpha: int) -> list[int]:
    """Which of the fast pathway's frames the slow one sees: `num_frames // alpha` of them, first and last included.

    They are not `alpha` frames apart: 0, 4, 8, 13, 17, 22, 26, 31 of 32 frames at alpha 4.
    """
    return _cut(_line(0, num_frames - 1, num_frames // alpha), num_frames)


def slowfast_segments(num_video_frames: int, num_frames: int, rng: np.random.Generator | None = None) -> list[int]:
    """The founding choice on Something-Something: one frame a segment, the middle one or, with `rng`, any."""
    _check_count("num_frames", num_frames)
    segment = (num_video_frames - 1) / num_frames
    edges = [round(segment * index) for index in range(num_frames + 1)]  # half to even, as there
    if rng is None:
        return [(low + high) // 2 for low, high in pairwise(edges)]
    return [int(rng.integers(low, high, endpoint=True)) for low, high in pairwise(edges)]


def clipbert_range(num_video_frames: float, clip_size: float, clip: int, num_clips: int) -> tuple[float, float]:
    """First and last frame (fractional indices) of clip `clip` of `num_clips`: it starts at `clip / num_clips` of the
    free range, so the last one never reaches the end.
    """
    start = max(num_video_frames - clip_size, 0) * clip / num_clips
    return start, start + clip_size - 1


def clipbert_clip(
    num_video_frames: int,
    clip_size: float,
    strategy: Literal["uniform", "start", "middle", "end"],
) -> tuple[float, float, float]:
    """First and last frame of the one clip of a strategy, and the clip's size, in (fractional) frames of the file.

    `uniform` is the whole video. `start`, `middle` and `end` start at 0, 1 and 2 thirds of the free range.
    """
    if strategy == "uniform":
        return 0.0, num_video_frames - 1.0, float(num_video_frames)
    places = {"start": 0, "middle": 1, "end": 2}
    return *clipbert_range(num_video_frames, clip_size, places[strategy], 3), clip_size


def clipbert_frames(
    pts: Sequence[int], duration: int | None, start: float, end: float, clip_size: float, num_frames: int
) -> list[int]:
    """Indices of the frames that the founding decoder picks of a clip, repeating the last of a video that is short.

    It turns both ends into whole ticks, keeps the frames between them and one more, and picks `num_frames` of those
    evenly over the clip's size. A file that declares no duration is decoded whole, and picked from by index.

    Args:
        pts: presentation times of all frames, ticks.
        duration: of the stream, ticks; None where the file declares none.
        start: first frame of the clip, a fractional index.
        end: last frame of the clip, likewise.
        clip_size: of the clip, frames of the file.
        num_frames: how many to pick.

    Raises:
        DataError: the clip lies behind the last frame.
    """
    if duration is None:
        return _cut(_line(start, end, num_frames), len(pts))
    low, high = (int(index * (duration / len(pts))) for index in (start, end))
    kept = [index for index, ticks in enumerate(pts) if low <= ticks <= high]
    if not kept:
        raise DataError(f"no frame appears in the ticks [{low}, {high}]; the video ends at {pts[-1]}")
    kept += range(kept[-1] + 1, min(kept[-1] + 2, len(pts)))
    return [kept[at] for at in _cut(_line(0, clip_size - 1, num_frames), len(kept))]


def _line(start: float, end: float, number: int) -> NDArray[np.float32]:
    """As torch.linspace in float32, which works inwards from both ends; NumPy's rounds otherwise here and there."""
    _check_count("num_frames", number)
    first, last = np.float32(start), np.float32(end)
    if number == 1:
        return np.array([first])
    step = np.float32((last - first) / np.float32(number - 1))
    index = np.arange(number, dtype=np.float32)
    return np.where(index < number // 2, first + step * index, last - step * index[::-1])


def _cut(line: NDArray[np.float32], number: int) -> list[int]:
    return [int(value) for value in np.clip(line, 0, number - 1)]


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: got {value}; give at least 1")
