"""Videos with annotated segments: each begins at a frame and ends where the next one begins.

    root/videos/                              the videos, at any depth
    root/annotations/train.csv, val.csv, ...  video_name,start_frame,label

`twinreel.data.manifest.start_frames` says how frames become seconds. The same rows are read where such a CSV is named
as a manifest; as a source, its file name is the split.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifest
from twinreel.data.sources.kinetics import find_lists
from twinreel.errors import ConfigError, DataError

__all__ = ["is_annotated", "rows"]


def rows(
    root: str | Path | None,
    split: str | None,
    *,
    caption_template: str | None = None,
    class_names: str | None = None,
) -> list[Clip]:
    """A row for each segment of `annotations/<split>.csv`, from a start frame on; `id` is `<video name>@<frame>`.

    Args:
        root: folder with `videos` and `annotations`.
        split: `train`, `val` (also `validate`, `validation`) or `test`; None: all that there are.
        caption_template: such as `'a person is {label}'`.
        class_names: a file with the names of class numbers, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: another layout, rows that cannot be used, or the same segment in two splits.
    """
    if root is None:
        raise ConfigError("source annotated needs data.root: the folder with `videos` and `annotations`")
    base = Path(os.path.abspath(Path(root).expanduser()))
    if not is_annotated(base):
        raise DataError(f"source annotated: '{base}' must hold the folders `videos` and `annotations`")
    clips: list[Clip] = []
    for name, path in find_lists(base, split, "source annotated").items():
        read = read_manifest(path, root=base / "videos", caption_template=caption_template, class_names=class_names)
        clips += [dataclasses.replace(clip, split=name) for clip in read]
    splits: dict[str, str | None] = {}
    for clip in clips:
        if clip.id in splits:
            raise DataError(f"{base}: segment {clip.id} is in {splits[clip.id]} and in {clip.split}; keep one")
        splits[clip.id] = clip.split
    return clips


def is_annotated(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return (folder / "videos").is_dir() and (folder / "annotations").is_dir()
