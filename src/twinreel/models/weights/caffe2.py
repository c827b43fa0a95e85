"""The blob names of PySlowFast's Caffe2 model zoo as twinreel's keys, which are PySlowFast's.

A blob is the name of a layer and an ending: `_w` and `_b` of a convolution or a linear layer; `_s`, `_b`, `_rm`, `_riv`
of a batch norm, whose last is the running variance itself, in spite of its name. The fast pathway's begin with `t_`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.files import listed

__all__ = ["blob_key", "rename_blobs"]

_ENDINGS = {"w": "weight", "b": "bias"}
_NORM_ENDINGS = {"s": "weight", "b": "bias", "rm": "running_mean", "riv": "running_var"}

# Layers: pattern of a blob without its ending -> key without its ending. {p} is the pathway. A norm's layer ends in bn.
_LAYERS = [
    (r"(?P<t>t_)?conv1", "s1.pathway{p}_stem.conv"),
    (r"(?P<t>t_)?conv1_xy", "s1.pathway{p}_stem.conv_xy"),
    (r"(?P<t>t_)?res_conv1_bn", "s1.pathway{p}_stem.bn"),
    (r"t_pool1_subsample", "s1_fuse.conv_f2s"),
    (r"t_pool1_subsample_bn", "s1_fuse.bn"),
    (r"t_res(?P<s>\d+)_\d+_branch2c_bn_subsample", "s{s}_fuse.conv_f2s"),
    (r"t_res(?P<s>\d+)_\d+_branch2c_bn_subsample_bn", "s{s}_fuse.bn"),
    (r"(?P<t>t_)?res(?P<s>\d+)_(?P<b>\d+)_branch1(?P<n>_bn)?", "s{s}.pathway{p}_res{b}.branch1{n}"),
    (r"(?P<t>t_)?res(?P<s>\d+)_(?P<b>\d+)_branch2(?P<c>[abc])(?P<n>_bn)?", "s{s}.pathway{p}_res{b}.branch2.{c}{n}"),
    (r"(?P<t>t_)?res(?P<s>\d+)_(?P<b>\d+)_branch2b_bn_fc(?P<c>\d)", "s{s}.pathway{p}_res{b}.branch2.se.fc{c}"),
    (r"nonlocal_conv(?P<s>\d+)_(?P<b>\d+)_(?P<c>theta|phi|g|out)", "s{s}.pathway0_nonlocal{b}.conv_{c}"),
    (r"nonlocal_conv(?P<s>\d+)_(?P<b>\d+)_bn", "s{s}.pathway0_nonlocal{b}.bn"),
    (r"(?P<c>conv_5|lin_5)(?P<n>_bn)?", "head.{c}{n}"),
    (r"pred", "head.projection"),
]
_PATTERNS = [(re.compile(pattern), key) for pattern, key in _LAYERS]
_OF_TRAINING = re.compile(r"(.*_)?momentum|(.*_)?lr|model_iter")


def blob_key(blob: str) -> str | None:
    """The key of a blob, or None where the name is none of a network's."""
    layer, _, ending = blob.rpartition("_")
    endings = _NORM_ENDINGS if layer.endswith("bn") else _ENDINGS
    if ending not in endings:
        return None
    for pattern, key in _PATTERNS:
        found = pattern.fullmatch(layer)
        if found:
            parts = {name: value or "" for name, value in found.groupdict().items()}
            return f"{key.format(p=1 if parts.get('t') else 0, **parts)}.{endings[ending]}"
    return None


def rename_blobs(blobs: Mapping[str, Any], source: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors under twinreel's keys, and the names of the training's own blobs (momentum, lr, model_iter).

    Raises:
        CheckpointError: blobs that no rule knows, that hold no numbers, or that two names give one key.
    """
    left_out = tuple(name for name in blobs if _OF_TRAINING.fullmatch(name))
    keys = {name: blob_key(name) for name in blobs if name not in left_out}
    unknown = [name for name, key in keys.items() if key is None]
    if unknown:
        raise CheckpointError(
            f"{source}: Caffe2 blobs that are none of a SlowFast, Slow, I3D, C2D or X3D network: {listed(unknown)}; "
            "a network of another kind, or for boxes, is not read"
        )
    empty = [name for name in keys if not _is_numbers(blobs[name])]
    if empty:
        raise CheckpointError(f"{source}: Caffe2 blobs that hold no array of numbers: {listed(empty)}")
    tensors = {str(key): _tensor(str(key), blobs[name]) for name, key in keys.items()}
    if len(tensors) < len(keys):
        raise CheckpointError(f"{source}: several Caffe2 blobs stand for one key; the file is not what it seems")
    return tensors, left_out


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def _tensor(key: str, array: np.ndarray[Any, Any]) -> Tensor:
    tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    if tensor.ndim == 2 and key.endswith(".weight") and key != "head.projection.weight":
        return tensor[:, :, None, None, None]  # a linear layer of Caffe2 that is a 1 x 1 x 1 convolution here
    return tensor
