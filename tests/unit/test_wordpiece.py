"""WordPiece: BERT's rules, vocab.txt and json, a list built from captions, padding to a fixed length."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from twinreel.errors import ConfigError, DataError
from twinreel.text import Vocabulary
from twinreel.wordpiece import SPECIAL_PIECES, WordPiece, load_vocabulary

PIECES = (*SPECIAL_PIECES, "a", "man", "##s", "un", "##aff", "##able", "evian", ",", "!", "\u65e5", "[", "sep", "]")
CAPTIONS = ["A man rides a horse.", "Two horses, riding!", "the rider's men", "\u00c9t\u00e9 unbelievably ridden"] * 3


@pytest.fixture
def pieces() -> WordPiece:
    return WordPiece(PIECES)


def test_rules_of_bert_base_uncased(pieces: WordPiece):
    def split(text: object) -> list[str]:
        return [pieces.words[row] for row in pieces.encode(text)]

    assert split("A MAN, unaffable!") == ["a", "man", ",", "un", "##aff", "##able", "!"]
    assert split("\u00c9vian \u65e5\u65e5") == ["evian", "\u65e5", "\u65e5"]  # accents off, Chinese characters apart
    assert split("mans a\tman\x00\ufffd zebra") == ["man", "##s", "a", "man", "[UNK]"]
    assert split("a" + "man" * 50) == ["[UNK]"] and split("") == [] and split(7) == ["[UNK]"]
    assert split("\ud800a") == ["a"]  # half a character, as a damaged file gives it


def test_text_makes_no_special_pieces(pieces: WordPiece):
    assert [pieces.words[row] for row in pieces.encode("a [SEP] [PAD]")] == ["a", "[", "sep", "]", "[", "[UNK]", "]"]
    assert not {pieces.pad_id, pieces.cls_id, pieces.sep_id, pieces.mask_id} & set(pieces.encode("[CLS] [MASK] [PAD]"))


def test_case_is_kept_on_request():
    cased = WordPiece((*SPECIAL_PIECES, "Man", "man"), fold_case=False)
    assert cased.encode("Man man MAN") == [5, 6, cased.unk_id]
    assert WordPiece(cased.words).encode("Man man") == [6, 6]


def test_always_padded_cut_at_the_end(pieces: WordPiece):
    tokens = pieces.tokenize(["a man", "", "a a a a a a"], 5)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [[2, 5, 6, 3, 0], [2, 3, 0, 0, 0], [2, 5, 5, 5, 3]]
    assert pieces.tokenize([], 5).shape == (0, 5)


def test_special_pieces_may_be_anywhere():  # in the vocab.txt of bert-base-uncased [UNK] is 100
    pieces = WordPiece(("a", "[MASK]", "[SEP]", "man", "[CLS]", "[UNK]", "[PAD]"))
    assert (pieces.pad_id, pieces.unk_id, pieces.cls_id, pieces.sep_id, pieces.mask_id) == (6, 5, 4, 2, 1)
    assert pieces.tokenize(["a zebra"], 5).tolist() == [[4, 0, 5, 2, 6]]
    assert pieces.num_embeddings == len(pieces) == 7


def test_unknown_words_are_counted(pieces: WordPiece):
    assert pieces.unknown_words(["A Zebra!", "zebra mans"]) == Counter({"zebra": 2})


BUILD = f"from twinreel.wordpiece import WordPiece; print(WordPiece.build({CAPTIONS!r}, size=70).words)"


def test_building_is_the_same_in_every_process_and_order():
    one = WordPiece.build(CAPTIONS, size=70)
    assert one == WordPiece.build(reversed(CAPTIONS), size=70) and len(one) == 70
    for seed in ("1", "2"):
        run = [sys.executable, "-c", BUILD]
        result = subprocess.run(run, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed})
        assert result.stdout.strip() == ascii(one.words) or result.stdout.strip() == repr(one.words)


def test_built_pieces_cover_their_captions():
    one = WordPiece.build(CAPTIONS)
    assert one.words[:5] == SPECIAL_PIECES and one.unknown_words(CAPTIONS) == Counter()
    assert [one.words[row] for row in one.encode("A HORSE rides")] == ["a", "horse", "rides"]
    few = WordPiece.build(CAPTIONS, size=60)
    assert len(few) == 60 and few.unknown_words(CAPTIONS) == Counter()
    assert len(few.encode("unbelievably")) > 2
    assert len(WordPiece.build(CAPTIONS, min_count=4)) < len(one)
    assert "Two" in WordPiece.build(CAPTIONS, fold_case=False).words


def test_building_leaves_no_threads_that_warn_in_forked_workers():
    code = BUILD + "; import os; pid = os.fork(); os._exit(0) if pid == 0 else os.wait(); print(os.environ)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "" and "TOKENIZERS_PARALLELISM" not in result.stdout


@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_save_and_load(tmp_path: Path, pieces: WordPiece, suffix: str):
    path = tmp_path / f"pieces{suffix}"
    pieces.save(path)
    pieces.save(path)
    assert WordPiece.load(path) == pieces
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert pickle.loads(pickle.dumps(pieces)) == pieces
    assert pickle.loads(pickle.dumps(pieces)).encode("a man") == [5, 6]


def test_case_is_saved_in_json_only(tmp_path: Path):
    cased = WordPiece(PIECES, fold_case=False)
    cased.save(tmp_path / "a.json")
    assert WordPiece.load(tmp_path / "a.json").fold_case is False
    assert WordPiece.load(tmp_path / "a.json", fold_case=True).fold_case is True
    with pytest.raises(ConfigError, match=r"a .txt cannot say fold_case=False; save as .json"):
        cased.save(tmp_path / "a.txt")


def test_a_folder_of_hugging_face(tmp_path: Path, pieces: WordPiece):
    pieces.save(tmp_path / "vocab.txt")
    assert WordPiece.load(tmp_path) == pieces
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert WordPiece.load(tmp_path / "vocab.txt").fold_case is False
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": 1}')
    with pytest.raises(DataError, match="do_lower_case must be true or false; got 1"):
        WordPiece.load(tmp_path)


def test_load_vocabulary_reads_both_kinds(tmp_path: Path, pieces: WordPiece):
    words = Vocabulary(("cut", "onion"), fold_case=False)
    words.save(tmp_path / "words.json")
    pieces.save(tmp_path / "pieces.json")
    assert load_vocabulary(tmp_path / "words.json") == words
    assert load_vocabulary(tmp_path / "pieces.json") == pieces
    with pytest.raises(DataError, match="a list of words, not of WordPiece pieces"):
        WordPiece.load(tmp_path / "words.json")
    with pytest.raises(DataError, match="no such vocabulary file"):
        load_vocabulary(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "a WordPiece list is a file .txt or .json; got .csv"),
        ("a.txt", b"[PAD]\n\n[UNK]\n", "a.txt:2: an empty line"),
        ("a.txt", b"cut\nonion\n", r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]; a WordPiece list, such as"),
        ("a.txt", "\n".join([*PIECES, "a"]).encode(), r"piece 18 of the vocabulary, 'a', is piece 5 too"),
        ("a.json", b'{"kind": "wordpiece"}', "expected a list of pieces under 'words'"),
        ("a.json", b'{"kind": "wordpiece", "words": [1]}', "piece 0 of the vocabulary is 1; it must be a str"),
        ("a.json", b'{"model": {"type": "WordPiece"}}', "a whole tokenizer; name the vocab.txt beside it"),
        ("a.json", b'{"kind": "x"}', "no WordPiece list: expected"),
        ("a.json", b'["a",', "a.json:1: not valid JSON"),
        ("a.json", b"\xff", "not text in UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        WordPiece.load(tmp_path / name)


def test_bad_arguments(tmp_path: Path, pieces: WordPiece):
    with pytest.raises(ConfigError, match="single str 'a man': put it in a list"):
        pieces.tokenize("a man", 5)
    with pytest.raises(ConfigError, match=r"max_tokens must be at least 3, for \[CLS\], one piece and \[SEP\]; got 2"):
        pieces.tokenize(["a man"], 2)
    with pytest.raises(ConfigError, match=r"size must be at least \d+ for these captions.*; got 10"):
        WordPiece.build(CAPTIONS, size=10)
    with pytest.raises(ConfigError, match="min_count must be at least 1; got 0"):
        WordPiece.build(CAPTIONS, min_count=0)
    with pytest.raises(DataError, match="no word in the captions"):
        WordPiece.build(["", " "])
    with pytest.raises(ConfigError, match=r"saved as \.json or \.txt; got \.npy"):
        pieces.save(tmp_path / "a.npy")


def test_importing_it_does_not_import_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, twinreel.wordpiece; sys.exit('torch' in sys.modules)"], check=True
    )


def test_json_is_plain(tmp_path: Path, pieces: WordPiece):
    pieces.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["kind"] == "wordpiece"


def test_a_vocab_txt_is_told_from_a_list_of_words(tmp_path):
    pieces, words = tmp_path / "vocab.txt", tmp_path / "words.txt"
    pieces.write_text("\n".join([*SPECIAL_PIECES, "cat", "##s"]) + "\n")
    words.write_text("cat\nsee\n")
    assert isinstance(load_vocabulary(pieces), WordPiece) and isinstance(load_vocabulary(words), Vocabulary)
