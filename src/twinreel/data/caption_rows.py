"""Rows of videos with several captions as rows of one caption each, or with all captions joined to a paragraph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from twinreel.data.captions import row_captions
from twinreel.data.clip import Caption, Clip
from twinreel.errors import DataError

__all__ = ["caption_rows", "paragraph_rows"]


def caption_rows(rows: Iterable[Clip]) -> list[Clip]:
    """Each caption as a row of its own, in order; the ids are `<id>#1`, `<id>#2`, ...

    A caption with seconds of its own gives its row that window (one that is a point in time an empty one, which is
    excluded and named when it is read); the others have the window of their row. Captions without text (speech
    recognition leaves some) give no row.

    Raises:
        DataError: a row has no caption with text, or a caption file cannot be used.
    """
    made = []
    for row in rows:
        for number, caption in enumerate(_spoken(row), start=1):
            start, end = _caption_window(row, caption)
            alone = replace(row, id=f"{row.id}#{number}", captions=(Caption(text=caption.text),), caption_file=None)
            made.append(replace(alone, start_seconds=start, end_seconds=end))
    return made


def paragraph_rows(rows: Iterable[Clip]) -> list[Clip]:
    """The captions of each row as one, about all of it: in order of time, those without a time as they are listed.

    DiDeMo's and ActivityNet's are judged so: every sentence of a video, with single spaces between them. A row with
    options and no captions has nothing to join and stays as it is: a model of paragraphs can be judged by choices.

    Raises:
        DataError: a row without options has no caption with text, or a caption file cannot be used.
    """
    paragraphs = []
    for row in rows:
        if row.options and not row.captions and row.caption_file is None:
            paragraphs.append(row)
            continue
        ordered = sorted(_spoken(row), key=lambda caption: caption.start_seconds or 0.0)
        text = " ".join(caption.text.strip() for caption in ordered)
        paragraphs.append(replace(row, captions=(Caption(text=text),), caption_file=None))
    return paragraphs


def _spoken(row: Clip) -> Sequence[Caption]:
    """The captions of a row that have text, at least one."""
    captions = [caption for caption in row_captions(row) if caption.text.strip()]
    if not captions:
        raise DataError(
            f"row {row.id!r} ({row.video}): no caption with text; data.caption_rows=caption and paragraph need one a "
            "row. Rows with options want data.caption_rows=video"
        )
    return captions


def _caption_window(row: Clip, caption: Caption) -> tuple[float | None, float | None]:
    start, end = caption.start_seconds, caption.end_seconds
    if start is None and end is None:
        return row.start_seconds, row.end_seconds
    return start or 0.0, row.end_seconds if end is None else end
