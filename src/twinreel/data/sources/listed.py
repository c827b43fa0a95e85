"""What the sources of published lists share: finding a list, and the videos that it names.

    root/**/<name>.<any suffix>       videos, at any depth; or data.root=videos.lmdb, whose keys are the names
    root/annotations/<list>           or root/<list>; of an LMDB: beside it; or the folder of the option `annotations`

The LMDB may be that of `twinreel data pack` or of ClipBERT's own script.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifest, walk_files
from twinreel.data.manifest.video_names import stem, the_one
from twinreel.data.storage import is_store
from twinreel.data.storage.lmdb_store import store_keys
from twinreel.data.tables import VIDEO_SUFFIXES, bad_rows
from twinreel.errors import ConfigError, DataError

__all__ = ["check_split", "find_list", "find_videos", "question_rows", "source_root"]


def source_root(root: str | Path | None, source: str) -> Path:
    """The absolute folder or store of a source.

    Raises:
        ConfigError: none is given.
        DataError: there is none.
    """
    if root is None:
        raise ConfigError(f"source {source} needs data.root: the folder of its videos, or an LMDB of them")
    base = Path(os.path.abspath(Path(root).expanduser()))
    if not base.is_dir() and not is_store(str(base)):
        raise DataError(f"source {source}: data.root '{base}' is neither a folder nor an LMDB")
    return base


def check_split(split: str | None, allowed: Collection[str], source: str) -> str:
    """The split, if the source has it; `validation`, `validate` and `valid` are `val`.

    Raises:
        DataError: another one, or none.
    """
    if split in ("validation", "validate", "valid"):
        split = "val"
    if split is None or split not in allowed:
        raise DataError(f"source {source} has no split {split!r}; data.split is one of {', '.join(allowed)}")
    return split


def find_list(base: Path, annotations: str | None, names: Sequence[str], source: str) -> Path:
    """The first file of one of these names (in any case) where the lists of a source are.

    Args:
        base: the source's root.
        annotations: the folder of the lists, from the current folder; None: see above.
        names: how the list may be called.
        source: for the error.

    Raises:
        DataError: there is none.
    """
    inside = base.parent if is_store(str(base)) else base
    folders = [inside / "annotations", inside] if annotations is None else [Path(annotations).expanduser()]
    for folder in folders:
        there = {path.name.lower(): path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
        for name in names:
            if name.lower() in there:
                return there[name.lower()]
    where = " or ".join(f"'{folder}'" for folder in folders)
    raise DataError(
        f"source {source}: no {' or '.join(names)} in {where}; put it there, or name its folder: "
        "data.annotations=FOLDER (eval.annotations where a run is judged by it)"
    )


def find_videos(base: Path, names: Iterable[str], source: str) -> dict[str, str]:
    """The path of each video by the name that a list gives it, with or without a suffix, whatever the file's own is.

    A name without a file gets the path `<base>/<name>.mp4`, so that it counts as missing.

    Raises:
        DataError: several files could be meant.
    """
    top = str(base)
    if is_store(top):
        paths = {os.path.join(top, key): stem(key.rpartition("/")[2]) for key in store_keys(top)}
    else:
        files = [path for path in walk_files(top) if os.path.splitext(path)[1].lower() in VIDEO_SUFFIXES]
        paths = {path: stem(os.path.basename(path)) for path in files}
    wanted = {name: stem(name) for name in names}
    found: dict[str, list[str]] = {short: [] for short in wanted.values()}
    for path, short in paths.items():
        if short in found:
            found[short].append(path)
    try:
        return {
            name: the_one(name, found[short]) or os.path.join(top, f"{short}.mp4") for name, short in wanted.items()
        }
    except ValueError as error:
        raise DataError(f"source {source}: '{top}': {error}") from error


def question_rows(
    base: Path, path: Path, split: str, source: str, *, options: bool = False, questions: bool = True
) -> list[Clip]:
    """The rows of a list of questions in JSONL, as ClipBERT has them, with their videos found by name.

    Args:
        base: the source's root.
        path: the list; `twinreel.data.manifest` says what is read.
        split: of all its rows.
        source: for errors.
        options: every row must have options, else none.
        questions: every row must have a question.

    Raises:
        DataError: rows that cannot be used, or one without a question or an answer.
    """
    rows = read_manifest(path, root=base)
    wrong = next((row for row in rows if bool(row.options) != options), None)
    if wrong is not None:
        found = "has options" if wrong.options else "has no options"
        raise DataError(f"source {source}: {path}: row {wrong.id!r} {found}; another list is meant")
    problems = [f"row {row.id!r}: {missing}" for row in rows if (missing := _missing(row, questions))]
    if problems:
        raise bad_rows(path, problems, len(rows))
    videos = find_videos(base, (os.path.basename(row.video) for row in rows), source)
    return [dataclasses.replace(row, video=videos[os.path.basename(row.video)], split=split) for row in rows]


def _missing(row: Clip, questions: bool) -> str | None:
    """What a row lacks of one question and one answer; None if it lacks nothing."""
    if questions and not (len(row.captions) == 1 and row.captions[0].text.strip()):
        return f"has {len(row.captions)} questions, not 1; write it as `question`"
    if len(row.labels) != 1 or not str(row.labels[0]).strip() or isinstance(row.labels[0], int) != bool(row.options):
        return "has no answer, or several; write one as `answer`"
    return None
