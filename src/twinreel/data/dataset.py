"""Rows + rules -> samples. One Dataset class; what a sample is comes in as a function.

A sample that cannot be read is not replaced: it comes back with a `fault` and is masked (see `loader.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from twinreel.data import sampling
from twinreel.data.captions import row_captions
from twinreel.data.choosing import ChosenTimes, EvaluationWindows, clip_from, evaluation_times, training_times
from twinreel.data.clip import Caption, Clip, Fault, Sample
from twinreel.data.plan import keyed_rng
from twinreel.data.storage import Reader, open_video
from twinreel.data.transforms import (
    Cut,
    FlipLabels,
    center_square,
    cut_frames,
    draw_short_side,
    flip_partners,
    flipped_labels,
    letterbox,
    random_resized,
    random_square,
    three_squares,
)
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing

__all__ = [
    "ClipDataset",
    "TrainingRules",
    "ViewRules",
    "read_clip",
    "read_cuts",
    "read_training_sample",
    "read_training_views",
    "read_views",
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
class TrainingRules:
    """How a training sample is drawn; a picklable function of (row, epoch).

    With `views_per_decode` above 1 it returns a list of so many samples of the row: the same frames and captions,
    cropped and mirrored anew; the first is what a single one would be. With `num_candidates` 0 captions are not read.

    Raises:
        ConfigError: `crop` and `preprocessing.fit` disagree, or labels of `flip_labels` do.
    """

    preprocessing: Preprocessing
    seed: int
    num_candidates: int
    min_window_seconds: float = 0.0
    clip_start: Literal["random", "center", "start", "uniform", "segments"] = "random"
    crop: Literal["random", "square", "center", "resized", "pad"] = "random"
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    short_side: int | tuple[int, int] | None = None
    short_side_draw: Literal["uniform", "inverse"] = "uniform"
    flip: float = 0.5
    flip_labels: FlipLabels = field(default_factory=dict)
    views_per_decode: int = 1

    def __post_init__(self) -> None:
        flip_partners(self.flip_labels)
        if (self.crop == "pad") != (self.preprocessing.fit == "pad"):
            raise ConfigError(
                f"data.crop={self.crop} with model.preprocessing.fit={self.preprocessing.fit}: evaluation would see "
                "other frames than training; set both to pad, or neither"
            )

    def __call__(self, row: Clip, epoch: int) -> Sample | list[Sample]:
        """Read one sample, or all views; a DataError becomes a fault of each."""
        shape = (self.preprocessing.num_frames, self.preprocessing.crop_size)
        views: Sample | list[Sample] = _with_fault(
            row, shape, self.num_candidates, lambda: read_training_views(row, epoch, self)
        )
        if self.views_per_decode == 1:
            return views[0] if isinstance(views, list) else views
        return views if isinstance(views, list) else [views] * self.views_per_decode


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
        if self.windows in ("milnce", "clipbert") and prep.frame_rate is None:
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

        return _with_fault(row, shape, 0, lambda: _read_views(row, self.preprocessing, choose, self.num_crops))


T = TypeVar("T")


def _with_fault(row: Clip, shape: tuple[int, ...], num_candidates: int, read: Callable[[], T]) -> T | Sample:
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
            fault=Fault(id=row.id, video=row.video, reason=str(error)),
        )


def read_training_sample(row: Clip, epoch: int, rules: TrainingRules) -> Sample:
    """One clip of a row with its candidate captions: a pure function of (seed, epoch, row id).

    Raises:
        DataError: the video or its captions cannot be read, or the window lies outside the video.
    """
    return read_training_views(row, epoch, dataclasses.replace(rules, views_per_decode=1))[0]


def read_training_views(row: Clip, epoch: int, rules: TrainingRules) -> list[Sample]:
    """All views of one clip of a row, from one decode; each a pure function of (seed, epoch, row id, its number).

    Raises:
        DataError: as `read_training_sample`.
    """

    def rng(purpose: str, view: int = 0) -> np.random.Generator:
        return keyed_rng(rules.seed, epoch, row.id, f"{purpose} {view}" if view else purpose)

    prep, views = rules.preprocessing, range(rules.views_per_decode)
    captions: list[str] = []
    mask: list[bool] = []
    window = (row.start_seconds, row.end_seconds)
    if rules.num_candidates:
        captions, mask, window = draw_captions(row, rules, rng("caption"))
    with open_video(row.video) as reader:
        start, end = window_in_video(row.video, window, reader.info.duration_seconds)
        cuts = [_training_cut(rng("crop", view), reader.info.height, reader.info.width, rules) for view in views]
        chosen = training_times(rng("start"), reader, start, end, prep, rules.clip_start)
        pictures, pts_seconds, held = read_cuts(reader, chosen, cuts, prep.crop_size)
    samples = []
    for view, frames in zip(views, pictures, strict=True):
        flip, labels = _draw_flip(rng("flip", view), row, rules)
        samples.append(
            Sample(
                id=row.id,
                frames=frames,
                pts_seconds=pts_seconds,
                flip=flip,
                captions=captions,
                caption_mask=mask,
                labels=labels,
                repeated_frames=held,
            )
        )
    return samples


def _training_cut(rng: np.random.Generator, height: int, width: int, rules: TrainingRules) -> Cut | None:
    """The part of the frames that a view shows; None = all of it."""
    size = rules.preprocessing.crop_size
    if rules.crop == "pad":
        return None
    if rules.crop == "center":
        return center_square(height, width, rules.preprocessing)
    if rules.crop == "resized":
        return random_resized(rng, height, width, crop_size=size, area=rules.crop_area, aspect=rules.crop_aspect)
    short_side = rules.short_side
    if short_side is not None:
        short_side = draw_short_side(rng, short_side, rules.short_side_draw)
    return random_square(rng, height, width, crop=rules.crop, crop_size=size, short_side=short_side)


def _draw_flip(rng: np.random.Generator, row: Clip, rules: TrainingRules) -> tuple[bool, tuple[str | int, ...]]:
    """Whether a view is mirrored, and its labels then."""
    if not rng.random() < rules.flip:
        return False, row.labels
    partners = flip_partners(rules.flip_labels)
    labels = flipped_labels(row.labels, partners, has_captions=rules.num_candidates > 0)
    return (False, row.labels) if labels is None else (True, labels)


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
