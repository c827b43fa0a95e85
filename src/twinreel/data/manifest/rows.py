"""Manifests: a CSV or JSONL file of rows about videos, read into `Clip` rows and checked (`writing.py` writes them).

Three foreign forms are recognized as well: PySlowFast's lists without a header (`path_lists.py`), Kinetics' own CSV
(`kinetics_csv.py`), and rows that begin at a frame (`start_frames.py`).

One row is one clip. Columns, with the other names that are read for the same thing:

- `video` (`path`, `video_path`, `video_name`, `clip_name`; `gif_name` or `video_id` where there is none of these):
  needed; relative to `root`, else to the manifest's folder. A name without a video's suffix is the file that has one.
- `id` (`qid` where there is none): unique in the collection. Default: the video as written, with `#2`, `#3` where it
  repeats. In a file that has `id` and `text` and no column for the video, the id is the video's name.
- `start_seconds` (`start`), `end_seconds` (`end`): a window `[start, end)`. Only an end: from 0. Only a start: to the
  end of the video. Neither: the whole video.
- `caption` (`text`, `sentence`, `question`) or `captions` (`texts`) or `caption_file`, one a row. `captions` is a list
  of sentences or of `{"text": ..., "start_seconds": ..., "end_seconds": ...}`; `caption_file` is resolved as `video`
  is.
- `label`: a name, a class number from 0, or a list of either. In CSV digits are a number: `["3"]` is the name 3.
- `options`: answers to choose from, a list of at least two; `answer`: the number of the right one, from 0, or its
  words; without options the answer itself, as text. `answer_type`: its kind, such as `color`.
- `start_frame`: instead of a window: the row begins at this frame and ends where the next row of the video begins.
- `split`: `val`, `valid`, `validate` and `validation` are the same split.

CSV needs a header; comma, tab or semicolon separate; lists are JSON in one quoted cell; blank cells mean "not given".
JSONL has one object a line; null means "not given". Both are UTF-8, with or without a byte order mark, with any line
ends. Other columns take no part in anything; `unused_columns` names them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.data.clip import Clip
from twinreel.data.manifest.class_names import read_class_names
from twinreel.data.manifest.kinetics_csv import is_kinetics, kinetics_table
from twinreel.data.manifest.path_lists import is_path_list, parse_path_list
from twinreel.data.manifest.row_fields import check_template, parse_row, text_value
from twinreel.data.manifest.start_frames import FrameRow, frame_windows, start_frame
from twinreel.data.manifest.video_names import VideoNames
from twinreel.data.storage import collection_members, is_store, missing_paths
from twinreel.data.tables import (
    ALIASES,
    COLUMNS,
    LISTED,
    VIDEO_SUFFIXES,
    Table,
    bad_rows,
    column_names,
    did_you_mean,
    is_table,
    parse_table,
    read_table,
    read_text,
)
from twinreel.errors import ConfigError, DataError

__all__ = [
    "VIDEO_SUFFIXES",
    "missing_videos",
    "read_folder",
    "read_manifest",
    "read_manifests",
    "unused_columns",
    "walk_files",
]

_SAME_SPLIT = {"val": "validation", "valid": "validation", "validate": "validation"}


def read_manifest(
    path: str | Path,
    *,
    root: str | Path | None = None,
    split: str | None = None,
    caption_template: str | None = None,
    class_names: str | Path | None = None,
) -> list[Clip]:
    """The rows of one manifest; see `read_manifests`."""
    return read_manifests([path], root=root, split=split, caption_template=caption_template, class_names=class_names)


def read_manifests(
    paths: Sequence[str | Path],
    *,
    root: str | Path | None = None,
    split: str | None = None,
    caption_template: str | None = None,
    class_names: str | Path | None = None,
) -> list[Clip]:
    """The rows of several manifests as one collection, in the order of the files and their lines.

    Ids are given before `split` selects, so a row has the same id whichever split is asked for. No caption file is
    opened, and no video but for rows with a start frame.

    Args:
        paths: CSV or lists (`.csv`, `.tsv`, `.txt`) or JSONL (`.jsonl`, `.ndjson`) files.
        root: folder that relative paths in the rows start from; default: each manifest's own folder.
        split: keep the rows of this split only.
        caption_template: such as `'a person is {label}'`: the caption of a row that has labels and no caption, one
            for each label. Underscores in label names become spaces.
        class_names: a file with the names of class numbers (`class_names.py`); number labels become names.

    Raises:
        DataError: a manifest is missing, empty or has wrong rows (each named with file and line), an id is given
            twice, or the split does not exist.
        ConfigError: no manifest, one listed twice, or a template with other fields than `{label}`.
    """
    files = _distinct_files(paths)
    if caption_template is not None:
        check_template(caption_template)
    names = None if class_names is None else read_class_names(class_names)
    rows = [row for file in files for row in _read_rows(file, root, split, caption_template, names)]
    clips = _with_ids(rows)
    return clips if split is None else _select_split(clips, split, files)


def unused_columns(path: str | Path) -> list[str]:
    """Columns of a manifest that mean nothing here, as written; `(column 3)` for one without a name."""
    table = _read_table(Path(path).expanduser())
    if is_kinetics(table):
        return []
    used = {written for name, written in column_names(table, {}, "manifest").items() if name in COLUMNS}
    return [name for name in table.columns if name not in used]


def missing_videos(rows: Iterable[Clip]) -> list[Clip]:
    """The rows whose video does not exist, as a file, in an LMDB or as a folder of images (`storage.py`)."""
    rows = list(rows)
    missing = missing_paths(row.video for row in rows)
    return [row for row in rows if row.video in missing]


def read_folder(folder: str | Path, suffixes: Collection[str] = VIDEO_SUFFIXES) -> list[Clip]:
    """A row for every video file under a folder, sorted by id: the path from the folder, with `/`.

    Files are taken by their suffix (in any case). An LMDB gives a row for each key; a folder without videos that has
    folders of images in it, one for each of those.

    Raises:
        DataError: no such folder, a folder inside that cannot be read, a name that is not UTF-8, or no video in it.
    """
    top = str(_existing_folder(folder, "folder"))
    if is_store(top):
        return [Clip(id=id, video=video) for id, video in collection_members(top)]
    files = walk_files(top)
    found = [video for video in files if os.path.splitext(video)[1].lower() in suffixes]
    if not found and (members := collection_members(top)):
        return [Clip(id=id, video=video) for id, video in members]
    if not found:
        allowed = " ".join(sorted(suffixes))
        raise DataError(f"{top}: no video in this folder ({len(files)} other files); videos are known by {allowed}")
    unwritable = [video for video in found if video != video.encode("utf-8", "replace").decode()]
    if unwritable:
        raise DataError(f"{unwritable[0]!a}: the file's name is not UTF-8 text; rename it")
    ids = sorted((os.path.relpath(video, top).replace(os.sep, "/"), video) for video in found)
    return [Clip(id=id, video=video) for id, video in ids]


def walk_files(top: str) -> list[str]:
    """Every file under a folder. Links to folders are followed, once.

    Names that start with a dot are left out: they are other programs' (macOS keeps `._name.mp4` beside `name.mp4`).
    """
    found: list[str] = []
    seen: set[str] = set()
    for current, folders, names in os.walk(top, followlinks=True, onerror=_unreadable_folder):
        real = os.path.realpath(current)
        if real in seen:  # a link back to where we were
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(current, name) for name in names if not name.startswith(".")]
    return found


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
    if not path.is_dir() and not is_store(str(path)):
        raise DataError(f"{what} '{folder}' " + ("is not a folder" if path.exists() else "does not exist"))
    return path


def _unreadable_folder(error: OSError) -> None:
    raise DataError(f"folder '{error.filename}' cannot be read: {error.strerror}") from error


def _read_table(path: Path) -> Table:
    """A manifest of any form as a table."""
    if is_table(path, "manifest"):
        text = read_text(path, "manifest")
        return (parse_path_list if is_path_list(text) else parse_table)(path, text)
    return read_table(path, "manifest")


def _read_rows(
    path: Path, root: str | Path | None, split: str | None, template: str | None, class_names: Mapping[int, str] | None
) -> list[_Row]:
    table = _read_table(path)
    base = _base(path, root, table)
    if is_kinetics(table):
        table = kinetics_table(table, base, walk_files(base))
    named_by_id = _named_by_id(table)
    needed = {} if named_by_id else {"video": "every row needs it"}
    if template is not None:
        needed["label"] = "caption_template needs it"
    if split is not None:
        needed["split"] = f"split {split!r} is asked for (leave the split out to take every row)"
    names = column_names(table, needed, "manifest")
    if named_by_id:
        names["video"] = names.pop("id")
    video_names = VideoNames()
    meaning = {written: name for name, written in names.items() if name in COLUMNS}
    rows: list[_Row] = []
    frames: list[FrameRow] = []
    problems = list(table.problems)
    for line, record in table.records:
        values = {meaning[key]: value for key, value in record.items() if key in meaning}
        where, written = f"{path}:{line}", str(values.get("video"))
        try:
            row = parse_row(values, base=base, cells=table.cells, template=template, class_names=class_names)
            row["video"] = video_names.find(row["video"])
            if split is not None and row["split"] is None:
                raise ValueError(f"split is empty, and split {split!r} is asked for; write one in every row")
            if "start_frame" in meaning.values():
                frames.append(FrameRow(where=where, video=row["video"], frame=_start_frame(values)))
                written = f"{written}@{frames[-1].frame}"
            rows.append(_Row(where=where, written=written, given_id=text_value(values, "id"), fields=row))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise bad_rows(path, problems, len(table.records) + len(table.problems))
    if frames:
        for read, window in zip(rows, frame_windows(path, frames), strict=True):
            read.fields["start_seconds"], read.fields["end_seconds"] = window
    return rows


def _named_by_id(table: Table) -> bool:
    """Whether rows are `id` and `text` alone, so that the id must be the video's name."""
    columns = {ALIASES.get(name, name) for name in table.columns}
    return "video" not in columns and {"id", "caption"} <= columns


def _base(path: Path, root: str | Path | None, table: Table) -> str:
    """The folder that relative paths start from, absolute: workers and later steps may run in another folder."""
    if root is not None:
        return str(_existing_folder(root, "root"))
    folder = Path(os.path.abspath(path)).parent
    if "start_frame" in table.columns and folder.name == "annotations" and (folder.parent / "videos").is_dir():
        return str(folder.parent / "videos")
    return str(folder)


def _start_frame(values: Mapping[str, Any]) -> int:
    if "start_frame" not in values:
        raise ValueError("start_frame is empty; write a number in every row")
    if "start_seconds" in values or "end_seconds" in values:
        raise ValueError("a start_frame and a window in seconds are both given; a row has one of them")
    return start_frame(values["start_frame"])


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
