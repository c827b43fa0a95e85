"""Which memory layout and precision are faster for a model on a kind of device: what `auto` means in a recipe.

A table, not a measurement at run time: equal runs stay equal. `python benchmarks/train_step.py` measures it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["PREFERRED", "preferred"]

MemoryFormat: TypeAlias = Literal["contiguous", "channels_last"]
Precision: TypeAlias = Literal["fp32", "bf16"]

PREFERRED: dict[str, dict[str, tuple[MemoryFormat, Precision]]] = {}
USUAL: tuple[MemoryFormat, Precision] = ("channels_last", "fp32")


def preferred(name: str, device_type: str) -> tuple[MemoryFormat, Precision]:
    """Layout and precision for a model of `MODELS`, or of a user, on `cpu` or `cuda`."""
    return PREFERRED.get(name, {}).get(device_type, USUAL)
