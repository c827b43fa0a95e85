"""Seconds of a video file -> frames with their times.

Time is float seconds from the first shown frame. A frame is on show from its presentation time until the next frame's,
the last one until its own duration ends. Frames are found by presentation time, never by `time x frame rate`, and a
random access gives the same pixels as decoding from the beginning. A damaged stretch is refused, not concealed.

This file and its lower half, `frame_stream.py`, are the only room that touches a decoder (PyAV).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from torch import Tensor

from twinreel.data.frame_stream import FAILURES, FrameStream, Shown, failure_text
from twinreel.data.transforms import Cut, cut_frames
from twinreel.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Frames", "VideoInfo", "VideoReader", "probe", "read_frames"]


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a file holds. `height` and `width` are as shown; `rotation` (degrees counterclockwise) is applied already.

    `frame_rate` is the average in Hz, 0 where it is not known. It informs; frames are found by their times.
    """

    path: str
    duration_seconds: float
    frame_rate: float
    height: int
    width: int
    codec: str
    rotation: int
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Frames:
    """Chosen frames: `data` uint8 (T, H, W, 3) RGB as shown, `pts_seconds` float64 (T,) from the first shown frame.

    `num_held` counts the frames that repeat the last one because the video had ended.
    """

    data: Tensor
    pts_seconds: Tensor
    warnings: tuple[str, ...] = ()
    num_held: int = 0


def probe(source: str | os.PathLike[str]) -> VideoInfo:
    """What the file holds; DataError naming the path and what the file is if no frame of it can be read.

    Only the beginning and, where the header gives no reliable duration, the end are looked at: damage in between is
    found by reading.
    """
    with VideoReader(source) as reader:
        if missing := reader.missing_bytes:
            cut = f"the file is cut short: {missing} bytes are missing"
            return dataclasses.replace(reader.info, warnings=(*reader.info.warnings, cut))
        return reader.info


def read_frames(
    source: str | os.PathLike[str],
    *,
    start_seconds: float | None = None,
    end_seconds: float | None = None,
    at: Sequence[float] | None = None,
) -> Frames:
    """The frames of a window of the file, of the whole file, or those on show `at` some times.

    `VideoReader.frames_between` and `VideoReader.frames_at` say what exactly is chosen and what is refused.
    """
    if at is not None and (start_seconds is not None or end_seconds is not None):
        raise ConfigError("read_frames: give either a window (start_seconds, end_seconds) or times (at), not both")
    with VideoReader(source) as reader:
        return reader.frames_between(start_seconds, end_seconds) if at is None else reader.frames_at(at)


