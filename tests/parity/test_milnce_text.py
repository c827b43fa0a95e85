"""The tokenizer against the cases that the founding code returned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinreel.text import Vocabulary

TOKENIZER = json.loads((Path(__file__).parent / "golden" / "milnce_data.json").read_text())["tokenizer"]
CASES = [
    (float("nan") if case["text"] == "NaN (float)" else case["text"], case["max_words"], case["ids"])
    for case in TOKENIZER["cases"]
]


@pytest.mark.parametrize(("text", "max_words", "ids"), CASES)
def test_founding_tokens(text: object, max_words: int, ids: list[int]):
    vocabulary = Vocabulary(tuple(TOKENIZER["dictionary"]), fold_case=False)
    assert vocabulary.tokenize([text], max_words).tolist() == [ids]


def test_folding_changes_only_the_capitalized_case():
    vocabulary = Vocabulary(tuple(TOKENIZER["dictionary"]))
    changed = {str(text) for text, max_words, ids in CASES if vocabulary.tokenize([text], max_words).tolist() != [ids]}
    assert changed == {"Add The Onion"}
    assert vocabulary.tokenize(["Add The Onion"], 6).tolist() == [[1, 2, 3, 0, 0, 0]]


def test_nan_is_read_as_a_word():
    assert Vocabulary(("nan",), fold_case=False).encode(float("nan")) == [1]
