"""A folder of images as a video: `img_00001.jpg`, `img_00002.jpg`, ... and when each of them is on show.

Images are ordered by the number that ends their names; the first may have any number. When they appear is said by a
`frames.json` in the folder: `{"times_seconds": [0.0, 0.04], "end_seconds": 0.08}` (what `twinreel data extract`
writes), or `{"frame_rate": 25}`, which may also lie in the folder above and then holds for all folders in there.

A reader answers as the reader of the video would: the image on show at a time is the last one that appears up to it.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from twinreel.data.decode import Frames, VideoInfo
from twinreel.data.decode.filetype import describe_file
from twinreel.data.storage.lmdb_store import IMAGE_SUFFIXES
from twinreel.data.transforms import Cut, cut_frames
from twinreel.errors import DataError

__all__ = ["TIMES_FILE", "FrameFolder", "image_size", "is_frame_folder", "is_image", "open_image"]

TIMES_FILE = "frames.json"
_LISTED = 5
_ORIENTATION = 0x0112  # in EXIF; from 5 on height and width are swapped
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a pixel: converting would cut them off


def is_frame_folder(path: str) -> bool:
    """Whether there is a folder with a `frames.json` or at least one image."""
    try:
        with os.scandir(path) as entries:
            return any(entry.name == TIMES_FILE or is_image(entry.name) for entry in entries)
    except OSError:
        return False


class FrameFolder:
    """The images of a folder by their times, with the doors of `VideoReader`. Only images that are asked for are read.

    Raises:
        DataError: no images, no times, or numbers that are missing or taken twice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        self._warnings: dict[str, None] = {}
        self._images = _numbered_images(self.path, self._warnings)
        self._timing = _timing(self.path, list(self._images))
        self._names = list(self._images.values())
        self._size = image_size(os.path.join(self.path, self._names[0]))

    def __enter__(self) -> FrameFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""

    @cached_property
    def info(self) -> VideoInfo:
        """What the folder holds, as of a video; `codec` says which images."""
        timing = self._timing
        suffixes = sorted({os.path.splitext(name)[1].lstrip(".").lower() for name in self._names})
        width, height = self._size
        codec = "images (" + ", ".join(suffixes) + ")"
        return VideoInfo(
            self.path, timing.end_seconds, timing.frame_rate, height, width, codec, 0, tuple(self._warnings)
        )

    @property
    def tolerance(self) -> float:
        """By how many seconds a time may miss the image that is meant."""
        return self._timing.tolerance

    @property
    def clock(self) -> tuple[float, bool]:
        """Microseconds, and a duration: as of a video; see `VideoReader.clock`."""
        return 1e-6, True

    @property
    def missing_bytes(self) -> int:
        """0: a folder of images declares no size."""
        return 0

    def frame_times(self) -> list[float]:
        """When each image appears, seconds."""
        return list(self._timing.times)

    def frames_at(self, times: Sequence[float], *, hold_last: bool = False, cut: Cut | None = None) -> Frames:
        """The image on show at each of `times`; as `VideoReader.frames_at`."""
        wanted = [float(time) for time in times]
        if not wanted or not all(map(math.isfinite, wanted)):
            raise DataError(f"{self.path}: frames wanted at {wanted}; give at least one time, all of them finite")
        timing, earliest = self._timing, min(wanted)
        chosen, num_held = [], 0
        for time in wanted:
            index = bisect_right(timing.times, time + timing.tolerance) - 1
            held = index == len(timing.times) - 1 and time >= timing.end_seconds
            if index < 0 or (held and (not hold_last or time == earliest)):
                raise self._outside(f"{time:g} s")
            chosen.append(index)
            num_held += held
        return self._frames(chosen, cut, num_held)

    def frames_between(self, start_seconds: float | None = None, end_seconds: float | None = None) -> Frames:
        """The images that appear within a window, or the one on show at its start; as `VideoReader.frames_between`."""
        timing = self._timing
        start = 0.0 if start_seconds is None else float(start_seconds)
        end = math.inf if end_seconds is None else float(end_seconds)
        asked = f"the window [{start:g}, {end:g}) s"
        if not start < end or math.isinf(start):
            raise DataError(f"{self.path}: {asked} is empty; give one that ends after it starts")
        if end <= 0 or start >= timing.end_seconds:
            raise self._outside(asked)
        last = bisect_right(timing.times, max(0.0, start) + timing.tolerance) - 1  # on show at the start
        chosen = [
            index
            for index in range(last, len(timing.times))
            if start - timing.tolerance <= timing.times[index] < end - timing.tolerance
        ]
        frames = self._frames(chosen or [last], None, 0)
        warnings = list(frames.warnings)
        if start < 0:
            warnings.append(f"{asked} starts before the video")
        if end_seconds is not None and end > timing.end_seconds + timing.tolerance:
            warnings.append(f"{asked} ends after the video, which has {timing.end_seconds:.3f} s")
        frames.warnings = tuple(warnings)
        return frames

    def _frames(self, chosen: Sequence[int], cut: Cut | None, num_held: int) -> Frames:
        pictures = {index: self._picture(index, cut) for index in sorted(set(chosen))}
        data = torch.stack([pictures[index] for index in chosen])
        pts_seconds = torch.tensor([self._timing.times[index] for index in chosen], dtype=torch.float64)
        return Frames(data, pts_seconds, tuple(self._warnings), num_held)

    def _picture(self, index: int, cut: Cut | None) -> Tensor:
        """An image, or a cut of it: uint8 (H, W, 3) RGB, in the size of the first."""
        path = os.path.join(self.path, self._names[index])
        image = open_image(path)
        if image.size != self._size:
            width, height = self._size
            self._warnings[f"the size of the images changes: all are scaled to the first one's {width}x{height}"] = None
            image = image.resize(self._size, Image.Resampling.BILINEAR)
        picture = torch.from_numpy(np.array(image))
        return picture if cut is None else cut_frames(picture[None], cut)[0]

    def _outside(self, asked: str) -> DataError:
        end = self._timing.end_seconds
        return DataError(f"{self.path}: {asked} lies outside the video, which has {end:.3f} s from its first frame")


