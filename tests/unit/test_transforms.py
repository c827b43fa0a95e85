"""Crops, scaling, mirroring: what reaches the network."""

import numpy as np
import pytest
import torch

from twinreel.data.clip import Sample
from twinreel.data.loader import collate
from twinreel.data.transforms import (
    Cut,
    center_square,
    cut_frames,
    draw_short_side,
    flip_partners,
    flipped_labels,
    letterbox,
    letterbox_size,
    network_input,
    random_resized,
    random_square,
    three_squares,
)
from twinreel.errors import ConfigError
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


@pytest.mark.parametrize(
    ("height", "width", "values", "expected"),
    [
        (10, 20, {}, [(0, 0), (0, 5), (0, 10)]),  # left, center, right
        (20, 10, {}, [(0, 0), (5, 0), (10, 0)]),  # top, center, bottom
        (10, 10, {}, [(0, 0), (0, 0), (0, 0)]),
        (128, 160, {"crop_size": 56, "short_side": 64}, [(8, 0), (8, 24), (8, 48)]),
        (160, 128, {"crop_size": 56, "short_side": 64}, [(0, 8), (24, 8), (48, 8)]),
    ],
)
def test_three_crops_lie_along_the_longer_side(height, width, values, expected):
    cuts = three_squares(height, width, prep(**values))
    assert [cut[:2] for cut in cuts] == expected
    assert cuts[1] == center_square(height, width, prep(**values))
    for cut in cuts:
        assert cut[2:] == cuts[1][2:] and cut.top + cut.height <= height and cut.left + cut.width <= width


def test_the_short_side_is_drawn_from_its_range_both_ends_included():
    rng = np.random.default_rng(0)
    for draw in ("uniform", "inverse"):
        drawn = [draw_short_side(rng, (256, 320), draw) for _ in range(6000)]
        assert (min(drawn), max(drawn)) == (256, 320)
        if draw == "inverse":  # uniform in 1 / pixels: the mean of 1 / pixels is the middle, of pixels is less
            assert np.mean([1 / side for side in drawn]) == pytest.approx((1 / 256 + 1 / 320) / 2, rel=2e-3)
            assert np.mean(drawn) < 287
        else:
            assert np.mean(drawn) == pytest.approx(288, abs=1)
    before = rng.bit_generator.state
    assert draw_short_side(rng, 256) == 256 and rng.bit_generator.state == before


def test_jitter_scales_before_it_crops():
    """A frame of short side 240 at 256 to 320: crops of 224 / 256 to 224 / 320 of it, anywhere."""
    sides, tops, lefts = set(), set(), set()
    for index in range(800):
        rng = np.random.default_rng(index)
        cut = random_square(rng, 240, 320, crop="random", crop_size=224, short_side=draw_short_side(rng, (256, 320)))
        assert cut.height == cut.width and cut.top + cut.height <= 240 and cut.left + cut.width <= 320
        sides.add(cut.height), tops.add(240 - cut.height - cut.top), lefts.add(cut.left)
    assert (min(sides), max(sides)) == (168, 210) and 0 in tops and 0 in lefts


def test_random_resized_crop_has_the_area_and_aspect_of_its_ranges():
    height, width = 140, 140
    areas, aspects, offsets = [], [], set()
    for index in range(3000):
        cut = random_resized(np.random.default_rng(index), height, width, crop_size=8)
        assert cut.size == 8 and 0 <= cut.top <= height - cut.height and 0 <= cut.left <= width - cut.width
        areas.append(cut.height * cut.width / (height * width))
        aspects.append(cut.width / cut.height)
        offsets.add((cut.top == 0, cut.top == height - cut.height))
    assert 0.07 < min(areas) < 0.1 and 0.95 < max(areas) <= 1.0
    assert 0.72 < min(aspects) < 0.78 and 1.28 < max(aspects) < 1.38
    assert np.mean(np.log(aspects)) == pytest.approx(0, abs=0.02)  # as wide as high, in the logarithm
    assert len(offsets) >= 3  # the first and the last offset occur


