"""Which keys of a model a file of a part stands for: a BERT, a CNN for grids, or ClipBERT after pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from twinreel.errors import CheckpointError
from twinreel.models.weights.bert import BERT
from twinreel.models.weights.clipbert import CNN, TIED
from twinreel.models.weights.layouts import Weights
from twinreel.models.weights.sizes import sizes_of

__all__ = [
    "PARTS",
    "Placed",
    "check_heads",
    "check_vocabulary",
    "check_whole",
    "place_part",
    "with_copies",
    "without_pretraining",
]

# Layouts of files that hold a part of a model, and the part of ClipBERT that each is for.
PARTS = {"bert": "transformer.bert", "grid_feat": "cnn"}
_HEADS = ("transformer.classifier.", "transformer.cls.")
_MOST_PADDING = 64  # rows that a word table may have beyond the vocabulary's: some are padded to whole blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Tensors of a file as a model's.

    Args:
        start: beginning of all keys that are to be set.
        tensors: by the model's keys.
        new: beginnings of keys that the file does not have and that stay at their start values.
        dropped: keys of the file that are left out.
        notes: what else is to be known.
    """

    start: str
    tensors: dict[str, Tensor]
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def place_part(model: nn.Module, prefix: str, weights: Weights) -> Placed:
    """A file of a part alone, under one of the model's parts.

    Raises:
        CheckpointError: the model has other sizes than the file, or than the configuration beside it says.
    """
    if weights.layout == "grid_feat":
        # The part `cnn` also holds the grid encoder, which no such file has.
        start = CNN if prefix == CNN.partition(".")[0] else f"{prefix}."
        return Placed(start=start, tensors={start + key.removeprefix(CNN): t for key, t in weights.tensors.items()})
    whole = prefix == BERT.partition(".")[0]
    placed = _transformer(model, weights.tensors) if whole else _bert(f"{prefix}.", weights.tensors)
    return replace(placed, notes=_checked_sizes(model, prefix, weights))


def _bert(start: str, tensors: Mapping[str, Tensor]) -> Placed:
    """A BERT without its heads, as the part whose keys begin with `start`."""
    inside = {start + key.removeprefix(BERT): tensor for key, tensor in tensors.items() if key.startswith(BERT)}
    new = [f"{start}visual_embeddings."]
    if not _has(inside, f"{start}pooler."):
        new.append(f"{start}pooler.")
    dropped = tuple(key for key in tensors if not key.startswith(BERT))
    return Placed(start=start, tensors=inside, new=tuple(new), dropped=dropped)


def _transformer(model: nn.Module, tensors: Mapping[str, Tensor]) -> Placed:
    """A BERT as ClipBERT's whole transformer: with its heads of pretraining, if the model has them."""
    bert = _bert(BERT, tensors)
    if not _has(model.state_dict(), _HEADS[1]):
        return replace(bert, start="transformer.", new=(*bert.new, _HEADS[0]))
    parts = (f"{_HEADS[1]}predictions.", f"{_HEADS[1]}seq_relationship.")
    new = tuple(part for part in parts if not _has(tensors, part))
    return Placed(start="transformer.", tensors=with_copies(model, tensors), new=(*bert.new, *new))


def check_whole(weights: Weights) -> None:
    """Refuse a file of a part where a whole model is to be set.

    Raises:
        CheckpointError: it is one.
    """
    if weights.layout in PARTS:
        kind = "a BERT" if weights.layout == "bert" else "a CNN of detectron2"
        raise CheckpointError(
            f"{weights.source}: {kind} alone, which is a part of a model; name the part: "
            f"model.weights={{{PARTS[weights.layout]}: {weights.source}}}"
        )


def with_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with what the model has under two names under both."""
    wanted = model.state_dict()
    copies = {
        name: tensors[of] for name, of in TIED.items() if name in wanted and name not in tensors and of in tensors
    }
    return {**tensors, **copies}


def without_pretraining(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Beginnings of keys to leave out of a file of pretraining where the model has another head; and the words."""
    wanted = model.state_dict()
    if not _has(tensors, _HEADS[1]) or _has(tensors, _HEADS[0]) or not _has(wanted, _HEADS[0]):
        return (), ()
    return _HEADS, (
        "the file is of pretraining: its heads for masked words and matching are left out, the head is new",
    )


def check_vocabulary(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a word table that is not that of the model's vocabulary.

    Raises:
        CheckpointError: it has too many rows; too few do not fit the model anyway.
    """
    table = tensors.get(f"{BERT}embeddings.word_embeddings.weight")
    vocabulary = getattr(model, "vocabulary", None)
    if table is None or vocabulary is None:
        return
    pieces: int = vocabulary.num_embeddings
    if len(table) - pieces >= _MOST_PADDING:
        raise CheckpointError(
            f"the word table of the weights has {len(table)} rows and the vocabulary {pieces} pieces, so they do not "
            "belong together; give the vocab.txt that the weights were trained with"
        )


def check_heads(model: nn.Module, weights: Weights) -> None:
    """Refuse weights of a ClipBERT whose attention has another number of heads, where what is beside them says it.

    Raises:
        CheckpointError: the model has other ones, which would load and give other scores.
    """
    stated = weights.architecture.get("num_heads")
    part = BERT.removesuffix(".")
    if stated is None or part not in dict(model.named_modules()):
        return
    own = {inner.num_heads for inner in model.get_submodule(part).modules() if hasattr(inner, "num_heads")}
    if own - {stated}:
        raise CheckpointError(
            f"{weights.source}: num_heads is {stated} in the weights, and {own.pop()} in the model; set "
            f"model.num_heads={stated}"
        )


def _has(names: Mapping[str, Tensor], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _checked_sizes(model: nn.Module, prefix: str, weights: Weights) -> tuple[str, ...]:
    """What is said of attention heads, which no shape shows.

    Raises:
        CheckpointError: the model's sizes are not those of the file and of the configuration beside it.
    """
    part = prefix if prefix != BERT.partition(".")[0] else BERT.removesuffix(".")
    module = model.get_submodule(part)
    own: dict[str, Any] = {**sizes_of({BERT + key: tensor for key, tensor in module.state_dict().items()})}
    heads = {inner.num_heads for inner in module.modules() if hasattr(inner, "num_heads")}
    if len(heads) == 1:
        own["num_heads"] = heads.pop()
    stated = {**sizes_of(weights.tensors), **weights.architecture}
    wrong = {name: size for name, size in stated.items() if own.get(name, size) != size}
    if wrong:
        differ = ", ".join(f"{name} {size} (the model: {own[name]})" for name, size in wrong.items())
        options = " ".join(f"model.{name}={size}" for name, size in wrong.items())
        raise CheckpointError(f"{weights.source}: a BERT of other sizes than {part}, {differ}; set {options}")
    if "num_heads" in own and "num_heads" not in stated:
        return (f"no config.json beside the file says how many attention heads it has; {own['num_heads']} are taken",)
    return ()