def open_image(path: str) -> Image.Image:
    """An image file as 8-bit RGB pixels, turned as its EXIF says; an alpha channel is dropped.

    Raises:
        DataError: it cannot be read, or has more than 8 bits a pixel; names the file.
    """
    with _opened(path) as image:
        if image.mode in _DEEP:
            raise DataError(f"{path}: an image of more than 8 bits ({image.mode}); save it with 8 bits a channel")
        return ImageOps.exif_transpose(image).convert("RGB")


def image_size(path: str) -> tuple[int, int]:
    """Width and height of an image file as shown, by its header.

    Raises:
        DataError: it is no image that can be read; names the file.
    """
    with _opened(path) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION, 1) >= 5 else (width, height)


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        said = "an unknown format" if isinstance(error, UnidentifiedImageError) else str(error)
        what = _not_an_image(path) or said
        raise DataError(f"{path}: can't be read as an image: {what}") from error


def _not_an_image(path: str) -> str | None:
    what = describe_file(path)
    return None if what is None or " image, not a video" in what else what.replace("a video", "an image")


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image, and not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _numbered_images(folder: str, warnings: dict[str, None]) -> dict[int, str]:
    """Number -> file name, in the order of the numbers."""
    try:
        names = sorted(name for name in os.listdir(folder) if is_image(name))
    except OSError as error:
        raise DataError(f"{folder}: can't be read as a folder of images: {error.strerror}") from error
    images: dict[int, str] = {}
    others = []
    for name in names:
        digits = re.search(r"[0-9]+$", os.path.splitext(name)[0])
        if digits is None:
            others.append(name)
            continue
        number = int(digits.group())
        if number in images:
            raise DataError(
                f"{folder}: {images[number]} and {name} both have the number {number}; keep the images of one video, "
                "of one kind, in a folder"
            )
        images[number] = name
    if not images:
        raise DataError(f"{folder}: no image with a number (img_00001.jpg) in this folder")
    if others:
        warnings[f"images without a number are left out ({len(others)}): {', '.join(others[:_LISTED])}"] = None
    return dict(sorted(images.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """When images appear, from 0 s; when the last one ends; by how much a time may miss an image that is meant.

    `frame_rate` (Hz) informs.
    """

    times: list[float]
    end_seconds: float
    tolerance: float
    frame_rate: float


def _timing(folder: str, numbers: list[int]) -> _Timing:
    path = os.path.join(folder, TIMES_FILE)
    above = os.path.join(os.path.dirname(os.path.abspath(folder)), TIMES_FILE)
    if not os.path.exists(path):
        path = above
    if not os.path.exists(path):
        raise DataError(
            f"{folder}: nothing says when its {len(numbers)} images appear; write their rate, such as "
            f'{{"frame_rate": 25}}, into {TIMES_FILE} there, or into {above} for all folders beside it'
        )
    said = _read_json(path)
    if "frame_rate" in said and "times_seconds" not in said:
        return _from_rate(folder, numbers, path, said["frame_rate"])
    if path == above:
        raise DataError(f"{path}: a {TIMES_FILE} above folders of images has frame_rate alone, got {sorted(said)}")
    return _from_times(folder, len(numbers), path, said)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read: {error}") from error
    if not isinstance(said, dict):
        raise DataError(f'{path}: must be an object such as {{"frame_rate": 25}}, got {type(said).__name__}')
    return said


def _from_rate(folder: str, numbers: list[int], path: str, rate: Any) -> _Timing:
    if not _is_number(rate) or rate <= 0:
        raise DataError(f"{path}: frame_rate {rate!r} must be a number of images a second, above 0")
    first, last = numbers[0], numbers[-1]
    if last - first + 1 != len(numbers):
        there = set(numbers)
        gaps = [number for number in range(first, last) if number not in there]
        listed = ", ".join(map(str, gaps[:_LISTED])) + (", ..." if len(gaps) > _LISTED else "")
        raise DataError(
            f"{folder}: {len(gaps)} images are missing between number {first} and {last} ({listed}); put them there, "
            f"or say in {TIMES_FILE} when each of the others appears (times_seconds, end_seconds)"
        )
    times = [index / rate for index in range(len(numbers))]
    return _Timing(
        times=times, end_seconds=len(numbers) / rate, tolerance=_tolerance(times, 1 / rate), frame_rate=float(rate)
    )


def _from_times(folder: str, count: int, path: str, said: dict[str, Any]) -> _Timing:
    times, end = said.get("times_seconds"), said.get("end_seconds")
    if not isinstance(times, list) or not all(map(_is_number, times)) or not _is_number(end):
        raise DataError(f"{path}: must have frame_rate, or times_seconds (a list of numbers) and end_seconds")
    if len(times) != count:
        raise DataError(f"{folder}: {count} images, but {path} has {len(times)} times; one of the two is incomplete")
    if any(before >= after for before, after in pairwise([*times, end])):
        raise DataError(f"{path}: times_seconds must increase, and end_seconds come after the last of them")
    from_first, length = [time - times[0] for time in times], float(end - times[0])
    given: Any = said.get("tolerance_seconds")
    tolerance = float(given) if _is_number(given) and given >= 0 else _tolerance(from_first, length)
    rate: Any = said.get("frame_rate")
    rate = float(rate) if _is_number(rate) and rate > 0 else count / length
    return _Timing(times=from_first, end_seconds=length, tolerance=tolerance, frame_rate=rate)


def _tolerance(times: list[float], longest: float) -> float:
    """As of a video: what rounding may add to a time, and never so much that another image is meant."""
    steps = [after - before for before, after in pairwise(times)]
    return float(min(1e-3, 0.25 * min(steps, default=longest)) + 1e-9)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
