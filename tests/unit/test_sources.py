from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twinreel.data import captions
from twinreel.data.clip import Caption, Clip
from twinreel.data.sources import SOURCES, load_rows, manifest_rows, source_notes
from twinreel.errors import ConfigError, DataError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


@pytest.fixture
def howto100m(tmp_path: Path) -> Path:
    """Three videos as HowTo100M lays them out; one file name has two dots, one caption file is nobody's."""
    names = ["food/-aBc_1.mp4", "food/x2.f137.webm", "x3.mp4"]
    write(tmp_path / "howto100m_videos.csv", "video_path,category\n" + "".join(f"{name},c\n" for name in names))
    for id in ("-aBc_1", "x2", "x3", "other"):
        write(tmp_path / "captions" / f"{id}.csv", f"start,end,text\n1,2,words of {id}\n")
    return tmp_path


def test_howto100m(howto100m: Path) -> None:
    rows = load_rows("howto100m", howto100m, "train")
    assert [row.id for row in rows] == ["-aBc_1", "x2", "x3"]
    assert [row.video for row in rows] == [
        str(howto100m / name) for name in ("food/-aBc_1.mp4", "food/x2.f137.webm", "x3.mp4")
    ]
    assert [captions.row_captions(row)[0].text for row in rows] == [f"words of {row.id}" for row in rows]
    assert {row.split for row in rows} == {"train"} and rows[0].start_seconds is None
    assert load_rows("howto100m", str(howto100m), None) == rows


def test_howto100m_elsewhere(howto100m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = load_rows("howto100m", howto100m, "train")
    write(howto100m / "lists/few.csv", "video_path\nx3.mp4\n")
    (howto100m / "captions").rename(howto100m / "narration")
    monkeypatch.chdir(howto100m)
    options = {"videos_csv": "lists/few.csv", "caption_root": "narration"}
    (row,) = load_rows("howto100m", ".", "train", **options)
    assert (row.id, row.video) == ("x3", rows[2].video)
    assert row.caption_file == str(howto100m / "narration/x3.csv")


def test_howto100m_without_some_captions(howto100m: Path) -> None:
    lines = "".join(f"gone{i}.mp4\n" for i in range(7))
    write(howto100m / "howto100m_videos.csv", f"video_path\nx3.mp4\n{lines}")
    words = (
        r"7 of 8 videos have no caption file in '.*captions' \(first: gone0.csv, .*, gone4.csv\); set data.caption_root"
    )
    with pytest.raises(DataError, match=words):
        load_rows("howto100m", howto100m, "train")
    with pytest.raises(DataError, match=r"8 of 8 videos have no caption file in '.*nowhere'"):
        load_rows("howto100m", howto100m, "train", caption_root="nowhere")


def test_howto100m_lists_the_folder_once(howto100m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []
    scandir = captions.os.scandir
    monkeypatch.setattr(captions.os, "scandir", lambda folder: scans.append(folder) or scandir(folder))
    assert len(load_rows("howto100m", howto100m, "train")) == 3
    assert scans == [str(howto100m / "captions")]


def test_howto100m_errors(howto100m: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs data\.root"):
        load_rows("howto100m", None, "train")
    with pytest.raises(DataError, match="no split 'val'; it has train alone"):
        load_rows("howto100m", howto100m, "val")
    with pytest.raises(DataError, match=r"list of videos '.*none\.csv' does not exist"):
        load_rows("howto100m", howto100m, "train", videos_csv="none.csv")
    write(howto100m / "howto100m_videos.csv", "video_path\nx3.mp4\nb/.mp4\nb/x3.webm\na,b.mp4\n")
    with pytest.raises(
        DataError,
        match=r"(?s)3 of 4 rows .*csv:5: 2 values for 1.*csv:3: no video id .*csv:4: video id 'x3' .* of line 2",
    ):
        load_rows("howto100m", howto100m, "train")


def test_manifest_source(tmp_path: Path) -> None:
    one = str(write(tmp_path / "one.csv", "video,label,split,origin\na,big_dog,val,web\nb,cat,train,web\n"))
    two = str(write(tmp_path / "two.csv", "video,label,split\nc,cow,val\n"))
    rows = load_rows("manifest", None, "val", manifest=[one, two], caption_template="a {label}")
    assert [(row.id, row.captions) for row in rows] == [
        ("a", (Caption(text="a big dog"),)),
        ("c", (Caption(text="a cow"),)),
    ]
    assert [row.video for row in rows] == [str(tmp_path / "a"), str(tmp_path / "c")]
    (tmp_path / "videos").mkdir()
    rows = load_rows("manifest", tmp_path / "videos", None, manifest=one)
    assert [row.video for row in rows] == [str(tmp_path / "videos/a"), str(tmp_path / "videos/b")]
    assert load_rows("manifest", tmp_path, None, manifest=one) == manifest_rows(None, None, manifest=one)
    assert source_notes("manifest", manifest=[one, two]) == [f"{one}: columns not used: origin"]
    assert source_notes("manifest", manifest=two) == source_notes("howto100m") == []
    with pytest.raises(ConfigError, match="no manifest is named"):
        load_rows("manifest", None, None, manifest=None)


def test_options_are_those_of_the_function() -> None:
    words = r"source 'manifest': no option 'manifset'; did you mean manifest\?, and needs 'manifest'"
    with pytest.raises(ConfigError, match=words):
        load_rows("manifest", None, None, manifset="x.csv")
    with pytest.raises(ConfigError, match="no option 'split_name'"):
        load_rows("howto100m", None, None, split_name="train")


def test_unknown_source() -> None:
    with pytest.raises(ConfigError, match="unknown source 'howto10m'; did you mean howto100m"):
        load_rows("howto10m", None, None)
    assert list(SOURCES) == sorted(SOURCES)


USER_CODE = """
from twinreel.data.clip import Clip

def rows(root, split, *, count=2, id="r{}"):
    return [Clip(id=id.format(i), video=f"{root}/{split}{i}.mp4") for i in range(count)]

def anything(root, split, **options):
    return [Clip(id=",".join(options), video="a")]

def names(root, split):
    return ["a.mp4"]

def generator(root, split):
    yield Clip(id="a", video="a")
"""


@pytest.fixture
def my_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write(tmp_path / "my_videos.py", USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_videos", raising=False)
    return "my_videos"


def test_a_source_of_the_users_own(my_data: str) -> None:
    rows = load_rows(f"{my_data}:rows", "/data", "train", count=3)
    assert rows == [Clip(id=f"r{i}", video=f"/data/train{i}.mp4") for i in range(3)]
    assert load_rows(f"{my_data}:anything", None, None, a=1, b=2)[0].id == "a,b"
    assert source_notes(f"{my_data}:rows", count=3) == []


def test_errors_in_a_source_of_the_users_own(my_data: str) -> None:
    for function, options, words in (
        ("names", {}, "must return a list of twinreel.data.clip.Clip, got str"),
        ("generator", {}, "must return a list of twinreel.data.clip.Clip, got generator"),
        ("rows", {"count": 0}, "returned no rows"),
        ("rows", {"id": "same"}, "returned 2 rows with the id 'same'"),
    ):
        with pytest.raises(DataError, match=words):
            load_rows(f"{my_data}:{function}", None, None, **options)
    with pytest.raises(ConfigError, match="no option 'cuont'; did you mean count"):
        load_rows(f"{my_data}:rows", None, None, cuont=3)
    with pytest.raises(ConfigError, match="my_videos has no function row"):
        load_rows(f"{my_data}:row", None, None)
    with pytest.raises(ConfigError, match="no module named none_such"):
        load_rows("none_such:rows", None, None)
