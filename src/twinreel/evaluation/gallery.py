"""What is asked and what can be found: rows with captions -> candidates, queries and which candidates are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twinreel.data.captions import row_captions
from twinreel.data.clip import Clip, Fault
from twinreel.errors import DataError
from twinreel.evaluation.views import refuse_missing
from twinreel.recipe import EvalSection

__all__ = ["Gallery", "Side", "build_gallery", "without_missing"]

Window = tuple[str, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """What is asked and what can be found. Rows with the same video and window are one candidate."""

    candidates: list[Clip]
    queries: list[str]
    positives: list[list[int]]

    @property
    def sides(self) -> dict[str, Side]:
        """Both directions by name."""
        captions_of: list[list[int]] = [[] for _ in self.candidates]
        for query, right in enumerate(self.positives):
            for candidate in right:
                captions_of[candidate].append(query)
        video_ids = [row.id for row in self.candidates]
        return {
            "text_to_video": Side(self.positives, self.queries, video_ids),
            "video_to_text": Side(captions_of, video_ids, self.queries),
        }


class Side(NamedTuple):
    """One direction: for each query the candidates that are right, and what queries and candidates are called."""

    positives: list[list[int]]
    query_ids: list[str]
    candidate_ids: list[str]


def build_gallery(rows: Sequence[Clip], *, merge_equal_captions: bool) -> Gallery:
    """Candidates and queries of rows; each caption is a query whose right answer is its own video.

    Args:
        rows: with `captions` or a `caption_file`.
        merge_equal_captions: equal captions of several videos become one query with several right answers; else
            each is a query of its own and only its own video is right.

    Raises:
        DataError: a row has no caption.
    """
    candidates: dict[Window, int] = {}
    kept: list[Clip] = []
    queries: list[str] = []
    positives: list[list[int]] = []
    seen: dict[str | tuple[str, int], int] = {}
    for row in rows:
        window = (row.video, row.start_seconds, row.end_seconds)
        if window not in candidates:
            candidates[window] = len(kept)
            kept.append(row)
        index = candidates[window]
        texts = dict.fromkeys(caption.text for caption in row_captions(row) if caption.text.strip())
        if not texts:
            raise DataError(f"{row.id}: no caption; retrieval needs a caption for every row (or eval.caption_template)")
        for text in texts:
            key = text if merge_equal_captions else (text, index)
            if key not in seen:
                seen[key] = len(queries)
                queries.append(text)
                positives.append([])
            if index not in positives[seen[key]]:
                positives[seen[key]].append(index)
    return Gallery(candidates=kept, queries=queries, positives=positives)


def without_missing(
    gallery: Gallery, videos: Tensor, valid: Tensor, faults: Sequence[Fault], section: EvalSection
) -> tuple[Gallery, Tensor]:
    """What is left of a gallery and its embeddings (N, ...) where some videos could not be read.

    Raises:
        DataError: as in `refuse_missing`.
    """
    refuse_missing(faults, valid, section)
    new_index = {old: new for new, old in enumerate(torch.nonzero(valid).flatten().tolist())}
    kept = [
        (query, [new_index[i] for i in right if i in new_index])
        for query, right in zip(gallery.queries, gallery.positives, strict=True)
    ]
    kept = [(query, right) for query, right in kept if right]
    smaller = Gallery(
        candidates=[row for row, ok in zip(gallery.candidates, valid.tolist(), strict=True) if ok],
        queries=[query for query, _ in kept],
        positives=[right for _, right in kept],
    )
    return smaller, videos[valid]
