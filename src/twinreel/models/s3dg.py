"""S3D-G, the video network of MIL-NCE (arXiv:1912.06430; the network: arXiv:1712.04851).

An Inception network whose 3 x 3 x 3 convolutions are split into space and time, with self gating. Sub-modules have the
names of the authors' code, so that their weights load. Both of its first layers are here: a 3 x 7 x 7 convolution, and
2 x 4 x 4 after space-to-depth (the released `s3d_howto100m.pth`). What differs: the first layer and the width are
constructor arguments, and it runs on any device. Numbers are compared in tests/parity/test_milnce_s3dg.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.layers import Triple, WeightInit, check_video, initialize
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.text_towers import TextTowerName, build_text_tower
from twinreel.models.two_towers import TwoTowers
from twinreel.text import Vocabulary

__all__ = ["S3DG", "s3dg", "s3dg_small"]


class ConvUnit(nn.Module):
    """Convolution, batch norm, ReLU; separable: first over space, then over time, each with norm and ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Triple = (1, 1, 1),
        *,
        stride: Triple = (1, 1, 1),
        padding: Triple = (0, 0, 0),
        separable: bool = False,
    ) -> None:
        super().__init__()
        space, space_padding = (1, *kernel[1:]), (0, *padding[1:])
        first = (space, stride, space_padding) if separable else (kernel, stride, padding)
        self.conv1 = nn.Conv3d(in_channels, out_channels, *first, bias=False)
        self.bn1 = nn.BatchNorm3d(out_channels)
        self.separable = separable
        if separable:
            time, time_padding = (kernel[0], 1, 1), (padding[0], 0, 0)
            self.conv2 = nn.Conv3d(out_channels, out_channels, time, padding=time_padding, bias=False)
            self.bn2 = nn.BatchNorm3d(out_channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, C, T, H, W) -> non-negative (B, out_channels, T', H', W')."""
        features = functional.relu(self.bn1(self.conv1(features)))
        if self.separable:
            features = functional.relu(self.bn2(self.conv2(features)))
        return features


class SelfGating(nn.Module):
    """Each channel times a gate in (0, 1) that all channels' means decide (arXiv:1712.04851, section 4.3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, C, T, H, W) -> the same shape."""
        gates = torch.sigmoid(self.fc(features.mean(dim=(2, 3, 4))))
        return features * gates[:, :, None, None, None]


class SamePool(nn.Module):
    """Max pool with TensorFlow's SAME padding as the authors wrote it: by kernel and stride, whatever the size.

    The padding is 0, which is harmless after a ReLU.
    """

    def __init__(self, kernel: Triple, stride: Triple) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.padding: list[int] = []
        for size, step in zip(reversed(kernel), reversed(stride), strict=True):  # F.pad begins at the last dimension
            total = max(size - step, 0)
            self.padding += [total // 2, total - total // 2]

    def forward(self, features: Tensor) -> Tensor:
        """Non-negative features (B, C, T, H, W) -> (B, C, T', H', W'), sizes divided by the stride and rounded up."""
        padded = functional.pad(features, self.padding)
        return functional.max_pool3d(padded, self.kernel, self.stride, ceil_mode=True)


class MixedBlock(nn.Module):
    """Four branches side by side, each gated, then concatenated.

    `widths` are the channels of b0; b1 inner, b1; b2 inner, b2; b3 (table 1 of arXiv:1409.4842).
    """

    def __init__(self, in_channels: int, widths: tuple[int, int, int, int, int, int], width: float) -> None:
        super().__init__()
        b0, b1_inner, b1, b2_inner, b2, b3 = (_scaled(channels, width) for channels in widths)
        self.conv_b0 = ConvUnit(in_channels, b0)
        self.conv_b1_a = ConvUnit(in_channels, b1_inner)
        self.conv_b1_b = ConvUnit(b1_inner, b1, (3, 3, 3), padding=(1, 1, 1), separable=True)
        self.conv_b2_a = ConvUnit(in_channels, b2_inner)
        self.conv_b2_b = ConvUnit(b2_inner, b2, (3, 3, 3), padding=(1, 1, 1), separable=True)
        self.maxpool_b3 = nn.MaxPool3d(3, stride=1, padding=1)
        self.conv_b3_b = ConvUnit(in_channels, b3)
        self.gating_b0 = SelfGating(b0)
        self.gating_b1 = SelfGating(b1)
        self.gating_b2 = SelfGating(b2)
        self.gating_b3 = SelfGating(b3)
        self.out_channels = b0 + b1 + b2 + b3

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, in_channels, T, H, W) -> (B, out_channels, T, H, W)."""
        branches = (
            self.gating_b0(self.conv_b0(features)),
            self.gating_b1(self.conv_b1_b(self.conv_b1_a(features))),
            self.gating_b2(self.conv_b2_b(self.conv_b2_a(features))),
            self.gating_b3(self.conv_b3_b(self.maxpool_b3(features))),
        )
        return torch.cat(branches, dim=1)


class S3DG(nn.Module):
    """Video (B, 3, T, H, W) -> embeddings (B, embedding_size), not normalized.

    Args:
        embedding_size: size of the joint space.
        space_to_depth: the first layer of the released weights; T, H and W must then be even.
        width: every channel count times this, rounded to a multiple of 8, at least 8 (1.0 = the paper).
        weight_init: `uniform` or `kaiming_normal`, see `layers.initialize`.

    Raises:
        ConfigError: an argument out of its range.
    """

    def __init__(
        self,
        embedding_size: int = 512,
        space_to_depth: bool = False,
        width: float = 1.0,
        *,
        weight_init: WeightInit = "uniform",
    ) -> None:
        super().__init__()
        if embedding_size < 1 or not width > 0:
            raise ConfigError(f"S3DG: embedding_size and width must be above 0; got {embedding_size} and {width}")
        self.embedding_size, self.space_to_depth = embedding_size, space_to_depth
        stem, middle = _scaled(64, width), _scaled(192, width)
        if space_to_depth:
            self.conv1 = ConvUnit(24, stem, (2, 4, 4), padding=(1, 2, 2))
        else:
            self.conv1 = ConvUnit(3, stem, (3, 7, 7), stride=(2, 2, 2), padding=(1, 3, 3))
        self.maxpool_2a = SamePool((1, 3, 3), (1, 2, 2))
        self.conv_2b = ConvUnit(stem, stem)
        self.conv_2c = ConvUnit(stem, middle, (3, 3, 3), padding=(1, 1, 1), separable=True)
        self.gating = SelfGating(middle)
        self.maxpool_3a = SamePool((1, 3, 3), (1, 2, 2))
        self.mixed_3b = MixedBlock(middle, (64, 96, 128, 16, 32, 32), width)
        self.mixed_3c = MixedBlock(self.mixed_3b.out_channels, (128, 128, 192, 32, 96, 64), width)
        self.maxpool_4a = SamePool((3, 3, 3), (2, 2, 2))
        self.mixed_4b = MixedBlock(self.mixed_3c.out_channels, (192, 96, 208, 16, 48, 64), width)
        self.mixed_4c = MixedBlock(self.mixed_4b.out_channels, (160, 112, 224, 24, 64, 64), width)
        self.mixed_4d = MixedBlock(self.mixed_4c.out_channels, (128, 128, 256, 24, 64, 64), width)
        self.mixed_4e = MixedBlock(self.mixed_4d.out_channels, (112, 144, 288, 32, 64, 64), width)
        self.mixed_4f = MixedBlock(self.mixed_4e.out_channels, (256, 160, 320, 32, 128, 128), width)
        self.maxpool_5a = SamePool((2, 2, 2), (2, 2, 2))
        self.mixed_5b = MixedBlock(self.mixed_4f.out_channels, (256, 160, 320, 32, 128, 128), width)
        self.mixed_5c = MixedBlock(self.mixed_5b.out_channels, (384, 192, 384, 48, 128, 128), width)
        self.feature_size = self.mixed_5c.out_channels
        self.fc = nn.Linear(self.feature_size, embedding_size)
        initialize(self, weight_init)

    def forward(self, video: Tensor) -> Tensor:
        """Embeddings (B, embedding_size) of a float video (B, 3, T, H, W)."""
        embeddings: Tensor = self.fc(self.forward_features(video))
        return embeddings

    def forward_features(self, video: Tensor) -> Tensor:
        """`mixed_5c` averaged over time and space, (B, 1024) at width 1: the features of linear evaluation.

        Raises:
            ConfigError: not a float video (B, 3, T, H, W), odd sizes with space_to_depth, or too small to train on.
        """
        return self._feature_map(video).mean(dim=(2, 3, 4))

    def forward_segments(self, video: Tensor) -> Tensor:
        """Embeddings (B, S, embedding_size), one for each of the S = T / 8 (rounded up) temporal positions.

        Their mean over S is what `forward` gives, to rounding.

        Raises:
            ConfigError: as for `forward_features`.
        """
        embeddings: Tensor = self.fc(self._feature_map(video).mean(dim=(3, 4)).transpose(1, 2))
        return embeddings

    def _feature_map(self, video: Tensor) -> Tensor:
        check_video(video, "S3D-G", (8, 32, 32), training=self.training)
        features: Tensor = self.maxpool_2a(self._stem(video))
        features = self.gating(self.conv_2c(self.conv_2b(features)))
        features = self.mixed_3c(self.mixed_3b(self.maxpool_3a(features)))
        features = self.mixed_4c(self.mixed_4b(self.maxpool_4a(features)))
        features = self.mixed_4f(self.mixed_4e(self.mixed_4d(features)))
        features = self.mixed_5c(self.mixed_5b(self.maxpool_5a(features)))
        return features

    def _stem(self, video: Tensor) -> Tensor:
        features: Tensor = self.conv1(space_to_depth(video) if self.space_to_depth else video)
        # Padding on both sides of the 2 x 4 x 4 kernel gives one output too many; the authors' code drops the first.
        return features[:, :, 1:, 1:, 1:] if self.space_to_depth else features


def space_to_depth(video: Tensor) -> Tensor:
    """Blocks of 2 x 2 x 2 pixels become channels: (B, C, T, H, W) -> (B, 8 C, T/2, H/2, W/2).

    The channel of color c at offset (t, h, w) in its block is ((2 t + h) 2 + w) C + c.

    Raises:
        ConfigError: an odd size.
    """
    batch, channels, *sizes = video.shape
    if any(size % 2 for size in sizes):
        raise ConfigError(
            f"space_to_depth needs even num_frames, height and width; got (T, H, W) = {tuple(sizes)}: change "
            "num_frames or crop_size of the preprocessing"
        )
    time, height, width = (size // 2 for size in sizes)
    blocks = video.view(batch, channels, time, 2, height, 2, width, 2)
    return blocks.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(batch, 8 * channels, time, height, width)


def _scaled(channels: int, width: float) -> int:
    return max(8, 8 * round(channels * width / 8))


def s3dg(
    *,
    vocabulary: Vocabulary | None = None,
    preprocessing: Preprocessing | None = None,
    embedding_size: int = 512,
    space_to_depth: bool = False,
    text_tower: TextTowerName = "word_max",
    num_words: int | None = None,
    word_embedding_size: int = 300,
    text_hidden_size: int = 2048,
    word_vectors: str | None = None,
    train_word_vectors: bool | None = None,
    weight_init: WeightInit = "uniform",
) -> TwoTowers:
    """S3D-G and a text tower as in MIL-NCE: 9.6 million parameters in the video tower.

    Reads 16 frames at 5 a second, 224 x 224, values 0 to 1. The options of the text tower are those of
    `text_towers.build_text_tower`; without vocabulary, num_words and word_vectors there is no text tower.
    """
    return TwoTowers(
        video_tower=S3DG(embedding_size, space_to_depth, weight_init=weight_init),
        text_tower=build_text_tower(
            text_tower,
            embedding_size=embedding_size,
            vocabulary=vocabulary,
            num_words=num_words,
            word_embedding_size=word_embedding_size,
            hidden_size=text_hidden_size,
            word_vectors=word_vectors,
            train_word_vectors=train_word_vectors,
        ),
        preprocessing=preprocessing or Preprocessing(num_frames=16, frame_rate=5.0, crop_size=224),
        vocabulary=vocabulary,
    )


def s3dg_small(
    *,
    vocabulary: Vocabulary | None = None,
    preprocessing: Preprocessing | None = None,
    embedding_size: int = 128,
    text_tower: TextTowerName = "word_max",
    num_words: int | None = None,
    word_embedding_size: int = 128,
    text_hidden_size: int = 512,
    word_vectors: str | None = None,
    train_word_vectors: bool | None = None,
    weight_init: WeightInit = "uniform",
) -> TwoTowers:
    """S3D-G at a quarter of the width for small videos on a CPU: 0.6 million parameters in the video tower.

    Everything else is as in `s3dg`; its first layer is 3 x 7 x 7. Reads 8 frames at 8 a second, 112 x 112, values
    0 to 1.
    """
    return TwoTowers(
        video_tower=S3DG(embedding_size, width=0.25, weight_init=weight_init),
        text_tower=build_text_tower(
            text_tower,
            embedding_size=embedding_size,
            vocabulary=vocabulary,
            num_words=num_words,
            word_embedding_size=word_embedding_size,
            hidden_size=text_hidden_size,
            word_vectors=word_vectors,
            train_word_vectors=train_word_vectors,
        ),
        preprocessing=preprocessing or Preprocessing(num_frames=8, frame_rate=8.0, crop_size=112),
        vocabulary=vocabulary,
    )
