"""Pixels as the founding systems make them, for parity: float frames, scaled bilinearly without antialiasing.

twinreel scales uint8 frames with antialiasing and normalizes on the device (`transforms.py`); PySlowFast normalizes
first and scales then, ClipBERT scales floats and pads. Against the numbers of their own code:
tests/parity/test_founding_transforms.py.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from twinreel.data.transforms import letterbox_size

__all__ = [
    "clipbert_pixels",
    "slowfast_crop_offset",
    "slowfast_pixels",
    "slowfast_short_side_size",
]

SLOWFAST_MEAN, SLOWFAST_STD = 0.45, 0.225


def slowfast_short_side_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width after the founding scaling of the short side; the long one is rounded down."""
    if min(height, width) == short_side:
        return height, width
    if width < height:
        return math.floor(height / width * short_side), short_side
    return short_side, math.floor(width / height * short_side)


def slowfast_crop_offset(height: int, width: int, crop_size: int, index: int) -> tuple[int, int]:
    """Top and left of the founding evaluation crop: 0 start, 1 center, 2 end of the longer side."""
    top, left = math.ceil((height - crop_size) / 2), math.ceil((width - crop_size) / 2)
    if height > width:
        return (0, top, height - crop_size)[index], left
    return top, (0, left, width - crop_size)[index]


def slowfast_pixels(frames: Tensor, short_side: int, crop_size: int, index: int = 1) -> Tensor:
    """Frames as the founding evaluation hands them to the network: float (3, T, crop_size, crop_size).

    Args:
        frames: uint8 (T, H, W, 3).
        short_side: to which the short side is scaled.
        crop_size: side of the crop.
        index: which of the three crops, as in `slowfast_crop_offset`.
    """
    video = (frames.permute(3, 0, 1, 2).float() / 255 - SLOWFAST_MEAN) / SLOWFAST_STD
    size = slowfast_short_side_size(frames.shape[1], frames.shape[2], short_side)
    if size != tuple(frames.shape[1:3]):
        video = functional.interpolate(video, size=size, mode="bilinear", align_corners=False)
    top, left = slowfast_crop_offset(*size, crop_size, index)
    return video[:, :, top : top + crop_size, left : left + crop_size]


def clipbert_pixels(frames: Tensor, size: int) -> Tensor:
    """Frames as the founding loader hands them on: float (T, 3, size, size), 0 to 255, padded right or at the bottom.

    Args:
        frames: uint8 or float (T, H, W, 3), 0 to 255.
        size: to which the longer side is scaled.
    """
    video = frames.permute(0, 3, 1, 2).float()
    height, width = letterbox_size(frames.shape[1], frames.shape[2], size)
    video = functional.interpolate(video, size=(height, width), mode="bilinear", align_corners=False)
    return functional.pad(video, (0, size - width, 0, size - height))
