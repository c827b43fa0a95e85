"""Where the bytes of a video live. `open_video` is the one door through which rows are read."""

from __future__ import annotations

from twinreel.data.decode import VideoReader

__all__ = ["open_video"]


def open_video(video: str) -> VideoReader:
    """A reader of a row's video, to be used as a context manager."""
    return VideoReader(video)
