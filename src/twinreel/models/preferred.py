"""Which memory layout and precision are faster for a model on a kind of device: what `auto` means in a recipe.

A table, not a measurement at run time: equal runs stay equal. It was measured, and can be measured anew, by

    python benchmarks/train_step.py --threads 1 --crop 112 --clips 2

Ratios are of contiguous fp32 by the form, forward and backward, torch 2.13 on a Zen 4 CPU with AVX-512 and bf16, with
90 % intervals; those without one were timed once, 12 clips of 16 x 96 x 96. A CPU without instructions for bf16 gets
fp32, because bf16 is emulated there. CUDA was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["PREFERRED", "Preferred", "preferred"]

MemoryFormat: TypeAlias = Literal["contiguous", "channels_last"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Preferred:
    """What is faster for a model on a CPU: the precision, and the layout in fp32; in bf16 it is channels_last."""

    precision: Literal["fp32", "bf16"] = "fp32"
    layout_in_fp32: MemoryFormat = "channels_last"


# On a CPU. A model that is not listed gets fp32 in channels_last: conv3d_small is 1.3 times as fast in it.
PREFERRED: dict[str, Preferred] = {
    "s3dg": Preferred("bf16"),  # bf16 1.70 (1.54-2.23); fp32 channels_last 0.96
    "s3dg_small": Preferred("bf16"),  # 2.0; 0.98
    "slowfast_4x16_r50": Preferred("bf16", "contiguous"),  # 2.03 (1.95-2.12); 0.94
    "slowfast_8x8_r50": Preferred("bf16", "contiguous"),  # 2.09 (1.96-2.12); 0.91
    "slowfast_small": Preferred("bf16", "contiguous"),  # 1.8; 0.97
    # In bf16 0.80 in channels_last and 1.14 (1.13-1.17) contiguous, which is not worth its digits.
    "x3d_m": Preferred("fp32", "contiguous"),
    "x3d_small": Preferred("fp32", "contiguous"),  # bf16 0.85; fp32 channels_last 1.0
}


def preferred(name: str, device_type: str, precision: Precision | Literal["auto"]) -> tuple[MemoryFormat, Precision]:
    """Layout and precision for a model of `MODELS`, or of a user.

    Args:
        name: of the model.
        device_type: `cpu` or `cuda`.
        precision: what the recipe states; `auto` = chosen too. On a GPU that is fp32.
    """
    if device_type != "cpu":
        return "channels_last", "fp32" if precision == "auto" else precision
    wanted = PREFERRED.get(name, Preferred())
    chosen: Precision = wanted.precision if precision == "auto" else precision
    if precision == "auto" and chosen == "bf16" and not _computes_in_bf16():
        chosen = "fp32"
    return wanted.layout_in_fp32 if chosen == "fp32" else "channels_last", chosen


def _computes_in_bf16() -> bool:
    """Whether the CPU has instructions for products in bf16."""
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported())
