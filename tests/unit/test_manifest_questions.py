"""Columns of questions and answers, and the lists of ClipBERT as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import missing_videos, read_manifest, unused_columns, write_manifest
from twinreel.errors import DataError
from videos import make_video

PAGE = Path(__file__).parents[2] / "docs/manifests.md"


def write(path: Path, *records: Any) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def error(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_manifest(path)
    return str(caught.value)


def test_clipberts_retrieval_list(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.jsonl",
        {"caption": "a dog runs", "clip_name": "video0", "sen_id": 4},
        {"caption": "a dog", "clip_name": "video0", "sen_id": 5},
        {"caption": "a cat", "clip_name": "video1", "sen_id": 6},
    )
    make_video(tmp_path / "video0.webm", codec="libvpx", num_frames=2)
    first, second, third = read_manifest(path)
    assert [row.id for row in (first, second, third)] == ["video0", "video0#2", "video1"]
    assert first.video == second.video == str(tmp_path / "video0.webm")  # whatever suffix the file has
    assert second.captions == (Caption(text="a dog"),)
    assert missing_videos([first, second, third]) == [third] and third.video == str(tmp_path / "video1")
    assert unused_columns(path) == ["sen_id"]


def test_a_list_of_id_and_text_names_its_videos_by_id(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", {"id": "deep/v.1", "text": "one"}, {"id": "deep/v.1", "text": "two"})
    (tmp_path / "deep").mkdir()
    make_video(tmp_path / "deep" / "v.1.mp4", num_frames=2)
    rows = read_manifest(path)
    assert [row.id for row in rows] == ["deep/v.1", "deep/v.1#2"]
    assert {row.video for row in rows} == {str(tmp_path / "deep" / "v.1.mp4")} and unused_columns(path) == []
    path = write(tmp_path / "c.csv", "id,text,video", "a,one,x.mp4")
    assert [(row.id, row.video) for row in read_manifest(path)] == [("a", str(tmp_path / "x.mp4"))]


def test_a_name_that_several_files_have_is_refused(tmp_path: Path) -> None:  # ClipBERT defect 21
    for suffix in ("mp4", "avi"):
        (tmp_path / f"v.{suffix}").touch()
    said = error(write(tmp_path / "m.jsonl", {"clip_name": "v", "caption": "x"}))
    assert "m.jsonl:1: 2 files could be the video 'v'" in said and "v.avi" in said and "v.mp4" in said
    [row] = read_manifest(write(tmp_path / "m.jsonl", {"clip_name": "v.avi", "caption": "x"}))
    assert row.video == str(tmp_path / "v.avi")


def test_a_folder_of_images_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v.mp4").touch()
    [row] = read_manifest(write(tmp_path / "m.jsonl", {"clip_name": "v", "caption": "x"}))
    assert row.video == str(tmp_path / "v")


def test_multiple_choice(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        {"qid": 7, "clip_name": "v.mp4", "options": ["walk", "run", "1"], "answer": 1},
        {"qid": "8", "clip_name": "v.mp4", "options": ["walk", "run"], "answer": "walk", "question": "what?"},
        {"qid": "9", "clip_name": "v.mp4", "options": ["walk", "run"]},
    )
    first, second, third = read_manifest(path)
    assert (first.id, first.options, first.labels, first.captions) == ("7", ("walk", "run", "1"), (1,), ())
    assert (second.labels, second.captions) == ((0,), (Caption(text="what?"),))
    assert (third.id, third.labels, third.options) == ("9", (), ("walk", "run"))
    assert unused_columns(path) == []


def test_open_questions(tmp_path: Path) -> None:
    rows = [
        {"gif_name": "g.gif", "question": "how many?", "answer": "2", "answer_type": "number"},
        {"gif_name": "g.gif", "question": "what color?", "answer": "red", "answer_type": "color"},
        {"gif_name": "g.gif", "question": "how many?", "answer": 3},
    ]
    found = read_manifest(write(tmp_path / "m.jsonl", *rows))
    assert [row.labels for row in found] == [("2",), ("red",), ("3",)]  # an answer is words, not a class number
    assert [row.answer_type for row in found] == ["number", "color", None] and not any(row.options for row in found)
    table = write(tmp_path / "m.csv", "video_id,question,answer,answer_type", "v.mp4,how many?,2,number")
    [row] = read_manifest(table)
    assert (row.labels, row.answer_type, row.id) == (("2",), "number", "v.mp4")


def test_in_a_csv_options_are_one_cell(tmp_path: Path) -> None:
    head = "video,question,options,answer"
    [row] = read_manifest(write(tmp_path / "m.csv", head, 'v.mp4,what?,"[""a"", ""b""]",1'))
    assert row.options == ("a", "b") and row.labels == (1,)
    [row] = read_manifest(write(tmp_path / "m.csv", head, 'v.mp4,what?,"[""a"", ""b""]",a'))
    assert row.labels == (0,)


@pytest.mark.parametrize("names", [("video", "video_id"), ("path", "gif_name"), ("clip_name", "video_id")])
def test_other_names_are_read_only_where_there_is_no_better_one(tmp_path: Path, names: tuple[str, str]) -> None:
    path = write(tmp_path / "m.csv", f"{names[0]},{names[1]},id,qid", "a.mp4,xyz,i,q")
    [row] = read_manifest(path)
    assert (row.id, row.video) == ("i", str(tmp_path / "a.mp4")) and unused_columns(path) == [names[1], "qid"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": ["a", "b"], "answer": 2}, "answer 2 must be one of the options, or its number from 0 to 1"),
        ({"options": ["a", "b"], "answer": -1}, "answer -1 must be one of the options"),
        ({"options": ["a", "b"], "answer": True}, "answer True must be"),
        ({"options": ["a", "b"], "answer": "c"}, "answer 'c' must be"),
        ({"options": ["a", "a"], "answer": "a"}, "answer 'a' must be"),
        ({"options": ["a"], "answer": 0}, "options must be a list of at least two texts, got \\['a'\\]"),
        ({"options": ["a", " "], "answer": 0}, "options must be a list of at least two texts"),
        ({"options": "a b", "answer": 0}, "options must be a JSON list"),
        ({"options": ["a", "b"], "label": 0}, "options have an answer, not a label"),
        ({"answer": "a", "label": "b"}, "answer and label are both given"),
        ({"answer": ["a"]}, "answer must be text, got"),
        ({"question": "a", "caption": "b"}, "'question' and 'caption' both mean 'caption'"),
    ],
)
def test_wrong_questions_are_named_with_their_line(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "m.jsonl", {"video": "v.mp4", **fields})
    with pytest.raises(DataError, match=words):
        read_manifest(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_questions_are_written_and_read_back(tmp_path: Path, suffix: str) -> None:
    rows = [
        Clip(id="a", video="/v.mp4", captions=(Caption(text="what?"),), options=("2", "3"), labels=(1,)),
        Clip(id="b", video="/v.mp4", options=("x", 'y "z"')),
        Clip(id="c", video="/v.mp4", captions=(Caption(text="how many?"),), labels=("2",), answer_type="number"),
        Clip(id="d", video="/v.mp4", labels=("red",), answer_type="color"),
        Clip(id="e", video="/v.mp4", labels=(3,), answer_type="number"),
        Clip(id="f", video="/v.mp4", labels=("a", "b")),
    ]
    path = tmp_path / f"m.{suffix}"
    write_manifest(path, rows)
    assert read_manifest(path) == rows


def test_rows_whose_options_would_not_be_read_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 'a' cannot be written: answer 5 must be one of the options"):
        write_manifest(tmp_path / "m.jsonl", [Clip(id="a", video="/v.mp4", options=("x", "y"), labels=(5,))])


def test_the_lines_of_the_page_are_read_as_it_says(tmp_path: Path) -> None:
    [block] = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [read_manifest(write(tmp_path / "m.jsonl", line), root="/tmp")[0] for line in block.splitlines()]
    assert [(row.id, row.video, row.labels) for row in rows] == [
        ("video0", "/tmp/video0", ()),
        ("deep/video1", "/tmp/deep/video1", ()),
        ("7", "/tmp/video0", (0,)),
        ("some.gif", "/tmp/some.gif", ("red",)),
        ("video0", "/tmp/video0", ("two",)),
    ]
