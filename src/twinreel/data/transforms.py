"""uint8 frames -> network input.

Workers cut one rectangle out of every kept frame and scale it to the crop size (still uint8); mirroring and
normalizing happen on the training device. Random numbers are drawn on the CPU from keyed generators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from twinreel.data.clip import Batch
from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

__all__ = [
    "Cut",
    "FlipLabels",
    "center_square",
    "cut_frames",
    "draw_short_side",
    "flip_partners",
    "flipped_labels",
    "letterbox",
    "letterbox_size",
    "network_input",
    "random_resized",
    "random_square",
    "three_squares",
]

FlipLabels: TypeAlias = Mapping[str, str | None]


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


def three_squares(height: int, width: int, preprocessing: Preprocessing) -> list[Cut]:
    """The three evaluation crops: as `center_square`, at the start, center and end of the longer side.

    That is left, center and right of a frame that is at least as wide as high, else top, center and bottom.
    """
    center = center_square(height, width, preprocessing)
    if height > width:
        return [center._replace(top=top) for top in (0, center.top, height - center.height)]
    return [center._replace(left=left) for left in (0, center.left, width - center.width)]


def draw_short_side(
    rng: np.random.Generator, short_side: int | tuple[int, int], draw: Literal["uniform", "inverse"] = "uniform"
) -> int:
    """The pixels that the short side is scaled to: as given, or drawn from a range, both ends included.

    Args:
        rng: the sample's keyed generator; a single number draws nothing from it.
        short_side: pixels, or the least and the most.
        draw: `uniform` in pixels, or `inverse`: uniform in 1 / pixels, so that small ones are drawn more often.
    """
    if isinstance(short_side, int):
        return short_side
    least, most = short_side
    return round(rng.uniform(least, most) if draw == "uniform" else 1 / rng.uniform(1 / most, 1 / least))


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


def random_resized(
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    crop_size: int,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Cut:
    """A rectangle of random area and aspect at a random place, to be scaled to a square.

    The rule of torchvision's RandomResizedCrop: area uniform, aspect uniform in its logarithm, ten tries; then the
    largest center rectangle of the nearest allowed aspect.

    Args:
        rng: the sample's keyed generator.
        height: of the frame, pixels.
        width: of the frame, pixels.
        crop_size: side of the network input, pixels.
        area: least and most, as fractions of the frame's.
        aspect: least and most width / height.
    """
    for _ in range(10):
        pixels = height * width * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
        cut_width, cut_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < cut_width <= width and 0 < cut_height <= height:
            top = int(rng.integers(0, height - cut_height, endpoint=True))
            left = int(rng.integers(0, width - cut_width, endpoint=True))
            return Cut(top, left, cut_height, cut_width, crop_size)
    ratio = min(max(width / height, aspect[0]), aspect[1])
    cut_width, cut_height = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
    return Cut((height - cut_height) // 2, (width - cut_width) // 2, cut_height, cut_width, crop_size)


def letterbox_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of a frame whose longer side is scaled to `size`; the other is rounded down, at least 1."""
    if height > width:
        return size, max(1, int(size * (width / height)))
    return max(1, int(size * (height / width))), size


def letterbox(frames: Tensor, size: int) -> Tensor:
    """Whole frames, their aspect kept, in a square: uint8 (T, H, W, 3) -> uint8 (T, size, size, 3).

    The longer side is scaled to `size` (bilinear with antialiasing); right or bottom is black.
    """
    height, width = letterbox_size(frames.shape[1], frames.shape[2], size)
    boxed = frames.new_zeros(len(frames), size, size, 3)
    boxed[:, :height, :width] = _scaled(frames, height, width)
    return boxed


def cut_frames(frames: Tensor, cut: Cut) -> Tensor:
    """The rectangle of every frame, scaled: uint8 (T, H, W, 3) -> uint8 (T, size, size, 3).

    Scaling is bilinear with antialiasing; a rectangle of the right size is only cut.
    """
    part = frames[:, cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    return _scaled(part, cut.size, cut.size).contiguous()


def _scaled(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 (T, H, W, 3) -> uint8 (T, height, width, 3)."""
    if frames.shape[1:3] == (height, width):
        return frames
    scaled = functional.interpolate(
        frames.permute(0, 3, 1, 2), size=(height, width), mode="bilinear", antialias=True, align_corners=False
    )
    return scaled.permute(0, 2, 3, 1)


def network_input(batch: Batch, preprocessing: Preprocessing, device: torch.device) -> Tensor:
    """A batch's frames on the device, mirrored where the sample says so, normalized: float (B, 3, T, S, S)."""
    frames = batch.frames.to(device, non_blocking=True)
    if bool(batch.flip.any()):
        flip = batch.flip.to(device).view(-1, 1, 1, 1, 1)
        frames = torch.where(flip, frames.flip(3), frames)
    return preprocessing.normalize(frames)


def flip_partners(labels: FlipLabels) -> dict[str, str | None]:
    """Both directions of pairs of labels that a mirror image turns into each other; None for one without a partner.

    Raises:
        ConfigError: a label is given two partners, or none and one.
    """
    partners: dict[str, str | None] = {}
    for one, other in labels.items():
        for label, partner in ((one, other), *([(other, one)] if other is not None else [])):
            if partners.setdefault(label, partner) != partner:
                raise ConfigError(
                    f"flip_labels: {label!r} would become {partners[label]!r} and {partner!r}; a mirror image turns a "
                    "label into one other, and that one back"
                )
    return partners


def flipped_labels(
    labels: Sequence[str | int], partners: Mapping[str, str | None], *, has_captions: bool
) -> tuple[str | int, ...] | None:
    """The labels of the mirror image of a clip; None if it must not be mirrored.

    That is where a label has no partner, or where one changes and captions would go on saying the old one.

    Args:
        labels: of the clip.
        partners: of `flip_partners`, by the label as text.
        has_captions: whether the clip is trained on with captions.
    """
    changed = [label for label in labels if str(label) in partners]
    if not changed:
        return tuple(labels)
    others = [partners[str(label)] if str(label) in partners else label for label in labels]
    if has_captions or None in others:
        return None
    return tuple(
        int(other) if isinstance(label, int) and other.isdecimal() else other  # 3 and "3" are different labels
        for label, other in zip(labels, map(str, others), strict=True)
    )
