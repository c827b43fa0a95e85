"""Model and task as one module with one forward: what is wrapped for several processes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["WholeModel", "at_least_float32"]


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
