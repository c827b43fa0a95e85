"""Rows + rules -> samples. One Dataset class; what a sample is comes in as a function.

A sample that cannot be read is not replaced: it comes back with a `fault` and is masked (see `loader.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from twinreel.data import sampling
from twinreel.data.choosing import FOUNDING_SECONDS, ChosenTimes, EvaluationWindows, clip_from, evaluation_times
from twinreel.data.clip import Clip, Fault, Sample
from twinreel.data.storage import Reader, open_video
from twinreel.data.transforms import Cut, cut_frames, letterbox, three_squares
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing

__all__ = [
    "ClipDataset",
    "ViewRules",
    "Window",
    "read_clip",
    "read_cuts",
    "read_views",
    "sample_or_fault",
    "window_in_video",
]

ReadSample = Callable[[Clip, int], "Sample | list[Sample]"]


class ClipDataset(Dataset["Sample | list[Sample]"]):
    """Samples by (epoch, row index); a list of them where one decode gives several views of a row.

    Picklable; opens nothing before a sample is asked for.
    """

    def __init__(self, rows: Sequence[Clip], read: ReadSample) -> None:
        self.rows = rows
        self.read = read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> Sample | list[Sample]:
        epoch, index = key
        return self.read(self.rows[index], epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRules:
    """How a row is looked at in evaluation: `num_clips` windows, each with 1 or 3 crops.

    View `clip * num_crops + crop` is that crop of that window.

    Raises:
        ConfigError: `windows` or `num_crops` do not go with the model's preprocessing.
    """

    preprocessing: Preprocessing
    num_clips: int
    windows: EvaluationWindows = "uniform"
    num_crops: Literal[1, 3] = 1

    def __post_init__(self) -> None:
        prep = self.preprocessing
        if self.windows in FOUNDING_SECONDS and prep.frame_rate is None:
            raise ConfigError(
                f"eval.windows={self.windows} counts in seconds, and the model samples by frame_stride="
                f"{prep.frame_stride}; set model.preprocessing.frame_rate, or eval.windows=uniform"
            )
        if self.num_crops != 1 and prep.fit == "pad":
            raise ConfigError(
                f"eval.num_crops={self.num_crops}: the model sees whole frames (model.preprocessing.fit=pad); set 1"
            )

    @property
    def windows_a_row(self) -> int:
        """How many windows of a row are looked at."""
        return 1 if self.windows == "whole" else self.num_clips

    @property
    def clips_a_row(self) -> int:
        """How many clips a row becomes: windows x crops."""
        return self.windows_a_row * self.num_crops

    @property
    def framing(self) -> str:
        """What is seen of a frame, in words."""
        framing = self.preprocessing.framing
        return framing if self.num_crops == 1 else framing.replace("center", "start, center and end", 1)

    def __call__(self, row: Clip, epoch: int) -> Sample:
        """Read all views of a row, frames (windows x crops, T, S, S, 3); a DataError becomes a fault."""
        shape = (self.clips_a_row, self.preprocessing.num_frames, self.preprocessing.crop_size)

        def choose(reader: Reader, start: float, end: float) -> ChosenTimes:
            return evaluation_times(reader, start, end, self.preprocessing, self.num_clips, self.windows)

        return sample_or_fault(row, shape, 0, lambda: _read_views(row, self.preprocessing, choose, self.num_crops))


T = TypeVar("T")
Window = tuple[float | None, float | None]


def sample_or_fault(row: Clip, shape: tuple[int, ...], num_candidates: int, read: Callable[[], T]) -> T | Sample:
    """What `read` returns; where the row cannot be read, a sample of zeros with the fault.

    Args:
        row: what is read.
        shape: of the sample's frames, up to the side of the square: (..., T, S).
        num_candidates: captions of a sample.
        read: raises DataError or OSError for a row that cannot be read.
    """
    try:
        return read()
    except (DataError, OSError) as error:  # a file that is there, on a disk that fails
        *lead, num_frames, side = shape
        return Sample(
            id=row.id,
            frames=torch.zeros(*lead, num_frames, side, side, 3, dtype=torch.uint8),
            pts_seconds=torch.zeros(*lead, num_frames, dtype=torch.float64),
            captions=[""] * num_candidates,
            caption_mask=[False] * num_candidates,
            labels=row.labels,
            options=row.options,
            fault=Fault(id=row.id, video=row.video, reason=str(error)),
        )


def read_cuts(
    reader: Reader, chosen: ChosenTimes, cuts: Sequence[Cut | None], size: int
) -> tuple[list[Tensor], Tensor, int]:
    """Frames of several parts of the picture from one decode.

    Args:
        reader: the open video.
        chosen: at which times.
        cuts: parts of the picture; None = all of it, padded.
        size: side of the padded square, pixels.

    Returns:
        For each cut uint8 (T, S, S, 3) of all times; their pts_seconds (T,); how many repeat the last frame.
    """
    times = [time for clip in chosen.clips for time in clip]
    only = cuts[0] if len(cuts) == 1 else None
    frames = reader.frames_at(times, hold_last=True, cut=only)
    pictures = [frames.data]
    if only is None:
        pictures = [letterbox(frames.data, size) if cut is None else cut_frames(frames.data, cut) for cut in cuts]
    return pictures, frames.pts_seconds, frames.num_held + chosen.num_held


def window_in_video(video: str, window: Window, duration: float) -> tuple[float, float]:
    """The part [start, end) of a row's window that the video has, seconds; None means the video's own end.

    Raises:
        DataError: there is no such part; names the video, the window and the duration.
    """
    start, end = window
    begin = 0.0 if start is None else start
    try:
        return sampling.intersect_window(begin, math.inf if end is None else end, duration)
    except DataError as error:
        raise DataError(f"{video}: {error}") from error


def read_views(
    row: Clip,
    preprocessing: Preprocessing,
    times: Callable[[float, float], list[list[float]]],
) -> Sample:
    """Clips of a row from one open file: frames uint8 (N, T, S, S, 3), pts_seconds (N, T).

    Args:
        row: the row.
        preprocessing: what the model wants.
        times: window [start, end) in seconds -> the times of the frames of each of the N clips.

    Raises:
        DataError: the video cannot be read, or the row's window lies outside it.
    """
    return _read_views(row, preprocessing, lambda reader, start, end: ChosenTimes(times(start, end)))


def _read_views(
    row: Clip,
    preprocessing: Preprocessing,
    choose: Callable[[Reader, float, float], ChosenTimes],
    num_crops: Literal[1, 3] = 1,
) -> Sample:
    with open_video(row.video) as reader:
        window = (row.start_seconds, row.end_seconds)
        chosen = choose(reader, *window_in_video(row.video, window, reader.info.duration_seconds))
        cuts: list[Cut | None] = [None]
        if preprocessing.fit == "crop":
            height, width = reader.info.height, reader.info.width
            three = three_squares(height, width, preprocessing)
            cuts = [three[1]] if num_crops == 1 else [*three]
        pictures, pts_seconds, held = read_cuts(reader, chosen, cuts, preprocessing.crop_size)
    clips = [frames.view(len(chosen.clips), -1, *frames.shape[1:]) for frames in pictures]
    pts = pts_seconds.view(len(chosen.clips), -1)
    return Sample(
        id=row.id,
        frames=clips[0] if len(cuts) == 1 else torch.stack(clips, dim=1).flatten(0, 1),
        pts_seconds=pts.repeat_interleave(len(cuts), dim=0),
        labels=row.labels,
        options=row.options,
        repeated_frames=held,
    )


def read_clip(video: str | Path, preprocessing: Preprocessing, *, start_seconds: float | None = None) -> Tensor:
    """One clip as the model wants it: float (3, T, H, W), framed as in evaluation, normalized.

    Args:
        video: a file.
        preprocessing: `model.preprocessing`.
        start_seconds: where the clip begins; None = in the middle of the video.

    Raises:
        DataError: the video cannot be read, or has no frame at `start_seconds`.
    """
    row = Clip(id=str(video), video=str(video), start_seconds=start_seconds)

    def choose(reader: Reader, start: float, end: float) -> ChosenTimes:
        if start_seconds is None:
            return evaluation_times(reader, start, end, preprocessing, 1, "uniform")
        return clip_from(reader, start, preprocessing)

    return preprocessing.normalize(_read_views(row, preprocessing, choose).frames)[0]
