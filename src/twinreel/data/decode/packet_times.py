"""What a file's packets say of times, without decoding: its duration, and when each frame appears.

For `frame_stream.py`. Where frames are being decoded a second container is opened, so that the first stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import av
from av.packet import Packet
from av.video.stream import VideoStream

from twinreel.data.decode.container import FAILURES, MP4, PLAIN_FORMATS, open_container, video_stream

if TYPE_CHECKING:
    from twinreel.data.decode.frame_stream import FrameStream

__all__ = ["A_FRAME_A_PACKET", "compare_header", "duration_seconds", "gives_frame", "packet_times"]

# Codecs of which each packet gives one frame, but for those that `gives_frame` knows. Others are decoded to know.
A_FRAME_A_PACKET = frozenset(
    "av1 dnxhd dvvideo ffv1 ffvhuff flv gif h263 h264 hevc huffyuv jpeg2000 libdav1d mjpeg mpeg1video mpeg2video mpeg4 "
    "msmpeg4 msmpeg4v2 png prores rawvideo vp8 vp9 wmv1 wmv2".split()
)
_IN_FIELDS = ("h264", "hevc")  # where they are interlaced, each field may have a packet
_TINY_MPEG4_BYTES = 16  # an MPEG-4 packet as small may say "no frame here"


def duration_seconds(stream: FrameStream) -> float:
    """From the first shown frame to the end of the last one: the header's if it is right, else by the packets."""
    declared = _declared_seconds(stream)
    if declared is not None:
        return declared
    measured = _measured_seconds(stream)
    header = _header_seconds(stream)
    if header is None:
        stream.warnings[f"the header gives no duration: {measured:.3f} s by the times of the packets"] = None
    elif abs(header - measured) > 0.1:
        stream.warnings[f"the header says {header:.3f} s, the packets of the video {measured:.3f} s"] = None
    return measured


def _declared_seconds(stream: FrameStream) -> float | None:
    """The header's duration where it can be relied on: MP4 and MOV with a complete index and a constant rate."""
    video = stream.video
    constant = video.average_rate is not None and video.average_rate == video.base_rate
    if stream.clock != "pts" or not (stream.is_indexed and constant and stream.container.format.name == MP4):
        return None
    return video.duration * stream.tick_seconds if video.duration else None


def _header_seconds(stream: FrameStream) -> float | None:
    if stream.video.duration and stream.clock != "count":
        return stream.video.duration * stream.tick_seconds
    return stream.container.duration / av.time_base if stream.container.duration else None


def _measured_seconds(stream: FrameStream) -> float:
    """The end of the last packets, or of all packets where a seek to the end finds none."""
    if stream.clock == "count":
        return stream.seconds(len(_packet_ends(stream, None)))
    goal = stream.container.duration / av.time_base if stream.container.duration else 0.0
    while goal > 0:
        ends = _packet_ends(stream, goal)
        if not ends:
            break
        last = max(ends)[0]
        if ends[0][1] or min(ends)[0] < last - 1.0:
            return last
        goal = min(goal, last) - 2.0  # it landed between key frames, perhaps behind the frame that is shown last
    return max([(stream.first.end_seconds, True), *_packet_ends(stream, None)])[0]


def _packet_ends(stream: FrameStream, seconds: float | None) -> list[tuple[float, bool]]:
    """When the packets from `seconds` on (of the whole file without) end, and which are key frames."""
    return [(_packet_end(stream, packet), packet.is_keyframe) for packet in _packets(stream, seconds)]


def _packet_end(stream: FrameStream, packet: Packet[VideoStream]) -> float:
    at, shift = packet.pts, 0
    if at is None or stream.clock == "dts":
        # A frame carries the time of the packet that pushed it out of the decoder.
        at, shift = packet.dts or 0, stream.video.codec_context.reorder_depth * stream.usual_step
    return stream.seconds(at + shift + (packet.duration or stream.usual_step))


