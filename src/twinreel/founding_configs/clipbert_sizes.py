"""Which network: ClipBERT's model_config (sizes of BERT) and detectron2_model_cfg (its ResNet)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinreel.founding_configs.clipbert_paths import PathMap
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
        sizes = json.loads(found[0].read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        draft.refuse("model_config", f"model_config={found[0]}: cannot be read as JSON: {error}")
        return {}
    if not isinstance(sizes, dict):
        draft.refuse("model_config", f"model_config={found[0]}: no JSON object of sizes")
        return {}
    for key, value in sizes.items():
        _check(draft, found[0], key, value, sizes)
    return sizes


def _check(draft: Draft, file: Path, key: str, value: object, sizes: dict[str, Any]) -> None:
    place = f"model_config={file}: {key}: {short(value)}"
    if key in _SIZES:
        if type(value) not in (int, type(_SIZES[key][0])) or not value:
            draft.refuse("model_config", f"{place} is no size")
    elif key in _FIXED:
        if value != _FIXED[key]:
            draft.refuse("model_config", f"{place}; the network has {short(_FIXED[key])}")
    elif key not in _OTHERS:
        draft.refuse("model_config", f"{place}: unknown; there are {', '.join([*_SIZES, *_FIXED, *_OTHERS])}")
    if key == "attention_probs_dropout_prob" and value != sizes.get("hidden_dropout_prob", 0.1):
        draft.lose("model_config", f"{key} {short(value)}: model.dropout, hidden_dropout_prob, is of both")