def test_random_resized_crop_is_torchvisions_rule():
    """The same draws through its rule written out, with its order: area, aspect, top, left; fallback included."""
    for index in range(200):
        rng, again = np.random.default_rng(index), np.random.default_rng(index)
        height, width = (30, 300) if index % 2 else (64, 48)
        cut = random_resized(rng, height, width, crop_size=8, area=(0.5, 1.0))
        for _ in range(10):
            pixels, ratio = (
                height * width * again.uniform(0.5, 1.0),
                np.exp(again.uniform(np.log(3 / 4), np.log(4 / 3))),
            )
            w, h = round((pixels * ratio) ** 0.5), round((pixels / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                top, left = again.integers(0, height - h + 1), again.integers(0, width - w + 1)
                break
        else:
            h, w = (30, 40) if index % 2 else (64, 48)
            top, left = (height - h) // 2, (width - w) // 2
        assert cut == (top, left, h, w, 8)


def test_a_rectangle_is_scaled_to_a_square():
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3), dtype=np.uint8))
    ours = cut_frames(frames, Cut(1, 2, 6, 24, 12)).float()
    part = frames[:, 1:7, 2:26].permute(0, 3, 1, 2).float()
    reference = torch.nn.functional.interpolate(part, (12, 12), mode="bilinear", antialias=True)
    assert (ours - reference.permute(0, 2, 3, 1)).abs().max() <= 1.0


@pytest.mark.parametrize(
    ("height", "width", "size", "expected"),
    [
        (240, 320, 448, (336, 448)), (320, 240, 448, (448, 336)), (100, 333, 448, (134, 448)),
        (8, 8, 4, (4, 4)), (1, 500, 32, (1, 32)),
    ],
)  # fmt: skip
def test_letterbox_keeps_the_aspect(height, width, size, expected):  # ClipBERT defect 23
    assert letterbox_size(height, width, size) == expected
    frames = torch.full((2, height, width, 3), 200, dtype=torch.uint8)
    boxed = letterbox(frames, size)
    assert boxed.shape == (2, size, size, 3)
    assert (boxed[:, : expected[0], : expected[1]] == 200).all()
    assert int(boxed.sum()) == 200 * 2 * 3 * expected[0] * expected[1]  # the rest is black


def test_letterbox_of_the_right_size_is_exact():
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 12, 16, 3), dtype=np.uint8))
    assert torch.equal(letterbox(frames, 16)[:, :12], frames)


PARTNERS = flip_partners({"turn left": "turn right", "wave": None, "3": "4", "sit": "sit"})


@pytest.mark.parametrize(
    ("labels", "mirrored"),
    [
        (("turn left",), ("turn right",)),
        (("turn right",), ("turn left",)),
        (("run", "turn left"), ("run", "turn right")),
        (("run",), ("run",)),
        ((), ()),
        (("wave",), None),
        (("turn left", "wave"), None),
        ((3,), (4,)),
        ((4, 5), (3, 5)),
        (("3",), ("4",)),
    ],
)
def test_a_mirror_image_changes_the_labels_it_is_said_to_change(labels, mirrored):
    assert flipped_labels(labels, PARTNERS, has_captions=False) == mirrored
    if mirrored is not None:
        back = flipped_labels(mirrored, PARTNERS, has_captions=False)
        assert back == labels and [type(label) for label in back] == [type(label) for label in labels]


def test_captions_would_go_on_saying_the_old_label():
    assert flipped_labels(("turn left",), PARTNERS, has_captions=True) is None
    assert flipped_labels(("run",), PARTNERS, has_captions=True) == ("run",)


@pytest.mark.parametrize("pairs", [{"a": "b", "b": "c"}, {"a": "b", "c": "b"}, {"a": "b", "b": None}])
def test_partners_that_are_none_of_each_other_are_refused(pairs):
    with pytest.raises(ConfigError, match=r"flip_labels: '.' would become '?.*'? and "):
        flip_partners(pairs)
