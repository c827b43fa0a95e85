"""Windows over whole videos, however long: where they lie, and what a model makes of each.

A model with a `frame_rate` has windows of exact seconds; one with a `frame_stride` has windows of so many frames of the
file, which begin and end where the file says that its frames appear. The last window ends with the row.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from twinreel.data import sampling
from twinreel.data.clip import Clip, Fault, Sample
from twinreel.data.dataset import ClipDataset, read_views, window_in_video
from twinreel.data.loader import WorkerStart, load_batches, readers_watched
from twinreel.data.storage import open_video
from twinreel.data.transforms import network_input
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["SeenWindows", "Window", "check_stride", "cover_row", "cover_starts", "see_windows"]

SLACK_SECONDS = 1e-9


class Window(NamedTuple):
    """The window [start, end) in seconds, the times of its frames, and how many of these repeat the video's last one.

    A model with a `frame_rate` counts its repeated frames when they are read.
    """

    start_seconds: float
    end_seconds: float
    times: list[float]
    num_held: int = 0


class SeenWindows(NamedTuple):
    """What a model made of a row: its windows, results (N, ...) on the CPU, and how many frames repeat the last one."""

    row: Clip
    windows: list[Window]
    values: Tensor
    repeated_frames: int


def check_stride(stride_seconds: float | None) -> None:
    """Refuse a step from window to window that is none.

    Raises:
        ConfigError: it is not a number above 0.
    """
    if stride_seconds is not None and not 0 < stride_seconds < math.inf:
        raise ConfigError(f"stride_seconds={stride_seconds}: must be a number of seconds above 0")


def cover_starts(start: float, end: float, clip_seconds: float, stride: float) -> list[float]:
    """Start times of windows over [start, end): every `stride` seconds, and a last one that ends at the end."""
    starts = [start]
    while starts[-1] + stride + clip_seconds <= end + SLACK_SECONDS:
        starts.append(start + len(starts) * stride)
    if starts[-1] + clip_seconds < end - SLACK_SECONDS:
        starts.append(max(start, end - clip_seconds))
    return starts


def cover_frames(times: Sequence[float], shown: range, size: int, step: int, stride_seconds: float | None) -> list[int]:
    """First frames of windows of `size` frames over the frames `shown`, and a last one that ends with them.

    Args:
        times: when each frame of the video appears, seconds.
        shown: which of them are covered.
        size: frames of a window.
        step: frames from window to window.
        stride_seconds: or seconds: the next window begins with the first frame so much later.
    """
    starts = [shown.start]
    while True:
        following = starts[-1] + step
        if stride_seconds is not None:
            later = bisect.bisect_left(times, times[starts[-1]] + stride_seconds - SLACK_SECONDS)
            following = max(starts[-1] + 1, later)
        if following + size > shown.stop:
            break
        starts.append(following)
    if starts[-1] + size < shown.stop:
        starts.append(max(shown.start, shown.stop - size))
    return starts


def cover_row(
    row: Clip, preprocessing: Preprocessing, stride_seconds: float | None = None, *, clip_share: float = 1.0
) -> list[Window]:
    """The windows of a row, from its start to its end.

    Args:
        row: its own window is respected.
        preprocessing: how long a window is.
        stride_seconds: from window to window; None = as `clip_share` says.
        clip_share: of a window's length, from window to window.

    Raises:
        DataError: the video cannot be read, or the row's window lies outside it.
    """
    prep = preprocessing
    with open_video(row.video) as reader:
        start, end = window_in_video(row.video, (row.start_seconds, row.end_seconds), reader.info.duration_seconds)
        if prep.frame_stride is not None:
            return _frame_windows(reader.frame_times(), start, end, prep, stride_seconds, clip_share)
    stride = prep.clip_seconds * clip_share if stride_seconds is None else stride_seconds
    return [
        Window(
            begin, min(begin + prep.clip_seconds, end), sampling.clip_times(begin, prep.num_frames, prep.sampled_rate)
        )
        for begin in cover_starts(start, end, prep.clip_seconds, stride)
    ]


def _frame_windows(
    times: Sequence[float],
    start: float,
    end: float,
    prep: Preprocessing,
    stride_seconds: float | None,
    clip_share: float,
) -> list[Window]:
    """Windows in frames of the file: each frame that is taken stands for those up to the next one."""
    assert prep.frame_stride is not None
    shown = sampling.window_indices(times, start, end)
    size = prep.num_frames * prep.frame_stride
    windows = []
    for first in cover_frames(times, shown, size, max(1, round(size * clip_share)), stride_seconds):
        chosen, num_held = sampling.strided_times(times, first, prep.num_frames, prep.frame_stride)
        stop = times[first + size] if first + size < shown.stop else end
        windows.append(Window(max(start, times[first]), stop, chosen, num_held))
    return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads some windows of a row, by the id of the piece; picklable."""

    preprocessing: Preprocessing
    pieces: dict[str, list[Window]]

    def __call__(self, row: Clip, epoch: int) -> Sample:
        windows = self.pieces[row.id]
        try:
            sample = read_views(row, self.preprocessing, lambda start, end: [window.times for window in windows])
        except (DataError, OSError) as error:
            empty = torch.zeros(0, self.preprocessing.num_frames, 1, 1, 3, dtype=torch.uint8)
            fault = Fault(id=row.id, video=row.video, reason=str(error))
            return Sample(id=row.id, frames=empty, pts_seconds=torch.zeros(0, 1), fault=fault)
        sample.repeated_frames += sum(window.num_held for window in windows)
        return sample


