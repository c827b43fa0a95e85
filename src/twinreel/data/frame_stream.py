"""An open file as a stream of good frames in display order. The lower half of `decode.py`; nobody else imports it.

It knows what PyAV and the containers do: clocks, seeks that land late, decoder delay, damage. Three rules make it
exact. After a seek, a frame counts only if it is a key frame at or before the wanted time; else the seek is tried from
earlier, in the end from the beginning. After a loss, nothing counts until a key frame that is shown after all that was
lost. Times are those of the packets.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import av
from av.codec.context import ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard, Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from twinreel.data.filetype import describe_file, missing_bytes
from twinreel.errors import DataError

__all__ = ["FAILURES", "FrameStream", "Shown", "failure_text"]

FAILURES = (av.FFmpegError, OSError, ValueError, RuntimeError)  # what PyAV raises about a file
_MP4 = "mov,mp4,m4a,3gp,3g2,mj2"
_INDEXED_FORMATS = (_MP4, "avi")  # FFmpeg reads their whole index when it opens them
_WITHOUT_PTS = ("avi", "matroska,webm")  # Matroska only where it wraps the codecs of an AVI
_SPARSE_TIMES = ("mpeg",)  # most packets have none: what is guessed for them after a seek is not what it was before
_NOT_VIDEOS = ("concat", "hls", "dash", "image2", "tty")  # lists of other files; and `*_pipe`, single images
_NO_VIDEO = Disposition.attached_pic.value | Disposition.timed_thumbnails.value
_DEFAULT = Disposition.default.value
_GEN_PTS = 0x1  # AVFMT_FLAG_GENPTS, which PyAV sets
_BROADCASTS = ("mpegts", "mpeg", "h264", "hevc", "m4v", "mpegvideo", "obu", "av1")  # may begin anywhere
_SILENT_DECODERS = ("h264", "hevc")  # they leave out what they can't decode
_SEEK_BACK_SECONDS = (0.0, 1.0, 4.0, 16.0, 64.0)  # a seek that lands late is tried again from so much earlier
_SEEK_WORTH_FRAMES = 6  # a seek costs about as much as decoding this many frames, most of it the decoder's delay


@dataclass(slots=True)
class Shown:
    """A good frame, when it appears, when it leaves if nothing follows, and why frames just before it are lost."""

    frame: VideoFrame
    pts_seconds: float
    end_seconds: float
    gap: str | None = None


@dataclass(slots=True)
class _Loss:
    """Something that could not be decoded, and its time in the file if that is known."""

    reason: str
    ticks: int | None


class _Expected:
    """Frames that must still come because their packets went in; `times` are theirs.

    Decoders of H.264 and HEVC leave out what they can't decode, without an error.
    """

    def __init__(self, watched: bool, started: bool) -> None:
        self.times: set[int] = set()
        self._watched = watched
        self._started = started
        self._first_key: int | None = None
        self._begun = False

    def send(self, packet: Packet[VideoStream]) -> None:
        """Note a packet. Frames shown before the first key frame need what came before it, and don't count."""
        if not self._watched or packet.pts is None or packet.is_discard:
            return
        if self._first_key is None and (self._started or packet.is_keyframe):
            self._first_key = packet.pts
        if self._first_key is not None and packet.pts >= self._first_key:
            self.times.add(packet.pts)

    def take(self, frame: VideoFrame) -> int | None:
        """Note a frame; the latest time before it at which one should have come, None if all are there."""
        if not self.times or frame.pts is None:
            return None
        if frame.interlaced_frame:  # each of the two fields may have its own packet, and only one of them a frame
            self._watched = False
            self.times.clear()
            return None
        gone = [time for time in self.times if time < frame.pts]
        self.times.difference_update(gone, (frame.pts,))
        excused = not (self._begun or frame.key_frame)  # a picture that was refreshed bit by bit has no key frame
        self._begun = True
        return None if excused else max(gone, default=None)


