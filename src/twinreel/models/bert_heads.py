"""What is asked of BERT's output: does the text fit the video, which answer is right, which words were masked.

Sub-modules have the names of the authors' code, so that its weights load. The head's last norm and the tied table are
those of Hugging Face's BERT of its time.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.bert import INITIAL_STD, LAYER_NORM_EPS, Bert, initialize_bert

__all__ = ["PretrainingHeads", "Transformer"]


class _Transform(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, LAYER_NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        normalized: Tensor = self.LayerNorm(functional.gelu(self.dense(tokens)))
        return normalized


class _WordPredictions(nn.Module):
    """Tokens (N, L, hidden_size) -> logits (N, L, vocab_size); the last layer's weight is the word table itself."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = _Transform(words.embedding_dim)
        self.decoder = nn.Linear(words.embedding_dim, words.num_embeddings)
        self.bias = self.decoder.bias  # the founding files have it under both names
        self.decoder.weight = words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform(tokens))
        return logits


class PretrainingHeads(nn.Module):
    """The two heads of image-text pretraining: masked words, and whether the text belongs to the picture."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.predictions = _WordPredictions(words)
        self.seq_relationship = nn.Linear(words.embedding_dim, 2)


class Transformer(nn.Module):
    """BERT with the head that the task asks for.

    Args:
        bert: the encoder.
        num_outputs: of the head `classifier`: dropout, a linear layer twice as wide, ReLU, a linear layer.
        dropout: before that head.
        pretraining_heads: the heads `cls` of pretraining instead; its second one has two outputs, and so must
            num_outputs.
        initial_std: deviation of the normal that linear layers and tables start from.

    Raises:
        ConfigError: num_outputs is below 1, or not 2 with the heads of pretraining.
    """

    def __init__(
        self,
        bert: Bert,
        num_outputs: int,
        dropout: float,
        pretraining_heads: bool,
        initial_std: float = INITIAL_STD,
    ) -> None:
        super().__init__()
        if num_outputs < 1:
            raise ConfigError(f"num_outputs must be at least 1; got {num_outputs}")
        if pretraining_heads and num_outputs != 2:
            raise ConfigError(
                f"the heads of pretraining tell two things apart, fits and does not fit: num_outputs must be 2; got "
                f"{num_outputs}"
            )
        self.num_outputs = num_outputs
        self.bert = bert
        self.dropout = nn.Dropout(dropout)
        words = bert.embeddings.word_embeddings
        hidden_size = words.embedding_dim
        if not pretraining_heads:
            self.classifier = nn.Sequential(
                nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, num_outputs)
            )
        initialize_bert(self, initial_std)
        self.cls: PretrainingHeads | None = None
        if pretraining_heads:
            self.cls = PretrainingHeads(words)
            initialize_bert(self.cls, initial_std)

    def forward(self, tokens: Tensor, padding: Tensor, visual: Tensor) -> Tensor:
        """Logits (N, num_outputs) of texts and visual tokens, see `Bert.forward`."""
        _, pooled = self.bert(tokens, padding, visual)
        logits: Tensor = self.cls.seq_relationship(pooled) if self.cls else self.classifier(self.dropout(pooled))
        return logits

    def pretraining(self, tokens: Tensor, padding: Tensor, visual: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, L, vocab_size) of the words at each place of the text, and (N, 2) of whether it fits.

        Raises:
            ConfigError: this transformer has no heads of pretraining.
        """
        if self.cls is None:
            raise ConfigError("this model has no heads of pretraining; create it with pretraining_heads=True")
        sequence, pooled = self.bert(tokens, padding, visual)
        words: Tensor = self.cls.predictions(sequence[:, : tokens.shape[1]])
        fits: Tensor = self.cls.seq_relationship(pooled)
        return words, fits
