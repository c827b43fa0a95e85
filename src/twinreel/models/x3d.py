"""X3D XS, S, M and L (arXiv:2004.04730), and `x3d_small` for CPUs.

A residual network of depthwise 3 x 3 x 3 convolutions that keeps all frames to its end. Sub-modules have the names of
the authors' code (PySlowFast), so that their weights load. What differs: drop path is applied (theirs returned its
input), the logits of several positions are averaged in training (theirs were strung together), and a video too small
for the head is refused in words. Numbers are compared in tests/parity/test_x3d_mvit.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.classifier import HeadActivation, activate, positions_mean
from twinreel.models.depthwise import DepthwiseConv3d
from twinreel.models.drop_path import DropPath
from twinreel.models.layers import Triple, check_video
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.residual_stages import check_windows, window_means

__all__ = ["X3D", "x3d_l", "x3d_m", "x3d_s", "x3d_small", "x3d_xs"]

WIDTHS = (24, 24, 48, 96, 192)  # stem, res2 ... res5


class Stem(nn.Module):
    """Convolution over space (stride 2), depthwise convolution over 5 frames, batch norm, ReLU."""

    def __init__(self, channels: int, time_stride: int = 1) -> None:
        super().__init__()
        stride = (time_stride, 1, 1)
        self.conv_xy = nn.Conv3d(3, channels, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.conv = DepthwiseConv3d(channels, (5, 1, 1), stride, (2, 0, 0))
        self.bn = nn.BatchNorm3d(channels)

    def forward(self, video: Tensor) -> Tensor:
        """Video (B, 3, T, H, W) -> non-negative (B, channels, T / time_stride, H / 2, W / 2), rounded up."""
        return functional.relu(self.bn(self.conv(self.conv_xy(video))))


class SqueezeExcitation(nn.Module):
    """Each channel times a gate in (0, 1) that all channels' means decide (arXiv:1709.01507); 1/16 inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = _rounded(channels / 16)
        self.fc1 = nn.Conv3d(channels, inner, 1)
        self.fc2 = nn.Conv3d(inner, channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, C, T, H, W) -> the same shape."""
        means = features.mean(dim=(2, 3, 4), keepdim=True)
        gated: Tensor = features * self.fc2(functional.relu(self.fc1(means))).sigmoid()
        return gated


class Bottleneck(nn.Module):
    """1 x 1 x 1, depthwise 3 x 3 x 3 (stride here), optional squeeze and excitation, Swish, 1 x 1 x 1."""

    def __init__(self, channels: int, out_channels: int, inner: int, stride: int, gated: bool) -> None:
        super().__init__()
        self.a = nn.Conv3d(channels, inner, 1, bias=False)
        self.a_bn = nn.BatchNorm3d(inner)
        self.b = DepthwiseConv3d(inner, (3, 3, 3), (1, stride, stride), (1, 1, 1))
        self.b_bn = nn.BatchNorm3d(inner)
        self.se = SqueezeExcitation(inner) if gated else None
        self.c = nn.Conv3d(inner, out_channels, 1, bias=False)
        self.c_bn = nn.BatchNorm3d(out_channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, channels, T, H, W) -> (B, out_channels, T, H / stride, W / stride), rounded up."""
        features = functional.relu(self.a_bn(self.a(features)))
        features = self.b_bn(self.b(features))
        if self.se is not None:
            features = self.se(features)
        branch: Tensor = self.c_bn(self.c(functional.silu(features)))
        return branch


