"""Frames at known times with the least decoding: packets are read first, then only those that matter are decoded.

From a key frame on, packets are read (not decoded) up to the next one. Their times say which frames are on show when
they are wanted. Then the packets up to the last wanted one are decoded, without those that no other frame needs
(non-reference frames) and whose own frame is not wanted; then the decoder is emptied instead of being fed on.

This works for files whose packets tell everything. A frame is given only if every frame that should have come before
it has come, undamaged. At anything else it stops with `NotPlain`, and `frame_stream.py`, which decodes in order and
knows how files break, answers what is left.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from twinreel.data.decode.container import FAILURES, MP4, PLAIN_FORMATS
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.data.decode.packet_times import gives_frame
from twinreel.data.decode.references import References

__all__ = ["Answer", "NotPlain", "PlannedReader"]

_IN_ORDER = ("vp8", "vp9", "av1", "libdav1d")  # packets come in the order in which their frames are shown
_MOST_PACKETS = 2000  # between two key frames: more are not kept in memory
_MOST_BYTES = 128 << 20
_LATE_SEEKS = 4  # a seek goes by decoding times, and may land on a key frame that is shown too late
_NEAR_SECONDS = 1.0
_SEEK_WORTH_SECONDS = 4.0  # without an index: so much is passed over as quickly as a seek takes


class NotPlain(Exception):
    """This file, or this stretch of it, needs the careful way."""


@dataclass(slots=True)
class Answer:
    """A frame, when it appears, the positions of the times that it answers, and how many of them come after its end."""

    frame: VideoFrame
    pts_seconds: float
    positions: list[int]
    num_held: int = 0


@dataclass(slots=True)
class _Group:
    """What is shown from a key frame to the next one, or to where reading on was of no use.

    `packets` are in decoding order; those of the next key frame and of frames behind it that are shown before it are
    among them where there are such frames. `shown` are the times of all its frames before `end`, ascending ticks; `end`
    is None at the end of the file.
    """

    packets: list[Packet[VideoStream]]
    shown: list[int]
    end: int | None


class PlannedReader:
    """Reads frames of an open file at ascending times. It moves the file; `frame_stream` must begin anew after it."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._codec = stream.video.codec_context.name
        self._references = References(stream.video)
        self._packets: Iterator[Packet[VideoStream]] = iter(())
        self._ahead: deque[Packet[VideoStream]] = deque()  # read, and not part of a group yet; a key frame first
        self._end: float | None = None  # when the group that was read last ends, seconds

    @staticmethod
    def can_read(stream: FrameStream) -> bool:
        """Whether the packets of the file tell enough: times, key frames, nothing cut off."""
        return stream.has_plain_times and stream.container.format.name in PLAIN_FORMATS and not stream.missing_bytes

    def frames_at(self, times: Sequence[float], *, hold_last: bool = False) -> Generator[Answer, None, None]:
        """The frame on show at each of `times` (seconds, ascending), every frame once.

        With `hold_last` times after the end are answered by the last frame, but for the first of `times`.

        Raises:
            NotPlain: the times that no frame has answered yet must be read in the careful way.
        """
        self._stream.is_moved = True
        try:
            answered = 0
            while answered < len(times):
                group = self._group_at(times[answered], times[-1])
                wanted, held, count = self._wanted(group, times, answered, hold_last)
                yield from self._decode(group, wanted, held)
                answered += count
                if not count:
                    raise NotPlain
        except FAILURES as error:
            raise NotPlain from error

    def forget(self) -> None:
        """Where the file stands, because it was moved."""
        self._ahead.clear()

    def goes_on(self, before: float, seconds: float) -> bool:
        """Whether `seconds` lies ahead of `before` with no key frame between them, so that decoding on is less work.

        Without an index that is not always known: a short step counts as one.
        """
        if seconds < before:
            return False
        if self._stream.is_indexed:
            entries = self._stream.video.index_entries
            found = [entries.search_timestamp(self._stream.ticks_at(time)) for time in (before, seconds)]
            return found[0] == found[1]
        return self._end is not None and seconds < max(self._end, before + _NEAR_SECONDS)

    def _wanted(
        self, group: _Group, times: Sequence[float], first: int, hold_last: bool
    ) -> tuple[dict[int, list[int]], int, int]:
        """Which frames of the group answer which of `times[first:]`, how many hold it, and how many are answered."""
        stream = self._stream
        seconds = [stream.seconds(tick) for tick in group.shown]
        wanted: dict[int, list[int]] = {}
        held = 0
        for index in range(first, len(times)):
            latest = times[index] + stream.tolerance
            if group.end is not None and stream.seconds(group.end) <= latest:
                break
            pick = bisect.bisect_right(seconds, latest) - 1
            if pick < 0:
                break
            if group.end is None and pick == len(seconds) - 1 and self._is_over(group, times[index]):
                if not (hold_last and index):
                    break
                held += 1
            wanted.setdefault(group.shown[pick], []).append(index)
        return wanted, held, sum(map(len, wanted.values()))

    def _is_over(self, group: _Group, seconds: float) -> bool:
        """Whether the last frame of the file has left at `seconds`."""
        last = next(packet for packet in group.packets if packet.pts == group.shown[-1])
        end = self._stream.seconds(group.shown[-1] + (last.duration or self._stream.usual_step))
        return seconds >= end and seconds >= self._stream.duration_seconds

    # ---- packets

    def _group_at(self, seconds: float, last_seconds: float) -> _Group:
        """The group in which a frame is on show at `seconds`; none is wanted after `last_seconds`."""
        if self._seek_helps(seconds):
            self._seek(seconds)
        latest = seconds + self._stream.tolerance
        while True:
            if not self._ahead:
                raise NotPlain
            group = self._read_group(self._stream.ticks_at(last_seconds))
            self._end = math.inf if group.end is None else self._stream.seconds(group.end)
            if self._end > latest:
                return group

    def _seek_helps(self, seconds: float) -> bool:
        """Whether there may be a key frame at or before `seconds` that is not the next one to be read, or is behind."""
        if not self._ahead or self._ahead[0].dts is None:
            return True
        start = self._stream.seconds(_pts(self._ahead[0]))
        if start > seconds + self._stream.tolerance:
            return True
        entries = self._stream.video.index_entries
        found = entries.search_timestamp(self._stream.ticks_at(seconds)) if self._stream.is_indexed else -1
        if found >= 0:
            return bool(entries[found].timestamp > self._ahead[0].dts)
        return seconds - start > _SEEK_WORTH_SECONDS

    def _seek(self, seconds: float) -> None:
        """Stand before a key frame that appears at or before `seconds`."""
        target = self._stream.ticks_at(seconds)
        for _ in range(_LATE_SEEKS):
            self._stream.container.seek(target, stream=self._stream.video)
            self._packets = self._stream.container.demux(self._stream.video)
            self._ahead.clear()
            first = next((packet for packet in self._packets if packet.is_keyframe), None)
            if first is None:
                break
            if self._stream.seconds(_pts(first)) <= seconds + self._stream.tolerance:
                self._ahead.append(first)
                return
            if first.dts is None:
                break
            target = min(target, first.dts) - 1
        raise NotPlain

    def _read_group(self, last: int) -> _Group:
        """The packets from the key frame that is ahead to the next one, and what is shown in between.

        It ends at the first packet that is decoded after `last` (ticks), where decoding times are stored or are those
        of showing: nothing from there on is shown before.
        """
        packets = [self._ahead.popleft()]
        following: list[Packet[VideoStream]] = []  # the next key frame, and what must be read to be sure
        size = 0
        stops = self._stream.container.format.name == MP4
        in_order = self._codec in _IN_ORDER
        while (packet := self._next_packet()) is not None:
            size += packet.size
            if packet.size == 0:
                break
            if self._stream.fault_of(packet) is not None or (packet.dts is not None and _pts(packet) < packet.dts):
                raise NotPlain
            if len(packets) + len(following) > _MOST_PACKETS or size > _MOST_BYTES:
                raise NotPlain
            if not following and not packet.is_keyframe:
                packets.append(packet)
                decoded = packet.pts if in_order else packet.dts if stops else None
                if decoded is not None and decoded > last:
                    self._ahead.clear()
                    return self._group(packets, decoded)
                continue
            following.append(packet)
            if self._is_past(packet, following[0]):
                break
        self._ahead.extendleft(reversed(following))
        end = _pts(following[0]) if following else None
        leading = [packet for packet in following[1:] if end is not None and _pts(packet) < end]
        if leading:
            packets += [following[0], *leading]
        return self._group(packets, end)

    def _group(self, packets: list[Packet[VideoStream]], end: int | None) -> _Group:
        start = _pts(packets[0])
        shown = sorted(_pts(packet) for packet in packets if self._is_shown(packet, start, end))
        if not shown or len(set(shown)) < len(shown):
            raise NotPlain
        return _Group(packets, shown, end)

    def _next_packet(self) -> Packet[VideoStream] | None:
        return self._ahead.popleft() if self._ahead else next(self._packets, None)

    @staticmethod
    def _is_past(packet: Packet[VideoStream], key: Packet[VideoStream]) -> bool:
        """Whether no packet from this one on is shown before the key frame `key`."""
        if packet is key:
            return packet.pts == packet.dts
        return _pts(packet) > _pts(key) and (packet.dts is None or packet.dts >= _pts(key))

    def _is_shown(self, packet: Packet[VideoStream], start: int, end: int | None) -> bool:
        within = start <= _pts(packet) and (end is None or _pts(packet) < end)
        return within and not packet.is_discard and gives_frame(self._codec, packet) is not False

    # ---- decoding

    def _decode(self, group: _Group, wanted: dict[int, list[int]], num_held: int) -> Iterator[Answer]:
        """The wanted frames of a group in order."""
        if not wanted:
            return
        try:
            yield from self._sound_frames(group, wanted, num_held)
        except (NotPlain, *FAILURES) as error:
            self._stream.spoil()
            raise NotPlain from error

    def _sound_frames(self, group: _Group, wanted: dict[int, list[int]], num_held: int) -> Iterator[Answer]:
        last = max(wanted)
        due: set[int] = set()  # frames that must come
        for frame in self._pictures(self._needed(group, wanted), due):
            pts = frame.pts
            if pts is None or pts < group.shown[0]:
                raise NotPlain
            if group.end is not None and pts >= group.end:
                continue
            first = pts == group.shown[0]
            if frame.is_corrupt or pts not in due or min(due) != pts or (first and not frame.key_frame):
                raise NotPlain
            due.discard(pts)
            if pts in wanted:
                yield Answer(frame, self._stream.seconds(pts), wanted[pts], num_held if pts == last else 0)
        if due:
            raise NotPlain

    def _needed(self, group: _Group, wanted: dict[int, list[int]]) -> Iterable[tuple[Packet[VideoStream], bool]]:
        """The packets to decode, and whether each has a frame that must come."""
        start = group.shown[0]
        shown = set(group.shown)
        last = max(index for index, packet in enumerate(group.packets) if packet.pts in wanted)
        droppable = self._references.droppable(group.packets)
        for packet, drop in zip(group.packets[: last + 1], droppable, strict=False):
            if _pts(packet) < start and not packet.is_discard:
                continue  # needs what came before the key frame, and is needed by nothing behind it
            if not drop or packet.pts in wanted:
                yield packet, packet.pts in shown

    def _pictures(self, packets: Iterable[tuple[Packet[VideoStream], bool]], due: set[int]) -> Iterator[VideoFrame]:
        """What the decoder gives for these packets alone."""
        context = self._stream.video.codec_context
        depth = context.reorder_depth
        context.flush_buffers()
        context.reorder_depth = depth  # flushing may forget it, and then B-frames are dropped
        opens = False
        for number, (packet, comes) in enumerate(packets):
            if comes:
                due.add(_pts(packet))
            if not number:
                opens = self._references.opens_group(packet)
            try:
                frames = context.decode(packet)
            except FAILURES:
                if not (opens and number == 1):  # it may drop references that are not there; its frame must come
                    raise
                frames = []
            yield from frames
        yield from context.decode(None)


def _pts(packet: Packet[VideoStream]) -> int:
    if packet.pts is None:
        raise NotPlain
    return packet.pts
