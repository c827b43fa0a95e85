"""Which network: ClipBERT's model_config (sizes of BERT) and detectron2_model_cfg (its ResNet)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinreel.errors import ConfigError
from twinreel.founding_configs.clipbert_paths import PathMap
from twinreel.founding_configs.clipbert_settings import json_entries
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short

__all__ = ["convert_sizes"]

# base_model.json, and the option of clipbert_base that another size becomes.
_SIZES = {
    "hidden_size": (768, "hidden_size"),
    "num_hidden_layers": (12, "num_layers"),
    "num_attention_heads": (12, "num_heads"),
    "intermediate_size": (3072, "intermediate_size"),
    "hidden_dropout_prob": (0.1, "dropout"),
}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# What the network has fixed.
_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "backbone_channel_in_size": 2048,
    "max_grid_row_position_embeddings": 100,
    "max_grid_col_position_embeddings": 100,
    "pad_token_id": 0,
}
# Said elsewhere (the words by the vocabulary), or without an effect on a network that starts from weights.
_OTHERS = (
    "attention_probs_dropout_prob",
    "initializer_range",
    "max_temporal_position_embeddings",
    "model_type",
    "vocab_size",
)


def convert_sizes(draft: Draft, paths: PathMap, path: Path) -> None:
    """Set model.name, and the options in which its sizes differ from the base model's."""
    draft.put("model.name", "clipbert_base", "model_config")
    sizes = _read(draft, paths, path)
    for key, (base, option) in _SIZES.items():
        if key in sizes and sizes[key] != base:
            draft.put(f"model.{option}", sizes[key], "model_config")
    cnn = Path(draft.settings["detectron2_model_cfg"] or "R-50-grid.yaml").name
    if cnn != "R-50-grid.yaml":
        text = f"detectron2_model_cfg={cnn}: the grid features are those of R-50-grid.yaml, a ResNet-50"
        draft.refuse("detectron2_model_cfg", f"{text}; another network is model.image_tower=package.module:function")
    draft.say("detectron2_model_cfg", "the ResNet-50 of clipbert_base; its res5 is not dilated, as in ClipBERT's code")


def _read(draft: Draft, paths: PathMap, path: Path) -> dict[str, Any]:
    """The content of the file that model_config names: where it says, else beside the JSON."""
    name = draft.settings["model_config"]
    if name is None:
        return {}
    found = [file for file in (Path(paths.find("model_config", name)), path.parent / Path(name).name) if file.is_file()]
    if not found:
        text = f"{name} is not here: taken for base_model.json (12 layers of 768, 12 heads)"
        draft.notes.append(f"model_config: {text}; --map {Path(name).parent}=FOLDER reads it")
        return {}
    try:
        entries = list(json_entries(found[0], found[0].read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, ConfigError) as error:
        draft.refuse("model_config", f"model_config={found[0]}: cannot be read: {error}")
        return {}
    sizes = {key: value for key, value, _ in entries}
    places = {key: f"model_config={found[0]}:{line}: {key}" for key, _, line in entries}  # of a key twice: the last
    for key, value in sizes.items():
        _check(draft, places[key], key, value, sizes)
    _check_heads(draft, places, sizes)
    return sizes


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _check_heads(draft: Draft, places: dict[str, str], sizes: dict[str, Any]) -> None:
    """The heads share the width among them."""
    keys = ("num_attention_heads", "hidden_size")
    heads, width = (sizes.get(key, _SIZES[key][0]) for key in keys)
    if _is_size(heads) and _is_size(width) and width % heads:
        place = next(places[key] for key in keys if key in places)
        draft.refuse("model_config", f"{place}: a hidden_size of {width} cannot be shared by {heads} heads evenly")


def _check(draft: Draft, where: str, key: str, value: Any, sizes: dict[str, Any]) -> None:
    place = f"{where}: {short(value)}"
    if key in _DROPOUTS:
        if type(value) not in (int, float) or not 0 <= value < 1:
            draft.refuse("model_config", f"{place}; it wants a number from 0 to below 1")
    elif key in _SIZES:
        if not _is_size(value):
            draft.refuse("model_config", f"{place}; it wants a whole number, 1 or more")
    elif key in _FIXED:
        if value != _FIXED[key]:
            draft.refuse("model_config", f"{place}; the network has {short(_FIXED[key])}")
    elif key not in _OTHERS:
        draft.refuse("model_config", f"{place}: unknown; there are {', '.join([*_SIZES, *_FIXED, *_OTHERS])}")
    if key == "attention_probs_dropout_prob" and value != sizes.get("hidden_dropout_prob", 0.1):
        draft.lose("model_config", f"{key} {short(value)}: model.dropout, hidden_dropout_prob, is of both")
