"""Sources of captions and questions: three videos each, and the published lists where a folder of them is named."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from twinreel.data.caption_rows import caption_rows, paragraph_rows
from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import missing_videos
from twinreel.data.preparation.pack import pack_collection
from twinreel.data.sources import SOURCES, load_rows
from twinreel.data.storage import open_video
from twinreel.errors import ConfigError, DataError
from videos import frame_numbers, make_video

LISTS = os.environ.get("TWINREEL_TEST_ANNOTATIONS")
with_lists = pytest.mark.skipif(LISTS is None, reason="TWINREEL_TEST_ANNOTATIONS names no folder of published lists")

TABLE = "gif_name\tquestion\ta1\ta2\ta3\ta4\ta5\tanswer\tvid_id\tkey\n"
OPEN = "gif_name\tquestion\tanswer\ttype\tvid_id\tkey\tdescription\n"


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def texts(row: Clip) -> list[str]:
    return [caption.text for caption in row.captions]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three videos at two depths and with three suffixes, of which frame 0 carries their number."""
    folder = tmp_path / "set"
    (folder / "deep").mkdir(parents=True)
    make_video(folder / "video0.mp4", num_frames=2, first_number=10)
    make_video(folder / "deep/video1.webm", num_frames=2, first_number=20, codec="libvpx")
    make_video(folder / "deep/video2.MKV", num_frames=2, first_number=30, format="matroska")
    return folder


def first_number(row: Clip) -> int:
    with open_video(row.video) as reader:
        return frame_numbers(reader.frames_at([0.0]).data)[0]


# ---- MSR-VTT


@pytest.fixture
def msrvtt(three: Path) -> Path:
    data = {
        "videos": [
            {"video_id": f"video{number}", "split": split, "start time": 0.5}
            for number, split in enumerate(["train", "validate", "test", "train"])
        ],
        "sentences": [
            {"video_id": f"video{number}", "caption": f"{word} of {number}", "sen_id": 0}
            for word in ("one", "two")
            for number in (3, 2, 1, 0)
        ],
    }
    write(three / "annotations/MSRVTT_data.json", data)
    write(three / "annotations/MSRVTT_train.7k.csv", "video_id\nvideo1\nvideo0\n")
    write(three / "annotations/MSRVTT_train.9k.csv", "video_id\nvideo1\nvideo0\nvideo3\n")
    write(
        three / "annotations/MSRVTT_JSFUSION_test.csv",
        'key,vid_key,video_id,sentence\nret0,msr2,video2,"a man, running"\nret1,msr1,video1,a dog\n',
    )
    return three


@pytest.mark.parametrize(
    ("split", "ids"),
    [
        ("train_7k", ["video1", "video0"]),
        ("train_9k", ["video1", "video0", "video3"]),
        ("train", ["video3", "video0"]),
        ("val", ["video1"]),
        ("validation", ["video1"]),
        ("test_full", ["video2"]),
    ],
)
def test_msrvtt(msrvtt: Path, split: str, ids: list[str]) -> None:
    rows = load_rows("msrvtt", msrvtt, split)
    assert [row.id for row in rows] == ids and {row.split for row in rows} <= {split, "val"}
    assert [texts(row) for row in rows] == [[f"one of {id[-1]}", f"two of {id[-1]}"] for id in ids]
    here = [row for row in rows if row.id != "video3"]
    assert [first_number(row) for row in here] == [10 + 10 * int(row.id[-1]) for row in here]
    missing = missing_videos(rows)  # a row all the same; who trains counts it
    assert [row.id for row in missing] == [id for id in ids if id == "video3"]
    assert [row.video for row in missing] == [str(msrvtt / "video3.mp4") for _ in missing]


def test_msrvtt_1k_a_has_a_sentence_a_video(msrvtt: Path) -> None:
    rows = load_rows("msrvtt", msrvtt, "test_1k_a")
    assert [(row.id, texts(row)) for row in rows] == [("video2", ["a man, running"]), ("video1", ["a dog"])]
    assert [first_number(row) for row in rows] == [30, 20]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.json", [{"video": f"video{n}.mp4", "caption": ["a", "b"] if n else "c"} for n in (0, 1)]),
        ("mine.jsonl", '{"clip_name": "video1", "caption": "a"}\n{"clip_name": "video0", "caption": "c"}\n'
                       '{"clip_name": "video1", "caption": "b", "sen_id": 3}\n'),
    ],
)  # fmt: skip
def test_msrvtts_captions_in_other_forms(msrvtt: Path, name: str, content: Any) -> None:
    write(msrvtt / "annotations" / name, content)
    assert [texts(row) for row in load_rows("msrvtt", msrvtt, "train_7k", captions=name)] == [["a", "b"], ["c"]]
    for split, official in (("val", "validate"), ("test_full", "test")):
        with pytest.raises(DataError, match=f"does not say which videos are of the split '{official}'"):
            load_rows("msrvtt", msrvtt, split, captions=name)


