"""RandAugment and random erasing of whole clips, on the training device.

What is done to a clip is the same in all its frames, and a pure function of (seed, epoch, sample id): it depends on
neither the batch, the number of processes nor the device. Numbers are drawn on the CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinreel.config import import_function, nearest
from twinreel.data.plan import keyed_rng, keyed_seed
from twinreel.errors import ConfigError, DependencyError

__all__ = ["OPERATIONS", "RandAugment", "check_augment", "own_transform", "rand_augment", "random_erasing"]

HIGHEST_MAGNITUDE = 10.0
FILL = 128 / 255  # what comes in from outside a frame
ERASED_AREA, ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandAugment:
    """How strongly clips are changed: Cubuk et al., arXiv:1909.13719, with the strengths of timm's "increasing" set.

    Args:
        num_ops: operations a clip, drawn one after the other out of `OPERATIONS`, repetitions included.
        magnitude: strength, 0 to 10.
        magnitude_std: spread of the strength, drawn anew for each operation and cut to 0 to 10.
        probability: of each drawn operation to be done.

    Raises:
        ConfigError: a value is out of its range; all problems in one message.
    """

    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    probability: float = 0.5

    def __post_init__(self) -> None:
        problems = []
        if type(self.num_ops) is not int or self.num_ops < 1:
            problems.append(f"num_ops must be a whole number of at least 1; got {self.num_ops!r}")
        for name, most in (("magnitude", HIGHEST_MAGNITUDE), ("magnitude_std", math.inf), ("probability", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                problems.append(f"{name} must be a number of 0 to {most:g}; got {value!r}")
        if problems:
            raise ConfigError("data.rand_augment: " + "; ".join(problems))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RandAugment:
        """The rule that a recipe's data.rand_augment states, the rest as by default.

        Raises:
            ConfigError: an unknown key, or a value out of its range.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigError(f"data.rand_augment: unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
        return cls(**options)


def check_augment() -> None:
    """Say now, before anything slow, if what RandAugment needs is missing.

    Raises:
        DependencyError: kornia is not installed.
    """
    _kornia()


def rand_augment(
    frames: Tensor, ids: Sequence[str], *, seed: int, epoch: int, rule: RandAugment = RandAugment()
) -> Tensor:
    """Clips changed by RandAugment, each by operations of its own that are the same in all its frames.

    Args:
        frames: uint8 (B, T, H, W, 3), before they are mirrored and normalized; on any device.
        ids: of the samples; those of views of one row are equal, and each view is changed in its own way.
        seed: of the run.
        epoch: in which the samples were drawn.
        rule: how many operations, how strong.

    Returns:
        uint8 (B, T, H, W, 3), a new tensor.

    Raises:
        DependencyError: kornia is not installed.
        ConfigError: frames are of another kind.
    """
    if frames.dtype != torch.uint8 or frames.ndim != 5 or frames.shape[-1] != 3 or len(ids) != len(frames):
        raise ConfigError(
            f"rand_augment: frames must be uint8 (B, T, H, W, 3) with B ids, got {frames.dtype} of shape "
            f"{tuple(frames.shape)} with {len(ids)} ids."
        )
    _kornia()
    changed = torch.empty_like(frames)
    for row, (sample_id, view) in enumerate(_views(ids)):
        drawn = _draw(keyed_rng(seed, epoch, sample_id, "rand_augment", view), rule)
        changed[row] = _change(frames[row], drawn) if drawn else frames[row]
    return changed


def random_erasing(video: Tensor, ids: Sequence[str], *, seed: int, epoch: int, probability: float) -> Tensor:
    """Clips in which a box, the same in all frames, is filled with noise.

    Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896, with normal noise for each number, as the
    PySlowFast recipes have it: so it comes after normalization. Area 2 to 33 % of the frame, width / height 0.3 to
    3.3, uniform in its logarithm; a box that does not fit after ten tries is left out.

    Args:
        video: float (B, 3, T, H, W), normalized.
        ids: of the samples, as in `rand_augment`.
        seed: of the run.
        epoch: in which the samples were drawn.
        probability: of each clip.

    Returns:
        A new tensor where a clip was changed, else `video` itself.
    """
    boxes = [
        _draw_box(keyed_rng(seed, epoch, sample_id, "erase", view), video.shape[-2], video.shape[-1], probability)
        for sample_id, view in _views(ids)
    ]
    if not any(boxes):
        return video
    video = video.clone()
    for row, (box, (sample_id, view)) in enumerate(zip(boxes, _views(ids), strict=True)):
        if box is not None:
            top, left, bottom, right = box
            part = video[row, :, :, top:bottom, left:right]
            generator = torch.Generator().manual_seed(keyed_seed(seed, epoch, sample_id, "erase noise", view))
            part.copy_(torch.randn(part.shape, generator=generator))
    return video


def own_transform(name: str, frames: Tensor, ids: Sequence[str], *, seed: int, epoch: int) -> Tensor:
    """Clips changed by a user's function, called as `function(frames, seeds=[...])`.

    Args:
        name: `package.module:function`.
        frames: uint8 (B, T, H, W, 3), before they are mirrored and normalized; on the training device.
        ids: of the samples, as in `rand_augment`.
        seed: of the run.
        epoch: in which the samples were drawn.

    Returns:
        What it returned: uint8 (B, T, H, W, 3). It gets a number for each clip to draw its random numbers from, so that
        a resumed run changes clips alike.

    Raises:
        ConfigError: it returned another kind or shape.
    """
    seeds = [keyed_seed(seed, epoch, sample_id, "transform", view) for sample_id, view in _views(ids)]
    changed = import_function(name, "data.transform")(frames, seeds=seeds)
    if not isinstance(changed, Tensor) or changed.shape != frames.shape or changed.dtype != torch.uint8:
        got = f"{changed.dtype} {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise ConfigError(f"data.transform={name} returned {got}; it must return uint8 {tuple(frames.shape)}")
    return changed


def _draw_box(
    rng: np.random.Generator, height: int, width: int, probability: float
) -> tuple[int, int, int, int] | None:
    """(top, left, bottom, right) in pixels, or None."""
    if rng.random() >= probability:
        return None
    for _ in range(10):
        pixels = height * width * rng.uniform(*ERASED_AREA)
        ratio = math.exp(rng.uniform(math.log(ERASED_ASPECT[0]), math.log(ERASED_ASPECT[1])))
        box_height, box_width = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < box_height < height and 0 < box_width < width:
            top = int(rng.integers(0, height - box_height, endpoint=True))
            left = int(rng.integers(0, width - box_width, endpoint=True))
            return top, left, top + box_height, left + box_width
    return None


def _views(ids: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each id with the number of times it was there before: views of one row lie in one micro-batch, in order."""
    seen: Counter[str] = Counter()
    for sample_id in ids:
        yield sample_id, seen[sample_id]
        seen[sample_id] += 1


def _draw(rng: np.random.Generator, rule: RandAugment) -> list[tuple[str, float, int]]:
    """(operation, strength 0 to 1, sign) of what is done to a clip, in order."""
    names, drawn = list(OPERATIONS), []
    for _ in range(rule.num_ops):
        name, done = names[int(rng.integers(len(names)))], rng.random() < rule.probability
        magnitude = min(max(rng.normal(rule.magnitude, rule.magnitude_std), 0.0), HIGHEST_MAGNITUDE)
        sign = 1 if rng.random() < 0.5 else -1
        if done:
            drawn.append((name, magnitude / HIGHEST_MAGNITUDE, sign))
    return drawn


def _change(frames: Tensor, drawn: Sequence[tuple[str, float, int]]) -> Tensor:
    """uint8 (T, H, W, 3) -> the same, changed."""
    pictures = frames.permute(0, 3, 1, 2).float() / 255
    for name, strength, sign in drawn:
        pictures = OPERATIONS[name](pictures, strength, sign)
    return (pictures.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def _kornia() -> tuple[Any, Any]:
    """The modules of color and of geometry; imported here, because that takes a second."""
    try:
        from kornia import enhance
        from kornia.geometry import transform
    except ImportError as error:
        raise DependencyError(
            "data.rand_augment needs kornia, which is not installed; install it with `pip install 'twinreel[augment]'`,"
            " or leave data.rand_augment out"
        ) from error
    return enhance, transform


def _enhanced(name: str, pictures: Tensor, *values: float) -> Tensor:
    """What a function of kornia.enhance makes of pictures."""
    changed: Tensor = getattr(_kornia()[0], name)(pictures, *values)
    return changed


def _around_one(strength: float, sign: int) -> float:
    """0.1 to 1.9; 1 leaves a picture as it is."""
    return max(0.1, 1 + 0.9 * strength * sign)


def _add_to_dark(pictures: Tensor, amount: float) -> Tensor:
    """Brighter where a number is below the middle."""
    return torch.where(pictures < 128 / 255, (pictures + amount).clamp(max=1), pictures)


def _rotated(pictures: Tensor, degrees: float) -> Tensor:
    """Turned about the center, counter-clockwise."""
    angle = math.radians(degrees)
    linear = ((math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle)))
    return _warped(pictures, linear, about=((pictures.shape[-1] - 1) / 2, (pictures.shape[-2] - 1) / 2))


def _warped(
    pictures: Tensor,
    linear: tuple[tuple[float, float], tuple[float, float]] = ((1.0, 0.0), (0.0, 1.0)),
    *,
    about: tuple[float, float] = (-0.5, -0.5),
    shift: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Pictures under a linear map of (x, y) about a point, by default the corner, and a shift in widths and heights."""
    height, width = pictures.shape[-2:]
    (a, b), (c, d) = linear
    x, y = about
    rows = [[a, b, x - a * x - b * y + shift[0] * width], [c, d, y - c * x - d * y + shift[1] * height]]
    matrix = pictures.new_tensor(rows).expand(len(pictures), 2, 3)
    changed: Tensor = _kornia()[1].warp_affine(
        pictures, matrix, (height, width), padding_mode="fill", fill_value=pictures.new_full((3,), FILL)
    )
    return changed


# Pictures float (T, 3, H, W) in 0 to 1, strength 0 to 1, sign 1 or -1 -> pictures. The numbers are timm's, but for
# posterize, which keeps 1 bit at least: with 0 a picture is black. Colors become what Pillow makes of them, give or
# take a level of 255 where it rounds.
OPERATIONS: dict[str, Callable[[Tensor, float, int], Tensor]] = {
    "auto_contrast": lambda pictures, strength, sign: _enhanced("normalize_min_max", pictures),
    "equalize": lambda pictures, strength, sign: _enhanced("equalize", pictures.clamp(0, 1)),
    "invert": lambda pictures, strength, sign: 1 - pictures,
    "posterize": lambda pictures, strength, sign: _enhanced("posterize", pictures, max(1, 4 - int(4 * strength))),
    "solarize": lambda pictures, strength, sign: _enhanced("solarize", pictures, (255.5 - int(256 * strength)) / 255),
    "add_to_dark": lambda pictures, strength, sign: _add_to_dark(pictures, int(110 * strength) / 255),
    "color": lambda pictures, strength, sign: _enhanced(
        "adjust_saturation_with_gray_subtraction", pictures, _around_one(strength, sign)
    ),
    "contrast": lambda pictures, strength, sign: _enhanced(
        "adjust_contrast_with_mean_subtraction", pictures, _around_one(strength, sign)
    ),
    "brightness": lambda pictures, strength, sign: _enhanced(
        "adjust_brightness_accumulative", pictures, _around_one(strength, sign)
    ),
    "sharpness": lambda pictures, strength, sign: _enhanced("sharpness", pictures, _around_one(strength, sign)),
    "rotate": lambda pictures, strength, sign: _rotated(pictures, 30 * strength * sign),
    "shear_x": lambda pictures, strength, sign: _warped(pictures, ((1.0, -0.3 * strength * sign), (0.0, 1.0))),
    "shear_y": lambda pictures, strength, sign: _warped(pictures, ((1.0, 0.0), (-0.3 * strength * sign, 1.0))),
    "translate_x": lambda pictures, strength, sign: _warped(pictures, shift=(-0.45 * strength * sign, 0.0)),
    "translate_y": lambda pictures, strength, sign: _warped(pictures, shift=(0.0, -0.45 * strength * sign)),
}