class FrameStream:
    """Frames of one file from its beginning or from a seek on, with seconds that count from the first shown frame.

    Attributes:
        path: the file.
        warnings: what is odd about the file, as far as it has been read: an ordered set.
        first: the first frame of the file.
        rate: average frame rate in Hz, 0 if it is not known.
        tolerance: by how many seconds a time may miss a frame that is meant.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.warnings: dict[str, None] = {}
        self._clock: Literal["pts", "dts", "count"] | None = None
        self._origin: int | None = None  # ticks of second 0
        self._trouble: str | None = None  # what the decoder complained about last
        self._key_gap_seconds = 2.0  # how far apart key frames are, at least, where the file has no complete index
        self._run: Generator[Shown, None, None]
        self._container: InputContainer
        self.first = self.restart()
        self._note_oddities(self.first.frame)

    def close(self) -> None:
        """Close the file."""
        self._run.close()
        self._container.close()

    def restart(self) -> Shown:
        """Open the file (again); its first frame."""
        if self._clock is not None:
            self.close()
        self._container = _open(self.path)
        try:
            self.video = _video_stream(self._container, self.path)
            rate = self.video.average_rate or self.video.guessed_rate
            self.rate = float(rate) if rate else 0.0
            self._indexed = self._container.format.name in _INDEXED_FORMATS and self.video.frames > 0
            self._run = self._decode()
            first = self.next()
            if first is None:
                why = self._lost or self._trouble or "it holds no data"
                raise DataError(f"{self.path}: no frame of its video can be decoded ({why})")
        except BaseException:
            self._container.close()
            raise
        return first

    def next(self) -> Shown | None:
        """The next good frame in display order; None at the end."""
        return next(self._run, None)

    @property
    def lost_at_end(self) -> str | None:
        """Why frames after the last good one are lost, if they are; to be asked at the end."""
        if self._lost is None and self.missing_bytes:
            return f"the file is cut short: {self.missing_bytes} bytes are missing"
        return self._lost

    @cached_property
    def missing_bytes(self) -> int:
        """By how many bytes the file is shorter than its container declares."""
        return missing_bytes(self.path)

    def seek_helps(self, shown: Shown, seconds: float) -> bool:
        """Whether a key frame lies far enough ahead of `shown`, at or before `seconds`, that a seek saves decoding."""
        frame_seconds = shown.end_seconds - shown.pts_seconds
        if not self._seekable or seconds < shown.end_seconds + _SEEK_WORTH_FRAMES * frame_seconds:
            return False
        entries = self.video.index_entries
        position = entries.search_timestamp(self._ticks_at(seconds))
        if position >= 0 and self._last_dts is not None:
            ahead = entries[position].timestamp - self._last_dts
            if ahead * self._tick_seconds > _SEEK_WORTH_FRAMES * frame_seconds:
                return True
        return not self._indexed and seconds - shown.pts_seconds > self._key_gap_seconds

    def seek(self, shown: Shown, seconds: float) -> Shown:
        """From standing on `shown`: a frame at or before `seconds` from which on decoding is exact.

        It is the first frame of the file if no other can be reached.
        """
        landed = self._land_before(seconds) or self.restart()
        if landed.pts_seconds <= shown.pts_seconds < seconds:  # nothing was saved: key frames are rarer
            self._key_gap_seconds = max(self._key_gap_seconds, seconds - landed.pts_seconds)
        return landed

    def _land_before(self, seconds: float) -> Shown | None:
        """A frame at or before `seconds`, reached by a seek; tried from earlier and earlier."""
        for back in _SEEK_BACK_SECONDS:
            if not self._seekable or (back and back >= seconds):
                break
            landed = self._land(seconds - back)
            if landed is not None and landed.pts_seconds <= seconds + self.tolerance:
                return landed
        return None

    def _land(self, seconds: float) -> Shown | None:
        """The first frame after a seek to `seconds`; None if there is none or if it can't be trusted."""
        depth = self.video.codec_context.reorder_depth
        self._run.close()
        try:
            self._container.seek(self._ticks_at(seconds), stream=self.video)
        except FAILURES:
            return None
        self.video.codec_context.reorder_depth = depth  # flushing may forget it, and then B-frames are dropped
        self._run = self._decode()
        landed = self.next()
        if landed is None or not (landed.frame.key_frame or landed.pts_seconds == self.first.pts_seconds):
            return None
        return landed

    def _decode(self) -> Generator[Shown, None, None]:
        """Good frames in display order from where the container stands. A loss is told by the next good frame.

        After a loss only a key frame is good again, and only one that is shown after all that was lost: a decoder
        may give out a key frame that it had read before the damage.
        """
        self._lost: str | None = None
        self._last_dts: int | None = None
        lost_ticks = -math.inf
        before: int | None = None  # when the frame before appeared, and the last good one
        shown: int | None = None
        step = 0
        for item in self._pictures():
            if isinstance(item, _Loss):
                self._lost = self._lost or item.reason
                lost_ticks = max(lost_ticks, -math.inf if item.ticks is None else item.ticks)
                continue
            ticks = self._frame_ticks(item, before, step)
            if item.is_corrupt:
                self._lost, lost_ticks = self._lost or "a damaged frame", max(lost_ticks, ticks)
            # An AVI may count in fields: the distance of two frames is right then, their own duration is not.
            step = ticks - before if self._clock == "dts" and before is not None else item.duration
            step = 1 if self._clock == "count" else step or self._usual_step
            gap, before = self._lost, ticks
            if gap is not None and not (item.key_frame and ticks > lost_ticks and self._clock != "count"):
                continue
            if self._is_behind_cut(shown, ticks, step):
                gap = self.lost_at_end
                if self._clock == "dts":
                    return  # the times of such frames are not known
            shown = ticks
            yield Shown(item, self._seconds(ticks), self._seconds(ticks + step), gap)
            self._lost = None

    def _is_behind_cut(self, shown: int | None, ticks: int, step: int) -> bool:
        """Whether frames before this one went with the end of a file that was cut short: B-frames come late in it."""
        if not self._drained or not self.missing_bytes:
            return False
        return self._clock == "dts" or (shown is not None and ticks - shown > 1.5 * step)

    def _frame_ticks(self, frame: VideoFrame, before: int | None, step: int) -> int:
        """When a frame appears, in units of the file's clock. The first frame ever sets second 0."""
        if self._clock == "count":
            ticks: int | None = 0 if before is None else before + 1
        else:
            # AVI has decoding times alone; a decoder gives its frames out in display order, so they serve.
            ticks = frame.dts if self._clock == "dts" or frame.pts is None else frame.pts
        if ticks is None:
            ticks = 0 if before is None else before + (step or self._usual_step)
        if before is not None and ticks <= before:
            self.warnings["times of frames do not increase everywhere: one hides the other"] = None
            ticks = before
        if self._origin is None:
            # Where the very beginning is lost the header knows when it was.
            began = self.video.start_time if self._lost or frame.is_corrupt else None
            self._origin = ticks if began is None else min(began, ticks)
        return ticks

    def _pictures(self) -> Generator[VideoFrame | _Loss, None, None]:
        """What the decoder gives for the packets from where the container stands, and what it fails on.

        What comes before the first key packet of a broadcast that was tuned in to can't be decoded: that is no loss.
        """
        packets = self._container.demux(self.video)
        name = self._container.format.name
        started = name not in _BROADCASTS
        expected = _Expected(self.video.codec_context.name in _SILENT_DECODERS and name != "avi", started)
        self._drained = False
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except FAILURES as error:
                yield _Loss(failure_text(error), None)
                return
            if self._clock is None:
                self._set_clock(packet)
            at = packet.dts if packet.pts is None else packet.pts
            self._last_dts = packet.dts
            self._drained = packet.size == 0
            expected.send(packet)
            started = started or packet.is_keyframe
            if started and (packet.is_corrupt or self._is_misplaced(packet)):
                yield _Loss(
                    "an incomplete packet" if packet.is_corrupt else "its parts are not where its index says", at
                )
            try:
                frames = packet.decode()
            except FAILURES as error:
                self._trouble = failure_text(error)
                if started:
                    yield _Loss(self._trouble, at)
                continue
            for frame in frames:
                if frame.is_corrupt and not started:
                    continue
                missing = expected.take(frame)
                if missing is not None:
                    yield _Loss("frames are missing", missing)
                started = True
                yield frame
            if self._drained and expected.times:
                yield _Loss("frames are missing", max(expected.times))

    def _is_misplaced(self, packet: Packet[VideoStream]) -> bool:
        """Whether a packet of an AVI is not the one of its index: after damage FFmpeg goes on, counting wrongly."""
        if self._place is None or packet.size == 0 or packet.dts is None or packet.pos is None:
            return False
        entries = self.video.index_entries
        entry = entries[entries.search_timestamp(packet.dts, any_frame=True)]
        return (entry.timestamp, entry.size, entry.pos - packet.pos) != (packet.dts, packet.size, self._place)

    def _set_clock(self, packet: Packet[VideoStream]) -> None:
        """Decide from the first packet what the times of frames are made of, and refuse an encrypted file."""
        if packet.has_sidedata("encryption_info"):
            raise DataError(f"{self.path}: the video is encrypted; decrypt it first")
        unit = self.video.time_base
        if unit is None or (packet.dts is None and packet.pts is None):
            rate = self.video.average_rate or self.video.guessed_rate or Fraction(25)
            self._clock, unit = "count", 1 / rate
            self.warnings[f"the file stores no times: frames are counted at its {float(rate):g} Hz"] = None
        else:
            self._clock = "pts" if packet.pts is not None else "dts"
        self._place: int | None = None  # how far before the data of a packet its index entry points
        entries = self.video.index_entries
        if self._container.format.name == "avi" and len(entries) and packet.pos is not None:
            self._place = entries[0].pos - packet.pos
            self._place = None if self._is_misplaced(packet) else self._place  # an index that is wrong from the start
        self._unit = (unit.numerator, unit.denominator)
        self._tick_seconds = float(unit)
        self._seekable = self._clock != "count" and self._container.format.name not in _SPARSE_TIMES
        self._usual_step = max(1, round(1 / (self.rate * self._tick_seconds))) if self.rate else 1
        # Files round times to their ticks: a frame belongs to a time that it misses by less than that.
        self.tolerance = min(self._tick_seconds, 1e-3, 0.25 / self.rate if self.rate else math.inf) + 1e-9

    def _seconds(self, ticks: int) -> float:
        assert self._origin is not None
        return (ticks - self._origin) * self._unit[0] / self._unit[1]

    def _ticks_at(self, seconds: float) -> int:
        assert self._origin is not None
        return self._origin + math.floor((seconds + self.tolerance) / self._tick_seconds)

    def _note_oddities(self, first: VideoFrame) -> None:
        if first.interlaced_frame:
            self.warnings["the video is interlaced: both fields are woven into one frame"] = None
        if first.color_trc in (16, 18):  # SMPTE ST 2084 (PQ), ARIB STD-B67 (HLG)
            self.warnings["the video has a high dynamic range: not tone-mapped"] = None
        others = len(self._container.streams.video) - 1
        if others:
            self.warnings[f"other video streams are left out ({others}): number {self.video.index} is read"] = None

    @cached_property
    def declared_seconds(self) -> float | None:
        """The header's duration where it can be relied on: MP4 and MOV with a complete index and a constant rate."""
        video = self.video
        constant = video.average_rate is not None and video.average_rate == video.base_rate
        if self._clock != "pts" or not (self._indexed and constant and self._container.format.name == _MP4):
            return None
        return video.duration * self._unit[0] / self._unit[1] if video.duration else None

    @cached_property
    def duration_seconds(self) -> float:
        """From the first shown frame to the end of the last one: the header's if it is right, else by the packets."""
        if self.declared_seconds is not None:
            return self.declared_seconds
        measured = self._measured_seconds()
        header = self._header_seconds()
        if header is None:
            self.warnings[f"the header gives no duration: {measured:.3f} s by the times of the packets"] = None
        elif abs(header - measured) > 0.1:
            self.warnings[f"the header says {header:.3f} s, the packets of the video {measured:.3f} s"] = None
        return measured

    def _header_seconds(self) -> float | None:
        if self.video.duration and self._clock != "count":
            return self.video.duration * self._tick_seconds
        return self._container.duration / av.time_base if self._container.duration else None

    def _measured_seconds(self) -> float:
        """The end of the last packets, or of all packets where a seek to the end finds none. Nothing is decoded."""
        if self._clock == "count":
            return self._seconds(len(self._packet_ends(None)))
        goal = self._container.duration / av.time_base if self._container.duration else 0.0
        while goal > 0:
            ends = self._packet_ends(goal)
            if not ends:
                break
            last = max(ends)[0]
            if ends[0][1] or min(ends)[0] < last - 1.0:
                return last
            goal = min(goal, last) - 2.0  # it landed between key frames, perhaps behind the frame that is shown last
        return max([(self.first.end_seconds, True), *self._packet_ends(None)])[0]

    def _packet_ends(self, seconds: float | None) -> list[tuple[float, bool]]:
        """When the packets from `seconds` on (of the whole file without) end, and which are key frames."""
        ends: list[tuple[float, bool]] = []
        container = _open(self.path)
        try:
            video = _video_stream(container, self.path)
            if seconds is not None:
                container.seek(self._ticks_at(seconds), stream=video)
            for packet in container.demux(video):
                if packet.size:
                    ends.append((self._packet_end(packet), packet.is_keyframe))
        except FAILURES as error:
            self._trouble = failure_text(error)  # the end of what can be read; reading frames there says so
        finally:
            container.close()
        return ends

    def _packet_end(self, packet: Packet[VideoStream]) -> float:
        at, shift = packet.pts, 0
        if at is None or self._clock == "dts":
            # A frame carries the time of the packet that pushed it out of the decoder.
            at, shift = packet.dts or 0, self.video.codec_context.reorder_depth * self._usual_step
        return self._seconds(at + shift + (packet.duration or self._usual_step))


