"""What a check of a collection finds: bad files, windows, copies, labels, words; and what it leaves of the rows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import file_work
import lmdb
import pytest
from PIL import Image

from twinreel.data.clip import Caption, Clip
from twinreel.data.preparation import collection_check, inspection
from twinreel.data.preparation.collection_check import CollectionCheck, check_collection, read_collection
from twinreel.data.preparation.inspection import VideoReport, inspect_videos, same_content
from twinreel.errors import ConfigError, DataError
from twinreel.text import Vocabulary
from videos import make_audio, make_video


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten good videos of 2 s, each with other frames, and files that are none."""
    folder = tmp_path_factory.mktemp("clips")
    for i in range(10):
        make_video(folder / f"{i}.mp4", num_frames=20, frame_rate=10, first_number=30 * i, gop=5)
    cut = make_video(folder / "nomoov.mp4", num_frames=20)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    late = make_video(
        folder / "cut.mp4", num_frames=60, frame_rate=10, gop=10, container_options={"movflags": "faststart"}
    )
    late.write_bytes(late.read_bytes()[: late.stat().st_size * 6 // 10])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "html.mp4").write_text("<!DOCTYPE html><html>gone</html>")
    make_audio(folder / "audio.mp4")
    return folder


def row(clips: Path, name: str, **fields: Any) -> Clip:
    return Clip(id=fields.pop("id", name), video=str(clips / name), **fields)


def check(rows: Sequence[Clip], groups: Sequence[str] | None = None, **options: Any) -> CollectionCheck:
    groups = [row.split or "" for row in rows] if groups is None else groups
    return check_collection(rows, groups, **({"num_workers": 1} | options))


@pytest.mark.parametrize("place", [0, 5])
def test_one_bad_file_among_nine(clips: Path, place: int) -> None:  # B001
    names = [f"{i}.mp4" for i in range(9)]
    names.insert(place, "nomoov.mp4")
    told: list[tuple[str, int, int]] = []
    result = check([row(clips, name) for name in names], progress=lambda *state: told.append(state))
    assert [fault.video for fault in result.faults] == [str(clips / "nomoov.mp4")]
    assert "without its index (no moov box)" in result.faults[0].reason
    assert [r.id for r in result.usable] == [name for name in names if name != "nomoov.mp4"]
    assert not result.passed and replace(result, max_faults=0.1).passed
    text = result.to_table()
    assert text.count("nomoov.mp4") == 1
    assert text.endswith("1 of 10 rows (10.0%) are excluded, with 1 bad videos; the limit is 5.0%")
    assert told[-1] == ("opening", 10, 10) and len(told) == 10


def test_every_kind_of_bad_file_is_named(clips: Path) -> None:
    names = ["0.mp4", "nomoov.mp4", "cut.mp4", "empty.mp4", "html.mp4", "audio.mp4", "none.mp4"]
    result = check([row(clips, name) for name in names], max_faults=1.0)
    reasons = {Path(fault.video).name: fault.reason for fault in result.faults}
    for name, words in {
        "nomoov.mp4": "no moov box",
        "cut.mp4": "the video is damaged",
        "empty.mp4": "an empty file (0 bytes)",
        "html.mp4": "an HTML page, not a video",
        "audio.mp4": "no video stream (the file holds: audio)",
        "none.mp4": "no such file",
    }.items():
        assert words in reasons.pop(name)
        assert [fault.reason for fault in result.excluded.values() if fault.id == name]
    assert not reasons and [r.id for r in result.usable] == ["0.mp4"] and result.passed
    assert result.facts["videos"] == 7 and result.facts["bad_videos"] == 6


def test_what_is_counted(clips: Path, tmp_path: Path) -> None:
    make_video(tmp_path / "long.webm", num_frames=75, frame_rate=25, size=(32, 32), codec="libvpx")
    rows = [row(clips, "0.mp4"), row(clips, "1.mp4"), Clip(id="x", video=str(tmp_path / "long.webm"), split="val")]
    result = check(rows)
    assert result.facts["rows"] == 3 and result.facts["splits"] == {"": 2, "val": 1}
    assert result.facts["seconds"] == {
        name: pytest.approx(value) for name, value in {"total": 7, "min": 2, "median": 2, "max": 3}.items()
    }
    assert result.facts["frames"] == {"total": 115, "decoded": "two a video"}
    assert result.facts["sizes"] == {"64x48 x": 2, "32x32 x": 1}
    assert result.facts["frame_rates"] == {"10 Hz x": 2, "25 Hz x": 1}
    assert result.facts["codecs"] == {"h264 x": 2, "vp8 x": 1}
    assert result.facts["megabytes"] == pytest.approx(sum(Path(r.video).stat().st_size for r in rows) / 1e6)
    assert result.passed and result.notes == [] and result.faults == []


def test_windows(clips: Path) -> None:
    rows = [
        row(clips, "0.mp4", id="inside", start_seconds=0.5, end_seconds=1.5),
        row(clips, "0.mp4", id="late", start_seconds=1.5, end_seconds=9.0),
        row(clips, "0.mp4", id="outside", start_seconds=2.0, end_seconds=3.0),
        row(clips, "0.mp4", id="open", start_seconds=1.9),
        row(clips, "1.mp4", id="beyond", start_seconds=7.0),
    ]
    result = check(rows, max_faults=0.4)
    assert [r.id for r in result.usable] == ["inside", "late", "open"] and result.passed
    assert result.faults == []
    assert "[2, 3) s lies outside the video, which has 2.000 s" in result.excluded["outside"].reason
    assert result.notes == [f"1 video: 1 windows end after the video ({clips / '0.mp4'})"]
    assert "bad row: beyond: the window [7, inf) s lies outside the video" in result.to_table()


def test_rows_in_front_of_the_damage_stay(clips: Path) -> None:
    rows = [
        row(clips, "cut.mp4", id="front", start_seconds=0.0, end_seconds=1.0),
        row(clips, "cut.mp4", id="behind", start_seconds=5.0, end_seconds=6.0),
        row(clips, "cut.mp4", id="whole"),
    ]
    result = check(rows, max_faults=1.0)
    assert [r.id for r in result.usable] == ["front"]
    assert [fault.id for fault in result.faults] == ["front"]  # the video is bad, named once


def test_deep_finds_damage_in_the_middle(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", num_frames=60, frame_rate=10, gop=10, size=(128, 96))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 200 : middle + 200] = bytes(400)
    path.write_bytes(data)
    rows = [Clip(id="a", video=str(path)), Clip(id="start", video=str(path), start_seconds=0.0, end_seconds=0.5)]
    assert check(rows).passed
    result = check(rows, deep=True)
    assert [r.id for r in result.usable] == ["start"]
    assert "the video is damaged" in result.excluded["a"].reason
    assert result.facts["frames"]["decoded"] == "all"


@pytest.mark.parametrize(("name", "words"), [("abort", "ended the process (SIGABRT)"), ("hang", "no answer in 5 s")])
def test_a_decoder_that_dies_or_hangs_is_that_files_fault(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:  # B003
    monkeypatch.setattr(inspection, "_inspect", file_work.inspect_or_abort)
    shutil.copy(clips / "0.mp4", tmp_path / f"{name}.mp4")
    rows = [row(clips, "1.mp4"), Clip(id="bad", video=str(tmp_path / f"{name}.mp4")), row(clips, "2.mp4")]
    result = check(rows, num_workers=2, most_seconds=5)
    assert [fault.id for fault in result.faults] == ["bad"] and words in result.faults[0].reason
    assert [r.id for r in result.usable] == ["1.mp4", "2.mp4"]


def test_the_same_bytes_and_the_same_video_in_two_splits(clips: Path, tmp_path: Path) -> None:
    for name in ("copy.mp4", "b.mp4"):
        shutil.copy(clips / "0.mp4", tmp_path / name)
    near = bytearray((clips / "1.mp4").read_bytes() + bytes(200_000))
    (tmp_path / "near.mp4").write_bytes(near)
    near[100_000] = 1  # equal size, equal ends
    (tmp_path / "near2.mp4").write_bytes(near)
    rows = [
        row(clips, "0.mp4", split="train"),
        Clip(id="copy", video=str(tmp_path / "copy.mp4"), split="val"),
        Clip(id="b", video=str(tmp_path / "b.mp4"), split="train"),
        row(clips, "2.mp4", split="train", end_seconds=1.0),
        row(clips, "2.mp4", id="2b", split="test", start_seconds=1.0),
        Clip(id="near", video=str(tmp_path / "near.mp4"), split="train"),
        Clip(id="near2", video=str(tmp_path / "near2.mp4"), split="train"),
    ]
    result = check(rows)
    assert result.notes[-2:] == [
        f"in several splits (train, test): {clips / '2.mp4'}",
        f"the same bytes, in several splits (train, val): {clips / '0.mp4'} = {tmp_path / 'copy.mp4'} = "
        f"{tmp_path / 'b.mp4'}",
    ]
    reports = inspect_videos(rows, num_workers=1)
    assert reports[rows[5].video].ends == reports[rows[6].video].ends
    assert same_content(reports, num_workers=1) == [tuple(r.video for r in rows[:3])]
    assert result.passed


def test_labels(clips: Path) -> None:
    labels = [1, 1, 1, 2, 5]
    rows = [row(clips, f"{i}.mp4", labels=(label,), split="train") for i, label in enumerate(labels)]
    rows.append(row(clips, "7.mp4", labels=(6, 2), split="val"))
    result = check(rows, max_faults=1.0)
    assert result.facts["classes"] == 4 and (result.facts["lowest_label"], result.facts["highest_label"]) == (1, 6)
    assert result.facts["rows_a_class"] == {"min": 1, "median": 1.5, "max": 3}
    assert result.facts["classes_not_in_train"] == {"val": 1}
    assert result.passed and result.wrong_labels is None
    result = check(rows, max_faults=1.0, num_classes=5)
    assert result.wrong_labels == "2 rows have labels outside 0 to 4 (found: 1 to 6, 5 classes)"
    assert not result.passed and [r.id for r in result.usable] == ["0.mp4", "1.mp4", "2.mp4", "3.mp4"]
    assert (
        "wrong labels: 2 rows have" in result.to_table() and result.excluded["7.mp4"].reason == "label 6, but 5 classes"
    )


def test_labels_that_count_from_one(clips: Path) -> None:  # B035
    rows = [row(clips, f"{i}.mp4", labels=(i + 1,)) for i in range(5)]
    result = check(rows, num_classes=5)
    assert result.wrong_labels == (
        "1 rows have labels outside 0 to 4 (found: 1 to 5, 5 classes); labels seem to count from 1: subtract 1"
    )
    rows = [row(clips, f"{i}.mp4", labels=(f"class {i}",)) for i in range(5)]
    assert check(rows, num_classes=5).passed
    assert check(rows, num_classes=4).wrong_labels == "5 class names, but 4 classes"
    assert check([row(clips, "0.mp4")], num_classes=4).wrong_labels == "no row has a label, but 4 classes are asked for"


def test_captions_and_unknown_words(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("start,end,text\n0,1,cut the onion\n1,2,zzz\n")
    (tmp_path / "bad.csv").write_text("start,end,text\n2,1,cut\n")
    rows = [
        row(clips, "0.mp4", captions=(Caption(text="Cut the leek"), Caption(text="cut leek"))),
        row(clips, "1.mp4", caption_file=str(tmp_path / "good.csv")),
        row(clips, "2.mp4", caption_file=str(tmp_path / "bad.csv")),
        row(clips, "3.mp4", caption_file=str(tmp_path / "bad.csv")),
    ]
    result = check(rows, vocabulary=Vocabulary(("cut", "the", "onion")))
    assert result.facts["captions"] == 4
    assert result.facts["unknown_words"] == 2 and result.facts["most_unknown"] == {"leek": 2, "zzz": 1}
    assert result.facts["silent_captions"] == 1
    assert [r.id for r in result.usable] == ["0.mp4", "1.mp4"]
    assert "bad.csv:2: [2, 1) ends before it starts" in result.excluded["3.mp4"].reason


def test_warnings_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": ("cut short: 12 bytes",), "b": ("woven", "cut short: 9 bytes"), "c": ("cut short: 1.5 bytes",)}
    reports = {name: VideoReport(video=name, opened=True, warnings=found) for name, found in texts.items()}
    monkeypatch.setattr(collection_check, "inspect_videos", lambda *_, **__: reports)
    result = check([Clip(id=name, video=name) for name in texts])
    assert result.notes == ["3 videos: cut short: 12 bytes (a, ...)", "1 video: woven (b)"]


def test_options_that_make_no_sense(clips: Path) -> None:
    with pytest.raises(ConfigError, match="needs 1 process or more and some seconds a video; got 0 and 300"):
        inspect_videos([row(clips, "0.mp4")], num_workers=0)
    with pytest.raises(ConfigError, match="got 1 and 0"):
        inspect_videos([row(clips, "0.mp4")], num_workers=1, most_seconds=0)


def test_rows_of_a_store_and_of_image_folders(clips: Path, tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x.lmdb"), map_size=1 << 24) as store, store.begin(write=True) as transaction:
        for key, name in (("a", "0.mp4"), ("b", "1.mp4"), ("copy", "0.mp4"), ("html", "html.mp4")):
            transaction.put(key.encode(), (clips / name).read_bytes())
    (tmp_path / "images").mkdir()
    for i in range(5):
        Image.new("RGB", (32, 24)).save(tmp_path / f"images/img_{i:05d}.jpg")
    (tmp_path / "images/frames.json").write_text('{"frame_rate": 5}')
    in_store = [Clip(id=key, video=str(tmp_path / f"x.lmdb/{key}.mp4")) for key in ("a", "b", "copy", "html", "none")]
    result = check([*in_store, Clip(id="images", video=str(tmp_path / "images"))], num_workers=2)
    assert [r.id for r in result.usable] == ["a", "b", "copy", "images"]
    assert "an HTML page" in result.excluded["html"].reason and result.excluded["none"].reason == "no such file"
    assert result.notes[-1] == f"the same bytes: {in_store[0].video} = {in_store[2].video}"
    assert result.facts["seconds"]["total"] == pytest.approx(3 * 2 + 1)
    rows, _ = read_collection([tmp_path / "x.lmdb"])
    assert [r.id for r in rows] == ["a", "b", "copy", "html"]


# ---- which rows are meant


def test_several_manifests_are_the_splits(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text(f"a.mp4 0\n{name}.mp4 1\n")
    rows, groups = read_collection([tmp_path / "train.csv", tmp_path / "val.csv"])
    assert [r.id for r in rows] == ["a.mp4", "train.mp4", "a.mp4#2", "val.mp4"]
    assert groups == ["train", "train", "val", "val"]
    assert read_collection([tmp_path / "val.csv"])[1] == ["", ""]
    (tmp_path / "all.csv").write_text("video,split\na.mp4,x\nb.mp4,y\n")
    rows, groups = read_collection([tmp_path / "all.csv"], split="y", root=tmp_path)
    assert [r.id for r in rows] == ["b.mp4"] and groups == ["y"]


def test_folders(clips: Path, tmp_path: Path) -> None:
    rows, groups = read_collection([clips])
    assert [r.id for r in rows][:3] == ["0.mp4", "1.mp4", "2.mp4"] and set(groups) == {""}
    (tmp_path / "annotations").mkdir()
    (tmp_path / "videos").symlink_to(clips)
    (tmp_path / "annotations/train.csv").write_text("video_name,start_frame,label\n0.mp4,5,1\n0.mp4,0,1\n")
    rows, groups = read_collection([tmp_path])
    assert [r.id for r in rows] == ["0.mp4@5", "0.mp4@0"] and groups == ["train", "train"]
    with pytest.raises(ConfigError, match="is a folder: check it alone and without --root"):
        read_collection([clips], root=tmp_path)
    with pytest.raises(ConfigError, match="has neither splits nor labels; leave them out"):
        read_collection([clips], split="val")
    with pytest.raises(DataError, match=r"manifest '.*none\.csv' does not exist"):
        read_collection([tmp_path / "none.csv"])
