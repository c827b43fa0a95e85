from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from twinreel.errors import ConfigError, DataError
from twinreel.text import Vocabulary


def test_ids_start_at_one_and_pad_with_zero():
    vocabulary = Vocabulary(("add", "the", "onion"))
    tokens = vocabulary.tokenize(["Add THE onion, now", "nothing here", "add add add add"], 3)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 0], [1, 1, 1]]
    assert (len(vocabulary), vocabulary.num_embeddings) == (3, 4)
    assert vocabulary.tokenize([], 5).shape == (0, 5)


def test_entries_fold_too_and_the_first_wins():
    vocabulary = Vocabulary(("The", "the", "Onion"))
    assert vocabulary.encode("the THE onion") == [1, 1, 3]
    assert vocabulary.words == ("The", "the", "Onion")
    exact = Vocabulary(("The", "the", "the"), fold_case=False)
    assert exact.encode("The the THE") == [1, 3]  # equal entries: the authors' dictionary keeps the last


def test_apostrophes_digits_and_other_scripts_are_words():
    vocabulary = Vocabulary(("don't", "2", "\u00e9clair", "\u8996\u983b"))
    assert vocabulary.encode("DON'T cut 2 \u00c9clair... \u8996\u983b!") == [1, 2, 3, 4]


def test_a_word_whose_lower_case_is_longer_stays_one_word():
    word = "\u0130stanbul"  # lower() makes two characters of its first letter, one of them no word character
    assert Vocabulary.build([word]).encode(word) == [1]


def test_build_orders_by_count_then_alphabet():
    captions = ["cut the onion", "Cut the pan", "the egg"]
    assert Vocabulary.build(captions).words == ("the", "cut", "egg", "onion", "pan")
    assert Vocabulary.build(reversed(captions)) == Vocabulary.build(captions)
    assert Vocabulary.build(captions, min_count=2).words == ("the", "cut")
    assert "Cut" in Vocabulary.build(captions, fold_case=False).words


def test_unknown_words_are_counted():
    vocabulary = Vocabulary(("cut",))
    assert vocabulary.unknown_words(["Cut the Onion", "the onion"]) == Counter({"the": 2, "onion": 2})


@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_save_and_load(tmp_path: Path, suffix: str):
    vocabulary = Vocabulary(("Cut", "don't", "\u00e9clair"), fold_case=suffix == ".txt")
    path = tmp_path / f"words{suffix}"
    vocabulary.save(path)
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    assert Vocabulary.load(path, fold_case=False).fold_case is False
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_load_npy_of_str_and_bytes(tmp_path: Path):
    np.save(tmp_path / "dict.npy", np.array(["cut", "\u00e9"]))
    assert Vocabulary.load(tmp_path / "dict.npy").words == ("cut", "\u00e9")
    np.save(tmp_path / "bytes.npy", np.array([b"cut", "\u00e9".encode()]))
    assert Vocabulary.load(str(tmp_path / "bytes.npy")).words == ("cut", "\u00e9")


def test_load_txt_with_windows_line_ends_and_mark(tmp_path: Path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"\xef\xbb\xbfcut\r\nonion")
    assert Vocabulary.load(path).words == ("cut", "onion")


def test_an_object_array_is_refused_with_a_way_to_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    np.save(tmp_path / "dict.npy", np.array(["cut", "onion"], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="refused because unpickling can run any code") as caught:
        Vocabulary.load(tmp_path / "dict.npy")
    command = str(caught.value).partition('python -c "')[2].removesuffix('"')
    monkeypatch.chdir(tmp_path)
    exec(command)
    assert Vocabulary.load(tmp_path / "dict_str.npy").words == ("cut", "onion")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("words.csv", b"cut", "a vocabulary is a file .npy, .txt, .json; got .csv"),
        ("words.txt", b"cut\n\nonion\n", "words.txt:2: an empty line"),
        ("words.txt", b"", "an empty line"),
        ("words.txt", b"\xff\xfe", "not text in UTF-8"),
        ("words.json", b'{"words": [1]}', "expected a list of words"),
        ("words.json", b'{"words": ["a"], "fold_case": 1}', "fold_case must be true or false"),
        ("words.json", b'["a",', "words.json:1: not valid JSON"),
        ("words.json", b"[]", "the vocabulary is empty"),
        ("words.npy", b"not an array", "not a readable .npy file"),
        ("words.npy", b"", "not a readable .npy file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        Vocabulary.load(tmp_path / name)


def test_bad_arrays_and_missing_files(tmp_path: Path):
    np.save(tmp_path / "numbers.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"1-D array of str; got shape \(2, 2\), dtype float64"):
        Vocabulary.load(tmp_path / "numbers.npy")
    with pytest.raises(DataError, match="no such vocabulary file"):
        Vocabulary.load(tmp_path / "nowhere.txt")


def test_bad_arguments(tmp_path: Path):
    vocabulary = Vocabulary(("cut",))
    with pytest.raises(ConfigError, match=r"single str 'cut the onion': put it in a list"):
        vocabulary.tokenize("cut the onion", 3)
    with pytest.raises(ConfigError, match="max_words must be at least 1; got 0"):
        vocabulary.tokenize(["cut"], 0)
    with pytest.raises(ConfigError, match="needs at least one word"):
        Vocabulary(())
    with pytest.raises(ConfigError, match="word 1 of the vocabulary is 7"):
        Vocabulary(("a", 7))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_count must be at least 1"):
        Vocabulary.build(["a"], min_count=0)
    with pytest.raises(DataError, match=r"occurs 3 times \(the most frequent word occurs 2 times\)"):
        Vocabulary.build(["a a b"], min_count=3)
    with pytest.raises(DataError, match="there is no word"):
        Vocabulary.build(["..."])
    with pytest.raises(ConfigError, match=r"saved as \.json or \.txt; got \.npy"):
        vocabulary.save(tmp_path / "words.npy")
    with pytest.raises(ConfigError, match=r"does not fit on a line of text; save as \.json"):
        Vocabulary(("a\nb",)).save(tmp_path / "words.txt")


def test_it_can_be_sent_to_workers():
    vocabulary = pickle.loads(pickle.dumps(Vocabulary(("cut", "onion"), fold_case=False)))
    assert vocabulary.encode("onion Cut cut") == [2, 1]


def test_importing_text_does_not_import_torch():
    code = "import sys, twinreel.text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
