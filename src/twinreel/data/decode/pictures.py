"""Decoded frames -> RGB pixels as they are shown, and of those the part and size that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from torch import Tensor

from twinreel.data.decode.container import FAILURES, failure_text
from twinreel.data.transforms import Cut, cut_frames
from twinreel.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Gathered", "Pictures"]

_AT_ONCE_BYTES = 2 << 20  # of pictures that are scaled together: more do not stay in a core's cache
_MOST_AT_ONCE = 8


class Pictures:
    """Turns the frames of one file into RGB of the first one's size and orientation.

    Attributes:
        path: the file, for errors.
        height: of a picture as shown, pixels.
        width: likewise.
    """

    def __init__(self, path: str, first: VideoFrame, warnings: dict[str, None]) -> None:
        self.path = path
        self._warnings = warnings
        self._reformatter = VideoReformatter()
        self._coded = (first.width, first.height)
        self._transposed, self._flips = _orientation(first)
        self.width, self.height = self._coded[::-1] if self._transposed else self._coded

    def check_cut(self, cut: Cut) -> None:
        """ConfigError if a cut does not lie in the picture."""
        low, right = cut.top + cut.height, cut.left + cut.width
        inside = 0 <= cut.top < low <= self.height and 0 <= cut.left < right <= self.width
        if not inside or cut.size < 1:
            raise ConfigError(f"{self.path}: {cut} does not lie in the picture of {self.height} x {self.width} pixels")

    def rgb(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """The frame as shown: uint8 (H, W, 3) RGB."""
        width, height = self._coded
        same = (frame.width, frame.height) == self._coded
        if not same:
            change = f"the size changes within the video: all frames are scaled to the first one's {width}x{height}"
            self._warnings[change] = None
        # POINT gives each pixel the nearest chroma sample at every bit depth, as FFmpeg does for 8 bits. More threads
        # than one cost more than they give for a single frame.
        how = Interpolation.POINT if same else Interpolation.BILINEAR
        try:
            rgb = self._reformatter.reformat(frame, width, height, format="rgb24", interpolation=how, threads=1)
        except FAILURES as error:
            pixels = frame.format.name
            raise DataError(f"{self.path}: {pixels} pixels can't be turned into RGB: {failure_text(error)}") from error
        picture: Any = rgb.to_ndarray()
        if self._transposed:
            picture = picture.transpose(1, 0, 2)
        oriented: NDArray[np.uint8] = picture[self._flips]
        return oriented


class Gathered:
    """Pictures of one read, in the rows where they are wanted; with `cut`, that part of each, scaled.

    What is cut is scaled a few frames at a time, so that whole frames are never held.
    """

    def __init__(self, num_rows: int, cut: Cut | None) -> None:
        self._num_rows = num_rows
        self._cut = cut
        self._data = torch.empty(0, dtype=torch.uint8)
        self._parts = np.empty(0, np.uint8)
        self._waiting: list[Sequence[int]] = []  # the rows of each of the parts

    def add(self, picture: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Take a picture (H, W, 3) into these rows."""
        cut = self._cut
        if cut is None:
            self._put(torch.from_numpy(np.ascontiguousarray(picture))[None], [rows])
            return
        if not self._parts.size:
            at_once = max(1, min(_MOST_AT_ONCE, _AT_ONCE_BYTES // (cut.height * cut.width * 3)))
            self._parts = np.empty((at_once, cut.height, cut.width, 3), np.uint8)
        self._parts[len(self._waiting)] = picture[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
        self._waiting.append(rows)
        if len(self._waiting) == len(self._parts):
            self._scale(cut)

    def data(self) -> Tensor:
        """All rows: uint8 (T, H, W, 3), or (T, cut.size, cut.size, 3). Rows that nothing was put in are arbitrary."""
        if self._cut is not None and self._waiting:
            self._scale(self._cut)
        return self._data

    def _scale(self, cut: Cut) -> None:
        parts = torch.from_numpy(self._parts[: len(self._waiting)])
        self._put(cut_frames(parts, Cut(0, 0, cut.height, cut.width, cut.size)), self._waiting)
        self._waiting = []

    def _put(self, pictures: Tensor, rows: Sequence[Sequence[int]]) -> None:
        if not self._data.numel():
            self._data = torch.empty((self._num_rows, *pictures.shape[1:]), dtype=torch.uint8)
        for picture, where in zip(pictures, rows, strict=True):
            for row in where:
                self._data[row] = picture


def _orientation(frame: VideoFrame) -> tuple[bool, tuple[slice, slice]]:
    """Whether to transpose a picture, and how to flip its rows and columns then, so that it is as shown."""
    side_data_of: Any = SideDataContainer  # frame.side_data is the same, but ties the frame into a reference cycle
    for side_data in side_data_of(frame):
        if side_data.type == SideDataType.DISPLAYMATRIX:
            a, b, _, c, d = np.frombuffer(side_data, np.int32)[:5].tolist()
            transposed = abs(b) + abs(c) > abs(a) + abs(d)
            right, down = (c, b) if transposed else (a, d)
            return transposed, (slice(None, None, -1 if down < 0 else 1), slice(None, None, -1 if right < 0 else 1))
    return False, (slice(None), slice(None))
