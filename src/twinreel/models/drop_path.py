"""Stochastic depth (arXiv:1603.09382): a residual branch is left out, sample by sample, in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twinreel.errors import ConfigError

__all__ = ["DropPath"]


class DropPath(nn.Module):
    """A residual branch as it is in eval mode; in training zero for a random share of the samples.

    What is kept is divided by the probability of keeping it, so that the mean is that of the branch. Random numbers
    come from the generator of the branch's device.

    Args:
        rate: probability that a sample's branch is dropped, 0 to below 1.

    Raises:
        ConfigError: a rate out of its range.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError(f"drop_path must be from 0 to below 1; got {rate}")
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """A branch (B, ...) -> the same shape."""
        if not self.training or self.rate == 0:
            return branch
        keep = 1 - self.rate
        kept = torch.rand(branch.shape[0], *[1] * (branch.ndim - 1), device=branch.device) < keep
        return branch * (kept.to(branch.dtype) / keep)

    def extra_repr(self) -> str:
        """The rate, for `print(model)`."""
        return f"rate={self.rate:g}"
