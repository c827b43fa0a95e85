"""BERT (arXiv:1810.04805) over a text and a grid of visual tokens, as ClipBERT (arXiv:2102.06183) puts them together.

The sequence is the text, padded to a fixed length, then the grid, row by row. A visual token is what the CNN saw at its
place plus what its row, its column and its kind add; nothing tells frames or clips apart. Sub-modules have the names of
the authors' code (that of Hugging Face's BERT of its time), so that its weights load. What differs: attention is
PyTorch's own, a grid is embedded once however many texts it is compared with, and the visual position table, which the
authors' code never reads, does not exist. Numbers are compared in tests/parity/test_clipbert_network.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError

__all__ = ["INITIAL_STD", "LAYER_NORM_EPS", "Bert", "initialize_bert"]

LAYER_NORM_EPS = 1e-12
INITIAL_STD = 0.02
# Added to the scores of padding, not minus infinity: the same after the softmax, and a row of nothing else is no NaN.
PADDING_SCORE = -10000.0
MAX_GRID_SIDE = 100


class TextEmbeddings(nn.Module):
    """Word ids (N, L) -> (N, L, hidden_size): word, place and kind, normalized."""

    def __init__(self, vocab_size: int, hidden_size: int, max_positions: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_positions, hidden_size)
        self.token_type_embeddings = nn.Embedding(2, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, LAYER_NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ids; all of a text is of kind 0.

        Raises:
            ConfigError: the text is longer than there are places.
        """
        length, places = tokens.shape[1], self.position_embeddings.num_embeddings
        if length > places:
            raise ConfigError(f"texts of {length} tokens: this model has {places} places (max_positions)")
        embeddings = self.word_embeddings(tokens) + self.position_embeddings.weight[:length]
        normalized: Tensor = self.LayerNorm(embeddings + self.token_type_embeddings.weight[0])
        return normalized


class VisualEmbeddings(nn.Module):
    """A grid (B, h, w, hidden_size) -> visual tokens (B, h * w, hidden_size), row by row, normalized."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.row_position_embeddings = nn.Embedding(MAX_GRID_SIDE, hidden_size)
        self.col_position_embeddings = nn.Embedding(MAX_GRID_SIDE, hidden_size)
        self.token_type_embeddings = nn.Embedding(1, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, LAYER_NORM_EPS)

    def forward(self, grid: Tensor) -> Tensor:
        """What was seen at a place, plus its row, its column and the kind of visual tokens.

        Raises:
            ConfigError: a side of the grid is above 100.
        """
        height, width = grid.shape[1:3]
        if max(height, width) > MAX_GRID_SIDE:
            raise ConfigError(
                f"a grid of {height} x {width}: ClipBERT has {MAX_GRID_SIDE} rows and columns; use a smaller crop_size "
                "or a larger grid_pool"
            )
        rows = self.row_position_embeddings.weight[:height, None]
        columns = self.col_position_embeddings.weight[None, :width]
        tokens = (grid + rows + columns).flatten(1, 2)
        normalized: Tensor = self.LayerNorm(tokens + self.token_type_embeddings.weight[0])
        return normalized


class SelfAttention(nn.Module):
    """Tokens (N, S, hidden_size) -> (N, S, hidden_size): what each token takes from all that are not padding."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Softmax attention; `mask` (N, 1, 1, S) is added to the scores."""
        query, key, value = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, mask.to(query.dtype), dropout)
        return attended.transpose(1, 2).flatten(2)


class _Output(nn.Module):
    """Linear and dropout, added to the layer's input, normalized."""

    def __init__(self, in_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(in_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, LAYER_NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor, inputs: Tensor) -> Tensor:
        normalized: Tensor = self.LayerNorm(self.dropout(self.dense(values)) + inputs)
        return normalized


class _Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.self = SelfAttention(hidden_size, num_heads, dropout)
        self.output = _Output(hidden_size, hidden_size, dropout)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        attended: Tensor = self.output(self.self(tokens, mask), tokens)
        return attended


class _Intermediate(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, intermediate_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.gelu(self.dense(tokens))


class BertLayer(nn.Module):
    """Tokens (N, S, hidden_size) -> the same: attention, then two linear layers with GELU, a norm after each."""

    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(hidden_size, num_heads, dropout)
        self.intermediate = _Intermediate(hidden_size, intermediate_size)
        self.output = _Output(intermediate_size, hidden_size, dropout)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """`mask` (N, 1, 1, S) is added to the scores of attention."""
        attended = self.attention(tokens, mask)
        output: Tensor = self.output(self.intermediate(attended), attended)
        return output


class _Encoder(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            tokens = layer(tokens, mask)
        return tokens


class _Pooler(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, sequence: Tensor) -> Tensor:
        return torch.tanh(self.dense(sequence[:, 0]))


class Bert(nn.Module):
    """Texts and visual tokens -> the sequence (N, L + V, hidden_size) and its pooled first token (N, hidden_size).

    Args:
        vocab_size: rows of the word table.
        hidden_size: a multiple of num_heads.
        num_layers: of the encoder.
        num_heads: of attention.
        intermediate_size: of the layers' inner linear layer.
        max_positions: the longest text, tokens.
        dropout: of embeddings, attention and layers, from 0 to below 1.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        max_positions: int,
        dropout: float,
    ) -> None:
        super().__init__()
        sizes = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "intermediate_size": intermediate_size,
            "max_positions": max_positions,
        }
        _check_bert(sizes, dropout)
        self.embeddings = TextEmbeddings(vocab_size, hidden_size, max_positions)
        self.visual_embeddings = VisualEmbeddings(hidden_size)
        self.encoder = _Encoder(
            [BertLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )
        self.pooler = _Pooler(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, padding: Tensor, visual: Tensor) -> tuple[Tensor, Tensor]:
        """The sequence and its pooled first token.

        Args:
            tokens: word ids int64 (N, L).
            padding: bool (N, L), True where there is no word.
            visual: visual tokens (N, V, hidden_size) of `visual_embeddings`; all of them are attended to.
        """
        sequence = torch.cat([self.embeddings(tokens), visual], dim=1)
        mask = sequence.new_zeros(sequence.shape[:2])
        mask[:, : tokens.shape[1]].masked_fill_(padding, PADDING_SCORE)
        sequence = self.encoder(self.dropout(sequence), mask[:, None, None])
        return sequence, self.pooler(sequence)


def initialize_bert(module: nn.Module, std: float = INITIAL_STD) -> None:
    """BERT's start values: linear layers and tables from a normal of deviation `std`, biases 0, norms 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


def _check_bert(sizes: dict[str, int], dropout: float) -> None:
    problems = [f"{name} must be at least 1; got {size}" for name, size in sizes.items() if size < 1]
    if not problems and sizes["hidden_size"] % sizes["num_heads"] != 0:
        problems.append(
            f"hidden_size must be a multiple of num_heads; got {sizes['hidden_size']} and {sizes['num_heads']}"
        )
    if not 0 <= dropout < 1:
        problems.append(f"dropout must be from 0 to below 1; got {dropout!r}")
    if problems:
        raise ConfigError("ClipBERT: " + "; ".join(problems))
