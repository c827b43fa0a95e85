"""C2D, I3D, Slow and SlowFast beside their parity tests: heads, windows, start values, errors, recomputation."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import resnet3d, slowfast
from twinreel.models.classifier import check_classifier
from twinreel.models.nonlocal_block import NonLocal
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.residual_stages import Bottleneck, Branch, temporal_kernels, window_means
from twinreel.models.training_modes import checkpoint_activations
from twinreel.models.weights import load_weights

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(module, name)
    for module in (resnet3d, slowfast)
    for name in module.__all__
    if re.fullmatch(r"(c2d|i3d|slow|slowfast)_.*(r50|r101|small)", name)
}
RULES = Preprocessing(num_frames=8, frame_rate=8.0, crop_size=32)
DEFAULTS: dict[str, Any] = {
    "num_classes": 5,
    "dropout": 0.0,
    "head_activation": "softmax",
    "zero_init_residual": True,
    "train_crop_size": None,
    "preprocessing": RULES,
}


def i3d_nln(**options: Any) -> nn.Module:
    """A narrow, shallow I3D with a pool in time and two non-local blocks."""
    kernels = ((5,), (3,), (3, 1), (3, 1), (1, 3))
    arguments = {"width": 8, "depths": (1, 2, 2, 1), "pool_time": True, "non_local": "softmax", **DEFAULTS, **options}
    return resnet3d.ResNet3D(kernels=kernels, **arguments)


def slow(**options: Any) -> nn.Module:
    """The slow pathway alone, narrow and shallow: neither pool in time nor non-local blocks."""
    arguments = {"width": 8, "depths": (1, 2, 1, 1), "pool_time": False, **DEFAULTS, **options}
    return resnet3d.ResNet3D(kernels=((1,), (1,), (1,), (3,), (3,)), **arguments)


def slowfast_small(**options: Any) -> nn.Module:
    return slowfast.slowfast_small(**{**DEFAULTS, **options})


NETS: dict[str, Callable[..., nn.Module]] = {"i3d_nln": i3d_nln, "slow": slow, "slowfast_small": slowfast_small}
DOUBLE = {"atol": 1e-9, "rtol": 1e-9}


def video(batch: int = 2, size: int = 32, frames: int = 8) -> Tensor:
    return torch.randn(batch, 3, frames, size, size, generator=torch.Generator().manual_seed(1))


def build(name: str, **options: Any) -> nn.Module:
    """A net whose norms know the tests' videos, and whose residual branches and logits are not almost zero."""
    torch.manual_seed(0)
    model = NETS[name](**{"zero_init_residual": False, **options})
    for part in model.modules():
        if isinstance(part, nn.BatchNorm3d):
            part.momentum = 1.0
    with torch.no_grad():
        model.train()(video(4))
        model.head.projection.weight.mul_(20)
    return model.eval()


def meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return BUILDERS[name](**options)


def test_every_builder_is_here() -> None:
    assert len(BUILDERS) == 11


@pytest.mark.parametrize("name", BUILDERS)
def test_sizes_and_frames_in_the_docstrings_are_true(name: str) -> None:
    options = {"num_classes": 10} if name == "slowfast_small" else {}
    model, words = meta(name, **options), " ".join(str(BUILDERS[name].__doc__).split())
    size = sum(value.numel() for value in model.parameters())
    assert f"{size / 1e6:.1f} million parameters" in words
    check_classifier(model, name)
    rules = model.preprocessing
    assert f"{rules.num_frames} frames" in words and f"{rules.crop_size} x {rules.crop_size}" in words
    if isinstance(model, slowfast.SlowFast):
        assert f"the slow pathway sees {rules.num_frames // model.alpha} of them" in words


@pytest.mark.parametrize("name", BUILDERS)
def test_the_signature_is_a_schema_of_plain_types(name: str) -> None:
    hints = typing.get_type_hints(BUILDERS[name])
    for option, parameter in inspect.signature(BUILDERS[name]).parameters.items():
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
        if option != "preprocessing":
            parts = typing.get_args(hints[option]) or (hints[option],)
            assert all(part in (int, float, str, bool, type(None)) or isinstance(part, str) for part in parts), option


