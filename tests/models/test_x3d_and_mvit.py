"""X3D and MViT beyond the founding numbers: training, heads, sizes, drop path, words of errors."""

from __future__ import annotations

import copy
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.drop_path import DropPath
from twinreel.models.mvit import MViT, PooledAttention, mvitv2_s_16x4, resize_positions
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.training_modes import checkpoint_activations
from twinreel.models.weights import load_weights
from twinreel.models.x3d import X3D, x3d_l, x3d_small, x3d_xs

# Sums run in another order for other batch sizes: too much to tell from a mistake in float32.
DOUBLE = {"atol": 1e-9, "rtol": 1e-9}
BUILDERS = ("x3d", "mvit")


def reads(frames: int = 4, crop: int = 32) -> Preprocessing:
    return Preprocessing(num_frames=frames, frame_rate=8.0, crop_size=crop)


def build(name: str, **options: Any) -> X3D | MViT:
    """A tiny network of each kind whose every part takes part."""
    torch.manual_seed(0)
    preprocessing = options.pop("preprocessing", reads())
    if name == "mvit":
        sizes: dict[str, Any] = {"width": 16, "depth": 5, "widen_at": (1, 2, 3), **options}
        model: X3D | MViT = MViT(preprocessing=preprocessing, num_classes=5, **sizes)
    else:
        sizes = {"widths": (8, 8, 8, 16, 16), "depths": (1, 2, 3, 1), "feature_size": 24, **options}
        model = X3D(preprocessing=preprocessing, num_classes=5, **sizes)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm3d):
            nn.init.ones_(part.weight)  # the last of each branch begins at 0
            part.momentum = 1.0
    with torch.no_grad():
        crop = options.get("train_crop_size") or preprocessing.crop_size
        model.train()(video(4, preprocessing.num_frames, crop))
    return model.eval()


def video(batch: int = 2, frames: int = 4, height: int = 32, width: int | None = None) -> Tensor:
    return torch.randn(batch, 3, frames, height, width or height, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", BUILDERS)
def test_logits_in_training_and_scores_in_evaluation(name: str):
    model = build(name, dropout=0.0, drop_path=0.0)
    clips = video(3)
    with torch.no_grad():
        scores, features = model(clips), model.forward_features(clips)
    assert features.shape == (3, model.feature_size)
    assert scores.shape == (3, 5)
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(3))
    torch.testing.assert_close(scores, model.head.projection(features).softmax(dim=1).detach())
    for activation, function in (("sigmoid", torch.sigmoid), ("none", lambda logits: logits)):
        other = build(name, head_activation=activation)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(clips), function(model.head.projection(features)))
    for part in model.modules():
        part.training = not isinstance(part, nn.BatchNorm3d)
    torch.testing.assert_close(model(clips), model.head.projection(features))


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_reach_every_parameter(name: str):
    model = build(name).train()
    functional.cross_entropy(model(video(4)), torch.tensor([0, 1, 2, 3])).backward()
    assert [key for key, value in model.named_parameters() if value.grad is None] == []
    # Only the class token is read after the last block, and it is neither pooled nor has it a position.
    last = ("blocks.4.attn.pool_q.", "blocks.4.attn.rel_pos_")
    without = [key for key, value in model.named_parameters() if not value.grad.any()]
    assert all(key.startswith(last) for key in without), without
    assert len(without) == (4 if name == "mvit" else 0)


def test_x3d_begins_with_blocks_that_are_their_shortcuts():
    model = x3d_small(num_classes=6)
    last = [part.weight for key, part in model.named_modules() if key.endswith("branch2.c_bn")]
    assert len(last) == 11 and not any(weight.any() for weight in last)
    assert model.s3.pathway0_res1.branch2.a_bn.weight.eq(1).all()
    assert model.head.projection.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not model.head.projection.bias.any()
    convolution = model.s5.pathway0_res0.branch2.a.weight
    assert convolution.std().item() == pytest.approx(math.sqrt(2 / len(convolution)), rel=0.05)  # fan out


