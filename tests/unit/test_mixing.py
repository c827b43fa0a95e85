"""Mixup and cutmix: by hand, keyed, and the same however a batch is cut."""

import math

import pytest
import torch

from twinreel.data.mixing import draw_mix, mix_pairs
from twinreel.data.plan import Shares
from twinreel.errors import ConfigError

MIXUP, CUTMIX = {"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}
BOTH = MIXUP | CUTMIX


def batch(size=8, classes=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    video = torch.randn(size, 3, 2, 12, 16, generator=generator).to(dtype)
    return video, torch.eye(classes)[torch.arange(size) % classes]


def mixed(video, targets, *, positions=None, valid=None, seed=1, step=0, **options):
    valid = torch.ones(len(video), dtype=torch.bool) if valid is None else valid
    positions = range(len(video)) if positions is None else positions
    return mix_pairs(video, targets, positions=positions, valid=valid, seed=seed, step=step, **options)


def drawn(*key, height=12, width=16, **options):
    values = {"mixup_alpha": 0.0, "cutmix_alpha": 0.0, "probability": 1.0, "switch_probability": 0.5} | options
    return draw_mix(*key, height=height, width=width, **values)


def test_mixup_by_hand():
    video, targets = batch()
    found, wanted = mixed(video, targets, step=3, **MIXUP)
    for pair in range(4):
        mix = drawn(1, 3, pair, "mix", **MIXUP)
        assert mix.box is None and 0 < mix.share < 1
        for one, other in ((2 * pair, 2 * pair + 1), (2 * pair + 1, 2 * pair)):
            torch.testing.assert_close(found[one], mix.share * video[one] + (1 - mix.share) * video[other])
            torch.testing.assert_close(wanted[one], mix.share * targets[one] + (1 - mix.share) * targets[other])
    torch.testing.assert_close(wanted.sum(dim=1), torch.ones(8))


def test_cutmix_by_hand_the_same_box_in_all_frames_and_channels():
    video, targets = batch()
    found, wanted = mixed(video, targets, **CUTMIX)
    for pair in range(4):
        mix = drawn(1, 0, pair, "mix", **CUTMIX)
        top, left, bottom, right = mix.box
        for one, other in ((2 * pair, 2 * pair + 1), (2 * pair + 1, 2 * pair)):
            want = video[one].clone()
            want[:, :, top:bottom, left:right] = video[other][:, :, top:bottom, left:right]
            assert torch.equal(found[one], want)
            kept = (found[one] == video[one]).float().mean()  # counted, so a box at the border counts right
            torch.testing.assert_close(wanted[one], kept * targets[one] + (1 - kept) * targets[other])


def test_the_share_of_a_box_is_that_of_its_pixels_inside():
    clipped = 0
    for number in range(300):
        share, (top, left, bottom, right) = drawn(0, number, height=32, width=48, **CUTMIX)
        assert 0 <= top <= bottom <= 32 and 0 <= left <= right <= 48
        assert share == pytest.approx(1 - (bottom - top) * (right - left) / (32 * 48))
        clipped += top == 0 or left == 0 or bottom == 32 or right == 48
    assert clipped > 50


def test_shares_and_choices_are_distributed_as_told():
    mixes = [drawn(0, number, **BOTH, probability=0.6, switch_probability=0.3) for number in range(2000)]
    done = [mix for mix in mixes if mix is not None]
    assert len(done) / 2000 == pytest.approx(0.6, abs=0.05)
    assert sum(mix.box is not None for mix in done) / len(done) == pytest.approx(0.3, abs=0.05)
    shares = torch.tensor([mix.share for mix in done if mix.box is None])
    variance = 1 / (4 * (2 * 0.8 + 1))  # of Beta(a, a)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.04) and float(shares.var()) == pytest.approx(
        variance, abs=0.02
    )
    assert drawn(0, **BOTH, probability=0.0) is None and drawn(0) is None
    assert all(drawn(0, n, **CUTMIX, switch_probability=0.0).box for n in range(20))  # with one on, nothing is switched
    assert not any(drawn(0, n, **MIXUP, switch_probability=1.0).box for n in range(20))


@pytest.mark.parametrize("options", [MIXUP, CUTMIX, BOTH, BOTH | {"probability": 0.5}])
@pytest.mark.parametrize("cut", [(1, 8), (1, 2), (2, None), (2, 2), (2, 4), (4, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processes_and_micro_batches_give_the_same_bits(options, cut, dtype):
    video, targets = batch(dtype=dtype)
    valid = torch.tensor([True] * 4 + [False] + [True] * 3)
    want = mixed(video, targets, valid=valid, step=7, **options)
    assert want[0].dtype == dtype and not torch.equal(want[0], video)
    shares = Shares.cut(8, *cut, clips_together=2)  # keeps pairs together
    for process in range(shares.num_processes):
        for own in shares.of_process(process):
            part = slice(own.start, own.stop)
            found = mixed(video[part], targets[part], positions=own, valid=valid[part], step=7, **options)
            assert torch.equal(found[0], want[0][part]) and torch.equal(found[1], want[1][part])


def test_every_step_seed_and_pair_draws_anew_and_the_same_again():
    video, targets = batch(size=4)
    first = mixed(video, targets, **BOTH)[0]
    assert torch.equal(first, mixed(video, targets, **BOTH)[0])
    assert not torch.equal(first, mixed(video, targets, step=1, **BOTH)[0])
    assert not torch.equal(first, mixed(video, targets, seed=2, **BOTH)[0])
    assert drawn(1, 0, 0, "mix", **BOTH) != drawn(1, 0, 1, "mix", **BOTH)


@pytest.mark.parametrize("options", [MIXUP, CUTMIX])
def test_an_excluded_partner_leaves_a_clip_as_it_is(options):
    video, targets = batch(size=4)
    video[1] = math.nan
    found, wanted = mixed(video, targets, valid=torch.tensor([True, False, True, True]), **options)
    assert torch.equal(found[0], video[0]) and torch.equal(wanted[:2], targets[:2])
    assert not torch.equal(wanted[2], targets[2]) and torch.isfinite(found[[0, 2, 3]]).all()


def test_the_inputs_are_left_alone():
    video, targets = batch()
    before = video.clone(), targets.clone()
    for options in (BOTH, {}):
        found = mixed(video, targets, **options)
        assert torch.equal(video, before[0]) and torch.equal(targets, before[1])
        assert found[0].data_ptr() != video.data_ptr() and found[1].data_ptr() != targets.data_ptr()
    assert torch.equal(found[0], video) and torch.equal(found[1], targets)


def test_views_of_a_row_are_mixed_with_those_of_the_neighboring_row():
    video, targets = batch(size=8)
    found, _ = mixed(video, targets, views_per_row=2, **CUTMIX)
    for one, other, number in ((0, 2, 0), (1, 3, 1), (4, 6, 2), (5, 7, 3)):
        top, left, bottom, right = drawn(1, 0, number, "mix", **CUTMIX).box
        want = video[one].clone()
        want[..., top:bottom, left:right] = video[other][..., top:bottom, left:right]
        assert torch.equal(found[one], want)
    part = mixed(video[4:], targets[4:], positions=range(4, 8), views_per_row=2, **CUTMIX)
    assert torch.equal(part[0], found[4:])


@pytest.mark.parametrize(("positions", "views", "words"), [
    ([0, 1, 2], 1, "position 2 has its partner in another piece of it, or none.* a multiple of 2, or data.mixup=0"),
    ([1, 2], 1, "position 1 has"),
    ([0, 1], 2, "position 0 has.* a multiple of 4"),
])  # fmt: skip
def test_a_torn_pair_is_refused(positions, views, words):
    video, targets = batch(size=len(positions))
    with pytest.raises(ConfigError, match=words):
        mixed(video, targets, positions=positions, views_per_row=views, **MIXUP)
