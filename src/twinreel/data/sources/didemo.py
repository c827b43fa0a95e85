"""DiDeMo (Hendricks et al., ICCV 2017): Flickr videos of up to 30 s, whose sentences name segments of 5 s.

    train_data.json, val_data.json, test_data.json      [{"video", "description", "times": [[first, last], ...]}, ...]

A sentence's window is that of the segments which most of its annotators chose, the earlier listed ones where they are
even. Retrieval as published takes each video whole with all its sentences as one: `data.caption_rows=paragraph`.
The lists write one video with different suffixes (`x.mov`, `x.mp4`, `x.`): the name without it counts, so there are
1065 videos in val and 1004 in test. `twinreel.data.sources.listed` says where lists and videos are looked for.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest.video_names import stem
from twinreel.data.sources.entries import read_json, value_of, wrong_entries
from twinreel.data.sources.listed import check_split, find_list, find_videos, source_root

__all__ = ["rows"]

SEGMENT_SECONDS = 5.0
_LAST_SEGMENT = 5
_EXPECTED = '[{"video": "...", "description": "...", "times": [[first, last], ...]}, ...], segments 0 to 5'


def rows(root: str | Path | None, split: str | None, *, annotations: str | None = None) -> list[Clip]:
    """A row for each video of a split, with its sentences and their windows; `id` is its name without suffix.

    Args:
        root: folder or LMDB of the videos.
        split: train, val or test.
        annotations: folder of the lists, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or one of another form.
    """
    base = source_root(root, "didemo")
    split = check_split(split, ("train", "val", "test"), "didemo")
    path = find_list(base, annotations, (f"{split}_data.json", f"didemo_{split}.json"), "didemo")
    content = read_json(path, list, _EXPECTED)
    found: dict[str, list[Caption]] = {}
    problems = []
    for number, entry in enumerate(content, start=1):
        try:
            found.setdefault(stem(value_of(entry, "video", str)), []).append(_caption(entry))
        except ValueError as error:
            problems.append(f"entry {number}: {error}")
    if problems:
        raise wrong_entries(path, problems, len(content), _EXPECTED)
    videos = find_videos(base, found, "didemo")
    return [Clip(id=name, video=videos[name], captions=tuple(own), split=split) for name, own in found.items()]


def _caption(entry: Any) -> Caption:
    chosen = Counter(_segments(pair) for pair in value_of(entry, "times", list))
    if not chosen:
        raise ValueError("times is an empty list")
    [((first, last), _)] = chosen.most_common(1)
    start, end = first * SEGMENT_SECONDS, (last + 1) * SEGMENT_SECONDS
    return Caption(text=value_of(entry, "description", str).strip(), start_seconds=start, end_seconds=end)


def _segments(pair: Any) -> tuple[int, int]:
    if isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair):
        first, last = pair
        if 0 <= first <= last <= _LAST_SEGMENT:
            return first, last
    raise ValueError(f"times hold [first, last], segments from 0 to {_LAST_SEGMENT} in this order, got {pair!r}")
