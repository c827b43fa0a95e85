"""RandAugment against Pillow's operations, random erasing, both keyed by the sample."""

import importlib.util
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn import functional

from twinreel.data import augment
from twinreel.data.augment import OPERATIONS, RandAugment, check_augment, rand_augment, random_erasing
from twinreel.errors import ConfigError, DependencyError

needs_kornia = pytest.mark.skipif(
    importlib.util.find_spec("kornia") is None, reason="kornia is not installed (the extra twinreel[augment])"
)
GRAY = (128, 128, 128)


def clips(size=3, frames=2, height=40, width=56):
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(size * frames, 3, 6, 8, generator=generator) * 330 - 40
    smooth = functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 255).to(torch.uint8)
    return smooth.permute(0, 2, 3, 1).reshape(size, frames, height, width, 3).contiguous()


def affine(picture, *matrix):
    return picture.transform(picture.size, Image.AFFINE, matrix, resample=Image.BILINEAR, fillcolor=GRAY)


PILLOW = {  # as timm applies them: picture, strength 0 to 1, sign
    "auto_contrast": lambda picture, strength, sign: ImageOps.autocontrast(picture),
    "equalize": lambda picture, strength, sign: ImageOps.equalize(picture),
    "invert": lambda picture, strength, sign: ImageOps.invert(picture),
    "posterize": lambda picture, strength, sign: ImageOps.posterize(picture, max(1, 4 - int(4 * strength))),
    "solarize": lambda picture, strength, sign: ImageOps.solarize(picture, 256 - int(strength * 256)),
    "add_to_dark": lambda picture, strength, sign: picture.point(
        [min(255, v + int(strength * 110)) if v < 128 else v for v in range(256)] * 3
    ),
    "color": lambda picture, strength, sign: ImageEnhance.Color(picture).enhance(max(0.1, 1 + 0.9 * strength * sign)),
    "contrast": lambda picture, strength, sign: ImageEnhance.Contrast(picture).enhance(
        max(0.1, 1 + 0.9 * strength * sign)
    ),
    "brightness": lambda picture, strength, sign: ImageEnhance.Brightness(picture).enhance(
        max(0.1, 1 + 0.9 * strength * sign)
    ),
    "sharpness": lambda picture, strength, sign: ImageEnhance.Sharpness(picture).enhance(
        max(0.1, 1 + 0.9 * strength * sign)
    ),
    "rotate": lambda picture, strength, sign: picture.rotate(
        30 * strength * sign, resample=Image.BILINEAR, fillcolor=GRAY
    ),
    "shear_x": lambda picture, strength, sign: affine(picture, 1, 0.3 * strength * sign, 0, 0, 1, 0),
    "shear_y": lambda picture, strength, sign: affine(picture, 1, 0, 0, 0.3 * strength * sign, 1, 0),
    "translate_x": lambda picture, strength, sign: affine(
        picture, 1, 0, 0.45 * strength * sign * picture.width, 0, 1, 0
    ),
    "translate_y": lambda picture, strength, sign: affine(
        picture, 1, 0, 0, 0, 1, 0.45 * strength * sign * picture.height
    ),
}  # fmt: skip


