"""Captions into pieces of words: the WordPiece of BERT, through the `tokenizers` library.

The rules are those of bert-base-uncased: control characters out, Chinese characters apart, lower case without accents
(unless `fold_case=False`), split at spaces and punctuation, then the longest pieces of the list from the left; a word
that cannot be put together, or has more than 100 characters, is [UNK]. Piece i of the list has id i, as line i of a
`vocab.txt`. Text never makes a special piece: a caption with "[SEP]" in it holds a bracket, a word and a bracket.
This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from twinreel.errors import ConfigError, DataError
from twinreel.text import Vocabulary, write_whole

__all__ = ["SPECIAL_PIECES", "WordPiece", "load_vocabulary"]

SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_KIND = "wordpiece"


@dataclass(frozen=True, slots=True)
class WordPiece:
    """The pieces that a BERT knows, in the order of the rows of its table.

    `words` are whole words, and `##` with what continues one. The five special pieces must be among them, anywhere;
    no piece may be there twice.
    """

    words: tuple[str, ...]
    fold_case: bool = True
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)
    _tokenizer: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids: dict[str, int] = {}
        for row, word in enumerate(self.words):
            if not isinstance(word, str):
                raise ConfigError(f"piece {row} of the vocabulary is {word!r}; it must be a str")
            if word in ids:
                raise ConfigError(
                    f"piece {row} of the vocabulary, {word!r}, is piece {ids[word]} too; the rows of the table would "
                    f"not be told apart: rename the one that is not used, for example to [unused_{row}]"
                )
            ids[word] = row
        missing = [piece for piece in SPECIAL_PIECES if piece not in ids]
        if missing:
            raise ConfigError(
                f"the vocabulary of {len(ids)} pieces lacks {', '.join(missing)}; a WordPiece list, such as the "
                "vocab.txt of bert-base-uncased, has all five special pieces"
            )
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "_tokenizer", _tokenizer(models.WordPiece(ids, unk_token="[UNK]"), self.fold_case))

    def __reduce__(self) -> tuple[type[WordPiece], tuple[tuple[str, ...], bool]]:
        return WordPiece, (self.words, self.fold_case)

    @classmethod
    def build(cls, captions: Iterable[str], size: int = 8000, min_count: int = 1, fold_case: bool = True) -> WordPiece:
        """The pieces that cover a collection best; the same captions, in any order, give the same list.

        First the special pieces, then the single characters, alone and as continuations, then pieces in the order in
        which the training of the `tokenizers` library joins them.

        Args:
            captions: sentences.
            size: the most pieces; fewer where every word is whole before.
            min_count: a piece is joined only if it occurs so often (>= 1).
            fold_case: as of the class.

        Raises:
            ConfigError: min_count is below 1, or size below what the special pieces and characters take.
            DataError: there is no word in the captions.
        """
        if min_count < 1:
            raise ConfigError(f"min_count must be at least 1; got {min_count}")
        tokenizer = _tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"), fold_case)
        counts = Counter(word for caption in _sentences(captions) for word in _split(tokenizer, caption))
        if not counts:
            raise DataError("no word in the captions to build a vocabulary of")
        # The library numbers continuations in the order of a hash table, and joins equally frequent pairs in the order
        # of their numbers. Listed among the special pieces they keep the numbers given here, so two runs agree.
        first = sorted({word[0] for word in counts})
        later = sorted({f"##{character}" for word in counts for character in word[1:]})
        fixed = [*SPECIAL_PIECES, *first, *later]
        if size < len(fixed):
            raise ConfigError(
                f"size must be at least {len(fixed)} for these captions: {len(SPECIAL_PIECES)} special pieces and "
                f"{len(fixed) - len(SPECIAL_PIECES)} for their characters; got {size}"
            )
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, min_frequency=min_count, special_tokens=fixed, show_progress=False
        )
        with _one_thread():
            tokenizer.train_from_iterator(sorted(counts.elements()), trainer)
        found = tokenizer.get_vocab(with_added_tokens=False)
        return cls(tuple(sorted(found, key=lambda piece: found[piece])), fold_case)

    @classmethod
    def load(cls, path: str | Path, fold_case: bool | None = None) -> WordPiece:
        """The list of a `vocab.txt` (a piece a line), of the folder that holds one, or of a `.json` from `save`.

        Args:
            path: the file or folder.
            fold_case: None means what the `.json` says, or the `do_lower_case` of a `tokenizer_config.json` beside the
                `vocab.txt`, else True.

        Raises:
            DataError: the file is missing, damaged, or holds no WordPiece list.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            path = path / "vocab.txt"
        if path.suffix == ".txt":
            words: Any = Vocabulary.load(path, fold_case=False).words
            stated = _lower_case_beside(path)
        elif path.suffix == ".json":
            content = _read_json(path)
            if content.get("kind") != _KIND:
                raise DataError(_no_wordpiece(path, content))
            words, stated = content.get("words"), content.get("fold_case")
        else:
            raise DataError(f"{path}: a WordPiece list is a file .txt or .json; got {path.suffix or 'no suffix'}")
        if not isinstance(words, list | tuple) or not isinstance(stated, bool | None):
            raise DataError(f"{path}: expected a list of pieces under 'words', and true or false under 'fold_case'")
        if fold_case is None:
            fold_case = True if stated is None else stated
        try:
            return cls(tuple(words), fold_case)
        except ConfigError as error:
            raise DataError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the list: `.json` keeps `fold_case`, `.txt` is a piece a line. An old file is replaced whole.

        Raises:
            ConfigError: another suffix; a piece that a line of text cannot hold, or a `fold_case=False` that it cannot.
        """
        path = Path(path).expanduser()
        if path.suffix == ".json":
            content = {"kind": _KIND, "fold_case": self.fold_case, "words": self.words}
            text = json.dumps(content, ensure_ascii=False, indent=0)
        elif path.suffix == ".txt":
            broken = [word for word in self.words if not word or "\n" in word or "\r" in word]
            if broken:
                raise ConfigError(f"{path}: the piece {broken[0]!r} does not fit on a line of text; save as .json")
            if not self.fold_case:
                raise ConfigError(f"{path}: a .txt cannot say fold_case=False; save as .json")
            text = "\n".join(self.words)
        else:
            raise ConfigError(f"{path}: a vocabulary is saved as .json or .txt; got {path.suffix or 'no suffix'}")
        write_whole(path, text)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table that this list needs."""
        return len(self.words)

    @property
    def pad_id(self) -> int:
        """The id of [PAD]."""
        return self._ids["[PAD]"]

    @property
    def unk_id(self) -> int:
        """The id of [UNK]."""
        return self._ids["[UNK]"]

    @property
    def cls_id(self) -> int:
        """The id of [CLS]."""
        return self._ids["[CLS]"]

    @property
    def sep_id(self) -> int:
        """The id of [SEP]."""
        return self._ids["[SEP]"]

    @property
    def mask_id(self) -> int:
        """The id of [MASK]."""
        return self._ids["[MASK]"]

    def encode(self, text: object) -> list[int]:
        """The ids of the pieces of `str(text)`, in order, without [CLS] and [SEP]."""
        ids: list[int] = self._tokenizer.encode(_valid(text), add_special_tokens=False).ids
        return ids

    def tokenize(self, captions: Iterable[object], max_tokens: int) -> npt.NDArray[np.int64]:
        """Ids (N, max_tokens): [CLS], the text cut at its end to fit, [SEP], then [PAD] up to max_tokens, always.

        Raises:
            ConfigError: max_tokens is below 3, or captions is a single str.
        """
        if max_tokens < 3:
            raise ConfigError(f"max_tokens must be at least 3, for [CLS], one piece and [SEP]; got {max_tokens}")
        encoded = [self.encode(caption)[: max_tokens - 2] for caption in _sentences(captions)]
        tokens = np.full((len(encoded), max_tokens), self.pad_id, dtype=np.int64)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids) + 2] = [self.cls_id, *ids, self.sep_id]
        return tokens

    def unknown_words(self, captions: Iterable[object]) -> Counter[str]:
        """How often each word that becomes [UNK] occurs in the captions (folded if the list folds)."""
        unknown: Counter[str] = Counter()
        for caption in _sentences(captions):
            unknown.update(word for word in _split(self._tokenizer, caption) if self.unk_id in self.encode(word))
        return unknown


