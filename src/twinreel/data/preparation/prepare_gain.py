"""How much faster random clips are read from prepared files: a small honest sample, each clip read both ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinreel.data.plan import keyed_rng
from twinreel.data.sampling import clip_times
from twinreel.data.storage import open_video
from twinreel.data.transforms import Cut

__all__ = ["CLIP_FRAMES", "CLIP_RATE", "CLIP_SIZE", "Gain", "Pair", "measure_gain", "read_random_clip"]

CLIP_FRAMES, CLIP_RATE, CLIP_SIZE = 16, 5.0, 224
_CLIPS_A_FILE = 6


class Pair(NamedTuple):
    """A source, where in it the prepared file begins, that file, and how long it is (seconds)."""

    video: str
    start_seconds: float
    output: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Clips per second of processor time, in one process.

    A clip is 16 frames at 5 Hz from a random time of a file that is opened for it, scaled to 224x224.
    """

    num_files: int
    num_clips: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times faster."""
        return self.after / self.before


def measure_gain(pairs: Sequence[Pair], num_files: int) -> Gain | None:
    """Read the same random clips from sources and from prepared files, by turns; None without files.

    Args:
        pairs: all prepared files; the sample is spread over them evenly.
        num_files: how many to read at most.
    """
    number = min(num_files, len(pairs))
    chosen = [pairs[(2 * index + 1) * len(pairs) // (2 * number)] for index in range(number)]
    before = after = 0.0
    for clip in range(_CLIPS_A_FILE):
        for pair in chosen:
            room = max(0.0, pair.seconds - CLIP_FRAMES / CLIP_RATE)
            start = float(keyed_rng(0, clip, pair.output, "gain").uniform(0, room))
            before += read_random_clip(pair.video, pair.start_seconds + start)
            after += read_random_clip(pair.output, start)
    if not before or not after:
        return None
    count = number * _CLIPS_A_FILE
    return Gain(num_files=number, num_clips=count, before=count / before, after=count / after)


def read_random_clip(video: str, start_seconds: float) -> float:
    """Processor seconds that opening a file and reading one clip of it takes."""
    began = time.process_time()
    with open_video(video) as reader:
        height, width = reader.info.height, reader.info.width
        side = min(height, width)
        cut = Cut((height - side) // 2, (width - side) // 2, side, side, CLIP_SIZE)
        reader.frames_at(clip_times(start_seconds, CLIP_FRAMES, CLIP_RATE), hold_last=True, cut=cut)
    return time.process_time() - began
