"""What any video classifier must offer, and the two functions that its head ends with."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["HeadActivation", "VideoClassifier", "activate", "check_classifier", "positions_mean"]

HeadActivation: TypeAlias = Literal["softmax", "sigmoid", "none"]


@runtime_checkable
class VideoClassifier(Protocol):
    """What twinreel asks of a classifier, its own or a user's.

    A model with an attribute `head_activation` returns logits in train mode, and in eval mode the activation of every
    pooled position, averaged over the positions. A model without one returns logits in both.
    """

    preprocessing: Preprocessing

    def forward(self, video: Tensor) -> Tensor:
        """(B, C) for a float video (B, 3, T, H, W)."""


def activate(logits: Tensor, head_activation: HeadActivation) -> Tensor:
    """Scores of logits (..., C), float32 at least: `softmax` over the classes, `sigmoid` of each, `none` as they are.

    Raises:
        ConfigError: another activation.
    """
    if head_activation not in get_args(HeadActivation):
        raise ConfigError(f"head_activation must be softmax, sigmoid or none; got {head_activation!r}")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if head_activation == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if head_activation == "sigmoid" else logits


def positions_mean(scores: Tensor) -> Tensor:
    """Scores (B, T, H, W, C) of pooled positions -> (B, C), their mean."""
    return scores.mean(dim=(1, 2, 3))


def check_classifier(model: object, name: str) -> VideoClassifier:
    """The object itself, if it offers what twinreel asks of a classifier.

    Args:
        model: what a builder returned.
        name: how the recipe names it, for the message.

    Raises:
        ConfigError: with everything that is missing.
    """
    problems = []
    if not isinstance(model, nn.Module):
        problems.append("it is no torch.nn.Module")
    elif hasattr(model, "encode_video") and not _has_forward(model):
        problems.append("it has no forward(video) -> (B, classes): two towers are no classifier")
    if not isinstance(getattr(model, "preprocessing", None), Preprocessing):
        problems.append("it lacks an attribute preprocessing that is a twinreel.models.preprocessing.Preprocessing")
    if problems:
        raise ConfigError(f"{name}: {type(model).__name__} is no video classifier: " + "; ".join(problems))
    return cast(VideoClassifier, model)


def _has_forward(model: nn.Module) -> bool:
    """Whether forward takes one video; that of two towers takes a text too."""
    code = getattr(type(model).forward, "__code__", None)
    return code is not None and code.co_argcount == 2
