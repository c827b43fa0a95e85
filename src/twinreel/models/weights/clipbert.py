"""Files of ClipBERT and of its CNN: which tensors its forward pass reads, and which it only carries along.

Its files hold the detector that the CNN was trained with (region proposals and box heads), a visual position table and
a second copy of the word table, none of which it reads. Its CNN comes from detectron2, whose frozen norms changed:
before version 3 a file's `running_var` was used as it is, since then 1e-5 is added; so 1e-5 is taken off there. Files
without versions are taken as they are, as detectron2 does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.files import listed
from twinreel.models.weights.unused import Unused, set_apart

__all__ = ["CNN", "TIED", "is_clipbert", "is_grid_features", "less_copies", "read_clipbert", "read_grid_features"]

CNN = "cnn.feature."
# ClipBERT's masked language head shares these with the word table and its own bias: the files hold them twice.
TIED = {
    "transformer.cls.predictions.decoder.weight": "transformer.bert.embeddings.word_embeddings.weight",
    "transformer.cls.predictions.decoder.bias": "transformer.cls.predictions.bias",
}
_EPSILON = 1e-5
_DETECTOR = {
    "the region proposals of the CNN's detector": (f"{CNN}proposal_generator.",),
    "the box and attribute heads of the CNN's detector": (f"{CNN}roi_heads.",),
    "the detector's pixel mean and deviation": (f"{CNN}pixel_mean", f"{CNN}pixel_std"),
}
_COUNTERS = {"counters num_batches_tracked": ("*.num_batches_tracked",)}
_OF_CLIPBERT = {
    "a visual position table": ("transformer.bert.visual_embeddings.position_embeddings.",),
    "counters position_ids": ("*.embeddings.position_ids",),
}


def is_clipbert(names: Iterable[str]) -> bool:
    """Whether these are key names of ClipBERT."""
    return any(name.startswith(("cnn.grid_encoder.", "transformer.bert.")) for name in names)


def is_grid_features(names: Iterable[str]) -> bool:
    """Whether these are key names of a ResNet of detectron2 without a feature pyramid, alone or with a detector."""
    return any(name.startswith("backbone.stem.conv1.") for name in names)


def read_clipbert(tensors: Mapping[str, Tensor], versions: Mapping[str, int], where: str) -> dict[str, Any]:
    """What `Weights` takes of a file of ClipBERT: tensors, unused ones, made ones and notes.

    Args:
        tensors: by key.
        versions: of the modules, where the file says them.
        where: the file, for messages.

    Raises:
        CheckpointError: what should be shared inside the file differs.
    """
    left, unused = set_apart(tensors, {**_DETECTOR, **_OF_CLIPBERT} if _has_resnet(tensors) else _OF_CLIPBERT)
    left, copies = less_copies(left, where)
    if not _has_frozen_norms(tensors):  # group norms, or a user's image tower, whose norms are its own
        return _named("clipbert" if unused or copies else "twinreel", left, unused + copies, (), ())
    left, made, notes = _current_norms(left, versions)
    left, counters = set_apart(left, _COUNTERS)
    found = unused + copies + counters
    return _named("clipbert" if found or made or notes else "twinreel", left, found, made, notes)


def read_grid_features(tensors: Mapping[str, Tensor], versions: Mapping[str, int]) -> dict[str, Any]:
    """What `Weights` takes of a file of detectron2, such as `grid_feat_R-50.pth`, under ClipBERT's keys."""
    renamed = {CNN + name: tensor for name, tensor in tensors.items()}
    left, unused = set_apart(renamed, _DETECTOR)
    left, made, notes = _current_norms(left, {CNN + name: version for name, version in versions.items()})
    left, counters = set_apart(left, _COUNTERS)
    return _named("grid_feat", left, unused + counters, made, notes)


def _has_resnet(names: Iterable[str]) -> bool:
    return f"{CNN}backbone.stem.conv1.weight" in names


def _has_frozen_norms(names: Iterable[str]) -> bool:
    return _has_resnet(names) and any(name.startswith(f"{CNN}backbone.") and ".norm.running_" in name for name in names)


def _named(
    layout: str,
    tensors: dict[str, Tensor],
    unused: tuple[Unused, ...],
    made: tuple[str, ...],
    notes: tuple[str, ...],
) -> dict[str, Any]:
    return {"layout": layout, "tensors": tensors, "unused": unused, "made": made, "notes": notes}


def less_copies(tensors: dict[str, Tensor], where: str) -> tuple[dict[str, Tensor], tuple[Unused, ...]]:
    """The tensors without what a masked language head has twice, and that.

    Raises:
        CheckpointError: the two differ.
    """
    unequal = [name for name, of in TIED.items() if _differ(tensors.get(name), tensors.get(of))]
    if unequal:
        raise CheckpointError(
            f"{where}: {listed(unequal)} should be the same as {listed([TIED[name] for name in unequal])}, which "
            "ClipBERT and BERT share, and is not: this is another network"
        )
    copies = tuple(name for name, of in TIED.items() if name in tensors and of in tensors)
    return set_apart(tensors, {"second copies of the word table and of its bias": copies} if copies else {})


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and not torch.equal(one, other)


def _current_norms(
    tensors: dict[str, Tensor], versions: Mapping[str, int]
) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """Tensors with statistics as detectron2's frozen norms of version 3 have them, the made ones, and what was done."""
    changed = dict(tensors)
    made: list[str] = []
    old, trained = [], []
    for norm in [name.removesuffix(".weight") for name in tensors if _is_norm(name)]:
        version = versions.get(norm)
        weight, mean, variance = tensors[f"{norm}.weight"], f"{norm}.running_mean", f"{norm}.running_var"
        if version is None or version < 2:
            made += [name for name in (mean, variance) if name not in tensors]
            changed.setdefault(mean, torch.zeros_like(weight))
            changed.setdefault(variance, torch.ones_like(weight))
        if f"{norm}.num_batches_tracked" in tensors:
            trained.append(norm)  # a batch norm that was not frozen has always added its epsilon, whatever its version
        elif version is not None and version < 3 and variance in changed:
            changed[variance] = changed[variance] - _EPSILON
            old.append(norm)
    notes = []
    if old:
        notes.append(
            f"{len(old)} frozen norms are older than version 3: {_EPSILON:g} was taken off their running_var, to which "
            "it is added now"
        )
    if trained:
        notes.append(f"{len(trained)} norms of the CNN were not frozen in the file; here they are, at its statistics")
    if made:
        notes.append(f"{len(made)} running statistics that the file lacks are 0 (mean) and 1 (variance)")
    return changed, tuple(made), tuple(notes)


def _is_norm(name: str) -> bool:
    return name.startswith(f"{CNN}backbone.") and name.endswith(".norm.weight")
