"""Videos -> folders of images (`img_00001.jpg`, ...) with the exact seconds of each, to be read by `frame_folder.py`.

Every video becomes one folder, written under `.partial` and renamed when it is complete, so a killed run goes on with
the next. The frames are those of `VideoReader`: all, or at a rate the ones on show at 0, 1 / rate, 2 / rate and so on.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from twinreel.data.clip import Fault
from twinreel.data.preparation.collection import (
    Listed,
    claim,
    disk_failure,
    flush_folder,
    list_collection,
    refuse_inside,
    refuse_same_names,
    stopped,
    write_lists,
)
from twinreel.data.preparation.per_file import Died, each_file
from twinreel.data.storage import content_digest, open_video, video_state
from twinreel.data.storage.frame_folder import TIMES_FILE
from twinreel.errors import ConfigError, DataError

__all__ = ["ExtractResult", "extract_collection"]

FACTS = "extract.json"
AT_ONCE_BYTES = 128 * 2**20  # of decoded frames
MOST_RATE = 1000.0  # images a second
REPEATED = 0.02  # share of images that is no more than a rounding of rates
MOST_SECONDS = 6 * 3600.0  # that one video may take
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractResult:
    """What was extracted: `listed` videos = `written` now + `already_there` + the number of `faults`.

    `images` and `bytes` count what all folders hold. `manifest` is None if nothing was kept. `repeated` has the videos
    that have fewer frames than `rate` asks for, with their number of images that repeat the one before; `unlisted` the
    folders of videos that are not listed now.
    """

    folder: str
    manifest: str | None
    listed: int
    written: int
    already_there: int
    images: int
    bytes: int
    left_out: dict[str, int]
    repeated: dict[str, int]
    unlisted: list[str]
    faults: list[Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One video and where its images go. `rate` in Hz, None for every frame; `short_side` in pixels."""

    video: str
    out: str
    name: str
    rate: float | None
    quality: int
    short_side: int | None


