"""ActivityNet Captions (Krishna et al., ICCV 2017): videos of minutes, whose sentences have their own seconds.

    train.json, val_1.json, val_2.json      {"v_<id>": {"timestamps": [[start, end], ...], "sentences": [...]}, ...}

Retrieval as published takes each video whole with all its sentences as one, on val_1: `data.caption_rows=paragraph`.
`twinreel.data.sources.listed` says where lists and videos are looked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest.row_fields import check_times
from twinreel.data.sources.listed import check_split, find_list, find_videos, read_json, source_root
from twinreel.errors import DataError

__all__ = ["rows"]


def rows(root: str | Path | None, split: str | None, *, annotations: str | None = None) -> list[Clip]:
    """A row for each video of a split, with its sentences and their windows; `id` is `v_<id>`.

    Args:
        root: folder or LMDB of the videos.
        split: train, val_1 or val_2.
        annotations: folder of the lists, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or one of another form.
    """
    base = source_root(root, "activitynet")
    split = check_split(split, ("train", "val_1", "val_2"), "activitynet")
    path = find_list(base, annotations, (f"{split}.json", f"anet_captions_{split}.json"), "activitynet")
    content = read_json(path)
    found: dict[str, tuple[Caption, ...]] = {}
    for name in content:
        try:
            found[name] = _captions(content[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: {name!r} is not ActivityNet's: {error!r}") from error
    videos = find_videos(base, found, "activitynet")
    return [Clip(id=name, video=videos[name], captions=own, split=split) for name, own in found.items()]


def _captions(entry: dict[str, Any]) -> tuple[Caption, ...]:
    captions = []
    for (start, end), text in zip(entry["timestamps"], entry["sentences"], strict=True):
        start_seconds, end_seconds = check_times(start, end, point_allowed=True)
        captions.append(Caption(text=text.strip(), start_seconds=start_seconds, end_seconds=end_seconds))
    return tuple(captions)
