"""A file of weights into a model, or into one part of it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from twinreel.config import nearest
from twinreel.errors import CheckpointError, ConfigError
from twinreel.models.mvit import resize_positions
from twinreel.models.weights.bert import BERT
from twinreel.models.weights.files import listed
from twinreel.models.weights.inflate import PICTURES, inflate_2d
from twinreel.models.weights.layouts import Source, Weights, read_weights
from twinreel.models.weights.placing import (
    PARTS,
    Placed,
    check_heads,
    check_vocabulary,
    check_whole,
    place_part,
    with_copies,
    without_pretraining,
)
from twinreel.models.weights.strict import LoadReport, Scope, copy_strictly, heads_of

__all__ = ["load_partial", "load_weights"]


def load_weights(model: nn.Module, source: Source | Weights, *, scope: Scope = "all") -> LoadReport:
    """Set a model's weights from a file or a state dict. Everything is checked before anything is copied.

    A network of pictures is inflated, see `inflate.inflate_2d`. Of ClipBERT after pretraining, the heads are left out
    where the model has a head of its own.

    Args:
        model: any module; for `backbone` it needs an attribute `head_prefixes`.
        source: a file, a state dict, or what `read_weights` returned.
        scope: `all`: the keys must be exactly the model's. `backbone`: keys of the model's `head_prefixes` are left
            out on both sides (a pair of towers: `fc` of the video tower and all of the text tower), the rest is as
            strict. Counters `num_batches_tracked`, which old files lack and nothing reads, may be missing.

    Raises:
        CheckpointError: the file cannot be read, or keys are missing, unexpected or mis-shaped: all in one message.
            Or `backbone` would load less than half of the parameters. Or it is of a part alone.
        ConfigError: another scope, or a model without `head_prefixes`.
    """
    weights = source if isinstance(source, Weights) else read_weights(source)
    if weights.layout in PICTURES:
        return inflate_2d(model, weights, scope=scope)
    check_whole(weights)
    check_vocabulary(model, weights.tensors)
    check_heads(model, weights)
    names = [name for name, _ in model.named_parameters()]
    counted = [name for name in names if name.startswith("video_tower.")] or names
    heads, said = without_pretraining(model, weights.tensors)
    tensors, notes = _resized(model, weights)
    report = copy_strictly(
        model,
        with_copies(model, tensors),
        weights.source,
        heads=(*heads_of(model, scope), *heads),
        prefix="",
        counted=counted,
        notes=(*said, *notes),
    )
    return replace(report, unused=weights.unused)


def load_partial(model: nn.Module, prefix: str, source: Source, *, scope: Scope = "all") -> LoadReport:
    """Set the weights of one part of a model, such as a tower, from a file of the whole or of that part alone.

    Args:
        model: the whole model.
        prefix: dotted name of the part, `video_tower`, `cnn`, `transformer.bert`.
        source: a file or a state dict; keys of other parts are left out and reported. Into ClipBERT's `cnn` goes
            detectron2's ResNet, into its `transformer.bert` any BERT; what these do not have stays as it is.
        scope: `backbone` leaves the part's head out, as `load_weights` does.

    Raises:
        CheckpointError: as `load_weights`.
        ConfigError: the model has no such part.
    """
    parts = [name for name, _ in model.named_modules() if name]
    if prefix not in parts:
        raise ConfigError(
            f"starting weights for {prefix!r}: {type(model).__name__} has no such part"
            f"{nearest(prefix, [name for name in parts if '.' not in name])}"
        )
    weights = read_weights(source)
    if weights.layout in PICTURES:
        if prefix != "video_tower":
            raise CheckpointError(
                f"{weights.source}: a network of pictures, which is inflated into the video_tower alone"
            )
        return inflate_2d(model, weights, scope=scope)
    placed = place_part(model, prefix, weights) if weights.layout in PARTS else _inside(model, f"{prefix}.", weights)
    check_vocabulary(model, placed.tensors)
    if weights.layout not in PARTS and any(key.startswith(BERT) for key in placed.tensors):
        check_heads(model, weights)
    heads = heads_of(model, scope) if getattr(model, "head_prefixes", ()) else ()
    counted = [name for name, _ in model.named_parameters() if name.startswith(placed.start)]
    report = copy_strictly(
        model,
        placed.tensors,
        weights.source,
        heads=(*heads, *placed.new),
        prefix=placed.start,
        counted=counted,
        notes=(*placed.notes, *_notes(weights)),
    )
    beside = [name for name in model.state_dict() if name.startswith(f"{prefix}.")]
    return replace(
        report,
        dropped=report.dropped + placed.dropped,
        kept=report.kept + tuple(name for name in beside if not name.startswith(placed.start)),
        unused=weights.unused,
    )


def _inside(model: nn.Module, start: str, weights: Weights) -> Placed:
    """Those tensors of a whole model that belong to a part, or all of a file of that part alone, with its own keys."""
    inside = {name: tensor for name, tensor in weights.tensors.items() if name.startswith(start)}
    if not inside:
        return Placed(start=start, tensors={start + name: tensor for name, tensor in weights.tensors.items()})
    others = tuple(name for name in weights.tensors if name not in inside)
    new, notes = without_pretraining(model, inside)
    return Placed(start=start, tensors=with_copies(model, inside), new=new, dropped=others, notes=notes)


def _resized(model: nn.Module, weights: Weights) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors, with MViT's position tables interpolated to the model's sizes, and what was done."""
    tensors = resize_positions(weights.tensors, model)
    changed = [name for name, tensor in tensors.items() if tensor.shape != weights.tensors[name].shape]
    if not changed:
        return tensors, _notes(weights)
    shapes = [f"{name} {len(weights.tensors[name])} to {len(tensors[name])}" for name in changed]
    return tensors, (*_notes(weights), f"position tables interpolated to the model's input: {listed(shapes)}")


def _notes(weights: Weights) -> tuple[str, ...]:
    notes = weights.notes
    if weights.made and weights.layout == "pytorchvideo":
        norms = sorted({name.rpartition(".")[0] for name in weights.made})
        notes += (f"norms that the file lacks were made so that they change nothing: {', '.join(norms)}",)
    return notes
