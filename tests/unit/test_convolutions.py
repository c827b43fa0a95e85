"""Convolutions done another way give the numbers of the plain ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from twinreel.models import MODELS
from twinreel.models.depthwise import DepthwiseConv3d
from twinreel.models.half_on_cpu import RoomyConvolutions
from twinreel.models.preferred import PREFERRED, preferred
from twinreel.models.training_modes import checkpoint_activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ((3, 3, 3), (1, 2, 2), (1, 1, 1)),
        ((5, 1, 1), (1, 1, 1), (2, 0, 0)),
        ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
        ((3, 3, 3), (1, 1, 1), (0, 1, 1)),
    ],
)
def test_depthwise_is_the_plain_convolution(kernel, stride, padding, dtype):
    torch.manual_seed(0)
    ours = DepthwiseConv3d(6, kernel, stride, padding).to(dtype)
    plain = nn.Conv3d(6, 6, kernel, stride, padding, groups=6, bias=False).to(dtype)
    plain.load_state_dict(ours.state_dict())
    one, other = (torch.randn(2, 6, 5, 9, 7, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    found, wished = ours(one.requires_grad_()), plain(other.requires_grad_())
    slack = 1e-4 if dtype == torch.float32 else 1e-12
    assert found.shape == wished.shape and torch.allclose(found, wished, atol=slack)
    for output in (found, wished):
        output.cos().sum().backward()
    assert torch.allclose(one.grad, other.grad, atol=slack)
    assert torch.allclose(ours.weight.grad, plain.weight.grad, atol=10 * slack)


SMALL = [
    ((2, 4, 4), (3, 3, 3), 1, 1),
    ((1, 4, 4), (3, 1, 1), 1, (1, 0, 0)),
    ((4, 1, 1), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    ((4, 7, 7), (7, 1, 1), (4, 1, 1), (3, 0, 0)),
    ((2, 4, 4), (3, 3, 3), 1, "same"),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), SMALL)
def test_a_small_input_gets_its_padding_first_and_the_same_numbers(size, kernel, stride, padding):
    torch.manual_seed(0)
    video = torch.randn(2, 8, *size, dtype=torch.float64)
    weight = torch.randn(16, 8, *kernel, dtype=torch.float64)
    wished = functional.conv3d(video, weight, None, stride, padding)
    with RoomyConvolutions():
        found = functional.conv3d(video, weight, None, stride, padding)
        by_name = functional.conv3d(weight=weight, input=video, stride=stride, padding=padding)
    assert torch.allclose(found, wished, atol=1e-10) and torch.equal(found, by_name)


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), SMALL)
def test_half_precision_gradients_repeat_and_are_right(size, kernel, stride, padding):
    """They do not without the context: what lay in memory is added, or the process ends."""
    torch.manual_seed(0)
    video, weight = torch.randn(2, 8, *size), torch.randn(16, 8, *kernel).requires_grad_()
    functional.conv3d(video, weight, None, stride, padding).square().sum().backward()
    wished, found = weight.grad, []
    for _ in range(5):
        weight.grad = None
        waste = [torch.full((number,), 1e30) for number in (500, 5000, 50_000)]
        del waste
        with RoomyConvolutions(), torch.autocast("cpu", torch.bfloat16):
            output = functional.conv3d(video, weight, None, stride, padding)
        output.float().square().sum().backward()
        found.append(weight.grad)
    assert all(torch.equal(found[0], each) for each in found)
    assert float((found[0] - wished).norm() / wished.norm()) < 0.03


def test_what_auto_means_is_a_table(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert set(PREFERRED) <= set(MODELS)
    for name, wanted in PREFERRED.items():
        layout, precision = preferred(name, "cpu", "auto")
        assert precision == wanted.precision and preferred(name, "cpu", precision) == (layout, precision)
    assert preferred("anyone:s", "cpu", "auto") == ("channels_last", "fp32")
    assert preferred("slowfast_4x16_r50", "cpu", "fp32") == ("contiguous", "fp32")
    assert preferred("slowfast_4x16_r50", "cpu", "auto") == ("channels_last", "bf16")
    assert preferred("s3dg", "cuda", "auto") == ("channels_last", "fp32")
    assert preferred("s3dg", "cuda", "fp16") == ("channels_last", "fp16")


def test_without_instructions_for_bf16_a_cpu_gets_fp32(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert preferred("slowfast_4x16_r50", "cpu", "auto") == ("contiguous", "fp32")
    assert preferred("s3dg", "cpu", "bf16") == ("channels_last", "bf16")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, video):
        return self.norm(self.conv(video).relu())


def test_a_recomputation_has_roomy_convolutions_too():
    small = nn.Sequential(nn.Sequential(Block(), nn.Flatten()))
    plain = copy.deepcopy(small)
    checkpoint_activations(small)
    video = torch.randn(2, 4, 2, 2)
    gradients = []
    for net in (small, plain):
        with RoomyConvolutions(), torch.autocast("cpu", torch.bfloat16):
            loss = net(video).float().square().sum()
        loss.backward()
        gradients.append(net[0][0].conv.weight.grad)
    assert torch.equal(*gradients)
    assert torch.equal(small[0][0].norm.running_mean, plain[0][0].norm.running_mean)
