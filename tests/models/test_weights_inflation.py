"""Networks of pictures, inflated: a video that stands still answers as its picture did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picture_networks import GoogLeNet2d, ResNet2d, randomize
from twinreel.errors import CheckpointError
from twinreel.models.resnet3d import c2d_8x8_r50, i3d_8x8_r50, i3d_nln_8x8_r50, slow_8x8_r50
from twinreel.models.s3dg import S3DG, s3dg
from twinreel.models.slowfast import slowfast_4x16_r50
from twinreel.models.weights import inflate_2d, load_partial, load_weights, read_weights
from twinreel.models.x3d import x3d_s

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def resnet() -> ResNet2d:
    model = ResNet2d().eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def googlenet() -> GoogLeNet2d:
    model = GoogLeNet2d().eval()
    randomize(model)
    return model


def still(frames: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """A picture (1, 3, H, W), and the video (1, 3, frames, H, W) that shows it all the time."""
    picture = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    return picture, picture[:, :, None].expand(-1, -1, frames, -1, -1)


def output_of(model: nn.Module, part: nn.Module, video: Tensor) -> Tensor:
    """What a part of a model returns, (B, C, T, H, W)."""
    seen: list[Any] = []
    handle = part.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model.eval()(video)
    handle.remove()
    output: Tensor = seen[0][0] if isinstance(seen[0], list | tuple) else seen[0]
    return output


def test_c2d_answers_as_the_picture_did_classes_included(resnet: ResNet2d):
    model: Any = c2d_8x8_r50(num_classes=1000, head_activation="none", train_crop_size=64)
    report = inflate_2d(model, resnet.state_dict())
    assert (report.kept, report.dropped, report.parameter_share) == ((), (), 1.0)
    picture, video = still(8)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval().forward_features(video), resnet.forward_features(picture), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(model(video), resnet(picture), atol=1e-4, rtol=1e-4)


# Zero padding tells the first and last frames from the rest, so the middle is compared: as many frames as the layers
# over time reach to both sides.
@pytest.mark.parametrize(("builder", "frames"), [(slow_8x8_r50, 22), (i3d_8x8_r50, 44), (i3d_nln_8x8_r50, 44)])
def test_the_middle_of_a_still_video_answers_as_the_picture_did(
    resnet: ResNet2d, builder: Callable[..., nn.Module], frames: int
):
    model: Any = builder(train_crop_size=64)
    report = load_weights(model, resnet.state_dict(), scope="backbone")
    head = {"head.projection.weight", "head.projection.bias"}
    assert {key for key in report.kept if "nonlocal" not in key} == head
    assert report.dropped == ("fc.weight", "fc.bias")
    assert any("nonlocal" in key for key in report.kept) == (builder is i3d_nln_8x8_r50)
    picture, video = still(frames)
    features = output_of(model, model.s5, video)
    with torch.no_grad():
        expected = resnet.forward_features(picture)
    middle = features[:, :, features.shape[2] // 2].mean(dim=(2, 3))
    torch.testing.assert_close(middle, expected, atol=1e-3, rtol=1e-4)
    if builder is i3d_8x8_r50:
        assert not torch.allclose(features[:, :, 0].mean(dim=(2, 3)), expected, atol=1e-2)  # the comparison can fail


def test_slowfast_takes_the_slow_pathway_where_it_reads_nothing_of_the_fast_one(resnet: ResNet2d):
    model: Any = slowfast_4x16_r50()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = inflate_2d(model, resnet.state_dict(), scope="backbone")
    after = model.state_dict()
    assert all(".pathway0_" in key for key in report.loaded)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed <= set(report.loaded)
    entry = [f"s{s}.pathway0_res0.{part}" for s in (2, 3, 4, 5) for part in ("branch1.weight", "branch2.a.weight")]
    norms = [key.replace(".weight", "_bn.running_mean") for key in entry]
    assert {*entry, *norms} <= set(report.kept)
    slow = {key for key in after if ".pathway0_" in key}
    assert {key.rpartition(".")[0] for key in slow - set(report.loaded)} == {
        layer.removesuffix(".weight") + norm for layer in entry for norm in ("", "_bn")
    }
    assert {"layer1.0.conv1.weight", "layer1.0.bn1.weight", "layer4.0.downsample.0.weight"} <= set(report.dropped)
    kernel = after["s5.pathway0_res1.branch2.a.weight"]
    assert kernel.shape[2] == 3
    torch.testing.assert_close(kernel.sum(2), resnet.state_dict()["layer4.1.conv1.weight"][..., :, :])
    assert "the slow pathway alone" in str(report) and 0.5 < report.parameter_share < 0.9


def test_s3dg_answers_as_the_picture_did_where_its_gates_are_open(googlenet: GoogLeNet2d):
    model: Any = s3dg()
    report = inflate_2d(model, googlenet.state_dict(), scope="backbone")
    assert {"fc.weight", "aux1.fc2.bias"} <= set(report.dropped)
    rest = [key for key in report.kept if not key.endswith("num_batches_tracked")]
    assert all(".gating" in key or key.startswith("video_tower.fc.") for key in rest)
    assert "raised by 0.00099, as its norms add 0.001 and ours 1e-05" in str(report)
    assert "convolutions over time and their norms were made so that they change nothing" in str(report)
    tower: S3DG = model.video_tower
    with torch.no_grad():
        for name, module in tower.named_modules():
            if name.rpartition(".")[2].startswith("gating"):
                module.fc.weight.zero_()
                module.fc.bias.fill_(50.0)
        picture, video = still(96)
        expected = googlenet.forward_features(picture)
    features = output_of(tower, tower.mixed_5c, video)
    middle = features[:, :, features.shape[2] // 2].mean(dim=(2, 3))
    torch.testing.assert_close(middle, expected, atol=1e-4, rtol=1e-3)


def test_one_tower_of_a_pair(googlenet: GoogLeNet2d):
    model: Any = s3dg()
    report = load_partial(model, "video_tower", googlenet.state_dict(), scope="backbone")
    assert "video_tower.mixed_5c.conv_b0.conv1.weight" in report.loaded
    with pytest.raises(CheckpointError, match="inflated into the video_tower alone"):
        load_partial(model, "video_tower.mixed_5c", googlenet.state_dict())


def test_pyslowfasts_own_flat_kernels(resnet: ResNet2d):
    """What TRAIN.CHECKPOINT_INFLATE reads: its own key names with kernels of pictures."""
    by_torchvision: Any = c2d_8x8_r50(num_classes=1000)
    inflate_2d(by_torchvision, resnet.state_dict())
    flat = {
        key: value[:, :, 0] if value.ndim == 5 else value for key, value in by_torchvision.state_dict().items()
    }  # of C2D every kernel has one frame
    model: Any = c2d_8x8_r50(num_classes=1000)
    assert read_weights({"model_state": flat}).layout == "slowfast_2d"
    load_weights(model, {"model_state": flat})
    assert all(torch.equal(value, by_torchvision.state_dict()[key]) for key, value in model.state_dict().items())
    other: Any = i3d_8x8_r50()
    report = load_weights(other, {"model_state": flat}, scope="backbone")
    assert report.kept == report.dropped == ("head.projection.weight", "head.projection.bias")


def test_another_head_says_so_and_nothing_is_copied(resnet: ResNet2d):
    model = slow_8x8_r50()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, resnet.state_dict())
    assert "a resnet_2d does not fit ResNet3D, nothing was loaded" in str(caught.value)
    assert "2 mis-shaped (fc.weight: file (1000, 2048) float32, model (400, 2048) float32" in str(caught.value)
    assert "Only the heads differ: weights_scope=backbone" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {**state, "layer5.0.conv1.weight": torch.zeros(1)}, r"1 unexpected \(layer5.0.conv1.weight\)"),
        (lambda state: {k: v for k, v in state.items() if "layer2.1.bn2" not in k}, r"4 missing \(s3.pathway0_res1"),
        (lambda state: {**state, "layer2.1.conv2.weight": torch.zeros(128, 4, 3, 3)}, r"1 mis-shaped \(layer2.1.conv2"),
    ],
)
def test_what_does_not_fit_is_listed(resnet: ResNet2d, change: Callable[[State], State], words: str):
    with pytest.raises(CheckpointError, match=words) as caught:
        inflate_2d(slow_8x8_r50(), change(dict(resnet.state_dict())), scope="backbone")
    assert "Only the heads" not in str(caught.value)


def test_networks_that_are_no_counterpart(resnet: ResNet2d, googlenet: GoogLeNet2d):
    for model, state in ((x3d_s(), resnet.state_dict()), (slow_8x8_r50(), googlenet.state_dict())):
        with pytest.raises(CheckpointError, match="nothing was loaded"):
            inflate_2d(model, state, scope="backbone")
    deeper = ResNet2d(depths=(3, 4, 8, 3)).state_dict()
    with pytest.raises(CheckpointError, match=r"unexpected \(layer3\.6\.conv1\.weight"):
        inflate_2d(c2d_8x8_r50(), deeper, scope="backbone")
    with pytest.raises(CheckpointError, match="no picture network: expected torchvision's keys of a ResNet"):
        inflate_2d(c2d_8x8_r50(), c2d_8x8_r50().state_dict())
    with pytest.raises(CheckpointError, match=r"missing \(video_tower.fc"):
        inflate_2d(s3dg(), googlenet.state_dict())
