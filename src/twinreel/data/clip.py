"""The contract that everything else speaks: a manifest row, one sample of it, a batch of samples.

Time is float seconds from the first shown frame, windows are half open `[start, end)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Batch", "Caption", "Clip", "Fault", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """A sentence and, where it was spoken at a known time, its own window in seconds."""

    text: str
    start_seconds: float | None = None
    end_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A row of a manifest.

    `id` is unique in its collection and is the key of every result. `video` is a resolved path.
    Without a window the row means the whole video. `captions` holds sentences about the row;
    `caption_file` names a csv of `start,end,text` that is read when the row is used.

    A question about the row is its caption. `options` are the answers to choose from, of which `labels` has the place
    (from 0) of the right one; without options `labels` is the answer itself. `answer_type` is the kind of answer.
    """

    id: str
    video: str
    start_seconds: float | None = None
    end_seconds: float | None = None
    captions: tuple[Caption, ...] = ()
    caption_file: str | None = None
    labels: tuple[str | int, ...] = ()
    options: tuple[str, ...] = ()
    answer_type: str | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a sample was left out: one line of `faults.jsonl`."""

    id: str
    video: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Sample:
    """One row, read. `frames` is uint8 (T, S, S, 3) RGB; a sample with a fault holds zeros and is masked.

    Several clips lie one behind the other in time: T = clips x frames of a clip.
    `captions` has exactly the task's number of candidates; `caption_mask` says which are real.
    `repeated_frames` counts frames that repeat the last one because the video ended.
    """

    id: str
    frames: Tensor
    pts_seconds: Tensor
    flip: bool = False
    captions: list[str] = field(default_factory=list)
    caption_mask: list[bool] = field(default_factory=list)
    labels: tuple[str | int, ...] = ()
    options: tuple[str, ...] = ()
    repeated_frames: int = 0
    fault: Fault | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Samples side by side, in the plan's order. Rows where `valid` is False take no part in anything.

    `frames` uint8 (B, T, S, S, 3); `pts_seconds` (B, T); `flip`, `valid` bool (B,);
    `captions` B lists of K sentences; `caption_mask` bool (B, K); `options` those of each row, () where it has none.
    """

    ids: list[str]
    frames: Tensor
    pts_seconds: Tensor
    flip: Tensor
    valid: Tensor
    captions: list[list[str]]
    caption_mask: Tensor
    labels: list[tuple[str | int, ...]]
    repeated_frames: int
    faults: list[Fault]
    options: list[tuple[str, ...]] = field(default_factory=list)
    wait_seconds: float = 0.0

    def pin_memory(self) -> Batch:
        """The same with its frames in page-locked memory, from where a GPU takes them without waiting."""
        self.frames = self.frames.pin_memory()
        return self
