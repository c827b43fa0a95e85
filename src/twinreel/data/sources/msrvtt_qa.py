"""MSRVTT-QA (Xu et al., ACM MM 2017), as ClipBERT has it: open questions about MSR-VTT's videos.

    msrvtt_qa_train.jsonl, ..._val.jsonl, ..._test.jsonl    {"video_id", "question", "answer", "answer_type"}

Answer types are what, who, how, where and when. `twinreel.data.sources.listed` says where lists and videos are looked
for.
"""

from __future__ import annotations

from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.sources.listed import check_split, find_list, question_rows, source_root

__all__ = ["rows"]


def rows(root: str | Path | None, split: str | None, *, annotations: str | None = None) -> list[Clip]:
    """A row for each question of a split, in its order; `id` is the video's name, from its second question on `#2`, ...

    Args:
        root: folder or LMDB of the videos.
        split: train, val or test.
        annotations: folder of the lists, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or rows that cannot be used.
    """
    base = source_root(root, "msrvtt_qa")
    split = check_split(split, ("train", "val", "test"), "msrvtt_qa")
    path = find_list(base, annotations, (f"msrvtt_qa_{split}.jsonl", f"{split}.jsonl"), "msrvtt_qa")
    return question_rows(base, path, split, "msrvtt_qa")
