"""The parts of 3-D residual networks with one or two pathways: stems, residual blocks, stages, the class head.

Sub-modules have the names of the authors' PySlowFast code, so that its weights load. A list of features holds one
tensor (B, C, T, H, W) for each pathway, the slow one first. `resnet3d.py` and `slowfast.py` put the parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.classifier import HeadActivation, activate, positions_mean
from twinreel.models.layers import Triple
from twinreel.models.nonlocal_block import NonLocal, NonLocalForm

__all__ = [
    "Bottleneck",
    "ClassHead",
    "Stage",
    "StagePlan",
    "Stem",
    "Stems",
    "check_train_crop",
    "check_windows",
    "initialize_residual",
    "temporal_kernels",
    "window_means",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pathway of one stage.

    Args:
        in_channels: of the first block.
        inner_channels: of the 3 x 3 convolutions.
        out_channels: of every block.
        kernels: the temporal kernel of every block.
        stride: of the first block, in space.
        non_local_after: the blocks that a non-local block follows, counted from 0.
        non_local: the form of these.
    """

    in_channels: int
    inner_channels: int
    out_channels: int
    kernels: tuple[int, ...]
    stride: int
    non_local_after: tuple[int, ...] = ()
    non_local: NonLocalForm = "softmax"


class Stem(nn.Module):
    """Video (B, 3, T, H, W) -> features (B, channels, T, H/4, W/4), rounded up: 7 x 7 convolution and max pool."""

    def __init__(self, channels: int, temporal_kernel: int) -> None:
        super().__init__()
        kernel, padding = (temporal_kernel, 7, 7), (temporal_kernel // 2, 3, 3)
        self.conv = nn.Conv3d(3, channels, kernel, (1, 2, 2), padding, bias=False)
        self.bn = nn.BatchNorm3d(channels)

    def forward(self, video: Tensor) -> Tensor:
        """Convolution, batch norm, ReLU, 1 x 3 x 3 max pool."""
        features = functional.relu(self.bn(self.conv(video)))
        return functional.max_pool3d(features, (1, 3, 3), (1, 2, 2), (0, 1, 1))


class Stems(nn.Module):
    """The stem of each pathway: `pathway0_stem`, `pathway1_stem`."""

    def __init__(self, channels: Sequence[int], temporal_kernels: Sequence[int]) -> None:
        super().__init__()
        for pathway, (width, kernel) in enumerate(zip(channels, temporal_kernels, strict=True)):
            self.add_module(f"pathway{pathway}_stem", Stem(width, kernel))

    def forward(self, videos: Sequence[Tensor]) -> list[Tensor]:
        """One video (B, 3, T, H, W) for each pathway -> the features of each."""
        return [stem(video) for stem, video in zip(self.children(), videos, strict=True)]


class Branch(nn.Module):
    """The residual branch: k x 1 x 1 to the inner channels, 1 x 3 x 3 with the stride, 1 x 1 x 1 to the outer ones."""

    def __init__(self, in_channels: int, inner: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv3d(in_channels, inner, (kernel, 1, 1), padding=(kernel // 2, 0, 0), bias=False)
        self.a_bn = nn.BatchNorm3d(inner)
        self.b = nn.Conv3d(inner, inner, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        self.b_bn = nn.BatchNorm3d(inner)
        self.c = nn.Conv3d(inner, out_channels, 1, bias=False)
        self.c_bn = nn.BatchNorm3d(out_channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, in_channels, T, H, W) -> (B, out_channels, T, H/stride, W/stride), rounded up."""
        features = functional.relu(self.a_bn(self.a(features)))
        features = functional.relu(self.b_bn(self.b(features)))
        added: Tensor = self.c_bn(self.c(features))
        return added


class Bottleneck(nn.Module):
    """ReLU of the shortcut plus the residual branch.

    The shortcut is a strided 1 x 1 x 1 convolution with batch norm where the shape changes.
    """

    def __init__(self, in_channels: int, inner: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.projects = in_channels != out_channels or stride != 1
        if self.projects:
            self.branch1 = nn.Conv3d(in_channels, out_channels, 1, (1, stride, stride), bias=False)
            self.branch1_bn = nn.BatchNorm3d(out_channels)
        self.branch2 = Branch(in_channels, inner, out_channels, kernel, stride)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, in_channels, T, H, W) -> (B, out_channels, T, H/stride, W/stride), rounded up."""
        shortcut = self.branch1_bn(self.branch1(features)) if self.projects else features
        return functional.relu(shortcut + self.branch2(features))


class Stage(nn.Module):
    """Residual blocks `pathway0_res0`, `pathway0_res1`, ..., of each pathway, and non-local blocks between them."""

    def __init__(self, plans: Sequence[StagePlan]) -> None:
        super().__init__()
        self.block_names: list[list[str]] = []
        for pathway, plan in enumerate(plans):
            blocks = _blocks(plan)
            self.block_names.append([f"pathway{pathway}_{name}" for name in blocks])
            for name, block in blocks.items():
                self.add_module(f"pathway{pathway}_{name}", block)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Features of each pathway -> features of each pathway."""
        outputs = []
        for names, values in zip(self.block_names, features, strict=True):
            for name in names:
                values = getattr(self, name)(values)
            outputs.append(values)
        return outputs


def _blocks(plan: StagePlan) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for index, kernel in enumerate(plan.kernels):
        first = index == 0
        blocks[f"res{index}"] = Bottleneck(
            plan.in_channels if first else plan.out_channels,
            plan.inner_channels,
            plan.out_channels,
            kernel,
            plan.stride if first else 1,
        )
        if index in plan.non_local_after:
            blocks[f"nonlocal{index}"] = NonLocal(plan.out_channels, plan.non_local)
    return blocks


def temporal_kernels(cycle: Sequence[int], num_blocks: int, num_temporal: int | None = None) -> tuple[int, ...]:
    """The temporal kernel of each block: the cycle over and over in the first `num_temporal` blocks, then 1.

    Args:
        cycle: temporal kernels.
        num_blocks: how many blocks there are.
        num_temporal: how many of them follow the cycle; None means all.

    Raises:
        ConfigError: more than there are, or less than none.
    """
    num_temporal = num_blocks if num_temporal is None else num_temporal
    if not 0 <= num_temporal <= num_blocks:
        raise ConfigError(
            f"the stage has {num_blocks} blocks, so 0 to {num_blocks} of them can be temporal; got {num_temporal}"
        )
    return tuple(cycle[index % len(cycle)] if index < num_temporal else 1 for index in range(num_blocks))


class ClassHead(nn.Module):
    """Pooled features (B, T, H, W, in_features) of T x H x W positions -> one row of (B, num_classes) for each video.

    In train mode the row is the mean of the positions' logits; in eval mode the activation comes first, then the mean:
    the published numbers depend on this order.

    Args:
        in_features: channels of the pooled features.
        num_classes: at least 1.
        dropout: probability, from 0 to below 1.
        head_activation: `softmax`, `sigmoid` or `none`.

    Raises:
        ConfigError: a value out of its range.
    """

    def __init__(self, in_features: int, num_classes: int, dropout: float, head_activation: HeadActivation) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout must be from 0 to below 1; got {dropout!r}")
        activate(torch.zeros(1), head_activation)  # another activation is refused here, not at the first evaluation
        self.head_activation: HeadActivation = head_activation
        self.dropout = nn.Dropout(dropout)
        self.projection = _projection(in_features, num_classes)

    def forward(self, pooled: Tensor) -> Tensor:
        """Logits in train mode, scores in eval mode, (B, num_classes)."""
        logits = self.projection(self.dropout(pooled))
        return positions_mean(logits if self.training else activate(logits, self.head_activation))

    def reset(self, num_classes: int) -> None:
        """Start a new projection, on the device and in the type of the old one.

        Raises:
            ConfigError: less than one class.
        """
        old = self.projection
        self.projection = _projection(old.in_features, num_classes).to(old.weight)


def _projection(in_features: int, num_classes: int) -> nn.Linear:
    if num_classes < 1:
        raise ConfigError(f"num_classes must be at least 1; got {num_classes}")
    projection = nn.Linear(in_features, num_classes)
    nn.init.normal_(projection.weight, std=0.01)
    nn.init.zeros_(projection.bias)
    return projection


def check_train_crop(train_crop_size: int | None) -> None:
    """Refuse a training crop of no pixel.

    Raises:
        ConfigError: it is below 1.
    """
    if train_crop_size is not None and train_crop_size < 1:
        raise ConfigError(f"train_crop_size must be at least 1 pixel; got {train_crop_size}")


def check_windows(network: str, video: Tensor, positions: Triple, window: Triple, trained_on: str) -> None:
    """Refuse a video whose last features are smaller than the window that the head averages.

    Args:
        network: the network's name, for the message.
        video: (B, 3, T, H, W).
        positions: time, height and width of the features that this video gives.
        window: of the average.
        trained_on: what the window follows from, in words.

    Raises:
        ConfigError: a size is below the window's.
    """
    if all(size >= least for size, least in zip(positions, window, strict=True)):
        return
    raise ConfigError(
        f"{network}: a video (B, 3, T, H, W) = {tuple(video.shape)} gives the head {_by(positions)} positions, fewer "
        f"than the {_by(window)} that it averages, those of {trained_on}; use longer or larger clips, or set "
        "num_frames and crop_size of the model's preprocessing (or train_crop_size) to what you train on"
    )


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def window_means(features: Tensor, window: Triple, stride: int = 1) -> Tensor:
    """Means of all windows of the size, (B, T', H', W', C) for features (B, C, T, H, W).

    Args:
        features: (B, C, T, H, W), at least as large as the window.
        window: time, height, width.
        stride: of the windows in time; 1 in space.
    """
    windows = features.unfold(2, window[0], stride).unfold(3, window[1], 1).unfold(4, window[2], 1)
    return windows.mean(dim=(-3, -2, -1)).permute(0, 2, 3, 4, 1)


def initialize_residual(model: nn.Module, *, zero_init_residual: bool) -> None:
    """The authors' start values: He's fan-out normal (arXiv:1502.01852) for convolutions, biases 0, norms 1 and 0.

    Args:
        model: its linear layers are left as they are.
        zero_init_residual: the last norm of every residual branch starts at scale 0 (arXiv:1706.02677), so that each
            block begins as its shortcut.
    """
    for part in model.modules():
        if isinstance(part, nn.Conv3d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.BatchNorm3d):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
    if zero_init_residual:
        for part in model.modules():
            if isinstance(part, Branch | NonLocal):
                nn.init.zeros_(part.c_bn.weight if isinstance(part, Branch) else part.bn.weight)
