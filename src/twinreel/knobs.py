"""What the measured times of a data path mean, and which knob to turn: arithmetic, nothing is measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DataPath", "FloorShare"]

HARDLY_WAITS = 0.05
WASTED_FRAMES = 3.0  # decoded for each one kept: more is worth other key frames
TOO_LARGE = 1.5  # short side of the videos, in that of the network's picture
STORAGE_SHARE = 0.25
LAGGING = 0.7  # of the rate that the readers should have


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorShare:
    """libavcodec alone: milliseconds a clip, as a share of ours for the same, and frames decoded for each one kept."""

    milliseconds: float
    share: float
    frames_per_kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """Milliseconds a clip: `stages` of a reader, `device_stages` of the device.

    `measured_rate`: clips a second of all `readers` together, None if unknown. `compute_core_milliseconds`: CPU time of
    forward and backward where the model runs on the cores that the readers want; else None.
    """

    stages: dict[str, float]
    device_stages: dict[str, float]
    floor: FloorShare | None
    measured_rate: float | None
    readers: int
    cores: int
    video_short_side: int
    wanted_short_side: int
    crop: str
    compute_core_milliseconds: float | None
    computed_clips: int = 0

    @property
    def reader_milliseconds(self) -> float:
        """Of one reader for one clip."""
        return sum(self.stages.values())

    @property
    def reader_rate(self) -> float:
        """Clips a second of one reader with a core of its own."""
        return 1e3 / self.reader_milliseconds

    @property
    def expected_rate(self) -> float:
        """Clips a second of the readers, each with a core as far as there are cores."""
        return self.reader_rate * max(1, min(self.readers, self.cores))

    @property
    def rate(self) -> float:
        """Clips a second of the readers: measured, else expected."""
        return self.measured_rate or self.expected_rate

    @property
    def compute_milliseconds(self) -> float:
        """Of the device for one clip."""
        return sum(self.device_stages.values())

    @property
    def compute_rate(self) -> float:
        """Clips a second of the device if it never waits."""
        return 1e3 / self.compute_milliseconds

    @property
    def waiting(self) -> float:
        """What the device will wait for data, as a share of its computing time."""
        clip = 1e3 / self.rate
        if not self.readers:
            return clip / self.compute_milliseconds
        if self.compute_core_milliseconds is not None:
            clip = max(clip, (self.reader_milliseconds + self.compute_core_milliseconds) / self.cores)
        return max(0.0, clip / self.compute_milliseconds - 1)

    @property
    def readers_needed(self) -> int:
        """Readers, each with a core, for a device that never waits."""
        return math.ceil(self.reader_milliseconds / self.compute_milliseconds)

    def remark(self, name: str) -> str:
        """What is to be said beside a stage."""
        if name == "decode" and self.floor is not None:
            return (
                f"   libavcodec alone: {self.floor.milliseconds:.2f} ms, {self.floor.share:.0%} of seek and decode; "
                f"{self.floor.frames_per_kept:.1f} frames decoded for each one kept"
            )
        on_cpu = self.compute_core_milliseconds is not None
        return {
            "storage": "   waiting for bytes at the first reading; 0 where they lie in memory already",
            "collate": "   side by side in shared memory, and handed over" if self.readers else "   side by side",
            "transfer": "   to the device: nothing to move" if on_cpu else "   to the device, beside the computing",
            "compute": f"   forward and backward, {self.computed_clips} clips at once",
        }.get(name, "")

    def meaning(self) -> list[str]:
        """Readers, waiting, and how many cores a device needs, a line each."""
        measured = "" if self.measured_rate is None else f"{self.measured_rate:.1f} clips/s measured, "
        if self.readers:
            who = f"{self.readers} readers (data.num_workers) on {self.cores} cores"
        else:
            who = "no readers (data.num_workers=0): the device waits while a batch is read"
        shared = "" if self.compute_core_milliseconds is None else "; the model computes on the same cores"
        return [
            f"{who}: {measured}{self.expected_rate:.1f} expected{shared}",
            f"the device computes {self.compute_rate:.1f} clips/s and waits for {self.waiting:.0%} of its computing "
            "time (predicted from these rates)",
            f"cores that never let it wait: {self.readers_needed} a device of this speed; one that computes N clips/s "
            f"needs N / {self.reader_rate:.1f}",
        ]

    def advice(self) -> list[str]:
        """What to turn, the best first; one line that says so where nothing is to be gained."""
        if self.waiting <= HARDLY_WAITS:
            return ["nothing: the device does not wait"]
        found = []
        free = self.cores if self.compute_core_milliseconds is None else max(1, self.cores - 1)
        wanted = min(self.readers_needed, free)
        if wanted > self.readers:
            found.append(f"data.num_workers={wanted} (now {self.readers}, {self.cores} cores)")
        elif self.readers and self.measured_rate and self.measured_rate < LAGGING * self.expected_rate:
            found.append("the readers are slower together than alone: does something else use the cores (top)?")
        if self.readers_needed > wanted or not found:
            found.append(self._cheaper())
        return found

    def _cheaper(self) -> str:
        """How the dearest stage is made cheaper."""
        if self.stages["storage"] > STORAGE_SHARE * self.reader_milliseconds:
            return (
                "storage: readers wait for bytes. Copy the collection to a local disk, pack it (`twinreel data pack`), "
                "or make it smaller (`twinreel data prepare`); more data.num_workers than cores wait side by side"
            )
        dearest = max((name for name in self.stages if name != "storage"), key=lambda name: self.stages[name])
        if dearest in ("seek", "decode"):
            return self._cheaper_decode()
        if dearest == "convert" and self._is_too_large:
            return self._prepare()
        return {
            "open": "opening costs most: cut long videos into pieces (`twinreel data prepare --clip-seconds 10`), and "
            "keep many small files in one (`twinreel data pack`)",
            "convert": "converting costs most: a smaller crop_size or fewer num_frames of model.preprocessing",
            "captions": "reading captions costs most: shorter caption files, or captions in the manifest itself",
            "collate": "handing over costs most: a smaller crop_size or fewer num_frames of model.preprocessing",
        }[dearest]

    def _cheaper_decode(self) -> str:
        wasted = self.floor is not None and self.floor.frames_per_kept > WASTED_FRAMES
        if wasted or self._is_too_large:
            return self._prepare()
        return (
            "decoding costs most, and little of it is in vain: more cores, fewer num_frames, or several clips of one "
            "decode (data.repeated_augmentation=2)"
        )

    @property
    def _is_too_large(self) -> bool:
        return self.video_short_side > TOO_LARGE * self.wanted_short_side

    def _prepare(self) -> str:
        side = min(self.video_short_side, math.ceil(self.wanted_short_side * 1.15 / 16) * 16)
        seen = "; data.crop=random then sees more of a frame" if self.crop == "random" else ""
        return (
            f"`twinreel data prepare MANIFEST --out DIR --short-side {side} --gop 16` (the videos have a short side of "
            f"{self.video_short_side}, the network sees {self.wanted_short_side}{seen})"
        )
