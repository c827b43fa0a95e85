"""Seconds of a video file -> frames with their times.

Time is float seconds from the first shown frame. A frame is on show from its presentation time until the next frame's,
the last one until its own duration ends. Frames are found by presentation time, never by `time x frame rate`, and a
random access gives the same pixels as decoding from the beginning. A damaged stretch is refused, not concealed.

The files of this folder are the only ones that touch a decoder (PyAV). docs/reading.md says what
becomes of each kind of file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twinreel.data.decode.damage import DamagedError, Lost, damage_error, loss_text
from twinreel.data.decode.frame_stream import FrameStream, Shown
from twinreel.data.decode.packet_times import compare_header
from twinreel.data.decode.pictures import Gathered, Pictures
from twinreel.data.decode.planned import Answer, NotPlain, PlannedReader
from twinreel.data.decode.source import VideoSource
from twinreel.data.transforms import Cut
from twinreel.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Frames", "VideoInfo", "VideoReader", "probe", "read_frames"]

# A key frame behind damage is sought; and where H.264 frames refer to before their key frame, the one before it.
_WAYS_AROUND_DAMAGE = 2


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What a file holds. `height` and `width` are as shown; `rotation` (degrees counterclockwise) is applied already.

    `frame_rate` is the average in Hz, 0 where it is not known. It informs; frames are found by their times.
    `num_frames` is counted by `probe`, where the packets of the file tell it without decoding.
    """

    path: str
    duration_seconds: float
    frame_rate: float
    height: int
    width: int
    codec: str
    rotation: int
    warnings: tuple[str, ...] = ()
    num_frames: int | None = None


@dataclass(slots=True)
class Frames:
    """Chosen frames: `data` uint8 (T, H, W, 3) RGB as shown, `pts_seconds` float64 (T,) from the first shown frame.

    `num_held` counts the frames that repeat the last one because the video had ended, `num_missing` those that were
    asked for and are lost by damage (only with `allow_partial`; of a window about as many, 0 if that is not known).
    """

    data: Tensor
    pts_seconds: Tensor
    warnings: tuple[str, ...] = ()
    num_held: int = 0
    num_missing: int = 0


def probe(source: VideoSource) -> VideoInfo:
    """What the file holds; DataError naming the path and what the file is if no frame of it can be read.

    Count, rate and duration are those of the packets, with a warning where the header says otherwise or nothing. Only
    the first frame is decoded: damage is found by reading.
    """
    with VideoReader(source) as reader:
        info = reader.info
        num_frames, frame_rate, warnings = compare_header(reader._stream)
        if missing := reader.missing_bytes:
            warnings.append(f"the file is cut short: {missing} bytes are missing")
        warnings = [*info.warnings, *warnings]
        return dataclasses.replace(info, num_frames=num_frames, frame_rate=frame_rate, warnings=tuple(warnings))


def read_frames(
    source: VideoSource,
    *,
    start_seconds: float | None = None,
    end_seconds: float | None = None,
    at: Sequence[float] | None = None,
    allow_partial: bool = False,
) -> Frames:
    """The frames of a window of the file, of the whole file, or those on show `at` some times.

    `source` is a path, the bytes of a file, or a seekable file object opened in binary mode. With `allow_partial` what
    is readable of a damaged file is taken, with a warning that says what is lost. `VideoReader.frames_between` and
    `VideoReader.frames_at` say what exactly is chosen and what is refused.
    """
    if at is not None and (start_seconds is not None or end_seconds is not None):
        raise ConfigError("read_frames: give either a window (start_seconds, end_seconds) or times (at), not both")
    with VideoReader(source) as reader:
        if at is None:
            return reader.frames_between(start_seconds, end_seconds, allow_partial=allow_partial)
        return reader.frames_at(at, allow_partial=allow_partial)


