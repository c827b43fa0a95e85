"""What a model wants of a video. The model carries it, so reading, training, evaluation and search cannot disagree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from twinreel.config import nearest
from twinreel.errors import ConfigError

__all__ = ["Preprocessing"]

Triple: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """Frames, rate, size and scaling of a network's input.

    Args:
        num_frames: frames of a clip.
        frame_rate: sampled frames a second; None with `frame_stride`.
        frame_stride: step in source frames; None with `frame_rate`. Exactly one of the two is given.
        crop_size: height and width of the input, pixels.
        short_side: the short side is scaled to this before evaluation cuts the center; None means `crop_size`.
        fit: `crop` cuts a square out of a frame; `pad` shows all of it, the long side scaled to `crop_size`, black at
            the right or the bottom.
        value_range: what the pixel values 0 and 255 become, before mean and std.
        mean: subtracted from each channel, in the order of `channel_order`.
        std: divided by, per channel, likewise.
        channel_order: order of the network's color channels; decoded frames are RGB.

    Raises:
        ConfigError: a value is out of its range; all problems in one message.
    """

    num_frames: int
    frame_rate: float | None = None
    frame_stride: int | None = None
    crop_size: int
    short_side: int | None = None
    fit: Literal["crop", "pad"] = "crop"
    value_range: tuple[float, float] = (0.0, 1.0)
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    channel_order: Literal["rgb", "bgr"] = "rgb"

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._value_problems()]
        if problems:
            raise ConfigError("preprocessing: " + "; ".join(problems))
        object.__setattr__(self, "value_range", tuple(float(value) for value in self.value_range))
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))

    def _size_problems(self) -> list[str]:
        problems = []
        for name in ("num_frames", "crop_size", "short_side", "frame_stride"):
            value = getattr(self, name)
            optional = name in ("short_side", "frame_stride")
            if not (_is_count(value) or (optional and value is None)):
                problems.append(f"{name} must be a whole number of at least 1; got {value!r}")
        if (self.frame_rate is None) == (self.frame_stride is None):
            got = f"frame_rate={self.frame_rate}, frame_stride={self.frame_stride}"
            problems.append(f"give exactly one of frame_rate and frame_stride; got {got}")
        if self.frame_rate is not None and not (_is_finite(self.frame_rate) and self.frame_rate > 0):
            problems.append(f"frame_rate must be above 0 (frames a second); got {self.frame_rate!r}")
        if not problems and self.short_side is not None and self.short_side < self.crop_size:
            problems.append(f"short_side ({self.short_side}) must be at least crop_size ({self.crop_size})")
        if self.fit not in ("crop", "pad"):
            problems.append(f"fit must be crop or pad; got {self.fit!r}")
        elif self.fit == "pad" and self.short_side is not None:
            problems.append(f"short_side ({self.short_side}) goes with fit: crop; with fit: pad leave it out")
        return problems

    def _value_problems(self) -> list[str]:
        problems = []
        for name, length in (("value_range", 2), ("mean", 3), ("std", 3)):
            values = getattr(self, name)
            good = isinstance(values, (tuple, list)) and len(values) == length and all(map(_is_finite, values))
            if not good:
                problems.append(f"{name} must be {length} finite numbers; got {values!r}")
            elif name == "value_range" and values[0] == values[1]:
                problems.append(f"value_range must have two different ends; got {values!r}")
            elif name == "std" and min(values) <= 0:
                problems.append(f"std must be above 0; got {values!r}")
        if self.channel_order not in ("rgb", "bgr"):
            problems.append(f"channel_order must be rgb or bgr; got {self.channel_order!r}")
        return problems

    @property
    def sampled_rate(self) -> float:
        """Sampled frames a second.

        Raises:
            ConfigError: the model samples by `frame_stride`, so the rate is the file's.
        """
        if self.frame_rate is None:
            raise ConfigError(
                f"preprocessing.frame_stride={self.frame_stride}: without a frame_rate a clip has no length in "
                "seconds; set frame_rate instead"
            )
        return self.frame_rate

    @property
    def clip_seconds(self) -> float:
        """How long a clip is: num_frames / frame_rate, seconds.

        Raises:
            ConfigError: as for `sampled_rate`.
        """
        return self.num_frames / self.sampled_rate

    @property
    def clip_length(self) -> str:
        """How long a clip is, in words: 16 frames at 5 a second = 3.2 s, or 8 frames, 1 of every 4 of the file's."""
        if self.frame_rate is None:
            return f"{self.num_frames} frames, 1 of every {self.frame_stride} of the file's"
        return f"{self.num_frames} frames at {self.frame_rate:g} a second = {self.clip_seconds:g} s"

    def clip_words(self, rule: str) -> str:
        """How long a clip is by a rule of sampling, in words: `uniform`, `segments`, `whole` spread its frames.

        The rules named `slowfast` count a `frame_stride` at 30 a second.
        """
        if rule in ("uniform", "segments", "whole"):
            return f"{self.num_frames} frames spread over the whole window"
        if rule.startswith("slowfast") and self.frame_stride is not None:
            return f"{self.num_frames} frames, 1 of every {self.frame_stride} at 30 a second"
        return self.clip_length

    @property
    def framing(self) -> str:
        """What evaluation sees of a frame, in words."""
        if self.fit == "pad":
            return f"whole frames, long side {self.crop_size}, padded with black"
        return f"center {self.crop_size} of short side {self.short_side or self.crop_size}"

    def normalize(self, frames: Tensor) -> Tensor:
        """The network's input, float32 (B, 3, T, H, W), on the device of the frames.

        Channel order first, then the value range, then mean and std.

        Args:
            frames: uint8 (B, T, H, W, 3), RGB.

        Raises:
            ConfigError: another dtype or shape.
        """
        if frames.dtype != torch.uint8 or frames.ndim != 5 or frames.shape[-1] != 3:
            raise ConfigError(
                f"normalize wants uint8 frames (B, T, H, W, 3); got {frames.dtype} {tuple(frames.shape)}; "
                "use frames[None] for a single clip"
            )
        video = frames.permute(0, 4, 1, 2, 3)
        if self.channel_order == "bgr":
            video = video.flip(1)
        video = video.to(torch.float32, memory_format=torch.contiguous_format) / 255
        low, high = self.value_range
        if (low, high) != (0.0, 1.0):
            video = video * (high - low) + low
        if self.mean != (0.0, 0.0, 0.0) or self.std != (1.0, 1.0, 1.0):
            mean, std = video.new_tensor(self.mean), video.new_tensor(self.std)
            video = (video - mean.view(1, 3, 1, 1, 1)) / std.view(1, 3, 1, 1, 1)
        return video

    def to_pixels(self, video: Tensor) -> Tensor:
        """The inverse of `normalize`, rounded: float (B, 3, T, H, W) -> uint8 RGB (B, T, H, W, 3), for pictures."""
        mean, std = video.new_tensor(self.mean), video.new_tensor(self.std)
        low, high = self.value_range
        pixels = (video * std.view(1, 3, 1, 1, 1) + mean.view(1, 3, 1, 1, 1) - low) / (high - low) * 255
        pixels = pixels.round().clamp(0, 255).to(torch.uint8)
        if self.channel_order == "bgr":
            pixels = pixels.flip(1)
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or YAML; `from_dict` reads them back."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """The object that `to_dict` wrote.

        Raises:
            ConfigError: an unknown or missing key, or a value out of its range.
        """
        _check_keys(values)
        missing = [name for name in ("num_frames", "crop_size") if name not in values]
        if missing:
            raise ConfigError(f"preprocessing lacks {' and '.join(missing)}")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**fields)

    def replace(self, **overrides: Any) -> Preprocessing:
        """A copy with other values. A given frame_rate takes the place of a frame_stride, and the other way round.

        Raises:
            ConfigError: an unknown key, or a value out of its range.
        """
        _check_keys(overrides)
        if overrides.get("frame_rate") is not None:
            overrides.setdefault("frame_stride", None)
        elif overrides.get("frame_stride") is not None:
            overrides.setdefault("frame_rate", None)
        return Preprocessing.from_dict({**self.to_dict(), **overrides})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_keys(values: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Preprocessing)]
    problems = [f"unknown key {name}{nearest(name, known)}" for name in values if name not in known]
    if problems:
        raise ConfigError("preprocessing: " + "; ".join(problems))
