from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from twinreel.data import tables
from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import (
    missing_videos,
    read_folder,
    read_manifest,
    read_manifests,
    unused_columns,
    write_manifest,
)
from twinreel.errors import ConfigError, DataError

AWKWARD = 'a clip, \u8996\u983b \xe9 \u2028 \'n "quoted" 100%.mp4'


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def write_jsonl(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def error(*args: object, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read_manifest(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


def csv_error(tmp_path: Path, text: str, **options: object) -> str:
    return error(write(tmp_path / "m.csv", text), **options)


# ---- what is read


def test_every_column(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.csv",
        "id,video,start_seconds,end_seconds,caption,caption_file,label,split\n"
        "one,a.mp4,1.5,3,a dog runs,,,train\n"
        "two,sub/b.mp4,,,,notes/b.csv,dog,val\n"
        "three,/else/c.mp4,2,,,,7,val\n"
        "four,d.mp4,,2,,,,val\n",
    )
    assert read_manifest(path) == [
        Clip(
            id="one",
            video=str(tmp_path / "a.mp4"),
            start_seconds=1.5,
            end_seconds=3.0,
            captions=(Caption(text="a dog runs"),),
            split="train",
        ),
        Clip(
            id="two",
            video=str(tmp_path / "sub/b.mp4"),
            caption_file=str(tmp_path / "notes/b.csv"),
            labels=("dog",),
            split="val",
        ),
        Clip(id="three", video="/else/c.mp4", start_seconds=2.0, labels=(7,), split="val"),
        Clip(id="four", video=str(tmp_path / "d.mp4"), start_seconds=0.0, end_seconds=2.0, split="val"),
    ]


@pytest.mark.parametrize("alias", ["video", "path", "video_path", "video_name", "clip_name"])
@pytest.mark.parametrize("caption", ["caption", "text", "sentence"])
def test_aliases(tmp_path: Path, alias: str, caption: str) -> None:
    expected = [
        Clip(
            id="a.mp4",
            video=str(tmp_path / "a.mp4"),
            start_seconds=1.0,
            end_seconds=2.0,
            captions=(Caption(text="hi"),),
        )
    ]
    assert read_manifest(write(tmp_path / "m.csv", f"{alias},start,end,{caption}\na.mp4,1,2,hi\n")) == expected
    record = {alias: "a.mp4", "start": 1, "end": 2.0, caption: "hi"}
    assert read_manifest(write_jsonl(tmp_path / "m.jsonl", record)) == expected


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_dialects(tmp_path: Path, separator: str, line_end: str, encoding: str) -> None:
    quoted = '"' + AWKWARD.replace('"', '""') + '"'
    rows = [("video", "label"), (quoted, "ice skating"), ("b c.mp4", "\u8d70\u308b"), ("", ""), ("tab.mp4", '"x,;\ty"')]
    lines = [separator.join(row) if any(row) else "" for row in rows]
    path = write(tmp_path / "m.csv", line_end.join(lines), encoding)
    assert [(row.id, row.labels) for row in read_manifest(path)] == [
        (AWKWARD, ("ice skating",)),
        ("b c.mp4", ("\u8d70\u308b",)),
        ("tab.mp4", ("x,;\ty",)),
    ]


def test_tsv_of_one_column_and_space_after_commas(tmp_path: Path) -> None:
    assert [row.id for row in read_manifest(write(tmp_path / "m.tsv", "video\na, b.mp4\n"))] == ["a, b.mp4"]
    path = write(tmp_path / "m.csv", 'video, label, caption\na.mp4, "run, fast" , "x"\n'.replace('" ,', '",'))
    assert read_manifest(path)[0].labels == ("run, fast",)


def test_jsonl_dialects(tmp_path: Path) -> None:
    first = json.dumps({"path": AWKWARD, "texts": ["one\u2028two", "three"], "split": None}, ensure_ascii=False)
    path = write(tmp_path / "m.jsonl", f'{first}\r\n\r\n{{"id": 5, "path": "b.mp4", "caption": ""}}\r\n', "utf-8-sig")
    rows = read_manifest(path)
    assert [(row.id, row.video) for row in rows] == [
        (AWKWARD, str(tmp_path / AWKWARD)),
        ("5", str(tmp_path / "b.mp4")),
    ]
    assert rows[0].captions == (Caption(text="one\u2028two"), Caption(text="three"))
    assert rows[1].captions == ()


def test_captions_with_their_own_windows(tmp_path: Path) -> None:
    captions = ["all", {"text": "part", "start": 1, "end_seconds": 2.5}, {"caption": "from", "start_seconds": 3}]
    expected = (
        Caption(text="all"),
        Caption(text="part", start_seconds=1.0, end_seconds=2.5),
        Caption(text="from", start_seconds=3.0),
    )
    assert (
        read_manifest(write_jsonl(tmp_path / "m.jsonl", {"video": "a", "captions": captions}))[0].captions == expected
    )
    cell = json.dumps(captions).replace('"', '""')
    assert read_manifest(write(tmp_path / "m.csv", f'video,captions\na,"{cell}"\n'))[0].captions == expected


@pytest.mark.parametrize(
    ("cell", "value", "labels"),
    [
        ("run", "run", ("run",)),
        ("0", 0, (0,)),
        ("12", 12, (12,)),
        ('"[""run"", ""jump""]"', ["run", "jump"], ("run", "jump")),
        ('"[3, 1]"', [3, 1], (3, 1)),
        ('"[""3""]"', "3", ("3",)),
        ("[]", [], ()),
        ("", None, ()),
    ],
)
def test_labels(tmp_path: Path, cell: str, value: object, labels: tuple[str | int, ...]) -> None:
    assert read_manifest(write(tmp_path / "m.csv", f"video,label\na,{cell}\n"))[0].labels == labels
    assert read_manifest(write_jsonl(tmp_path / "m.jsonl", {"video": "a", "label": value}))[0].labels == labels


def test_paths_start_at_root_or_at_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "lists/m.csv", "video,caption_file\na.mp4,c.csv\n")
    (tmp_path / "videos").mkdir()
    monkeypatch.chdir(tmp_path)
    (row,) = read_manifest("lists/m.csv")
    assert (row.video, row.caption_file) == (str(tmp_path / "lists/a.mp4"), str(tmp_path / "lists/c.csv"))
    (row,) = read_manifest("lists/m.csv", root="videos")
    assert (row.video, row.caption_file) == (str(tmp_path / "videos/a.mp4"), str(tmp_path / "videos/c.csv"))
    assert "root 'vidoes' does not exist" in error("lists/m.csv", root="vidoes")


def test_unused_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", ",video,captoin,start,Label\n0,a.mp4,hi,1,x\n")
    assert unused_columns(path) == ["(column 1)", "captoin", "Label"]
    records = {"path": "a", "texts": ["x"], "category": None}, {"path": "b", "origin": 1, "split": "val"}
    assert unused_columns(write_jsonl(tmp_path / "m.jsonl", *records)) == ["category", "origin"]


# ---- ids


def test_default_ids_do_not_depend_on_the_split(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", "id,video,split\n,a,train\n,a,val\nb,x,val\n,b,train\n,a,train\n,a#2,val\n")
    ids = [row.id for row in read_manifest(path)]
    assert ids == ["a", "a#2", "b", "b#2", "a#3", "a#2#2"]
    assert [row.id for row in read_manifest(path, split="val")] == ["a#2", "b", "a#2#2"]


def test_given_ids_must_be_unique(tmp_path: Path) -> None:
    text = csv_error(tmp_path, "id,video\nx,a\ny,b\n\nx,c\n")
    assert "1 ids are used twice" in text and "m.csv:5: id 'x' is already that of" in text and "m.csv:2" in text


def test_several_manifests_are_one_collection(tmp_path: Path) -> None:
    one = write(tmp_path / "one/m.csv", "video,label\na,x\n")
    two = write_jsonl(tmp_path / "two/m.jsonl", {"path": "a"}, {"path": "b"})
    rows = read_manifests([one, two])
    assert [(row.id, row.video) for row in rows] == [
        ("a", str(tmp_path / "one/a")),
        ("a#2", str(tmp_path / "two/a")),
        ("b", str(tmp_path / "two/b")),
    ]
    write(one, "id,video\nb,a\n")
    write_jsonl(two, {"id": "b", "video": "c"})
    with pytest.raises(DataError, match=r"two/m\.jsonl:1: id 'b' is already that of .*one/m\.csv:2"):
        read_manifests([one, two])
    with pytest.raises(ConfigError, match=r"m\.csv' is listed twice"):
        read_manifests([one, tmp_path / "two/../one/m.csv"])
    with pytest.raises(ConfigError, match="no manifest is named"):
        read_manifests([])


# ---- splits and templates


@pytest.mark.parametrize("asked", ["val", "valid", "validate", "validation"])
def test_names_of_the_validation_split(tmp_path: Path, asked: str) -> None:
    path = write(tmp_path / "m.csv", "video,split\na,val\nb,train\nc,validation\nd,valid \n")
    assert [row.id for row in read_manifest(path, split=asked)] == ["a", "c", "d"]
    assert [row.id for row in read_manifest(path, split="train")] == ["b"]
    assert len(read_manifest(path)) == 4


def test_split_errors(tmp_path: Path) -> None:
    text = csv_error(tmp_path, "video,split\na,val\nb,train\nc,train\n", split="tran")
    assert "no row has split 'tran'; there are val (1 rows), train (2 rows); did you mean 'train'?" in text
    text = csv_error(tmp_path, "video,Split\na,val\n", split="val")
    assert "no column 'split', but split 'val' is asked for (leave the split out to take every row)" in text
    assert text.endswith("columns found: video, Split; did you mean 'Split'?")
    text = csv_error(tmp_path, "video,split\na,val\nb,\n", split="val")
    assert "m.csv:3: split is empty, and split 'val' is asked for" in text


def test_one_file_a_split(tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", "video,split\na,train\n")
    two = write(tmp_path / "two.csv", "video,split\nb,val\n")
    assert [row.id for row in read_manifests([one, two], split="val")] == ["b"]


def test_caption_template(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "m.jsonl",
        {"video": "a", "label": "hand_shaking"},
        {"video": "b", "label": ["running", "very_fast_jumping"]},
        {"video": "c", "label": 3, "caption": "own"},
        {"video": "d", "caption_file": "d.csv"},
    )
    rows = read_manifest(path, caption_template="a person is {label}")
    assert [[caption.text for caption in row.captions] for row in rows] == [
        ["a person is hand shaking"],
        ["a person is running", "a person is very fast jumping"],
        ["own"],
        [],
    ]


def test_caption_template_errors(tmp_path: Path) -> None:
    template = "a person is {label}"
    assert "no column 'label' (nor labels), but caption_template needs it; columns found: video, lables" in csv_error(
        tmp_path, "video,lables\na,x\n", caption_template=template
    )
    text = csv_error(tmp_path, "video,label\na,x\nb,\nc,4\n", caption_template=template)
    assert "m.csv:3: neither caption nor label" in text and "m.csv:4: label 4 is a number" in text
    path = write(tmp_path / "m.csv", "video,label\na,x\n")
    for wrong in ("a person", "{}", "{label:>9}", "{label!r}", "{label.x}", "{label} {split}", "{label", "{0}"):
        with pytest.raises(ConfigError, match="caption_template"):
            read_manifest(path, caption_template=wrong)


# ---- what is refused


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ("5", "5", r"\[5, 5\) is a window of no length; end_seconds must be greater than start_seconds"),
        ("5", "4.5", r"\[5, 4.5\) ends before it starts"),
        ("", "0", r"\[0, 0\) is a window of no length"),
        ("-1", "4", "start_seconds '-1' must be a number of seconds, 0 or more"),
        ("nan", "4", "start_seconds 'nan' must be a number"),
        ("0", "inf", "end_seconds 'inf' must be a number"),
        ("00:10", "12", "start_seconds '00:10' must be a number"),
        ("1", "two", "end_seconds 'two' must be a number"),
    ],
)
def test_wrong_windows(tmp_path: Path, start: str, end: str, words: str) -> None:
    path = write(tmp_path / "m.csv", f"video,start_seconds,end_seconds\nfirst,0,1\na,{start},{end}\n")
    with pytest.raises(DataError, match=rf"m\.csv: 1 of 2 rows is wrong; mend or remove:\n.*m\.csv:3: {words}"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"video": "a", "start": True}, "start_seconds True must be a number of seconds"),
        ({"video": "a", "start": float("nan")}, "start_seconds nan must be a number"),
        ({"video": "a", "start": [1]}, r"start_seconds \[1\] must be a number"),
        ({"video": 3}, "video must be text, got 3"),
        ({"video": "a", "id": ["x"]}, r"id must be text, got \['x'\]"),
        ({"video": "a", "caption": ["x"]}, "a list of sentences goes into 'captions'"),
        ({"video": "a", "caption": "x", "captions": ["y"]}, "caption and captions are both given"),
        ({"video": "a", "captions": ["x"], "caption_file": "y"}, "captions and caption_file are both given"),
        ({"video": "a", "captions": "x"}, "captions must be a JSON list .* got 'x'"),
        ({"video": "a", "captions": ["x", " "]}, "a caption without text"),
        ({"video": "a", "captions": [3]}, "a caption must be text or an object, got 3"),
        ({"video": "a", "captions": [{"text": "x", "speaker": "y"}]}, "a caption has text, .* got .*speaker"),
        ({"video": "a", "captions": [{"text": "x", "start": 1, "start_seconds": 1}]}, "each once"),
        ({"video": "a", "captions": [{"text": "x", "start": 2, "end": 1}]}, "ends before it starts"),
        ({"video": "a", "label": 1.5}, "label 1.5 must be a name or a class number"),
        ({"video": "a", "label": -1}, "label -1 must be a name or a class number"),
        ({"video": "a", "label": True}, "label True must be a name or a class number"),
        ({"video": "a", "label": ["x", None]}, "label None must be a name"),
        ({"video": "a", "label": ["x", "x"]}, "names a class twice"),
        ({"video": "a", "split": {"x": 1}}, "split must be text"),
        ({"caption": "x"}, "video is empty"),
        (["a"], r"a line must be one JSON object, got '\[\"a\"\]'"),
    ],
)
def test_wrong_jsonl_rows(tmp_path: Path, record: object, words: str) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", {"video": "fine"}, record)
    with pytest.raises(DataError, match=rf"m\.jsonl:2: .*{words}"):
        read_manifest(path)