class VideoReader:
    """An open file that gives frames at any times, in any order, with as little decoding as is exact.

    Use it as a context manager. Opening it decodes the first frame, so a file without a readable one is refused at
    once (DataError saying what the file is). It can't be pickled or shared between threads or forked processes: open
    it where it is used.
    """

    def __init__(self, source: VideoSource) -> None:
        """Open a path, the bytes of a file, or a seekable binary file object (which stays open after `close`)."""
        self._stream = FrameStream(source)
        self.path = self._stream.path
        self._plan: PlannedReader | None = None
        self._answered_until = math.inf  # the latest time of the call before
        self._stand_on(self._stream.first)
        self._pictures = Pictures(self.path, self._stream.first.frame, self._stream.warnings)

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
    def tolerance(self) -> float:
        """By how many seconds a time may miss the frame that is meant."""
        return self._stream.tolerance

    @property
    def clock(self) -> tuple[float, bool]:
        """Seconds of a tick of the video's times, and whether its header declares a duration (Matroska's does not)."""
        return self._stream.tick_seconds, self._stream.video.duration is not None

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
        codec, rotation = stream.video.codec_context.codec.canonical_name, stream.first.frame.rotation % 360
        return VideoInfo(
            self.path,
            duration,
            stream.rate,
            self._pictures.height,
            self._pictures.width,
            codec,
            rotation,
            tuple(warnings),
        )

    def frames_at(
        self,
        times: Sequence[float],
        *,
        hold_last: bool = False,
        cut: Cut | None = None,
        allow_partial: bool = False,
    ) -> Frames:
        """The frame on show at each of `times` (seconds, in any order); one frame may answer several times.

        With `cut`, that part of each frame, scaled: `data` is then (T, cut.size, cut.size, 3).

        With `hold_last` a time after the end gives the last frame, counted in `num_held`, as long as the earliest
        time lies within the video. DataError for any other time outside it, and where the file is damaged; with
        `allow_partial` the times at which frames are lost are left out instead, counted in `num_missing`, with a
        warning (DataError if none is left).
        """
        if isinstance(times, (int, float)):
            raise ConfigError(f"{self.path}: times are a list of seconds; got {times!r}: write [{times!r}]")
        if cut is not None:
            self._pictures.check_cut(cut)
        wanted = [float(time) for time in times]
        if not wanted or not all(map(math.isfinite, wanted)):
            raise DataError(f"{self.path}: frames wanted at {wanted}; give at least one time, all of them finite")
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        pts_seconds = [math.nan] * len(wanted)
        num_held = 0
        losses: list[Lost] = []
        gathered = Gathered(len(wanted), cut)
        for answer in self._answers([wanted[index] for index in order], hold_last, losses, allow_partial):
            rows = [order[position] for position in answer.positions]
            gathered.add(self._pictures.rgb(answer.frame), rows)
            for row in rows:
                pts_seconds[row] = answer.pts_seconds
            num_held += answer.num_held
        data, pts = gathered.data(), torch.tensor(pts_seconds, dtype=torch.float64)
        warnings = list(self._stream.warnings)
        num_missing = int(pts.isnan().sum())
        if num_missing == len(wanted):
            raise damage_error(self.path, f"{len(wanted)} times", losses)
        if num_missing:
            warnings.append(loss_text(losses, f"{num_missing} of the {len(wanted)} frames asked for are missing"))
            data, pts = data[~pts.isnan()], pts[~pts.isnan()]
        return Frames(data, pts, tuple(warnings), num_held, num_missing)

    def _answers(
        self, times: Sequence[float], hold_last: bool, losses: list[Lost], allow_partial: bool
    ) -> Iterator[Answer]:
        """The frames on show at ascending times; in the planned way as far as it goes, then in the careful one.

        With `allow_partial`, what is lost is added to `losses` and left out.
        """
        answered = 0
        if self._plan_helps(times[0]):
            assert self._plan is not None
            try:
                for answer in self._plan.frames_at(times, hold_last=hold_last):
                    yield answer
                    answered += len(answer.positions)
            except NotPlain:
                pass
        self._answered_until = times[-1]
        shown: Answer | None = None
        for position in range(answered, len(times)):
            if any(lost.covers(times[position] + self._stream.tolerance) for lost in losses):
                continue
            try:
                held = self._go_to(times[position], hold=hold_last and position > 0)
            except DamagedError as damage:
                if not allow_partial:
                    raise
                losses.append(damage.lost)
                continue
            if shown is not None and shown.frame is self._current.frame:
                shown.positions.append(position)
                shown.num_held += held
                continue
            if shown is not None:
                yield shown
            shown = Answer(self._current.frame, self._current.pts_seconds, [position], int(held))
        if shown is not None:
            yield shown

    def _plan_helps(self, seconds: float) -> bool:
        """Whether a planned read from `seconds` is possible, and less work than decoding on from the call before."""
        if self._plan is None and PlannedReader.can_read(self._stream):
            self._plan = PlannedReader(self._stream)
        return self._plan is not None and not self._plan.goes_on(self._answered_until, seconds)

    def frames_between(
        self, start_seconds: float | None = None, end_seconds: float | None = None, *, allow_partial: bool = False
    ) -> Frames:
        """The frames that appear within `[start_seconds, end_seconds)`; without limits the whole video.

        Where none appears within the window (a still stretch of variable rate, a window shorter than a frame): the
        one frame on show at its start. A window that is partly outside the video gives what there is, with a warning.
        DataError for a window that is wholly outside, empty, or damaged within; with `allow_partial` the frames that
        are readable, and a warning that says what is lost (DataError if none is readable).
        """
        start = 0.0 if start_seconds is None else float(start_seconds)
        end = math.inf if end_seconds is None else float(end_seconds)
        asked = f"the window [{start:g}, {end:g}) s"
        if not start < end or math.isinf(start):
            raise DataError(f"{self.path}: {asked} is empty; give one that ends after it starts")
        if end <= 0:
            raise self._outside(asked)
        chosen, losses = self._appearing(max(0.0, start), end, asked, allow_partial)
        if losses and not (allow_partial and chosen):
            raise damage_error(self.path, asked, losses)
        warnings = list(self._stream.warnings)
        if start < 0:
            warnings.append(f"{asked} starts before the video")
        duration = self._stream.duration_seconds if self._is_beyond(end) else math.inf
        if math.inf > end > duration + self._stream.tolerance:
            warnings.append(f"{asked} ends after the video, which has {duration:.3f} s")
        num_missing = self._stream.count_lost(losses, max(0.0, start), end)
        if losses:
            missing = (
                f"about {num_missing} of the frames asked for are missing" if num_missing else "how many is not known"
            )
            warnings.append(loss_text(losses, missing))
        data = torch.from_numpy(np.stack([picture for picture, _ in chosen]))
        pts_seconds = torch.tensor([pts for _, pts in chosen], dtype=torch.float64)
        return Frames(data, pts_seconds, tuple(warnings), num_missing=num_missing)

    def _appearing(
        self, start: float, end: float, asked: str, allow_partial: bool
    ) -> tuple[list[tuple[NDArray[np.uint8], float]], list[Lost]]:
        """Pictures and times of a window, or the one on show at its start, and what of the window is lost.

        Without `allow_partial` the pictures are not kept once something is lost.
        """
        chosen: list[tuple[NDArray[np.uint8], float]] = []
        losses: list[Lost] = []
        tolerance, on_show = self._stream.tolerance, True
        try:
            self._go_to(start, asked=asked)
        except DamagedError as damage:
            on_show = False
            if self._current.pts_seconds > start + tolerance:  # else it is found again below
                losses.append(damage.lost)
        taken = on_show and self._current.pts_seconds >= start - tolerance
        taken = taken or start + tolerance < self._current.pts_seconds < end - tolerance
        while True:
            if losses and not allow_partial:
                chosen.clear()
            elif taken:
                chosen.append((self._pictures.rgb(self._current.frame), self._current.pts_seconds))
            upcoming = self._peek()
            lost = self._lost_before(upcoming)
            if lost is not None and end > lost.start_seconds + tolerance:
                losses.append(lost)
            if upcoming is None or upcoming.pts_seconds >= end - tolerance:
                break
            self._step()
            taken = True
        if not chosen and on_show and (allow_partial or not losses):
            chosen.append((self._pictures.rgb(self._current.frame), self._current.pts_seconds))
        return chosen, losses

    def _lost_before(self, upcoming: Shown | None) -> Lost | None:
        """What is lost between the current frame and the next good one."""
        gap = self._stream.lost_at_end if upcoming is None else upcoming.gap
        until = None if upcoming is None else upcoming.pts_seconds
        return Lost(self._current.end_seconds, until, gap) if gap else None

    def _is_beyond(self, end: float) -> bool:
        """Whether a window ends after the current frame, which is the last one."""
        return math.inf > end > self._current.end_seconds + self._stream.tolerance and self._peek() is None

    def frame_times(self) -> list[float]:
        """When each frame of the video appears, seconds, ascending; the times of `frames_between()` in a sound file.

        Read from the packets without decoding, once; where they do not tell (raw streams, B-frames in an AVI, fields),
        by decoding the whole file. Of a damaged file those frames are among them whose packets are there.
        """
        return list(self._stream.times)

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
        if self._plan is not None:
            self._plan.forget()
        behind = self._stream.is_moved or latest < self._current.pts_seconds
        landed = None
        if behind or (self._is_past_upcoming(latest) and self._stream.seek_helps(self._current, seconds)):
            landed = self._land(seconds)
        damage = self._advance(latest, asked)
        for _ in range(_WAYS_AROUND_DAMAGE):
            if damage is None or landed == 0.0:
                break
            landed = self._land(seconds if landed is None else max(0.0, landed - 2 * self._stream.tolerance))
            damage = self._advance(latest, asked)
        if damage is not None:
            raise damage
        if self._upcoming is not None or seconds < max(self._current.end_seconds, self._stream.duration_seconds):
            return False
        if not hold:
            raise self._outside(asked)
        return True

    def _land(self, seconds: float) -> float:
        """Stand on a frame at or before `seconds` from which on decoding is exact; its time."""
        self._stand_on(self._stream.seek(self._stream.first if self._stream.is_moved else self._current, seconds))
        return self._current.pts_seconds

    def _advance(self, latest: float, asked: str) -> DamagedError | None:
        """Step on to the last frame that appears up to `latest`; the error if frames are lost just there."""
        while (upcoming := self._peek()) is not None and upcoming.pts_seconds <= latest:
            self._step()
        if latest < self._current.pts_seconds:
            beginning = Lost(0.0, self._current.pts_seconds, self._current.gap or "its beginning is missing")
            return damage_error(self.path, asked, [beginning])
        lost = self._lost_before(upcoming)
        if lost is not None and latest >= lost.start_seconds:
            return damage_error(self.path, asked, [lost])
        return None

    def _is_past_upcoming(self, seconds: float) -> bool:
        return not self._peeked or (self._upcoming is not None and self._upcoming.pts_seconds <= seconds)

    def _outside(self, asked: str) -> DataError:
        duration = self._stream.duration_seconds
        return DataError(
            f"{self.path}: {asked} lies outside the video, which has {duration:.3f} s from its first frame"
        )
