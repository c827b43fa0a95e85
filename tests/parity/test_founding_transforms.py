"""Pixels against what PySlowFast and ClipBERT made of them.

Exact but for the last bit of float32: both sides are torch's own bilinear scaling of floats.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinreel.data.founding_sampling import slowfast_slow_indices
from twinreel.data.founding_transforms import (
    clipbert_pixels,
    slowfast_crop_offset,
    slowfast_pixels,
    slowfast_short_side_size,
)
from twinreel.data.transforms import letterbox, letterbox_size, three_squares
from twinreel.models.preprocessing import Preprocessing

FOLDER = Path(__file__).parent / "golden"
SLOWFAST: dict[str, Any] = json.loads((FOLDER / "slowfast_data.json").read_text())
CLIPBERT: dict[str, Any] = json.loads((FOLDER / "clipbert_preprocess.json").read_text())


@pytest.fixture(scope="module")
def slowfast() -> dict[str, Tensor]:
    with np.load(FOLDER / "slowfast_data.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("pipeline.")}


@pytest.fixture(scope="module")
def clipbert() -> dict[str, Tensor]:
    with np.load(FOLDER / "clipbert_preprocess.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("case", SLOWFAST["uniform_crop"]["table"], ids=str)
def test_slowfast_crops(case: list[int]) -> None:
    height, width, size, index, top, left = case
    assert slowfast_crop_offset(height, width, size, index) == (top, left)
    preprocessing = Preprocessing(num_frames=1, frame_rate=1.0, crop_size=size, short_side=min(height, width))
    ours = three_squares(height, width, preprocessing)[index]
    assert ours[2:] == (size, size, size)  # the same crop but for the half pixel of an odd rest
    assert max(abs(ours.top - top), abs(ours.left - left)) <= 1
    assert index == 1 or (ours.top if height > width else ours.left) == (top if height > width else left)


@pytest.mark.parametrize("case", SLOWFAST["short_side"]["table"], ids=str)
def test_slowfast_short_side(case: list[int]) -> None:
    height, width, size, *golden = case
    assert list(slowfast_short_side_size(height, width, size)) == golden


@pytest.mark.parametrize("index", [0, 1, 2])
def test_slowfast_pixels(slowfast: dict[str, Tensor], index: int) -> None:
    ours = slowfast_pixels(slowfast["pipeline.uint8_frames"], 18, 16, index)
    torch.testing.assert_close(ours, slowfast[f"pipeline.crop{index}"], atol=1e-6, rtol=0)


def test_slowfast_slow_pathway(slowfast: dict[str, Tensor]) -> None:
    crop = slowfast_pixels(slowfast["pipeline.uint8_frames"], 18, 16)
    torch.testing.assert_close(
        crop[:, slowfast_slow_indices(4, 2)], slowfast["pipeline.slow_alpha2"], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("case", CLIPBERT["sizes"], ids=str)
def test_clipbert_sizes(case: list[Any]) -> None:
    height, width, size, golden = case
    assert list(letterbox_size(height, width, size)) == golden


def picture() -> Tensor:
    """The golden input, floats 0 to 255 (T, H, W, 3), by its rule: coarse squares of 16 pixels and fine noise."""
    name, shape, _ = CLIPBERT["inputs"]["picture"]
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    *lead, height, width = shape
    coarse = rng.standard_normal((*lead, math.ceil(height / 16), math.ceil(width / 16)))
    coarse = coarse.repeat(16, -2).repeat(16, -1)[..., :height, :width]
    values = np.clip(np.round(128 + 45 * coarse + 20 * rng.standard_normal(shape)), 0, 255)
    return torch.from_numpy(values.astype(np.float32)).permute(0, 2, 3, 1)


def test_clipbert_pixels(clipbert: dict[str, Tensor]) -> None:
    ours = clipbert_pixels(picture(), 32)
    torch.testing.assert_close(ours, clipbert["padded32"], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[:, :, :24], clipbert["resized32"], atol=1e-4, rtol=0)
    torch.testing.assert_close(clipbert_pixels(picture(), 96)[:, :1, :72], clipbert["resized96_ch0"], atol=1e-4, rtol=0)


def test_padding_then_normalizing_is_the_founding_order(clipbert: dict[str, Tensor]) -> None:
    """Black is added before the mean is taken away: our letterbox does so too, its uint8 scaling apart."""
    preprocessing = Preprocessing(
        num_frames=2,
        frame_rate=1.0,
        crop_size=32,
        fit="pad",
        value_range=(0, 255),
        mean=(123.675, 116.28, 103.53),
    )
    boxed = letterbox(picture().to(torch.uint8), 32)
    ours = preprocessing.normalize(boxed[None])[0].transpose(0, 1)
    golden = clipbert["normalized"]
    torch.testing.assert_close(ours[:, :, 24:], golden[:, :, 24:], atol=1e-3, rtol=0)
    assert (ours - golden).abs().mean() < 6  # antialiased or not, of a noisy picture
