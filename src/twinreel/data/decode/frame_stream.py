"""An open file as a stream of good frames in display order. Reading in order, the careful way.

It knows what PyAV and the containers do: clocks, seeks that land late, decoder delay, damage. Three rules make it
exact. After a seek, a frame counts only if it is a key frame at or before the wanted time; else the seek is tried from
earlier, in the end from the beginning. After a loss, nothing counts until a key frame that is shown after all that was
lost. Times are those of the packets.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from twinreel.data.decode.checksums import ClusterSums
from twinreel.data.decode.container import (
    FAILURES,
    MP4,
    PLAIN_FORMATS,
    failure_text,
    is_alpha,
    open_container,
    video_stream,
)
from twinreel.data.decode.damage import Lost
from twinreel.data.decode.expected import ExpectedTimes, OwedFrames
from twinreel.data.decode.filetype import describe_file, missing_bytes
from twinreel.data.decode.packet_times import duration_seconds, packet_times
from twinreel.data.decode.references import References
from twinreel.data.decode.source import FileSource, VideoSource, file_source
from twinreel.errors import DataError

__all__ = ["FAILURES", "FrameStream", "Shown", "failure_text"]

_INDEXED_FORMATS = (MP4, "avi")  # FFmpeg reads their whole index when it opens them
_SPARSE_TIMES = ("mpeg",)  # most packets have none: what is guessed for them after a seek is not what it was before
_DELAYED_CODECS = ("h264", "hevc")
_BROADCASTS = ("mpegts", "mpeg", "h264", "hevc", "m4v", "mpegvideo", "obu", "av1")  # may begin anywhere
_SEEK_BACK_SECONDS = (0.0, 1.0, 4.0, 16.0, 64.0)  # a seek that lands late is tried again from so much earlier
_MOST_LOST_SEEKS = 3  # then it is read in order: a video that is refreshed bit by bit has no key frames
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


class FrameStream:
    """Frames of one file from its beginning or from a seek on, with seconds that count from the first shown frame.

    Attributes:
        source: the file.
        path: its name for errors.
        warnings: what is odd about the file, as far as it has been read: an ordered set.
        first: the first frame of the file.
        rate: average frame rate in Hz, 0 if it is not known.
        clock: what times of frames are made of: presentation times, decoding times, or a count.
        tick_seconds: the unit of the file's clock.
        can_seek: whether frames have times by which the file can be sought in.
        usual_step: from one frame to the next, in that unit.
        is_moved: whether others have moved the file, so that `next` must wait for a seek.
        tolerance: by how many seconds a time may miss a frame that is meant.
    """

    def __init__(self, source: VideoSource | FileSource) -> None:
        self.source = file_source(source)
        self.path = self.source.name
        self.warnings: dict[str, None] = {}
        self.clock: Literal["pts", "dts", "count"] | None = None
        self._origin: int | None = None  # ticks of second 0
        self._trouble: str | None = None  # what the decoder complained about last
        self._key_gap_seconds = 2.0  # how far apart key frames are, at least, where the file has no complete index
        self._spare: InputContainer | None = None  # lends its decoder after damage
        self._met_damage = False
        self._num_lost_seeks = 0  # in a row
        self.is_moved = False
        self.can_seek = False
        self.usual_step = 1
        self._run: Generator[Shown, None, None]
        self.container: InputContainer
        self._open()
        self.first = self._first_alone() or self._first_in_order()
        self._note_oddities(self.first.frame)

    def close(self) -> None:
        """Close the file."""
        self._run.close()
        self.container.close()
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def restart(self) -> Shown:
        """Open the file again; its first frame."""
        self.close()
        self._open()
        return self._first_in_order()

    def _first_in_order(self) -> Shown:
        try:
            first = self.next()
            if first is None:
                why = describe_file(self.source) or self._lost or self._trouble or "it holds no data"
                raise DataError(f"{self.path}: no frame of its video can be decoded ({why})")
        except BaseException:
            self.container.close()
            raise
        return first

    def _open(self) -> None:
        self.container = open_container(self.source)
        try:
            self._take_stream()
        except BaseException:
            self.container.close()
            raise
        rate = self.video.average_rate or self.video.guessed_rate
        self.rate = float(rate) if rate else 0.0
        self.is_indexed = self.container.format.name in _INDEXED_FORMATS and self.video.frames > 0

    def _first_alone(self) -> Shown | None:
        """The first frame without those that a decoder with a delay decodes before it gives it out.

        The file is moved then. None, and the file is as just opened, where not everything is as it should be.
        """
        if self.container.format.name not in PLAIN_FORMATS or self.video.codec_context.name not in _DELAYED_CODECS:
            return None
        try:
            frame = self._lone_frame()
        except FAILURES:
            frame = None
        except BaseException:
            self.container.close()
            raise
        if frame is None or frame.pts is None:
            self.container.close()
            self._open()
            return None
        self._origin, self.is_moved = frame.pts, True
        return Shown(frame, 0.0, self.seconds(frame.pts + (frame.duration or self.usual_step)))

    def _lone_frame(self) -> VideoFrame | None:
        packets = self.container.demux(self.video)
        first = next(packets, None)
        if first is None or first.pts is None or first.is_discard or not first.is_keyframe:
            return None
        self._set_clock(first)
        packet: Packet[VideoStream] | None = first
        while packet is not None and packet.size and packet.dts is not None and packet.dts < first.pts:
            packet = next(packets, None)
            if packet is not None and packet.pts is not None and packet.pts < first.pts:
                return None  # what leads the key frame may be shown
        if self.fault_of(first) is not None or packet is None or packet.dts is None:
            return None
        frames = [*self._decoder.decode(first), *self._decoder.decode(None)]
        sound = len(frames) == 1 and frames[0].pts == first.pts and frames[0].key_frame and not frames[0].is_corrupt
        return frames[0] if sound and not frames[0].interlaced_frame else None

    def _take_stream(self) -> None:
        self.video = video_stream(self.container, self.source)
        self._decoder = self.video.codec_context
        self._is_spoiled = False  # damage may have changed the decoder's parameters, which seeking does not mend
        self.is_moved = False
        self._num_taken = 0
        self._run = self._decode()

    def _renew_decoder(self) -> None:
        """A decoder that has not met the damage, from a second container, for the packets of the first one."""
        if self._spare is not None:
            self._spare.close()
        self._spare = open_container(self.source)
        self._decoder = video_stream(self._spare, self.source).codec_context
        self._is_spoiled = False

    def spoil(self) -> None:
        """Note that a planned read met damage: what it did to the decoder is not known."""
        self._is_spoiled = self._met_damage = True

    def next(self) -> Shown | None:
        """The next good frame in display order; None at the end."""
        self._num_taken += 1
        return next(self._run, None)

    def lend(self) -> InputContainer | None:
        """The open file, to be moved, where nobody stands in it: at its first frame, or moved already."""
        if not (self.is_moved or self._num_taken == 1) or not self.has_plain_times:
            return None
        self.is_moved = True
        return self.container

    @property
    def lost_at_end(self) -> str | None:
        """Why frames after the last good one are lost, if they are; to be asked at the end."""
        if self._lost is None and self.missing_bytes:
            return f"the file is cut short: {self.missing_bytes} bytes are missing"
        return self._lost

    @cached_property
    def missing_bytes(self) -> int:
        """By how many bytes the file is shorter than its container declares."""
        try:
            return missing_bytes(self.source)
        except OSError as error:
            raise DataError(f"{self.path}: can't be read any more: {error.strerror or error}") from error

    def seek_helps(self, shown: Shown, seconds: float) -> bool:
        """Whether a key frame lies far enough ahead of `shown`, at or before `seconds`, that a seek saves decoding."""
        frame_seconds = shown.end_seconds - shown.pts_seconds
        if not self.can_seek or seconds < shown.end_seconds + _SEEK_WORTH_FRAMES * frame_seconds:
            return False
        entries = self.video.index_entries
        position = entries.search_timestamp(self.ticks_at(seconds))
        if position >= 0 and self._last_dts is not None:
            ahead = entries[position].timestamp - self._last_dts
            if ahead * self.tick_seconds > _SEEK_WORTH_FRAMES * frame_seconds:
                return True
        return not self.is_indexed and seconds - shown.pts_seconds > self._key_gap_seconds

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
            if not self.can_seek or (back and back >= seconds):
                break
            landed = self._land(seconds - back)
            if landed is not None and landed.pts_seconds <= seconds + self.tolerance:
                self._num_lost_seeks = 0
                return landed
        self._num_lost_seeks += 1
        self.can_seek = self.can_seek and self._num_lost_seeks < _MOST_LOST_SEEKS
        return None

    def _land(self, seconds: float) -> Shown | None:
        """The first frame after a seek to `seconds`; None if there is none or if it can't be trusted."""
        self._run.close()
        try:
            if self._is_spoiled or self._spare is not None:
                self.close()
                self.container = open_container(self.source)
                self._take_stream()
            depth = self.video.codec_context.reorder_depth
            self.container.seek(self.ticks_at(seconds), stream=self.video)
        except FAILURES:
            return None
        self.video.codec_context.reorder_depth = depth  # flushing may forget it, and then B-frames are dropped
        self.is_moved = False
        self._run = self._decode()
        landed = self.next()
        if landed is None or (landed.frame.pts is None and landed.frame.dts is None):
            return None  # a decoder that was emptied at the end of an AVI does not say when its frame is
        if not (landed.frame.key_frame or landed.pts_seconds == self.first.pts_seconds):
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
            step = ticks - before if self.clock == "dts" and before is not None else item.duration
            step = 1 if self.clock == "count" else step or self.usual_step
            gap, before = self._lost, ticks
            if gap is not None and not (item.key_frame and ticks > lost_ticks and self.clock != "count"):
                continue
            if self._is_behind_cut(shown, ticks, step):
                gap = self.lost_at_end
                if self.clock == "dts":
                    return  # the times of such frames are not known
            shown = ticks
            yield Shown(item, self.seconds(ticks), self.seconds(ticks + step), gap)
            self._lost = None

    def _is_behind_cut(self, shown: int | None, ticks: int, step: int) -> bool:
        """Whether frames before this one went with the end of a file that was cut short: B-frames come late in it."""
        if not self._drained or not self.missing_bytes:
            return False
        return self.clock == "dts" or (shown is not None and ticks - shown > 1.5 * step)

    def _frame_ticks(self, frame: VideoFrame, before: int | None, step: int) -> int:
        """When a frame appears, in units of the file's clock. The first frame ever sets second 0."""
        if self.clock == "count":
            ticks: int | None = 0 if before is None else before + 1
        else:
            # AVI has decoding times alone; a decoder gives its frames out in display order, so they serve.
            ticks = frame.dts if self.clock == "dts" or frame.pts is None else frame.pts
        if ticks is None:
            ticks = 0 if before is None else before + (step or self.usual_step)
        if before is not None and ticks <= before:
            self.warnings["times of frames do not increase everywhere: one hides the other"] = None
            ticks = before
        if self._origin is None:
            # Where the very beginning is lost the header knows when it was.
            began = self.video.start_time if self._lost or frame.is_corrupt else None
            if began is not None and self.clock == "dts":  # it counts from the packet that pushed the frame out
                began += self.video.codec_context.reorder_depth * self.usual_step
            self._origin = ticks if began is None else min(began, ticks)
        return ticks

    def _pictures(self) -> Generator[VideoFrame | _Loss, None, None]:
        """What the decoder gives for the packets from where the container stands, and what it fails on.

        What comes before the first key packet of a broadcast that was tuned in to can't be decoded: that is no loss.
        """
        packets = self.container.demux(self.video)
        codec, name = self.video.codec_context.name, self.container.format.name
        started = name not in _BROADCASTS
        expected = ExpectedTimes(codec, name, started)
        owed, begun = OwedFrames(codec), False
        opens, num_following = False, 0
        first_key: int | None = None  # what is shown before it needs what came before it, and is no loss
        self._drained = False
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except FAILURES as error:
                yield _Loss(failure_text(error), None)
                return
            if self.clock is None:
                self._set_clock(packet)
            at = packet.dts if packet.pts is None else packet.pts
            self._last_dts = packet.dts
            self._drained = packet.size == 0
            expected.send(packet)
            started = started or packet.is_keyframe
            if first_key is None and packet.is_keyframe:
                first_key, opens = packet.pts, References(self.video).opens_group(packet)
            leads = first_key is not None and packet.pts is not None and packet.pts < first_key
            num_following += first_key is not None and not leads
            # The first frame behind such a key frame may drop references that are not there: an error, and no loss.
            excused = leads or (opens and num_following == 2)
            if started and (wrong := self.fault_of(packet)):
                self._met_damage = True
                yield _Loss(wrong, at)
                continue
            if self._is_spoiled and packet.is_keyframe and self._lost:
                self._renew_decoder()
                owed = OwedFrames(codec)
            try:
                frames = self._decoder.decode(packet)
            except FAILURES as error:
                self._trouble = failure_text(error)
                if started and not excused:
                    self._is_spoiled = self._met_damage = True
                    yield _Loss(self._trouble, at)
                continue
            if owed.is_too_many(packet, len(frames), self._decoder.reorder_depth) and started:
                self._is_spoiled = self._met_damage = True
                yield _Loss("a packet without its frame", at)
            for frame in frames:
                if frame.is_corrupt and not started:
                    continue
                missing = expected.take(frame)
                if begun and (missing is not None or frame.is_corrupt):
                    self._is_spoiled = self._met_damage = True
                if missing is not None:
                    yield _Loss("frames are missing", missing)
                started = True
                begun = begun or (frame.key_frame and not frame.is_corrupt)  # what leads it lacks what it needs
                yield frame
            if self._drained and expected.times:
                yield _Loss("frames are missing", max(expected.times))

    def fault_of(self, packet: Packet[VideoStream]) -> str | None:
        """What the container says is wrong with a packet."""
        if _is_encrypted(packet):  # some streams begin in the clear
            return "it is encrypted"
        if packet.is_corrupt:
            joined = self.container.format.name == "mpegts"  # its packet counter breaks there
            return "an incomplete packet, or pieces that were joined" if joined else "an incomplete packet"
        if self._is_misplaced(packet):
            return "its parts are not where its index says"
        try:
            if self._sums is not None and packet.pos is not None and not self._sums.is_sound(packet.pos):
                return "its checksum is wrong"
        except FAILURES as error:
            return failure_text(error)
        return None

    @cached_property
    def _sums(self) -> ClusterSums | None:
        return ClusterSums(self.source) if self.container.format.name == "matroska,webm" else None

    def _is_misplaced(self, packet: Packet[VideoStream]) -> bool:
        """Whether a packet of an AVI is not the one of its index: after damage FFmpeg goes on, counting wrongly."""
        if self._place is None or packet.size == 0 or packet.dts is None or packet.pos is None:
            return False
        entries = self.video.index_entries
        entry = entries[entries.search_timestamp(packet.dts, any_frame=True)]
        return (entry.timestamp, entry.size, entry.pos - packet.pos) != (packet.dts, packet.size, self._place)

    def _set_clock(self, packet: Packet[VideoStream]) -> None:
        """Decide from the first packet what the times of frames are made of, and refuse an encrypted file."""
        if _is_encrypted(packet) or self.video.metadata.get("enc_key_id"):  # MP4; Matroska
            raise DataError(f"{self.path}: the video is encrypted; decrypt it first")
        unit = self.video.time_base
        if unit is None or (packet.dts is None and packet.pts is None):
            rate = self.video.average_rate or self.video.guessed_rate or Fraction(25)
            self.clock, unit = "count", 1 / rate
            self.warnings[f"the file stores no times: frames are counted at its {float(rate):g} Hz"] = None
        else:
            self.clock = "pts" if packet.pts is not None else "dts"
        self._place: int | None = None  # how far before the data of a packet its index entry points
        entries = self.video.index_entries
        if self.container.format.name == "avi" and len(entries) and packet.pos is not None:
            self._place = entries[0].pos - packet.pos
            self._place = None if self._is_misplaced(packet) else self._place  # an index that is wrong from the start
        self._unit = (unit.numerator, unit.denominator)
        self.tick_seconds = float(unit)
        self.can_seek = self.clock != "count" and self.container.format.name not in _SPARSE_TIMES
        self.usual_step = max(1, round(1 / (self.rate * self.tick_seconds))) if self.rate else 1
        # Files round times to their ticks: a frame belongs to a time that it misses by less than that.
        self.tolerance = min(self.tick_seconds, 1e-3, 0.25 / self.rate if self.rate else math.inf) + 1e-9

    @property
    def has_plain_times(self) -> bool:
        """Whether frames have presentation times of their own, the file can be sought in, and no damage was met."""
        return self.clock == "pts" and self.can_seek and not self._met_damage

    def seconds(self, ticks: int) -> float:
        """When a frame appears whose time in the file is `ticks`."""
        assert self._origin is not None
        return (ticks - self._origin) * self._unit[0] / self._unit[1]

    def ticks_at(self, seconds: float) -> int:
        """The latest time in the file, in its ticks, that is not after `seconds`."""
        assert self._origin is not None
        return self._origin + math.floor((seconds + self.tolerance) / self.tick_seconds)

    def _note_oddities(self, first: VideoFrame) -> None:
        if first.interlaced_frame:
            self.warnings["the video is interlaced: both fields are woven into one frame"] = None
        if first.color_trc in (16, 18):  # SMPTE ST 2084 (PQ), ARIB STD-B67 (HLG)
            self.warnings["the video has a high dynamic range: not tone-mapped"] = None
        if is_alpha(self.video, first.format.name):
            self.warnings["the video has transparency: it is left out, the colors below it are given"] = None
        others = len(self.container.streams.video) - 1
        if others:
            self.warnings[f"other video streams are left out ({others}): number {self.video.index} is read"] = None

    @cached_property
    def duration_seconds(self) -> float:
        """From the first shown frame to the end of the last one: the header's if it is right, else by the packets."""
        return duration_seconds(self)

    @cached_property
    def told_times(self) -> list[float] | None:
        """When each frame appears, seconds, by the packets; None where they do not tell."""
        return packet_times(self)

    @cached_property
    def times(self) -> list[float]:
        """When each frame appears, seconds, by the packets or, where they do not tell, by decoding the whole file."""
        if self.told_times is not None:
            return self.told_times
        stream = FrameStream(self.source)
        times = [stream.restart().pts_seconds]
        while (shown := stream.next()) is not None:
            times.append(shown.pts_seconds)
        stream.close()
        return times

    def count_lost(self, losses: Sequence[Lost], start: float, end: float) -> int:
        """About how many frames that appear in `[start, end)` are lost: by the packets, else by the rate."""
        number = 0
        for lost in losses:
            low = max(start, lost.start_seconds - self.tolerance)
            high = min(end, self.duration_seconds if lost.end_seconds is None else lost.end_seconds) - self.tolerance
            told = sum(low <= time < high for time in self.told_times or ())
            by_rate = round(max(0.0, high - low) * self.rate)
            number += max(told, by_rate) if lost.end_seconds is None else told or by_rate
        return number


def _is_encrypted(packet: Packet[VideoStream]) -> bool:
    return packet.has_sidedata("encryption_info")