def test_msrvtts_lists_may_be_elsewhere_and_named_otherwise(msrvtt: Path, tmp_path: Path) -> None:
    expected = load_rows("msrvtt", msrvtt, "train_7k")
    (msrvtt / "annotations").rename(tmp_path / "lists")
    (tmp_path / "lists/MSRVTT_train.7k.csv").rename(tmp_path / "lists/msrvtt_TRAIN7k.csv")
    with pytest.raises(DataError, match=r"source msrvtt: no MSRVTT_train.7k.csv or .* in '.*annotations' or"):
        load_rows("msrvtt", msrvtt, "train_7k")
    assert load_rows("msrvtt", msrvtt, "train_7k", annotations=str(tmp_path / "lists")) == expected


def test_what_is_wrong_with_msrvtt_is_named(msrvtt: Path) -> None:
    write(msrvtt / "annotations/MSRVTT_train.7k.csv", "video_id\nvideo1\nvideo8\nvideo9\n")
    with pytest.raises(DataError, match=r"MSRVTT_data.json: no caption of 2 listed videos \(first: video8, video9\)"):
        load_rows("msrvtt", msrvtt, "train_7k")
    write(msrvtt / "annotations/MSRVTT_JSFUSION_test.csv", "video_id,sentence\nvideo1,\n")
    with pytest.raises(DataError, match=r"MSRVTT_JSFUSION_test.csv:2: no 'sentence' in it"):
        load_rows("msrvtt", msrvtt, "test_1k_a")
    write(msrvtt / "annotations/MSRVTT_data.json", {"clips": []})
    with pytest.raises(
        DataError, match=r"MSRVTT_data.json: no 'sentences' in it; there is 'clips'; expected MSR-VTT's"
    ):
        load_rows("msrvtt", msrvtt, "train")
    write(msrvtt / "annotations/MSRVTT_data.json", "{")
    with pytest.raises(DataError, match=r"MSRVTT_data.json: not JSON"):
        load_rows("msrvtt", msrvtt, "train")


# ---- the videos of every such source


NEW = ("activitynet", "didemo", "msrvtt", "msrvtt_mc", "msrvtt_qa", "tgif_qa")


@pytest.mark.parametrize("source", NEW)
def test_root_and_split_are_asked_for(source: str, tmp_path: Path) -> None:
    assert source in SOURCES
    with pytest.raises(ConfigError, match=f"source {source} needs data.root: the folder of its videos, or an LMDB"):
        load_rows(source, None, "test")
    with pytest.raises(DataError, match=f"source {source}: data.root '.*none' is neither a folder nor an LMDB"):
        load_rows(source, tmp_path / "none", "test")
    for split in (None, "everything"):
        with pytest.raises(DataError, match=f"source {source} has no split {split!r}; data.split is one of"):
            load_rows(source, tmp_path, split)


@pytest.mark.parametrize("keys", ["name", "path", "clipbert"])
def test_videos_come_out_of_an_lmdb_by_name(msrvtt: Path, tmp_path: Path, keys: Any) -> None:
    """ClipBERT's own script keeps names without suffix, as `twinreel data pack` does; `--keys path` keeps folders."""
    store = tmp_path / "x.lmdb"
    files = load_rows("msrvtt", msrvtt, "train_9k")
    if keys == "clipbert":
        with lmdb.open(str(store), map_size=2**24) as environment, environment.begin(write=True) as transaction:
            for row in files[:2]:
                transaction.put(Path(row.video).stem.encode(), Path(row.video).read_bytes())
    else:
        pack_collection(msrvtt, store, keys=keys)
    rows = load_rows("msrvtt", store, "train_9k", annotations=str(msrvtt / "annotations"))
    assert [row.captions for row in rows] == [row.captions for row in files]
    assert [first_number(row) for row in rows[:2]] == [20, 10] and missing_videos(rows) == [rows[2]]
    (msrvtt / "annotations").rename(tmp_path / "annotations")
    assert load_rows("msrvtt", store, "train_9k") == rows  # lists are looked for beside a store


def test_a_name_of_several_files_is_refused(msrvtt: Path) -> None:  # ClipBERT defect 21
    make_video(msrvtt / "deep/video0.avi", num_frames=2, codec="mpeg4")
    with pytest.raises(DataError, match=r"2 files could be the video 'video0' \(.*deep/video0.avi, .*video0.mp4\)"):
        load_rows("msrvtt", msrvtt, "train_7k")


# ---- DiDeMo, ActivityNet


