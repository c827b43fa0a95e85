"""Parameters, buffers and inputs of ClipBERT's golden files: the rule of `fill.py`, with roles of its own.

`<role>@<k>` scales a role's value, `alias:<key>` is the tensor of another key (tied weights), `literal` is written out
in the file, and `pixels` is a picture or video of whole values 0 to 255: coarse blocks of 16 x 16 and fine noise.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import fill as plain
import numpy as np
import torch
from torch import Tensor

BLOCK = 16  # pixels of a coarse block's side


def fill(name: str, shape: Sequence[int], role: str) -> Tensor:
    """The float32 tensor of a name, for every role but `alias:` and `literal`."""
    if role == "pixels":
        return _pixels(name, shape)
    role, _, scale = role.partition("@")
    values = plain.fill(name, shape, role)
    return values * torch.tensor(float(scale), dtype=torch.float32) if scale else values


def build(spec: Mapping[str, Any], prefix: str = "", leave_out: Collection[str] = ()) -> dict[str, Tensor]:
    """The state dict of a golden file, in its order; with a prefix only the keys that begin with it.

    A tied key has the very tensor of the key that it names, where both are asked for. The tensors are not to be
    changed: those of the CNN, equal in all files, are kept.
    """
    table: dict[str, tuple[list[int], str]] = spec["state_dict"]
    found: dict[str, Tensor] = {}
    for key, (shape, role) in table.items():
        if not key.startswith(prefix) or key in leave_out:
            continue
        if role == "literal":
            found[key] = torch.tensor(spec["literals"][key], dtype=torch.float32).reshape(shape)
        elif role.startswith("alias:"):
            source = role.removeprefix("alias:")
            found[key] = found[source] if source in found else fill(source, *table[source])
        elif key.startswith("cnn.feature.backbone."):
            found[key] = _kept(key, tuple(shape), role)
        else:
            found[key] = fill(key, shape, role)
    return found


def used(spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict without the keys that the network never uses (detector heads, the visual position table)."""
    return build(spec, leave_out=frozenset(spec["unused_keys"]))


@cache
def _kept(name: str, shape: tuple[int, ...], role: str) -> Tensor:
    return fill(name, shape, role)


def _pixels(name: str, shape: Sequence[int]) -> Tensor:
    *leading, height, width = shape
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    coarse = generator.standard_normal((*leading, math.ceil(height / BLOCK), math.ceil(width / BLOCK)))
    coarse = coarse.repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)[..., :height, :width]
    fine = generator.standard_normal(tuple(shape))
    values = np.clip(np.round(128 + 45 * coarse + 20 * fine), 0, 255)
    return torch.from_numpy(values.astype(np.float32))
