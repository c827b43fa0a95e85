"""Rows + rules -> samples. One Dataset class; what a sample is comes in as a function.

A sample that cannot be read is not replaced: it comes back with a `fault` and is masked (see `loader.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from twinreel.data import sampling
from twinreel.data.captions import row_captions
from twinreel.data.clip import Caption, Clip, Fault, Sample
from twinreel.data.plan import keyed_rng
from twinreel.data.storage import open_video
from twinreel.data.transforms import center_square, random_square
from twinreel.errors import DataError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["ClipDataset", "TrainingRules", "ViewRules", "read_clip", "read_training_sample", "read_views"]

ReadSample = Callable[[Clip, int], Sample]


class ClipDataset(Dataset[Sample]):
    """Samples by (epoch, row index). Picklable; opens nothing before a sample is asked for."""

    def __init__(self, rows: Sequence[Clip], read: ReadSample) -> None:
        self.rows = rows
        self.read = read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        return self.read(self.rows[index], epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules:
    """How a training sample is drawn; a picklable function of (row, epoch)."""

    preprocessing: Preprocessing
    seed: int
    num_candidates: int
    min_window_seconds: float = 0.0
    clip_start: Literal["random", "center", "start", "uniform"] = "random"
    crop: Literal["random", "square", "center"] = "random"
    short_side: int | None = None
    flip: float = 0.5

    def __call__(self, row: Clip, epoch: int) -> Sample:
        """Read one sample; a DataError becomes a fault."""
        shape = (self.preprocessing.num_frames, self.preprocessing.crop_size)
        return _with_fault(row, shape, self.num_candidates, lambda: read_training_sample(row, epoch, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRules:
    """How a row is looked at in evaluation: `num_clips` windows, center crops."""

    preprocessing: Preprocessing
    num_clips: int
    windows: Literal["uniform", "milnce", "whole"] = "uniform"

    @property
    def clips_a_row(self) -> int:
        """How many clips a row becomes."""
        return 1 if self.windows == "whole" else self.num_clips

    def times(self, start: float, end: float) -> list[list[float]]:
        """The times of the frames of each clip in the window [start, end), seconds."""
        prep = self.preprocessing
        if self.windows == "whole":
            return [sampling.uniform_times(start, end, prep.num_frames)]
        return [sampling.clip_times(begin, prep.num_frames, prep.sampled_rate) for begin in self.starts(start, end)]

    def starts(self, start: float, end: float) -> list[float]:
        """Start times of the clips in the window [start, end), seconds."""
        prep = self.preprocessing
        if self.windows == "milnce":
            return sampling.milnce_evaluation_starts(start, end, prep.num_frames, prep.sampled_rate, self.num_clips)
        return sampling.uniform_starts(start, end, prep.clip_seconds, self.num_clips)

    def __call__(self, row: Clip, epoch: int) -> Sample:
        """Read all views of a row, frames (num_clips, T, S, S, 3); a DataError becomes a fault."""
        shape = (self.clips_a_row, self.preprocessing.num_frames, self.preprocessing.crop_size)
        return _with_fault(row, shape, 0, lambda: read_views(row, self.preprocessing, self.times))


def _with_fault(row: Clip, shape: tuple[int, ...], num_candidates: int, read: Callable[[], Sample]) -> Sample:
    try:
        return read()
    except DataError as error:
        *lead, num_frames, side = shape
        return Sample(
            id=row.id,
            frames=torch.zeros(*lead, num_frames, side, side, 3, dtype=torch.uint8),
            pts_seconds=torch.zeros(*lead, num_frames, dtype=torch.float64),
            captions=[""] * num_candidates,
            caption_mask=[False] * num_candidates,
            labels=row.labels,
            fault=Fault(id=row.id, video=row.video, reason=str(error)),
        )


def read_training_sample(row: Clip, epoch: int, rules: TrainingRules) -> Sample:
    """One clip of a row with its candidate captions: a pure function of (seed, epoch, row id).

    Raises:
        DataError: the video or its captions cannot be read, or the window lies outside the video.
    """

    def rng(purpose: str) -> np.random.Generator:
        return keyed_rng(rules.seed, epoch, row.id, purpose)

    prep = rules.preprocessing
    captions, mask, window = draw_captions(row, rules, rng("caption"))
    with open_video(row.video) as reader:
        start, end = window_in_video(row.video, window, reader.info.duration_seconds)
        height, width = reader.info.height, reader.info.width
        if rules.crop == "center":
            cut = center_square(height, width, prep)
        else:
            cut = random_square(
                rng("crop"), height, width, crop=rules.crop, crop_size=prep.crop_size, short_side=rules.short_side
            )
        frames = reader.frames_at(_training_times(rng("start"), start, end, rules), hold_last=True, cut=cut)
    return Sample(
        id=row.id,
        frames=frames.data,
        pts_seconds=frames.pts_seconds,
        flip=bool(rng("flip").random() < rules.flip),
        captions=captions,
        caption_mask=mask,
        labels=row.labels,
        repeated_frames=frames.num_held,
    )


Window = tuple[float | None, float | None]


def draw_captions(row: Clip, rules: TrainingRules, rng: np.random.Generator) -> tuple[list[str], list[bool], Window]:
    """K candidate captions of a row, which of them are real, and the window they belong to.

    Captions with times of their own (a narration): one is drawn, its window (widened to `min_window_seconds`) is the
    clip's, and the K - 1 captions nearest in time join it; where the track has fewer than K, the founding code
    repeats captions: here the repeats are masked. Captions of the whole row: K of them are drawn, without repeating.
    """
    k = rules.num_candidates
    captions = row_captions(row)
    if not captions:
        raise DataError(f"{row.id}: no caption; a contrastive task needs a caption, captions or caption_file")
    if all(caption.start_seconds is not None for caption in captions):
        return _draw_narration(captions, rules, rng)
    chosen = [captions[i].text for i in rng.permutation(len(captions))[:k]]
    missing = k - len(chosen)
    return chosen + [""] * missing, [True] * len(chosen) + [False] * missing, (row.start_seconds, row.end_seconds)


def _draw_narration(
    track: Sequence[Caption], rules: TrainingRules, rng: np.random.Generator
) -> tuple[list[str], list[bool], Window]:
    index = int(rng.integers(len(track)))
    starts = [float(caption.start_seconds or 0.0) for caption in track]
    ends = [float(caption.end_seconds or start) for caption, start in zip(track, starts, strict=True)]
    chosen = [index]
    if rules.num_candidates > 1:
        chosen = sampling.nearest_candidates(starts, ends, index, rules.num_candidates)
    mask = [i not in chosen[:position] for position, i in enumerate(chosen)]
    window = sampling.widen_window(starts[index], ends[index], rules.min_window_seconds)
    return [track[i].text for i in chosen], mask, window


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


def _training_times(rng: np.random.Generator, start: float, end: float, rules: TrainingRules) -> list[float]:
    prep = rules.preprocessing
    if rules.clip_start == "uniform":
        return sampling.uniform_times(start, end, prep.num_frames)
    if rules.clip_start == "random":
        start = sampling.random_start(rng, start, end, prep.clip_seconds)
    elif rules.clip_start == "center":
        start = sampling.center_start(start, end, prep.clip_seconds)
    return sampling.clip_times(start, prep.num_frames, prep.sampled_rate)


def read_views(row: Clip, preprocessing: Preprocessing, times: Callable[[float, float], list[list[float]]]) -> Sample:
    """Clips of a row from one open file: frames uint8 (N, T, S, S, 3), pts_seconds (N, T).

    Args:
        row: the row.
        preprocessing: what the model wants.
        times: window [start, end) in seconds -> the times of the frames of each of the N clips.

    Raises:
        DataError: the video cannot be read, or the row's window lies outside it.
    """
    with open_video(row.video) as reader:
        clips = times(*window_in_video(row.video, (row.start_seconds, row.end_seconds), reader.info.duration_seconds))
        cut = center_square(reader.info.height, reader.info.width, preprocessing)
        frames = reader.frames_at([time for clip in clips for time in clip], hold_last=True, cut=cut)
    return Sample(
        id=row.id,
        frames=frames.data.view(len(clips), -1, *frames.data.shape[1:]),
        pts_seconds=frames.pts_seconds.view(len(clips), -1),
        labels=row.labels,
        repeated_frames=frames.num_held,
    )


def read_clip(video: str | Path, preprocessing: Preprocessing, *, start_seconds: float | None = None) -> Tensor:
    """One clip as the model wants it: float (3, T, H, W), center crop, normalized.

    Args:
        video: a file.
        preprocessing: `model.preprocessing`.
        start_seconds: where the clip begins; None = in the middle of the video.

    Raises:
        DataError: the video cannot be read, or has no frame at `start_seconds`.
    """
    row = Clip(id=str(video), video=str(video), start_seconds=start_seconds)

    def times(start: float, end: float) -> list[list[float]]:
        begin = (
            sampling.center_start(start, end, preprocessing.clip_seconds) if start_seconds is None else start_seconds
        )
        return [sampling.clip_times(begin, preprocessing.num_frames, preprocessing.sampled_rate)]

    sample = read_views(row, preprocessing, times)
    return preprocessing.normalize(sample.frames)[0]
