"""Losses of classifiers: logits and class targets -> one scalar."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.losses.common import flags_of, positions_of, working_dtype

__all__ = ["binary_cross_entropy", "cross_entropy"]

ROW_SUM_TOLERANCE = 1e-3  # of targets that were mixed in float32, or in bfloat16 by a user's own code


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Softmax cross entropy with the shares of the classes: the class of a clip should stand out from all others.

    The loss of a clip is `-sum(targets * log_softmax(logits))`, the result the mean over the valid clips.

    Label smoothing is that of Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
    arXiv:1512.00567, section 7, as in `torch.nn.functional.cross_entropy`: targets become
    `(1 - label_smoothing) * targets + label_smoothing / C`, so the right class keeps a C-th of what is taken. It is
    linear: smoothing targets and then mixing them (mixup, cutmix) gives the same.

    Args:
        logits: (B, C), floating point.
        targets: (B, C), at least 0; the rows of valid clips sum to 1. One class a clip, or shares of several.
        valid: (B,) bool, False for clips that were excluded: whatever their row holds, NaN included, does not matter.
            None: all take part.
        own: (b,) int64 positions of the clips whose terms are summed. The results of processes that share out the
            clips add up to the loss of the batch, because all divide by the number of all valid clips. None: all.
        label_smoothing: 0 to below 1.

    Returns:
        Scalar; float64 if logits or targets are float64, else float32. 0 with gradients of 0 if no clip is valid.

    Raises:
        ConfigError: Shapes or types do not fit together, the smoothing is refused, or a valid clip's targets do not
            sum to 1.
    """
    takes_part, positions = _checked("cross_entropy", logits, targets, valid, own, label_smoothing)
    _check_row_sums(targets, takes_part)
    with torch.autocast(logits.device.type, enabled=False):
        scores, wanted = _prepared(logits, targets, takes_part, label_smoothing, 1 / logits.shape[1])
        terms = -(wanted * functional.log_softmax(scores, dim=1)).sum(dim=1)
        return _share(terms, takes_part, positions)


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sigmoid cross entropy: each class is a decision of its own, for clips with several labels or none.

    The loss of a clip is the mean over its classes of `torch.nn.functional.binary_cross_entropy_with_logits`, the
    result the mean over the valid clips.

    Label smoothing is that of Szegedy et al., arXiv:1512.00567, section 7, for the two outcomes that each class has:
    targets become `(1 - label_smoothing) * targets + label_smoothing / 2`, as in Keras' BinaryCrossentropy. (torch's
    has none; dividing by the number of classes instead, as some code does, would hardly lift the negatives.)

    Args:
        logits: (B, C), floating point.
        targets: (B, C), each in 0 to 1.
        valid: (B,) bool, as for `cross_entropy`.
        own: (b,) int64, as for `cross_entropy`.
        label_smoothing: 0 to below 1.

    Returns:
        Scalar; float64 if logits or targets are float64, else float32. 0 with gradients of 0 if no clip is valid.

    Raises:
        ConfigError: Shapes or types do not fit together, or the smoothing is refused.
    """
    takes_part, positions = _checked("binary_cross_entropy", logits, targets, valid, own, label_smoothing)
    with torch.autocast(logits.device.type, enabled=False):
        scores, wanted = _prepared(logits, targets, takes_part, label_smoothing, 1 / 2)
        terms = functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none").mean(dim=1)
        return _share(terms, takes_part, positions)


def _checked(
    where: str, logits: Tensor, targets: Tensor, valid: Tensor | None, own: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Tensor | None]:
    """Who takes part, (B,) bool, and whose terms are wanted, (b,) int64 or None; both on the device of the logits."""
    if logits.ndim != 2 or not logits.is_floating_point() or 0 in logits.shape:
        raise ConfigError(
            f"{where}: logits must be a floating-point matrix (clips, classes) that is not empty, got {logits.dtype} "
            f"of shape {tuple(logits.shape)}."
        )
    if targets.shape != logits.shape or not targets.is_floating_point():
        raise ConfigError(
            f"{where}: targets must be floating point of the logits' shape {tuple(logits.shape)}, got {targets.dtype} "
            f"of shape {tuple(targets.shape)}. ClassTable.targets makes them of labels."
        )
    if not 0 <= label_smoothing < 1:
        raise ConfigError(
            f"{where}: label_smoothing={label_smoothing} refused; it is the share of a target that is spread out, 0 "
            "to below 1. 0.1 is usual."
        )
    takes_part = flags_of(where, "valid", valid, (logits.shape[0],), logits.device)
    return takes_part, None if own is None else positions_of(where, own, logits.shape[0], logits.device)


def _check_row_sums(targets: Tensor, takes_part: Tensor) -> None:
    sums = targets.sum(dim=1)
    wrong = takes_part.to(sums.device) & ~((sums - 1).abs() <= ROW_SUM_TOLERANCE)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ConfigError(
            f"cross_entropy: the targets of clip {row} sum to {float(sums[row]):g}, not 1. Clips with several labels, "
            "or none, need task.loss=binary_cross_entropy and task.multi_label=true."
        )


def _prepared(
    logits: Tensor, targets: Tensor, takes_part: Tensor, label_smoothing: float, even: float
) -> tuple[Tensor, Tensor]:
    """Logits and smoothed targets as they are compared; zeros keep a NaN of an excluded row out of the gradient."""
    dtype = working_dtype(logits, targets)
    scores = torch.where(takes_part[:, None], logits.to(dtype), 0.0)
    wanted = torch.where(takes_part[:, None], targets.to(logits.device, dtype), 0.0)
    return scores, wanted if label_smoothing == 0 else (1 - label_smoothing) * wanted + label_smoothing * even


def _share(terms: Tensor, takes_part: Tensor, positions: Tensor | None) -> Tensor:
    """The own clips' terms of (B,), summed, over the number of all valid clips."""
    num_valid = takes_part.sum().clamp(min=1)
    terms = torch.where(takes_part, terms, 0.0)
    return (terms if positions is None else terms[positions]).sum() / num_valid
