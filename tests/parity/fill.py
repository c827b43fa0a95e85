"""Parameters, buffers and inputs of the golden files as functions of a name, a shape and a role.

The numbers come from NumPy's PCG64 seeded with the CRC-32 of the name: a float64 standard normal draw of the shape, the
affine rule of the role, a cast to float32. A `clip` is a coarse draw blown up by repetition, plus half a fine one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]

# What a role makes of the normal draw and the fan-in (product of all but the first dimension).
RULES: dict[str, Callable[[Array, int], Array]] = {
    "conv_w": lambda draw, fan_in: draw * math.sqrt(2 / fan_in),
    "linear_w": lambda draw, fan_in: draw * math.sqrt(1 / fan_in),
    "gate_w": lambda draw, fan_in: draw * math.sqrt(4 / fan_in),
    "gate_b": lambda draw, fan_in: 2 + draw,
    "norm_w": lambda draw, fan_in: 1 + 0.1 * draw,
    "norm_w_res": lambda draw, fan_in: 0.3 * (1 + 0.1 * draw),
    "bias": lambda draw, fan_in: 0.1 * draw,
    "run_mean": lambda draw, fan_in: 0.1 * draw,
    "run_var": lambda draw, fan_in: 1 + 0.1 * np.abs(draw),
    "embed": lambda draw, fan_in: 0.1 * draw,
    "input": lambda draw, fan_in: draw,
}


def fill(name: str, shape: Sequence[int], role: str) -> Tensor:
    """The tensor of a name: float32, or int64 zeros for the role `zero_i64`."""
    if role == "zero_i64":
        return torch.zeros(tuple(shape), dtype=torch.int64)
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if role == "clip":
        values = _clip(generator, shape)
    else:
        values = RULES[role](generator.standard_normal(tuple(shape)), math.prod(shape[1:]))
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def fill_all(table: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Tensor]:
    """The state dict of a golden file's table `{key: [shape, role]}`."""
    return {name: fill(name, shape, role) for name, (shape, role) in table.items()}


def _clip(generator: np.random.Generator, shape: Sequence[int]) -> Array:
    batch, channels, *sizes = shape
    repeats = (4, 16, 16)
    coarse_sizes = [math.ceil(size / times) for size, times in zip(sizes, repeats, strict=True)]
    coarse = generator.standard_normal((batch, channels, *coarse_sizes))
    fine = generator.standard_normal(tuple(shape))
    for axis, times in enumerate(repeats, start=2):
        coarse = coarse.repeat(times, axis=axis)
    time, height, width = sizes
    return coarse[:, :, :time, :height, :width] + 0.5 * fine
