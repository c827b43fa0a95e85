"""Which coded frames no other frame needs, read from the first bytes of their packets; nothing is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from av.packet import Packet
from av.video.stream import VideoStream

__all__ = ["References"]

_H264_IDR = 5
_START = b"\x00\x00\x01"
_HEVC_NON_REFERENCE = frozenset(range(0, 16, 2))  # the sub-layer non-reference types, ITU-T H.265 table 7-1


class References:
    """Knows the packets of one stream of H.264 or HEVC; of other codecs every frame may be needed."""

    def __init__(self, video: VideoStream) -> None:
        name = video.codec_context.name
        extradata = bytes(video.codec_context.extradata or b"")
        self._layer: Callable[[bytes, int], int | None] | None = {"h264": _h264_layer, "hevc": _hevc_layer}.get(name)
        place = {"h264": 4, "hevc": 21}.get(name, 0)
        packed = len(extradata) > place and extradata[0] == 1
        self._length_bytes = (extradata[place] & 3) + 1 if packed else 0  # 0: start codes separate the units

    def opens_group(self, packet: Packet[VideoStream]) -> bool:
        """Whether a key frame of H.264 is no IDR: frames behind it may name references from before it."""
        if self._layer is not _h264_layer:
            return False
        data: Any = memoryview(packet)
        return not any(data[at] & 31 == _H264_IDR for at in self._units(data))

    def droppable(self, packets: Sequence[Packet[VideoStream]]) -> list[bool]:
        """For each packet of a group whether no other frame needs its frame.

        An HEVC frame of that kind may still be needed by higher temporal layers: only those of the highest layer of
        the group count.
        """
        if self._layer is None:
            return [False] * len(packets)
        layers = [self._layers(packet) for packet in packets]
        highest = max((abs(layer) for found in layers for layer in found), default=0)
        return [bool(found) and all(layer == -highest for layer in found) for found in layers]

    def _layers(self, packet: Packet[VideoStream]) -> list[int]:
        """Of each slice its temporal layer, from 1; negative if its frame is no reference for others of its layer."""
        data: Any = memoryview(packet)
        layer = self._layer
        assert layer is not None
        return [found for at in self._units(data) if (found := layer(data, at)) is not None]

    def _units(self, data: Any) -> Iterator[int]:
        """Where the header of each unit (NAL unit) of a packet begins."""
        size = len(data)
        if self._length_bytes:
            at = 0
            while at + self._length_bytes < size - 1:
                length = int.from_bytes(data[at : at + self._length_bytes], "big")
                at += self._length_bytes
                yield at
                at += length
            return
        whole = bytes(data)
        at = whole.find(_START)
        while 0 <= at < size - 4:
            yield at + 3
            at = whole.find(_START, at + 3)


def _h264_layer(data: bytes, at: int) -> int | None:
    """ITU-T H.264, 7.3.1: nal_ref_idc is 0 for what is no reference."""
    kind, reference = data[at] & 31, data[at] >> 5 & 3
    if not 1 <= kind <= 5:
        return None
    return 1 if reference else -1


def _hevc_layer(data: bytes, at: int) -> int | None:
    """ITU-T H.265, 7.3.1.2."""
    kind, layer = data[at] >> 1 & 63, data[at + 1] & 7
    if kind >= 32:
        return None
    return -layer if kind in _HEVC_NON_REFERENCE else layer
