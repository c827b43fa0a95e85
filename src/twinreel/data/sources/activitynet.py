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
from twinreel.data.sources.entries import read_json, sentence, value_of, wrong_entries
from twinreel.data.sources.listed import check_split, find_list, find_videos, source_root

__all__ = ["rows"]

_EXPECTED = '{"v_<id>": {"timestamps": [[start, end], ...], "sentences": ["...", ...]}, ...}, a window a sentence'


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
    content = read_json(path, dict, _EXPECTED)
    found: dict[str, tuple[Caption, ...]] = {}
    problems = []
    for name, entry in content.items():
        try:
            found[name] = _captions(entry)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise wrong_entries(path, problems, len(content), _EXPECTED)
    videos = find_videos(base, found, "activitynet")
    return [Clip(id=name, video=videos[name], captions=own, split=split) for name, own in found.items()]


def _captions(entry: Any) -> tuple[Caption, ...]:
    windows, sentences = value_of(entry, "timestamps", list), value_of(entry, "sentences", list)
    if len(windows) != len(sentences) or not sentences:
        raise ValueError(f"{len(windows)} timestamps and {len(sentences)} sentences; there is one or more, of each")
    captions = []
    for window, text in zip(windows, sentences, strict=True):
        if not isinstance(window, list) or len(window) != 2 or None in window:
            raise ValueError(f"timestamps hold [start, end] in seconds, got {window!r}")
        start, end = check_times(*window, point_allowed=True)
        captions.append(Caption(text=sentence(text).strip(), start_seconds=start, end_seconds=end))
    return tuple(captions)