class VideoReader:
    """An open file that gives frames at any times, in any order, with as little decoding as is exact.

    Use it as a context manager. Opening it decodes the first frame, so a file without a readable one is refused at
    once (DataError saying what the file is). It can't be pickled or shared between threads or forked processes: open
    it where it is used.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(source)
        self._stream = FrameStream(self.path)
        self._reformatter = VideoReformatter()
        self._stand_on(self._stream.first)
        frame = self._stream.first.frame
        self._size = (frame.width, frame.height)
        self._transposed, self._flips = _orientation(frame)

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Frames given out stay valid."""
        self._stream.close()

    @property
    def missing_bytes(self) -> int:
        """By how many bytes the file is shorter than its container declares; 0 if it is whole or does not declare."""
        return self._stream.missing_bytes

    @cached_property
    def info(self) -> VideoInfo:
        """What the file holds. The first use may read the end of a file whose header gives no reliable duration."""
        stream = self._stream
        duration = stream.duration_seconds
        warnings = list(stream.warnings)
        ratio = stream.video.sample_aspect_ratio
        if ratio and ratio != 1:
            warnings.append(f"pixels are not square ({ratio}): reported, not applied")
        width, height = self._size[::-1] if self._transposed else self._size
        codec, rotation = stream.video.codec_context.codec.canonical_name, stream.first.frame.rotation % 360
        return VideoInfo(self.path, duration, stream.rate, height, width, codec, rotation, tuple(warnings))

    def frames_at(self, times: Sequence[float], *, hold_last: bool = False, cut: Cut | None = None) -> Frames:
        """The frame on show at each of `times` (seconds, in any order); one frame may answer several times.

        With `cut`, that part of each frame, scaled: `data` is then (T, cut.size, cut.size, 3).

        With `hold_last` a time after the end gives the last frame, counted in `num_held`, as long as the earliest
        time lies within the video. DataError for any other time outside it, and where the file is damaged.
        """
        wanted = [float(time) for time in times]
        if not wanted or not all(map(math.isfinite, wanted)):
            raise DataError(f"{self.path}: frames wanted at {wanted}; give at least one time, all of them finite")
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        pts_seconds = [0.0] * len(wanted)
        num_held = 0
        data, rows = torch.empty(0), np.empty(0, np.uint8)  # made when the first picture gives its size
        shown, row = None, -1
        for index in order:
            num_held += self._go_to(wanted[index], hold=hold_last and index != order[0])
            if self._current is shown:
                rows[index] = rows[row]
            else:
                picture = self._picture(self._current.frame)
                if shown is None:
                    data = torch.empty((len(wanted), *picture.shape), dtype=torch.uint8)
                    rows = data.numpy()
                rows[index] = picture
                shown, row = self._current, index
            pts_seconds[index] = self._current.pts_seconds
        if cut is not None:
            data = cut_frames(data, cut)
        return Frames(data, torch.tensor(pts_seconds, dtype=torch.float64), tuple(self._stream.warnings), num_held)

    def frames_between(self, start_seconds: float | None = None, end_seconds: float | None = None) -> Frames:
        """The frames that appear within `[start_seconds, end_seconds)`; without limits the whole video.

        Where none appears within the window (a still stretch of variable rate, a window shorter than a frame): the
        one frame on show at its start. A window that is partly outside the video gives what there is, with a warning.
        DataError for a window that is wholly outside, empty, or damaged within.
        """
        start = 0.0 if start_seconds is None else float(start_seconds)
        end = math.inf if end_seconds is None else float(end_seconds)
        asked = f"the window [{start:g}, {end:g}) s"
        if not start < end or math.isinf(start):
            raise DataError(f"{self.path}: {asked} is empty; give one that ends after it starts")
        if end <= 0:
            raise self._outside(asked)
        self._go_to(max(0.0, start), asked=asked)
        chosen = []
        if self._current.pts_seconds >= start - self._stream.tolerance or not self._more_before(end, asked):
            chosen.append((self._picture(self._current.frame), self._current.pts_seconds))
        while self._more_before(end, asked):
            self._step()
            chosen.append((self._picture(self._current.frame), self._current.pts_seconds))
        warnings = list(self._stream.warnings)
        if start < 0:
            warnings.append(f"{asked} starts before the video")
        if (
            end_seconds is not None
            and end > self._current.end_seconds + self._stream.tolerance
            and self._peek() is None
        ):
            duration = self._stream.duration_seconds
            if end > duration + self._stream.tolerance:
                warnings.append(f"{asked} ends after the video, which has {duration:.3f} s")
        data = torch.from_numpy(np.stack([picture for picture, _ in chosen]))
        return Frames(data, torch.tensor([pts for _, pts in chosen], dtype=torch.float64), tuple(warnings))

    # Where the reader stands: `_current`, and `_upcoming`, the frame after it, decoded only when it is asked about.

    def _stand_on(self, shown: Shown) -> None:
        self._current = shown
        self._upcoming: Shown | None = None
        self._peeked = False

    def _peek(self) -> Shown | None:
        if not self._peeked:
            self._upcoming = self._stream.next()
            self._peeked = True
        return self._upcoming

    def _step(self) -> None:
        upcoming = self._peek()
        assert upcoming is not None
        self._stand_on(upcoming)

    def _go_to(self, seconds: float, *, hold: bool = False, asked: str | None = None) -> bool:
        """Make the frame on show at `seconds` the current one. True if it is the last, held beyond its end."""
        asked = asked or f"{seconds:g} s"
        latest = seconds + self._stream.tolerance
        if latest < 0:
            raise self._outside(asked)
        behind = latest < self._current.pts_seconds
        sought = behind or (self._is_past_upcoming(latest) and self._stream.seek_helps(self._current, seconds))
        if sought:
            self._stand_on(self._stream.seek(self._current, seconds))
        damage = self._advance(latest, asked)
        if damage is not None and not sought:  # perhaps there is a way around it
            self._stand_on(self._stream.seek(self._current, seconds))
            damage = self._advance(latest, asked)
        if damage is not None:
            raise damage
        if self._upcoming is not None or seconds < max(self._current.end_seconds, self._stream.duration_seconds):
            return False
        if not hold:
            raise self._outside(asked)
        return True

    def _advance(self, latest: float, asked: str) -> DataError | None:
        """Step on to the last frame that appears up to `latest`; the error if frames are lost just there."""
        while (upcoming := self._peek()) is not None and upcoming.pts_seconds <= latest:
            self._step()
        if latest < self._current.pts_seconds:
            return self._damaged(asked, self._current.gap or "its beginning is missing", 0.0, self._current)
        gap = self._stream.lost_at_end if upcoming is None else upcoming.gap
        if gap and latest >= self._current.end_seconds:
            return self._damaged(asked, gap, self._current.end_seconds, upcoming)
        return None

    def _is_past_upcoming(self, seconds: float) -> bool:
        return not self._peeked or (self._upcoming is not None and self._upcoming.pts_seconds <= seconds)

    def _more_before(self, seconds: float, asked: str) -> bool:
        """Whether one more frame appears before `seconds`; DataError if frames are lost before then."""
        upcoming = self._peek()
        gap = self._stream.lost_at_end if upcoming is None else upcoming.gap
        if gap and seconds > self._current.end_seconds + self._stream.tolerance:
            raise self._damaged(asked, gap, self._current.end_seconds, upcoming)
        return upcoming is not None and upcoming.pts_seconds < seconds - self._stream.tolerance

    def _picture(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """The frame as shown: uint8 (H, W, 3) RGB."""
        width, height = self._size
        same = (frame.width, frame.height) == self._size
        if not same:
            change = f"the size changes within the video: all frames are scaled to the first one's {width}x{height}"
            self._stream.warnings[change] = None
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

    def _outside(self, asked: str) -> DataError:
        duration = self._stream.duration_seconds
        return DataError(
            f"{self.path}: {asked} lies outside the video, which has {duration:.3f} s from its first frame"
        )

    def _damaged(self, asked: str, reason: str, until: float, next_good: Shown | None) -> DataError:
        again = "" if next_good is None else f" and again from {next_good.pts_seconds:.3f} s"
        return DataError(f"{self.path}: {asked}: the video is damaged ({reason}); readable up to {until:.3f} s{again}")


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