def test_mvit_begins_as_the_authors_has_it():
    model = MViT(preprocessing=reads(), width=96, depth=2, widen_at=(1,))
    assert model.blocks[1].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[1].attn.pool_k.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].attn.rel_pos_h.std().item() == pytest.approx(0.02, rel=0.1)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            assert part.weight.eq(1).all() and part.bias.eq(0.02).all() and part.eps == 1e-6
        if isinstance(part, nn.Linear):
            assert part.bias.eq(0.02).all()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_new_head_leaves_the_rest(name: str):
    model = build(name).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    features = model.forward_features(video().double())
    model.reset_head(7)
    assert model.num_classes == 7 and model(video().double()).shape == (2, 7)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert changed == ["head.projection.weight", "head.projection.bias"]
    assert all(key.startswith(model.head_prefixes) for key in changed)
    assert torch.equal(model.forward_features(video().double()), features)
    with pytest.raises(ConfigError, match="num_classes must be at least 1; got 0"):
        model.reset_head(0)
    fresh = build(name)
    report = load_weights(fresh, model.state_dict(), scope="backbone")
    assert report.kept == tuple(changed) and report.dropped == tuple(changed)


@pytest.mark.parametrize("name", BUILDERS)
def test_in_eval_mode_a_clip_does_not_depend_on_its_batch(name: str):
    model = build(name).double()
    clips = video(3).double()
    with torch.no_grad():
        apart = torch.cat([model(clips[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(model(clips), apart, **DOUBLE)
        assert (apart[0] - apart[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", BUILDERS)
def test_channels_last_gives_the_same(name: str):
    model = build(name).double()
    with torch.no_grad():
        plain = model(video().double())
        model.to(memory_format=torch.channels_last_3d)
        last = model(video().double().to(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(last, plain, **DOUBLE)


@pytest.mark.parametrize(("name", "blocks"), [("x3d", 8), ("mvit", 5)])
def test_recomputed_training_is_the_same_bit_for_bit(name: str, blocks: int):
    results = []
    for recompute in (False, True):
        model = build(name, drop_path=0.3).train()
        if recompute:
            assert checkpoint_activations(model) == blocks
        torch.manual_seed(3)
        loss = functional.cross_entropy(model(video(4)), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_copy_and_its_state_dict_are_the_same_model(name: str):
    model = build(name)
    again = build(name)
    for parameter in again.parameters():
        nn.init.uniform_(parameter)
    again.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(again(video()), model(video()))
        assert torch.equal(copy.deepcopy(model)(video()), model(video()))


# Drop path. The founding code's had no effect at all.


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    drop = DropPath(0.25).train()
    branch = torch.ones(4000, 2, 3)
    dropped = drop(branch)
    per_sample = dropped.flatten(1)
    assert torch.equal(per_sample.amin(dim=1), per_sample.amax(dim=1))
    assert set(per_sample[:, 0].tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert per_sample[:, 0].mean().item() == pytest.approx(1.0, abs=0.04)
    assert drop(branch.to(torch.bfloat16)).dtype == torch.bfloat16
    assert drop.eval()(branch) is branch
    assert DropPath(0.0).train()(branch) is branch
    torch.manual_seed(5)
    first = drop.train()(branch)
    torch.manual_seed(5)
    assert torch.equal(drop(branch), first)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_drop_path_of_everything_is_refused(rate: float):
    with pytest.raises(ConfigError, match=r"drop_path must be from 0 to below 1; got"):
        DropPath(rate)


@pytest.mark.parametrize("name", BUILDERS)
def test_drop_path_changes_training_and_not_evaluation(name: str):
    model, plain = build(name, dropout=0.0, drop_path=0.5), build(name, dropout=0.0, drop_path=0.0)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(video(4)), plain(video(4)))
    for part in (*model.modules(), *plain.modules()):
        part.training = not isinstance(part, nn.BatchNorm3d)
    one, other = model(video(4)), model(video(4))
    assert (one - other).abs().max() > 1e-3
    assert (one - plain(video(4))).abs().max() > 1e-3
    assert torch.equal(plain(video(4)), plain(video(4)))


def test_drop_path_grows_with_depth():
    rates = [part.rate for part in build("mvit", drop_path=0.4).modules() if isinstance(part, DropPath)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    rates = [part.rate for part in build("x3d", drop_path=0.5).modules() if isinstance(part, DropPath)]
    assert rates == pytest.approx([0.2, 0.3, 0.3, 0.4, 0.4, 0.4, 0.5])  # stage / 5, the same within a stage


# X3D


def test_x3d_of_a_larger_input_averages_the_scores_of_windows():
    model = build("x3d", preprocessing=reads(4, 33), train_crop_size=64).double()
    maps: list[Tensor] = []
    model.head.conv_5_bn.register_forward_hook(lambda module, inputs, output: maps.append(output.relu()))
    with torch.no_grad():
        scores = model(video(2, 5, 96, 128).double())
        features = model.forward_features(video(2, 5, 96, 128).double())
        assert maps[0].shape[2:] == (5, 3, 4)
        windows = [
            model.head.lin_5(maps[0][:, :, t : t + 4, y : y + 2, x : x + 2].mean(dim=(2, 3, 4), keepdim=True))
            .relu()
            .flatten(1)
            for t in range(2)
            for y in range(2)
            for x in range(3)
        ]
        expected = torch.stack([model.head.projection(window).softmax(dim=1) for window in windows]).mean(dim=0)
    torch.testing.assert_close(scores, expected, **DOUBLE)
    torch.testing.assert_close(features, torch.stack(windows).mean(dim=0), **DOUBLE)


def test_x3d_window_follows_the_preprocessing_unless_a_crop_is_named():
    model = build("x3d", preprocessing=reads(4, 64))
    assert model(video(2, 4, 64)).shape == (2, 5)
    model.preprocessing = reads(4, 32)
    with torch.no_grad():
        assert model(video(2, 4, 32)).shape == (2, 5)
    with pytest.raises(
        ConfigError, match=r"X3D: a video .* = \(2, 3, 3, 32, 32\) gives the head 3 x 1 x 1 positions, "
    ):
        model(video(2, 3, 32))
    with pytest.raises(ConfigError, match=r"fewer than the 4 x 2 x 2 .* those of 4 frames of 64 pixels"):
        build("x3d", train_crop_size=64, preprocessing=reads(4, 32))(video(2, 4, 32))


def test_x3d_gates_only_even_blocks():
    gated = [(key, part.se is not None) for key, part in build("x3d").named_modules() if key.endswith("branch2")]
    assert [on for _, on in gated] == [True, True, False, True, False, True, True]


def test_x3d_time_stride_halves_the_map():
    model = x3d_small(num_classes=6).eval()
    maps: list[Tensor] = []
    model.s5.register_forward_hook(lambda module, inputs, output: maps.append(output))
    with torch.no_grad():
        assert model(video(1, 16, 96)).shape == (1, 6)
    assert maps[0].shape == (1, 128, 8, 3, 3)


@pytest.mark.parametrize(
    ("builder", "count"),
    [(x3d_xs, 3_794_322), (x3d_l, 6_153_432), (lambda: x3d_small(num_classes=10), 602_258)],
)
def test_x3d_sizes(builder: Callable[[], X3D], count: int):
    assert sum(parameter.numel() for parameter in builder().parameters()) == count


def test_what_x3d_refuses():
    for options, words in (
        ({"num_classes": 0}, r"num_classes must be at least 1; got 0"),
        ({"dropout": 1.5}, r"dropout must be from 0 to 1; got 1.5"),
        ({"head_activation": "softmaxx"}, r"must be softmax, sigmoid or none; got 'softmaxx'"),
        ({"train_crop_size": 0}, r"train_crop_size must be at least 1 pixel; got 0"),
        ({"drop_path": 1.0}, r"drop_path must be from 0 to below 1; got 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            x3d_small(**options)  # type: ignore[arg-type]
    model = build("x3d")
    with pytest.raises(ConfigError, match=r"X3D wants a float video \(B, 3, T, H, W\); got torch.uint8"):
        model(video().byte())
    with pytest.raises(ConfigError, match=r"X3D: the input .* is too small to train on"):
        build("x3d", preprocessing=reads(1)).train()(video(1, 1))


# MViT


def naive_attention(attention: PooledAttention, tokens: Tensor) -> Tensor:
    """Every pair of a query and a key by itself, with the distance rule written out."""
    heads, channels = attention.num_heads, attention.channels
    results = []
    for row in tokens:
        q, k, v = attention.qkv(row).view(len(row), 3, heads, channels).permute(1, 2, 0, 3)
        outputs = []
        for head in range(heads):
            pooled = []
            for value, pool, norm in (
                (q, attention.pool_q, attention.norm_q),
                (k, attention.pool_k, attention.norm_k),
                (v, attention.pool_v, attention.norm_v),
            ):
                grid = pool(value[head, 1:].T.reshape(1, channels, *attention.grid))[0].flatten(1).T
                pooled.append(norm(torch.cat((value[head, :1], grid))))
            logits = pooled[0] @ pooled[1].T / math.sqrt(channels)
            for i, at in enumerate(places(attention.q_grid)):
                for j, to in enumerate(places(attention.kv_grid)):
                    for axis, table in enumerate((attention.rel_pos_t, attention.rel_pos_h, attention.rel_pos_w)):
                        sizes = attention.q_grid[axis], attention.kv_grid[axis]
                        q_step, k_step = max(sizes[1] / sizes[0], 1), max(sizes[0] / sizes[1], 1)
                        distance = int(at[axis] * q_step - to[axis] * k_step + (sizes[1] - 1) * k_step)
                        logits[i + 1, j + 1] += pooled[0][i + 1] @ table[distance]
            mixed = logits.softmax(dim=1) @ pooled[2]
            outputs.append(torch.cat((mixed[:1], mixed[1:] + pooled[0][1:])))
        results.append(attention.proj(torch.cat(outputs, dim=1)))
    return torch.stack(results)


def places(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    return [(t, y, x) for t in range(grid[0]) for y in range(grid[1]) for x in range(grid[2])]


@pytest.mark.parametrize(
    ("grid", "stride_q", "stride_kv"),
    [((2, 4, 3), (1, 1, 1), (1, 2, 2)), ((2, 5, 7), (1, 2, 2), (1, 1, 1)), ((3, 5, 4), (1, 2, 2), (1, 3, 3))],
)
def test_attention_is_that_of_single_pairs(grid: Any, stride_q: Any, stride_kv: Any):
    attention = PooledAttention(6, 8, 2, grid, stride_q, stride_kv).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    tokens = torch.randn(2, 1 + math.prod(grid), 6, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(attention(tokens), naive_attention(attention, tokens), **DOUBLE)


def test_mvit_of_another_size_says_both_sizes_and_the_keys():  # B057
    model = build("mvit", preprocessing=reads(8, 32))
    words = (
        "MViT reads 8 frames of 32 x 32; got 16 frames of 40 x 48; set model.preprocessing.num_frames=16 and "
        "model.preprocessing.crop_size=40"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        model(video(1, 16, 40, 48))
    with pytest.raises(ConfigError, match=r"MViT wants a float video \(B, 3, T, H, W\)"):
        model(video(1)[0])


@pytest.mark.parametrize(("frames", "crop"), [(16, 32), (8, 48), (5, 30)])
def test_weights_of_another_size_are_interpolated(frames: int, crop: int, caplog: pytest.LogCaptureFixture):  # B057
    small, large = (
        build("mvit", preprocessing=reads(8, 32)),
        MViT(preprocessing=reads(frames, crop), num_classes=5, width=16, depth=5, widen_at=(1, 2, 3)),
    )
    given = small.state_dict()
    with caplog.at_level(logging.INFO, logger="twinreel"):
        resized = resize_positions(given, large)
    large.load_state_dict(resized, strict=True)
    changed = [key for key in given if resized[key] is not given[key]]
    assert changed and all("rel_pos_" in key for key in changed)
    assert len(caplog.records) == 1
    rounded = 2 * math.ceil(frames / 2), 4 * math.ceil(crop / 4)
    assert caplog.records[0].getMessage() == (
        f"{len(changed)} position tables interpolated: the weights are for about 8 frames of 32 x 32, "
        f"the model reads {rounded[0]} frames of {rounded[1]} x {rounded[1]}"
    )
    for key in changed:
        length = len(large.get_parameter(key))
        torch.testing.assert_close(resized[key][length // 2], given[key][len(given[key]) // 2])  # distance 0
        expected = functional.interpolate(given[key].T[None], size=length, mode="linear", align_corners=False)[0].T
        torch.testing.assert_close(resized[key], expected)
    with torch.no_grad():
        assert large.eval()(video(1, frames, crop)).isfinite().all()


@pytest.mark.parametrize(("frames", "crop"), [(16, 112), (8, 160)])
def test_weights_of_8_frames_of_112_load_for_more(frames: int, crop: int, caplog: pytest.LogCaptureFixture):  # B057
    def tiny(frames: int, crop: int) -> MViT:
        return MViT(preprocessing=reads(frames, crop), num_classes=5, width=8, depth=3, widen_at=(1,)).eval()

    trained, model = tiny(8, 112), tiny(frames, crop)
    with caplog.at_level(logging.INFO, logger="twinreel"):
        report = load_weights(model, trained.state_dict())
    assert report.parameter_share == 1.0 and report.kept == ()
    assert f"weights are for about 8 frames of 112 x 112, the model reads {frames} frames of {crop}" in caplog.text
    with torch.no_grad():
        assert model(video(1, frames, crop)).isfinite().all()
        model.preprocessing = trained.preprocessing  # and back again
        assert model(video(1, 8, 112)).isfinite().all()


def test_what_fits_is_left_alone():
    model = build("mvit")
    given = model.state_dict()
    other_channels = {key: value[:3, :7] if "rel_pos_h" in key else value for key, value in given.items()}
    for tensors, to in ((given, model), (other_channels, model), (given, build("x3d"))):
        resized = resize_positions(tensors, to)
        assert resized.keys() == tensors.keys()
        assert all(resized[key] is value for key, value in tensors.items())
    key = "blocks.0.attn.rel_pos_h"
    assert resize_positions({key: given[key].half()[:5]}, model)[key].dtype == torch.float16


def test_another_preprocessing_resizes_the_model(caplog: pytest.LogCaptureFixture):
    model = build("mvit", preprocessing=reads(8, 32))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    model.preprocessing = model.preprocessing.replace(mean=(0.5, 0.5, 0.5))
    assert all(parameters[key] is value for key, value in model.named_parameters())
    with caplog.at_level(logging.INFO, logger="twinreel"):
        model.preprocessing = reads(16, 48)
    assert "interpolated from 8 frames of 32 x 32 to 16 frames of 48 x 48" in caplog.text
    wanted = MViT(preprocessing=reads(16, 48), num_classes=5, width=16, depth=5, widen_at=(1, 2, 3))
    wanted.load_state_dict(resize_positions(state, wanted), strict=True)
    with torch.no_grad():
        assert torch.equal(model(video(1, 16, 48)), wanted.eval()(video(1, 16, 48)))
        model.preprocessing = reads(1, 16)
        assert model(video(1, 1, 16)).shape == (1, 5)


def test_what_mvit_refuses():
    with pytest.raises(ConfigError, match=r"MViT: num_classes .* got 0; dropout .* got -1; .* got 'tanh'"):
        MViT(preprocessing=reads(), num_classes=0, dropout=-1, head_activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drop_path must be"):
        MViT(preprocessing=reads(), depth=2, widen_at=(), drop_path=1.0)


def test_mvit_positions_matter():
    model = build("mvit").double()
    clips = video().double()
    with torch.no_grad():
        before = model(clips)
        for key, parameter in model.named_parameters():
            if "rel_pos_" in key and "blocks.4" not in key:
                parameter.zero_()
        assert (model(clips) - before).abs().max() > 1e-4


# VmHWM begins anew with a program; ru_maxrss would be that of the process that started it, where that was larger.
MEMORY = """
import torch
from twinreel.models.mvit import mvitv2_s_16x4
torch.set_num_threads(1)
model = mvitv2_s_16x4().eval()
with torch.no_grad():
    assert model(torch.zeros(1, 3, 16, 224, 224)).shape == (1, 400)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_a_clip_fits_in_two_gigabytes():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 2e9


@pytest.mark.slow
def test_mvitv2_s_trains_on_small_clips():
    model = mvitv2_s_16x4(num_classes=3, preprocessing=reads(4, 32)).train()
    functional.cross_entropy(model(video(2)), torch.tensor([0, 2])).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
