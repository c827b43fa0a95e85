"""HowTo100M in its own layout (arXiv:1906.03327): videos, a list of them, and one caption file a video.

    root/howto100m_videos.csv      a column `video_path`, relative to root
    root/captions/<video id>.csv   start,end,text in seconds; video id = file name up to its first dot

An epoch is one clip a video: the row is the whole video, and its captions say where a clip may begin.
"""

from __future__ import annotations

import os
from pathlib import Path

from twinreel.data.captions import missing_caption_files
from twinreel.data.clip import Clip
from twinreel.data.tables import bad_rows, column_names, read_table
from twinreel.errors import ConfigError, DataError

__all__ = ["rows"]

_LISTED = 5  # missing caption files spelled out


def rows(
    root: str | Path | None,
    split: str | None,
    *,
    videos_csv: str = "howto100m_videos.csv",
    caption_root: str = "captions",
) -> list[Clip]:
    """A row for each video of the list, in its order; `id` is the video id. All are of the split `train`.

    Args:
        root: folder that everything below is relative to.
        split: `train`, or None for all rows, which is the same.
        videos_csv: the list of videos.
        caption_root: the folder of caption files.

    Raises:
        ConfigError: no root.
        DataError: another split, a list that cannot be used, a video id twice, or a video without caption file.
    """
    if root is None:
        raise ConfigError("source howto100m needs data.root: the folder of the videos, their list and their captions")
    if split not in (None, "train"):
        raise DataError(f"source howto100m has no split {split!r}; it has train alone")
    base = os.path.abspath(Path(root).expanduser())
    table = read_table(os.path.join(base, videos_csv), "list of videos")
    column = column_names(table, {"video": "every row needs it"}, "list of videos")["video"]
    captions = os.path.join(base, caption_root)
    clips: list[Clip] = []
    lines: dict[str, int] = {}
    problems = list(table.problems)
    for line, record in table.records:
        video = str(record.get(column, ""))
        video_id = os.path.basename(video).split(".", 1)[0]
        if not video_id or video_id in lines:
            found = f"video id {video_id!r} is already that of line {lines[video_id]}" if video_id else "no video id"
            problems.append(f"{table.path}:{line}: {found} (file name up to its first dot) in {video!r}")
            continue
        lines[video_id] = line
        caption_file = os.path.join(captions, f"{video_id}.csv")
        clips.append(Clip(id=video_id, video=os.path.join(base, video), caption_file=caption_file, split="train"))
    if problems:
        raise bad_rows(table.path, problems, len(table.records) + len(table.problems))
    _refuse_missing_captions(clips, captions)
    return clips


def _refuse_missing_captions(clips: list[Clip], folder: str) -> None:
    missing = missing_caption_files(clips)
    if missing:
        first = ", ".join(f"{row.id}.csv" for row in missing[:_LISTED])
        raise DataError(
            f"{len(missing)} of {len(clips)} videos have no caption file in '{folder}' (first: {first}); "
            "set data.caption_root, or take these videos off the list"
        )
