"""MSR-VTT multiple choice (Yu et al., ECCV 2018), as ClipBERT has it: five captions of a video, one of them its own.

    msrvtt_mc_test.jsonl      {"qid": 0, "clip_name": "video7010", "options": [5 captions], "answer": 0}

Any retrieval model can be judged by it. `twinreel.data.sources.listed` says where lists and videos are looked for.
"""

from __future__ import annotations

from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.sources.listed import check_split, find_list, question_rows, source_root

__all__ = ["rows"]


def rows(root: str | Path | None, split: str | None, *, annotations: str | None = None) -> list[Clip]:
    """A row for each choice of the test, in its order; `id` is its `qid`.

    Args:
        root: folder or LMDB of the videos.
        split: test.
        annotations: folder of the lists, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or rows that cannot be used.
    """
    base = source_root(root, "msrvtt_mc")
    split = check_split(split, ("test",), "msrvtt_mc")
    path = find_list(base, annotations, ("msrvtt_mc_test.jsonl", "msrvtt_mc.jsonl"), "msrvtt_mc")
    return question_rows(base, path, split, "msrvtt_mc", options=True, questions=False)
