"""Averaged weights, evaluated and saved beside the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]


class WeightAverage:
    """An exponential moving average of a model's weights (EMA), evaluated and saved beside the weights themselves.

    After each step `average = d * average + (1 - d) * weight` with `d = min(decay, (1 + step) / (10 + step))`, so that
    the start values are forgotten early (as in TensorFlow's ExponentialMovingAverage). Buffers (batch-norm statistics)
    are those of the model.

    Args:
        model: what is averaged; its present weights are the start.
        decay: 0 to 1, e.g. 0.9999.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {
            name: weight.detach().clone() for name, weight in model.named_parameters(remove_duplicate=False)
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from saved averages, by name."""
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after a step, from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, weight in model.named_parameters(remove_duplicate=False):
            self.weights[name].lerp_(weight.detach(), share)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        own = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        _copy_weights(model, self.weights)
        try:
            yield
        finally:
            _copy_weights(model, own)


@torch.no_grad()
def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])
