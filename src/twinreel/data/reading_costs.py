"""What it costs to read a clip, stage by stage, and what libavcodec alone would take for it.

Each clip is read several times, each time with less work, and the differences are the stages: as in training; a few
pixels of each frame instead of the crop (all but the conversion); only opened. The floor is libavcodec decoding from
the key frame before each wanted frame up to that frame, and nothing else.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from twinreel.data.captions import row_captions
from twinreel.data.clip import Clip, Sample
from twinreel.data.decode.container import FAILURES, open_container, video_stream
from twinreel.data.decode.source import VideoSource, file_source
from twinreel.data.storage import open_video
from twinreel.data.storage.lmdb_store import find_store, stored
from twinreel.data.transforms import Cut
from twinreel.errors import DataError

__all__ = ["Floor", "ReadingCosts", "decode_floor", "reading_costs"]

FEW_PIXELS = 16
RUN_QUEUE = "/proc/thread-self/schedstat"  # Linux: CPU time, time spent waiting for a core, both ns; turns


class Floor(NamedTuple):
    """CPU seconds of libavcodec for one clip, and how many frames it has decoded."""

    seek: float
    decode: float
    num_frames: int


@dataclass(slots=True, kw_only=True)
class ReadingCosts:
    """CPU seconds of one thread for one row; `storage` is what the first reading waited for bytes, in real seconds.

    `floor` is None for what is no file of libavcodec (a folder of images). `height` and `width` are those of the video,
    `num_kept` the frames taken from it, `num_views` the clips that became of them.
    """

    open: float
    seek: float
    decode: float
    convert: float
    captions: float
    storage: float
    floor: Floor | None
    height: int
    width: int
    num_kept: int
    num_views: int

    @property
    def total(self) -> float:
        """Seconds of one reader."""
        return self.open + self.seek + self.decode + self.convert + self.captions + self.storage


def reading_costs(row: Clip, read: Callable[[Clip], Sample | list[Sample]]) -> ReadingCosts:
    """The costs of one row.

    Args:
        row: of a collection.
        read: as training reads it.

    Raises:
        DataError: it cannot be read.
    """
    began = _clock()
    sample = read(row)
    ended = _clock()
    views = sample if isinstance(sample, list) else [sample]
    if views[0].fault is not None:
        raise DataError(views[0].fault.reason)
    times = views[0].pts_seconds.flatten().tolist()
    storage = ended.waited_since(began)
    source = _source(row.video)
    floor = None if source is None else decode_floor(source, times)
    whole = min(_seconds(lambda: read(row)) for _ in range(2))
    few, open_seconds, size = _without_conversion(row.video, times)
    captions = _seconds(lambda: row_captions(row)) if views[0].captions else 0.0
    seek = 0.0 if floor is None else min(floor.seek, few - open_seconds)
    return ReadingCosts(
        open=open_seconds, seek=seek, decode=max(0.0, few - open_seconds - seek),
        convert=max(0.0, whole - few - captions), captions=captions, storage=storage, floor=floor,
        height=size[0], width=size[1], num_kept=len(times), num_views=len(views),
    )  # fmt: skip


def _without_conversion(video: str, times: Sequence[float]) -> tuple[float, float, tuple[int, int]]:
    """Seconds to read a few pixels of the frames at some times, and to open alone; height and width of the video."""

    def look(wanted: Sequence[float]) -> tuple[int, int]:
        with open_video(video) as reader:
            info = reader.info
            side = min(info.height, info.width, FEW_PIXELS)
            if wanted:
                reader.frames_at(wanted, hold_last=True, cut=Cut(0, 0, side, side, side))
        return info.height, info.width

    few = min(_seconds(lambda: look(times)) for _ in range(2))
    opened = min(_seconds(lambda: look(())) for _ in range(2))
    return max(few, opened), opened, look(())


def _source(video: str) -> VideoSource | None:
    """What `open_video` would decode with libavcodec; None if it is a folder of images."""
    if os.path.isfile(video):
        return video
    place = find_store(video)
    return None if place is None or os.path.isdir(video) else stored(*place)


def decode_floor(source: VideoSource, times: Sequence[float]) -> Floor | None:
    """What libavcodec takes for the frames on show at `times` (seconds from the first frame); None if it fails."""
    try:
        opened = file_source(source)
        with closing(open_container(opened)) as container:
            return _decode_floor(container, video_stream(container, opened), sorted(times))
    except (*FAILURES, DataError):
        return None


def _decode_floor(container: Any, video: Any, times: Sequence[float]) -> Floor:
    seconds = {"seek": 0.0, "decode": 0.0}
    origin, unit = video.start_time or 0, video.time_base
    at: int | None = None  # the time of the newest frame, in ticks
    num_frames = 0
    packets = container.demux(video)
    for target in (origin + int(second / unit) for second in times):
        if at is not None and at >= target:
            continue
        if at is None or _key_frame_before(video, target) > at:
            began = time.thread_time()
            container.seek(target, stream=video)
            packets = container.demux(video)
            seconds["seek"] += time.thread_time() - began
            at = None
        began = time.thread_time()
        while at is None or at < target:
            packet = next(packets, None)
            if packet is None:
                break
            for frame in packet.decode():
                at, num_frames = frame.pts if frame.pts is not None else target, num_frames + 1
        seconds["decode"] += time.thread_time() - began
    return Floor(seconds["seek"], seconds["decode"], num_frames)


def _key_frame_before(video: Any, ticks: int) -> int:
    """The time of the last key frame up to some time by the file's index; far in the past if it has none."""
    entries = video.index_entries
    place = entries.search_timestamp(ticks) if len(entries) else -1
    return int(entries[place].timestamp) if place >= 0 else -(2**62)


class _Clock(NamedTuple):
    wall: float
    cpu: float
    queued: float
    pauses: int

    def waited_since(self, began: _Clock) -> float:
        """Seconds spent neither computing nor queued for a core. Who has not paused of itself has waited for nothing:
        then a neighbor of a virtual machine had the core.
        """
        idle = (self.wall - began.wall) - (self.cpu - began.cpu) - (self.queued - began.queued)
        return max(0.0, idle) if self.pauses > began.pauses else 0.0


def _clock() -> _Clock:
    try:
        with open(RUN_QUEUE, encoding="ascii") as file:
            queued = int(file.read().split()[1]) / 1e9
    except OSError:
        queued = 0.0
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    pauses = resource.getrusage(who).ru_nvcsw
    return _Clock(time.perf_counter(), time.thread_time(), queued, pauses)


def _seconds(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
