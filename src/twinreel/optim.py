"""Parameter groups, optimizers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twinreel.config import nearest
from twinreel.errors import ConfigError

__all__ = ["WeightAverage", "build_optimizer", "freeze", "learning_rate_factor", "parameter_groups"]


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    warmup_start_factor: float = 0.1,
    decay: Literal["cosine", "none"] = "cosine",
) -> float:
    """What the base learning rate is multiplied by at a step, from 0: linear warm-up, then half a cosine to 0.

    With `warmup_start_factor=0` this is the schedule of the MIL-NCE code (first step: 0).
    """
    if step < warmup_steps:
        return warmup_start_factor + (1 - warmup_start_factor) * step / warmup_steps
    if decay == "none":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _matches(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _check_names(model: nn.Module, modules: Iterable[str], key: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    known = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    for module in modules:
        if module not in known:
            top = sorted({name.split(".")[0] for name in names})
            raise ConfigError(
                f"{key}: the model has no part {module!r}{nearest(module, known if module in known else top)}"
            )


def freeze(model: nn.Module, modules: Iterable[str]) -> list[nn.Module]:
    """Stop the named parts from training; returns the modules whose batch-norm statistics must stay too.

    Raises:
        ConfigError: a name that is no part of the model.
    """
    names = list(modules)
    _check_names(model, names, "model.freeze")
    for name, parameter in model.named_parameters():
        if any(_matches(name, module) for module in names):
            parameter.requires_grad_(False)
    children = dict(model.named_modules())
    return [children[name] for name in names if name in children]


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    learning_rates: Mapping[str, float],
    weight_decay: float,
    extra: Sequence[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Groups by learning rate and weight decay; biases and norms (one-dimensional) do not decay.

    The longest matching module name of `learning_rates` decides. `base_learning_rate` stays in each group: the
    schedule multiplies it. `extra` parameters (a learned temperature) do not decay.

    Raises:
        ConfigError: a module name that does not exist, or nothing left to train.
    """
    _check_names(model, learning_rates, "optim.learning_rates")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = max((module for module in learning_rates if _matches(name, module)), key=len, default=None)
        rate = learning_rate if own is None else learning_rates[own]
        groups.setdefault((rate, weight_decay if parameter.ndim > 1 else 0.0), []).append(parameter)
    if not groups:
        raise ConfigError("model.freeze leaves nothing to train; free a part of the model")
    if extra:
        groups.setdefault((learning_rate, 0.0), []).extend(extra)
    return [
        {"params": parameters, "lr": rate, "base_learning_rate": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]


def build_optimizer(
    name: Literal["adam", "adamw", "sgd"],
    groups: list[dict[str, Any]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Adam (weight decay in the gradient), AdamW (decoupled), or SGD with momentum."""
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(groups, betas=betas, eps=eps)


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
