"""Model and task as one module with one forward: what is wrapped for several processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["WholeModel", "at_least_float32", "logits_share"]


class _Outputs(Protocol):
    def outputs(self, model: nn.Module, video: Tensor, text: Any) -> tuple[Tensor, ...]:
        """What the loss is computed on."""


class WholeModel(nn.Module):
    """Everything that is trained: the model, and what the task learns itself."""

    def __init__(self, model: nn.Module, task: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, video: Tensor, text: Any = None) -> tuple[Tensor, ...]:
        """`task.outputs` of a float video (B, 3, T, H, W) and of what else `task.inputs` made of the batch."""
        task: _Outputs = self.task  # type: ignore[assignment]
        return task.outputs(self.model, video, text)


def at_least_float32(values: Tensor) -> Tensor:
    """What a loss is computed and its gradients are added up in, whatever the model's precision; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def logits_share(
    loss: Callable[..., Tensor],
    logits: Tensor,
    targets: Tensor,
    valid: Tensor,
    options: Mapping[str, Any],
    *,
    own: Tensor | None,
    num_processes: int,
) -> Tensor:
    """One process's share of a loss of logits; one that knows no `own` is divided by the number of processes.

    Args:
        loss: called as `loss(logits, targets, valid=..., **options)`, in float32 (float64 stays).
        logits: (B, ...) of all processes.
        targets: (B, ...) of all processes.
        valid: (B,) bool, which of them count.
        options: of the loss.
        own: positions of this process; None = all, that is the whole loss.
        num_processes: how many there are.
    """
    chosen, shares = dict(options), 1
    if own is not None and "own" in inspect.signature(loss).parameters:
        chosen["own"] = own.to(logits.device)
    elif own is not None:
        shares = num_processes
    with torch.autocast(logits.device.type, enabled=False):
        logits = at_least_float32(logits)
        found = loss(logits, targets.to(logits.device, logits.dtype), valid=valid.to(logits.device), **chosen)
    return found if shares == 1 else found / shares
