"""Frames -> a grid of features: ClipBERT's CNN (arXiv:2102.06183), a ResNet-50 for grid features (arXiv:2001.03615).

The 2-D ResNet of detectron2's `R-50-grid` as ClipBERT runs it: the stride sits in the first 1 x 1 convolution of a
stage (and in its shortcut), batch norms are frozen, and only the last stage is used, with stride 32 and no dilation.
Sub-modules have the names of the authors' code, so that its weights load. What differs: a frozen norm is folded into
its convolution, which is the same to rounding and keeps nothing more for the backward pass; widths, depths and group
norm are arguments, and any other network can take the ResNet's place. Numbers are compared in
tests/parity/test_clipbert_network.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError

__all__ = ["CnnNorm", "FrozenBatchNorm", "GridEncoder", "GridResNet"]

CnnNorm: TypeAlias = Literal["frozen", "group"]

STAGES = ("stem", "res2", "res3", "res4", "res5")


class FrozenBatchNorm(nn.Module):
    """Batch norm whose statistics, scale and shift are constants: buffers that no optimizer and no batch changes."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps = 1e-5
    _version = 3  # of detectron2's: 1e-5 is added to `running_var` when it is used; files of older ones have it in them

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """What each channel (C,) is multiplied by, and what is added then."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        return scale, self.bias - self.running_mean * scale


class ConvNorm(nn.Conv2d):
    """A convolution without bias, then its norm, which is its child `norm`."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, norm: CnnNorm) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
        self.norm = FrozenBatchNorm(out_channels) if norm == "frozen" else _group_norm(out_channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (N, C, H, W) -> (N, out_channels, H/stride, W/stride), rounded up."""
        if not isinstance(self.norm, FrozenBatchNorm):
            normalized: Tensor = self.norm(super().forward(features))
            return normalized
        scale, shift = self.norm.scale_and_shift()
        return functional.conv2d(features, self.weight * scale[:, None, None, None], shift, self.stride, self.padding)


class GridBottleneck(nn.Module):
    """ReLU of the shortcut plus the branch 1 x 1 (with the stride), 3 x 3, 1 x 1.

    The shortcut is a strided 1 x 1 convolution with norm where the shape changes.
    """

    def __init__(self, in_channels: int, inner: int, out_channels: int, stride: int, norm: CnnNorm) -> None:
        super().__init__()
        self.projects = in_channels != out_channels or stride != 1
        if self.projects:
            self.shortcut = ConvNorm(in_channels, out_channels, 1, stride, norm)
        self.conv1 = ConvNorm(in_channels, inner, 1, stride, norm)
        self.conv2 = ConvNorm(inner, inner, 3, 1, norm)
        self.conv3 = ConvNorm(inner, out_channels, 1, 1, norm)

    def forward(self, features: Tensor) -> Tensor:
        """Features (N, in_channels, H, W) -> (N, out_channels, H/stride, W/stride), rounded up."""
        shortcut = self.shortcut(features) if self.projects else features
        branch = functional.relu(self.conv1(features))
        branch = self.conv3(functional.relu(self.conv2(branch)))
        return functional.relu(shortcut + branch)


class Stem(nn.Module):
    """Pixels (N, 3, H, W) -> features (N, channels, H/4, W/4), rounded up: 7 x 7 convolution and max pool."""

    def __init__(self, channels: int, norm: CnnNorm) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, channels, 7, 2, norm)

    def forward(self, pixels: Tensor) -> Tensor:
        """Convolution, norm, ReLU, 3 x 3 max pool."""
        return functional.max_pool2d(functional.relu(self.conv1(pixels)), 3, 2, 1)


class _ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], width: int, norm: CnnNorm) -> None:
        super().__init__()
        self.stem = Stem(width, norm)
        channels = width
        for index, depth in enumerate(blocks):
            inner, out_channels = width * 2**index, 4 * width * 2**index
            stage = nn.Sequential()
            for block in range(depth):
                stride = 2 if index > 0 and block == 0 else 1
                stage.append(GridBottleneck(channels, inner, out_channels, stride, norm))
                channels = out_channels
            self.add_module(STAGES[index + 1], stage)

    def forward(self, pixels: Tensor) -> Tensor:
        for part in self.children():
            pixels = part(pixels)
        return pixels


class GridResNet(nn.Module):
    """Pixels (N, 3, H, W) -> features (N, 32 * width, H/32, W/32), rounded up.

    Convolutions start from He's fan-out normal (arXiv:1502.01852).

    Args:
        blocks: bottleneck blocks of each of the four stages `res2` to `res5`; (3, 4, 6, 3) is ResNet-50.
        width: channels of the stem, a multiple of 8; the stages have 4, 8, 16 and 32 times as many.
        norm: `frozen` batch norms, which need trained weights; `group` norms, which train from scratch with any batch.
        freeze_stages: how many parts do not train: 0 none, 1 the stem, 2 the stem and `res2`, ..., 5 all.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        norm: CnnNorm = "frozen",
        freeze_stages: int = 2,
    ) -> None:
        super().__init__()
        _check_resnet(blocks, width, norm, freeze_stages)
        self.backbone = _ResNet(blocks, width, norm)
        for part in self.backbone.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        for name in STAGES[:freeze_stages]:
            self.backbone.get_submodule(name).requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of the last stage."""
        features: Tensor = self.backbone(pixels)
        return features

    def activation_parts(self) -> list[nn.Module]:
        """What activation checkpointing may recompute one by one: the stem and the stages."""
        return list(self.backbone.children())


class GridEncoder(nn.Module):
    """Pixels (N, 3, H, W) -> a grid (N, hidden_size, h, w): a network's features, 3 x 3 convolution, max pool, ReLU.

    Args:
        feature: pixels (N, 3, H, W) -> features (N, in_channels, H', W').
        in_channels: of the features.
        hidden_size: channels of the grid.
        pool: the grid has 1 / pool of the features' height and width, rounded down.

    Raises:
        ConfigError: pool is below 1.
    """

    def __init__(self, feature: nn.Module, in_channels: int, hidden_size: int, pool: int) -> None:
        super().__init__()
        if pool < 1:
            raise ConfigError(f"grid_pool must be at least 1; got {pool}")
        self.pool = pool
        self.feature = feature
        convolution = nn.Conv2d(in_channels, hidden_size, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        self.grid_encoder = nn.Sequential(convolution, nn.MaxPool2d(pool, pool), nn.ReLU())

    def forward(self, pixels: Tensor) -> Tensor:
        """The grid of each picture.

        Raises:
            ConfigError: the pictures are too small to give one position.
        """
        features = self.feature(pixels)
        if min(features.shape[2:]) < self.pool:
            raise ConfigError(
                f"pictures of {pixels.shape[2]} x {pixels.shape[3]} give the CNN {features.shape[2]} x "
                f"{features.shape[3]} positions, fewer than the {self.pool} x {self.pool} that grid_pool={self.pool} "
                "makes one of; use a larger crop_size or a smaller grid_pool"
            )
        grid: Tensor = self.grid_encoder(features)
        return grid


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels // 4), channels)


def _check_resnet(blocks: Sequence[int], width: int, norm: CnnNorm, freeze_stages: int) -> None:
    problems = []
    if len(blocks) != len(STAGES) - 1 or min(blocks) < 1:
        problems.append(f"cnn_blocks must be four numbers of at least 1; got {list(blocks)}")
    if width < 8 or width % 8 != 0:
        problems.append(f"cnn_width must be a multiple of 8; got {width}")
    if norm not in get_args(CnnNorm):
        problems.append(f"cnn_norm must be frozen or group; got {norm!r}")
    if not 0 <= freeze_stages <= len(STAGES):
        problems.append(f"freeze_stages must be from 0 to {len(STAGES)} ({', '.join(STAGES)}); got {freeze_stages}")
    if problems:
        raise ConfigError("ClipBERT's CNN: " + "; ".join(problems))
