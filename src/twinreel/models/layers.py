"""Parts that two or more models share, no more."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from torch import Tensor, nn

from twinreel.errors import ConfigError

__all__ = ["Triple", "WeightInit", "check_video", "initialize"]

Triple: TypeAlias = tuple[int, int, int]
WeightInit: TypeAlias = Literal["uniform", "kaiming_normal"]


def check_video(video: Tensor, network: str, strides: Triple, *, training: bool) -> None:
    """Refuse an input that the network would stumble over later, with its shape in the message.

    Args:
        video: what was passed as (B, 3, T, H, W).
        network: the network's name, for the message.
        strides: by how much the network shrinks time, height and width in all (rounded up at every stage).
        training: whether batch statistics are taken.

    Raises:
        ConfigError: not a float video, an empty dimension, or a single value for each channel in training.
    """
    shape = tuple(video.shape)
    if video.ndim != 5 or shape[1] != 3 or not video.is_floating_point():
        raise ConfigError(
            f"{network} wants a float video (B, 3, T, H, W); got {video.dtype} {shape}; preprocessing.normalize makes "
            "one of uint8 frames, video[None] adds the batch dimension"
        )
    if min(shape[2:]) < 1:
        raise ConfigError(f"{network}: a video needs at least one frame and one pixel; got (B, 3, T, H, W) = {shape}")
    values = shape[0] * math.prod(-(-size // stride) for size, stride in zip(shape[2:], strides, strict=True))
    if training and values == 1:
        raise ConfigError(
            f"{network}: the input {shape} is too small to train on: its last layers see one value per channel, which "
            "batch statistics cannot use; use more videos a batch, more frames or a larger crop"
        )


def initialize(module: nn.Module, weight_init: WeightInit) -> None:
    """Start values of a network's convolutions and norms.

    `uniform` keeps PyTorch's own; `kaiming_normal` draws convolutions from He's fan-in normal (arXiv:1502.01852) and
    sets norms to scale 1 and shift 0.

    Raises:
        ConfigError: another name.
    """
    if weight_init not in ("uniform", "kaiming_normal"):
        raise ConfigError(f"weight_init must be uniform or kaiming_normal; got {weight_init!r}")
    if weight_init == "uniform":
        return
    for part in module.modules():
        if isinstance(part, nn.Conv3d):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm3d):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
