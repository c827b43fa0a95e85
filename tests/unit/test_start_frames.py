"""Rows that begin at a frame: their windows are the presentation times of frames, whatever the rate of the video."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from twinreel.data.clip import Clip
from twinreel.data.decode import read_frames
from twinreel.data.manifest import read_manifest, start_frames, write_manifest
from twinreel.data.sources import load_rows
from twinreel.errors import ConfigError, DataError
from videos import frame_numbers

UNEVEN = [0.0, 0.1, 0.2, 1.2, 1.3, 1.4, 1.5, 3.0, 3.1, 3.2]


@pytest.fixture
def layout(tmp_path: Path, make_video: Callable[..., Path]) -> Path:
    """`videos` and `annotations`: an even video at 10 Hz and one with gaps whose first time is 2 s."""
    make_video("data/videos/even.mp4", num_frames=20, frame_rate=10, b_frames=2)
    make_video("data/videos/sub/uneven.mkv", num_frames=10, pts_seconds=[2 + time for time in UNEVEN])
    (tmp_path / "data/annotations").mkdir()
    (tmp_path / "data/annotations/train.csv").write_text(
        "video_name,start_frame,label\neven.mp4,5,run\nsub/uneven.mkv,3,sit\neven.mp4,0,walk\nsub/uneven.mkv,7,stand\n"
    )
    (tmp_path / "data/annotations/val.csv").write_text("video_name,start_frame,label\neven.mp4,12,jump\n")
    return tmp_path / "data"


def numbers(row: Clip) -> list[int]:
    return frame_numbers(read_frames(row.video, start_seconds=row.start_seconds, end_seconds=row.end_seconds).data)


def test_a_row_ends_where_the_next_row_of_the_video_begins(layout: Path) -> None:
    rows = read_manifest(layout / "annotations/train.csv")
    assert [row.id for row in rows] == ["even.mp4@5", "sub/uneven.mkv@3", "even.mp4@0", "sub/uneven.mkv@7"]
    assert [row.labels for row in rows] == [("run",), ("sit",), ("walk",), ("stand",)]
    assert rows[1].video == str(layout / "videos/sub/uneven.mkv")
    assert [numbers(row) for row in rows] == [list(range(5, 20)), [3, 4, 5, 6], [0, 1, 2, 3, 4], [7, 8, 9]]
    windows = [(row.start_seconds, row.end_seconds) for row in rows]
    assert windows == [
        (pytest.approx(0.5), None),
        (pytest.approx(1.2), pytest.approx(3.0)),
        (0.0, pytest.approx(0.5)),
        (pytest.approx(3.0), None),
    ]


def test_the_same_as_a_source(layout: Path) -> None:
    rows = load_rows("annotated", layout, "train")
    alone = read_manifest(layout / "annotations/train.csv")
    assert [(row.id, row.video, row.start_seconds, row.labels) for row in rows] == [
        (row.id, row.video, row.start_seconds, row.labels) for row in alone
    ]
    assert {row.split for row in rows} == {"train"}
    for split in ("val", "validation"):
        (row,) = load_rows("annotated", layout, split)
        assert (row.id, row.split, numbers(row)) == ("even.mp4@12", "val", list(range(12, 20)))
    assert [row.split for row in load_rows("annotated", layout, None)] == ["train"] * 4 + ["val"]
    rows = load_rows("annotated", layout, "train", caption_template="they {label}")
    assert rows[0].captions[0].text == "they run"


def test_the_source_needs_its_layout(layout: Path) -> None:
    with pytest.raises(ConfigError, match=r"source annotated needs data\.root"):
        load_rows("annotated", None, "train")
    with pytest.raises(DataError, match="must hold the folders `videos` and `annotations`"):
        load_rows("annotated", layout / "videos", "train")
    with pytest.raises(DataError, match=r"no test\.csv in '.*annotations'"):
        load_rows("annotated", layout, "test")
    with pytest.raises(DataError, match="source annotated has no split 'trian'; allowed are train, val, test"):
        load_rows("annotated", layout, "trian")
    (layout / "annotations/val.csv").write_text("video_name,start_frame,label\neven.mp4,5,run\n")
    with pytest.raises(DataError, match=r"segment even\.mp4@5 is in train and in val; keep one"):
        load_rows("annotated", layout, None)


def test_a_list_with_three_fields(layout: Path) -> None:
    path = layout / "videos/list.txt"
    path.write_text("even.mp4 0 3\neven.mp4 5 4\n")
    rows = read_manifest(path)
    assert [(row.labels, numbers(row)) for row in rows] == [((3,), [0, 1, 2, 3, 4]), ((4,), list(range(5, 20)))]
    path.write_text("video start_frame label\neven.mp4 15 3\n")
    assert numbers(read_manifest(path)[0]) == list(range(15, 20))


def test_seconds_are_kept(layout: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    opened: list[str] = []
    real = start_frames.open_video
    monkeypatch.setattr(start_frames, "open_video", lambda video: opened.append(video) or real(video))
    path = layout / "annotations/train.csv"
    rows = read_manifest(path)
    assert len(opened) == 2 and "start frames became seconds: 2 videos were opened for it" in caplog.text
    assert read_manifest(path) == rows and len(opened) == 2
    os.utime(layout / "videos/even.mp4", ns=(1, 1))  # perhaps another video now
    assert read_manifest(path) == rows and len(opened) == 3
    kept = path.with_name("train.csv.seconds.json")
    kept.write_text(kept.read_text()[:40])
    caplog.clear()
    assert read_manifest(path) == rows and len(opened) == 5
    assert "cannot be used and is made anew" in caplog.text
    assert sorted(json.loads(kept.read_text())["videos"]) == sorted({row.video for row in rows})


def test_seconds_that_cannot_be_kept(
    layout: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise DataError("no space")

    monkeypatch.setattr(start_frames, "write_whole", full)
    with caplog.at_level(logging.WARNING):
        assert len(read_manifest(layout / "annotations/train.csv")) == 4
    assert "the seconds are not kept, so that every start opens the videos again: no space" in caplog.text


def test_clean_rows_keep_their_seconds(layout: Path, tmp_path: Path) -> None:
    rows = read_manifest(layout / "annotations/train.csv")
    write_manifest(tmp_path / "clean.jsonl", rows)
    assert read_manifest(tmp_path / "clean.jsonl") == rows


def test_a_frame_after_the_last_lies_outside(layout: Path) -> None:
    path = layout / "annotations/val.csv"
    path.write_text("video_name,start_frame,label\neven.mp4,19,a\neven.mp4,20,b\neven.mp4,40,c\n")
    rows = read_manifest(path)
    assert numbers(rows[0]) == [19]
    for row in rows[1:]:
        with pytest.raises(DataError, match="outside the video"):
            numbers(row)


def test_videos_that_cannot_be_opened_have_no_window(layout: Path) -> None:
    (layout / "videos/text.mp4").write_text("no video")
    path = layout / "annotations/val.csv"
    path.write_text("video_name,start_frame,label\ntext.mp4,3,a\nnone.mp4,4,b\neven.mp4,2,c\n")
    assert [row.start_seconds for row in read_manifest(path)] == [None, None, pytest.approx(0.2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("video,start_frame\na,-1\n", "start_frame '-1' must be a number of a frame: 0, 1, 2, ..."),
        ("video,start_frame\na,1.5\n", "start_frame '1.5' must be a number of a frame"),
        ("video,start_frame\na,\n", "start_frame is empty; write a number in every row"),
        ("video,start_frame,start\na,3,1\n", "a start_frame and a window in seconds are both given"),
        ("video,start_frame\na,3\nb,3\na,3\n", "m.csv:4: begins at frame 3 of its video, as the row at "),
    ],
)
def test_wrong_start_frames(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_manifest(path)
    assert words in str(caught.value)
