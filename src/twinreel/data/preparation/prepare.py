"""A collection, re-encoded for fast random access: small frames, key frames close together, times as they were.

The folder that is written:

- `videos/`: the files, each under its video's own path. They are written under other names and renamed when they are
  complete and have been read back.
- `manifest.jsonl`: the rows, with the same ids, and windows that count from the new file's beginning.
- `map.jsonl`: a line for each file: what it was made from (path, SHA-256, bytes), which seconds of it, and how.
- `faults.jsonl`: the rows that are not in the manifest, with reasons; `prepare.json`: the settings.

A killed run goes on with the videos that were not finished, and what it leaves is what an undisturbed run leaves, byte
for byte, with any number of processes. Every source is hashed again: one that has changed is redone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinreel.data import sampling
from twinreel.data.clip import Clip, Fault
from twinreel.data.manifest import write_manifest
from twinreel.data.preparation.collection import (
    Listed,
    claim,
    flush_folder,
    list_collection,
    refuse_inside,
    stopped,
)
from twinreel.data.preparation.encode import Encoding, require_encoder
from twinreel.data.preparation.per_file import Died, each_file
from twinreel.data.preparation.prepare_gain import Gain, Pair, measure_gain
from twinreel.data.preparation.prepare_plan import Plan, Stretch, moved_row, plan_stretches
from twinreel.data.preparation.prepare_work import (
    PARTIAL,
    Job,
    Outcome,
    Record,
    failed,
    prepare_in_worker,
    prepare_video,
)
from twinreel.data.tables import write_whole
from twinreel.errors import ConfigError, DataError

__all__ = ["PrepareResult", "prepare_collection"]

FACTS, MANIFEST, MAP, FAULTS = "prepare.json", "manifest.jsonl", "map.jsonl", "faults.jsonl"
JOURNAL = ".map.jsonl.unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """What was prepared: `listed` videos = `written` now + `already_there` + `failed`.

    Attributes:
        folder: that was written.
        manifest: in it; None if no row is left.
        listed: videos.
        written: videos prepared by this call.
        already_there: videos prepared before.
        failed: videos of which something could not be prepared.
        rows: in the manifest.
        files: that were written, now and before.
        changed: videos that were there and have changed since: they were prepared again.
        unread: why videos that were prepared before could not be compared: their files are kept as they are.
        bytes_before: of the videos that were prepared.
        bytes_after: of the files.
        seconds: of video in the files.
        num_frames: in the files.
        left_out: other files of a folder, by suffix.
        faults: the rows that are not in the manifest.
        gain: how much faster reading is, if that was measured.
    """

    folder: str
    manifest: str | None
    listed: int
    written: int
    already_there: int
    failed: int
    rows: int
    files: int
    changed: list[str]
    unread: list[str]
    bytes_before: int
    bytes_after: int
    seconds: float
    num_frames: int
    left_out: dict[str, int]
    faults: list[Fault]
    gain: Gain | None

    def to_table(self) -> str:
        """A few lines for people."""
        mb_before, mb_after = self.bytes_before / 1e6, self.bytes_after / 1e6
        times = f" ({mb_after / mb_before:.2f} times)" if mb_before else ""
        lines = [
            f"{self.listed} videos listed: {self.written} written, {self.already_there} already there, "
            f"{self.failed} failed",
            f"{self.files} files: {mb_before:.1f} MB before, {mb_after:.1f} MB after{times}; {self.seconds:.1f} s of "
            f"video, {self.num_frames} frames",
        ]
        if self.changed:
            lines.append(f"{len(self.changed)} videos have changed since and were redone (first: {self.changed[0]})")
        if self.unread:
            lines.append(
                f"{len(self.unread)} videos that were prepared before can't be read any more; their files are kept as "
                f"they are (first: {self.unread[0]})"
            )
        if self.left_out:
            others = ", ".join(f"{number} {suffix or 'without ending'}" for suffix, number in self.left_out.items())
            lines.append(f"left out by their ending: {others}")
        if self.gain is not None:
            lines.append(
                f"random clips (16 frames at 5 Hz, 224x224; {self.gain.num_clips} clips of {self.gain.num_files} "
                f"files; one process, processor time): {self.gain.before:.1f} clips/s before, "
                f"{self.gain.after:.1f} after ({self.gain.ratio:.1f} times)"
            )
        if self.manifest is not None:
            lines.append(f"{self.rows} rows; train from it: data.manifest={self.manifest}")
        return "\n".join(lines)


def prepare_collection(
    source: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    encoding: Encoding | None = None,
    clip_seconds: float | None = None,
    allow_partial: bool = False,
    num_workers: int = 1,
    measured_files: int = 4,
    report: Callable[[int, int], None] | None = None,
) -> PrepareResult:
    """Re-encode the videos of a manifest or folder; goes on where a killed run stopped.

    Args:
        source: a manifest, or a folder of videos.
        out: the folder to be; not inside the folder that is prepared.
        root: folder that the manifest's paths start from; default: its own.
        encoding: size, key frames, quality.
        clip_seconds: keep only the rows' windows and so much around them; see `prepare_plan.py`.
        allow_partial: of a damaged video keep what comes before the damage; by default it is a fault.
        num_workers: processes; 0 works in this one.
        measured_files: how many files are read before and after for `gain`; 0 for none.
        report: called with (videos done, videos in all).

    Raises:
        ConfigError: an option has no sense, or `out` lies in the folder that is prepared.
        DataError: nothing to prepare, `out` holds something else or was begun with other settings, the disk is full.
        DependencyError: there is no encoder.
    """
    encoding = encoding or Encoding()
    if num_workers < 0:
        raise ConfigError(f"workers={num_workers}: must be 0 or more")
    require_encoder()
    folder = Path(os.path.abspath(os.path.expanduser(out)))
    listed = list_collection(source, root=root)
    refuse_inside(folder, source, listed.files, "prepared")
    plan = plan_stretches(listed, clip_seconds)
    _refuse_foreign(folder)
    settings = {**asdict(encoding), "clip_seconds": clip_seconds}
    with claim(folder, settings, FACTS):
        known = _records(folder)
        _refuse_other_rows(folder, listed.rows, plan, known)
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        jobs = _jobs(folder, plan, known, encoding, allow_partial)
        outcomes = _run(folder, jobs, num_workers, settings, report)
        faults = _finish(folder, listed.rows, plan, outcomes)
    whole = [record for outcome in outcomes.values() for record in outcome.records if record["partial"] is None]
    pairs = [Pair(r["video"], r["start_seconds"], str(folder / r["output"]), r["seconds"]) for r in whole]
    gain = measure_gain(pairs, measured_files)
    return _result(folder, listed, outcomes, faults, gain)


# ---- what may begin or go on


def _refuse_foreign(folder: Path) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"--out {folder} is a file; name a folder")
    if os.path.isdir(folder) and not os.path.exists(folder / FACTS) and set(os.listdir(folder)) - {".lock"}:
        raise ConfigError(f"--out {folder} holds other things (and no {FACTS}); choose an empty or new folder")


def _refuse_other_rows(folder: Path, rows: Sequence[Clip], plan: Plan, known: Mapping[str, Record]) -> None:
    """One folder is one collection: files and rows of another list would be lost from its manifest and map.

    Raises:
        ConfigError: there are some.
    """
    outputs = {stretch.output for those in plan.stretches.values() for stretch in those}
    others = [f"{output} of {record['video']}" for output, record in known.items() if output not in outputs]
    if not others and (folder / MANIFEST).exists():
        ids = {row.id for row in rows}
        others = [f"row {line['id']!r}" for line in _lines(folder / MANIFEST) if line["id"] not in ids]
    if others:
        raise ConfigError(
            f"{folder} holds {len(others)} files or rows that are not listed now (first: {others[0]}); prepare each "
            "list of rows, or each --clip-seconds, into a folder of its own, or all rows as one list"
        )


def _records(folder: Path) -> dict[str, Record]:
    """The newest line about every file, of the map and of what an unfinished run has noted; broken lines are left."""
    return {line["output"]: line for name in (MAP, JOURNAL) for line in _lines(folder / name)}


def _lines(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield dict(json.loads(line))
        except ValueError:
            continue  # a kill can leave half a line


def _jobs(folder: Path, plan: Plan, known: Mapping[str, Record], encoding: Encoding, allow_partial: bool) -> list[Job]:
    return [
        Job(
            folder=str(folder),
            video=video,
            stretches=tuple(stretches),
            encoding=encoding,
            allow_partial=allow_partial,
            known=tuple(known[stretch.output] for stretch in stretches if stretch.output in known),
        )
        for video, stretches in plan.stretches.items()
    ]


# ---- the work


def _run(
    folder: Path,
    jobs: Sequence[Job],
    num_workers: int,
    settings: Mapping[str, Any],
    report: Callable[[int, int], None] | None,
) -> dict[str, Outcome]:
    """What became of every video; each is noted in the journal as soon as its files are there.

    Raises:
        DataError: the disk is full or cannot be written.
    """
    outcomes: dict[str, Outcome] = {}
    try:
        with open(folder / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write("\n")  # ends a line that a kill has cut
            for index, result in _each(jobs, num_workers):
                outcome = _died(jobs[index], result) if isinstance(result, Died) else result
                if outcome.stopped is not None:
                    raise DataError(stopped(folder, outcome.stopped, len(outcomes), len(jobs)))
                if outcome.fresh:
                    for record in outcome.records:
                        record["settings"] = dict(settings)
                        journal.write(json.dumps(record, ensure_ascii=False) + "\n")
                    journal.flush()
                outcomes[jobs[index].video] = outcome
                if report is not None:
                    report(len(outcomes), len(jobs))
    except OSError as error:
        raise DataError(stopped(folder, error.strerror or str(error), len(outcomes), len(jobs))) from error
    return outcomes


def _each(jobs: Sequence[Job], num_workers: int) -> Iterator[tuple[int, Any]]:
    if num_workers == 0:
        yield from ((index, prepare_video(job)) for index, job in enumerate(jobs))
    else:
        yield from each_file(prepare_in_worker, jobs, num_workers=num_workers, most_seconds=float("inf"))


def _died(job: Job, died: Died) -> Outcome:
    return failed(job, f"{job.video}: {died.reason}")


# ---- what is left behind


def _finish(folder: Path, rows: Sequence[Clip], plan: Plan, outcomes: Mapping[str, Outcome]) -> list[Fault]:
    """Write map, manifest and faults in the order of the rows, and drop the journal; the faults."""
    made = {record["output"]: record for outcome in outcomes.values() for record in outcome.records}
    order = [stretch.output for those in plan.stretches.values() for stretch in those]
    lines = [json.dumps(made[output], ensure_ascii=False) + "\n" for output in order if output in made]
    kept: list[Clip] = []
    faults: list[Fault] = []
    for row in rows:
        stretch = plan.of_row[row.id]
        record = made.get(stretch.output)
        reason = _why_not(row, stretch, outcomes[row.video], record)
        if reason is not None:
            faults.append(Fault(id=row.id, video=row.video, reason=reason))
        elif record is not None:
            kept.append(moved_row(row, stretch.output, record["start_seconds"]))
    write_whole(folder / MAP, "".join(lines))
    if kept:
        write_manifest(folder / MANIFEST, kept)
    if faults:
        write_whole(folder / FAULTS, "".join(json.dumps(asdict(f), ensure_ascii=False) + "\n" for f in faults))
    for name, there in ((MANIFEST, kept), (FAULTS, faults), (JOURNAL, None)):
        if not there:
            (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    flush_folder(folder)
    return faults


def _why_not(row: Clip, stretch: Stretch, outcome: Outcome, record: Record | None) -> str | None:
    """Why a row can't be in the manifest; None if it can."""
    if stretch.output in outcome.reasons:
        return outcome.reasons[stretch.output]
    start = row.start_seconds or 0.0
    end = float("inf") if row.end_seconds is None else row.end_seconds
    try:
        sampling.intersect_window(start, end, outcome.seconds)
    except DataError as error:
        return f"{row.video}: {error}"
    assert record is not None
    if start >= record["start_seconds"] + record["seconds"]:
        return f"{row.video}: the window [{start:g}, {end:g}) s lies behind what is readable: {record['partial']}"
    return None


def _result(
    folder: Path, listed: Listed, outcomes: Mapping[str, Outcome], faults: list[Fault], gain: Gain | None
) -> PrepareResult:
    records = [record for outcome in outcomes.values() for record in outcome.records]
    bad = {fault.video for fault in faults}
    good = {video: outcome for video, outcome in outcomes.items() if video not in bad}
    rows = len(listed.rows) - len(faults)
    return PrepareResult(
        folder=str(folder),
        manifest=str(folder / MANIFEST) if rows else None,
        listed=len(listed.files),
        written=sum(outcome.fresh for outcome in good.values()),
        already_there=sum(not outcome.fresh for outcome in good.values()),
        failed=len(bad),
        rows=rows,
        files=len(records),
        unread=[outcome.unread for outcome in outcomes.values() if outcome.unread is not None],
        changed=[video for video, outcome in outcomes.items() if outcome.changed],
        bytes_before=sum({record["video"]: record["bytes"] for record in records}.values()),
        bytes_after=sum(record["output_bytes"] for record in records),
        seconds=sum(record["seconds"] for record in records),
        num_frames=sum(record["num_frames"] for record in records),
        left_out=listed.left_out,
        faults=faults,
        gain=gain,
    )