@pytest.fixture
def didemo(three: Path) -> Path:
    entries = [
        ("video0.mov", "the dog runs", [[2, 2], [1, 1], [2, 2], [0, 0]]),
        ("video1.", "a cat", [[0, 1], [3, 3], [3, 3], [0, 1]]),
        ("video0.avi", " it sleeps ", [[0, 0], [0, 0], [0, 0], [4, 5]]),
        ("gone.mp4", "nobody", [[5, 5]]),
    ]
    fields = ("video", "description", "times")
    write(three / "val_data.json", [dict(zip(fields, entry, strict=True), num_segments=6) for entry in entries])
    return three


def test_didemo(didemo: Path) -> None:
    first, second, third = load_rows("didemo", didemo, "val")
    assert [row.id for row in (first, second, third)] == ["video0", "video1", "gone"]
    assert first.captions == (
        Caption(text="the dog runs", start_seconds=10.0, end_seconds=15.0),
        Caption(text="it sleeps", start_seconds=0.0, end_seconds=5.0),
    )
    assert second.captions == (Caption(text="a cat", start_seconds=0.0, end_seconds=10.0),)  # even: the earlier listed
    assert [first_number(row) for row in (first, second)] == [10, 20]
    assert first.start_seconds is None and first.split == "val" and missing_videos([first, third]) == [third]
    assert [texts(row) for row in paragraph_rows([first, second])] == [["it sleeps the dog runs"], ["a cat"]]


def test_activitynet(three: Path) -> None:
    content = {
        "video1": {"duration": 9.0, "timestamps": [[0.5, 4], [3.25, 9.4]], "sentences": ["A man.", "  He runs."]},
        "v_gone": {"duration": 5, "timestamps": [[1, 1]], "sentences": ["Nothing."]},
    }
    write(three / "annotations/anet_captions_val_1.json", content)
    first, second = load_rows("activitynet", three, "val_1")
    assert (first.id, second.id, first.split) == ("video1", "v_gone", "val_1")
    assert first.captions == (
        Caption(text="A man.", start_seconds=0.5, end_seconds=4.0),
        Caption(text="He runs.", start_seconds=3.25, end_seconds=9.4),
    )
    assert first_number(first) == 20 and missing_videos([first, second]) == [second]
    assert texts(paragraph_rows([first])[0]) == ["A man. He runs."]
    assert [(row.id, row.start_seconds, row.end_seconds) for row in caption_rows([first])] == [
        ("video1#1", 0.5, 4.0),
        ("video1#2", 3.25, 9.4),
    ]


# ---- questions


def test_msrvtt_mc(three: Path) -> None:
    """Read again and again. ClipBERT defect 13: there a second reading fails."""
    options = ["a", "b", "c", "d", "e"]
    records = [{"qid": n, "clip_name": f"video{n}", "options": options, "answer": 4 - n} for n in (2, 0)]
    write(three / "annotations/msrvtt_mc_test.jsonl", lines(records))
    for _ in range(2):
        first, second = load_rows("msrvtt_mc", three, "test")
        assert (first.id, first.options, first.labels, first.captions) == ("2", tuple(options), (2,), ())
        assert second.labels == (4,) and [first_number(row) for row in (first, second)] == [30, 10]
    write(three / "annotations/msrvtt_mc_test.jsonl", lines([{"qid": 1, "clip_name": "video1", "caption": "x"}]))
    with pytest.raises(DataError, match="row '1' has no options; another list is meant"):
        load_rows("msrvtt_mc", three, "test")


def test_msrvtt_qa(three: Path) -> None:
    records = [
        {"video_id": "video1", "question": "what is it?", "answer": "dog", "answer_type": "what"},
        {"video_id": "video1", "question": "how many?", "answer": "two", "answer_type": "how"},
        {"video_id": "video7", "question": "who?", "answer": "man", "answer_type": "who"},
    ]
    write(three / "msrvtt_qa_train.jsonl", lines(records))
    rows = load_rows("msrvtt_qa", three, "train")
    assert [(row.id, texts(row), row.labels, row.answer_type) for row in rows] == [
        ("video1", ["what is it?"], ("dog",), "what"),
        ("video1#2", ["how many?"], ("two",), "how"),
        ("video7", ["who?"], ("man",), "who"),
    ]
    assert first_number(rows[1]) == 20 and missing_videos(rows) == [rows[2]]


def test_tgif_qa_as_published(three: Path) -> None:
    write(three / "Test_action_question.csv", TABLE + "video0\tWhat 2 times ?\ta\tb\tc\td\te\t4\tACTION4\t26\n")
    write(three / "Test_frameqa_question.csv", OPEN + "video2\twhat color ?\tred\t2\tFRAMEQA1\t7\tit is red .\n")
    [action] = load_rows("tgif_qa", three, "test")
    assert (action.id, texts(action), action.options) == ("ACTION4", ["What 2 times ?"], ("a", "b", "c", "d", "e"))
    assert (action.labels, action.answer_type, first_number(action)) == ((4,), None, 10)
    [frame] = load_rows("tgif_qa", three, "test", task="frameqa")
    assert (frame.labels, frame.answer_type, frame.options) == (("red",), "color", ()) and first_number(frame) == 30