@needs_kornia
@pytest.mark.parametrize("strength", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_pillows_in_every_frame(name, sign, strength):
    [frames] = clips(size=1)
    found = augment._change(frames, [(name, strength, sign)])
    assert found.dtype == torch.uint8 and found.shape == frames.shape
    for before, after in zip(frames, found, strict=True):
        wanted = np.asarray(PILLOW[name](Image.fromarray(before.numpy()), strength, sign)).astype(int)
        off = np.abs(wanted - after.numpy().astype(int)).max(axis=2)
        geometric = name.startswith(("rotate", "shear", "translate"))
        # Pillow rounds down, and it neither mixes the outermost pixels with the fill nor interpolates beyond 1/256.
        assert np.quantile(off, 0.93 if geometric else 1.0) <= (2 if geometric else 1)


@needs_kornia
def test_all_frames_of_a_clip_are_changed_alike_and_clips_differently():
    still = clips(size=1, frames=1).expand(6, 4, -1, -1, -1).contiguous()
    ids = [f"clip {i}" for i in range(6)]
    found = rand_augment(still, ids, seed=1, epoch=0, rule=RandAugment(num_ops=4, magnitude=7.0, probability=1.0))
    for clip in found:
        assert all(torch.equal(clip[0], frame) for frame in clip) and not torch.equal(clip[0], still[0, 0])
    assert len({clip.numpy().tobytes() for clip in found}) == 6


@needs_kornia
def test_a_clip_is_changed_the_same_way_in_any_batch_and_anew_each_epoch():
    frames, ids = clips(size=5), ["a", "b", "c", "d", "e"]
    rule = RandAugment(num_ops=3, magnitude=7.0)
    whole = rand_augment(frames, ids, seed=1, epoch=4, rule=rule)
    for order in ([4, 2, 0], [3, 1]):
        part = rand_augment(frames[order], [ids[i] for i in order], seed=1, epoch=4, rule=rule)
        assert torch.equal(part, whole[order])
    assert not torch.equal(whole, rand_augment(frames, ids, seed=1, epoch=5, rule=rule))
    assert not torch.equal(whole, rand_augment(frames, ids, seed=2, epoch=4, rule=rule))
    assert torch.equal(frames, clips(size=5))


@needs_kornia
def test_views_of_a_row_are_changed_in_their_own_ways_and_probability_zero_changes_nothing():
    frames = clips(size=1).expand(4, -1, -1, -1, -1)
    rule = RandAugment(num_ops=4, probability=1.0)
    found = rand_augment(frames, ["a", "a", "b", "b"], seed=1, epoch=0, rule=rule)
    assert len({clip.numpy().tobytes() for clip in found}) == 4
    assert torch.equal(found[0], rand_augment(frames[:1], ["a"], seed=1, epoch=0, rule=rule)[0])
    same = rand_augment(frames, list("abcd"), seed=1, epoch=0, rule=RandAugment(probability=0.0))
    assert torch.equal(same, frames) and same.data_ptr() != frames.data_ptr()


def test_what_is_drawn_is_distributed_as_told():
    rule = RandAugment(num_ops=4, magnitude=7.0, magnitude_std=0.5, probability=0.5)
    drawn = [op for i in range(1000) for op in augment._draw(augment.keyed_rng(0, 0, str(i)), rule)]
    assert len(drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    counts = {name: sum(op[0] == name for op in drawn) / len(drawn) for name in OPERATIONS}
    assert all(share == pytest.approx(1 / 15, abs=0.02) for share in counts.values())
    strengths = torch.tensor([op[1] for op in drawn])
    assert float(strengths.mean()) == pytest.approx(0.7, abs=0.01) and float(strengths.std()) == pytest.approx(
        0.05, abs=0.01
    )
    assert sum(op[2] for op in drawn) / len(drawn) == pytest.approx(0, abs=0.06)
    top = [op[1] for i in range(100) for op in augment._draw(augment.keyed_rng(i), RandAugment(magnitude=10))]
    assert max(top) == 1.0


def test_erasing_fills_one_box_of_all_frames_with_noise():
    video = torch.zeros(40, 3, 4, 32, 48)
    found = random_erasing(video, [str(i) for i in range(40)], seed=1, epoch=0, probability=0.5)
    assert torch.equal(video, torch.zeros_like(video)) and found.shape == video.shape
    erased = [clip for clip in found if clip.any()]
    assert 10 <= len(erased) <= 30
    for clip in erased:
        rows, columns = clip[0, 0].nonzero(as_tuple=True)
        box = (slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1))
        inside = clip[(..., *box)]
        assert (inside != 0).all() and int((clip != 0).sum()) == inside.numel()
        height, width = inside.shape[-2:]
        assert 0.015 <= height * width / (32 * 48) <= 0.36 and 0.2 <= width / height <= 4.5
        assert not torch.equal(inside[:, 0], inside[:, 1])
    noise = torch.cat([clip[clip != 0] for clip in erased])
    assert float(noise.mean()) == pytest.approx(0, abs=0.02) and float(noise.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_erasing_is_the_same_in_any_batch_and_anew_each_epoch(dtype):
    video, ids = torch.zeros(6, 3, 2, 24, 24, dtype=dtype), [*"abcde", "a"]
    whole = random_erasing(video, ids, seed=1, epoch=2, probability=1.0)
    assert whole.dtype == dtype and not torch.equal(whole[0], whole[5])  # two views of a
    part = random_erasing(video[[3, 0]], ["d", "a"], seed=1, epoch=2, probability=1.0)
    assert torch.equal(part, whole[[3, 0]])
    assert not torch.equal(whole, random_erasing(video, ids, seed=1, epoch=3, probability=1.0))
    assert random_erasing(video, ids, seed=1, epoch=2, probability=0.0) is video


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ops": 0}, "num_ops must be a whole number of at least 1; got 0"),
        ({"num_ops": 2.5}, "num_ops must be a whole number of at least 1; got 2.5"),
        ({"magnitude": 11}, "magnitude must be a number of 0 to 10; got 11"),
        (
            {"magnitude_std": -1.0, "probability": "often"},
            "magnitude_std must be .*-1.0; probability must be .*'often'",
        ),
        ({"magnitude": math.nan}, "magnitude must be a number of 0 to 10; got nan"),
    ],
)
def test_values_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=f"^data.rand_augment: {words}"):
        RandAugment(**options)


def test_a_rule_of_a_recipe_is_read_and_a_typing_error_named():
    assert RandAugment.of({"num_ops": 4, "magnitude": 7}) == RandAugment(num_ops=4, magnitude=7)
    assert RandAugment.of({}) == RandAugment()
    with pytest.raises(ConfigError, match=r"^data.rand_augment: unknown key 'num_op'; did you mean num_ops"):
        RandAugment.of({"num_op": 4})
    with pytest.raises(ConfigError, match=r"^data.rand_augment: magnitude must be a number of 0 to 10; got '7'"):
        RandAugment.of({"magnitude": "7"})


@pytest.mark.parametrize(
    ("frames", "ids"),
    [(torch.zeros(2, 1, 4, 4, 3), ["a", "b"]), (torch.zeros(2, 3, 1, 4, 4, dtype=torch.uint8), ["a", "b"]),
     (torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), ["a"])],
)  # fmt: skip
def test_frames_of_another_kind_are_refused(frames, ids):
    with pytest.raises(
        ConfigError, match=r"rand_augment: frames must be uint8 \(B, T, H, W, 3\) with B ids, got torch"
    ):
        rand_augment(frames, ids, seed=0, epoch=0)


def test_a_missing_kornia_is_said_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia", None)  # import fails, whether or not it is installed
    words = (
        r"data.rand_augment needs kornia, which is not installed; install it with `pip install 'twinreel\[augment\]'`"
    )
    with pytest.raises(DependencyError, match=words):
        check_augment()
    with pytest.raises(DependencyError, match=words):
        rand_augment(clips(), ["a", "b", "c"], seed=0, epoch=0)
    random_erasing(torch.zeros(1, 3, 1, 8, 8), ["a"], seed=0, epoch=0, probability=1.0)  # needs nothing


@needs_kornia
def test_an_installed_kornia_is_found():
    check_augment()
