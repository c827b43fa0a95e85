"""One video of a collection -> its files, written whole or not at all. Works in processes of its own."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from twinreel.data.preparation.collection import disk_failure, flush_folder
from twinreel.data.preparation.encode import Encoding, encode_stretch
from twinreel.data.preparation.prepare_plan import Stretch
from twinreel.data.storage import Reader, open_video
from twinreel.data.storage.lmdb_store import find_store, stored
from twinreel.errors import DataError

__all__ = ["PARTIAL", "Job", "Outcome", "Record", "failed", "prepare_in_worker", "prepare_video"]

PARTIAL = ".partial"  # where files are written before they are renamed

Record: TypeAlias = dict[str, Any]  # a line of map.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One video: what to write of it, and what an earlier run has noted about the same files."""

    folder: str
    video: str
    stretches: tuple[Stretch, ...]
    encoding: Encoding
    allow_partial: bool
    known: tuple[Record, ...]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a video.

    `reasons` says of files why they are not there, `stopped` why the whole run must stop, `unread` why it is not known
    whether a video that was prepared earlier has changed.
    """

    records: list[Record]
    reasons: dict[str, str]
    seconds: float = 0.0
    fresh: bool = True
    changed: bool = False
    stopped: str | None = None
    unread: str | None = None


def failed(job: Job, reason: str) -> Outcome:
    """The outcome of a video of which nothing could be prepared."""
    return Outcome(records=[], reasons={stretch.output: reason for stretch in job.stretches})


def prepare_in_worker(job: Job) -> Outcome:
    """In a process of its own: as `prepare_video`."""
    torch.set_num_threads(1)
    return prepare_video(job)


def prepare_video(job: Job) -> Outcome:
    """Prepare one video, unless an earlier run did and it has not changed."""
    try:
        digest, size = _source_hash(job.video)
    except DataError as error:
        if _is_done(job, job.known):  # a source may be moved away after it was prepared: that spoils nothing
            return _already_there(job.known, unread=str(error))
        return failed(job, str(error))
    same = [record for record in job.known if record["sha256"] == digest]
    if _is_done(job, same):
        return _already_there(same)
    outcome = Outcome(records=[], reasons={}, changed=len(same) < len(job.known))
    try:
        with open_video(job.video) as reader:
            outcome.seconds = reader.info.duration_seconds
            source = {"video": job.video, "sha256": digest, "bytes": size, "source_seconds": outcome.seconds}
            for stretch in job.stretches:
                if stretch.needed_from < outcome.seconds:
                    _write(job, stretch, reader, source, outcome)
        return outcome
    except DataError as error:
        for stretch in job.stretches:  # made of the video before it changed
            Path(job.folder, stretch.output).unlink(missing_ok=True)
        return failed(job, str(error))
    except OSError as error:
        if (why := disk_failure(error)) is not None:
            return Outcome(records=[], reasons={}, stopped=why)
        return failed(job, f"{job.video}: {error}")


def _already_there(records: Sequence[Record], unread: str | None = None) -> Outcome:
    seconds = records[0]["source_seconds"]
    return Outcome(records=list(records), reasons={}, seconds=seconds, fresh=False, unread=unread)


def _is_done(job: Job, known: Sequence[Record]) -> bool:
    """Whether the files that earlier runs noted are all there, and all that are to be."""
    if not known:
        return False
    there = {
        record["output"] for record in known if _size(Path(job.folder, record["output"])) == record["output_bytes"]
    }
    wanted = {stretch.output for stretch in job.stretches if stretch.needed_from < known[0]["source_seconds"]}
    return there == wanted and (job.allow_partial or not any(record["partial"] for record in known))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _write(job: Job, stretch: Stretch, reader: Reader, source: Record, outcome: Outcome) -> None:
    """Write one file; what comes of it goes into `outcome`."""
    target = Path(job.folder, stretch.output)
    unfinished = Path(job.folder, PARTIAL, hashlib.sha256(stretch.output.encode()).hexdigest() + ".mp4")
    unfinished.parent.mkdir(exist_ok=True)
    start, end = stretch.start_seconds, stretch.end_seconds
    try:
        encoded = encode_stretch(reader, start, end, unfinished, job.encoding, allow_partial=job.allow_partial)
    except DataError as error:
        unfinished.unlink(missing_ok=True)
        target.unlink(missing_ok=True)  # what was made of the video before it changed
        if shutil.disk_usage(job.folder).free < 2**20:  # the file may be cut short without a word
            raise OSError(errno.ENOSPC, "") from error
        outcome.reasons[stretch.output] = str(error)
        return
    flush_folder(unfinished.parent, [unfinished.name])
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(unfinished, target)
    flush_folder(target.parent)
    facts = {**source, "output": stretch.output, **asdict(encoded), "output_bytes": target.stat().st_size}
    outcome.records.append({**facts, "warnings": list(reader.info.warnings)})


def _source_hash(video: str) -> tuple[str, int]:
    """SHA-256 and number of bytes of a file, of a value in a store, or of the files of a folder one after another.

    Raises:
        DataError: they cannot be read.
    """
    place = None if os.path.exists(video) else find_store(video)
    value = None if place is None else stored(*place)
    if value is not None:
        return hashlib.sha256(value.data).hexdigest(), len(value.data)
    folder = video if os.path.isdir(video) else os.path.splitext(video)[0]
    names = [video]
    if not os.path.isfile(video) and os.path.isdir(folder):
        names = sorted(entry.path for entry in os.scandir(folder) if entry.is_file())
    digest, size = hashlib.sha256(), 0
    try:
        for name in names:
            with open(name, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
                    size += len(block)
    except FileNotFoundError:
        raise DataError(f"{video}: no such file") from None
    except OSError as error:
        raise DataError(f"{video}: can't be read ({error.strerror})") from error
    return digest.hexdigest(), size
