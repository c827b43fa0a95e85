"""What a file holds: tensors, arrays, containers. Nothing that is in it is run."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.pickles import read_pickle

__all__ = ["listed", "read_file", "read_tensor"]

_LISTED = 10
# Classes that hold settings of a training program and do nothing when they are made, in whatever module they are.
_SETTINGS = ("AttrDict", "CfgNode", "ContainerMetadata", "DictConfig", "EasyDict", "ListConfig", "Namespace")
# What files of torch begin with: a zip, or since 2017 the pickled number that names the format.
_TORCH_ZIP = b"PK\x03\x04"
_TORCH_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def read_file(path: Path) -> tuple[Any, dict[str, str]]:
    """What a file holds, on the CPU, and the texts that a safetensors file carries beside its tensors.

    Raises:
        CheckpointError: the file is missing, damaged, or holds objects that need unpickling.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder; name a file of weights in it, or use twinreel.load_model for a run")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file of weights")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        if _is_plain_pickle(path):
            return read_pickle(path), {}
        return torch.load(path, map_location="cpu", weights_only=True), {}
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        if _is_plain_pickle(path):
            raise CheckpointError(f"{_unreadable(path)}: {error}") from error
        names = _refused(path, str(error))
        if names:
            raise CheckpointError(_how_to_convert(path, names)) from error
        raise CheckpointError(_unreadable(path)) from error
    except Exception as error:  # a damaged file can make an unpickler raise anything, struct.error among them
        said = (str(error).splitlines() or [""])[0][:120]
        raise CheckpointError(f"{_unreadable(path)}: {type(error).__name__} {said}".rstrip()) from error


def read_tensor(path: str | Path) -> Tensor:
    """A 2-D float tensor from a file that torch saved, such as a table of word vectors (rows, size).

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    content, _ = read_file(Path(path))
    if not isinstance(content, Tensor) or content.ndim != 2 or not content.is_floating_point():
        got = f"{content.dtype} {tuple(content.shape)}" if isinstance(content, Tensor) else type(content).__name__
        raise CheckpointError(f"{path}: expected one float tensor (words, size), saved by torch.save; got {got}")
    return content


def listed(names: list[str] | tuple[str, ...]) -> str:
    """The first ten names, and how many more there are."""
    more = f", ... {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})


def _is_plain_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith((_TORCH_ZIP, _TORCH_PICKLE)):
        return False
    return head.startswith(b"\x80") or (path.suffix == ".pkl" and head[:1] in (b"(", b"}", b"c"))


def _refused(path: Path, message: str) -> list[str]:
    """The classes and functions that unpickling this file would import and that torch does not allow."""
    found = re.findall(r"GLOBAL ([\w.]+) was not an allowed", message)
    try:
        found += torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, OSError, RuntimeError):  # files from before torch 1.6 name only the first one
        pass
    return sorted(set(found))


def _how_to_convert(path: Path, names: list[str]) -> str:
    """What is refused; and, where it is only classes that are known to hold settings, the command that allows them."""
    refused = (
        f"{path}: holds Python objects beside tensors ({', '.join(names)}), refused because unpickling can run code. "
    )
    unknown = ", ".join(name for name in names if name.rpartition(".")[2] not in _SETTINGS)
    if unknown:
        return refused + (
            f"What {unknown} would do is not known: ask for a file of weights alone (a state dict, or safetensors), or "
            "make one with the program that wrote this file, if you trust both"
        )
    modules = ", ".join(sorted({"torch", *(name.rpartition(".")[0] for name in names)}))
    code = (
        f"import {modules}; torch.serialization.add_safe_globals([{', '.join(names)}]); "
        f"c = torch.load('{path}', map_location='cpu', weights_only=True); "
        f"torch.save(c.get('state_dict', c.get('model_state', c)), '{path.with_suffix('')}_weights.pth')"
    )
    return refused + (
        f'Convert it once, where these can be imported; this allows them and nothing else: python -c "{code}"'
    )


def _unreadable(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(24)
    if not head:
        return f"{path}: an empty file"
    if head.startswith(b"version https://git-lfs"):
        return f"{path}: a git-lfs pointer, not the weights; run git lfs pull"
    return f"{path}: not a readable file of weights (it begins with {head!r}); it may be damaged or cut off"
