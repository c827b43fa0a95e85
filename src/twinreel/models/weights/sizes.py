"""Options of a model that the shapes of its weights state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from twinreel.models.weights.strict import Scope

__all__ = ["sizes_of"]


def sizes_of(tensors: Mapping[str, Tensor], *, scope: Scope = "all") -> dict[str, int | bool | str]:
    """Options of the builders that the shapes of the weights state; `backbone`: of the backbone alone."""
    sizes: dict[str, int | bool | str] = {}
    first = tensors.get("video_tower.conv1.conv1.weight")
    if first is not None:
        sizes["space_to_depth"] = first.shape[1] == 24
    if scope == "backbone":
        return sizes
    for key, options in (
        ("head.projection.weight", ("num_classes", None)),
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