def test_tgif_qa_as_clipbert_has_it(three: Path) -> None:
    records = [{"gif_name": "video1", "question": "q", "options": ["a", "b", "c", "d", "e"], "answer": 3}]
    write(three / "tgif_qa_transition_train.jsonl", lines(records))
    [row] = load_rows("tgif_qa", three, "train", task="transition")
    assert (row.labels, texts(row), first_number(row)) == ((3,), ["q"], 20)


@pytest.mark.parametrize("row", ["video0\tq\ta\tb\tc\td\te\t5\tA\t1", "video0\tq\ta\tb\tc\td\t\t0\tA\t1", "x\ty"])
def test_a_wrong_question_of_tgif_is_named_with_its_line(three: Path, row: str) -> None:
    write(three / "Test_action_question.csv", f"{TABLE}{row}\n")
    with pytest.raises(DataError, match=r"Test_action_question.csv:2: "):
        load_rows("tgif_qa", three, "test")


# ---- the page


def test_the_page_names_each_source_with_its_splits(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/data-sets.md").read_text(encoding="utf-8")
    table = page.split("| what a row is |")[1].split("##")[0]
    named = {cells[1].strip(" `"): cells[2] for line in table.splitlines() if len(cells := line.split("|")) > 3}
    named = {name: re.findall("[a-z_0-9]+", splits) for name, splits in named.items() if name in SOURCES}
    assert set(NEW) <= set(named)
    for source in NEW:
        with pytest.raises(DataError, match=f"data.split is one of {', '.join(named[source])}$"):
            load_rows(source, tmp_path, "everything")


# ---- the published lists


@with_lists
@pytest.mark.parametrize(
    ("source", "split", "options", "videos", "captions"),
    [
        ("msrvtt", "test_1k_a", {}, 1000, 1000),
        ("msrvtt", "test_full", {}, 2990, 59800),
        ("didemo", "val", {}, 1065, 4180),
        ("didemo", "test", {}, 1004, 4021),
        ("activitynet", "train", {}, 10009, 37421),
        ("activitynet", "val_1", {}, 4917, 17505),
        ("activitynet", "val_2", {}, 4885, 17031),
        ("tgif_qa", "train", {"task": "action"}, 20471, 20471),
        ("tgif_qa", "test", {"task": "action"}, 2274, 2274),
        ("tgif_qa", "test", {"task": "transition"}, 6232, 6232),
        ("tgif_qa", "test", {"task": "frameqa"}, 13691, 13691),
    ],
)
def test_published_lists(
    tmp_path: Path, source: str, split: str, options: dict[str, str], videos: int, captions: int
) -> None:
    """The counts are those that papers give; every caption becomes a row, every video a paragraph."""
    rows = load_rows(source, tmp_path, split, annotations=LISTS, **options)
    assert len(rows) == videos == len({row.id for row in rows})
    assert sum(len(row.captions) for row in rows) == captions == len(caption_rows(rows))
    assert all(len(row.captions) == 1 for row in paragraph_rows(rows))
    timed = source in ("didemo", "activitynet")
    assert all((caption.start_seconds is not None) == timed for row in rows for caption in row.captions)
    if source == "tgif_qa":
        assert all(len(row.options) == (0 if options["task"] == "frameqa" else 5) for row in rows)


@with_lists
@pytest.mark.parametrize(("split", "number"), [("train_7k", 7010), ("train_9k", 9000)])
def test_msrvtts_published_training_lists(tmp_path: Path, split: str, number: int) -> None:
    """The captions of training are not published with the lists: two for each of 10000 videos stand for them."""
    folder = Path(LISTS or "")
    for name in ("msrvtt_train7k.csv", "msrvtt_train9k.csv", "msrvtt_jsfusion_test1k.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    entries = [{"video": f"video{n}.mp4", "caption": [f"a {n}", f"b {n}"]} for n in range(10000)]
    write(tmp_path / "msrvtt_captions.json", entries)
    rows = load_rows("msrvtt", tmp_path, split)
    assert len(rows) == number and all(len(row.captions) == 2 for row in rows)
    test = {row.id for row in load_rows("msrvtt", tmp_path, "test_1k_a")}
    assert not test & {row.id for row in rows}
    with (folder / "msrvtt_jsfusion_test1k.csv").open(encoding="utf-8") as file:
        assert test == {record["video_id"] for record in csv.DictReader(file)}