def load_vocabulary(path: str | Path) -> Vocabulary | WordPiece:
    """A list of words, or of word pieces: a `.json` says what it is, a `.txt` of pieces has BERT's special ones.

    Raises:
        DataError: the file is missing, damaged, or holds neither.
    """
    path = Path(path).expanduser()
    if path.suffix == ".json" and path.is_file():
        content = _read_json(path)
        if content.get("kind") == _KIND:
            return WordPiece.load(path)
    words = Vocabulary.load(path)
    if path.suffix == ".txt" and set(SPECIAL_PIECES) <= set(words.words):
        return WordPiece.load(path)
    return words


def _tokenizer(model: models.Model, fold_case: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=fold_case
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _split(tokenizer: Any, text: object) -> list[str]:
    normalized = tokenizer.normalizer.normalize_str(_valid(text))
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


def _valid(text: object) -> str:
    # Half a surrogate pair is no character, and the library refuses the whole text; BERT's cleaning drops such things.
    return str(text).encode("utf-8", "ignore").decode("utf-8")


def _sentences(captions: Iterable[object]) -> Iterable[object]:
    if isinstance(captions, str):
        raise ConfigError(
            f"captions must be a list of sentences; got the single str {captions[:40]!r}: put it in a list"
        )
    return captions


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps the library's threads off: once they have run, every process that is forked later prints a warning."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such vocabulary file")
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error
    return content if isinstance(content, dict) else {"words": content}


def _no_wordpiece(path: Path, content: dict[str, Any]) -> str:
    if isinstance(content.get("model"), dict):  # tokenizer.json of the `tokenizers` library
        return f"{path}: a whole tokenizer; name the vocab.txt beside it"
    if "words" in content:
        return f"{path}: a list of words, not of WordPiece pieces; read it with twinreel.text.Vocabulary"
    return f"{path}: no WordPiece list: expected {{'kind': 'wordpiece', 'fold_case': ..., 'words': [...]}}"


def _lower_case_beside(path: Path) -> bool | None:
    settings = path.with_name("tokenizer_config.json")
    stated = _read_json(settings).get("do_lower_case") if settings.is_file() else None
    if not isinstance(stated, bool | None):
        raise DataError(f"{settings}: do_lower_case must be true or false; got {stated!r}")
    return stated
