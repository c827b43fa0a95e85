"""Crops, scaling, mirroring: what reaches the network."""

import numpy as np
import pytest
import torch

from twinreel.data.clip import Sample
from twinreel.data.loader import collate
from twinreel.data.transforms import Cut, center_square, cut_frames, network_input, random_square
from twinreel.models.preprocessing import Preprocessing


def prep(**values):
    return Preprocessing(**({"num_frames": 2, "frame_rate": 5.0, "crop_size": 8} | values))


@pytest.mark.parametrize(
    ("height", "width", "values", "expected"),
    [
        (8, 8, {}, (0, 0, 8, 8, 8)),
        (10, 20, {}, (0, 5, 10, 10, 8)),  # the largest center square, scaled to the crop
        (21, 10, {}, (5, 0, 10, 10, 8)),
        (64, 64, {"crop_size": 56, "short_side": 64}, (4, 4, 56, 56, 56)),
        (128, 160, {"crop_size": 56, "short_side": 64}, (8, 24, 112, 112, 56)),
        (4, 4, {}, (0, 0, 4, 4, 8)),
    ],
)
def test_center_square(height, width, values, expected):
    assert center_square(height, width, prep(**values)) == expected


def test_random_crop_reaches_every_offset_and_no_other():
    offsets = {random_square(np.random.default_rng(i), 10, 12, crop="random", crop_size=8)[:2] for i in range(600)}
    assert offsets == {(top, left) for top in range(3) for left in range(5)}


def test_random_crop_of_a_video_smaller_than_the_crop_takes_its_short_side():
    square = random_square(np.random.default_rng(0), 6, 9, crop="random", crop_size=8)
    assert square.height == square.width == 6 and square.top == 0 and 0 <= square.left <= 3


def test_square_crop_and_short_side():
    rng = np.random.default_rng(0)
    assert random_square(rng, 30, 50, crop="square", crop_size=8)[2:] == (30, 30, 8)
    assert random_square(rng, 30, 50, crop="random", crop_size=8, short_side=10)[2:] == (24, 24, 8)


def test_cutting_without_scaling_is_exact_and_scaling_matches_a_float_reference():
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), dtype=np.uint8))
    assert torch.equal(cut_frames(frames, Cut(3, 7, 8, 8, 8)), frames[:, 3:11, 7:15])
    for side in (5, 16):
        ours = cut_frames(frames, Cut(2, 4, side, side, 8)).float()
        part = frames[:, 2 : 2 + side, 4 : 4 + side].permute(0, 3, 1, 2).float()
        reference = torch.nn.functional.interpolate(part, (8, 8), mode="bilinear", antialias=True)
        assert (ours - reference.permute(0, 2, 3, 1)).abs().max() <= 1.0


def test_network_input_mirrors_only_the_flipped_samples():
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 2, 8, 8, 3), dtype=np.uint8))
    samples = [
        Sample(
            id=str(i), frames=frames[i], pts_seconds=torch.zeros(2), flip=bool(i), captions=["a"], caption_mask=[True]
        )
        for i in range(2)
    ]
    video = network_input(collate(samples), prep(), torch.device("cpu"))
    assert video.shape == (2, 3, 2, 8, 8) and video.dtype == torch.float32
    expected = frames.permute(0, 4, 1, 2, 3).float() / 255
    assert torch.allclose(video[0], expected[0]) and torch.allclose(video[1], expected[1].flip(-1))
    assert not torch.allclose(video[1], expected[1])
