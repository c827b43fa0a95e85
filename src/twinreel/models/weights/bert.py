"""Files of BERT, as Hugging Face's code writes them, under ClipBERT's keys `transformer.bert.` and `transformer.cls.`.

Known are keys that begin with `bert.` (a BERT with a head) or with nothing (a BERT alone), and the names `gamma` and
`beta` that norms had in files up to 2019, which the authors of ClipBERT skipped without a word. A `config.json` beside
the file states what shapes cannot, such as the number of attention heads, and is compared with what is built here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.clipbert import less_copies
from twinreel.models.weights.unused import set_apart

__all__ = ["BERT", "architecture_beside", "file_in", "is_bert", "read_bert"]

BERT = "transformer.bert."
_HEADS = "transformer.cls."
_WORDS = "embeddings.word_embeddings.weight"
_QUERY = "encoder.layer.0.attention.self.query.weight"
_PREFIXES = ("bert.", "")
_PARTS = ("embeddings.", "encoder.", "pooler.")
_FILES = ("model.safetensors", "pytorch_model.bin")
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# What ClipBERT's BERT is; another value would load and give other numbers.
_FIXED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "layer_norm_eps": (1e-12,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}
_SHAPES = {
    "hidden_size": ("embeddings.word_embeddings.weight", 1),
    "vocab_size": ("embeddings.word_embeddings.weight", 0),
    "max_position_embeddings": ("embeddings.position_embeddings.weight", 0),
    "intermediate_size": ("encoder.layer.0.intermediate.dense.weight", 0),
}


def file_in(folder: Path) -> Path:
    """The file of weights in a folder of Hugging Face's layout; the folder itself where it is none."""
    found = [folder / name for name in _FILES if (folder / name).is_file()]
    return found[0] if found and (folder / "config.json").is_file() else folder


def is_bert(names: Iterable[str]) -> bool:
    """Whether these are key names of a BERT, alone or with a head."""
    names = set(names)
    return any(prefix + _WORDS in names and prefix + _QUERY in names for prefix in _PREFIXES)


def read_bert(tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """What `Weights` takes of a file of BERT: tensors, unused ones and notes.

    Raises:
        CheckpointError: two keys stand for one, or the table of the masked language head is not that of the words.
    """
    prefix = next(prefix for prefix in _PREFIXES if prefix + _WORDS in tensors)
    renamed: dict[str, Tensor] = {}
    old = 0
    for name, tensor in tensors.items():
        key = _key(name, prefix)
        current = next((key.removesuffix(end) + new for end, new in _OLD_NAMES.items() if key.endswith(end)), key)
        if current in renamed:
            raise CheckpointError(f"{where}: {current} is there twice, with its old and its new name")
        old += current != key
        renamed[current] = tensor
    left, copies = less_copies(renamed, where)
    left, unused = set_apart(
        left,
        {
            "counters position_ids": ("*.embeddings.position_ids",),
            "heads of other tasks": ("head of another task: ",),
        },
    )
    notes = (f"{old} tensors had the old names gamma and beta of norms: read as weight and bias",) if old else ()
    return {"layout": "bert", "tensors": left, "unused": copies + unused, "notes": notes}


def architecture_beside(path: Path, tensors: Mapping[str, Tensor], *, founding: bool) -> dict[str, int]:
    """The options of ClipBERT that a configuration beside a file states and shapes do not: `num_heads`, or nothing.

    Args:
        path: the file.
        tensors: under ClipBERT's keys.
        founding: a file of ClipBERT; its run folder has `log/model_config.json` beside the folder of the file.

    Raises:
        CheckpointError: the configuration is unreadable, of another kind of network, or of other sizes.
    """
    places = [path.with_name("config.json")]
    if founding:
        places = [path.absolute().parent.parent / "log" / "model_config.json"]
    config = next((place for place in places if place.is_file()), None)
    if config is None:
        return {}
    values = _read_config(config)
    problems = [
        f"{name} is {values[name]!r}, ClipBERT's is {allowed[0]!r}"
        for name, allowed in _FIXED.items()
        if values.get(name) is not None and values[name] not in allowed
    ]
    problems += [
        f"{name} is {values[name]!r}, in the weights {size}"
        for name, size in _sizes(tensors).items()
        if values.get(name) not in (None, size)
    ]
    heads = values.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        problems.append(f"num_attention_heads is {heads!r}, which is no number of heads")
    if problems:
        raise CheckpointError(f"{path}: the configuration beside it, {config}, does not fit: {'; '.join(problems)}")
    return {"num_heads": int(values["num_attention_heads"])}


def _key(name: str, prefix: str) -> str:
    rest = name.removeprefix(prefix)
    if name.startswith(prefix) and rest.startswith(_PARTS):
        return BERT + rest
    if name.startswith("cls."):
        return _HEADS + name.removeprefix("cls.")
    return f"head of another task: {name}"


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    sizes = {
        name: tensors[BERT + key].shape[dimension]
        for name, (key, dimension) in _SHAPES.items()
        if BERT + key in tensors
    }
    layers = {key.removeprefix(f"{BERT}encoder.layer.").partition(".")[0] for key in tensors if f"{BERT}enc" in key}
    return {**sizes, "num_hidden_layers": len(layers)}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected the settings of a network by name; got a {type(values).__name__}")
    return values
