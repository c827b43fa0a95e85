"""Kinetics in its own layout (arXiv:1705.06950 and later versions): videos, and one CSV a split.

    root/annotations/train.csv, val.csv, test.csv      label,youtube_id,time_start,time_end,split; or in root itself
    root/**/<youtube_id>_<start>_<end>.mp4             trimmed clips at any depth, or whole videos <youtube_id>.mp4

The CSV files may be PySlowFast's, `path label`; without any, `root/<split>/<class>/<video>` is read (`class_folders`).

`twinreel.data.manifest.kinetics_csv` says how a row finds its file. Labels are the names of the classes as the CSV has
them; a class's number is its place among the sorted names.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifests
from twinreel.data.sources import class_folders
from twinreel.errors import ConfigError, DataError

__all__ = ["find_lists", "rows"]

_FILES = {  # how the CSV of a split may be called, without its suffix
    "train": ("train",),
    "val": ("val", "validate", "validation", "valid"),
    "test": ("test",),
}


def rows(
    root: str | Path | None,
    split: str | None,
    *,
    csv: str | None = None,
    caption_template: str | None = None,
    class_names: str | None = None,
) -> list[Clip]:
    """A row for each line of Kinetics' own CSV, of PySlowFast's, or for each video of `<split>/<class>/`.

    Of Kinetics' own, a video is found by name and `id` is `<youtube_id>_<start>_<end>`.

    Args:
        root: folder of the videos and of the CSV files.
        split: `train`, `val` (also `validate`, `validation`) or `test`; None: all that there are.
        csv: one CSV, from root, instead of those found by their names.
        caption_template: such as `'a person is {label}'`.
        class_names: of PySlowFast's lists: a file with the names of class numbers, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no CSV, or one that cannot be used, or a row for which several files fit.
    """
    if root is None:
        raise ConfigError("source kinetics needs data.root: the folder of the videos and of train.csv, val.csv, ...")
    base = Path(os.path.abspath(Path(root).expanduser()))
    if csv is None and not _has_lists(base) and base.is_dir():
        return class_folders.rows(base, split, caption_template=caption_template)
    if csv is not None:
        return read_manifests([base / csv], root=base, split=split, caption_template=caption_template)
    files = find_lists(base, split, "source kinetics")
    if all(_has_header(path) for path in files.values()):
        return read_manifests(list(files.values()), root=base, split=split, caption_template=caption_template)
    return _path_lists(files, base, caption_template, class_names)


def _has_header(path: Path) -> bool:
    """Whether a CSV is Kinetics' own; PySlowFast's lists have no line of names."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return "youtube_id" in file.readline().lower()


def _path_lists(files: Mapping[str, Path], base: Path, template: str | None, class_names: str | None) -> list[Clip]:
    """Rows of PySlowFast's `path label` lists, whose split is the name of the file."""
    clips: list[Clip] = []
    for name, path in files.items():
        read = read_manifests([path], root=base, caption_template=template, class_names=class_names)
        clips += [dataclasses.replace(clip, split=name) for clip in read]
    ids = Counter(clip.id for clip in clips)
    twice = next((id for id, count in ids.items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{base}: {twice} is in several of {', '.join(path.name for path in files.values())}; keep one")
    return clips


def _has_lists(base: Path) -> bool:
    names = {f"{called}.csv" for called_so in _FILES.values() for called in called_so}
    return any((base / folder / name).is_file() for folder in ("annotations", "") for name in names)


def find_lists(root: Path, split: str | None, what: str) -> dict[str, Path]:
    """The CSV of a split, or of every split, in `root/annotations` or `root`, by the name of the split.

    Raises:
        DataError: no such split or no CSV.
    """
    wanted = [name for name, called in _FILES.items() if split is None or split in called]
    if not wanted:
        raise DataError(f"{what} has no split {split!r}; allowed are {', '.join(_FILES)}")
    found = {}
    for name in wanted:
        places = (
            root / folder / f"{called}.csv"
            for called in dict.fromkeys((split, *_FILES[name]))
            if called in _FILES[name]
            for folder in ("annotations", "")
        )
        path = next((place for place in places if place.is_file()), None)
        if path is not None:
            found[name] = path
    if not found:
        raise DataError(f"{what}: no {wanted[0]}.csv in '{root / 'annotations'}' or '{root}'")
    return found