@pytest.mark.parametrize("cell", ["1.5", "-1", "3.0", "007", "nan", "1e3"])
def test_csv_labels_that_are_neither_number_nor_name(tmp_path: Path, cell: str) -> None:
    text = csv_error(tmp_path, f"video,label\na,{cell}\n")
    assert f"label '{cell}' is no class number (0, 1, 2, ...); if it is a name, write [\"{cell}\"]" in text


def test_broken_lists_in_cells(tmp_path: Path) -> None:
    assert "label must be a JSON list" in csv_error(tmp_path, "video,label\na,[dog]\n")
    assert "captions must be a JSON list" in csv_error(tmp_path, "video,captions\na,a dog\n")


def test_broken_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", '{"video": "a"}\n{"video": "b"\n{"video": "c", "video": "d"}\n')
    text = error(path)
    assert "2 of 3 rows are wrong" in text
    assert "m.jsonl:2: not a JSON object:" in text and 'in \'{"video": "b"' in text
    assert "m.jsonl:3: not a JSON object: key 'video' appears twice" in text


def test_wrong_number_of_values_and_unclosed_quotes(tmp_path: Path) -> None:
    text = csv_error(tmp_path, "video,caption\na.mp4,one, two\nb.mp4,fine\nc.mp4\n")
    assert "2 of 3 rows are wrong" in text
    assert "m.csv:2: 3 values for 2 columns in 'a.mp4,one,two'; put values" in text and "m.csv:4: 1 values" in text
    text = csv_error(tmp_path, 'video,caption\na.mp4,"two\nlines"\nb.mp4,"open\nc.mp4,lost\n')
    assert "m.csv:4: unexpected end of data; check the double quotes from this line on" in text


