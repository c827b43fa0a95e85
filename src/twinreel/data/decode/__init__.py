"""Seconds of a video file -> frames with their times."""

from twinreel.data.decode.reader import (
    Frames,
    VideoInfo,
    VideoReader,
    probe,
    read_frames,
)

__all__ = ["Frames", "VideoInfo", "VideoReader", "probe", "read_frames"]
