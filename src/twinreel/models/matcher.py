"""What twinreel asks of a model that looks at a video and a text together and says how well they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["Matcher", "check_matcher"]


class Matcher(Protocol):
    """A cross-modal model: the costly look at the video is apart from the comparison, so that it is taken once."""

    preprocessing: Preprocessing

    def encode_grid(self, video: Tensor) -> Tensor:
        """What is seen of clips, a float video (B, 3, T, H, W): (B, ...), whatever `match` takes."""

    def match(self, grid: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, R, outputs) of what was seen (B, ...) and the word ids int64 (B, R, L) of R texts each."""

    def tokenize(self, captions: Sequence[str], max_tokens: int | None = None) -> Tensor:
        """Word ids int64 (N, L) of N texts, on the model's device."""


def check_matcher(model: object, name: str) -> Matcher:
    """The object itself, if it offers what twinreel asks of a cross-modal model.

    Args:
        model: what a builder returned.
        name: how the recipe names it, for the message.

    Raises:
        ConfigError: with everything that is missing.
    """
    problems = [] if isinstance(model, nn.Module) else ["it is no torch.nn.Module"]
    shapes = {
        "encode_grid": "(video (B, 3, T, H, W)) -> (B, ...)",
        "match": "(grid (B, ...), tokens (B, R, L)) -> (B, R, outputs)",
        "tokenize": "(captions) -> (N, L)",
    }
    problems += [
        f"it lacks a method {method}{shape}"
        for method, shape in shapes.items()
        if not callable(getattr(model, method, None))
    ]
    if not isinstance(getattr(model, "preprocessing", None), Preprocessing):
        problems.append("it lacks an attribute preprocessing that is a twinreel.models.preprocessing.Preprocessing")
    if problems:
        raise ConfigError(f"{name}: {type(model).__name__} cannot match videos and texts: " + "; ".join(problems))
    return cast(Matcher, model)
