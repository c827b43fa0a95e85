"""Tensors that a founding file holds and that nothing reads: named and counted, not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Unused", "set_apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Tensors of one kind.

    Args:
        kind: what they are, for people.
        names: their keys, with twinreel's beginnings.
        numbers: how many numbers they hold.
    """

    kind: str
    names: tuple[str, ...]
    numbers: int

    def __str__(self) -> str:
        tensors = "tensor" if len(self.names) == 1 else "tensors"
        return f"{self.numbers:,} numbers in {len(self.names)} {tensors} of {self.kind}"

    def to_json(self) -> dict[str, str | int]:
        """Plain values for JSON."""
        return {"kind": self.kind, "tensors": len(self.names), "numbers": self.numbers}


def set_apart(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Tensor], tuple[Unused, ...]]:
    """The tensors less those of some kinds, and these, counted.

    Args:
        tensors: by key.
        kinds: of each kind, the beginnings of its keys, or with a `*` in front the endings.
    """
    left = dict(tensors)
    unused = []
    for kind, marks in kinds.items():
        names = tuple(name for name in left if any(_has(name, mark) for mark in marks))
        numbers = sum(left.pop(name).numel() for name in names)
        if names:
            unused.append(Unused(kind=kind, names=names, numbers=numbers))
    return left, tuple(unused)


def _has(name: str, mark: str) -> bool:
    return name.endswith(mark[1:]) if mark.startswith("*") else name.startswith(mark)
