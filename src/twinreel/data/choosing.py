"""An open video, a window and what the model wants -> the times of the frames of its clips.

Here the rules of `sampling.py` meet a file: a model with a `frame_rate` is served in exact seconds, one with a
`frame_stride` in frames of the file, by the file's own presentation times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from twinreel.data import founding_sampling, sampling
from twinreel.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from twinreel.data.storage import Reader

__all__ = [
    "FOUNDING_SECONDS",
    "ChosenTimes",
    "EvaluationWindows",
    "TrainingStart",
    "clip_from",
    "evaluation_times",
    "training_times",
]

TrainingStart: TypeAlias = Literal["random", "center", "start", "uniform", "segments"]
EvaluationWindows: TypeAlias = Literal[
    "uniform", "whole", "milnce", "slowfast", "slowfast_offset", "clipbert", "clipbert_start"
]
FOUNDING_SECONDS = ("milnce", "clipbert", "clipbert_start")  # these need a rate in Hz

_SLOWFAST_RATE = 30  # Hz in which PySlowFast counts its sampling rate


class ChosenTimes(NamedTuple):
    """Times of the frames of each clip, seconds, and how many of all these repeat the video's last frame."""

    clips: list[list[float]]
    num_held: int = 0


def training_times(
    rngs: Sequence[np.random.Generator],
    reader: Reader,
    start: float,
    end: float,
    preprocessing: Preprocessing,
    clip_start: TrainingStart,
) -> ChosenTimes:
    """The times of training clips in the window [start, end), each drawn by itself.

    Args:
        rngs: the keyed generator of each clip.
        reader: the open video.
        start: of the window, seconds.
        end: of the window, seconds.
        preprocessing: what the model wants.
        clip_start: the rule.
    """
    prep = preprocessing
    if clip_start == "uniform":
        return ChosenTimes([sampling.uniform_times(start, end, prep.num_frames) for _ in rngs])
    if clip_start == "segments":
        return ChosenTimes([sampling.random_times(rng, start, end, prep.num_frames) for rng in rngs])
    if prep.frame_stride is not None:
        times = reader.frame_times()
        window = sampling.window_indices(times, start, end)
        last = sampling.last_strided_start(window, prep.num_frames, prep.frame_stride)
        return _strided(times, [_first_frame(rng, window.start, last, clip_start) for rng in rngs], prep)
    starts = [_first_second(rng, start, end, prep, clip_start) for rng in rngs]
    return ChosenTimes([sampling.clip_times(begin, prep.num_frames, prep.sampled_rate) for begin in starts])


def _first_frame(rng: np.random.Generator, first: int, last: int, clip_start: TrainingStart) -> int:
    if clip_start == "random":
        return int(rng.integers(first, last, endpoint=True))
    return (first + last) // 2 if clip_start == "center" else first


def _first_second(
    rng: np.random.Generator, start: float, end: float, prep: Preprocessing, clip_start: TrainingStart
) -> float:
    if clip_start == "random":
        return sampling.random_start(rng, start, end, prep.clip_seconds)
    return sampling.center_start(start, end, prep.clip_seconds) if clip_start == "center" else start


def evaluation_times(
    reader: Reader,
    start: float,
    end: float,
    preprocessing: Preprocessing,
    num_clips: int,
    windows: EvaluationWindows = "uniform",
) -> ChosenTimes:
    """The times of the evaluation clips in the window [start, end).

    Args:
        reader: the open video.
        start: of the window, seconds.
        end: of the window, seconds.
        preprocessing: what the model wants.
        num_clips: how many; `whole` is one.
        windows: the rule.
    """
    prep = preprocessing
    if windows == "whole":
        return ChosenTimes([sampling.uniform_times(start, end, prep.num_frames)])
    if windows in ("slowfast", "slowfast_offset", "clipbert", "clipbert_start"):
        return _founding(reader, start, end, prep, num_clips, windows)
    if prep.frame_stride is not None:
        times = reader.frame_times()
        window = sampling.window_indices(times, start, end)
        return _strided(times, sampling.strided_starts(window, prep.num_frames, prep.frame_stride, num_clips), prep)
    if windows == "milnce":
        starts = founding_sampling.milnce_evaluation_starts(start, end, prep.num_frames, prep.sampled_rate, num_clips)
    else:
        starts = sampling.uniform_starts(start, end, prep.clip_seconds, num_clips)
    return ChosenTimes([sampling.clip_times(begin, prep.num_frames, prep.sampled_rate) for begin in starts])


def clip_from(reader: Reader, start: float, preprocessing: Preprocessing) -> ChosenTimes:
    """The times of the clip that begins at `start` seconds."""
    if preprocessing.frame_stride is None:
        return ChosenTimes([sampling.clip_times(start, preprocessing.num_frames, preprocessing.sampled_rate)])
    times = reader.frame_times()
    return _strided(times, [sampling.window_indices(times, start, float("inf")).start], preprocessing)


def _strided(times: Sequence[float], starts: Sequence[int], prep: Preprocessing) -> ChosenTimes:
    assert prep.frame_stride is not None
    clips = [sampling.strided_times(times, first, prep.num_frames, prep.frame_stride) for first in starts]
    return ChosenTimes([chosen for chosen, _ in clips], sum(held for _, held in clips))


def _founding(
    reader: Reader, start: float, end: float, prep: Preprocessing, num_clips: int, windows: EvaluationWindows
) -> ChosenTimes:
    """Frames by the founding rules, which count in frames of the window at the file's average rate.

    In a short window they repeat its last frame; that is counted as held.
    """
    times = reader.frame_times()
    window = sampling.window_indices(times, start, end)
    shown = [times[index] for index in window]
    rate = reader.info.frame_rate
    tick, declared = reader.clock
    ticks = [round((time - shown[0]) / tick) for time in shown]
    duration = round((min(end, reader.info.duration_seconds) - shown[0]) / tick) if declared else None
    clips = []
    for clip in range(num_clips):
        if windows in ("clipbert", "clipbert_start"):
            size = prep.num_frames / prep.sampled_rate * rate
            # of one clip, retrieval asks for the "middle", which is 1 of 3; question answering for 0 of 1
            place = (1, 3) if windows == "clipbert" and num_clips == 1 else (clip, num_clips)
            first, last = founding_sampling.clipbert_range(len(shown), size, *place)
            chosen = founding_sampling.clipbert_frames(ticks, duration, first, last, size, prep.num_frames)
        else:
            size = _slowfast_clip_size(prep, rate)
            first = founding_sampling.slowfast_test_start(
                len(shown), size, clip, num_clips, use_offset=windows == "slowfast_offset"
            )
            chosen = founding_sampling.slowfast_frames(len(shown), first, size, prep.num_frames)
        clips.append([shown[index] for index in chosen])
    return ChosenTimes(clips, sum(max(0, clip.count(shown[-1]) - 1) for clip in clips))


def _slowfast_clip_size(prep: Preprocessing, rate: float) -> float:
    """A `frame_stride` is PySlowFast's SAMPLING_RATE: it is counted at 30 Hz, whatever the file's own rate."""
    if prep.frame_stride is not None:
        return founding_sampling.slowfast_clip_size(prep.num_frames, prep.frame_stride, rate, _SLOWFAST_RATE)
    return max(1.0, prep.num_frames / prep.sampled_rate * rate)
