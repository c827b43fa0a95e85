"""A founding system's file of weights into one of twinreel's: which model it is for, and how that model reads videos.

What fits is found by keys and shapes. Several models can have the same ones (X3D-S and X3D-M, Slow 8x8 and 4x16): then
the configuration inside the file decides, then the file's name if it is that of a model, then the user.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from twinreel.config import nearest
from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import CLASSIFIERS, MATCHERS, MODELS, TOWERS
from twinreel.models.founding_config import FoundingConfig, read_config
from twinreel.models.import_report import LAYOUT_WORDS, Found, Imported
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.weights import Weights, assumed_heads, read_weights, save_weights, sizes_of
from twinreel.models.weights.inflate import PICTURES
from twinreel.models.weights.placing import PARTS, with_copies
from twinreel.models.weights.strict import copy_strictly, heads_of

__all__ = ["Found", "Imported", "import_weights", "inspect_weights"]

_WITHOUT_POOL = ("c2d_nopool_8x8_r50",)
_WITH_POOL = ("c2d_8x8_r50",)
# Whose rows are the outputs of a model: classes, or the answers of a cross-modal one.
_CLASSES = ("head.projection.weight", "fc.weight", "transformer.classifier.2.weight")
_PRETRAINING = "transformer.cls."


def inspect_weights(path: str | Path) -> Found:
    """What a file of weights is, and which models it fits; nothing is written.

    Raises:
        CheckpointError: it cannot be read, or holds no network that is known.
    """
    weights = read_weights(path)
    config = read_config(weights.config, weights.source) if weights.config else None
    head = next((weights.tensors[key] for key in _CLASSES if key in weights.tensors), None)
    shaping = config if any(".rel_pos_" in key for key in weights.tensors) else None  # MViT's shapes follow the input
    part = weights.layout in PICTURES or weights.layout in PARTS
    misses = {} if part else {name: _miss(name, weights, shaping) for name in MODELS}
    fits = tuple(sorted(name for name, miss in misses.items() if miss is None))
    backbones = () if fits else tuple(sorted(name for name in misses if _fits_but_for_the_head(name, weights, shaping)))
    close = min((miss for miss in misses.values() if miss), default=None)
    model, reason = _decided(fits, weights, config)
    return Found(
        weights=weights,
        config=config,
        num_parameters=sum(t.numel() for name, t in weights.tensors.items() if not _is_statistic(name)),
        num_classes=None if head is None else len(head),
        fits=fits,
        backbones=backbones,
        nearest=close[1] if close and not fits else None,
        model=model,
        reason=reason,
    )


def import_weights(path: str | Path, *, model: str | None = None, out: str | Path | None = None) -> Imported:
    """Write a founding file as a safetensors file with twinreel's keys and the model's name, options, preprocessing.

    Args:
        path: the file.
        model: a name of `MODELS`; None = found.
        out: what to write; None = beside the file, with the ending `.safetensors`.

    Raises:
        CheckpointError: it cannot be read or fits no model in whole, or `out` exists.
        ConfigError: another model's name, or several models fit and nothing decides.
    """
    if model is not None and model not in MODELS:
        raise ConfigError(f"--model: unknown model {model!r}{nearest(model, MODELS)}")
    target = Path(out).expanduser() if out else Path(path).expanduser().with_suffix(".safetensors")
    if target.suffix != ".safetensors":
        raise ConfigError(f"--out {target}: must end in .safetensors")
    if not target.parent.is_dir():
        raise ConfigError(f"--out {target}: there is no folder {target.parent}; make it first")
    if target.exists():
        raise CheckpointError(f"{target}: exists already; name another file with --out, or remove it")
    found = inspect_weights(path)
    name = model or found.model
    if name is None or name not in found.fits:
        raise _refusal(found, model)
    build = next(b for b in _builders(name) if _fits(_network(b, found.weights, found.config), found.weights))
    options = _options(build, found.weights, found.config)
    options.pop("pretraining_heads", None)  # the file keeps them; a model that starts from it has them if it asks
    network = _network(build, found.weights, found.config)
    preprocessing: Any = network.preprocessing
    description = {
        "model": name,
        "options": options,
        "preprocessing": preprocessing.to_dict(),
        "layout": found.weights.layout,
        "epoch": found.weights.epoch,
        "file": Path(path).name,
    }
    save_weights(found.weights.tensors, target, description)
    return Imported(found=found, out=target, model=name, options=options, preprocessing=preprocessing)


def _refusal(found: Found, model: str | None) -> CheckpointError | ConfigError:
    where = found.weights.source
    if found.weights.layout in PICTURES:
        return CheckpointError(
            f"{where}: {LAYOUT_WORDS[found.weights.layout]}: it is inflated where a model is made; name the file "
            "itself, model.weights=FILE model.weights_scope=backbone"
        )
    if found.weights.layout in PARTS:
        part = PARTS[found.weights.layout]
        return CheckpointError(
            f"{where}: {LAYOUT_WORDS[found.weights.layout]}: it is a part of a model, so it is not converted; name the "
            f"file itself, model.weights={{{part}: {where}}}"
        )
    if found.fits and model is None:
        return ConfigError(
            f"{where}: fits {' and '.join(found.fits)}, and neither a configuration in it nor its name says which; "
            f"choose one: --model {found.fits[0]}"
        )
    if found.backbones and (model is None or model in found.backbones):
        return CheckpointError(
            f"{where}: fits {', '.join(found.backbones)} but for the head, so it is not converted; to start a new head "
            f"on it, name the file itself: model.weights={where} model.weights_scope=backbone"
        )
    if model is not None:
        miss = _miss(model, found.weights, found.config)
        also = f". It fits {', '.join(found.fits)}" if found.fits else ""
        return CheckpointError(f"{where}: {miss[1] if miss else model}; nothing was written{also}")
    return CheckpointError(f"{where}: fits none of the models in whole, nothing was written. Nearest: {found.nearest}")


def _decided(fits: tuple[str, ...], weights: Weights, config: FoundingConfig | None) -> tuple[str | None, str]:
    """The model that a file is for, if that can be said, and why."""
    left, reasons = list(fits), ["keys and shapes"]
    pool = weights.pool_after_first_stage
    if config is not None and config.pool_after_first_stage is not None:
        pool = config.pool_after_first_stage
    if pool is not None:
        same = [name for name in left if name not in (_WITHOUT_POOL if pool else _WITH_POOL)]
        left, reasons = same, [*reasons, "the pool after the first stage"] if same != left else reasons
    if len(left) > 1 and config is not None:
        same = [name for name in left if config.reads_as(_published(name))]
        if same:
            left, reasons = same, [*reasons, "the configuration inside"]
    if len(left) > 1 and all(name in MATCHERS for name in left):
        wrong = {name: _unlike_its_own(name, weights) for name in left}  # their sizes are options: each fits any file
        left, reasons = [min(left, key=lambda name: wrong[name])], [*reasons, "the sizes that are its own or nearest"]
    if len(left) > 1:
        words = re.sub(r"[^a-z0-9]+", "_", Path(weights.source).stem.lower())
        named = [name for name in left if re.search(rf"(^|_){name}(_|$)", words)]
        if len(named) == 1:
            left, reasons = named, [*reasons, "the file's name"]
    if len(left) != 1:
        return None, f"several models fit: {', '.join(left)}" if left else "no model fits"
    return left[0], "by " + ", ".join(reasons if len(fits) > 1 else reasons[:1])


def _unlike_its_own(name: str, weights: Weights) -> int:
    """How many keys of a model, with its own sizes, have another shape in the weights or are not there."""
    own = _built(MODELS[name], "[{}, {}]").state_dict()
    return sum(key not in weights.tensors or weights.tensors[key].shape != tensor.shape for key, tensor in own.items())


def _published(name: str) -> Preprocessing:
    preprocessing: Any = _built(MODELS[name], "[{}, {}]").preprocessing
    assert isinstance(preprocessing, Preprocessing)
    return preprocessing


def _builders(name: str) -> list[Callable[..., nn.Module]]:
    return [table[name] for table in (CLASSIFIERS, MATCHERS, TOWERS) if name in table]


def _options(build: Callable[..., nn.Module], weights: Weights, config: FoundingConfig | None) -> dict[str, Any]:
    """The builder's options that the weights and their configuration state."""
    takes = inspect.signature(build).parameters
    stated: dict[str, Any] = {**(config.options if config else {}), **sizes_of(weights.tensors), **weights.architecture}
    stated |= assumed_heads(build, stated) if weights.layout == "clipbert" else {}
    if any(key.startswith(_PRETRAINING) for key in weights.tensors):
        stated["pretraining_heads"] = True
    if "non_local" in takes and takes["non_local"].default == "none":
        stated.pop("non_local", None)  # this model is the one without
    return {key: value for key, value in stated.items() if key in takes}


