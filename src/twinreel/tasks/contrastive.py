"""The contrastive task: two towers into one space. Batch -> model -> loss, and how its embeddings are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.data.clip import Batch
from twinreel.losses import equal_texts

__all__ = ["Contrastive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrastive:
    """Video and text embeddings under a loss that sees all pairs of a batch.

    `loss` is called as `loss(video_embeddings (B, D), text_embeddings (B * K, D), mask=(B, K), valid=(B,),
    same_text=(B, B * K), **loss_options)`.
    """

    loss: Callable[..., Tensor]
    num_candidates: int = 1
    max_words: int = 20
    loss_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def normalize(self) -> bool:
        """Whether embeddings are compared at unit length; search and evaluation follow the loss."""
        return bool(self.loss_options.get("normalize", False))

    def compute_loss(self, model: nn.Module, video: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss of a micro-batch, and over how many rows it is the mean.

        Args:
            model: anything with `encode_video` and `encode_text`.
            video: network input (B, 3, T, H, W).
            batch: the captions and masks that belong to it.

        Returns:
            A scalar, float32 whatever the precision of the towers; the number of valid rows with a real caption.
        """
        sentences = [text for candidates in batch.captions for text in candidates]
        text, known = self._text_input(model, sentences, self.max_words)
        mask = batch.caption_mask & known.view(batch.caption_mask.shape)
        towers: Any = model
        loss = self._loss(towers.encode_video(video), towers.encode_text(text), batch.captions, mask, batch.valid)
        return loss, int((batch.valid & mask.any(1)).sum())

    def pair_loss(self, video_embeddings: Tensor, text_embeddings: Tensor, captions: list[list[str]]) -> Tensor:
        """The loss of embeddings that exist already: (B, D), (B * K, D) and B lists of K sentences, all real."""
        mask = torch.ones(len(captions), len(captions[0]), dtype=torch.bool)
        return self._loss(video_embeddings, text_embeddings, captions, mask, torch.ones(len(captions)).bool())

    def _loss(self, video: Tensor, text: Tensor, captions: list[list[str]], mask: Tensor, valid: Tensor) -> Tensor:
        device = video.device
        with torch.autocast(device.type, enabled=False):
            return self.loss(
                _at_least_float32(video),
                _at_least_float32(text),
                mask=mask.to(device),
                valid=valid.to(device),
                same_text=equal_texts(captions, mask).to(device),
                **self.loss_options,
            )

    def encode_video(self, model: nn.Module, video: Tensor) -> Tensor:
        """Embeddings as they are compared: float32 (B, D), unit length if the loss normalizes."""
        towers: Any = model
        return self._comparable(towers.encode_video(video))

    def encode_text(self, model: nn.Module, sentences: Sequence[str], max_words: int) -> Tensor:
        """Embeddings as they are compared: float32 (N, D), unit length if the loss normalizes."""
        towers: Any = model
        text, _ = self._text_input(model, list(sentences), max_words)
        return self._comparable(towers.encode_text(text))

    def combine_views(self, embeddings: Tensor) -> Tensor:
        """(B, N, D) embeddings of N views -> (B, D): their mean, again at unit length if the loss normalizes."""
        mean = embeddings.mean(1)
        return functional.normalize(mean, dim=-1) if self.normalize else mean

    def _comparable(self, embeddings: Tensor) -> Tensor:
        embeddings = embeddings.float()
        return functional.normalize(embeddings, dim=-1) if self.normalize else embeddings

    def _text_input(self, model: nn.Module, sentences: list[str], max_words: int) -> tuple[Any, Tensor]:
        """What `encode_text` gets, and which sentences say anything: a caption without a known word is masked."""
        towers: Any = model
        if getattr(model, "tokenize", None) is None:
            return sentences, torch.tensor([bool(text.strip()) for text in sentences])
        tokens = towers.tokenize(sentences, max_words)
        return tokens, (tokens != 0).any(-1).cpu()


def _at_least_float32(embeddings: Tensor) -> Tensor:
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()