def extract_collection(
    source: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    rate: float | None = None,
    quality: int = 95,
    short_side: int | None = None,
    num_workers: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> ExtractResult:
    """Write the frames of every video of a manifest or folder as JPEG; goes on where a killed run stopped.

    `out` then has a folder for each video, named as the video without extension, `manifest.jsonl` (the rows, ready to
    be trained on) and, if some failed, `faults.jsonl`.

    Args:
        source: a manifest, or a folder of videos.
        out: the folder to be.
        root: folder that the manifest's paths start from; default: its own.
        rate: images a second, each the frame on show at k / rate; None for every frame.
        quality: of JPEG, 1 to 100.
        short_side: pixels that the short side is scaled down to; a smaller video stays as it is.
        num_workers: processes.
        report: called with (videos done, videos in all).

    Raises:
        ConfigError: an option has no sense, or `out` lies in the folder that is extracted.
        DataError: nothing to extract, two videos for one folder, `out` was begun with other options, the disk is full.
    """
    _check_options(rate, quality, short_side, num_workers)
    folder = Path(os.path.abspath(os.path.expanduser(out)))
    listed = list_collection(source, root=root)
    refuse_inside(folder, source, listed.files, "extracted")
    names = {video: os.path.splitext(path)[0] for video, path in listed.files.items()}
    refuse_same_names(names, "folder", "A folder is named as its video without extension: rename one of each.")
    _refuse_nested(names)
    options: dict[str, Any] = {
        "rate": rate if rate is None else float(rate),
        "quality": quality,
        "short_side": short_side,
    }
    jobs = [_Job(video=video, out=str(folder), name=name, **options) for video, name in sorted(names.items())]
    with claim(folder, options, FACTS):
        shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
        results, faults = _run(folder, listed, jobs, num_workers, report)
        shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
        try:
            write_lists(folder, listed.rows, {video: names[video] for video in results}, faults)
        except OSError as error:
            why = disk_failure(error) or str(error)
            raise DataError(stopped(folder, why, len(results), len(jobs))) from error
        unlisted = sorted(set(_folders(folder)) - set(names.values()))
    return ExtractResult(
        folder=str(folder),
        manifest=str(folder / "manifest.jsonl") if results else None,
        listed=len(jobs),
        written=sum(not result.was_there for result in results.values()),
        already_there=sum(result.was_there for result in results.values()),
        images=sum(result.images for result in results.values()),
        bytes=sum(result.bytes for result in results.values()),
        left_out=listed.left_out,
        repeated={
            video: result.repeated
            for video, result in sorted(results.items())
            if rate is not None and result.repeated > 1 + REPEATED * result.images
        },
        unlisted=unlisted,
        faults=faults,
    )


def _run(
    folder: Path,
    listed: Listed,
    jobs: Sequence[_Job],
    num_workers: int,
    report: Callable[[int, int], None] | None,
) -> tuple[dict[str, _Written], list[Fault]]:
    """What was written of each video, and the faults in the order of their ids.

    Raises:
        DataError: the disk is full or cannot be written.
    """
    results: dict[str, _Written] = {}
    faults: list[Fault] = []
    for done, (index, result) in enumerate(_all(jobs, num_workers), start=1):
        video = jobs[index].video
        if isinstance(result, _Stopped):
            raise DataError(stopped(folder, result.why, len(results), len(jobs)))
        if isinstance(result, _Written):
            results[video] = result
        else:
            faults.append(Fault(id=listed.files[video], video=video, reason=str(result)))
        if report is not None:
            report(done, len(jobs))
    return results, sorted(faults, key=lambda fault: fault.id)


def _folders(top: Path) -> Iterator[str]:
    """The folders of images under a folder, with `/`."""
    for path, folders, files in os.walk(top):
        if TIMES_FILE in files:
            folders.clear()
            yield os.path.relpath(path, top).replace(os.sep, "/")


def _check_options(rate: float | None, quality: int, short_side: int | None, num_workers: int) -> None:
    if rate is not None and not 0 < rate <= MOST_RATE:
        raise ConfigError(
            f"rate={rate:g}: must be a number of images a second, above 0 and up to {MOST_RATE:g}; leave it out for "
            "every frame"
        )
    if not 1 <= quality <= 100:
        raise ConfigError(f"quality={quality}: must be 1 to 100")
    if short_side is not None and short_side < 1:
        raise ConfigError(f"short_side={short_side}: must be a number of pixels, 1 or more")
    if num_workers < 1:
        raise ConfigError(f"workers={num_workers}: must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    images: int
    bytes: int
    repeated: int  # images that show the frame of the one before
    was_there: bool


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Why no video can be written any more."""

    why: str


def _all(jobs: Sequence[_Job], num_workers: int) -> Iterator[tuple[int, Any]]:
    """(index, `_Written`, `_Stopped` or the reason of a failure), as they come."""
    for index, result in each_file(_extract_one, jobs, num_workers=num_workers, most_seconds=MOST_SECONDS):
        yield index, f"{jobs[index].video}: {result.reason}" if isinstance(result, Died) else result


def _extract_one(job: _Job) -> _Written | _Stopped | str:
    """Extract one video, if it is not there yet; the reason if that fails."""
    target = Path(job.out, job.name)
    partial = Path(job.out, _PARTIAL, hashlib.blake2b(job.name.encode(), digest_size=16).hexdigest())
    try:
        if target.exists():
            return _already_there(target, job)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        written = _write_images(partial, job)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, target)
        flush_folder(target.parent)
        return written
    except DataError as error:
        return str(error)
    except OSError as error:
        if (why := disk_failure(error)) is not None:
            shutil.rmtree(partial, ignore_errors=True)
            return _Stopped(why)
        return f"{job.video}: {error.strerror or error}: {error.filename or target}"


def _write_images(folder: Path, job: _Job) -> _Written:
    source = _source_facts(job.video)
    names: list[str] = []
    appeared: list[float] = []
    with open_video(job.video) as reader:
        if reader.missing_bytes:
            raise DataError(f"{job.video}: the file is cut short: {reader.missing_bytes} bytes are missing")
        info, warnings = reader.info, reader.info.warnings
        times = reader.frame_times() if job.rate is None else _grid(job.rate, info.duration_seconds)
        number = max(1, AT_ONCE_BYTES // (3 * info.height * info.width))
        for first in range(0, len(times), number):
            frames = reader.frames_at(times[first : first + number])
            appeared += frames.pts_seconds.tolist()
            warnings = frames.warnings
            for picture in frames.data:
                names.append(f"img_{len(names) + 1:05d}.jpg")
                _save(picture, folder / names[-1], job)
        facts: dict[str, Any] = {
            "times_seconds": times,
            "end_seconds": max(info.duration_seconds, math.nextafter(times[-1], math.inf)),
            "tolerance_seconds": reader.tolerance,
            "frame_rate": job.rate or info.frame_rate or len(times) / info.duration_seconds,
            "source_times_seconds": appeared,
            "source": source,
            "image_bytes": [os.path.getsize(folder / name) for name in names],
            "warnings": list(warnings),
        }
    (folder / TIMES_FILE).write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    flush_folder(folder, [*names, TIMES_FILE])  # after all are written: the first takes most of them along
    repeated = len(appeared) - len(set(appeared))
    return _Written(images=len(names), bytes=sum(facts["image_bytes"]), repeated=repeated, was_there=False)


def _grid(rate: float, duration: float) -> list[float]:
    """0, 1 / rate, 2 / rate, ... before the end; one image at least."""
    return list(takewhile(lambda time: time == 0 or time < duration - 1e-9, (k / rate for k in count())))


def _save(picture: Tensor, path: Path, job: _Job) -> None:
    image = Image.fromarray(np.asarray(picture))
    if job.short_side is not None and min(image.size) > job.short_side:
        scale = job.short_side / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=job.quality)
    path.write_bytes(content.getbuffer())  # Pillow's own writing does not see where a full disk takes a part


def _source_facts(video: str) -> dict[str, Any]:
    state = video_state(video)
    size, changed = (None, None) if state is None else state
    return {"name": os.path.basename(video), "bytes": size, "changed_ns": changed, "blake2b": _digest(video)}


def _digest(video: str) -> str | None:
    try:
        return content_digest(video)
    except OSError as error:  # the video's trouble, not that of the disk that is written
        raise DataError(f"{video}: can't be read ({error.strerror or error})") from error


def _already_there(target: Path, job: _Job) -> _Written:
    """What an earlier run wrote for a video.

    Raises:
        DataError: it is incomplete, or from a video that was another then.
    """
    path = target / TIMES_FILE
    try:
        facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        source, sizes, appeared = facts["source"], facts["image_bytes"], facts["source_times_seconds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{job.video}: {target} is there and was not extracted here ({error}); move it away") from error
    there = [os.path.getsize(image) if image.is_file() else -1 for image in _images(target, len(sizes))]
    if there != sizes:
        raise DataError(f"{job.video}: {target} is incomplete or was changed; delete it and run the same command again")
    state = video_state(job.video)
    if state != (source["bytes"], source["changed_ns"]) and _digest(job.video) != source["blake2b"]:
        raise DataError(f"{job.video}: {target} was made from another video; delete it, or choose another --out")
    repeated = len(appeared) - len(set(appeared))
    return _Written(images=len(sizes), bytes=sum(sizes), repeated=repeated, was_there=True)


def _images(folder: Path, number: int) -> Iterator[Path]:
    return (folder / f"img_{position + 1:05d}.jpg" for position in range(number))


def _refuse_nested(names: Mapping[str, str]) -> None:
    """Refuse a video whose folder would hold the folders of others: `a.mp4` beside `a/b.mp4`."""
    videos = {name: video for video, name in names.items()}
    for name, video in videos.items():
        for parent in map(str, Path(name).parents):
            if parent in videos:
                raise DataError(
                    f"{videos[parent]}: its images would lie in the folder that {video} lies in too; rename one of them"
                )
