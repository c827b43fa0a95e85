"""What was found in a founding system's file of weights, and what was made of it, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.models.founding_config import FoundingConfig
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.weights import Weights, sizes_of
from twinreel.models.weights.inflate import PICTURES
from twinreel.models.weights.placing import PARTS

__all__ = ["LAYOUT_WORDS", "Found", "Imported"]

LAYOUT_WORDS = {
    "twinreel": "twinreel's keys",
    "howto100m": "MIL-NCE on HowTo100M",
    "slowfast": "PySlowFast",
    "pytorchvideo": "PyTorchVideo",
    "caffe2": "Caffe2, of PySlowFast's model zoo",
    "resnet_2d": "a ResNet for pictures, torchvision's keys",
    "slowfast_2d": "a ResNet for pictures, PySlowFast's keys",
    "googlenet_2d": "a GoogLeNet for pictures, torchvision's keys",
    "clipbert": "ClipBERT",
    "grid_feat": "a ResNet for grid features, detectron2",
    "bert": "BERT, Hugging Face's keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a file of weights is.

    Args:
        weights: as read.
        config: of the training, where it is inside.
        num_parameters: numbers in its tensors, less running statistics and counters.
        num_classes: of its head; None = it has none that is known.
        fits: models whose keys and shapes it has, all of them.
        backbones: models that it fits but for the head.
        nearest: the model that it misses by least, and how; None where something fits.
        model: the one it is for; None = not decided.
        reason: how that was decided.
    """

    weights: Weights
    config: FoundingConfig | None
    num_parameters: int
    num_classes: int | None
    fits: tuple[str, ...]
    backbones: tuple[str, ...]
    nearest: str | None
    model: str | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "file": self.weights.source,
            "layout": self.weights.layout,
            "tensors": len(self.weights.tensors),
            "parameters": self.num_parameters,
            "num_classes": self.num_classes,
            "epoch": self.weights.epoch,
            "config_inside": self.weights.config is not None,
            "unused": [kind.to_json() for kind in self.weights.unused],
            "notes": list(self.weights.notes),
            "sizes": {**sizes_of(self.weights.tensors), **self.weights.architecture},
            "part": PARTS.get(self.weights.layout),
            "fits": list(self.fits),
            "fits_but_for_the_head": list(self.backbones),
            "model": self.model,
            "reason": self.reason,
            "nearest": self.nearest,
        }

    def to_table(self) -> str:
        """Lines of text for people."""
        weights = self.weights
        matches = any(name.startswith("transformer.") for name in weights.tensors)
        classes = f", {self.num_classes} {'outputs' if matches else 'classes'}" if self.num_classes else ""
        lines = [
            f"{weights.source}: {LAYOUT_WORDS[weights.layout]}",
            f"  {len(weights.tensors)} tensors, {self.num_parameters:,} parameters{classes}",
        ]
        if weights.epoch is not None:
            lines.append(f"  epoch {weights.epoch}" + (" (counted from 0)" if weights.layout == "slowfast" else ""))
        if weights.left_out:
            lines.append(f"  beside the weights, left out: {_few(weights.left_out)}")
        if weights.unused:
            numbers = sum(kind.numbers for kind in weights.unused)
            total = numbers + sum(tensor.numel() for tensor in weights.tensors.values())
            lines.append(f"  also in the file, read by nothing: {numbers:,} of its {total:,} numbers")
            lines += [f"    {kind}" for kind in weights.unused]
        lines += [f"  {note}" for note in weights.notes]
        heads = [tensor for name, tensor in weights.tensors.items() if name.startswith("transformer.cls.")]
        if heads:
            numbers = sum(tensor.numel() for tensor in heads)
            lines.append(f"  heads of pretraining: {numbers:,} numbers in {len(heads)} tensors")
            lines.append("    a model with another head leaves them out and starts its own")
        if matches:
            lines.append(f"  sizes: {_sizes(weights)}")
        if weights.made and weights.layout == "pytorchvideo":
            lines.append(f"  not in the file, made so that they change nothing: {_few(weights.made)}")
        if weights.layout in PARTS:
            part = f"{PARTS[weights.layout]}: {weights.source}"
            return "\n".join([*lines, f"  a part of clipbert_base and its like: model.weights={{{part}}}"])
        inside = "none inside" if self.config is None else self.config.words
        lines.append(f"  configuration: {inside}")
        lines.append(f"  fits: {', '.join(self.fits) or 'none of the models'}")
        if self.backbones:
            lines.append(f"  fits but for the head (model.weights_scope=backbone): {', '.join(self.backbones)}")
        if weights.layout in PICTURES:
            lines.append("  to be inflated: name the file itself, model.weights=FILE model.weights_scope=backbone")
        elif self.nearest:
            lines.append(f"  nearest: {self.nearest}")
        if self.model:
            lines.append(f"  model: {self.model} ({self.reason})")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A file that was written, and what is in it."""

    found: Found
    out: Path
    model: str
    options: dict[str, Any]
    preprocessing: Preprocessing

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        made = {"out": str(self.out), "options": self.options, "preprocessing": self.preprocessing.to_dict()}
        return {**self.found.to_json(), "model": self.model, **made}

    def to_table(self) -> str:
        """Lines of text for people."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return "\n".join(
            [
                self.found.to_table(),
                f"written: {self.out}",
                f"  {self.model}({options}), {self.preprocessing.clip_words('slowfast')}, {self.preprocessing.framing}",
                f"  use it: model.name={self.model} model.weights={self.out}",
            ]
        )


def _sizes(weights: Weights) -> str:
    sizes = {**sizes_of(weights.tensors), **weights.architecture}
    text = ", ".join(f"{name} {value}" for name, value in sizes.items())
    heads = "" if "num_heads" in sizes else "; how many attention heads, no shape says"
    return text + heads


def _few(names: tuple[str, ...]) -> str:
    more = f", ... {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
