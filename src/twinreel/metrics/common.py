"""What all metrics check of their arguments, and how they name samples in errors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinreel.errors import ConfigError

__all__ = ["check_ids", "check_k", "finite_rows", "named"]


def finite_rows(scores: Tensor) -> Tensor:
    """For each row whether all its scores are finite; unlike `isfinite` of the scores, it copies none of them."""
    scores = scores.detach()
    return scores.amax(dim=1).isfinite() & scores.amin(dim=1).isfinite()  # a NaN is both the most and the least


def named(positions: Sequence[int], ids: Sequence[str] | None) -> str:
    """The first few rows by id, or by position where there are no ids."""
    shown = [f"at position {position}" if ids is None else repr(ids[position]) for position in positions[:5]]
    rest = len(positions) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def check_ids(name: str, ids: Sequence[str] | None, count: int) -> None:
    """Refuse names that are not one for each row.

    Raises:
        ConfigError: they are not.
    """
    if ids is not None and len(ids) != count:
        raise ConfigError(f"{name} has {len(ids)} names for {count} rows; it needs one for each.")


def check_k(k: int, most: int | None = None, of_what: str = "") -> None:
    """Refuse a k that is below 1, or so large that the result says nothing.

    Raises:
        ConfigError: it is.
    """
    if k < 1:
        raise ConfigError(f"k={k}: must be at least 1.")
    if most is not None and k > most:
        raise ConfigError(f"k={k} with {most} {of_what}: the result would be 1 whatever the scores. Use k <= {most}.")
