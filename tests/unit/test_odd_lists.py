"""Lists of the sources of captions and questions with a fault in them: it is named, and no row comes of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinreel.data.clip import Clip
from twinreel.data.sources import load_rows
from twinreel.errors import DataError

QUESTION = {"gif_name": "v", "question": "what?", "answer": "red", "qid": "q"}
CHOICE = {"gif_name": "v", "question": "what?", "options": ["a", "b"], "answer": 1, "qid": "q"}
OFFICIAL = {
    "videos": [{"video_id": "v", "split": "train"}],
    "sentences": [{"video_id": "v", "caption": "a"}, {"video_id": "v", "caption": "b"}],
}
# source, split, its options, name and content of the list
LISTS: dict[str, tuple[str, str, dict[str, str], str, Any]] = {
    "activitynet": ("activitynet", "train", {}, "train.json", {"v": {"timestamps": [[0, 1.5]], "sentences": ["a"]}}),
    "didemo": ("didemo", "val", {}, "val_data.json", [{"video": "v.mp4", "description": "a", "times": [[0, 0]]}]),
    "msrvtt": ("msrvtt", "train", {}, "MSRVTT_data.json", OFFICIAL),
    "msrvtt plain": ("msrvtt", "test_full", {}, "test_videodatainfo.json", [{"video": "v", "caption": ["a", "b"]}]),
    "msrvtt_mc": ("msrvtt_mc", "test", {}, "msrvtt_mc_test.jsonl", CHOICE),
    "msrvtt_qa": ("msrvtt_qa", "val", {}, "msrvtt_qa_val.jsonl", QUESTION),
    "tgif_qa": ("tgif_qa", "test", {"task": "action"}, "tgif_qa_action_test.jsonl", CHOICE),
    "tgif_qa open": ("tgif_qa", "test", {"task": "frameqa"}, "tgif_qa_frameqa_test.jsonl", QUESTION),
}
ODD = (None, 7, -1, 0.5, float("nan"), True, "", "  ", "word", [], [[]], [None], [3, 1], ["x", 5], {}, {"a": 1})

TABLE = "gif_name\tquestion\ta1\ta2\ta3\ta4\ta5\tanswer\tvid_id\n"
OPEN = "gif_name\tquestion\tanswer\ttype\tvid_id\n"


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def said(folder: Path, source: str, split: str, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(source, folder, split, **options)
    return str(caught.value)


def with_faults(value: Any) -> Iterator[Any]:
    """Every content in which one value is an odd one, or one key or entry is missing."""
    yield from ODD
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            less = copy.copy(value)
            del less[key]
            yield less
            for odd in with_faults(value[key]):
                other = copy.copy(value)
                other[key] = odd
                yield other


def check_usable(rows: list[Clip]) -> None:
    for row in rows:
        assert row.id.strip() and isinstance(row.video, str)
        assert row.captions or row.options
        assert not row.options or (isinstance(row.labels[0], int) and 0 <= row.labels[0] < len(row.options))
        assert all(isinstance(text, str) and text.strip() for text in row.options)
        for caption in row.captions:
            assert isinstance(caption.text, str) and caption.text.strip()
            if caption.start_seconds is not None or caption.end_seconds is not None:
                assert 0 <= caption.start_seconds <= caption.end_seconds < 1e9


@pytest.mark.parametrize("case", LISTS)
def test_no_fault_in_a_list_becomes_a_row_or_a_traceback(tmp_path: Path, case: str) -> None:
    source, split, options, name, content = LISTS[case]
    write(tmp_path, name, content)
    check_usable(load_rows(source, tmp_path, split, **options))
    refused = 0
    for faulty in with_faults(content):
        write(tmp_path, name, faulty)
        try:
            rows = load_rows(source, tmp_path, split, **options)
        except DataError as error:
            assert name in str(error), (faulty, str(error))
            refused += 1
        else:
            assert rows, faulty
            check_usable(rows)
    assert refused > 50


@pytest.mark.parametrize("case", LISTS)
def test_empty_files_marks_and_line_ends(tmp_path: Path, case: str) -> None:
    source, split, options, name, content = LISTS[case]
    write(tmp_path, name, content)
    expected = load_rows(source, tmp_path, split, **options)
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode() + b"\r\n")
    assert load_rows(source, tmp_path, split, **options) == expected
    for nothing in (b"", b"\xef\xbb\xbf", b"\r\n \r\n"):
        path.write_bytes(nothing)
        assert name in said(tmp_path, source, split, **options)
    path.write_bytes(b"[" * 100_000)
    if name.endswith(".json"):
        assert f"{name}: not JSON" in said(tmp_path, source, split, **options)


@pytest.mark.parametrize(
    ("case", "content", "words"),
    [
        ("activitynet", [1], r"train.json: got \[1\]; expected \{\"v_<id>\""),
        ("activitynet", {}, "train.json: no entry in it; expected"),
        ("activitynet", {"v": 3}, "'v': 3 is no object with 'timestamps'"),
        ("activitynet", {"v": {"sentences": []}}, "'v': no 'timestamps' in it; there is 'sentences'"),
        ("activitynet", {"v": {"timestamps": [], "sentences": []}}, "'v': 0 timestamps and 0 sentences"),
        ("activitynet", {"v": {"timestamps": [[0, 1]], "sentences": [" "]}}, "'v': a sentence must be text with words"),
        ("activitynet", {"v": {"timestamps": [3], "sentences": ["x"]}}, r"'v': timestamps hold \[start, end\] in sec"),
        ("activitynet", {"v": {"timestamps": [[0, None]], "sentences": ["x"]}}, r"got \[0, None\]"),
        ("activitynet", '{"v": {}, "v": {}}', "train.json: key 'v' appears twice in one object"),
        ("activitynet", {"v": {"timestamps": [[3, 2]], "sentences": ["x"]}}, r"'v': \[3, 2\) ends before it starts"),
        ("activitynet", {"v": {"timestamps": [], "sentences": ["x"]}}, "'v': 0 timestamps and 1 sentences"),
        ("didemo", [{"video": "a", "description": "x"}], "entry 1: no 'times' in it; there is 'video', 'description'"),
        ("didemo", 5, "val_data.json: got 5; expected"),
        ("didemo", None, "val_data.json: got null; expected"),
        ("didemo", [{"video": "v", "description": "a", "times": []}], "1 of 1 entries is wrong.*\n  entry 1: times is"),
        ("didemo", [{"video": "v", "description": "", "times": [[0, 0]]}], "entry 1: description is empty"),
        ("didemo", [{"video": "v", "description": "a", "times": [[3, 1]]}], r"entry 1: times hold .* got \[3, 1\]"),
        ("didemo", [{"video": "v", "description": "a", "times": [[0, 6]]}], "entry 1: times hold .* from 0 to 5"),
        ("didemo", [{"video": "v", "description": "a", "times": [[0, 1.5]]}], "entry 1: times hold"),
        ("msrvtt", {"videos": [], "sentences": 5}, r"MSRVTT_data.json: sentences must be a list \[...\], got 5; exp"),
        ("msrvtt", OFFICIAL | {"sentences": [{"video_id": "v", "caption": None}]}, "sentence 1: caption must be text"),
        ("msrvtt", OFFICIAL | {"sentences": [{"video_id": "v", "caption": "  "}]}, "sentence 1: caption is empty"),
        ("msrvtt", OFFICIAL | {"videos": [{"video_id": 5, "split": "train"}]}, "video 1: video_id must be text, got 5"),
        (
            "msrvtt",
            OFFICIAL | {"videos": [{"video_id": "v", "split": split} for split in ("train", "test")]},
            "video 2: v is in the split 'train' already, here it is in 'test'",
        ),
        (
            "msrvtt plain",
            [{"video": "v", "caption": [None, "a"]}],
            "entry 1: a sentence must be text with words, got n",
        ),
        ("msrvtt plain", [{"video": "v", "caption": []}], r"entry 1: caption must be a sentence or a list .* got \[\]"),
        ("msrvtt plain", [{"video": "v", "caption": {"a": 1}}], 'entry 1: caption must be .* got {"a": 1}'),
        ("msrvtt plain", [{"video": "v", "caption": ["a"]}, {"video": "w"}], "1 of 2 entries .*\n  entry 2: no 'capt"),
        ("msrvtt_mc", {key: CHOICE[key] for key in ("gif_name", "options")}, "row 'v': has no answer, or several"),
        ("msrvtt_qa", {"gif_name": "v", "question": "what?"}, "row 'v': has no answer, or several"),
        ("msrvtt_qa", {"gif_name": "v", "question": "what?", "label": 3}, "row 'v': has no answer, or several"),
        ("msrvtt_qa", {"gif_name": "v", "answer": "red"}, "row 'v': has 0 questions, not 1; write it as `question`"),
        ("tgif_qa", {"gif_name": "v", "options": ["a", "b"], "answer": 0}, "row 'v': has 0 questions, not 1"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_entry(tmp_path: Path, case: str, content: Any, words: str) -> None:
    source, split, options, name, _ = LISTS[case]
    write(tmp_path, name, content)
    words_found = said(tmp_path, source, split, **options)
    assert name in words_found and re.search(words, words_found), words_found


def test_every_wrong_entry_is_counted(tmp_path: Path) -> None:
    good = {"video": "v", "description": "a", "times": [[0, 0]]}
    write(tmp_path, "val_data.json", [good, 3, good, {"video": "v"}])
    found = said(tmp_path, "didemo", "val")
    assert "2 of 4 entries are wrong" in found and "entry 2: 3 is no object" in found and "entry 4: no 'times'" in found
    assert '\n  expected [{"video": "...", "description"' in found


def test_lists_of_msrvtts_videos(tmp_path: Path) -> None:
    write(tmp_path, "MSRVTT_data.json", OFFICIAL)
    write(tmp_path, "MSRVTT_train.7k.csv", "\ufeffvideo_id,n\r\nv,1\r\nv,2\r\n")
    assert [row.id for row in load_rows("msrvtt", tmp_path, "train_7k")] == ["v"]
    write(tmp_path, "MSRVTT_train.7k.csv", "video_id,n\nv,1\n,2\n")
    assert "MSRVTT_train.7k.csv:3: no 'video_id' in it" in said(tmp_path, "msrvtt", "train_7k")
    write(tmp_path, "MSRVTT_train.7k.csv", "video_id,n\nv,1\nw\n")
    assert "MSRVTT_train.7k.csv:3: 1 values for 2 columns" in said(tmp_path, "msrvtt", "train_7k")
    write(tmp_path, "MSRVTT_JSFUSION_test.csv", "")
    assert "MSRVTT_JSFUSION_test.csv' is empty" in said(tmp_path, "msrvtt", "test_1k_a")


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("action", "", "Test_action_question.csv: no question in it; expected a first line with gif_name, question"),
        ("action", TABLE, "Test_action_question.csv: no question in it"),
        ("action", TABLE.replace("\ta5", ""), "no column 'a5', but a list of action has it; columns found: gif_name"),
        ("action", f"{TABLE}v\tq\ta\tb\tc\td\te\t5\tA\n", "answer '5' must be a number from 0 to 4"),
        ("action", f"{TABLE}v\tq\ta\tb\tc\td\te\tyes\tA\n", "answer 'yes' must be a number"),
        ("action", f"{TABLE}v\tq\ta\tb\tc\td\t \t0\tA\n", "csv:2: not a question of action: no 'a5' in it"),
        (
            "action",
            TABLE + "v\tq\ta\tb\tc\td\te\t0\tA\n" * 2,
            "csv:3: not a question of action: vid_id 'A' is that of l",
        ),
        ("frameqa", f"{OPEN}v\tq\tred\t-1\tF\n", "type '-1' must be a number from 0 to 3"),
        ("frameqa", f"{OPEN}v\tq\tred\t4\tF\n", "type '4' must be a number from 0 to 3"),
        ("frameqa", f"{OPEN}v\tq\t\t2\tF\n", "no 'answer' in it"),
    ],
)
def test_tables_of_tgif_qa(tmp_path: Path, task: str, text: str, words: str) -> None:
    write(tmp_path, f"Test_{task}_question.csv", text)
    assert words in said(tmp_path, "tgif_qa", "test", task=task)


def test_a_table_of_tgif_qa_with_a_mark_and_other_line_ends(tmp_path: Path) -> None:
    write(tmp_path, "Test_frameqa_question.csv", "\ufeff" + f"{OPEN}v \tq\tred \t2\tF \n".replace("\n", "\r\n"))
    [row] = load_rows("tgif_qa", tmp_path, "test", task="frameqa")
    assert (row.id, row.labels, row.answer_type, row.video) == ("F", ("red",), "color", str(tmp_path / "v.mp4"))
