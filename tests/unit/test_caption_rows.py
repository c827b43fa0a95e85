from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinreel.data.caption_rows import caption_rows, paragraph_rows
from twinreel.data.captions import row_captions
from twinreel.data.clip import Caption, Clip
from twinreel.data.dataset import window_in_video
from twinreel.errors import DataError


def track(*entries: tuple[str, float | None, float | None]) -> tuple[Caption, ...]:
    return tuple(Caption(text=text, start_seconds=start, end_seconds=end) for text, start, end in entries)


ROWS = [
    Clip(
        id="a", video="v.mp4", start_seconds=1.0, end_seconds=9.0, captions=track(("x", None, None), ("y", None, None))
    ),
    Clip(id="b", video="w.mp4", captions=track((" late ", 5.0, 7.0), ("early", 0.5, 2.0), ("", 1.0, 2.0)), split="val"),
]


def test_each_caption_is_a_row_of_its_own() -> None:
    rows = caption_rows(ROWS)
    assert [row.id for row in rows] == ["a#1", "a#2", "b#1", "b#2"]
    assert [[caption.text for caption in row.captions] for row in rows] == [["x"], ["y"], [" late "], ["early"]]
    assert [(row.start_seconds, row.end_seconds) for row in rows] == [(1.0, 9.0), (1.0, 9.0), (5.0, 7.0), (0.5, 2.0)]
    assert all(caption.start_seconds is None for row in rows for caption in row.captions)  # the row says it now
    assert [row.video for row in rows] == ["v.mp4", "v.mp4", "w.mp4", "w.mp4"] and rows[3].split == "val"


def test_ids_stay_unique_whatever_they_were() -> None:
    """A manifest calls the second row of a video `a#2`, which is the second caption of its first row, too."""
    rows = [Clip(id=id, video="v.mp4", captions=ROWS[0].captions) for id in ("a", "a#2", "a#2#1")]
    assert len({row.id for row in caption_rows(rows)}) == 6


def test_a_caption_with_one_end_takes_the_other_of_its_row() -> None:
    row = Clip(id="a", video="v", end_seconds=8.0, captions=track(("from", 2.0, None), ("to", None, 3.0)))
    assert [(one.start_seconds, one.end_seconds) for one in caption_rows([row])] == [(2.0, 8.0), (0.0, 3.0)]


def test_a_point_in_time_is_excluded_when_it_is_read_and_not_before() -> None:
    """ActivityNet's training list has two of 37421."""
    [row] = caption_rows([Clip(id="a", video="v.mp4", captions=track(("x", 34.77, 34.77)))])
    with pytest.raises(DataError, match=r"v.mp4: the window \[34.77, 34.77\) s is empty"):
        window_in_video(row.video, (row.start_seconds, row.end_seconds), 66.0)


def test_a_paragraph_is_in_order_of_time_and_about_all_of_the_row() -> None:
    first, second = paragraph_rows(ROWS)
    assert row_captions(first) == (Caption(text="x y"),) and row_captions(second) == (Caption(text="early late"),)
    assert (first.id, first.start_seconds, first.end_seconds) == ("a", 1.0, 9.0)
    assert (second.id, second.start_seconds, second.end_seconds) == ("b", None, None)


def test_captions_of_a_file_are_captions(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("start,end,text\n3,4,second\n1,2,first\n")
    row = Clip(id="a", video="v.mp4", caption_file=str(path))
    assert [one.captions[0].text for one in caption_rows([row])] == ["first", "second"]
    [whole] = paragraph_rows([row])
    assert whole.captions == (Caption(text="first second"),) and whole.caption_file is None
    assert all(one.caption_file is None for one in caption_rows([row]))


def test_options_alone_are_no_paragraph_and_stay_as_they_are(tmp_path: Path) -> None:
    """So that a model of paragraphs can be judged by multiple choice."""
    choice = Clip(id="q", video="v.mp4", options=("a", "b"), labels=(1,))
    asked = replace(choice, id="r", captions=track(("what?", None, None)))
    assert paragraph_rows([*ROWS, choice, asked])[2:] == [choice, asked]
    (tmp_path / "a.csv").write_text("start,end,text\n0,1,what?\n")
    [whole] = paragraph_rows([replace(choice, caption_file=str(tmp_path / "a.csv"))])
    assert whole.captions == (Caption(text="what?"),)


@pytest.mark.parametrize("make", [caption_rows, paragraph_rows])
@pytest.mark.parametrize("captions", [(), track((" ", 0.0, 1.0))])
def test_a_row_without_words_is_refused_by_name(make: object, captions: tuple[Caption, ...]) -> None:
    assert callable(make)
    with pytest.raises(
        DataError, match=r"row 'q' \(v\): no caption with text; data.caption_rows=caption and paragraph"
    ):
        make([*ROWS, Clip(id="q", video="v", captions=captions)])
