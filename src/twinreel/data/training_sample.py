"""A row of a training set -> one sample of it: its clips, crop, mirror image and captions, all drawn by key.

A sample is a pure function of (seed, epoch, row id); `num_clips` clips of it are drawn one by one, from one open file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from twinreel.data import sampling
from twinreel.data.captions import row_captions
from twinreel.data.choosing import TrainingStart, evaluation_times, training_times
from twinreel.data.clip import Caption, Clip, Sample
from twinreel.data.dataset import Window, read_cuts, sample_or_fault, window_in_video
from twinreel.data.plan import keyed_rng
from twinreel.data.storage import open_video
from twinreel.data.transforms import (
    Cut,
    FlipLabels,
    center_square,
    draw_short_side,
    flip_partners,
    flipped_labels,
    random_resized,
    random_square,
)
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["TrainingRules", "draw_captions", "read_training_sample", "read_training_views"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules:
    """How a training sample is drawn; a picklable function of (row, epoch).

    `num_clips` clips of the row come one behind the other, frames (num_clips * T, S, S, 3): by `clip_start=random` and
    `segments` each is drawn by itself, by `center` several are spread over the window as in evaluation.

    With `views_per_decode` above 1 it returns a list of so many samples of the row: the same frames and captions,
    cropped and mirrored anew; the first is what a single one would be. With `num_candidates` 0 captions are not read.

    Raises:
        ConfigError: `crop` and `preprocessing.fit` disagree, or labels of `flip_labels` do, or several clips would be
            the same.
    """

    preprocessing: Preprocessing
    seed: int
    num_candidates: int
    min_window_seconds: float = 0.0
    clip_start: TrainingStart = "random"
    num_clips: int = 1
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
        if self.num_clips < 1:
            raise ConfigError(f"data.num_clips={self.num_clips}: a sample has at least 1 clip")
        if self.num_clips > 1 and self.clip_start in ("uniform", "start"):
            raise ConfigError(
                f"data.num_clips={self.num_clips} with data.clip_start={self.clip_start}: every clip would show the "
                "same frames; set data.clip_start=random (center: spread evenly), or more "
                "model.preprocessing.num_frames in one clip"
            )
        if (self.crop == "pad") != (self.preprocessing.fit == "pad"):
            raise ConfigError(
                f"data.crop={self.crop} with model.preprocessing.fit={self.preprocessing.fit}: evaluation would see "
                "other frames than training; set both to pad, or neither"
            )

    def __call__(self, row: Clip, epoch: int) -> Sample | list[Sample]:
        """Read one sample, or all views; a DataError becomes a fault of each."""
        shape = (self.num_clips * self.preprocessing.num_frames, self.preprocessing.crop_size)
        views: Sample | list[Sample] = sample_or_fault(
            row, shape, self.num_candidates, lambda: read_training_views(row, epoch, self)
        )
        if self.views_per_decode == 1:
            return views[0] if isinstance(views, list) else views
        return views if isinstance(views, list) else [views] * self.views_per_decode


def read_training_sample(row: Clip, epoch: int, rules: TrainingRules) -> Sample:
    """The clips of a row with its candidate captions: a pure function of (seed, epoch, row id).

    Raises:
        DataError: the video or its captions cannot be read, or the window lies outside the video.
    """
    return read_training_views(row, epoch, dataclasses.replace(rules, views_per_decode=1))[0]


def read_training_views(row: Clip, epoch: int, rules: TrainingRules) -> list[Sample]:
    """All views of the clips of a row, from one decode; each a pure function of (seed, epoch, row id, its number).

    Raises:
        DataError: as `read_training_sample`.
    """

    def rng(purpose: str, number: int = 0) -> np.random.Generator:
        return keyed_rng(rules.seed, epoch, row.id, f"{purpose} {number}" if number else purpose)

    prep, views = rules.preprocessing, range(rules.views_per_decode)
    captions: list[str] = []
    mask: list[bool] = []
    window = (row.start_seconds, row.end_seconds)
    if rules.num_candidates:
        captions, mask, window = draw_captions(row, rules, rng("caption"))
    with open_video(row.video) as reader:
        start, end = window_in_video(row.video, window, reader.info.duration_seconds)
        cuts = [_training_cut(rng("crop", view), reader.info.height, reader.info.width, rules) for view in views]
        if rules.num_clips > 1 and rules.clip_start == "center":
            chosen = evaluation_times(reader, start, end, prep, rules.num_clips)
        else:
            drawn = [rng("start", clip) for clip in range(rules.num_clips)]
            chosen = training_times(drawn, reader, start, end, prep, rules.clip_start)
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
                options=row.options,
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


def draw_captions(row: Clip, rules: TrainingRules, rng: np.random.Generator) -> tuple[list[str], list[bool], Window]:
    """K candidate captions of a row, which of them are real, and the window they belong to.

    Captions with times of their own (a narration): one is drawn, its window (widened to `min_window_seconds`) is the
    clip's, and the K - 1 captions nearest in time join it; where the track has fewer than K, the founding code
    repeats captions: here the repeats are masked. Captions of the whole row: K of them are drawn, without repeating.
    Options can be chosen from without a question: a row with options and no captions has K empty ones, none real.

    Raises:
        DataError: a row without options has no captions, or a caption file cannot be used.
    """
    k = rules.num_candidates
    captions = row_captions(row)
    if not captions and row.options:
        return [""] * k, [False] * k, (row.start_seconds, row.end_seconds)
    if not captions:
        raise DataError(f"{row.id}: no caption or question; give it a caption, captions, caption_file or question")
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