def failure_text(error: BaseException) -> str:
    """What PyAV complains about, without the number and the name of the C function."""
    return getattr(error, "strerror", None) or str(error)


def _open(path: str) -> InputContainer:
    """Open a local file and nothing else: no network, no lists of other files, no single images."""
    try:
        # The prefix keeps a colon in a path from being taken for the end of a protocol.
        container = av.open(f"file:{path}", options={"protocol_whitelist": "file"}, metadata_errors="replace")
    except FAILURES as error:
        what = describe_file(path) or f"FFmpeg says: {failure_text(error)}"
        raise DataError(f"{path}: can't be read as a video: {what}") from error
    name = container.format.name
    if name in _NOT_VIDEOS or name.endswith("_pipe"):
        container.close()
        raise DataError(f"{path}: can't be read as a video: {describe_file(path) or name}")
    if name in _WITHOUT_PTS:
        container.flags &= ~_GEN_PTS  # the times that it would invent are wrong for packed B-frames
    return container


def _video_stream(container: InputContainer, path: str) -> VideoStream:
    """The default video stream, set up to be decoded alone and in one thread; cover pictures are no video."""
    streams = [stream for stream in container.streams.video if not stream.disposition.value & _NO_VIDEO]
    if not streams:
        if what := describe_file(path):
            raise DataError(f"{path}: can't be read as a video: {what}")
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise DataError(f"{path}: no video stream (the file holds: {kinds})")
    chosen = next((stream for stream in streams if stream.disposition.value & _DEFAULT), streams[0])
    context: Any = chosen.codec_context
    if context is None:
        raise DataError(f"{path}: its video has a codec that this FFmpeg can't decode")
    context.thread_type, context.thread_count = ThreadType.NONE, 1
    for stream in container.streams:
        if stream is not chosen:
            stream.discard = Discard.all
    return chosen
