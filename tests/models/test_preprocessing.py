from __future__ import annotations

import json

import pytest
import torch

from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

PLAIN = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=4)


def frames(batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 2, 4, 5, 3), dtype=torch.uint8)


def test_plain_normalize_divides_by_255_and_moves_channels():
    pixels = frames()
    video = PLAIN.normalize(pixels)
    assert video.dtype == torch.float32 and video.is_contiguous()
    assert video.shape == (2, 3, 2, 4, 5)
    assert torch.equal(video[1, 2, 0, 3, 4], pixels[1, 0, 3, 4, 2].float() / 255)
    assert torch.equal(video, pixels.float().permute(0, 4, 1, 2, 3) / 255)


def test_order_of_channels_range_mean_std():
    rules = PLAIN.replace(value_range=(-1.0, 1.0), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0), channel_order="bgr")
    pixels = torch.zeros(1, 1, 1, 1, 3, dtype=torch.uint8)
    pixels[..., 0] = 255  # red becomes the last channel: ((1 * 2 - 1) - 0.3) / 4
    video = rules.normalize(pixels).flatten()
    torch.testing.assert_close(video, torch.tensor([-1.1, -1.2 / 2, 0.7 / 4]))


@pytest.mark.parametrize(
    "overrides",
    [{}, {"channel_order": "bgr"}, {"value_range": (0, 255), "mean": (104, 117, 123)}, {"std": (0.2, 0.3, 0.4)}],
)
def test_to_pixels_undoes_normalize(overrides: dict[str, object]):
    rules = PLAIN.replace(**overrides)
    pixels = frames()
    assert torch.equal(rules.to_pixels(rules.normalize(pixels)), pixels)


def test_dict_round_trip_through_json():
    for rules in (PLAIN, Preprocessing(num_frames=8, frame_stride=2, crop_size=8, short_side=9, mean=(1, 2, 3))):
        assert Preprocessing.from_dict(json.loads(json.dumps(rules.to_dict()))) == rules


def test_clip_seconds():
    assert (PLAIN.clip_seconds, PLAIN.sampled_rate) == (0.4, 5.0)
    with pytest.raises(ConfigError, match="frame_stride=2: without a frame_rate a clip has no length in seconds; set"):
        _ = PLAIN.replace(frame_stride=2).clip_seconds


def test_replace_swaps_rate_and_stride():
    stride = PLAIN.replace(frame_stride=2)
    assert (stride.frame_rate, stride.frame_stride) == (None, 2)
    assert stride.replace(frame_rate=3) == PLAIN.replace(frame_rate=3.0)
    assert PLAIN.replace() == PLAIN


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_frames": 0}, "num_frames must be a whole number of at least 1; got 0"),
        ({"num_frames": 2.5}, "num_frames must be a whole number"),
        ({"crop_size": True}, "crop_size must be a whole number"),
        ({"short_side": 3}, r"short_side \(3\) must be at least crop_size \(4\)"),
        ({"frame_rate": -1.0}, "frame_rate must be above 0"),
        ({"frame_rate": float("nan")}, "frame_rate must be above 0"),
        ({"frame_rate": 5.0, "frame_stride": 2}, "exactly one of frame_rate and frame_stride"),
        ({"frame_rate": None}, "exactly one of frame_rate and frame_stride"),
        ({"value_range": (1.0, 1.0)}, "value_range must have two different ends"),
        ({"mean": (0.5,)}, "mean must be 3 finite numbers"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be above 0"),
        ({"channel_order": "rbg"}, "channel_order must be rgb or bgr; got 'rbg'"),
        ({"crop_sice": 5}, "unknown key crop_sice; did you mean crop_size?"),
        ({"num_frames": 0, "std": (0.0, 1.0, 1.0)}, "num_frames .*; std must"),
    ],
)
def test_bad_values(overrides: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        PLAIN.replace(**overrides)


def test_missing_keys_and_wrong_frames():
    with pytest.raises(ConfigError, match="lacks num_frames and crop_size"):
        Preprocessing.from_dict({"frame_rate": 5.0})
    with pytest.raises(ConfigError, match=r"got torch.uint8 \(2, 4, 5, 3\); use frames\[None\]"):
        PLAIN.normalize(frames()[0])
    with pytest.raises(ConfigError, match="uint8 frames"):
        PLAIN.normalize(frames().float())
