"""Lists without a header, as PySlowFast, UCF101 and others have them: every form, on files; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinreel.data.manifest import read_manifest, unused_columns
from twinreel.data.manifest.class_names import read_class_names
from twinreel.data.manifest.path_lists import is_path_list
from twinreel.errors import DataError

NAME = "a clip, \u8996\u983b \xe9.mp4"


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def read(tmp_path: Path, text: str, name: str = "train.csv") -> list[tuple[str, tuple[str | int, ...]]]:
    return [(row.id, row.labels) for row in read_manifest(write(tmp_path / name, text))]


def refusal(tmp_path: Path, text: str, name: str = "train.csv") -> str:
    with pytest.raises(DataError) as caught:
        read_manifest(write(tmp_path / name, text))
    return str(caught.value)


@pytest.mark.parametrize("separator", [" ", "   ", "\t", ",", ", ", ";", " ; "])
@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_every_separator(tmp_path: Path, separator: str, quoted: bool, line_end: str, encoding: str) -> None:  # B031
    first = f'"{NAME}"' if quoted else NAME
    text = line_end.join([f"{first}{separator}3", f"sub/b.avi{separator}12", "", f"no-suffix{separator}0", ""])
    path = write(tmp_path / "train.txt", text, encoding)
    rows = read_manifest(path)
    assert [(row.id, row.video, row.labels) for row in rows] == [
        (NAME, str(tmp_path / NAME), (3,)),
        ("sub/b.avi", str(tmp_path / "sub/b.avi"), (12,)),
        ("no-suffix", str(tmp_path / "no-suffix"), (0,)),
    ]
    assert unused_columns(path) == []


def test_root_is_what_paths_start_from(tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", "a.mp4 3\n/else/b.mp4 4\n")
    (tmp_path / "videos").mkdir()
    rows = read_manifest(path, root=tmp_path / "videos")
    assert [row.video for row in rows] == [str(tmp_path / "videos/a.mp4"), "/else/b.mp4"]


def test_quotes(tmp_path: Path) -> None:
    text = '"say ""hi"" 1 2.mp4" 3\n"a 12" 4\nits 5.mp4 5\n'
    assert read(tmp_path, text) == [('say "hi" 1 2.mp4', (3,)), ("a 12", (4,)), ("its 5.mp4", (5,))]


def test_paths_alone(tmp_path: Path) -> None:
    assert read(tmp_path, 'A/v one.avi\n"strange"\nB/v_2.MP4\n', "testlist01.txt") == [
        ("A/v one.avi", ()),
        ("strange", ()),
        ("B/v_2.MP4", ()),
    ]


@pytest.mark.parametrize(
    "line", ["a b.mp4 3,7", "a b.mp4\t3,7", "a b.mp4;3,7", "a b.mp4;3 7", "a b.mp4 3;7", '"a b.mp4" 3, 7']
)
def test_several_labels(tmp_path: Path, line: str) -> None:
    other = line.split("mp4")[1].lstrip('"').replace("3", "1")
    assert read(tmp_path, f"{line}\nc.mp4{other}\n") == [("a b.mp4", (3, 7)), ("c.mp4", (1, 7))]


def test_three_fields_with_zeros_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "a.mp4 0 3\nb.mp4 0 4\n") == [("a.mp4", (3,)), ("b.mp4", (4,))]


@pytest.mark.parametrize("separator", [" ", ",", ";", "\t"])
def test_three_fields_need_a_first_line(tmp_path: Path, separator: str) -> None:
    text = "a.mp4 250 3\nb.mp4 300 4\n".replace(" ", separator)
    words = refusal(tmp_path, text)
    header = separator.join(("video", "num_frames", "label"))
    assert "the middle number may be the first frame or the number of frames" in words
    assert f"`{header}`" in words and f"`{header.replace('num_frames', 'start_frame')}`" in words
    assert read(tmp_path, f"{header}\n{text}") == [("a.mp4", (3,)), ("b.mp4", (4,))]
    assert unused_columns(tmp_path / "train.csv") == ["num_frames"]


@pytest.mark.parametrize("text", ["a.mp4 0 3\na.mp4 30 4\n", "video start_frame label\na.mp4 30 3\n"])
def test_start_frames_of_files_that_are_not_there(tmp_path: Path, text: str) -> None:
    assert [row.start_seconds for row in read_manifest(write(tmp_path / "l.txt", text))] == [None] * text.count(".mp4")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("b.mp4", "line 2 has no label, line 1 has one"),
        ("b.mp4 x", "no class number at its end"),
        ("b.mp4 -1", "'-1' is no class number"),
        ("b.mp4 1.5", "'1.5' is no class number"),
        ("b.mp4 007", "'007' is no class number"),
        ("b.mp4,5", "the separator is ',', in line 1 it is ' '"),
        ("b 12 5", "is the path 'b', or do numbers belong to it? Put the path in double quotes"),
        ("b.mp4 1 2 3", "3 numbers follow the path; separate several labels in another way: `path 3,7`"),
        ("b.mp4 4 5", "line 1 has another number of fields"),
        ('"b.mp4 5', "a double quote is open to the end"),
        ('"b.mp4"5', "'5' follows the path"),
        ('"b.mp4" five', "' five' follows the path"),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, what: str) -> None:  # B031
    words = refusal(tmp_path, f"a clip.mp4 3\n{line}\nc.mp4 4\n")
    assert "train.csv: 1 of 3 rows is wrong; mend or remove:\n" in words
    assert f"train.csv:2: {what}, in {line!r}; expected `path label` with a class number 0, 1, 2, ..." in words
    assert "for names or captions begin the file with a line that names the columns, such as video,caption" in words


def test_one_error_names_all_bad_lines(tmp_path: Path) -> None:
    words = refusal(tmp_path, "a.mp4 3\nb.mp4\nc.mp4 4\n\nd.mp4 x\n")
    assert "2 of 4 rows are wrong" in words and "train.csv:2: " in words and "train.csv:5: " in words


def test_a_table_without_header_is_no_list(tmp_path: Path) -> None:
    words = refusal(tmp_path, "a.mp4,a dog runs\nb.mp4,a cat sits\n")
    assert "2 of 2 rows are wrong" in words and "begin the file with a line that names the columns" in words


def test_hmdb51_splits_are_no_labels(tmp_path: Path) -> None:
    words = refusal(tmp_path, "April_09.avi 1 \nB_1.avi 2 \n", "brush_hair_test_split1.txt")
    assert "1 = train, 2 = test, 0 = unused and are no labels; write a CSV that begins with video,label,split" in words


@pytest.mark.parametrize(
    "text",
    [
        "",
        "video,label\na.mp4,3\n",
        "path;label\na.mp4;3\n",
        "video 1,caption\n",
        "video_id,label,split1\na,b,1\n",
        "1 ApplyEyeMakeup\n2 Archery\n",
        "abseiling\nair drumming\n",
        "[PAD]\n[unused0]\n",
        "video\nv1\nv2\n",
    ],
)
def test_what_is_no_list(text: str) -> None:
    assert not is_path_list(text)


# ---- names of class numbers


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("map.txt", "brush hair\r\ncatch\n\n", {0: "brush hair", 1: "catch"}),
        ("classInd.txt", "1 Archery\n2 Baby Crawling\n", {1: "Archery", 2: "Baby Crawling"}),
        (
            "labels.json",
            '{"Holding something": "1", "\\"air drumming\\"": 0}',
            {1: "Holding something", 0: "air drumming"},
        ),
        ("labels.json", '["run", "walk"]', {0: "run", 1: "walk"}),
        ("map.txt", "2 hands\nrun\n", {0: "2 hands", 1: "run"}),
    ],
)
def test_class_names(tmp_path: Path, name: str, text: str, names: dict[int, str]) -> None:
    assert read_class_names(write(tmp_path / name, text)) == names


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("map.txt", "\n", "no class name in it; write a name a line"),
        ("map.txt", "run\nwalk\nrun\n", "'run' is there twice; a class has one number and one name"),
        ("map.txt", "1 run\n1 walk\n", "1 is there twice"),
        ("map.json", '{"run": "fast"}', "no class names can be read from it (invalid literal"),
        ("map.json", "3", "no class names can be read from it"),
        ("map.json", "{", "no class names can be read from it"),
    ],
)
def test_class_names_that_are_none(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_class_names(write(tmp_path / name, text))
    assert words in str(caught.value)


def test_names_for_the_numbers_of_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", "a.mp4 1\nb.mp4 2,1\n")
    names = write(tmp_path / "classes.txt", "1 air_drumming\n2 archery\n")
    rows = read_manifest(path, class_names=names, caption_template="a person does {label}")
    assert [row.labels for row in rows] == [("air_drumming",), ("archery", "air_drumming")]
    assert [caption.text for caption in rows[1].captions] == ["a person does archery", "a person does air drumming"]
    write(tmp_path / "l.csv", "a.mp4 1\nb.mp4 3\n")
    with pytest.raises(DataError, match=r"l\.csv:2: label 3 has no class name; the names are of 1 to 2"):
        read_manifest(path, class_names=names)
    with pytest.raises(DataError, match="label 1 is a number; caption_template needs names: give class_names"):
        read_manifest(path, caption_template="a person does {label}")
    with pytest.raises(DataError, match=r"file of class names '.*none\.txt' does not exist"):
        read_manifest(path, class_names=tmp_path / "none.txt")