class Block(nn.Module):
    """A bottleneck with its shortcut, added, ReLU."""

    def __init__(
        self, channels: int, out_channels: int, inner: int, *, stride: int, gated: bool, drop_path: float
    ) -> None:
        super().__init__()
        self.branch1, self.branch1_bn = None, None
        if channels != out_channels or stride != 1:
            self.branch1 = nn.Conv3d(channels, out_channels, 1, (1, stride, stride), bias=False)
            self.branch1_bn = nn.BatchNorm3d(out_channels)
        self.branch2 = Bottleneck(channels, out_channels, inner, stride, gated)
        self.drop_path = DropPath(drop_path)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, channels, T, H, W) -> (B, out_channels, T, H / stride, W / stride), rounded up."""
        shortcut = features
        if self.branch1 is not None and self.branch1_bn is not None:
            shortcut = self.branch1_bn(self.branch1(features))
        return functional.relu(shortcut + self.drop_path(self.branch2(features)))


class Head(nn.Module):
    """conv_5, norm, ReLU, average pool, lin_5, ReLU, dropout, classes: features and logits of pooled positions."""

    def __init__(self, channels: int, inner: int, feature_size: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.conv_5 = nn.Conv3d(channels, inner, 1, bias=False)
        self.conv_5_bn = nn.BatchNorm3d(inner)
        self.lin_5 = nn.Conv3d(inner, feature_size, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(feature_size, num_classes)

    def features(self, features: Tensor, window: Triple) -> Tensor:
        """Features (B, channels, T, H, W) -> (B, T', H', W', feature_size), non-negative, at every pooled position."""
        features = functional.relu(self.conv_5_bn(self.conv_5(features)))
        means = window_means(features, window).permute(0, 4, 1, 2, 3)
        return functional.relu(self.lin_5(means)).permute(0, 2, 3, 4, 1)

    def forward(self, features: Tensor, window: Triple) -> Tensor:
        """Logits (B, T', H', W', num_classes) at every pooled position."""
        logits: Tensor = self.projection(self.dropout(self.features(features, window)))
        return logits


class X3D(nn.Module):
    """Video (B, 3, T, H, W) -> logits (B, num_classes) in train mode, scores in eval mode.

    Scores are the activation at every pooled position, then averaged. The pool takes the last map of the training clip,
    num_frames by ceil(crop / 32) squared, so a larger input has several positions; any size from there on goes.

    Args:
        preprocessing: what it reads; its crop_size is the training crop where `train_crop_size` is None.
        num_classes: of the head.
        widths: channels of the stem and of the four stages.
        depths: blocks of the four stages.
        bottleneck: inner channels of a block, in parts of its output.
        feature_size: channels before the classes.
        time_stride: the stem keeps one of so many frames (published: 1).
        dropout: before the classes, 0 to 1.
        head_activation: `softmax`, `sigmoid` or `none`.
        drop_path: rate in the last stage; stage s of 2 ... 5 has s / 5 of it.
        train_crop_size: pixels, where the head's pool must follow another crop than the preprocessing's.

    Raises:
        ConfigError: an argument out of its range.
    """

    head_prefixes = ("head.projection.",)

    def __init__(
        self,
        *,
        preprocessing: Preprocessing,
        num_classes: int = 400,
        widths: Sequence[int] = WIDTHS,
        depths: Sequence[int] = (3, 5, 11, 7),
        bottleneck: float = 2.25,
        feature_size: int = 2048,
        time_stride: int = 1,
        dropout: float = 0.5,
        head_activation: HeadActivation = "softmax",
        drop_path: float = 0.0,
        train_crop_size: int | None = None,
    ) -> None:
        super().__init__()
        _check(num_classes, dropout, head_activation, train_crop_size)
        self.preprocessing, self.train_crop_size = preprocessing, train_crop_size
        self.num_classes, self.head_activation = num_classes, head_activation
        self.feature_size, self.time_stride = feature_size, time_stride
        self.s1 = nn.Sequential()
        self.s1.add_module("pathway0_stem", Stem(widths[0], time_stride))
        stages = []
        for number, ((channels, out_channels), depth) in enumerate(zip(pairwise(widths), depths, strict=True), start=2):
            inner, rate = int(bottleneck * out_channels), drop_path * number / 5
            stages.append(_stage(channels, out_channels, inner, depth, rate))
        self.s2, self.s3, self.s4, self.s5 = stages
        self.head = Head(widths[-1], int(bottleneck * widths[-1]), feature_size, num_classes, dropout)
        _initialize(self)

    def forward(self, video: Tensor) -> Tensor:
        """(B, num_classes) of a float video (B, 3, T, H, W).

        Raises:
            ConfigError: not a float video (B, 3, T, H, W), or smaller than the training clip's last map allows.
        """
        logits: Tensor = self.head(self._feature_map(video), self._window())
        return positions_mean(logits if self.training else activate(logits, self.head_activation))

    def forward_features(self, video: Tensor) -> Tensor:
        """What the classes are told apart by, (B, feature_size): lin_5 averaged over the pooled positions.

        Raises:
            ConfigError: as for `forward`.
        """
        return positions_mean(self.head.features(self._feature_map(video), self._window()))

    def reset_head(self, num_classes: int) -> None:
        """Start a new last layer for another number of classes, with the start values of a new model.

        Raises:
            ConfigError: less than one class.
        """
        _check(num_classes, 0.0, self.head_activation, None)
        old = self.head.projection.weight
        self.head.projection = nn.Linear(self.feature_size, num_classes, device=old.device, dtype=old.dtype)
        _initialize(self.head.projection)
        self.num_classes = num_classes

    def _feature_map(self, video: Tensor) -> Tensor:
        check_video(video, "X3D", (self.time_stride, 32, 32), training=self.training)
        frames, height, width = video.shape[2:]
        positions = (math.ceil(frames / self.time_stride), math.ceil(height / 32), math.ceil(width / 32))
        trained_on = f"{self.preprocessing.num_frames} frames of {self._crop_size()} pixels"
        check_windows("X3D", video, positions, self._window(), trained_on)
        features: Tensor = self.s5(self.s4(self.s3(self.s2(self.s1(video)))))
        return features

    def _crop_size(self) -> int:
        return self.train_crop_size or self.preprocessing.crop_size

    def _window(self) -> Triple:
        size = math.ceil(self._crop_size() / 32)
        return math.ceil(self.preprocessing.num_frames / self.time_stride), size, size


def _stage(channels: int, out_channels: int, inner: int, depth: int, drop_path: float) -> nn.Sequential:
    stage = nn.Sequential()
    for index in range(depth):
        block = Block(
            channels if index == 0 else out_channels,
            out_channels,
            inner,
            stride=2 if index == 0 else 1,
            gated=index % 2 == 0,
            drop_path=drop_path,
        )
        stage.add_module(f"pathway0_res{index}", block)
    return stage


def _initialize(module: nn.Module) -> None:
    """The authors' start values; the last norm of every branch is 0, so that a block begins as its shortcut."""
    for part in module.modules():
        if isinstance(part, nn.Conv3d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01)
            nn.init.zeros_(part.bias)
        elif isinstance(part, Bottleneck):
            nn.init.zeros_(part.c_bn.weight)


def _check(num_classes: int, dropout: float, head_activation: HeadActivation, train_crop_size: int | None) -> None:
    problems = []
    if num_classes < 1:
        problems.append(f"num_classes must be at least 1; got {num_classes}")
    if not 0 <= dropout <= 1:
        problems.append(f"dropout must be from 0 to 1; got {dropout}")
    if head_activation not in ("softmax", "sigmoid", "none"):
        problems.append(f"head_activation must be softmax, sigmoid or none; got {head_activation!r}")
    if train_crop_size is not None and train_crop_size < 1:
        problems.append(f"train_crop_size must be at least 1 pixel; got {train_crop_size}")
    if problems:
        raise ConfigError("X3D: " + "; ".join(problems))


def _rounded(width: float, divisor: int = 8) -> int:
    """A width rounded to a multiple of the divisor, at least one of it, and never below 90 % of what was asked for."""
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded


def _published(num_frames: int, frame_stride: int, crop_size: int, short_side: int) -> Preprocessing:
    return Preprocessing(
        num_frames=num_frames,
        frame_stride=frame_stride,
        crop_size=crop_size,
        short_side=short_side,
        mean=(0.45, 0.45, 0.45),
        std=(0.225, 0.225, 0.225),
    )


def x3d_xs(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.0,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> X3D:
    """X3D-XS: 4 frames, 1 of every 12, of 160 pixels (test 182); 3.8 million parameters."""
    return X3D(
        preprocessing=preprocessing or _published(4, 12, 160, 182),
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
        train_crop_size=train_crop_size,
    )


def x3d_s(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.0,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> X3D:
    """X3D-S: 13 frames, 1 of every 6, of 160 pixels (test 182); 3.8 million parameters."""
    return X3D(
        preprocessing=preprocessing or _published(13, 6, 160, 182),
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
        train_crop_size=train_crop_size,
    )


def x3d_m(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.0,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> X3D:
    """X3D-M: 16 frames, 1 of every 5, of 224 pixels (test 256); 3.8 million parameters."""
    return X3D(
        preprocessing=preprocessing or _published(16, 5, 224, 256),
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
        train_crop_size=train_crop_size,
    )


def x3d_l(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.0,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> X3D:
    """X3D-L: 16 frames, 1 of every 5, of 312 pixels (test 356), 55 blocks; 6.2 million parameters."""
    return X3D(
        preprocessing=preprocessing or _published(16, 5, 312, 356),
        num_classes=num_classes,
        depths=(5, 10, 25, 15),
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
        train_crop_size=train_crop_size,
    )


def x3d_small(
    *,
    num_classes: int = 400,
    dropout: float = 0.3,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.0,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> X3D:
    """A narrow X3D for few videos on a CPU: 0.6 million parameters with 10 classes.

    Stem and stages are 16, 16, 32, 64 and 128 wide, of 1, 2, 5 and 3 blocks, 512 channels before the classes; the stem
    keeps every second frame. Reads 16 frames at 8 a second, 96 x 96 out of a short side of 112.
    """
    reads = Preprocessing(
        num_frames=16,
        frame_rate=8.0,
        crop_size=96,
        short_side=112,
        mean=(0.45, 0.45, 0.45),
        std=(0.225, 0.225, 0.225),
    )
    return X3D(
        preprocessing=preprocessing or reads,
        num_classes=num_classes,
        widths=(16, 16, 32, 64, 128),
        depths=(1, 2, 5, 3),
        feature_size=512,
        time_stride=2,
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
        train_crop_size=train_crop_size,
    )
