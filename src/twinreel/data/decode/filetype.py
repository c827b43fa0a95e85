"""What a file that will not open as a video really is, told from its bytes; no decoder is touched here."""

from __future__ import annotations

import os
from pathlib import Path

from twinreel.data.decode.source import FileSource, Reader, file_source

__all__ = ["describe_file", "missing_bytes"]

_IMAGES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"BM": "BMP", b"II*\x00": "TIFF", b"MM\x00*": "TIFF"}
_OTHERS = {
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"%PDF": "a PDF document",
    b"\x93NUMPY": "a NumPy array",
}
_MP4_STARTS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_MP4_PARTS = (b"moov", b"moof", b"mdat")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def describe_file(source: str | os.PathLike[str] | FileSource) -> str | None:
    """What a file is if it is plainly no video, for errors: 'an HTML page, not a video'; else None. Never raises."""
    file = file_source(source)
    try:
        if file.path is not None:
            name = Path(file.path)
            if not name.exists():
                return "no such file" if not name.is_symlink() else "a link whose target does not exist"
            if name.is_dir():
                return "a folder, not a file"
        with file.opened() as reader:
            head = reader.read(4096)
            if not head:
                return "an empty file (0 bytes)"
            return _describe_bytes(head) or _describe_mp4(head, reader)
    except (OSError, ValueError) as error:
        return f"not readable ({getattr(error, 'strerror', None) or error})"


def missing_bytes(source: str | os.PathLike[str] | FileSource) -> int:
    """By how many bytes a Matroska, WebM, RIFF (AVI) or MP4 file is shorter than it declares; 0 if unknown or whole."""
    file = file_source(source)
    size = file.size
    with file.opened() as reader:
        head = reader.read(4096)
        if head[:4] == b"RIFF":
            declared = int.from_bytes(head[4:8], "little")
            return max(0, declared + 8 - size) if declared < 0x7FFF_FF00 else 0  # the greatest ones mean "not known"
        if head[:4] == _EBML:
            return max(0, _segment_end(head) - size)
        if head[4:8] in _MP4_STARTS:
            return max(0, max((end for kind, end in _boxes(reader) if kind in _MP4_PARTS), default=0) - size)
    return 0


def _segment_end(head: bytes) -> int:
    """Where the segment of a Matroska file says that it ends; 0 where it does not say (live recordings)."""
    at = head.find(_SEGMENT) + len(_SEGMENT)
    if at < len(_SEGMENT) or at >= len(head) or head[at] == 0:
        return 0
    length = 9 - head[at].bit_length()  # the leading zero bits of the first byte count the bytes that follow it
    value = int.from_bytes(head[at : at + length], "big") & ((1 << 7 * length) - 1)
    return 0 if value == (1 << 7 * length) - 1 else at + length + value


def _boxes(reader: Reader) -> list[tuple[bytes, int]]:
    """The outermost boxes of an MP4 file: type and the offset at which the box says that it ends."""
    boxes: list[tuple[bytes, int]] = []
    size = reader.seek(0, os.SEEK_END)
    at = 0
    while at + 8 <= size and len(boxes) < 100_000:
        reader.seek(at)
        head = reader.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:  # a 64-bit length follows the type
            length = int.from_bytes(head[8:16], "big")
        end = size if length == 0 else at + length
        boxes.append((head[4:8], end))
        if length != 0 and length < 8:
            break
        at = end
    return boxes


def _describe_mp4(head: bytes, reader: Reader) -> str | None:
    if head[4:8] not in _MP4_STARTS or b"moov" in {kind for kind, _ in _boxes(reader)}:
        return None
    return "an MP4 file without its index (no moov box): a download or a recording that was cut short"


def _describe_bytes(head: bytes) -> str | None:
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the video itself; run `git lfs pull`"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP image, not a video"
    for magic, name in _IMAGES.items():
        if head.startswith(magic):
            return f"a {name} image, not a video"
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            return f"{name}, not a video"
    if _is_scrambled(head):
        return "a scrambled (encrypted) broadcast"
    if not any(head):
        return "a file of zero bytes only: a download that failed"
    return _describe_text(head)


def _is_scrambled(head: bytes) -> bool:
    """Whether packets of an MPEG transport stream say that they are encrypted (ISO/IEC 13818-1, 2.4.3.2)."""
    packets = [head[at : at + 4] for at in range(0, len(head) - 4, 188)]
    return len(packets) > 1 and all(packet[0] == 0x47 for packet in packets) and any(p[3] & 0xC0 for p in packets)


def _describe_text(head: bytes) -> str | None:
    try:
        text = head.decode("utf-8").lstrip("\ufeff \t\r\n").lower()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # nearer to the end it is a letter that the cut at 4096 bytes went through
            return None
        text = head[: error.start].decode("utf-8").lower()
    if any(ord(letter) < 32 and letter not in "\t\r\n\f" for letter in text):
        return None
    if text.startswith(("<!doctype html", "<html")):
        return "an HTML page, not a video: probably the error page of a download"
    return f"a text file, not a video (begins {text[:40]!r})"
