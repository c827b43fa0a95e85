"""Captions into word ids: the word list of MIL-NCE (arXiv:1912.06430), with case folding as its default.

A word is a run of letters, digits, underscores and apostrophes. Word i of the list has id i + 1; id 0 is padding.
The authors' code does not fold case, so that a capitalized caption becomes nothing but padding; `fold_case=False`
gives exactly that behavior. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twinreel.errors import ConfigError, DataError

__all__ = ["Vocabulary", "write_whole"]

_WORD = re.compile(r"[\w']+")
_SUFFIXES = (".npy", ".txt", ".json")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words a text tower knows, in the order of the rows of its table.

    `words` is kept as written: folding happens in the look-up, so the list can be saved and read back unchanged.
    Where two entries fold to the same word the first one is found (with `fold_case=False` the last of equal entries,
    as in the authors' code); the row of the other is never used.
    """

    words: tuple[str, ...]
    fold_case: bool = True
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.words:
            raise ConfigError("a vocabulary needs at least one word; got none")
        ids: dict[str, int] = {}
        for position, word in enumerate(self.words):
            if not isinstance(word, str):
                raise ConfigError(f"word {position} of the vocabulary is {word!r}; it must be a str")
            if self.fold_case:
                ids.setdefault(word.lower(), position + 1)
            else:
                ids[word] = position + 1
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int = 1, fold_case: bool = True) -> Vocabulary:
        """The words of a collection, most frequent first, ties in alphabetical order.

        Args:
            captions: sentences; each counts as often as it occurs.
            min_count: words that occur less often are left out (>= 1).
            fold_case: count `Onion` and `onion` as one word.

        Raises:
            ConfigError: min_count is below 1.
            DataError: no word is left.
        """
        if min_count < 1:
            raise ConfigError(f"min_count must be at least 1; got {min_count}")
        counts: Counter[str] = Counter()
        for caption in _sentences(captions):
            counts.update(_split(caption, fold_case))
        kept = [word for word, count in counts.items() if count >= min_count]
        if not kept:
            most = f"the most frequent word occurs {max(counts.values())} times" if counts else "there is no word"
            raise DataError(f"no word of the captions occurs {min_count} times ({most})")
        return cls(tuple(sorted(kept, key=lambda word: (-counts[word], word))), fold_case)

    @classmethod
    def load(cls, path: str | Path, fold_case: bool | None = None) -> Vocabulary:
        """The word list of a file: `.npy` (an array of str), `.txt` (a word a line) or `.json`.

        Args:
            path: the file.
            fold_case: None means what a `.json` written by `save` says, and True for other files.

        Raises:
            DataError: the file is missing, damaged, holds no word list, or would need unpickling.
        """
        path = Path(path).expanduser()
        if path.suffix not in _SUFFIXES:
            raise DataError(f"{path}: a vocabulary is a file {', '.join(_SUFFIXES)}; got {path.suffix or 'no suffix'}")
        if not path.is_file():
            raise DataError(f"{path}: no such vocabulary file")
        stated: bool | None = None
        if path.suffix == ".npy":
            words = _read_npy(path)
        elif path.suffix == ".txt":
            words = _read_txt(path)
        else:
            words, stated = _read_json(path)
        if not words:
            raise DataError(f"{path}: the vocabulary is empty")
        if fold_case is None:
            fold_case = True if stated is None else stated
        return cls(tuple(words), fold_case)

    def save(self, path: str | Path) -> None:
        """Write the word list: `.json` keeps `fold_case`, `.txt` is a word a line. An old file is replaced whole.

        Raises:
            ConfigError: another suffix, or a word that a line of text cannot hold.
        """
        path = Path(path).expanduser()
        if path.suffix == ".json":
            text = json.dumps({"fold_case": self.fold_case, "words": self.words}, ensure_ascii=False, indent=0)
        elif path.suffix == ".txt":
            broken = [word for word in self.words if not word or "\n" in word or "\r" in word]
            if broken:
                raise ConfigError(f"{path}: the word {broken[0]!r} does not fit on a line of text; save as .json")
            text = "\n".join(self.words)
        else:
            raise ConfigError(f"{path}: a vocabulary is saved as .json or .txt; got {path.suffix or 'no suffix'}")
        write_whole(path, text)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table that this list needs: its words and the padding row 0."""
        return len(self.words) + 1

    def encode(self, text: object) -> list[int]:
        """The ids of the known words of `str(text)`, in order; unknown words are left out."""
        return [self._ids[word] for word in _split(text, self.fold_case) if word in self._ids]

    def tokenize(self, captions: Iterable[object], max_words: int) -> npt.NDArray[np.int64]:
        """Word ids (N, max_words), cut at max_words or padded with 0; a caption without a known word is all 0.

        Raises:
            ConfigError: max_words is below 1, or captions is a single str.
        """
        if max_words < 1:
            raise ConfigError(f"max_words must be at least 1; got {max_words}")
        encoded = [self.encode(caption)[:max_words] for caption in _sentences(captions)]
        tokens = np.zeros((len(encoded), max_words), dtype=np.int64)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids)] = ids
        return tokens

    def unknown_words(self, captions: Iterable[object]) -> Counter[str]:
        """How often each word that this list lacks occurs in the captions (folded if the list folds)."""
        unknown: Counter[str] = Counter()
        for caption in _sentences(captions):
            unknown.update(word for word in _split(caption, self.fold_case) if word not in self._ids)
        return unknown


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, flush and rename it: an old one is replaced whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _split(text: object, fold_case: bool) -> list[str]:
    # Splitting comes first: lower() can add a mark that is no word character, and the entries are folded the same way.
    words = _WORD.findall(str(text))
    return [word.lower() for word in words] if fold_case else words


def _sentences(captions: Iterable[object]) -> Iterable[object]:
    if isinstance(captions, str):
        raise ConfigError(
            f"captions must be a list of sentences; got the single str {captions[:40]!r}: put it in a list"
        )
    return captions


def _read_npy(path: Path) -> list[str]:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":  # NumPy would take it for a pickle
            raise DataError(f"{path}: not a readable .npy file: it does not begin like one")
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise DataError(f"{path}: not a readable .npy file: {error}") from error
        convert = f"np.save('{path.stem}_str.npy', np.load('{path.name}', allow_pickle=True).astype(str))"
        raise DataError(
            f"{path}: an array of Python objects, refused because unpickling can run any code. If you trust where it "
            f'comes from, convert it once: python -c "import numpy as np; {convert}"'
        ) from error
    except (EOFError, OSError) as error:
        raise DataError(f"{path}: not a readable .npy file: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "US":
        raise DataError(f"{path}: a vocabulary is a 1-D array of str; got shape {array.shape}, dtype {array.dtype}")
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    return [str(word) for word in array]


def _read_txt(path: Path) -> list[str]:
    lines = _read_text(path).removesuffix("\n").split("\n")
    words = [line.removesuffix("\r") for line in lines]
    for number, word in enumerate(words, start=1):
        if not word:
            # A skipped line would shift the ids of all words after it.
            raise DataError(f"{path}:{number}: an empty line; a vocabulary has one word on each line")
    return words


def _read_json(path: Path) -> tuple[list[str], bool | None]:
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    stated = content.get("fold_case") if isinstance(content, dict) else None
    words = content.get("words") if isinstance(content, dict) else content
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{path}: expected a list of words, or an object with the list under 'words'")
    if stated is not None and not isinstance(stated, bool):
        raise DataError(f"{path}: fold_case must be true or false; got {stated!r}")
    return words, stated


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
