"""uint8 frames -> network input.

Workers cut one rectangle out of every kept frame and scale it to the crop size (still uint8); mirroring and
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

__all__ = ["Cut", "center_square", "cut_frames", "network_input", "random_square"]


class Cut(NamedTuple):
    """A rectangle of a frame as shown, in pixels, and the side of the square that it is scaled to."""

    top: int
    left: int
    height: int
    width: int
    size: int


def center_square(height: int, width: int, preprocessing: Preprocessing) -> Cut:
    """The evaluation crop: the center `crop_size / short_side` of the short side."""
    short = min(height, width)
    side = max(1, round(short * preprocessing.crop_size / (preprocessing.short_side or preprocessing.crop_size)))
    return Cut((height - side) // 2, (width - side) // 2, side, side, preprocessing.crop_size)


def random_square(
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    crop: Literal["random", "square"],
    crop_size: int,
    short_side: int | None = None,
) -> Cut:
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
    return Cut(top, left, side, side, crop_size)


def cut_frames(frames: Tensor, cut: Cut) -> Tensor:
    """The rectangle of every frame, scaled: uint8 (T, H, W, 3) -> uint8 (T, size, size, 3).

    Scaling is bilinear with antialiasing; a rectangle of the right size is only cut.
    """
    part = frames[:, cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    if (cut.height, cut.width) == (cut.size, cut.size):
        return part.contiguous()
    scaled = functional.interpolate(
        part.permute(0, 3, 1, 2), size=(cut.size, cut.size), mode="bilinear", antialias=True, align_corners=False
    )
    return scaled.permute(0, 2, 3, 1).contiguous()


def network_input(batch: Batch, preprocessing: Preprocessing, device: torch.device) -> Tensor:
    """A batch's frames on the device, mirrored where the sample says so, normalized: float (B, 3, T, S, S)."""
    frames = batch.frames.to(device, non_blocking=True)
    if bool(batch.flip.any()):
        flip = batch.flip.to(device).view(-1, 1, 1, 1, 1)
        frames = torch.where(flip, frames.flip(3), frames)
    return preprocessing.normalize(frames)
