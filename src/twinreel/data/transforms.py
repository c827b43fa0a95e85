"""uint8 frames -> network input.

Workers cut one square out of every kept frame and scale it to the crop size (still uint8); mirroring and
normalizing happen on the training device. Random numbers are drawn on the CPU from keyed generators.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from twinreel.data.clip import Batch
from twinreel.models.preprocessing import Preprocessing

__all__ = ["Square", "center_square", "cut_square", "network_input", "random_square"]


class Square(NamedTuple):
    """A square of a frame, in pixels."""

    top: int
    left: int
    side: int


def center_square(height: int, width: int, preprocessing: Preprocessing) -> Square:
    """The evaluation crop: the center `crop_size / short_side` of the short side."""
    short = min(height, width)
    side = max(1, round(short * preprocessing.crop_size / (preprocessing.short_side or preprocessing.crop_size)))
    return Square((height - side) // 2, (width - side) // 2, side)


def random_square(
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    crop: Literal["random", "square"],
    crop_size: int,
    short_side: int | None = None,
) -> Square:
    """A training crop; the last offset is reachable.

    Args:
        rng: the sample's keyed generator.
        height: of the frame, pixels.
        width: of the frame, pixels.
        crop: `random` takes `crop_size` pixels as they lie (all of the short side where there are fewer: those are
            scaled up); `square` takes the largest square.
        crop_size: side of the network input, pixels.
        short_side: for `random`, the crop is as if the short side were scaled to this first.
    """
    short = min(height, width)
    if crop == "square":
        side = short
    elif short_side is not None:
        side = min(short, max(1, round(short * crop_size / short_side)))
    else:
        side = min(short, crop_size)
    top = int(rng.integers(0, height - side, endpoint=True))
    left = int(rng.integers(0, width - side, endpoint=True))
    return Square(top, left, side)


def cut_square(frames: Tensor, square: Square, size: int) -> Tensor:
    """The square of every frame at `size` pixels: uint8 (T, H, W, 3) -> uint8 (T, size, size, 3).

    Scaling is bilinear with antialiasing; a square of the right size is only cut.
    """
    top, left, side = square
    cut = frames[:, top : top + side, left : left + side]
    if side == size:
        return cut.contiguous()
    scaled = functional.interpolate(
        cut.permute(0, 3, 1, 2), size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return scaled.permute(0, 2, 3, 1).contiguous()


def network_input(batch: Batch, preprocessing: Preprocessing, device: torch.device) -> Tensor:
    """A batch's frames on the device, mirrored where the sample says so, normalized: float (B, 3, T, S, S)."""
    frames = batch.frames.to(device, non_blocking=True)
    if bool(batch.flip.any()):
        flip = batch.flip.to(device).view(-1, 1, 1, 1, 1)
        frames = torch.where(flip, frames.flip(3), frames)
    return preprocessing.normalize(frames)
