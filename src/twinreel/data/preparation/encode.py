"""A stretch of a video -> a small H.264 file that gives any of its frames quickly, at the same times.

Every file begins with the frame on show where its stretch begins, at second 0, and has a key frame every few frames
from then on; nothing before a key frame is needed after it. Frames keep their distances in time: the file counts in
the source's own ticks where that is possible, so that reading is as exact or as lenient with times as it was before,
else in units of 1 / 720 000 s.

What is written: 8 bits, 4:2:0, BT.601 in video range, tagged as such; progressive; no audio. x264 runs in one thread,
so the bytes depend on the input, the settings and the versions of x264 and FFmpeg alone.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import torch
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from torch.nn import functional

from twinreel.data.decode import Frames, VideoReader
from twinreel.data.storage import Reader
from twinreel.errors import ConfigError, DataError, DependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Encoded", "Encoding", "encode_stretch", "output_size", "require_encoder"]

_FINEST = 720_000  # ticks a second: frames of 24, 25, 30, 50, 60 Hz, of these / 1.001, and ms are whole numbers of them
# Chosen by measuring random clips (docs/prepare.md): without CABAC and deblocking decoding takes half the time for a
# tenth more bytes, and slower presets gain little. B-frames that nothing refers to need not be decoded where they are
# not wanted; but MP4 then stores right how long frames are on show only if that is the same for all.
# Without mbtree, whose AVX-512 code gives other bytes at every run once there are B-frames (x264 165).
_X264 = {"preset": "veryfast", "tune": "fastdecode", "b-pyramid": "none", "sc_threshold": "0", "mbtree": "0"}
_BT601, _VIDEO_RANGE = 6, 1  # smpte170m, tv
_TO_YUV = Interpolation.AREA | Interpolation.ACCURATE_RND  # at equal size: each chroma sample the mean of its 4 pixels
_BYTES_AT_ONCE, _FRAMES_AT_ONCE = 64 * 2**20, 64  # of decoded pictures
_CLOSE = 2e-6  # seconds: two times that differ by less are one
_ROUNDED = 5e-4  # seconds: what a header's duration may be off by


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How files are written.

    Attributes:
        short_side: pixels, even; smaller videos are not scaled up.
        gop: frames from key frame to key frame.
        crf: x264's constant rate factor; 18 is hardly told from the source, 6 more halve the bytes.
    """

    short_side: int = 256
    gop: int = 16
    crf: int = 21

    def __post_init__(self) -> None:
        if self.short_side < 2 or self.short_side % 2:
            raise ConfigError(f"short_side {self.short_side} must be an even number of pixels, such as 256")
        if not 1 <= self.gop <= 1000:
            raise ConfigError(f"gop {self.gop} must be a number of frames from 1 to 1000, such as 16")
        if not 0 <= self.crf <= 51:
            raise ConfigError(f"crf {self.crf} must be from 0 (lossless) to 51, such as 21")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What was written of a stretch.

    Attributes:
        start_seconds: when its first frame appears in the source.
        seconds: how long it lasts.
        num_frames: in it.
        height: pixels.
        width: pixels.
        partial: why it ends early, if the source is damaged further on.
    """

    start_seconds: float
    seconds: float
    num_frames: int
    height: int
    width: int
    partial: str | None = None


def require_encoder() -> None:
    """See that files can be written.

    Raises:
        DependencyError: this PyAV has no libx264.
    """
    if "libx264" not in av.codecs_available:
        raise DependencyError(
            f"PyAV {av.__version__} here was built without the encoder libx264; install the released wheel: "
            "pip install --force-reinstall --only-binary :all: av"
        )


def output_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width, both even: the short side scaled to `short_side`, or as it is where it is shorter.

    An odd side that is not scaled loses a pixel's worth by scaling; the long side goes to the nearest even number.
    """
    short = min(height, width)
    if short <= short_side:
        return max(2, height // 2 * 2), max(2, width // 2 * 2)
    scale = Fraction(short_side, short)
    even = [short_side if side == short else 2 * round(side * scale / 2) for side in (height, width)]
    return even[0], even[1]


def encode_stretch(
    reader: Reader, start: float, end: float | None, target: Path, encoding: Encoding, *, allow_partial: bool = False
) -> Encoded:
    """Write the stretch `[start, end)` of an open video to `target` and read it back; `end` None = the video's end.

    Args:
        reader: the open video.
        start: seconds; the frame on show then is the first one.
        end: seconds; beyond the video's end means its end.
        target: the file to write; whatever is there is replaced.
        encoding: how.
        allow_partial: where the video is damaged, what comes before is written instead of an error.

    Raises:
        DataError: the stretch is damaged or outside the video, or what was written does not read back the same.
        OSError: the file cannot be written.
    """
    pictures = _Pictures(reader, start, end, allow_partial)
    info = reader.info
    height, width = output_size(info.height, info.width, encoding.short_side)
    encoder = _Encoder(target, height, width, pictures.ticks_a_second, encoding, b_frames=2 if pictures.steady else 0)
    try:
        try:
            for picture, ticks, following in pictures:
                encoder.add(picture, ticks, following - ticks)
        finally:
            encoder.close()
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise DataError(f"{info.path}: {width}x{height} pixels can't be encoded: {error.strerror or error}") from error
    _read_back(target, [*encoder.ticks, pictures.end_ticks], pictures.ticks_a_second)
    return Encoded(
        start_seconds=pictures.start_seconds,
        seconds=pictures.end_ticks / pictures.ticks_a_second,
        num_frames=len(encoder.ticks),
        height=height,
        width=width,
        partial=pictures.partial,
    )


class _Pictures:
    """The frames of a stretch with their ticks, from 0, and the ticks of what follows each.

    Attributes:
        start_seconds: when the first frame appears in the source.
        ticks_a_second: that whole ticks serve for all times.
        end_ticks: when the last one leaves; known for sure when all have been given.
        steady: whether all of them are on show equally long.
        partial: why the frames end early, if they do.
    """

    def __init__(self, reader: Reader, start: float, end: float | None, allow_partial: bool) -> None:
        duration = reader.info.duration_seconds
        if start >= duration:
            raise DataError(f"{reader.info.path}: {start:g} s lies outside the video, which has {duration:.3f} s")
        self._reader = reader
        self._allow_partial = allow_partial
        self._to_the_end = end is None or end >= duration
        times = list(reader.frame_times())
        first = max(0, bisect_right(times, start + reader.tolerance) - 1)
        stop = len(times) if self._to_the_end else max(first + 1, bisect_left(times, (end or 0.0) - reader.tolerance))
        self._times = times[first:stop]
        self.start_seconds = self._times[0]
        self._begin = self.start_seconds if first else 0.0  # a video whose beginning is lost is damaged
        self.ticks_a_second = _ticks_a_second([time - self.start_seconds for time in self._times], reader.tolerance)
        # A frame is on show until the next one appears, also where that lies behind the stretch.
        self._end = duration if stop >= len(times) else times[stop]
        *steps, last = [after - before for before, after in pairwise([*self._times, self._end])]
        step = min(steps, default=last)
        self.steady = max(steps, default=last) - step < _CLOSE and abs(last - step) < _ROUNDED
        self._usual_ticks = max(1, self._ticks(self.start_seconds + step))
        self.end_ticks = self._ticks(self._times[-1]) + self._usual_ticks if self.steady else self._ticks(self._end)
        self.partial: str | None = None

    def _ticks(self, seconds: float) -> int:
        return round((seconds - self.start_seconds) * self.ticks_a_second)

    def __iter__(self) -> Iterator[tuple[NDArray[np.uint8], int, int]]:
        held: tuple[NDArray[np.uint8], int] | None = None
        for picture, pts_seconds in self._read():
            ticks = max(0, self._ticks(pts_seconds))
            if held is not None and ticks > held[1]:
                yield held[0], held[1], ticks
            held = (picture, ticks)  # of several frames at one time the last is on show
        assert held is not None
        if self.partial is not None or self.end_ticks <= held[1]:
            self.end_ticks = held[1] + self._usual_ticks
        yield held[0], held[1], self.end_ticks

    def _read(self) -> Iterator[tuple[NDArray[np.uint8], float]]:
        """Pictures and times; a few at once, because a second of large frames can fill the memory."""
        info = self._reader.info
        at_once = min(_FRAMES_AT_ONCE, max(1, _BYTES_AT_ONCE // (info.height * info.width * 3)))
        at = 0
        while at < len(self._times) and self.partial is None:
            try:
                frames = self._some(at, at + at_once)
            except DataError as error:
                if not self._allow_partial:
                    raise
                if at_once > 1:
                    at_once //= 2  # nearer and nearer to the damage
                    continue
                self.partial = str(error)
                if (last := self._one(at)) is None:  # not what follows the frame is lost, but the frame itself
                    if at == 0:
                        raise
                    return
                frames = last
            at += at_once
            yield from zip(frames.data.numpy(), frames.pts_seconds.tolist(), strict=True)

    def _one(self, number: int) -> Frames | None:
        try:
            return self._reader.frames_at([self._times[number]])
        except DataError:
            return None

    def _some(self, first: int, stop: int) -> Frames:
        """The frames from number `first` of the stretch to the one before `stop`."""
        begin = self._times[first] if first else self._begin
        if stop < len(self._times):
            return self._reader.frames_between(begin, self._times[stop])
        return self._reader.frames_between(begin, None if self._to_the_end else self._end)


def _ticks_a_second(times: Sequence[float], tolerance: float) -> int:
    """The coarsest clock that all times fit and that is not coarser than the source's: a reader is lenient by one tick.

    `tolerance` is a tick of the source, but at most 1 ms (an AVI counts whole frames).
    """
    own = round(1 / max(tolerance - 1e-9, 1e-7))
    coarse: Sequence[int] = range(own, 2 * own) if own <= 1000 else (own,)  # 1020 for 30 Hz
    for rate in (*coarse, 90_000):
        if rate <= _FINEST and all(abs(time * rate - round(time * rate)) < rate * _CLOSE for time in times):
            return rate
    return _FINEST


class _Encoder:
    """An MP4 with one H.264 stream, written frame by frame; `ticks` of its frames."""

    def __init__(
        self, target: Path, height: int, width: int, ticks_a_second: int, encoding: Encoding, b_frames: int
    ) -> None:
        self.ticks: list[int] = []
        self._durations: dict[int, int] = {}
        self._reformatter = VideoReformatter()
        self._size = (height, width)
        self._tick = Fraction(1, ticks_a_second)
        clock = str(ticks_a_second)  # else MP4 counts durations in ms, and times never in ticks above 1 / 10 000 s
        options = {"movie_timescale": clock, "video_track_timescale": clock, "movflags": "+faststart"}
        options["fflags"] = "+bitexact"
        self._container: Any = av.open(f"file:{target}", "w", format="mp4", options=options)
        try:
            gop = str(encoding.gop)
            x264 = {**_X264, "bf": str(b_frames), "g": gop, "keyint_min": gop, "crf": str(encoding.crf), "threads": "1"}
            self._stream: Any = self._container.add_stream("libx264", options=x264)
            self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
            self._stream.time_base = self._stream.codec_context.time_base = self._tick
            self._stream.codec_context.colorspace = _BT601
            self._stream.codec_context.color_range = _VIDEO_RANGE
        except BaseException:
            self._container.close()
            raise

    def add(self, picture: NDArray[np.uint8], ticks: int, duration: int) -> None:
        """Write a frame, uint8 (H, W, 3) RGB of any size, that appears at `ticks` for so long."""
        rgb = VideoFrame.from_ndarray(self._scaled(picture), format="rgb24")
        frame = self._reformatter.reformat(
            rgb,
            format="yuv420p",
            interpolation=_TO_YUV,
            dst_colorspace=Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
            threads=1,
        )
        frame.pts, frame.time_base = ticks, self._tick
        self.ticks.append(ticks)
        self._durations[ticks] = duration
        self._mux(self._stream.encode(frame))

    def _scaled(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bilinear with antialiasing, as training scales."""
        if picture.shape[:2] == self._size:
            return np.ascontiguousarray(picture)
        pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None]
        scaled = functional.interpolate(pixels, size=self._size, mode="bilinear", antialias=True, align_corners=False)
        return scaled[0].permute(1, 2, 0).contiguous().numpy()

    def close(self) -> None:
        """Write what the encoder still holds, and the index."""
        try:
            if self.ticks:
                self._mux(self._stream.encode(None))
        finally:
            self._container.close()

    def _mux(self, packets: list[Any]) -> None:
        for packet in packets:
            packet.duration = self._durations.pop(packet.pts)  # the encoder does not tell
            self._container.mux(packet)


def _read_back(path: Path, ticks: list[int], ticks_a_second: int) -> None:
    """See that a written file can be decoded and has every frame at its time; the last of `ticks` is the end.

    Raises:
        DataError: it does not.
    """
    found: list[int] = []
    with VideoReader(os.fspath(path)) as reader:
        for first in range(0, len(ticks) - 1, _FRAMES_AT_ONCE):
            until = first + _FRAMES_AT_ONCE
            end = ticks[until] / ticks_a_second if until < len(ticks) - 1 else None
            pts_seconds = reader.frames_between(ticks[first] / ticks_a_second, end).pts_seconds
            found += (pts_seconds * ticks_a_second).round().long().tolist()
        found.append(round(reader.info.duration_seconds * ticks_a_second))
    if found != ticks:
        right = next((i for i, pair in enumerate(zip(found, ticks, strict=False)) if pair[0] != pair[1]), len(found))
        raise DataError(
            f"{path}: what was written does not read back as it was given: {len(found) - 1} of "
            f"{len(ticks) - 1} frames, only the first {right} of them right; please report this as a bug in twinreel"
        )