def test_all_wrong_rows_are_counted_and_ten_listed(tmp_path: Path) -> None:
    lines = [f"v{i},{i},{i if i % 2 else i + 1}" for i in range(50)]
    text = csv_error(tmp_path, "video,start,end\n" + "\n".join(lines))
    assert "25 of 50 rows are wrong" in text and text.count("is a window of no length") == 10
    assert "m.csv:3: [1, 1)" in text and text.endswith("... and 15 more")


def test_missing_and_double_columns(tmp_path: Path) -> None:
    text = csv_error(tmp_path, "video_no,sentence\nx,y\n")
    names = "path, video_path, video_name, clip_name, gif_name, video_id"
    assert f"no column 'video' (nor {names}), but every row needs it" in text
    assert "columns found: video_no, sentence; did you mean 'video_no'?" in text
    assert "columns found: a b; the first line must name" in csv_error(tmp_path, "a b\nc d\n")
    assert "only commas, tabs or semicolons separate columns" in csv_error(tmp_path, "video|label\na|b\n")
    assert "columns 'path' and 'video' both mean 'video'; keep one" in csv_error(tmp_path, "path,video\na,b\n")
    assert "columns 'caption' and 'text' both mean 'caption'" in csv_error(tmp_path, "video,caption,text\na,,b\n")
    assert "column 'video' appears twice" in csv_error(tmp_path, "video,video\na,b\n")


