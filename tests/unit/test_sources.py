from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twinreel.data import captions
from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import missing_videos
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


# ---- Kinetics

KINETICS = """label,youtube_id,time_start,time_end,split,is_cc
air drumming,-abc_1,5,15,train,0
"playing, guitar",bcd,10,20,train,0
archery,cde,0,10,train,0
archery,cde,30,40,train,0
yoga,def,7,17,validate,0
yoga,efg,1,11,train,0
"""


@pytest.fixture
def kinetics(tmp_path: Path) -> Path:
    """Clips as downloaders lay them: flat, by class, by split, of another suffix; one whole video; one is missing."""
    for name in (
        "air_drumming/-abc_1_000005_000015.mp4",
        "train/playing, guitar/bcd_000010_000020.mkv",
        "cde.webm",
        "cde_000030_000040.mp4",
        "val/def_000007_000017.mp4",
        "train/other_000001_000011.mp4",
        "train/efg_000001_000011.mp4.part",
    ):
        write(tmp_path / name, "")
    write(tmp_path / "annotations/train.csv", "\ufeff" + KINETICS.replace("\n", "\r\n"))
    return tmp_path


def test_kinetics_finds_clips_where_downloaders_put_them(kinetics: Path) -> None:
    rows = load_rows("kinetics", kinetics, "train")
    assert [(row.id, str(Path(row.video).relative_to(kinetics)), row.labels) for row in rows] == [
        ("-abc_1_000005_000015", "air_drumming/-abc_1_000005_000015.mp4", ("air drumming",)),
        ("bcd_000010_000020", "train/playing, guitar/bcd_000010_000020.mkv", ("playing, guitar",)),
        ("cde_000000_000010", "cde.webm", ("archery",)),
        ("cde_000030_000040", "cde_000030_000040.mp4", ("archery",)),
        ("efg_000001_000011", "efg_000001_000011.mp4", ("yoga",)),
    ]
    # a trimmed clip has no window, a whole video has
    assert [(row.start_seconds, row.end_seconds) for row in rows] == [
        (0.0, 10.0) if row.id == "cde_000000_000010" else (None, None) for row in rows
    ]
    assert [row.id for row in missing_videos(rows)] == ["efg_000001_000011"]
    assert {row.split for row in rows} == {"train"}


def test_kinetics_as_a_manifest(kinetics: Path, tmp_path: Path) -> None:
    path = kinetics / "annotations/train.csv"
    rows = load_rows("kinetics", kinetics, None)
    assert load_rows("manifest", kinetics, None, manifest=str(path)) == rows
    assert source_notes("manifest", manifest=str(path)) == []
    (row,) = load_rows("manifest", kinetics, "val", manifest=str(path), caption_template="people do {label}")
    assert (row.id, row.captions) == ("def_000007_000017", (Caption(text="people do yoga"),))
    path.rename(kinetics / "all.csv")
    assert load_rows("kinetics", kinetics, "train", csv="all.csv") == [row for row in rows if row.split == "train"]


@pytest.mark.parametrize("name", ["val.csv", "validate.csv", "annotations/validation.csv"])
@pytest.mark.parametrize("split", ["val", "validate"])
def test_kinetics_validation(kinetics: Path, name: str, split: str) -> None:
    write(kinetics / name, KINETICS)
    assert [row.id for row in load_rows("kinetics", kinetics, split)] == ["def_000007_000017"]


def test_kinetics_without_labels(kinetics: Path) -> None:
    write(kinetics / "test.csv", "youtube_id,time_start,time_end,split\ncde,30.0,40.0,test\n")
    (row,) = load_rows("kinetics", kinetics, "test")
    assert (row.id, row.labels) == ("cde_000030_000040", ())


def test_kinetics_clip_that_is_there_twice(kinetics: Path) -> None:
    write(kinetics / "archery/cde_000030_000040.mp4", "")
    rows = load_rows("kinetics", kinetics, "train")  # that of its class is meant
    assert rows[3].video == str(kinetics / "archery/cde_000030_000040.mp4")
    write(kinetics / "archery/cde_000030_000040.webm", "")
    words = r"train\.csv:5: 2 files could be this clip \(archery/cde_000030_000040.mp4, archery/.*webm\); keep one"
    with pytest.raises(DataError, match=words):
        load_rows("kinetics", kinetics, "train")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("yoga,abc,x,11,train", "time_start 'x' must be a number of seconds, 0 or more"),
        ("yoga,abc,1,-11,train", "time_end '-11' must be a number of seconds"),
        ("yoga,abc,,11,train", "time_start is empty"),
        ("yoga,,1,11,train", "youtube_id is empty"),
    ],
)
def test_kinetics_wrong_rows(kinetics: Path, line: str, words: str) -> None:
    write(kinetics / "annotations/train.csv", f"label,youtube_id,time_start,time_end,split\n{line}\n")
    with pytest.raises(DataError) as caught:
        load_rows("kinetics", kinetics, "train")
    assert "train.csv: 1 of 1 rows is wrong" in str(caught.value) and f"train.csv:2: {words}" in str(caught.value)


def test_kinetics_errors(kinetics: Path) -> None:
    with pytest.raises(ConfigError, match=r"source kinetics needs data\.root"):
        load_rows("kinetics", None, "train")
    with pytest.raises(DataError, match="source kinetics has no split 'trian'; allowed are train, val, test"):
        load_rows("kinetics", kinetics, "trian")
    with pytest.raises(DataError, match=r"source kinetics: no val\.csv in '.*annotations' or"):
        load_rows("kinetics", kinetics, "val")


# ---- PySlowFast's lists and class folders


def test_kinetics_reads_pyslowfast_lists_and_a_folder_for_each_class(tmp_path: Path) -> None:
    for split, label, name in (("train", "run", "a"), ("train", "walk", "b c"), ("val", "run", "d")):
        folder = tmp_path / split / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.mp4").write_bytes(b"x")
    rows = load_rows("kinetics", tmp_path, "train")
    assert rows == load_rows("class_folders", tmp_path, "train")
    assert [(row.id, row.labels, row.split) for row in rows] == [
        ("train/run/a.mp4", ("run",), "train"),
        ("train/walk/b c.mp4", ("walk",), "train"),
    ]
    assert [row.id for row in load_rows("class_folders", tmp_path, None)] == [
        *(row.id for row in rows),
        "val/run/d.mp4",
    ]
    assert load_rows("class_folders", tmp_path / "train", None)[1].labels == ("walk",)
    (tmp_path / "train.csv").write_text("train/run/a.mp4 1\ntrain/walk/b c.mp4 0\n")
    (tmp_path / "val.csv").write_text("val/run/d.mp4 1\n")
    assert [(row.labels, row.split) for row in load_rows("kinetics", tmp_path, "train")] == [
        ((1,), "train"),
        ((0,), "train"),
    ]
    assert [row.split for row in load_rows("kinetics", tmp_path, None)] == ["train", "train", "val"]
    (tmp_path / "val.csv").write_text("train/run/a.mp4 1\n")
    with pytest.raises(DataError, match=r"train/run/a\.mp4 is in several of train\.csv, val\.csv"):
        load_rows("kinetics", tmp_path, None)


def test_class_folders_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "loose.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match=r"1 videos lie in no class's folder \(first: loose\.mp4\)"):
        load_rows("class_folders", tmp_path, "train")
    with pytest.raises(DataError, match="for the split 'val'; there are: train"):
        load_rows("class_folders", tmp_path, "val")
    with pytest.raises(ConfigError, match=r"needs data\.root"):
        load_rows("class_folders", None, None)
