"""Samples -> batches, by worker processes, in the plan's order; and the policy for samples that fail.

A fixed-size batch keeps its size: a failed sample stays in it as a masked row. It is counted and named with its
reason in `faults.jsonl`; a run with too many of them stops.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from twinreel.data.captions import missing_caption_files
from twinreel.data.clip import Batch, Clip, Fault, Sample
from twinreel.data.dataset import ClipDataset
from twinreel.data.manifest import missing_videos
from twinreel.data.processes import RUN_SIGNALS, end_with_the_run, signals_held
from twinreel.data.read_ahead import USUALLY_AHEAD
from twinreel.data.shared_rows import SharedRows
from twinreel.errors import DataError, TrainingError

__all__ = ["FaultLog", "WorkerStart", "collate", "load_batches", "readers_watched", "refuse_missing_files"]


PR_SET_PDEATHSIG = 1  # of Linux's prctl

WorkerStart: TypeAlias = Literal["auto", "fork", "spawn", "forkserver"]


def collate(items: Sequence[Sample | list[Sample]]) -> Batch:
    """Samples side by side, order kept; several views of a row, which come as a list, too."""
    samples = [sample for item in items for sample in (item if isinstance(item, list) else [item])]
    captions = [sample.captions for sample in samples]
    mask = torch.tensor([sample.caption_mask for sample in samples], dtype=torch.bool)
    return Batch(
        ids=[sample.id for sample in samples],
        frames=default_collate([sample.frames for sample in samples]),
        pts_seconds=torch.stack([sample.pts_seconds for sample in samples]),
        flip=torch.tensor([sample.flip for sample in samples]),
        valid=torch.tensor([sample.fault is None for sample in samples]),
        captions=captions,
        caption_mask=mask,
        labels=[sample.labels for sample in samples],
        options=[sample.options for sample in samples],
        repeated_frames=sum(sample.repeated_frames for sample in samples),
        faults=[sample.fault for sample in samples if sample.fault is not None],
    )


def _reduce_batch(batch: Batch) -> tuple[Any, ...]:
    """A batch on its way from a reader: its frames stay where they are, the small tensors travel as values.

    A shared tensor costs a file descriptor and a message, of which a batch would take five.
    """
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    small = {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "frames"}
    return _rebuild_batch, (values | {name: value.numpy() for name, value in small.items()}, tuple(small))


def _rebuild_batch(values: dict[str, Any], small: tuple[str, ...]) -> Batch:
    return Batch(**values | {name: torch.from_numpy(values[name]) for name in small})


ForkingPickler.register(Batch, _reduce_batch)


def load_batches(
    dataset: ClipDataset,
    keys: Iterable[list[tuple[int, int]]],
    *,
    num_workers: int,
    worker_start: WorkerStart = "auto",
    ahead: int = USUALLY_AHEAD,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """Batches in the order of `keys`, whatever the number of workers; `wait_seconds` is set on each.

    Who leaves early closes it (`contextlib.closing`): then a reader that is stuck in a file does not hold the exit.

    Args:
        dataset: what reads a sample.
        keys: one list of (epoch, row index) a batch.
        num_workers: reader processes; 0 reads in this one.
        worker_start: how they are started; `auto` = fork, but forkserver where several processes train: a fork while
            gloo's threads run can leave the reader hanging (cpython issue 112275, Python before 3.11.10).
        ahead: batches that each reader may be ahead, at least 1 (`read_ahead.plan_ahead`); changes no batch.
        pin_memory: page-locked batches, for a GPU.
    """
    options: dict[str, Any] = {}
    if num_workers:
        dataset = copy.copy(dataset)
        dataset.rows = SharedRows(dataset.rows)
        start = _chosen(worker_start)
        options = {
            "multiprocessing_context": start,
            "prefetch_factor": ahead,
            "worker_init_fn": partial(_start_worker, None if start == "forkserver" else os.getpid()),
        }
    with warnings.catch_warnings(), signals_held():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: the run says so itself
        loader = DataLoader(
            dataset,
            batch_sampler=_Keys(keys),
            collate_fn=collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            **options,
        )
        iterator = iter(loader)
    try:
        while True:
            began = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            batch.wait_seconds = time.perf_counter() - began
            _refuse_lost_reader(iterator)
            yield batch
    finally:
        _stop_readers(iterator)


def _chosen(worker_start: WorkerStart) -> str:
    """The start method; for a fork server, the server is there when this returns."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    start = ("forkserver" if several else "fork") if worker_start == "auto" else worker_start
    if start == "forkserver":
        with signals_held():
            forkserver.set_forkserver_preload([__name__])
            forkserver.ensure_running()
    return start


