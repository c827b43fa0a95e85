"""Manifests: a CSV or JSONL file of rows about videos, read into `Clip` rows, checked and written.

One row is one clip. Columns, with the other names that are read for the same thing:

- `video` (`path`, `video_path`, `video_name`, `clip_name`): needed; relative to `root`, else to the manifest's folder.
- `id`: unique in the collection. Default: the video as written, with `#2`, `#3` where it repeats.
- `start_seconds` (`start`), `end_seconds` (`end`): a window `[start, end)`. Only an end: from 0. Only a start: to the
  end of the video. Neither: the whole video.
- `caption` (`text`, `sentence`) or `captions` (`texts`) or `caption_file`, one a row. `captions` is a list of
  sentences or of `{"text": ..., "start_seconds": ..., "end_seconds": ...}`; `caption_file` is resolved as `video` is.
- `label`: a name, a class number from 0, or a list of either. In CSV digits are a number: `["3"]` is the name 3.
- `split`: `val`, `valid` and `validation` are the same split.

CSV needs a header; comma or tab separate; lists are JSON in one quoted cell; blank cells mean "not given". JSONL has
one object a line; null means "not given". Both are UTF-8, with or without a byte order mark, with any line ends. Other
columns take no part in anything; `unused_columns` names them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip
from twinreel.data.tables import (
    ALIASES,
    COLUMNS,
    LISTED,
    bad_rows,
    column_names,
    did_you_mean,
    is_table,
    read_table,
    write_whole,
)
from twinreel.errors import ConfigError, DataError

__all__ = [
    "VIDEO_SUFFIXES",
    "check_times",
    "missing_videos",
    "read_folder",
    "read_manifest",
    "read_manifests",
    "unused_columns",
    "write_manifest",
]

VIDEO_SUFFIXES = frozenset(
    ".3g2 .3gp .asf .avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .mxf .ogv .ts .vob .webm .wmv".split()
)

_SAME_SPLIT = {"val": "validation", "valid": "validation"}


def read_manifest(
    path: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    caption_template: str | None = None,
) -> list[Clip]:
    """The rows of one manifest; see `read_manifests`."""
    return read_manifests([path], root=root, split=split, caption_template=caption_template)


def read_manifests(
    paths: Sequence[str | Path],
    *,
    root: str | Path | None = None,
    split: str | None = None,
    caption_template: str | None = None,
) -> list[Clip]:
    """The rows of several manifests as one collection, in the order of the files and their lines.

    Ids are given before `split` selects, so a row has the same id whichever split is asked for. No video or caption
    file is opened.

    Args:
        paths: CSV (`.csv`, `.tsv`, `.txt`) or JSONL (`.jsonl`, `.ndjson`) files.
        root: folder that relative paths in the rows start from; default: each manifest's own folder.
        split: keep the rows of this split only.
        caption_template: such as `'a person is {label}'`: the caption of a row that has labels and no caption, one
            for each label. Underscores in label names become spaces.

    Raises:
        DataError: a manifest is missing, empty or has wrong rows (each named with file and line), an id is given
            twice, or the split does not exist.
        ConfigError: no manifest, one listed twice, or a template with other fields than `{label}`.
    """
    files = _distinct_files(paths)
    if caption_template is not None:
        _check_template(caption_template)
    rows = [row for file in files for row in _read_rows(file, root, split, caption_template)]
    clips = _with_ids(rows)
    return clips if split is None else _select_split(clips, split, files)


def unused_columns(path: str | Path) -> list[str]:
    """Columns of a manifest that mean nothing here, as written; `(column 3)` for one without a name."""
    table = read_table(path, "manifest")
    return [name for name in table.columns if ALIASES.get(name, name) not in COLUMNS]


def missing_videos(rows: Iterable[Clip]) -> list[Clip]:
    """The rows whose video does not exist. Each distinct path is looked up once."""
    exists: dict[str, bool] = {}
    missing = []
    for row in rows:
        if row.video not in exists:
            exists[row.video] = os.path.exists(row.video)
        if not exists[row.video]:
            missing.append(row)
    return missing


def read_folder(folder: str | Path) -> list[Clip]:
    """A row for every video file under a folder, sorted by id: the path from the folder, with `/`.

    Files are taken by their suffix (`VIDEO_SUFFIXES`, in any case). Links to folders are followed. Names that start
    with a dot are left out: they are other programs' (macOS keeps `._name.mp4` beside `name.mp4`).

    Raises:
        DataError: no such folder, a folder inside that cannot be read, a name that is not UTF-8, or no video in it.
    """
    top = str(_existing_folder(folder, "folder"))
    found: list[str] = []
    others = 0
    seen: set[str] = set()
    for current, folders, names in os.walk(top, followlinks=True, onerror=_unreadable_folder):
        real = os.path.realpath(current)
        if real in seen:  # a link back to where we were
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible = [name for name in names if not name.startswith(".")]
        videos = [name for name in visible if os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES]
        others += len(visible) - len(videos)
        found += [os.path.join(current, name) for name in videos]
    if not found:
        allowed = " ".join(sorted(VIDEO_SUFFIXES))
        raise DataError(f"{top}: no video in this folder ({others} other files); videos are known by {allowed}")
    unwritable = [video for video in found if video != video.encode("utf-8", "replace").decode()]
    if unwritable:
        raise DataError(f"{unwritable[0]!a}: the file's name is not UTF-8 text; rename it")
    ids = sorted((os.path.relpath(video, top).replace(os.sep, "/"), video) for video in found)
    return [Clip(id=id, video=video) for id, video in ids]


def write_manifest(path: str | Path, rows: Sequence[Clip]) -> None:
    """Writes rows so that `read_manifest` returns them again; CSV or JSONL by suffix, whole or not at all.

    Paths are written as they are in the rows. Only columns that some row uses are written.

    Raises:
        DataError: no rows, an id twice, a row that would not be read back, another suffix, or a failing disk.
    """
    target = Path(path)
    as_table = is_table(target, "manifest")
    if not rows:
        raise DataError(f"{target}: no rows to write; a manifest has at least one")
    repeated = [id for id, count in Counter(row.id for row in rows).items() if count > 1 or not id.strip()]
    if repeated:
        raise DataError(f"{target}: {len(repeated)} ids are empty or used twice (first: {repeated[0]!r})")
    records = [_record(row) for row in rows]
    for record in records:
        try:
            _parse(record, base="", cells=False, template=None)
        except ValueError as error:
            raise DataError(f"{target}: row {record['id']!r} cannot be written: {error}") from None
    text = _csv_text(records) if as_table else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    write_whole(target, text)


# ---- records to rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    where: str
    written: str
    given_id: str | None
    fields: dict[str, Any]


def _distinct_files(paths: Sequence[str | Path]) -> list[Path]:
    if not paths:
        raise ConfigError("no manifest is named; give at least one CSV or JSONL file")
    files = [Path(path).expanduser() for path in paths]
    twice = [file for file, count in Counter(file.resolve() for file in files).items() if count > 1]
    if twice:
        raise ConfigError(f"manifest '{twice[0]}' is listed twice; its rows would count double")
    return files


def _existing_folder(folder: str | Path, what: str) -> Path:
    path = Path(os.path.abspath(Path(folder).expanduser()))
    if not path.is_dir():
        raise DataError(f"{what} '{folder}' " + ("is not a folder" if path.exists() else "does not exist"))
    return path


def _unreadable_folder(error: OSError) -> None:
    raise DataError(f"folder '{error.filename}' cannot be read: {error.strerror}") from error


def _read_rows(path: Path, root: str | Path | None, split: str | None, template: str | None) -> list[_Row]:
    table = read_table(path, "manifest")
    needed = {"video": "every row needs it"}
    if template is not None:
        needed["label"] = "caption_template needs it"
    if split is not None:
        needed["split"] = f"split {split!r} is asked for (leave the split out to take every row)"
    names = column_names(table, needed, "manifest")
    # absolute, because workers and later steps may run in another folder
    base = str(_existing_folder(root, "root") if root is not None else Path(os.path.abspath(path)).parent)
    meaning = {written: name for name, written in names.items() if name in COLUMNS}
    rows: list[_Row] = []
    problems = list(table.problems)
    for line, record in table.records:
        values = {meaning[key]: value for key, value in record.items() if key in meaning}
        where = f"{path}:{line}"
        try:
            row = _parse(values, base=base, cells=table.cells, template=template)
            if split is not None and row["split"] is None:
                raise ValueError(f"split is empty, and split {split!r} is asked for; write one in every row")
            written = str(values["video"])
            rows.append(_Row(where=where, written=written, given_id=_text(values, "id"), fields=row))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise bad_rows(path, problems, len(table.records) + len(table.problems))
    return rows


def _parse(values: dict[str, Any], *, base: str, cells: bool, template: str | None) -> dict[str, Any]:
    """The fields of a `Clip` but for its id, from values by column. Raises ValueError with what is wrong."""
    video = values.get("video")
    if not isinstance(video, str) or not video.strip():
        raise ValueError(f"video must be text, got {video!r}" if video else "video is empty")
    start, end = check_times(values.get("start_seconds"), values.get("end_seconds"), point_allowed=False)
    if end is not None and start is None:
        start = 0.0
    given = [name for name in ("caption", "captions", "caption_file") if name in values]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given; a row has one of them")
    captions = _captions(values, cells)
    caption_file = _text(values, "caption_file")
    labels = _labels(values.get("label"), cells)
    if template is not None and not captions and caption_file is None:
        captions = _captions_from_labels(template, labels)
    split = _text(values, "split")
    return {
        "video": os.path.join(base, video),
        "start_seconds": start,
        "end_seconds": end,
        "captions": captions,
        "caption_file": None if caption_file is None else os.path.join(base, caption_file),
        "labels": labels,
        "split": None if split is None else split.strip(),
    }


def _text(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{name} must be text, got {value!r}")


def check_times(start: Any, end: Any, *, point_allowed: bool) -> tuple[float | None, float | None]:
    """Start and end of a window in seconds, from text or numbers; None where not given.

    Raises:
        ValueError: not a number, not finite, negative, or the end is not after the start. With `point_allowed`
            they may be equal (a caption may be a point in time, a row may not).
    """
    times: list[float | None] = []
    for name, value in (("start_seconds", start), ("end_seconds", end)):
        try:
            seconds = None if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if isinstance(value, bool) or (seconds is not None and not 0 <= seconds < math.inf):
            raise ValueError(f"{name} {value!r} must be a number of seconds, 0 or more")
        times.append(seconds)
    first, last = times
    if last is not None and not (first or 0.0) < last and not (point_allowed and first == last):
        kind = "is a window of no length" if last == (first or 0.0) else "ends before it starts"
        raise ValueError(f"[{first or 0.0:g}, {last:g}) {kind}; end_seconds must be greater than start_seconds")
    return first, last


def _json_list(name: str, value: Any, cells: bool) -> list[Any]:
    if cells:
        try:
            value = json.loads(value)
        except ValueError:
            value = str(value)
    if not isinstance(value, list):
        raise ValueError(f'{name} must be a JSON list such as ["one", "two"], got {value!r}')
    return value


def _captions(values: dict[str, Any], cells: bool) -> tuple[Caption, ...]:
    if "caption" in values:
        if not isinstance(values["caption"], str):
            hint = "; a list of sentences goes into 'captions'" if isinstance(values["caption"], list) else ""
            raise ValueError(f"caption must be text, got {values['caption']!r}{hint}")
        return (_caption(values["caption"]),)
    if "captions" not in values:
        return ()
    return tuple(_caption(item) for item in _json_list("captions", values["captions"], cells))


def _caption(item: Any) -> Caption:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, dict):
        raise ValueError(f"a caption must be text or an object, got {item!r}")
    renamed = {"start": "start_seconds", "end": "end_seconds", "caption": "text"}
    fields = {renamed.get(key, key): value for key, value in item.items()}
    if not fields.keys() <= {"text", "start_seconds", "end_seconds"} or len(fields) != len(item):
        raise ValueError(f"a caption has text, start_seconds and end_seconds, each once; got {list(item)}")
    if not isinstance(fields.get("text"), str) or not fields["text"].strip():
        raise ValueError(f"a caption without text: {item!r}")
    start, end = check_times(fields.get("start_seconds"), fields.get("end_seconds"), point_allowed=True)
    return Caption(text=fields["text"], start_seconds=start, end_seconds=end)


def _labels(value: Any, cells: bool) -> tuple[str | int, ...]:
    if value is None:
        return ()
    if cells:
        value = _label_cell(value.strip())
    items = value if isinstance(value, list) else [value]
    for item in items:
        is_number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_number and not (isinstance(item, str) and item.strip()):
            raise ValueError(f"label {item!r} must be a name or a class number 0, 1, 2, ...")
    if len(set(items)) != len(items):
        raise ValueError(f"label {value!r} names a class twice")
    return tuple(items)


def _label_cell(cell: str) -> Any:
    if cell.startswith("["):
        return _json_list("label", cell, cells=True)
    if re.fullmatch("0|[1-9][0-9]*", cell):
        return int(cell)
    try:
        float(cell)
    except ValueError:
        return cell
    raise ValueError(f"label {cell!r} is no class number (0, 1, 2, ...); if it is a name, write " + f'["{cell}"]')


def _check_template(template: str) -> None:
    try:
        parts = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(f"caption_template {template!r}: {error}; write such as 'a person is {{label}}'") from None
    if not parts or any(part != ("label", "", None) for part in parts):
        raise ConfigError(f"caption_template {template!r} must hold {{label}} and no other field")


def _captions_from_labels(template: str, labels: tuple[str | int, ...]) -> tuple[Caption, ...]:
    if not labels:
        raise ValueError("neither caption nor label, so caption_template has nothing to say")
    numbers = [label for label in labels if isinstance(label, int)]
    if numbers:
        raise ValueError(f"label {numbers[0]} is a number; caption_template needs names")
    return tuple(Caption(text=template.format(label=str(label).replace("_", " "))) for label in labels)


# ---- rows to a collection


def _with_ids(rows: Sequence[_Row]) -> list[Clip]:
    taken: dict[str, str] = {}
    repeated: list[str] = []
    for row in rows:
        if row.given_id is not None and row.given_id in taken:
            repeated.append(f"{row.where}: id {row.given_id!r} is already that of {taken[row.given_id]}")
        elif row.given_id is not None:
            taken[row.given_id] = row.where
    if repeated:
        raise DataError(
            f"{len(repeated)} ids are used twice; ids must be unique in the collection:\n  "
            + "\n  ".join(repeated[:LISTED])
        )
    clips: list[Clip] = []
    times: Counter[str] = Counter()
    for row in rows:
        id = row.given_id
        while id is None or (row.given_id is None and id in taken):
            times[row.written] += 1
            id = row.written if times[row.written] == 1 else f"{row.written}#{times[row.written]}"
        taken[id] = row.where
        clips.append(Clip(id=id, **row.fields))
    return clips


def _select_split(clips: Sequence[Clip], split: str, files: Sequence[Path]) -> list[Clip]:
    wanted = _SAME_SPLIT.get(split, split)
    chosen = [clip for clip in clips if clip.split and _SAME_SPLIT.get(clip.split, clip.split) == wanted]
    if not chosen:
        counts = Counter(clip.split for clip in clips if clip.split)
        listed = ", ".join(f"{name} ({count} rows)" for name, count in counts.items())
        where = ", ".join(str(file) for file in files)
        raise DataError(f"{where}: no row has split {split!r}; there are {listed}{did_you_mean(split, counts)}")
    return chosen


# ---- rows to files


def _record(row: Clip) -> dict[str, Any]:
    """A row as a JSONL object, without what is not given."""
    record: dict[str, Any] = {"id": row.id, "video": row.video}
    record |= {"start_seconds": row.start_seconds, "end_seconds": row.end_seconds}
    if len(row.captions) == 1 and row.captions[0].start_seconds is None and row.captions[0].end_seconds is None:
        record["caption"] = row.captions[0].text
    elif row.captions:
        record["captions"] = [_caption_value(caption) for caption in row.captions]
    record["caption_file"] = row.caption_file or None
    record["label"] = row.labels[0] if len(row.labels) == 1 else list(row.labels) or None
    record["split"] = row.split or None
    return {name: value for name, value in record.items() if value is not None}


def _caption_value(caption: Caption) -> Any:
    times = {"start_seconds": caption.start_seconds, "end_seconds": caption.end_seconds}
    given = {name: value for name, value in times.items() if value is not None}
    return {"text": caption.text, **given} if given else caption.text


def _csv_text(records: Sequence[dict[str, Any]]) -> str:
    columns = [name for name in COLUMNS if any(name in record for record in records)]
    text = io.StringIO(newline="")
    # every text is quoted: spaces at its start would be dropped in reading
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    csv.writer(text, lineterminator="\n").writerow(columns)
    writer.writerows([[_cell(name, record.get(name, "")) for name in columns] for record in records])
    return text.getvalue()


def _cell(name: str, value: Any) -> Any:
    if name == "label" and isinstance(value, str) and value:
        if value != value.strip() or value.startswith("[") or _is_number(value):
            value = [value]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
