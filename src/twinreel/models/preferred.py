"""Which memory layout and precision are faster for a model on a kind of device: what `auto` means in a recipe.

A table, not a measurement at run time: equal runs stay equal. It was measured, and can be measured anew, by

    python benchmarks/train_step.py --threads 1 --crop 112 --clips 2

Ratios are of contiguous fp32 by the form, forward and backward, torch 2.13 on a Zen 4 CPU with AVX-512 and bf16, with
90 % intervals. A CPU without instructions for bf16 gets fp32, because bf16 is emulated there. CUDA was not measured.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

__all__ = ["PREFERRED", "preferred"]

MemoryFormat: TypeAlias = Literal["contiguous", "channels_last"]
Precision: TypeAlias = Literal["fp32", "bf16"]
Form: TypeAlias = tuple[MemoryFormat, Precision]

_LAST_BF16: Form = ("channels_last", "bf16")
PREFERRED: dict[str, dict[str, Form]] = {
    "s3dg": {"cpu": _LAST_BF16},  # 1.70 (1.54-2.23); contiguous bf16 1.29, channels_last fp32 0.96
    "slowfast_4x16_r50": {"cpu": _LAST_BF16},  # 2.03 (1.95-2.12); contiguous bf16 1.63, channels_last fp32 0.94
    # bf16 gains 1.14 (1.13-1.17) contiguous, which is not worth its digits, and is slower in channels_last: 0.80
    "x3d_m": {"cpu": ("contiguous", "fp32")},
}
USUAL: dict[str, Form] = {"cpu": ("contiguous", "fp32"), "cuda": ("channels_last", "fp32")}
# The layout where the recipe states the precision: channels_last fp32 is slower than contiguous on a CPU.
LAYOUTS: dict[tuple[str, str], MemoryFormat] = {("cpu", "fp32"): "contiguous"}


def preferred(name: str, device_type: str, precision: str = "auto") -> tuple[MemoryFormat, str]:
    """Layout and precision for a model of `MODELS`, or of a user, on `cpu` or `cuda`.

    Args:
        name: of the model.
        device_type: `cpu` or `cuda`.
        precision: what the recipe states; only the layout is then chosen.
    """
    layout, chosen = PREFERRED.get(name, {}).get(device_type, USUAL[device_type])
    if device_type == "cpu" and chosen == "bf16" and not _computes_in_bf16():
        layout, chosen = USUAL["cpu"]
    if precision in ("auto", chosen):
        return layout, chosen
    return LAYOUTS.get((device_type, precision), "channels_last"), precision


def _computes_in_bf16() -> bool:
    """Whether the CPU has instructions for products in bf16."""
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported())
