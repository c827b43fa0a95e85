"""CSV and JSONL files as records with their lines: what manifests, caption files and lists of videos are read from.

Text is UTF-8, with or without a byte order mark, with any line ends. Whatever cannot be read is kept as a problem with
file and line, so that one error names them all.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.errors import DataError

__all__ = [
    "ALIASES",
    "COLUMNS",
    "INSTEAD",
    "LISTED",
    "VIDEO_SUFFIXES",
    "Table",
    "bad_rows",
    "column_names",
    "did_you_mean",
    "is_table",
    "parse_table",
    "read_table",
    "read_text",
    "write_whole",
]

ALIASES = {
    "path": "video",
    "video_path": "video",
    "video_name": "video",
    "clip_name": "video",
    "start": "start_seconds",
    "end": "end_seconds",
    "text": "caption",
    "sentence": "caption",
    "question": "caption",
    "texts": "captions",
    "labels": "label",
}
INSTEAD = {"gif_name": "video", "video_id": "video", "qid": "id"}  # read where nothing else is there for it
COLUMNS = (
    *("id", "video", "start_seconds", "end_seconds", "start_frame", "caption", "captions", "caption_file", "label"),
    *("options", "answer", "answer_type", "split"),
)
VIDEO_SUFFIXES = frozenset(
    ".3g2 .3gp .asf .avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .mxf .ogv .ts .vob .webm .wmv".split()
)
LISTED = 10  # wrong rows spelled out in one error


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A CSV or JSONL file as read: `columns` as written, and for each record its line (from 1) and its values.

    Values that are not given (blank cell, null) are absent from a record. With `cells` every value is text.
    `problems` holds the records that could not be read at all, each as `file:line: what`.
    """

    path: Path
    columns: list[str]
    records: list[tuple[int, dict[str, Any]]]
    problems: list[str]
    cells: bool


def read_table(path: str | Path, what: str) -> Table:
    """A CSV or JSONL file as records; `what` it is called in errors ("manifest").

    Raises:
        DataError: the file is missing, not UTF-8 text, of another suffix, or its header is unusable.
    """
    path = Path(path).expanduser()
    as_table = is_table(path, what)
    text = read_text(path, what)
    return parse_table(path, text) if as_table else _parse_jsonl(path, text)


def is_table(path: Path, what: str) -> bool:
    """True for a CSV, False for JSONL, by suffix.

    Raises:
        DataError: another suffix, or a folder.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        raise DataError(f"{what} '{path}' is a folder; name a file")
    if suffix not in (".csv", ".tsv", ".txt", ".jsonl", ".ndjson"):
        raise DataError(f"{what} '{path}' ends in {suffix!r}; allowed are .csv, .tsv, .txt, .jsonl (an object a line)")
    return suffix in (".csv", ".tsv", ".txt")


def read_text(path: Path, what: str) -> str:
    """The text of a file without its byte order mark; `what` it is called in errors.

    Raises:
        DataError: the file is missing, cannot be read, or is not UTF-8 text.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        looked = "" if path.is_absolute() else f" (looked from {Path.cwd()})"
        raise DataError(f"{what} '{path}' does not exist{looked}") from None
    except OSError as error:
        raise DataError(f"{what} '{path}' cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8 text; save the file as UTF-8"
        ) from None


def parse_table(path: Path, text: str) -> Table:
    """The text of a CSV with a header as records; a tab, comma or semicolon separates, as its first line shows.

    Raises:
        DataError: a column appears twice.
    """
    first_line = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else next((d for d in "\t,;" if d in first_line), ",")
    # strict: an unclosed quote would otherwise swallow the rows after it without a word
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True)
    columns: list[str] = []
    records: list[tuple[int, dict[str, Any]]] = []
    problems: list[str] = []
    line = 1
    try:
        for cells in reader:
            if not columns:
                columns = [name.strip() or f"(column {i})" for i, name in enumerate(cells, start=1)]
            elif cells and len(cells) != len(columns):
                got = f"{len(cells)} values for {len(columns)} columns in {_short(delimiter.join(cells))}"
                problems.append(f"{path}:{line}: {got}; put values that hold a separator in double quotes")
            elif cells:
                records.append((line, {k: v for k, v in zip(columns, cells, strict=True) if v.strip()}))
            line = reader.line_num + 1
    except csv.Error as error:
        problems.append(f"{path}:{line}: {error}; check the double quotes from this line on")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(f"{path}:1: column {twice[0]!r} appears twice; keep one")
    return Table(path=path, columns=columns, records=records, problems=problems, cells=True)