def _network(build: Callable[..., nn.Module], weights: Weights, config: FoundingConfig | None) -> nn.Module:
    """The model that the weights would be of, without numbers in it."""
    return _built(build, json.dumps([_options(build, weights, config), config.preprocessing if config else {}]))


class _NoDraws(TorchFunctionMode):
    """Leaves start values out, which take most of the time of making a model."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless it fills a tensor."""
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=64)
def _built(build: Callable[..., nn.Module], arguments: str) -> nn.Module:
    """A model on the meta device; `arguments`: its options and the values of its preprocessing that differ, JSON."""
    options, changes = json.loads(arguments)
    with torch.device("meta"), _NoDraws():
        model = build(**options)
        if changes:
            published: Any = model.preprocessing
            model = build(**options, preprocessing=published.replace(**changes))
    return model


def _miss(name: str, weights: Weights, config: FoundingConfig | None) -> tuple[float, str] | None:
    """By how much weights miss a model, and the words for it; None = they fit in whole."""
    found: list[tuple[float, str]] = []
    for build in _builders(name):
        network = _network(build, weights, config)
        try:
            tensors = with_copies(network, weights.tensors)
            copy_strictly(network, tensors, name, heads=(), prefix="", counted=())
            return None
        except CheckpointError as error:
            own = {key: tensor.shape for key, tensor in network.state_dict().items()}
            given = {key: tensor.shape for key, tensor in weights.tensors.items()}
            wrong = sum(own.get(key) != given.get(key) for key in own.keys() | given.keys())
            found.append((wrong / len(own), str(error).replace(", nothing was loaded", "").partition(". ")[0]))
    return min(found, default=(math.inf, name))


def _fits(network: nn.Module, weights: Weights) -> bool:
    try:
        copy_strictly(network, with_copies(network, weights.tensors), weights.source, heads=(), prefix="", counted=())
    except CheckpointError:
        return False
    return True


def _fits_but_for_the_head(name: str, weights: Weights, config: FoundingConfig | None) -> bool:
    for build in _builders(name):
        network = _network(build, weights, config)
        try:
            heads = heads_of(network, "backbone")
            names = [key for key, _ in network.named_parameters()]
            copy_strictly(network, weights.tensors, name, heads=heads, prefix="", counted=names)
        except (CheckpointError, ConfigError):
            continue
        return True
    return False


def _is_statistic(name: str) -> bool:
    return name.endswith((".running_mean", ".running_var", ".num_batches_tracked"))