def see_windows(
    rows: Sequence[Clip],
    preprocessing: Preprocessing,
    look: Callable[[Tensor], Tensor],
    faults: list[Fault],
    *,
    stride_seconds: float | None = None,
    clip_share: float = 1.0,
    device: torch.device,
    at_once: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
) -> Iterator[SeenWindows]:
    """What a model makes of all windows of each row that can be read whole, in order.

    Args:
        rows: with different ids.
        preprocessing: what the model wants.
        look: network input (n, 3, T, H, W) -> (n, ...), a result a window.
        faults: those of the other rows are added to it.
        stride_seconds: from window to window; None = as `clip_share` says.
        clip_share: of a window's length, from window to window.
        device: where the model is.
        at_once: windows that are read and computed together.
        num_workers: reader processes.
        worker_start: how they are started.
    """
    pieces: dict[str, list[Window]] = {}
    piece_rows: list[Clip] = []
    owner: dict[str, str] = {}
    failed: dict[str, Fault] = {}
    for row in rows:
        try:
            windows = cover_row(row, preprocessing, stride_seconds, clip_share=clip_share)
        except (DataError, OSError) as error:
            failed[row.id] = Fault(id=row.id, video=row.video, reason=str(error))
            continue
        for first in range(0, len(windows), at_once):
            piece = replace(row, id=f"{row.id}\x1f{first}")
            pieces[piece.id] = windows[first : first + at_once]
            piece_rows.append(piece)
            owner[piece.id] = row.id
    seen: dict[str, list[Tensor]] = {}
    repeated: dict[str, int] = {}
    dataset = ClipDataset(piece_rows, _Reader(preprocessing=preprocessing, pieces=pieces))
    keys = ([(0, index)] for index in range(len(piece_rows)))
    loader = load_batches(dataset, keys, num_workers=num_workers, worker_start=worker_start)
    with readers_watched(), closing(loader) as batches:
        for batch in batches:
            own = owner[batch.ids[0]]
            if batch.faults:
                failed.setdefault(own, replace(batch.faults[0], id=own))
                continue
            batch.frames = batch.frames.flatten(0, 1)
            with torch.no_grad():
                values = look(network_input(batch, preprocessing, device))
            seen.setdefault(own, []).append(values.cpu())
            repeated[own] = repeated.get(own, 0) + batch.repeated_frames
    faults += [failed[row.id] for row in rows if row.id in failed]
    for row in rows:
        if row.id in seen and row.id not in failed:
            windows = [window for piece in piece_rows if owner[piece.id] == row.id for window in pieces[piece.id]]
            yield SeenWindows(row, windows, torch.cat(seen[row.id]), repeated[row.id])