def test_where_kernels_reach_through_time() -> None:
    assert temporal_kernels((3, 1), 4) == (3, 1, 3, 1)
    assert temporal_kernels((3,), 5, 2) == (3, 3, 1, 1, 1)
    with pytest.raises(ConfigError, match="has 4 blocks, so 0 to 4 of them can be temporal; got 5"):
        temporal_kernels((3,), 4, 5)

    def temporal(model: nn.Module, pathway: int) -> int:
        blocks = [block for name, block in model.s4.named_children() if name.startswith(f"pathway{pathway}_res")]
        return sum(block.branch2.a.kernel_size[0] == 3 for block in blocks)

    for name, options, slow, fast in (
        ("slowfast_8x8_r50", {}, 6, 6),
        ("slowfast_8x8_r101", {}, 23, 23),
        ("slowfast_8x8_r101", {"slow_temporal_blocks": 6}, 6, 23),
        ("slowfast_16x8_r101", {}, 6, 6),
    ):
        model = meta(name, **options)
        assert (temporal(model, 0), temporal(model, 1)) == (slow, fast)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("c2d_8x8_r50", {"s3": [1, 3], "s4": [1, 3, 5]}),
        ("slow_8x8_r50", {"s3": [1, 3], "s4": [1, 3, 5]}),
        ("slowfast_4x16_r50", {"s3": [1, 3], "s4": [1, 3, 5]}),
        ("slowfast_16x8_r101", {"s4": [6, 13, 20]}),
    ],
)
def test_non_local_blocks_are_an_option_of_every_published_net(name: str, blocks: dict[str, list[int]]) -> None:
    assert not [part for part in meta(name).modules() if isinstance(part, NonLocal)]
    parts = {
        key: part for key, part in meta(name, non_local="dot_product").named_modules() if isinstance(part, NonLocal)
    }
    assert set(parts) == {f"{stage}.pathway0_nonlocal{index}" for stage, after in blocks.items() for index in after}
    assert {part.form for part in parts.values()} == {"dot_product"}
    for key in parts:  # each comes right after the residual block of its number
        stage, last = key.split(".")
        names = [child for child, _ in meta(name, non_local="softmax").get_submodule(stage).named_children()]
        assert names[names.index(last) - 1] == last.replace("nonlocal", "res")


@pytest.mark.parametrize("form", ["softmax", "dot_product"])
def test_non_local_blocks_are_their_definition(form: typing.Literal["softmax", "dot_product"]) -> None:
    block, features = NonLocal(6, form).double().eval(), torch.randn(2, 6, 3, 5, 4, dtype=torch.float64)
    nn.init.normal_(block.bn.weight)
    pooled = functional.max_pool3d(features, (1, 2, 2)).flatten(2)
    flat = features.flatten(2)

    def line(layer: nn.Conv3d, values: Tensor) -> Tensor:
        return torch.einsum("oc,bcp->bop", layer.weight.flatten(1), values) + layer.bias[:, None]

    products = torch.einsum("bct,bcp->btp", line(block.conv_theta, flat), line(block.conv_phi, pooled))
    assert products.shape == (2, 60, 12)
    weights = (products / 3**0.5).softmax(2) if form == "softmax" else products / 12
    found = torch.einsum("btp,bcp->bct", weights, line(block.conv_g, pooled))
    naive = features + block.bn(line(block.conv_out, found).view_as(features))
    with torch.no_grad():
        torch.testing.assert_close(block(features), naive, **DOUBLE)
    assert (naive - features).abs().max() > 0.1


@pytest.mark.parametrize("name", NETS)
def test_start_values_are_the_founding_ones(name: str) -> None:
    torch.manual_seed(0)
    fresh = NETS[name](num_classes=50)
    for key, part in fresh.named_modules():
        if isinstance(part, nn.Conv3d):
            expected = (2 / (part.out_channels * part.weight[0, 0].numel())) ** 0.5
            assert part.weight.std().item() == pytest.approx(
                expected, rel=0.2 if part.weight.numel() < 2000 else 0.08
            ), key
            assert part.bias is None or not part.bias.any()
        elif isinstance(part, nn.BatchNorm3d):
            last = key.endswith("c_bn") or "nonlocal" in key
            assert (part.weight == (0 if last else 1)).all() and not part.bias.any(), key
        elif isinstance(part, nn.Linear):
            assert part.weight.std().item() == pytest.approx(0.01, rel=0.05) and not part.bias.any()
    open_branches = NETS[name](num_classes=50, zero_init_residual=False)
    assert all((part.weight == 1).all() for part in open_branches.modules() if isinstance(part, nn.BatchNorm3d))


