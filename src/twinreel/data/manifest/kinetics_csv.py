"""Kinetics' own CSV (`label,youtube_id,time_start,time_end,split`, with or without `is_cc`) as rows of a manifest.

Downloaders write a clip as `<youtube_id>_<start>_<end>.mp4`, both times in six digits, and lay it flat, in a folder of
its class or in one of its split; some keep the whole video as `<youtube_id>.mp4`. The file is looked for by its name
anywhere below the folder, with any suffix of a video. A trimmed clip is a row without a window, a whole video has the
window `[time_start, time_end)`. A row without a file keeps the name of the trimmed clip, so that it counts as missing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from twinreel.data.tables import VIDEO_SUFFIXES, Table

__all__ = ["is_kinetics", "kinetics_table"]

_NEEDED = ("youtube_id", "time_start", "time_end")


def is_kinetics(table: Table) -> bool:
    """Whether a table has Kinetics' columns."""
    return set(_NEEDED) <= set(table.columns)


def kinetics_table(table: Table, folder: str, files: Iterable[str]) -> Table:
    """The same with the columns of a manifest: id, video, window, label and split.

    Args:
        table: Kinetics' own.
        folder: what the videos of the result are relative to.
        files: paths of the files below it, videos and others.
    """
    problems = list(table.problems)
    clips: list[tuple[int, dict[str, Any], str]] = []
    for line, record in table.records:
        try:
            clips.append((line, record, _clip_name(record)))
        except ValueError as error:
            problems.append(f"{table.path}:{line}: {error}")
    wanted = {name for _, record, clip in clips for name in (clip, str(record["youtube_id"]))}
    found = _find(folder, files, wanted)
    records: list[tuple[int, dict[str, Any]]] = []
    for line, record, clip in clips:
        try:
            records.append((line, _manifest_record(record, clip, found)))
        except ValueError as error:
            problems.append(f"{table.path}:{line}: {error}")
    columns = ["id", "video", "start_seconds", "end_seconds"]
    columns += [name for name in ("label", "split") if name in table.columns]
    return Table(path=table.path, columns=columns, records=records, problems=problems, cells=table.cells)


def _clip_name(record: Mapping[str, Any]) -> str:
    """`<youtube_id>_<start>_<end>`, the name of a trimmed clip without its suffix. Raises ValueError."""
    missing = [name for name in _NEEDED if name not in record]
    if missing:
        raise ValueError(f"{missing[0]} is empty")
    times = []
    for name in _NEEDED[1:]:
        try:
            seconds = float(record[name])
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} {record[name]!r} must be a number of seconds, 0 or more")
        times.append(int(seconds))
    return f"{record['youtube_id']}_{times[0]:06d}_{times[1]:06d}"


def _find(folder: str, files: Iterable[str], wanted: set[str]) -> dict[str, list[str]]:
    """The video files whose name without suffix is wanted; paths from the folder, sorted."""
    found: dict[str, list[str]] = {}
    for path in files:
        stem, suffix = os.path.splitext(os.path.basename(path))
        if stem in wanted and suffix.lower() in VIDEO_SUFFIXES:
            found.setdefault(stem, []).append(os.path.relpath(path, folder))
    return {stem: sorted(paths) for stem, paths in found.items()}


def _manifest_record(record: Mapping[str, Any], clip: str, files: Mapping[str, list[str]]) -> dict[str, Any]:
    label, split = record.get("label"), record.get("split")
    converted: dict[str, Any] = {"id": clip, "label": label, "split": split}
    if clip in files:
        converted["video"] = _the_one(files[clip], label, split)
    elif record["youtube_id"] in files:
        converted["video"] = _the_one(files[record["youtube_id"]], label, split)
        converted |= {"start_seconds": record["time_start"], "end_seconds": record["time_end"]}
    else:
        converted["video"] = f"{clip}.mp4"
    return {name: value for name, value in converted.items() if value is not None}


def _the_one(paths: list[str], label: str | None, split: str | None) -> str:
    """The file of a row: the only one, or the only one below a folder of its class or split. Raises ValueError."""
    for folder in (label, split):
        if len(paths) > 1 and folder:
            names = {folder, folder.replace(" ", "_")}
            below = [path for path in paths if names & set(path.split(os.sep)[:-1])]
            paths = below or paths
    if len(paths) > 1:
        raise ValueError(f"{len(paths)} files could be this clip ({', '.join(paths[:3])}); keep one")
    return paths[0]