def _packets(stream: FrameStream, seconds: float | None) -> Iterator[Packet[VideoStream]]:
    """The packets from `seconds` on, as far as they can be read: reading frames beyond says what is wrong there."""
    lent = None if seconds is None else stream.lend()
    container = lent or open_container(stream.source, for_packets=stream.container.format.name in PLAIN_FORMATS)
    try:
        video = stream.video if lent is not None else video_stream(container, stream.source)
        if seconds is not None:
            container.seek(stream.ticks_at(seconds), stream=video)
        yield from (packet for packet in container.demux(video) if packet.size)
    except FAILURES:
        return
    finally:
        if lent is None:
            container.close()


def packet_times(stream: FrameStream) -> list[float] | None:
    """When each frame appears, seconds, ascending; None where the packets do not tell.

    Frames that are damaged or cut off are among them if their packets are there.
    """
    context: Any = stream.video.codec_context
    name, reordered = context.name, bool(context.reorder_depth)
    decoding = stream.clock == "dts" and not reordered  # an AVI without B-frames
    if name not in A_FRAME_A_PACKET or not (decoding or (stream.clock == "pts" and stream.can_seek)):
        return None
    if name in _IN_FIELDS and stream.first.frame.interlaced_frame:
        return None
    seconds = []
    for packet in _packets(stream, None):
        tick = packet.dts if decoding else packet.pts
        shown = gives_frame(name, packet)
        if tick is None or shown is None:
            return None
        if shown and not packet.is_discard:
            seconds.append(stream.seconds(tick))
    seconds = [time for time in seconds if time >= 0]  # before the first frame there may be some that lack their key
    # Without B-frames packets come in the order in which they are shown, and a time that goes back is held.
    return sorted(seconds) if reordered else list(accumulate(seconds, max))


def compare_header(stream: FrameStream) -> tuple[int | None, float, list[str]]:
    """Number of frames and rate in Hz by the packets, and in what the header says otherwise or nothing.

    Where the packets do not tell, or some of them were cut off: None and the header's rate.
    """
    times, warnings = stream.told_times, []
    if not times or stream.missing_bytes:
        return None, stream.rate, []
    declared, number = stream.video.frames, len(times)
    if not declared:
        warnings.append(f"the header gives no number of frames: {number} by the packets")
    elif declared != number:
        warnings.append(f"the header counts {declared} frames, the packets {number}")
    seconds = times[-1] - times[0]
    rate = (number - 1) / seconds if number > 2 and seconds > 0 else stream.rate
    if abs(rate - stream.rate) <= 0.05 * stream.rate:
        return number, stream.rate, warnings
    said = f"says {stream.rate:g} Hz" if stream.rate else "gives no rate"
    warnings.append(f"the header {said}, by the times of the packets it is {rate:g} Hz on average")
    return number, rate, warnings


def gives_frame(codec: str, packet: Packet[VideoStream]) -> bool | None:
    """Whether a packet gives a frame, None if that can't be said; VP8 and VP9 code some that others only refer to."""
    if codec == "mpeg4" and packet.size <= _TINY_MPEG4_BYTES:
        return None
    if codec not in ("vp8", "vp9"):
        return True
    data: Any = memoryview(packet)
    head, last = data[0], data[-1]
    if codec == "vp8":
        return bool(head & 0x10)  # RFC 6386, 9.1
    index_size = 2 + ((last & 7) + 1) * ((last >> 3 & 3) + 1)
    if last & 0xE0 == 0xC0 and len(data) > index_size and data[-index_size] == last:
        return True  # a superframe: hidden frames with one that is shown
    # VP9 bitstream, 6.2: marker, two bits of profile (and a reserved one), show_existing_frame, type, show_frame
    shift = 2 if head & 0x30 == 0x30 else 3
    return bool(head >> shift & 1 or head >> (shift - 2) & 1)
