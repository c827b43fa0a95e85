"""Parameter groups, optimizers, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from twinreel.config import nearest
from twinreel.errors import ConfigError

__all__ = ["build_optimizer", "freeze", "learning_rate_factor", "parameter_groups"]


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
    model: nn.Module, *, learning_rate: float, learning_rates: Mapping[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    """Groups by learning rate and weight decay; biases and norms (one-dimensional) do not decay.

    The longest matching module name of `learning_rates` decides. `base_learning_rate` stays in each group: the
    schedule multiplies it.

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
