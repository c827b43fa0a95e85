"""Opens one file with PyAV and picks its video stream: nothing but that file is touched. For `frame_stream.py`."""

from __future__ import annotations

from typing import Any, NoReturn

import av
from av.codec.context import ThreadType
from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.stream import VideoStream

from twinreel.data.decode.filetype import describe_file
from twinreel.data.decode.source import FileSource
from twinreel.errors import DataError

__all__ = ["FAILURES", "MP4", "PLAIN_FORMATS", "failure_text", "is_alpha", "open_container", "video_stream"]

# What PyAV raises about a file; IndexError where a stream appears in the middle of it.
FAILURES = (av.FFmpegError, OSError, ValueError, RuntimeError, IndexError)
MP4 = "mov,mp4,m4a,3gp,3g2,mj2"
PLAIN_FORMATS = (MP4, "matroska,webm")  # every packet has its time, key frames are marked
_WITHOUT_PTS = ("avi", "matroska,webm")  # Matroska only where it wraps the codecs of an AVI
_NOT_VIDEOS = ("concat", "hls", "dash", "image2", "tty")  # lists of other files; and `*_pipe`, single images
_NO_VIDEO = Disposition.attached_pic.value | Disposition.timed_thumbnails.value
_DEFAULT = Disposition.default.value
_GEN_PTS = 0x1  # AVFMT_FLAG_GENPTS, which PyAV sets
_WITHOUT_LOOKING = {"analyzeduration": "1", "fpsprobesize": "0", "probesize": "5000"}
_BUFFER_BYTES = 1 << 16  # read at once from bytes or a file object
# A decoder tells of what it finds wrong instead of filling it in, and checks the checksums of those codecs that have
# them. The stricter flags (careful, compliant, aggressive) refuse sound files of old encoders.
_TELL_ERRORS = "crccheck+bitstream+buffer+explode"
_STUFFED_CODECS = ("mpeg1video", "mpeg2video")  # bits left over are legal there: encoders of constant rate fill up


def failure_text(error: BaseException) -> str:
    """What PyAV complains about, without the number and the name of the C function."""
    return getattr(error, "strerror", None) or str(error)


def open_container(source: FileSource, *, for_packets: bool = False) -> InputContainer:
    """Open this and nothing else: no network, no lists of other files, no single images.

    With `for_packets` no packets are looked at beforehand, which a decoder may need to be set up by.
    """
    options = _WITHOUT_LOOKING if for_packets else {}
    try:
        if source.path is not None:
            # The prefix keeps a colon in a path from being taken for the end of a protocol.
            options = {"protocol_whitelist": "file", **options}
            container = av.open(f"file:{source.path}", options=options, metadata_errors="replace")
        else:
            refuse = _refuse_other_files
            container = av.open(
                source.reader(),
                "r",
                None,
                options,
                metadata_errors="replace",
                buffer_size=_BUFFER_BYTES,
                io_open=refuse,
            )
    except FAILURES as error:
        what = describe_file(source) or f"FFmpeg says: {failure_text(error)}"
        raise DataError(f"{source.name}: can't be read as a video: {what}") from error
    name = container.format.name
    if name in _NOT_VIDEOS or name.endswith("_pipe"):
        container.close()
        raise DataError(f"{source.name}: can't be read as a video: {describe_file(source) or name}")
    if name in _WITHOUT_PTS:
        container.flags &= ~_GEN_PTS  # the times that it would invent are wrong for packed B-frames
    return container


def _refuse_other_files(url: str, flags: int, options: object) -> NoReturn:
    raise PermissionError(f"it names another file, {url}")


def video_stream(container: InputContainer, source: FileSource) -> VideoStream:
    """The default video stream, set up to be decoded alone and in one thread; cover pictures are no video."""
    streams = [stream for stream in container.streams.video if not stream.disposition.value & _NO_VIDEO]
    if not streams:
        if what := describe_file(source):
            raise DataError(f"{source.name}: can't be read as a video: {what}")
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise DataError(f"{source.name}: no video stream (the file holds: {kinds})")
    chosen = next((stream for stream in streams if stream.disposition.value & _DEFAULT), streams[0])
    context: Any = chosen.codec_context
    if context is None:
        raise DataError(f"{source.name}: its video has a codec that this FFmpeg can't decode")
    context.thread_type, context.thread_count = ThreadType.NONE, 1
    stuffed = context.name in _STUFFED_CODECS
    context.options = {"err_detect": _TELL_ERRORS.replace("bitstream+", "") if stuffed else _TELL_ERRORS}
    for stream in container.streams:
        if stream is not chosen:
            stream.discard = Discard.all
    return chosen


def is_alpha(video: VideoStream, pixels: str) -> bool:
    """Whether frames of these pixels carry transparency, or the file does beside them (VP8 and VP9 in WebM)."""
    # A GIF is always decoded to pixels with an alpha channel, opaque or not.
    carried = pixels.startswith(("yuva", "gbrap", "rgba", "bgra", "argb", "abgr", "ya", "ayuv", "vuya", "pal8"))
    beside = (video.metadata.get("alpha_mode") or video.metadata.get("ALPHA_MODE")) == "1"
    return beside or (carried and video.codec_context.name != "gif")
