"""Rows through a model, each once, in their order, whatever the number of processes: what every evaluation begins with.

Nothing is substituted: what could not be read is named, and left out only on request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ClipDataset, ViewRules
from twinreel.data.device_feed import feed_device
from twinreel.data.loader import WorkerStart, load_batches, readers_watched
from twinreel.data.read_ahead import ReadAhead, clip_bytes, plan_ahead
from twinreel.data.transforms import network_input
from twinreel.distributed import gather_objects, together, world
from twinreel.errors import DataError
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection

__all__ = [
    "Seen",
    "Viewed",
    "blocks_of",
    "evaluation_ahead",
    "frames_fact",
    "in_order",
    "refuse_missing",
    "refuse_other_rows",
    "view_blocks",
    "view_rows",
    "view_rules",
]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Viewed(NamedTuple):
    """What a model made of rows, (N, ...) on the CPU; which rows could be read (N,) bool; why the others could not; how
    many frames repeat the last one of a video that is shorter than a clip.
    """

    values: Tensor
    valid: Tensor
    faults: list[Fault]
    repeated_frames: int


class Seen(NamedTuple):
    """Which rows could be read, bool (N,); why the others could not; how many frames repeat the last one of a video
    that is shorter than a clip.
    """

    valid: Tensor
    faults: list[Fault]
    repeated_frames: int


Take = Callable[[range, Batch, Tensor], None]


@torch.no_grad()
def view_blocks(
    rows: Sequence[Clip],
    rules: ViewRules,
    look: Callable[[Tensor], Tensor],
    take: Take,
    *,
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
) -> Seen:
    """Hand on what a model makes of rows, block by block, so that not all of it is held; what all processes have seen.

    Processes take whole blocks in turn (`blocks_of`), so that a block, and hence every bit of a result, does not
    depend on their number.

    Args:
        rows: what to look at.
        rules: which views.
        look: network input (n, 3, T, H, W) -> (n, ...), a result a clip.
        take: called for each block of this process with (places of its rows, the batch, results (rows, views, ...)).
        device: where the model is.
        batch_size: clips at once (rows x views).
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
    """
    blocks, (rank, size) = blocks_of(len(rows), rules, batch_size), world()
    keys = [[(0, index) for index in block] for block in blocks[rank::size]]
    done: list[tuple[int, Seen]] = []
    with together():
        ahead = evaluation_ahead(rules, batch_size, num_workers)
    if short := ahead.warning():
        _log.warning(short)
    loader = load_batches(
        ClipDataset(rows, rules), keys, num_workers=num_workers, worker_start=worker_start, ahead=ahead.batches,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    with readers_watched(), closing(feed_device(loader, device)) as batches:
        for batch in batches:
            batch = batch if transform is None else transform(batch)
            num_rows, num_views = batch.frames.shape[:2]
            clips = _seen(batch, rules.preprocessing, look, device, batch_size)
            number = rank + size * len(done)
            done.append((number, Seen(batch.valid, batch.faults, batch.repeated_frames)))
            take(blocks[number], batch, clips.view(num_rows, num_views, *clips.shape[1:]))  # zeros where unreadable
    parts = in_order(done)
    return Seen(
        torch.cat([part.valid for part in parts]),
        [fault for part in parts for fault in part.faults],
        sum(part.repeated_frames for part in parts),
    )


def view_rows(
    rows: Sequence[Clip],
    rules: ViewRules,
    look: Callable[[Tensor], Tensor],
    combine: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Viewed:
    """What a model makes of rows, each row once, in order; in every process that of all processes.

    Args:
        rows: what to look at.
        rules: which views.
        look: network input (n, 3, T, H, W) -> (n, ...), a result a clip.
        combine: results of views (rows, views, ...) -> (rows, ...).
        device: where the model is.
        batch_size: clips at once (rows x views).
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        report: called with (rows done, rows in all).
    """
    (rank, size), rows_at_once = world(), _rows_at_once(rules, batch_size)
    done: list[tuple[int, Tensor]] = []

    def take(block: range, batch: Batch, values: Tensor) -> None:
        done.append((rank + size * len(done), combine(values).cpu()))
        if report is not None:
            report(min(len(done) * rows_at_once * size, len(rows)), len(rows))

    seen = view_blocks(
        rows, rules, look, take, device=device, batch_size=batch_size, num_workers=num_workers,
        worker_start=worker_start, transform=transform,
    )  # fmt: skip
    return Viewed(torch.cat(in_order(done)), *seen)


def blocks_of(num_rows: int, rules: ViewRules, batch_size: int) -> list[range]:
    """The places of the rows that are looked at together; block i belongs to process i modulo their number."""
    at_once = _rows_at_once(rules, batch_size)
    return [range(first, min(first + at_once, num_rows)) for first in range(0, num_rows, at_once)]


def _seen(
    batch: Batch, preprocessing: Preprocessing, look: Callable[[Tensor], Tensor], device: torch.device, most: int
) -> Tensor:
    """Results of all clips of a batch, flat; of rows that could not be read zeros, without looking."""
    if bool(batch.valid.all()):
        return _in_pieces(batch, preprocessing, look, device, most)
    some = batch.valid.to(batch.frames.device)
    frames = batch.frames[some] if bool(some.any()) else batch.frames[:1]  # one, for the shape of a result
    clips = _in_pieces(dataclasses.replace(batch, frames=frames), preprocessing, look, device, most)
    num_rows, num_views = batch.frames.shape[:2]
    whole = clips.new_zeros(num_rows, num_views, *clips.shape[1:])
    if bool(some.any()):
        whole[some.to(whole.device)] = clips.view(-1, num_views, *clips.shape[1:])
    return whole.flatten(0, 1)


def _in_pieces(
    batch: Batch, preprocessing: Preprocessing, look: Callable[[Tensor], Tensor], device: torch.device, most: int
) -> Tensor:
    """Results of all clips of a batch; where one row has more views than clips may be computed at once, in pieces."""
    pieces = torch.split(batch.frames.flatten(0, 1), most)
    return torch.cat(
        [look(network_input(dataclasses.replace(batch, frames=piece), preprocessing, device)) for piece in pieces]
    )


def _rows_at_once(rules: ViewRules, batch_size: int) -> int:
    return max(1, batch_size // rules.clips_a_row)


def evaluation_ahead(rules: ViewRules, batch_size: int, num_workers: int) -> ReadAhead:
    """How far readers run ahead in evaluation; ConfigError if not even one batch can be handed over."""
    clips = _rows_at_once(rules, batch_size) * rules.clips_a_row
    return plan_ahead(clip_bytes(rules.preprocessing), clips, num_workers=num_workers, held=2)


def in_order(done: list[tuple[int, T]]) -> list[T]:
    """What all processes did, numbered, in the order of the numbers."""
    everything = [pair for own in gather_objects(done) for pair in own]
    return [result for _, result in sorted(everything, key=lambda pair: pair[0])]


def view_rules(preprocessing: Preprocessing, section: EvalSection) -> ViewRules:
    """How this section looks at a row for this model.

    With `crop_size` frames are cut to that size, from a short side of at least as much.

    Raises:
        ConfigError: they do not go together.
    """
    if section.crop_size is not None:
        short_side = None
        if preprocessing.fit == "crop":
            short_side = max(preprocessing.short_side or preprocessing.crop_size, section.crop_size)
        preprocessing = preprocessing.replace(crop_size=section.crop_size, short_side=short_side)
    return ViewRules(
        preprocessing=preprocessing,
        num_clips=section.num_clips,
        windows=section.windows,
        num_crops=section.num_crops,
    )


def frames_fact(preprocessing: Preprocessing, windows: str) -> str:
    """Which frames a clip of the evaluation has, in words."""
    if preprocessing.frame_rate is None or windows == "whole":
        # eval.windows=uniform spreads clips; data.clip_start=uniform spreads the frames of one
        return preprocessing.clip_words("" if windows == "uniform" else windows)
    return f"{preprocessing.num_frames} at {preprocessing.frame_rate:g} a second ({preprocessing.clip_seconds:g} s)"


def refuse_other_rows(rows: object, what: str) -> None:
    """All processes must judge on the same.

    Args:
        rows: what this process judges on; its `repr` is compared.
        what: they must share, for the message.

    Raises:
        DataError: some have other rows than the main process.
    """
    everyone = gather_objects(hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest())
    others = [str(rank) for rank, digest in enumerate(everyone) if digest != everyone[0]]
    if others:
        raise DataError(
            f"processes {', '.join(others[:8])} would be judged on other rows than process 0: give every machine the "
            f"same {what} to evaluate on"
        )


def refuse_missing(faults: Sequence[Fault], valid: Tensor, section: EvalSection) -> None:
    """Scores over fewer videos are given only on request, and never over none.

    Raises:
        DataError: some could not be read; the first five with their reasons.
    """
    if faults and not (section.allow_missing and bool(valid.any())):
        first = "\n".join(f"  {fault.reason}" for fault in faults[:5])
        raise DataError(
            f"{len(faults)} of {len(valid)} videos could not be read; scores would be over {len(valid) - len(faults)}. "
            f"First:\n{first}\nMend the files or pass eval.allow_missing=true."
        )
