"""Checksums that a container carries: those of a Matroska file's clusters (RFC 8794, 11.3.1).

FFmpeg and mkvmerge write them, no demuxer of FFmpeg looks at them, and most decoders do not notice a wrong bit. WebM
has none, as a rule, nor have MP4 and AVI.
"""

from __future__ import annotations

import bisect
import os
import zlib

from twinreel.data.decode.source import FileSource, Reader

__all__ = ["ClusterSums"]

_SEGMENT, _CLUSTER, _CRC = 0x18538067, 0x1F43B675, 0xBF
_BESIDE_CLUSTERS = frozenset(  # what else a segment holds
    (0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1254C367, 0x1043A770, 0x1941A469, 0xEC, _CRC)
)


class ClusterSums:
    """Tells of the clusters of one Matroska file whether their bytes are what they were when it was written.

    The file is looked through no further than it is asked about. Where clusters carry no checksum nothing is known,
    and all counts as sound.
    """

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._sound: dict[int, bool] = {}
        self._broken = False  # what follows the clusters that are known is no element of a segment
        with source.opened() as reader:
            self._size = reader.seek(0, os.SEEK_END)
            self._next = _segment_start(reader)
            self._walk(reader, clusters=1)
            self._summed = bool(self._starts) and _sum_of(reader, self._starts[0]) is not None

    def is_sound(self, position: int) -> bool:
        """Whether the cluster that holds the byte at `position` is; False where the file lost its structure."""
        if not self._summed:
            return True
        index = bisect.bisect_right(self._starts, position) - 1
        known = index >= 0 and position < self._ends[index]
        if known and index in self._sound:
            return self._sound[index]
        with self._source.opened() as reader:
            if not known:
                self._walk(reader, until=position)
                index = bisect.bisect_right(self._starts, position) - 1
                if index < 0 or position >= self._ends[index]:
                    return not self._broken
            start, end = self._starts[index], self._ends[index]
            if end > self._size:
                return True  # cut off: that is told otherwise
            declared = _sum_of(reader, start)
            reader.seek(start + 6)
            self._sound[index] = declared is None or zlib.crc32(reader.read(end - start - 6)) == declared
        return self._sound[index]

    def _walk(self, reader: Reader, *, until: int | None = None, clusters: int | None = None) -> None:
        """Note the clusters from where the walk stands, up to a position or until so many are known."""
        while self._next < self._size and not self._broken:
            if (until is not None and self._next > until) or (clusters is not None and len(self._starts) >= clusters):
                return
            kind, start, length = _element(reader, self._next)
            self._broken = kind != _CLUSTER and kind not in _BESIDE_CLUSTERS
            if length is None:  # a live recording
                self._next = self._size
                return
            if kind == _CLUSTER:
                self._starts.append(start)
                self._ends.append(start + length)
            self._next = start + length


def _segment_start(reader: Reader) -> int:
    """Where the elements of the segment begin; the end of the file if there is no segment."""
    _, start, length = _element(reader, 0)
    kind, inside, _ = _element(reader, start + (length or 0))
    return inside if kind == _SEGMENT else reader.seek(0, os.SEEK_END)


def _sum_of(reader: Reader, start: int) -> int | None:
    """The checksum with which the contents of an element begin."""
    reader.seek(start)
    head = reader.read(6)
    return int.from_bytes(head[2:], "little") if head[:2] == b"\xbf\x84" and len(head) == 6 else None


def _element(reader: Reader, at: int) -> tuple[int, int, int | None]:
    """An EBML element: its kind, where its contents begin, and their length, None if that is not known."""
    reader.seek(at)
    head = reader.read(12)
    kind_bytes = 9 - (head[0].bit_length() if head else 9)
    size_bytes = 9 - (head[kind_bytes].bit_length() if len(head) > kind_bytes else 9)
    if not kind_bytes or not size_bytes or kind_bytes + size_bytes > len(head):
        return 0, at, 0
    unknown = (1 << 7 * size_bytes) - 1
    length = int.from_bytes(head[kind_bytes : kind_bytes + size_bytes], "big") & unknown
    kind = int.from_bytes(head[:kind_bytes], "big")
    return kind, at + kind_bytes + size_bytes, None if length == unknown else length