def test_files_that_are_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is empty" in csv_error(tmp_path, "")
    assert "has a header and no rows" in csv_error(tmp_path, "video,label\n\n")
    assert "is empty" in error(write(tmp_path / "m.jsonl", "\n \n"))
    assert "is a folder; name a file" in error(tmp_path)
    assert "ends in '.json'; allowed are .csv" in error(write(tmp_path / "m.json", "[]"))
    assert "m.csv:2: byte 0xe9 is not UTF-8 text" in error(write(tmp_path / "m.csv", "video\n\xe9.mp4\n", "latin-1"))
    assert "m.csv:1: byte 0xff is not UTF-8 text" in error(write(tmp_path / "m.csv", "video\na\n", "utf-16"))
    monkeypatch.chdir(tmp_path)
    assert error("none.csv") == f"manifest 'none.csv' does not exist (looked from {tmp_path})"


# ---- writing


def random_row(rng: random.Random, number: int) -> Clip:
    words = [AWKWARD, "plain", " leading", "trailing ", "[x]", "3", "1.5", "two\nlines", "cr\rlf\r\n", "'", '"', "-"]
    windows = [(None, None), (1.5, 1 / 3 + 2), (0.1, None)]
    start, end = rng.choice(windows)
    kind = rng.randrange(4)
    texts = rng.sample(words, rng.randint(1, 3))
    captions = [Caption(text=text) for text in texts]
    if kind == 1:
        first, last = rng.choice([(1e-7, 0.1 + 0.2), (None, 2.0), (2.0, None)])
        captions = [Caption(text=text, start_seconds=first, end_seconds=last) for text in texts]
    return Clip(
        id=f"{rng.choice(words)} {number}",
        video="/" + rng.choice(words),
        start_seconds=start,
        end_seconds=end,
        captions=tuple(captions) if kind < 2 else (),
        caption_file="/" + rng.choice(words) if kind == 2 else None,
        labels=tuple(rng.sample([*words, 0, 3, 12], rng.randint(0, 2))),
        split=rng.choice([None, "train", "val"]),
    )


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl"])
def test_written_rows_are_read_again(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    for size in (1, 1, 1, 2, 30, 100):
        rows = [random_row(rng, number) for number in range(size)]
        write_manifest(tmp_path / name, rows)
        assert read_manifest(tmp_path / name) == rows
    assert os.listdir(tmp_path) == [name]
    assert unused_columns(tmp_path / name) == []


def test_only_used_columns_are_written(tmp_path: Path) -> None:
    write_manifest(tmp_path / "m.csv", [Clip(id="x", video="/a.mp4", labels=("dog",)), Clip(id="y", video="/b.mp4")])
    assert (tmp_path / "m.csv").read_text() == 'id,video,label\n"x","/a.mp4","dog"\n"y","/b.mp4",""\n'


def test_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.csv", "precious")
    clip = Clip(id="x", video="/a.mp4")
    wrong = {
        "no rows to write": [],
        r"1 ids are empty or used twice \(first: 'x'\)": [clip, clip],
        r"1 ids are empty or used twice \(first: ' '\)": [Clip(id=" ", video="a")],
        "row 'z' cannot be written: a caption without text": [Clip(id="z", video="a", captions=(Caption(text=" "),))],
        "row 'w' cannot be written: video is empty": [Clip(id="w", video="")],
        "surrogates not allowed": [Clip(id="s", video="/\udcff.mp4")],
    }
    for words, rows in wrong.items():
        with pytest.raises(DataError, match=words):
            write_manifest(path, rows)
    with pytest.raises(DataError, match="allowed are"):
        write_manifest(tmp_path / "m.xlsx", [clip])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        write_manifest(path, [clip])
    assert path.read_text() == "precious" and os.listdir(tmp_path) == ["m.csv"]


# ---- files


def test_missing_videos(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", "")
    rows = [Clip(id=str(i), video=str(tmp_path / name)) for i, name in enumerate(["a.mp4", "b.mp4", "a.mp4", "b.mp4"])]
    assert missing_videos(rows) == [rows[1], rows[3]]


def test_read_folder(tmp_path: Path) -> None:
    for name in ("b/z.MP4", "b/a b.mkv", "a.webm", "b-c/\xe9.avi", "notes.txt", ".hidden/x.mp4", "b/._z.mp4"):
        write(tmp_path / "v" / name, "")
    write(tmp_path / "other/linked.mov", "")
    (tmp_path / "v/link").symlink_to(tmp_path / "other")
    (tmp_path / "v/b/loop").symlink_to(tmp_path / "v")
    rows = read_folder(tmp_path / "v")
    assert [row.id for row in rows] == ["a.webm", "b-c/\xe9.avi", "b/a b.mkv", "b/z.MP4", "link/linked.mov"]
    assert [row.video for row in rows] == [str(tmp_path / "v" / row.id) for row in rows]


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", "")
    with pytest.raises(DataError, match=r"no video in this folder \(1 other files\); videos are known by .*\.mp4"):
        read_folder(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_folder(tmp_path / "none")
    with pytest.raises(DataError, match="is not a folder"):
        read_folder(tmp_path / "notes.txt")
    with open(os.fsencode(tmp_path) + b"/\xff.mp4", "w"):
        pass
    with pytest.raises(DataError, match=r"udcff\.mp4': the file's name is not UTF-8 text; rename it"):
        read_folder(tmp_path)


# ---- real collections


CLIPS = os.environ.get("TWINREEL_TEST_DATA")
with_clips = pytest.mark.skipif(CLIPS is None, reason="TWINREEL_TEST_DATA names no folder of real clips")


@with_clips
def test_real_captions() -> None:
    path = Path(CLIPS or "") / "caption/items.jsonl"
    rows = read_manifest(path, root=CLIPS)
    records = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    assert [(row.id, row.split) for row in rows] == [(record["id"], record["split"]) for record in records]
    assert [[caption.text for caption in row.captions] for row in rows] == [record["texts"] for record in records]
    assert missing_videos(rows) == []
    assert unused_columns(path) == ["category", "origin"]
    parts = [len(read_manifest(path, root=CLIPS, split=split)) for split in ("train", "validation")]
    assert sum(parts) == len(rows) and min(parts) > 0


@with_clips
@pytest.mark.parametrize("name", ["action/train.csv", "action/all.csv", "caption/topic.csv"])
def test_real_labels(name: str) -> None:
    path = Path(CLIPS or "") / name
    rows = read_manifest(path, root=CLIPS, caption_template="a person is {label}")
    lines = path.read_text("utf-8").splitlines()[1:]
    assert [f"{row.id},{row.labels[0]}" for row in rows] == [",".join(line.split(",")[:2]) for line in lines]
    assert all(row.captions[0].text == f"a person is {row.labels[0]}".replace("_", " ") for row in rows)
    assert missing_videos(rows) == []
