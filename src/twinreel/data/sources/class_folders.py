"""A folder of videos for each class, and perhaps one level of splits above.

    root/<class>/<video>              no splits: data.split stays null
    root/<split>/<class>/<video>      data.split=train

A class is the name of its folder; videos may lie deeper inside it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import read_folder
from twinreel.errors import ConfigError, DataError

__all__ = ["rows"]

SPLITS = ("train", "val", "validation", "valid", "validate", "test")


def rows(root: str | Path | None, split: str | None, *, caption_template: str | None = None) -> list[Clip]:
    """A row for each video below a class's folder, sorted by id, which is its path from root.

    Args:
        root: the folder with a folder for each class, or for each split.
        split: a folder of root; None: all classes of root, or of all its splits where it has folders named train, val,
            validation, valid, validate or test and no others.
        caption_template: such as `'a person is {label}'`.

    Raises:
        ConfigError: no root.
        DataError: no such split, no class, or a video that lies in no class's folder.
    """
    if root is None:
        raise ConfigError("source class_folders needs data.root: the folder with a folder for each class")
    base = Path(os.path.abspath(Path(root).expanduser()))
    if not base.is_dir():
        raise DataError(f"source class_folders: no folder '{base}'")
    if split is not None:
        return _split(base, split, caption_template)
    folders = sorted(item.name for item in base.iterdir() if item.is_dir() and not item.name.startswith("."))
    if folders and set(folders) <= set(SPLITS):
        return [clip for name in folders for clip in _split(base, name, caption_template)]
    return _classes(base, "", None, caption_template)


def _split(base: Path, split: str, template: str | None) -> list[Clip]:
    if not (base / split).is_dir():
        there = ", ".join(sorted(item.name for item in base.iterdir() if item.is_dir()))
        raise DataError(f"source class_folders: no folder '{base / split}' for the split {split!r}; there are: {there}")
    return _classes(base / split, f"{split}/", split, template)


def _classes(folder: Path, prefix: str, split: str | None, template: str | None) -> list[Clip]:
    found = read_folder(folder)
    loose = [clip.id for clip in found if "/" not in clip.id]
    if loose:
        raise DataError(
            f"{folder}: {len(loose)} videos lie in no class's folder (first: {loose[0]}); put each into a folder that "
            "is named after its class"
        )
    clips = []
    for clip in found:
        label = clip.id.split("/")[0]
        captions = () if template is None else (Caption(text=template.replace("{label}", label)),)
        clips.append(dataclasses.replace(clip, id=prefix + clip.id, labels=(label,), captions=captions, split=split))
    return clips
