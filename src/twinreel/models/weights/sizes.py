"""Options of a model that the shapes of its weights state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from twinreel.models.weights.bert import BERT
from twinreel.models.weights.layouts import read_weights
from twinreel.models.weights.strict import Scope

__all__ = ["assumed_heads", "sizes_of", "sizes_of_parts"]

_HEAD_SIZE = 64  # of every BERT that Google released


def sizes_of(tensors: Mapping[str, Tensor], *, scope: Scope = "all") -> dict[str, int | bool | str]:
    """Options of the builders that the shapes of the weights state; `backbone`: of the backbone alone."""
    sizes: dict[str, int | bool | str] = {**_bert_sizes(tensors)}
    first = tensors.get("video_tower.conv1.conv1.weight")
    if first is not None:
        sizes["space_to_depth"] = first.shape[1] == 24
    if scope == "backbone":
        return sizes
    for key, options in (
        ("head.projection.weight", ("num_classes", None)),
        ("transformer.classifier.2.weight", ("num_outputs", None)),
        ("video_tower.fc.weight", ("embedding_size", None)),
        ("text_tower.word_embd.weight", ("num_words", "word_embedding_size")),
        ("text_tower.fc1.weight", ("text_hidden_size", None)),
    ):
        if key in tensors:
            sizes.update((name, size) for name, size in zip(options, tensors[key].shape, strict=False) if name)
    if "s4.pathway1_res22.branch2.a.weight" in tensors:  # a SlowFast of ResNet-101: how many blocks look along time
        for option, pathway in (("slow_temporal_blocks", 0), ("fast_temporal_blocks", 1)):
            kernels = (tensors.get(f"s4.pathway{pathway}_res{block}.branch2.a.weight") for block in range(23))
            sizes[option] = sum(kernel is not None and kernel.shape[2] > 1 for kernel in kernels)
    if "text_tower.fc1.weight" in tensors:
        sizes["text_tower"] = "word_max"
    elif "text_tower.fc.weight" in tensors:
        sizes["text_tower"] = "word_mean"
    return sizes


def sizes_of_parts(parts: Mapping[str, str | Path]) -> dict[str, int | bool | str]:
    """Options that files of parts state, `{transformer.bert: FOLDER, cnn: FILE}`, with what is beside them.

    Raises:
        CheckpointError: a file cannot be read.
    """
    sizes: dict[str, int | bool | str] = {}
    for prefix, path in parts.items():
        weights = read_weights(path)
        inside = {key: tensor for key, tensor in weights.tensors.items() if key.startswith(f"{prefix}.")}
        if inside:
            sizes.update({**sizes_of(inside, scope="backbone"), **weights.architecture})
    return sizes


def assumed_heads(builder: Callable[..., Any], stated: Mapping[str, Any]) -> dict[str, int]:
    """`num_heads` of a founding file where nothing states it and BERT is not the builder's size: 64 numbers a head.

    Args:
        builder: of the model.
        stated: options that are known.
    """
    takes = inspect.signature(builder).parameters
    hidden_size = stated.get("hidden_size")
    if "num_heads" not in takes or "num_heads" in stated or hidden_size in (None, takes["hidden_size"].default):
        return {}
    return {"num_heads": max(1, hidden_size // _HEAD_SIZE)}


def _bert_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    words = tensors.get(f"{BERT}embeddings.word_embeddings.weight")
    if words is None:
        return {}
    sizes = {"vocab_size": words.shape[0], "hidden_size": words.shape[1]}
    for option, key in (
        ("max_positions", "embeddings.position_embeddings.weight"),
        ("intermediate_size", "encoder.layer.0.intermediate.dense.weight"),
    ):
        if BERT + key in tensors:
            sizes[option] = len(tensors[BERT + key])
    layer = f"{BERT}encoder.layer."
    sizes["num_layers"] = len({key.removeprefix(layer).partition(".")[0] for key in tensors if key.startswith(layer)})
    return sizes
