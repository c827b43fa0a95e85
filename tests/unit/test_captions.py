from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from twinreel.data import captions
from twinreel.data.captions import collection_captions, missing_caption_files, read_caption_file, row_captions
from twinreel.data.clip import Caption, Clip
from twinreel.errors import DataError

EXPECTED = (
    Caption(text="add the onion", start_seconds=0.0, end_seconds=2.5),
    Caption(text="stir, gently", start_seconds=1.0, end_seconds=4.0),
    Caption(text="", start_seconds=1.0, end_seconds=1.0),
    Caption(text="nan", start_seconds=7.25, end_seconds=9.0),
)


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def error(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read_caption_file(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'start,end,text\n7.25,9,nan\n1,4,"stir, gently"\n0,2.5,add the onion\n1,1,\n',
        'end,who,text,start\r\n9,x,nan,7.25\r\n4.0,," stir, gently ",1.0\r\n2.5,x, add the onion,0\r\n1.0,y,,1.0\r\n',
        "\ufeffstart_seconds\tend_seconds\tcaption\n7.25\t9\tnan\n1\t4\tstir, gently\n0\t2.5\tadd the onion\n1\t1\t\n",
    ],
)
def test_csv_is_sorted_by_start_and_nothing_is_dropped(tmp_path: Path, text: str) -> None:
    assert read_caption_file(write(tmp_path / "x.csv", text)) == EXPECTED


@pytest.mark.parametrize("nothing", [None, math.nan, ""])
def test_json_lists(tmp_path: Path, nothing: object) -> None:
    content = {
        "start": [7.25, 1, 0, 1],
        "end": [9, 4, 2.5, 1],
        "text": ["nan", "stir, gently", "add the onion", nothing],
    }
    assert read_caption_file(write(tmp_path / "x.json", json.dumps(content))) == EXPECTED


def test_jsonl(tmp_path: Path) -> None:
    lines = [{"start": c.start_seconds, "end": c.end_seconds, "text": c.text} for c in reversed(EXPECTED[:2])]
    assert read_caption_file(write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)))) == EXPECTED[:2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nan,2,x", "start_seconds 'nan' must be a number of seconds, 0 or more"),
        ("-1,2,x", "start_seconds '-1' must be a number"),
        ("1,two,x", "end_seconds 'two' must be a number"),
        ("3,2,x", "[3, 2) ends before it starts"),
        (",2,x", "start is empty"),
        ("1,,x", "end is empty"),
        ("1,2,x,y", "4 values for 3 columns"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: str, words: str) -> None:
    text = error(write(tmp_path / "x.csv", f"start,end,text\n0,1,fine\n{line}\n1,2,fine\n"))
    assert "x.csv: 1 of 3 captions is wrong" in text and f"x.csv:3: {words}" in text


def test_wrong_files(tmp_path: Path) -> None:
    assert error(tmp_path / "none.csv") == f"caption file '{tmp_path}/none.csv' does not exist"
    assert "is empty" in error(write(tmp_path / "x.csv", ""))
    assert "has a header and no rows" in error(write(tmp_path / "x.csv", "start,end,text\n"))
    assert "has no caption with text" in error(write(tmp_path / "x.csv", "start,end,text\n0,1,\n"))
    text = error(write(tmp_path / "x.csv", "start,stop,text\n0,1,x\n"))
    assert "no column 'end_seconds' (nor end), but a caption file needs it; columns found: start, stop, text" in text
    assert "no column 'caption' (nor text, sentence, question)" in error(write(tmp_path / "x.csv", "start,end\n0,1\n"))
    assert "ends in '.vtt'" in error(write(tmp_path / "x.vtt", "WEBVTT"))


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"start": [1], "end": [2], "text": []}', '{"start": 1, "end": 2, "text": "x"}'],
)
def test_wrong_json(tmp_path: Path, content: str) -> None:
    assert "must hold one object" in error(write(tmp_path / "x.json", content))


def test_more_wrong_json(tmp_path: Path) -> None:
    assert error(tmp_path / "none.json") == f"caption file '{tmp_path}/none.json' does not exist"
    assert "cannot be read: Expecting" in error(write(tmp_path / "x.json", "{"))
    text = error(write(tmp_path / "x.json", '{"start": [0, 1], "end": [1, 2], "text": ["x", 3]}'))
    assert "x.json: caption 2: text must be text, got 3" in text


def clip(id: str, path: str | None = None, *texts: str) -> Clip:
    return Clip(id=id, video=f"/{id}.mp4", caption_file=path, captions=tuple(Caption(text=text) for text in texts))


def test_captions_of_a_row_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_captions(clip("a", None, "own")) == (Caption(text="own"),)
    captions._cached_captions.cache_clear()
    path = write(tmp_path / "x.csv", "start,end,text\n0,1,x\n")
    reads: list[str] = []
    read = read_caption_file
    monkeypatch.setattr(captions, "read_caption_file", lambda path: reads.append(path) or read(path))
    for id in "abc":
        assert row_captions(clip(id, path)) == (Caption(text="x", start_seconds=0.0, end_seconds=1.0),)
    assert reads == [path]
    assert 0 < (captions._cached_captions.cache_info().maxsize or 0) < 10000
    with pytest.raises(DataError, match=r"^row 'd': caption file '/none/d\.csv' does not exist"):
        row_captions(clip("d", "/none/d.csv"))


def test_captions_of_a_collection(tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", "start,end,text\n5,6,later\n0,1,sooner\n")
    broken = write(tmp_path / "broken.csv", "start,end,text\n0,x,lost\n")
    rows = [
        clip("a", None, "p", "q"),
        clip("b", one),
        clip("c", broken),
        clip("d", one),
        clip("e", broken),
        clip("f", None, "p"),
    ]
    with pytest.raises(DataError, match=r"(?s)^row 'c': .*broken\.csv:2: end_seconds 'x'"):
        list(collection_captions(rows))
    faults = []
    assert list(collection_captions(rows, faults)) == ["p", "q", "sooner", "later", "p"]
    assert [(fault.id, fault.video) for fault in faults] == [("c", "/c.mp4")]
    assert "broken.csv:2" in faults[0].reason


def test_missing_caption_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = write(tmp_path / "here.csv", "")
    paths = [None, here, str(tmp_path / "gone.csv"), str(tmp_path / "no/folder.csv"), f"{here}/x.csv", here]
    rows = [clip(str(i), path) for i, path in enumerate(paths)]
    listed: list[str] = []
    scandir = captions.os.scandir
    monkeypatch.setattr(captions.os, "scandir", lambda folder: listed.append(folder) or scandir(folder))
    assert [row.id for row in missing_caption_files(rows)] == ["2", "3", "4"]
    assert listed == [str(tmp_path), str(tmp_path / "no"), here]
    monkeypatch.setattr(captions.os, "scandir", lambda folder: exec("raise PermissionError(13, 'Permission denied')"))
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        missing_caption_files(rows)
