"""Which system wrote a file of weights, and its tensors under twinreel's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.bert import architecture_beside, file_in, is_bert, read_bert
from twinreel.models.weights.caffe2 import rename_blobs
from twinreel.models.weights.clipbert import is_clipbert, is_grid_features, read_clipbert, read_grid_features
from twinreel.models.weights.files import listed, read_file
from twinreel.models.weights.own import described_beside
from twinreel.models.weights.pytorchvideo import is_pytorchvideo, rename_pytorchvideo
from twinreel.models.weights.unused import Unused

__all__ = ["METADATA", "Layout", "Source", "Weights", "read_weights"]

Source: TypeAlias = str | Path | Mapping[str, Any]
Layout: TypeAlias = Literal[
    "twinreel",
    "howto100m",
    "slowfast",
    "pytorchvideo",
    "caffe2",
    "resnet_2d",
    "slowfast_2d",
    "googlenet_2d",
    "clipbert",
    "grid_feat",
    "bert",
]

# Entries of a file that hold its weights, each with the system that calls them so.
_WRAPPERS = ("state_dict", "model_state", "model_state_dict", "model")

METADATA = "twinreel"  # the entry of a safetensors file that describes the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Tensors under twinreel's keys; those of pictures' networks (`..._2d`) under their own.

    Args:
        source: file, for messages.
        layout: the system that wrote it; `twinreel` also where its keys needed no renaming.
        tensors: by key.
        left_out: entries of the file that are no weights of a network.
        unused: tensors of the file that nothing reads.
        made: keys that the file lacks and that were made so that they change nothing.
        notes: what was done to the numbers, or is to be known of them.
        epoch: of the training, as the file counts it (PySlowFast: from 0).
        config: the founding configuration, YAML, where it is inside.
        pool_after_first_stage: what the layout says of a layer without weights; None = nothing.
        architecture: options that a configuration beside the file states and shapes do not.
        model: name of the model that `twinreel import` made the file for, or that a checkpoint of our own is of, with
            its `options` and `preprocessing`.
    """

    source: str
    layout: Layout
    tensors: dict[str, Tensor]
    left_out: tuple[str, ...] = ()
    unused: tuple[Unused, ...] = ()
    made: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    epoch: int | None = None
    config: str | None = None
    pool_after_first_stage: bool | None = None
    architecture: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)


def read_weights(source: Source) -> Weights:
    """The tensors of a file or a state dict under twinreel's keys, on the CPU, with nothing checked against a model.

    Of a folder of Hugging Face's (`config.json` and `model.safetensors` or `pytorch_model.bin`) the file in it.

    Raises:
        CheckpointError: the file is missing, damaged, holds objects that need unpickling, or is no state dict.
    """
    texts: dict[str, str] = {}
    if isinstance(source, Mapping):
        where, content = "the given state dict", source
    else:
        path = file_in(Path(source).expanduser())
        where = str(path)
        content, texts = read_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where}: holds a {type(content).__name__}, not a dict of weights")
    if isinstance(content.get("blobs"), Mapping):
        tensors, left_out = rename_blobs({str(name): blob for name, blob in content["blobs"].items()}, where)
        return Weights(source=where, layout="caffe2", tensors=tensors, left_out=left_out)
    wrapper = next((name for name in _WRAPPERS if isinstance(content.get(name), Mapping)), None)
    state = content[wrapper] if wrapper else content
    named = _recognized(_tensors(state, where), _versions(state), where, founding=wrapper == "model_state")
    around = _around(content, wrapper) if wrapper else {}
    if named["layout"] in ("bert", "clipbert", "twinreel") and not isinstance(source, Mapping):
        founding = named["layout"] != "bert"
        named["architecture"] = architecture_beside(path, named["tensors"], founding=founding)
        if founding and is_clipbert(named["tensors"]):
            named |= described_beside(path)
    return Weights(source=where, **{**named, **around, **_description(texts, where)})


def _tensors(content: Mapping[Any, Any], where: str) -> dict[str, Tensor]:
    content = {name: _tensor(value) for name, value in content.items()}
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        got = f"these are no tensors: {listed(others)}" if others else "it is empty"
        raise CheckpointError(
            f"{where}: expected tensors by name, such a dict under state_dict or model_state, or Caffe2's arrays under "
            f"blobs; {got}"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _tensor(value: Any) -> Any:
    """An array as a tensor (files of detectron2's model zoo hold arrays); anything else as it is."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" else value


def _versions(state: Mapping[Any, Any]) -> dict[str, int]:
    """The versions of the modules, which torch hangs on the ordered dict of a state dict."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return {}
    stated = {str(name): of.get("version") for name, of in metadata.items() if isinstance(of, Mapping)}
    return {name.removeprefix("module."): version for name, version in stated.items() if isinstance(version, int)}


def _recognized(tensors: dict[str, Tensor], versions: dict[str, int], where: str, *, founding: bool) -> dict[str, Any]:
    if any(name.startswith(("video_tower.", "text_tower.")) for name in tensors):
        return {"layout": "twinreel", "tensors": tensors}
    # Saved from (Distributed)DataParallel; PySlowFast's networks that PyTorchVideo built are inside a `model`.
    for wrapper in ("module.", "model."):
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    if is_clipbert(tensors):
        return read_clipbert(tensors, versions, where)
    if is_grid_features(tensors):
        return read_grid_features(tensors, versions)
    if is_bert(tensors):
        return read_bert(tensors, where)
    if "conv1.conv1.weight" in tensors or any(name.startswith("text_module.") for name in tensors):
        return {"layout": "howto100m", "tensors": {_tower_key(key): tensor for key, tensor in tensors.items()}}
    if is_pytorchvideo(tensors):
        found = rename_pytorchvideo(tensors, where)
        pool = {"pool_after_first_stage": found.pool}
        return {"layout": "pytorchvideo", "tensors": found.tensors, "made": found.made, **pool}
    if "layer1.0.conv1.weight" in tensors:
        return {"layout": "resnet_2d", "tensors": tensors}
    if "inception3a.branch1.conv.weight" in tensors:
        return {"layout": "googlenet_2d", "tensors": tensors}
    stem = tensors.get("s1.pathway0_stem.conv.weight")
    if stem is not None and stem.ndim == 4:
        return {"layout": "slowfast_2d", "tensors": tensors}
    return {"layout": "slowfast" if founding else "twinreel", "tensors": tensors}


def _tower_key(key: str) -> str:
    if key.startswith("text_module."):
        return "text_tower." + key.removeprefix("text_module.")
    return "video_tower." + key


def _around(content: Mapping[str, Any], wrapper: str) -> dict[str, Any]:
    """What a training checkpoint says beside its weights."""
    epoch, config = content.get("epoch"), content.get("cfg")
    others = tuple(str(name) for name in content if name not in (wrapper, "epoch", "cfg"))
    return {
        "left_out": others,
        "epoch": epoch if isinstance(epoch, int) else None,
        "config": config if isinstance(config, str) else None,
    }


def _description(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    if METADATA not in texts:
        return {}
    try:
        values = json.loads(texts[METADATA])
        return {name: values[name] for name in ("model", "options", "preprocessing", "layout", "epoch")}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{where}: its description ({METADATA}) is damaged: {error!r}; import it again"
        ) from error
