"""Which frames must still come because their packets went into the decoder. For `frame_stream.py`."""

from __future__ import annotations

from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from twinreel.data.decode.packet_times import A_FRAME_A_PACKET, gives_frame

__all__ = ["ExpectedTimes", "OwedFrames"]

_SILENT_DECODERS = ("h264", "hevc")  # they leave out what they can't decode, and frames that lack their key frame
_COUNTED = A_FRAME_A_PACKET - {*_SILENT_DECODERS, "av1", "libdav1d", "mpeg1video", "mpeg2video"}


class ExpectedTimes:
    """Frames that must still come because their packets went in; `times` are theirs.

    Decoders of H.264 and HEVC leave out what they can't decode, without an error.
    """

    def __init__(self, codec: str, container: str, started: bool) -> None:
        self.times: set[int] = set()
        self._watched = codec in _SILENT_DECODERS and container != "avi"  # an AVI has no times to go by
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


class OwedFrames:
    """How many packets wait for their frame; with codecs that give one for each, no more than the decoder delays.

    B-frames that follow the first key frame, and need what came before it, are left out: nothing counts until a frame
    has come.
    """

    def __init__(self, codec: str) -> None:
        self._codec = codec
        self._number = 0
        self._begun = False

    def is_too_many(self, packet: Packet[VideoStream], num_frames: int, delay: int) -> bool:
        """Note a packet and how many frames came; whether one is missing now."""
        if self._codec not in _COUNTED or packet.size == 0:
            return False
        self._number += (gives_frame(self._codec, packet) is True and not packet.is_discard) - num_frames
        self._begun = self._begun or num_frames > 0
        missing = self._begun and self._number > delay
        self._number = min(self._number, delay)
        return missing
