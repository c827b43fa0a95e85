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
from twinreel.data.sources.listed import check_split, find_list, find_videos, read_json, source_root
from twinreel.errors import DataError

__all__ = ["rows"]

SEGMENT_SECONDS = 5.0


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
    found: dict[str, list[Caption]] = {}
    for number, entry in enumerate(read_json(path), start=1):
        try:
            found.setdefault(stem(entry["video"]), []).append(_caption(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: entry {number} is not DiDeMo's: {error!r}") from error
    videos = find_videos(base, found, "didemo")
    return [Clip(id=name, video=videos[name], captions=tuple(own), split=split) for name, own in found.items()]


def _caption(entry: dict[str, Any]) -> Caption:
    [((first, last), _)] = Counter((int(first), int(last)) for first, last in entry["times"]).most_common(1)
    start, end = first * SEGMENT_SECONDS, (last + 1) * SEGMENT_SECONDS
    return Caption(text=entry["description"].strip(), start_seconds=start, end_seconds=end)
