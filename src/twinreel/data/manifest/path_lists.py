"""Lists without a header, as PySlowFast has them: `path label` a line.

    path label          class numbers 0, 1, 2, ...
    path label,label    several classes: their separator differs from that after the path
    path number label   see below
    path                no line has a label (UCF101's test lists)

Spaces, a tab, a comma or a semicolon separate; every line of a list in the same way. The path is everything up to the
last separator, so it may hold separators itself; in double quotes (`""` for one in it) it may hold anything. Where
numbers could belong to the path or not (`a 12 3`), a path that ends like a video file tells; else quotes must.

PySlowFast reads three fields and ignores the middle one; others write the number of frames or the first frame there.
Where a video has several rows with different numbers they are first frames. Where all are 0 they say nothing. Else a
first line must say which they are: `video start_frame label` or `video num_frames label`, separated as the rest is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.data.tables import ALIASES, COLUMNS, VIDEO_SUFFIXES, Table
from twinreel.errors import DataError

__all__ = ["is_path_list", "parse_path_list"]

_SEPARATOR = r"(?:[ \t]*[,;\t][ \t]*|[ ]+)"
_NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?"
_TAIL = re.compile(rf"(?:{_SEPARATOR}{_NUMBER})+")
_UNQUOTED = re.compile(rf"(?P<path>.+?)(?P<tail>(?:{_SEPARATOR}{_NUMBER})*)")
_QUOTED = re.compile(r'"(?P<path>(?:[^"]|"")*)"(?P<tail>.*)')
_NAMES_A_VIDEO = re.compile(rf"({'|'.join(map(re.escape, sorted(VIDEO_SUFFIXES)))})(\"|{_SEPARATOR}|$)", re.IGNORECASE)
_MIDDLE = ("start_frame", "num_frames")
_EXPECTED = (
    "expected `path label` with a class number 0, 1, 2, ..., such as `a clip.mp4 3`; for names or captions begin the "
    "file with a line that names the columns, such as video,caption"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    line: int
    path: str
    separator: str
    middle: int | None
    labels: tuple[int, ...]


def is_path_list(text: str) -> bool:
    """Whether the text of a file is such a list, by its first line.

    It is one if that line names no column and ends in a number after a separator, or names a video file.
    """
    first = _first_line(text)
    if _header(first):
        return True
    cells = [cell.strip(' "') for cell in re.split(r"[,;\t]", first)]
    if not first or any(ALIASES.get(cell, cell) in COLUMNS for cell in cells):
        return False
    if _NAMES_A_VIDEO.search(first):
        return True
    match = _UNQUOTED.fullmatch(first)
    return bool(match and match["tail"])


def parse_path_list(path: Path, text: str) -> Table:
    """The list as a table with the columns `video`, `label` and `start_frame`, as far as it has them.

    Lines that cannot be read are among the table's problems.

    Raises:
        DataError: the numbers of HMDB51's split lists are no labels, or it is not known what middle numbers mean.
    """
    if re.search(r"_test_split[1-3]$", path.stem):
        raise DataError(
            f"{path}: a list of HMDB51's splits: its numbers say 1 = train, 2 = test, 0 = unused and are no labels; "
            "write a CSV that begins with video,label,split"
        )
    lines = [(number, line.strip()) for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1)]
    lines = [(number, line) for number, line in lines if line]
    middle = _header(lines[0][1])
    entries: list[_Entry] = []
    problems: list[str] = []
    for number, line in lines[1:] if middle else lines:
        try:
            entry = _parse(number, line)
            _check_alike(entries[0] if entries else None, entry)
            entries.append(entry)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}, in {line!r}; {_EXPECTED}")
    meaning = middle or _middle_meaning(path, entries)
    records = [(entry.line, _record(entry, meaning)) for entry in entries]
    columns = dict.fromkeys(["video", *(name for _, record in records for name in record)])
    return Table(path=path, columns=list(columns), records=records, problems=problems, cells=True)


def _first_line(text: str) -> str:
    return re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0].strip()


def _header(line: str) -> str | None:
    """What the middle number is by a line such as `video start_frame label`; None for any other line.

    Lines with commas, tabs or semicolons are left to the reader of tables, which knows more columns.
    """
    names = line.split(" ")
    if len(names) == 3 and ALIASES.get(names[0], names[0]) == "video" and names[2] == "label":
        return names[1] if names[1] in _MIDDLE else None
    return None


def _parse(number: int, line: str) -> _Entry:
    match = (_QUOTED if line.startswith('"') else _UNQUOTED).fullmatch(line)
    if match is None:
        raise ValueError("a double quote is open to the end")
    quoted = line.startswith('"')
    path = match["path"].replace('""', '"') if quoted else match["path"]
    if match["tail"] and not _TAIL.fullmatch(match["tail"]):
        raise ValueError(f"{match['tail']!r} follows the path")
    found = re.findall(rf"({_SEPARATOR})({_NUMBER})", match["tail"])
    tail = [(_kind(separator), text) for separator, text in found]
    named = quoted or path.lower().endswith(tuple(VIDEO_SUFFIXES))
    if not tail and not named:
        raise ValueError("no class number at its end")
    if len(tail) > 1 and not named:
        raise ValueError(f"is the path {path!r}, or do numbers belong to it? Put the path in double quotes")
    fields: list[list[int]] = []
    for separator, text in tail:
        if not re.fullmatch("0|[1-9][0-9]*", text):
            raise ValueError(f"{text!r} is no class number")
        if separator == tail[0][0]:
            fields.append([])
        fields[-1].append(int(text))
    if len(fields) > 2 or (len(fields) == 2 and len(fields[0]) > 1):
        raise ValueError(f"{len(tail)} numbers follow the path; separate several labels in another way: `path 3,7`")
    return _Entry(
        line=number,
        path=path,
        separator=tail[0][0] if tail else "",
        middle=fields[0][0] if len(fields) == 2 else None,
        labels=tuple(fields[-1]) if fields else (),
    )


def _kind(separator: str) -> str:
    return separator.strip(" ") or " "


def _check_alike(first: _Entry | None, entry: _Entry) -> None:
    """Raises ValueError where a line is not built as the first one."""
    if first is None:
        return
    if bool(first.labels) != bool(entry.labels):
        without, with_label = (entry, first) if first.labels else (first, entry)
        raise ValueError(f"line {without.line} has no label, line {with_label.line} has one")
    if first.separator != entry.separator:
        raise ValueError(f"the separator is {entry.separator!r}, in line {first.line} it is {first.separator!r}")
    if (first.middle is None) != (entry.middle is None):
        raise ValueError(f"line {first.line} has another number of fields")


def _middle_meaning(path: Path, entries: Sequence[_Entry]) -> str | None:
    """`start_frame`, or None where there are no middle numbers or they say nothing."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for entry in entries:
        if entry.middle is not None:
            numbers[entry.path].append(entry.middle)
    if not any(any(of_one) for of_one in numbers.values()):
        return None
    if any(len(set(of_one)) > 1 for of_one in numbers.values()):
        return "start_frame"
    separator = entries[0].separator
    choices = " or ".join(f"`{separator.join(('video', name, 'label'))}`" for name in _MIDDLE)
    raise DataError(
        f"{path}: three fields a line, and the middle number may be the first frame or the number of frames; say which "
        f"by a first line: {choices}"
    )


def _record(entry: _Entry, meaning: str | None) -> dict[str, Any]:
    record: dict[str, Any] = {"video": entry.path}
    if entry.labels:
        record["label"] = str(entry.labels[0]) if len(entry.labels) == 1 else str(list(entry.labels))
    if meaning and entry.middle is not None:
        record[meaning] = str(entry.middle)
    return record