def test_with_zero_init_a_block_begins_as_its_shortcut() -> None:
    fresh, features = slowfast_small(), torch.randn(2, 16 + 8, 4, 5, 5)
    block = fresh.s2.pathway0_res0
    assert isinstance(block, Bottleneck) and isinstance(block.branch2, Branch)
    assert torch.equal(block(features), functional.relu(block.branch1_bn(block.branch1(features))))


@pytest.mark.parametrize("name", NETS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = build(name).train()
    functional.cross_entropy(model(video(4)), torch.tensor([0, 1, 2, 3])).backward()
    without = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    # A norm takes out any shift before it: the bias of a non-local block's last convolution gets rounding noise at
    # most, and softmax takes out what a bias of the keys adds alike to all positions.
    assert [key for key in without if not key.endswith(("conv_out.bias", "conv_phi.bias"))] == []


@pytest.mark.parametrize("name", NETS)
def test_in_eval_mode_a_row_does_not_depend_on_its_batch_or_memory_format(name: str) -> None:
    model, clips = build(name).double(), video(3).double()
    with torch.no_grad():
        together = model(clips)
        apart = torch.cat([model(clips[i : i + 1]) for i in range(3)])
        model.to(memory_format=torch.channels_last_3d)
        last = model(clips.to(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(together, apart, **DOUBLE)
    torch.testing.assert_close(together, last, **DOUBLE)
    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_logits_in_train_mode_and_scores_in_eval_mode(name: str) -> None:
    model, clips = build(name, head_activation="none").double(), video().double()
    with torch.no_grad():
        features, logits = model.forward_features(clips), model(clips)
        torch.testing.assert_close(model.head.projection(features), logits, **DOUBLE)
        for activation, naive in (("softmax", logits.softmax(1)), ("sigmoid", logits.sigmoid())):
            active = build(name, head_activation=activation).double()
            assert active.head_activation == activation
            torch.testing.assert_close(active(clips), naive, **DOUBLE)
            # Train mode takes other statistics: only the head's mode is changed here.
            active.head.train()
            active.training = True
            torch.testing.assert_close(active(clips), logits, **DOUBLE)
    assert (
        model.num_classes == 5 and logits.shape == (2, 5) and features.shape == (2, model.head.projection.in_features)
    )


@pytest.mark.parametrize("name", NETS)
def test_a_larger_video_is_scored_at_every_position_and_then_averaged(name: str) -> None:
    model, positions = build(name).double(), []
    model.head.projection.register_forward_hook(lambda module, inputs, output: positions.append(output))
    clips = torch.randn(2, 3, 12, 96, 64, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        scores = model(clips)
        pooled = model.forward_features(clips)
        in_train = model.head.train()(model._pooled(clips))
    times = {"i3d_nln": 6 - 4 + 1, "slow": 12 - 8 + 1, "slowfast_small": 3 - 2 + 1}
    assert positions[0].shape == (2, times[name], 3, 2, 5)
    torch.testing.assert_close(scores, positions[0].softmax(-1).flatten(1, 3).mean(1))
    torch.testing.assert_close(in_train, positions[0].flatten(1, 3).mean(1))
    torch.testing.assert_close(model.head.projection(pooled), in_train)
    assert (scores - in_train.softmax(1)).abs().max() > 1e-4  # the order of the two matters


@pytest.mark.parametrize("crop_size", [224, 112, 96, 33, 32])
def test_a_training_clip_has_exactly_one_position(crop_size: int) -> None:
    model = slowfast.slowfast_small(preprocessing=RULES.replace(crop_size=crop_size), num_classes=5).eval()
    with torch.no_grad():
        assert model._pooled(video(1, crop_size)).shape[:4] == (1, 1, 1, 1)
        larger = model._pooled(video(1, crop_size + 32)).shape[:4]
    assert larger == (1, 1, 2, 2)


def test_the_window_follows_the_training_crop_if_that_is_stated() -> None:
    model = slowfast.slowfast_small(preprocessing=RULES.replace(crop_size=64), train_crop_size=32).eval()
    with torch.no_grad():
        assert model._pooled(video(1, 64)).shape[:4] == (1, 1, 2, 2)


def test_windows_are_an_average_pool() -> None:
    features = torch.randn(2, 3, 9, 4, 5)
    for window, stride in itertools.product([(1, 1, 1), (3, 2, 4), (9, 4, 5)], [1, 2]):
        pooled = functional.avg_pool3d(features, window, (stride, 1, 1)).permute(0, 2, 3, 4, 1)
        torch.testing.assert_close(window_means(features, window, stride), pooled)


def test_both_pathways_average_the_same_time() -> None:
    """Window t of the fast features begins alpha frames after window t - 1, as that of the slow ones does."""
    model = slowfast.slowfast_small(preprocessing=RULES, alpha=2, num_classes=5).eval()
    seen: dict[str, list[Tensor]] = {}
    model.s5.register_forward_hook(lambda module, inputs, output: seen.update(maps=output))
    with torch.no_grad():
        pooled = model._pooled(video(1, 32, 12))
    slow, fast = (features.mean(dim=(3, 4)) for features in seen["maps"])
    assert (slow.shape[2], fast.shape[2]) == (6, 12) and pooled.shape[1] == 3
    for window in range(3):
        expected = torch.cat(
            [slow[:, :, window : window + 4].mean(2), fast[:, :, 2 * window : 2 * window + 8].mean(2)], 1
        )
        torch.testing.assert_close(pooled[:, window, 0, 0], expected)


def test_the_slow_pathway_sees_its_frames_and_no_others() -> None:
    model, clips = slowfast.slowfast_small(), video(1, 112, 16).requires_grad_()
    taken: list[Tensor] = []
    model.s1.pathway0_stem.register_forward_hook(lambda module, inputs, output: taken.append(output))
    model.train()(clips)
    (gradient,) = torch.autograd.grad(taken[0].square().sum(), clips)
    assert gradient.abs().sum(dim=(0, 1, 3, 4)).nonzero().flatten().tolist() == [0, 5, 10, 15]


def test_dropout_acts_in_train_mode_only() -> None:
    model = build("slowfast_small", dropout=0.9)
    with torch.no_grad():
        assert torch.equal(model(video()), model(video()))
        model.head.train()
        assert not torch.equal(model(video()), model(video()))


@pytest.mark.parametrize("name", NETS)
def test_reset_head_changes_the_head_alone(name: str) -> None:
    model = build(name).to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    model.reset_head(9)
    after = model.state_dict()
    assert model.num_classes == 9 and list(after) == list(before)
    changed = {
        key for key in after if after[key].shape != before[key].shape or not torch.equal(after[key], before[key])
    }
    assert changed == {"head.projection.weight", "head.projection.bias"}
    assert all(key.startswith(model.head_prefixes) for key in changed)
    assert model.head.projection.weight.dtype == torch.bfloat16
    assert model.head.projection.weight.float().std().item() == pytest.approx(0.01, rel=0.1)
    assert not model.head.training
    with pytest.raises(ConfigError, match="num_classes must be at least 1; got 0"):
        model.reset_head(0)


def test_weights_of_another_number_of_classes() -> None:  # B055
    old, new = build("slowfast_small"), slowfast.slowfast_small(num_classes=7)
    with pytest.raises(CheckpointError, match=r"head\.projection"):
        load_weights(new, old.state_dict())
    report = load_weights(new, old.state_dict(), scope="backbone")
    assert sorted(report.dropped) == sorted(report.kept) == ["head.projection.bias", "head.projection.weight"]
    assert all(torch.equal(new.state_dict()[key], old.state_dict()[key]) for key in report.loaded)


def run(name: str, clips: Tensor, train: bool = False, **options: Any) -> None:
    NETS[name](**options).train(train)(clips)


@pytest.mark.parametrize(
    ("name", "clips", "options", "words"),
    [
        ("slow", video()[0], {}, r"ResNet3D wants a float video \(B, 3, T, H, W\); got torch.float32 \(3, 8"),
        ("slowfast_small", video().byte(), {}, "SlowFast wants a float video"),
        (
            "slowfast_small",
            video(2, 32, 10),
            {},
            "SlowFast: alpha=4 must divide the number of frames, .* the video has 10, nearest: 8 or 12",
        ),
        ("slowfast_small", video(2, 32, 3), {}, "the video has 3, nearest: 4"),
        (
            "slowfast_small",
            video(),
            {"preprocessing": RULES.replace(num_frames=15)},
            "the model's preprocessing has 15, nearest: 12 or 16",
        ),
        (
            "slowfast_small",
            video(2, 32, 8),
            {"preprocessing": RULES.replace(num_frames=16, crop_size=64)},
            r"\(B, 3, T, H, W\) = \(2, 3, 8, 32, 32\) gives the head 2 x 1 x 1 positions, fewer than the 4 x 2 x 2 "
            "that it averages, those of 16 frames of 64 x 64; use longer or larger clips, or set num_frames and crop",
        ),
        ("i3d_nln", video(2, 32, 6), {}, "gives the head 3 x 1 x 1 positions, fewer than the 4 x 1 x 1"),
        (
            "i3d_nln",
            video(2, 32, 1),
            {"preprocessing": RULES.replace(num_frames=1)},
            "gives the head 0 x 1 x 1 positions, fewer than the 1 x 1 x 1",
        ),
        ("slow", video(2, 16), {"train_crop_size": 64}, "those of 8 frames of 64 x 64"),
        (
            "i3d_nln",
            video(2, 16),
            {},
            "a non-local block pools 2 x 2 features, but this video gives it 1 x 1; use frames of more than 16 x 16",
        ),
    ],
)
def test_videos_that_do_not_fit_are_named(name: str, clips: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(name, clips, **options)


def test_an_input_too_small_to_train_on_is_refused_and_the_next_larger_one_trains() -> None:
    rules = RULES.replace(num_frames=4)
    with pytest.raises(ConfigError, match="too small to train on: its last layers see one value per channel"):
        run("slowfast_small", video(1, 32, 4), train=True, preprocessing=rules)
    run("slowfast_small", video(2, 32, 4), train=True, preprocessing=rules)
    run("slowfast_small", video(1, 33, 4), train=True, preprocessing=rules)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("slow_4x16_r50", {"num_classes": 0}, "num_classes must be at least 1; got 0"),
        ("slow_4x16_r50", {"dropout": 1.0}, "dropout must be from 0 to below 1; got 1.0"),
        ("slowfast_small", {"head_activation": "relu"}, "head_activation must be softmax, sigmoid or none; got 'relu'"),
        ("slow_4x16_r50", {"non_local": "gaussian"}, "non_local must be none, softmax or dot_product; got 'gaussian'"),
        ("slowfast_small", {"alpha": 0}, "alpha must be at least 1 and fusion_kernel an odd number; got 0 and 5"),
        ("slowfast_small", {"fusion_kernel": 4}, "got 4 and 4"),
        (
            "slowfast_8x8_r101",
            {"fast_temporal_blocks": 24},
            "has 23 blocks, so 0 to 23 of them can be temporal; got 24",
        ),
        ("slowfast_small", {"train_crop_size": 0}, "train_crop_size must be at least 1 pixel; got 0"),
        ("slow_8x8_r50", {"train_crop_size": -1}, "train_crop_size must be at least 1 pixel; got -1"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        BUILDERS[name](**options)


def test_scores_of_half_precision_are_float32() -> None:
    model = build("slowfast_small")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = model(video())
    assert scores.dtype == torch.float32
    assert (scores.sum(1) - 1).abs().max() < 1e-5


def one_step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    loss = functional.cross_entropy(model(video(4)), torch.tensor([0, 1, 2, 3]))
    loss.backward()
    return [loss.detach(), *(value.grad for value in model.parameters()), *model.buffers()]


def kept_bytes(model: nn.Module) -> int:
    """Bytes that one forward pass keeps for its backward pass, each storage once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(video(2, 64)).sum()
    loss.backward()
    return sum(size for address, size in sizes.items() if address not in parameters)


# Stems, residual blocks and non-local blocks: 1 + 6 + 2, 1 + 5, 2 + 8.
@pytest.mark.parametrize(("name", "blocks"), [("i3d_nln", 9), ("slow", 6), ("slowfast_small", 10)])
def test_activation_checkpointing_covers_every_block_and_changes_nothing(name: str, blocks: int) -> None:
    plain, recomputed = build(name, dropout=0.5).train(), build(name, dropout=0.5).train()
    keys = list(plain.state_dict())
    assert checkpoint_activations(recomputed) == blocks
    assert list(recomputed.state_dict()) == keys
    assert all(map(torch.equal, one_step(plain), one_step(recomputed)))


@pytest.mark.parametrize("name", ["i3d_nln", "slowfast_small"])
def test_recomputed_activations_are_not_kept(name: str) -> None:
    model = build(name).train()
    whole = kept_bytes(model)
    checkpoint_activations(model)
    assert kept_bytes(model) < 0.45 * whole
