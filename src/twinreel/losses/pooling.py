"""What the losses of matching share: logits pooled over clips, and who takes part."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from twinreel.errors import ConfigError
from twinreel.losses.classes import ROW_SUM_TOLERANCE
from twinreel.losses.common import flags_of, positions_of, working_dtype

__all__ = ["Case", "Pooling", "case_of", "pool_clips"]

Pooling: TypeAlias = Literal["lse", "mean", "max"]


def pool_clips(logits: Tensor, pooling: Pooling, dim: int) -> Tensor:
    """Logits of videos out of those of their clips: the dimension `dim`, the clips, is gone.

    Args:
        logits: floating point, any shape.
        pooling: `lse`, the logarithm of the summed exponentials (not of their mean: with C equal clips it adds log C
            to every output alike, which no softmax sees); `mean`; or `max`, of each output by itself.
        dim: that of the clips.

    Raises:
        ConfigError: another pooling.
    """
    if pooling == "lse":
        return torch.logsumexp(logits, dim=dim)
    if pooling == "mean":
        return logits.mean(dim=dim)
    if pooling == "max":
        return logits.amax(dim=dim)
    raise ConfigError(f"pooling={pooling!r}: clips are pooled by {', '.join(get_args(Pooling))}.")


class Case(NamedTuple):
    """What a process computes on: the rows of its own videos, b of them.

    Attributes:
        logits: (b, C, R, K), float32 or float64; zeros for a video that takes no part, so that not even a NaN of it
            gets into a gradient.
        targets: (b, R) or (b, A), likewise.
        takes_part: (b,) bool.
        positions: (b,) int64 in the batch; None: all of it.
        num_valid: of all processes, at least 1.
    """

    logits: Tensor
    targets: Tensor
    takes_part: Tensor
    positions: Tensor | None
    num_valid: Tensor

    def mean(self, terms: Tensor) -> Tensor:
        """Terms (b,) of own videos, summed, over the number of all valid videos."""
        return torch.where(self.takes_part, terms, 0.0).sum() / self.num_valid

    def refuse(self, where: str, wrong: Tensor, what: str) -> None:
        """Raise ConfigError for the first own video that takes part and for which `wrong`, (b,) bool, is set."""
        places = (wrong & self.takes_part).nonzero().flatten().tolist()
        if places:
            row = places[0] if self.positions is None else int(self.positions[places[0]])
            raise ConfigError(f"{where}: video {row} of the batch {what}.")

    def check_flags(self, where: str) -> None:
        """Raise ConfigError unless the targets are 0 or 1."""
        wrong = ~((self.targets == 0) | (self.targets == 1)).all(dim=1)
        self.refuse(where, wrong, "has a target that is neither 1 (the text belongs to the video) nor 0")

    def check_sums(self, where: str, advice: str) -> None:
        """Raise ConfigError unless each video's targets sum to 1."""
        wrong = ~((self.targets.sum(dim=1) - 1).abs() <= ROW_SUM_TOLERANCE)
        self.refuse(where, wrong, f"has targets that do not sum to 1; {advice}")


def case_of(
    where: str, logits: Tensor, targets: Tensor, valid: Tensor | None, own: Tensor | None, *, outputs: int | None
) -> Case:
    """The own videos' rows.

    Args:
        where: the loss, for messages.
        logits: (B, C, R, outputs), or (B, C, 1, A) where `outputs` is None.
        targets: (B, R), or (B, A).
        valid: (B,) bool, or None: all.
        own: (b,) int64 positions, or None: all.
        outputs: of the model for a pair; None: a table of answers to one question.

    Raises:
        ConfigError: shapes or types do not fit together.
    """
    axes = "(videos, clips, 1, answers)" if outputs is None else f"(videos, clips, texts, {outputs})"
    fits = logits.ndim == 4 and (logits.shape[2] == 1 if outputs is None else logits.shape[3] == outputs)
    if not fits or not logits.is_floating_point() or 0 in logits.shape:
        raise ConfigError(
            f"{where}: logits must be floating point {axes} and not empty, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}."
        )
    shape = (logits.shape[0], logits.shape[3 if outputs is None else 2])
    if tuple(targets.shape) != shape:
        raise ConfigError(f"{where}: targets must be of shape {shape}, got {tuple(targets.shape)}.")
    takes_part = flags_of(where, "valid", valid, (logits.shape[0],), logits.device)
    positions = None if own is None else positions_of(where, own, logits.shape[0], logits.device)
    num_valid = takes_part.sum().clamp(min=1)
    dtype = working_dtype(logits, targets)
    targets = targets.to(logits.device)
    if positions is not None:
        logits, targets, takes_part = logits[positions], targets[positions], takes_part[positions]
    return Case(
        torch.where(takes_part.view(-1, *[1] * (logits.ndim - 1)), logits.to(dtype), 0.0),
        torch.where(takes_part[:, None], targets.to(dtype), 0.0),
        takes_part,
        positions,
        num_valid,
    )
