"""ResNet-50 and GoogLeNet for pictures, with torchvision's key names, out of plain torch modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GoogLeNet2d", "ResNet2d", "randomize"]


class Bottleneck2d(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.downsample = None
        if stride != 1 or channels != 4 * inner:
            shortcut = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(y)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet2d(nn.Module):
    def __init__(self, num_classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck2d(channels, 64 * 2**stage, 2 if stage and not block else 1))
                channels = 256 * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.forward_features(x))


class Unit2d(nn.Module):
    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)))


class Inception2d(nn.Module):
    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        b1, b2_inner, b2, b3_inner, b3, b4 = widths
        self.branch1 = Unit2d(channels, b1)
        self.branch2 = nn.Sequential(Unit2d(channels, b2_inner), Unit2d(b2_inner, b2, 3))
        self.branch3 = nn.Sequential(Unit2d(channels, b3_inner), Unit2d(b3_inner, b3, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), Unit2d(channels, b4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)), dim=1)


class GoogLeNet2d(nn.Module):
    """Without its two auxiliary heads but for one of their keys."""

    WIDTHS = (
        ("3a", (64, 96, 128, 16, 32, 32)),
        ("3b", (128, 128, 192, 32, 96, 64)),
        ("4a", (192, 96, 208, 16, 48, 64)),
        ("4b", (160, 112, 224, 24, 64, 64)),
        ("4c", (128, 128, 256, 24, 64, 64)),
        ("4d", (112, 144, 288, 32, 64, 64)),
        ("4e", (256, 160, 320, 32, 128, 128)),
        ("5a", (256, 160, 320, 32, 128, 128)),
        ("5b", (384, 192, 384, 48, 128, 128)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = Unit2d(3, 64, 7, 2), Unit2d(64, 64), Unit2d(64, 192, 3)
        channels = 192
        for name, widths in self.WIDTHS:
            self.add_module(f"inception{name}", Inception2d(channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.aux1 = nn.ModuleDict({"fc2": nn.Linear(2, 2)})
        self.fc = nn.Linear(channels, 1000)

    def forward_features(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.conv1(x), 3, 2, ceil_mode=True)
        x = functional.max_pool2d(self.conv3(self.conv2(x)), 3, 2, ceil_mode=True)
        for name, _ in self.WIDTHS:
            x = getattr(self, f"inception{name}")(x)
            if name == "3b":
                x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
            if name == "4e":
                x = functional.max_pool2d(x, 2, 2, ceil_mode=True)
        return x.mean(dim=(2, 3))


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights that keep the scale, and norms that are no identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in _layers(model):
            if isinstance(module, nn.BatchNorm2d):
                # Small variances, so that a wrong epsilon shows.
                module.running_var.uniform_(0.05, 0.2, generator=generator)
                module.running_mean.normal_(0, 0.1, generator=generator)
                module.weight.uniform_(0.2, 0.4, generator=generator)
                module.bias.normal_(0, 0.1, generator=generator)
            else:
                fan_in = module.weight[0].numel()
                module.weight.normal_(0, (2 / fan_in) ** 0.5, generator=generator)


def _layers(model: nn.Module) -> Iterator[nn.Conv2d | nn.BatchNorm2d | nn.Linear]:
    return (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear))