def _parse_jsonl(path: Path, text: str) -> Table:
    columns: dict[str, None] = {}
    records: list[tuple[int, dict[str, Any]]] = []
    problems: list[str] = []
    # not splitlines(): it also splits at characters that are allowed inside a JSON string
    for line, content in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content, object_pairs_hook=_no_key_twice)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{line}: not a JSON object: {error}, in {_short(content)}")
            continue
        if not isinstance(record, dict):
            problems.append(f"{path}:{line}: a line must be one JSON object, got {_short(content)}")
            continue
        columns.update(dict.fromkeys(record))
        records.append((line, {name: value for name, value in record.items() if not _is_blank(value)}))
    return Table(path=path, columns=list(columns), records=records, problems=problems, cells=False)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return record


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def column_names(table: Table, needed: Mapping[str, str], what: str) -> dict[str, str]:
    """From the names used here ("video") to those written in the table ("path").

    Args:
        table: what was read.
        needed: columns that must be there, each with the reason, for the error.
        what: what the file is called in errors ("manifest").

    Raises:
        DataError: the table is empty, a needed column is missing, or two columns mean the same.
    """
    if not table.columns and not table.problems:
        raise DataError(f"{what} '{table.path}' is empty")
    names: dict[str, str] = {}
    for written in table.columns:
        name = ALIASES.get(written, written)
        if name in names:
            raise DataError(f"{table.path}: columns {names[name]!r} and {written!r} both mean {name!r}; keep one")
        names[name] = written
    for written, name in INSTEAD.items():
        if name not in names and names.pop(written, None) is not None:
            names[name] = written
    for name, why in needed.items():
        if name not in names and table.columns:
            raise DataError(_missing_column(table, name, why))
    if not table.records and not table.problems:
        raise DataError(f"{what} '{table.path}' has a header and no rows")
    return names


def _missing_column(table: Table, name: str, why: str) -> str:
    also = [alias for alias, meant in (ALIASES | INSTEAD).items() if meant == name]
    text = f"{table.path}: no column {name!r}" + (f" (nor {', '.join(also)})" if also else "")
    text += f", but {why}; columns found: {', '.join(table.columns)}{did_you_mean(name, table.columns)}"
    if not table.cells or any(ALIASES.get(column, column) in COLUMNS for column in table.columns):
        return text
    if len(table.columns) == 1 and "|" in table.columns[0]:
        return text + "; only commas, tabs or semicolons separate columns"
    return text + "; the first line must name the columns, such as video,caption"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A half sentence about the nearest known name ("; did you mean 'train'?"), or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def bad_rows(path: Path, problems: Sequence[str], total: int, what: str = "rows") -> DataError:
    """The error about all wrong rows of a file: how many of how many, and the first ten."""
    verb = "is" if len(problems) == 1 else "are"
    more = f"\n  ... and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    shown = "\n  ".join(problems[:LISTED])
    return DataError(f"{path}: {len(problems)} of {total} {what} {verb} wrong; mend or remove:\n  {shown}{more}")


def write_whole(path: Path, text: str) -> None:
    """Writes a text file whole or not at all.

    Raises:
        DataError: the disk fails, or the text cannot be UTF-8.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, UnicodeEncodeError) as error:
        with contextlib.suppress(OSError):  # a file system that can't be written to
            temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {error}") from error
