"""S3D-G as a classifier: the video network of MIL-NCE with classes in the place of the joint space.

Keys are those of the two towers, behind `video_tower.`: weights of MIL-NCE load with `weights_scope="backbone"`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.classifier import HeadActivation, activate
from twinreel.models.layers import WeightInit
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.s3dg import S3DG

__all__ = ["S3DGClassifier", "s3dg_classifier", "s3dg_small_classifier"]


class S3DGClassifier(nn.Module):
    """Video (B, 3, T, H, W) -> logits (B, C) in train mode, scores (B, C) in eval mode.

    Its features are averaged over time and space before the classes, so there is one position for any size.

    Args:
        video_tower: its `embedding_size` is the number of classes.
        preprocessing: what it wants.
        dropout: before the classes.
        head_activation: of the scores.
    """

    head_prefixes: ClassVar[tuple[str, ...]] = ("video_tower.fc.", "text_tower.")

    def __init__(
        self, video_tower: S3DG, *, preprocessing: Preprocessing, dropout: float, head_activation: HeadActivation
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout must be from 0 to below 1; got {dropout}")
        activate(torch.zeros(1), head_activation)  # another activation is refused here, not at the first evaluation
        self.video_tower = video_tower
        self.preprocessing = preprocessing
        self.dropout = dropout
        self.head_activation: HeadActivation = head_activation

    @property
    def num_classes(self) -> int:
        """C."""
        return self.video_tower.fc.out_features

    def forward(self, video: Tensor) -> Tensor:
        """Logits in train mode, scores in eval mode, (B, C), of a float video (B, 3, T, H, W)."""
        features = functional.dropout(self.forward_features(video), self.dropout, self.training)
        logits: Tensor = self.video_tower.fc(features)
        return logits if self.training else activate(logits, self.head_activation)

    def forward_features(self, video: Tensor) -> Tensor:
        """`mixed_5c` averaged over time and space, (B, F)."""
        return self.video_tower.forward_features(video)

    def layer_groups(self) -> list[list[str]]:
        """The layers from the input to the classes, for layer-wise learning rates."""
        with_weights = [
            name for name, part in self.video_tower.named_children() if next(part.parameters(), None) is not None
        ]
        return [[f"video_tower.{name}"] for name in with_weights]

    def reset_head(self, num_classes: int) -> None:
        """New classes at random: N(0, 0.01), as the SlowFast code has it."""
        old = self.video_tower.fc
        self.video_tower.fc = nn.Linear(old.in_features, num_classes, device=old.weight.device, dtype=old.weight.dtype)
        self.video_tower.embedding_size = num_classes
        nn.init.normal_(self.video_tower.fc.weight, std=0.01)
        nn.init.zeros_(self.video_tower.fc.bias)


def s3dg_classifier(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    space_to_depth: bool = False,
    weight_init: WeightInit = "kaiming_normal",
    preprocessing: Preprocessing | None = None,
) -> S3DGClassifier:
    """S3D-G with classes: 9.1 million parameters and the head. Reads 16 frames at 5 a second, 224 x 224."""
    tower = S3DG(num_classes, space_to_depth, weight_init=weight_init)
    wants = preprocessing or Preprocessing(num_frames=16, frame_rate=5.0, crop_size=224, short_side=256)
    return _with_head(tower, wants, num_classes, dropout, head_activation)


def s3dg_small_classifier(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    width: float = 0.25,
    weight_init: WeightInit = "kaiming_normal",
    preprocessing: Preprocessing | None = None,
) -> S3DGClassifier:
    """S3D-G with classes at a quarter of the width, for small videos on a CPU: 0.6 million parameters.

    Reads 16 frames at 8 a second, 112 x 112.
    """
    tower = S3DG(num_classes, width=width, weight_init=weight_init)
    wants = preprocessing or Preprocessing(num_frames=16, frame_rate=8.0, crop_size=112, short_side=128)
    return _with_head(tower, wants, num_classes, dropout, head_activation)


def _with_head(
    tower: S3DG, preprocessing: Preprocessing, num_classes: int, dropout: float, head_activation: HeadActivation
) -> S3DGClassifier:
    model = S3DGClassifier(tower, preprocessing=preprocessing, dropout=dropout, head_activation=head_activation)
    model.reset_head(num_classes)
    return model
