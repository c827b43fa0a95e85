"""Caption files: the timed sentences of one video, such as HowTo100M's `<video id>.csv` with `start,end,text`.

Three forms are read: CSV (and JSONL) with the columns `start`, `end`, `text` or the names that a manifest has for them,
and `.json` with `{"start": [...], "end": [...], "text": [...]}`. Times are seconds. Captions are sorted by start;
captions that start together keep their order.

Nothing is dropped. A caption without text (speech recognition leaves some) stays as an empty sentence: its window and
its neighbors' places are those of the founding code, and a tokenizer masks it like any caption without a known word.
A caption may be a point in time. A wrong time makes the whole file an error, because what it meant is unknown.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip, Fault
from twinreel.data.manifest.row_fields import check_times
from twinreel.data.tables import bad_rows, column_names, read_table
from twinreel.errors import DataError

__all__ = ["collection_captions", "missing_caption_files", "read_caption_file", "row_captions"]

_NEEDED = {name: "a caption file needs it" for name in ("start_seconds", "end_seconds", "caption")}


def read_caption_file(path: str | Path) -> tuple[Caption, ...]:
    """The captions of a file, at least one, sorted by start; each has a start and an end in seconds.

    Raises:
        DataError: the file is missing or not readable, has no caption with text, or a time is missing, not a number,
            negative, or an end lies before its start; wrong lines are named with file and line.
    """
    path = Path(path)
    read = _read_json if path.suffix.lower() == ".json" else _read_lines
    entries, problems = read(path)
    captions: list[Caption] = []
    for where, start, end, text in entries:
        try:
            captions.append(_caption(start, end, text))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise bad_rows(path, problems, len(captions) + len(problems), "captions")
    if not any(caption.text for caption in captions):
        raise DataError(f"caption file '{path}' has no caption with text")
    return tuple(sorted(captions, key=lambda caption: caption.start_seconds or 0.0))


def row_captions(row: Clip) -> tuple[Caption, ...]:
    """The captions of a row: its own, or those of its caption file, which a process keeps in memory for a while.

    A file is read once as long as it is among the last 1024 asked for; a change on disk is not seen until then. The
    row's window does not select among them.

    Raises:
        DataError: the caption file cannot be used; the row is named.
    """
    if row.caption_file is None:
        return row.captions
    try:
        return _cached_captions(row.caption_file)
    except DataError as error:
        raise DataError(f"row {row.id!r}: {error}") from error


@lru_cache(maxsize=1024)
def _cached_captions(path: str) -> tuple[Caption, ...]:
    return read_caption_file(path)


def collection_captions(rows: Iterable[Clip], faults: list[Fault] | None = None) -> Iterator[str]:
    """Every sentence of a collection, for building a vocabulary; a caption file of several rows counts once.

    Args:
        rows: the collection.
        faults: where unusable caption files are noted, with the first row that names them, so that the rest goes on.
            Without it the first of them raises.

    Raises:
        DataError: a caption file cannot be used and `faults` is not given.
    """
    seen: set[str] = set()
    for row in rows:
        yield from (caption.text for caption in row.captions)
        if row.caption_file is None or row.caption_file in seen:
            continue
        seen.add(row.caption_file)
        try:
            captions = read_caption_file(row.caption_file)
        except DataError as error:
            if faults is None:
                raise DataError(f"row {row.id!r}: {error}") from error
            faults.append(Fault(id=row.id, video=row.video, reason=str(error)))
            continue
        yield from (caption.text for caption in captions)


def missing_caption_files(rows: Iterable[Clip]) -> list[Clip]:
    """The rows whose caption file does not exist.

    Each folder is listed once, because a million look-ups on a network disk take an hour.
    """
    listings: dict[str, set[str]] = {}
    missing = []
    for row in rows:
        if row.caption_file is None:
            continue
        folder, name = os.path.split(row.caption_file)
        if folder not in listings:
            listings[folder] = _names_in(folder)
        if name not in listings[folder]:
            missing.append(row)
    return missing


def _names_in(folder: str) -> set[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise DataError(f"folder '{folder}' cannot be read: {error.strerror}") from error


def _caption(start: Any, end: Any, text: Any) -> Caption:
    if isinstance(text, float) and math.isnan(text):  # HowTo100M's json has NaN where nothing was understood
        text = None
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text must be text, got {text!r}")
    start_seconds, end_seconds = check_times(start, end, point_allowed=True)
    if start_seconds is None or end_seconds is None:
        raise ValueError(f"{'start' if start_seconds is None else 'end'} is empty")
    return Caption(text=(text or "").strip(), start_seconds=start_seconds, end_seconds=end_seconds)


_Entry = tuple[str, Any, Any, Any]  # where, start, end, text


def _read_lines(path: Path) -> tuple[list[_Entry], list[str]]:
    table = read_table(path, "caption file")
    names = column_names(table, _NEEDED, "caption file")
    start, end, text = (names.get(name, name) for name in _NEEDED)
    entries = [
        (f"{path}:{line}", record.get(start), record.get(end), record.get(text)) for line, record in table.records
    ]
    return entries, list(table.problems)


def _read_json(path: Path) -> tuple[list[_Entry], list[str]]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"caption file '{path}' does not exist") from None
    except (OSError, ValueError) as error:
        raise DataError(f"caption file '{path}' cannot be read: {error}") from error
    lists = [content.get(name) if isinstance(content, dict) else None for name in ("start", "end", "text")]
    lengths = {len(values) if isinstance(values, list) else -1 for values in lists}
    if len(lengths) != 1 or -1 in lengths:
        expected = 'one object {"start": [...], "end": [...], "text": [...]} with lists of equal length'
        raise DataError(f"caption file '{path}' must hold {expected}")
    entries = zip(*lists, strict=True)
    return [(f"{path}: caption {i}", *values) for i, values in enumerate(entries, start=1)], []
