"""Text networks over word ids: the founding one of MIL-NCE (arXiv:1912.06430), and the mean of word embeddings.

Sub-modules of `WordMaxTower` have the names of the authors' code. What differs from it: the word table may be random
and trained. Numbers are compared in tests/parity/test_milnce_s3dg.py.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.weights import read_tensor
from twinreel.text import Vocabulary

__all__ = ["TextTowerName", "WordMaxTower", "WordMeanTower", "build_text_tower"]

TextTowerName: TypeAlias = Literal["word_max", "word_mean"]


class WordMaxTower(nn.Module):
    """Tokens (N, W) -> embeddings (N, embedding_size): table, Linear, ReLU, max over words, Linear.

    The maximum is over all W positions, padding included, as in the authors' code: the padding row is a floor under
    every caption shorter than W, so captions must always be padded, but the number of padded positions (above none)
    does not change the result. A caption of nothing but padding gives that floor.

    Args:
        num_embeddings: rows of the word table, with the padding row 0.
        embedding_size: size of the joint space.
        word_embedding_size: columns of the word table.
        hidden_size: features over which the maximum is taken.
        word_vectors: start values of the table, float (num_embeddings, word_embedding_size); None means random with
            a padding row of zeros.
        train_word_vectors: None means that a random table is trained and a given one is not.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: int,
        word_embedding_size: int = 300,
        hidden_size: int = 2048,
        *,
        word_vectors: Tensor | None = None,
        train_word_vectors: bool | None = None,
    ) -> None:
        super().__init__()
        self.embedding_size = embedding_size
        self.word_embd = _word_table(num_embeddings, word_embedding_size, word_vectors, train_word_vectors)
        self.fc1 = nn.Linear(word_embedding_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, embedding_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (N, embedding_size) of word ids int64 (N, W)."""
        words = functional.relu(self.fc1(self.word_embd(tokens)))
        embeddings: Tensor = self.fc2(words.amax(dim=1))
        return embeddings


class WordMeanTower(nn.Module):
    """Tokens (N, W) -> embeddings (N, embedding_size): mean of the real words' rows of the table, then Linear.

    Padding (id 0) takes no part; a caption of nothing but padding counts as a mean of zeros.

    Args:
        num_embeddings: rows of the word table, with the padding row 0.
        embedding_size: size of the joint space.
        word_embedding_size: columns of the word table.
        word_vectors: as for `WordMaxTower`.
        train_word_vectors: as for `WordMaxTower`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: int,
        word_embedding_size: int = 300,
        *,
        word_vectors: Tensor | None = None,
        train_word_vectors: bool | None = None,
    ) -> None:
        super().__init__()
        self.embedding_size = embedding_size
        self.word_embd = _word_table(num_embeddings, word_embedding_size, word_vectors, train_word_vectors)
        self.fc = nn.Linear(word_embedding_size, embedding_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (N, embedding_size) of word ids int64 (N, W)."""
        real = (tokens != 0).unsqueeze(-1)
        words = self.word_embd(tokens)
        mean = (words * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        embeddings: Tensor = self.fc(mean)
        return embeddings


def _word_table(rows: int, columns: int, word_vectors: Tensor | None, train: bool | None) -> nn.Embedding:
    if rows < 2 or columns < 1:
        raise ConfigError(
            f"a word table needs at least 2 rows (padding and a word) and 1 column; got {rows} x {columns}"
        )
    table = nn.Embedding(rows, columns)
    with torch.no_grad():
        if word_vectors is None:
            table.weight[0].zero_()
        elif word_vectors.shape == table.weight.shape:
            table.weight.copy_(word_vectors)
        else:
            raise ConfigError(f"word vectors {tuple(word_vectors.shape)} do not fit a word table of {rows} x {columns}")
    table.weight.requires_grad_(train if train is not None else word_vectors is None)
    return table


def build_text_tower(
    name: TextTowerName,
    *,
    embedding_size: int,
    vocabulary: Vocabulary | None,
    num_words: int | None,
    word_embedding_size: int,
    hidden_size: int,
    word_vectors: str | None,
    train_word_vectors: bool | None,
) -> nn.Module | None:
    """The tower of that name, or None where nothing says how many rows its word table has.

    Args:
        name: `word_max` or `word_mean`.
        embedding_size: size of the joint space.
        vocabulary: its `num_embeddings` are the table's rows.
        num_words: the table's rows, padding row included, where there is no vocabulary.
        word_embedding_size: columns of the word table.
        hidden_size: of `word_max`; `word_mean` has none.
        word_vectors: file with the table's start values, a tensor (rows, word_embedding_size).
        train_word_vectors: None means that a random table is trained and one from a file is not.

    Raises:
        ConfigError: unknown name, or sizes that contradict each other.
        CheckpointError: the file of word vectors cannot be read.
    """
    if name not in ("word_max", "word_mean"):
        raise ConfigError(f"text_tower must be word_max or word_mean; got {name!r}")
    vectors = None if word_vectors is None else read_tensor(word_vectors)
    sizes = {
        f"num_words={num_words}": num_words,
        "the vocabulary with its padding row": None if vocabulary is None else vocabulary.num_embeddings,
        f"word_vectors {word_vectors}": None if vectors is None else vectors.shape[0],
    }
    stated = {source: rows for source, rows in sizes.items() if rows is not None}
    if not stated:
        return None
    if len(set(stated.values())) > 1:
        listed = ", ".join(f"{source}: {rows}" for source, rows in stated.items())
        raise ConfigError(
            f"the rows of the word table are stated differently ({listed}); a wrong word list would give "
            "every word another word's vector"
        )
    if vectors is not None and vectors.shape[1] != word_embedding_size:
        raise ConfigError(
            f"{word_vectors}: word vectors of size {vectors.shape[1]}, but word_embedding_size is "
            f"{word_embedding_size}; set word_embedding_size={vectors.shape[1]}"
        )
    rows = next(iter(stated.values()))
    if name == "word_mean":
        return WordMeanTower(
            rows, embedding_size, word_embedding_size, word_vectors=vectors, train_word_vectors=train_word_vectors
        )
    return WordMaxTower(
        rows,
        embedding_size,
        word_embedding_size,
        hidden_size,
        word_vectors=vectors,
        train_word_vectors=train_word_vectors,
    )
