"""The optimizers, and a gradient that is clipped before they see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from twinreel.errors import ConfigError

__all__ = ["build_optimizer", "clip_gradients"]


def build_optimizer(
    name: Literal["adam", "adamw", "sgd"],
    groups: list[dict[str, Any]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
    dampening: float = 0.0,
    nesterov: bool = False,
    eps_before_correction: bool = False,
) -> torch.optim.Optimizer:
    """Adam (weight decay in the gradient), AdamW (decoupled), or SGD with momentum.

    Args:
        name: which one.
        groups: of `parameter_groups`.
        betas: of Adam and AdamW.
        eps: of Adam and AdamW.
        momentum: of SGD; its first step takes the whole gradient.
        dampening: of SGD: the share of a later gradient that the momentum leaves out.
        nesterov: of SGD: step along the gradient and the momentum after it.
        eps_before_correction: of AdamW: as in the code of BERT and ClipBERT, `eps` joins the root of the mean square
            before that is corrected for its start from 0. The first steps are then smaller where gradients are near
            `eps`: eps counts as `eps / sqrt(1 - beta2**t)`, 7 times as much at t = 1 with a beta2 of 0.98.

    Raises:
        ConfigError: Nesterov without momentum, or with dampening, or an option of AdamW with another optimizer.
    """
    if eps_before_correction and name != "adamw":
        raise ConfigError(f"optim.eps_before_correction=true goes with optim.name=adamw, not {name}; leave it out")
    if name == "sgd":
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"optim.nesterov=true needs momentum and no dampening; got optim.momentum={momentum:g}, "
                f"optim.dampening={dampening:g}. Set optim.dampening=0 and a momentum such as 0.9, or nesterov=false"
            )
        return torch.optim.SGD(groups, momentum=momentum, dampening=dampening, nesterov=nesterov)
    if eps_before_correction:
        return _EarlyEpsAdamW(groups, betas=betas, eps=eps)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(groups, betas=betas, eps=eps)


class _EarlyEpsAdamW(torch.optim.AdamW):
    """AdamW whose `eps` is added before the bias correction; all else, its state included, is torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            done = next((int(self.state[p]["step"]) for p in group["params"] if self.state.get(p)), 0)
            group["eps"] = self.defaults["eps"] / math.sqrt(1 - group["betas"][1] ** (done + 1))
        return super().step(closure)


def clip_gradients(
    gradients: Sequence[Tensor], *, clip_norm: float | None = None, clip_value: float | None = None
) -> float:
    """The norm of a whole gradient as it was; afterwards it is clipped, in place.

    A gradient that is not finite stays as it is: clipping numbers to `clip_value` would hide an infinity.

    Args:
        gradients: of all parameters.
        clip_norm: the largest norm of the whole: all is scaled down alike. None = as it is.
        clip_value: the largest size of each number of it: its direction changes. None = as it is.

    Raises:
        ConfigError: both are given.
    """
    if clip_norm is not None and clip_value is not None:
        raise ConfigError(
            f"optim.clip_norm={clip_norm:g} and optim.clip_value={clip_value:g}: give one of them, the other null"
        )
    norm = torch.nn.utils.get_total_norm(list(gradients)).item()
    if not math.isfinite(norm):
        return norm
    if clip_norm is not None:
        scale = min(1.0, clip_norm / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
    if clip_value is not None:
        for gradient in gradients:
            gradient.clamp_(-clip_value, clip_value)
    return norm