@contextmanager
def readers_watched() -> Iterator[None]:
    """A reader process that was killed becomes an error with advice; torch says so wherever the main thread is."""
    try:
        yield
    except RuntimeError as error:
        if not (str(error).startswith("DataLoader worker") or "unable to allocate shared memory" in str(error)):
            raise
        raise TrainingError(
            f"a reader process ended: {str(error).strip().splitlines()[-1]}. Most often memory is short (see the "
            "system log for an out-of-memory kill), or /dev/shm is full (docker: --shm-size=8g): lower "
            "data.num_workers, or make clips or batches smaller. The last checkpoint is intact: go on with --resume."
        ) from error


def _refuse_lost_reader(iterator: object) -> None:
    """Torch is told at once of a lost child; of one that a fork server started, only when its batch is missed."""
    for worker in getattr(iterator, "_workers", ()):
        if not worker.is_alive():
            raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly")


def _stop_readers(iterator: object) -> None:
    """End the readers of a loader that is left early: in order, and those that are stuck in a file by force."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():
            worker.kill()  # it ignores the SIGTERM that torch has sent
            worker.join(5.0)


class _Keys:
    """An iterable of key lists in the shape that DataLoader wants of a batch sampler."""

    def __init__(self, keys: Iterable[list[tuple[int, int]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.keys)


def _start_worker(parent: int | None, worker: int) -> None:
    """What a reader does first; `parent` is who started it, None if a fork server did, for a run that it belongs to."""
    gc.freeze()  # a collection that looks at what was inherited would copy all of it
    torch.set_num_threads(1)  # decoding scales by processes; threads of threads only fight
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no reader outlives a run that is killed
        if os.getppid() != parent:  # nor one that was killed in between
            os._exit(1)
    elif parent is None:
        end_with_the_run()
    # A signal to the whole group is the run's to answer: it saves.
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def refuse_missing_files(rows: Sequence[Clip], max_faults: float) -> list[Clip]:
    """The rows whose video or caption file does not exist, if they are few.

    Raises:
        DataError: more than `max_faults` of the listed videos, or of the listed caption files, do not exist.
    """
    no_video, no_captions = missing_videos(rows), missing_caption_files(rows)
    _refuse("videos", [row.video for row in no_video], {row.video for row in rows}, max_faults)
    listed = {row.caption_file for row in rows if row.caption_file is not None}
    _refuse("caption files", [str(row.caption_file) for row in no_captions], listed, max_faults)
    return list({row.id: row for row in (*no_video, *no_captions)}.values())


def _refuse(what: str, absent: Sequence[str], listed: Collection[str], max_faults: float) -> None:
    paths = list(dict.fromkeys(absent))
    if len(paths) > max_faults * len(listed):
        first = "\n".join(f"  {path}" for path in paths[:5])
        raise DataError(
            f"{len(paths)} of {len(listed)} listed {what} do not exist ({len(paths) / len(listed):.0%}; allowed "
            f"data.max_faults={max_faults:.0%}). First:\n{first}\n"
            "Check data.root (paths are relative to it, or else to the manifest's folder)."
        )


class FaultLog:
    """Counts samples that failed, names them in `faults.jsonl`, and stops a run with too many.

    Of the last 1 000 samples (or, while fewer were seen, of as many as there are rows, at most 1 000) no more than
    `max_faults` may have failed.
    """

    def __init__(
        self, path: Path | None, max_faults: float, num_rows: int, state: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.max_faults = max_faults
        state = state or {"total": 0, "recent": ""}
        self.recent = deque((flag == "1" for flag in state["recent"]), maxlen=1000)
        self.least = min(1000, num_rows)
        self.total = int(state["total"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run counts on: pass it to `FaultLog` again."""
        return {"total": self.total, "recent": "".join("01"[failed] for failed in self.recent)}

    def record(self, valid: Sequence[bool], faults: Sequence[Fault], step: int | None = None) -> None:
        """Count samples and faults.

        Args:
            valid: of each sample, whether it could be read.
            faults: why the others could not.
            step: from 1.

        Raises:
            TrainingError: too many of the last samples failed.
        """
        self.recent.extend(not ok for ok in valid)
        self.total += len(faults)
        if self.path is not None and faults:
            with self.path.open("a", encoding="utf-8") as file:
                for fault in faults:
                    file.write(json.dumps({"step": step, **asdict(fault)}, ensure_ascii=False) + "\n")
        failed = sum(self.recent)
        if failed > self.max_faults * max(len(self.recent), self.least):
            named = "\n".join(f"  {fault.reason}" for fault in faults[:5])
            raise TrainingError(
                f"{failed} of the last {len(self.recent)} samples could not be read (allowed data.max_faults="
                f"{self.max_faults:.0%}). Last:\n{named}\nAll are in {self.path or 'the report above'}; mend or "
                "remove these rows, or raise data.max_faults."
            )
