"""Which parameters train, at which learning rate, with which weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from twinreel.config import nearest
from twinreel.errors import ConfigError

__all__ = ["freeze", "layers_by_depth", "parameter_groups"]

# _NormBase: every batch norm and instance norm, SyncBatchNorm included.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def freeze(model: nn.Module, modules: Iterable[str]) -> list[nn.Module]:
    """Stop the named parts from training; returns the modules whose batch-norm statistics must stay too.

    Raises:
        ConfigError: a name that is no part of the model.
    """
    names = list(modules)
    _check_names(model, names, "model.freeze")
    for name, parameter in model.named_parameters():
        if any(_matches(name, module) for module in names):
            parameter.requires_grad_(False)
    children = dict(model.named_modules())
    return [children[name] for name in names if name in children]


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    learning_rates: Mapping[str, float],
    weight_decay: float,
    norm_weight_decay: float = 0.0,
    decay_one_dimensional: bool = False,
    layer_decay: float = 1.0,
    extra: Sequence[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Groups by learning rate and weight decay. `base_learning_rate` stays in each: the schedule multiplies it.

    Weight decay: what the model or a part of it names in an attribute `no_decay` has none (position tables, class
    tokens: names of parameters or of parts, as seen from where the attribute is). Scale and shift of a norm have
    `norm_weight_decay`: a norm is known by its type (batch, instance, layer, group, RMS), not by its name. Whatever
    else has no more than one dimension (biases) has none, or with `decay_one_dimensional` the weight decay, as has
    all the rest.

    Args:
        model: what trains; parameters that do not require a gradient are left out.
        learning_rate: the base.
        learning_rates: by module name, instead of the base; the longest matching name decides.
        weight_decay: of what is multiplied.
        norm_weight_decay: of norms.
        decay_one_dimensional: true as in PySlowFast's recipes of convolutional networks.
        layer_decay: each layer's learning rate is this times that of the layer after it; the last keeps its own. The
            layers are those of `layers_by_depth`.
        extra: parameters beside the model (a learned temperature), at the base rate, without decay.

    Raises:
        ConfigError: a module name that does not exist, a parameter in no layer, or nothing left to train.
    """
    _check_names(model, learning_rates, "optim.learning_rates")
    scales = _layer_scales(model, layer_decay)
    norms = {id(own) for part in model.modules() if isinstance(part, _NORMS) for own in part.parameters(recurse=False)}
    spared = set(_spared_names(model))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = max((module for module in learning_rates if _matches(name, module)), key=len, default=None)
        rate = (learning_rate if own is None else learning_rates[own]) * scales.get(name, 1.0)
        if any(_matches(name, part) for part in spared):
            decay = 0.0
        elif id(parameter) in norms:
            decay = norm_weight_decay
        else:
            decay = weight_decay if parameter.ndim > 1 or decay_one_dimensional else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    if not groups:
        raise ConfigError("model.freeze leaves nothing to train; free a part of the model")
    if extra:
        groups.setdefault((learning_rate, 0.0), []).extend(extra)
    return [
        {"params": parameters, "lr": rate, "base_learning_rate": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]


def layers_by_depth(model: nn.Module) -> list[list[str]]:
    """The names of a model's layers from the input to the output, each a list of parts or parameters.

    They are what the model's own method `layer_groups()` returns, if it has one. Otherwise each child of the model
    that has parameters is a layer, in the order in which the model made them; of an `nn.ModuleList` each member is
    one. Parameters of the model itself (a class token, a position table) belong to the first layer.

    Raises:
        ConfigError: a name of `layer_groups()` is no part of the model, or a parameter is in none of its layers.
    """
    stated = getattr(model, "layer_groups", None)
    if stated is not None:
        layers = [list(layer) for layer in stated()]
        _check_names(model, [name for layer in layers for name in layer], "optim.layer_decay: layer_groups()")
        _check_complete(model, layers)
        return layers
    layers = [[name] for name in _child_layers(model)]
    direct = [name for name, _ in model.named_parameters(recurse=False)]
    return [direct + layers[0], *layers[1:]] if layers else [direct]


def _child_layers(model: nn.Module) -> Iterator[str]:
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{inner}" for inner in _child_layers(child))
        elif next(child.parameters(), None) is not None:
            yield name


def _check_complete(model: nn.Module, layers: Sequence[Sequence[str]]) -> None:
    parts = [part for layer in layers for part in layer]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(_matches(name, part) for part in parts):
            raise ConfigError(
                f"optim.layer_decay: {name} is in none of the layers that {type(model).__name__}.layer_groups() names; "
                "add it to one, or set optim.layer_decay=1"
            )


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by, by name; the longest name of a layer decides."""
    if layer_decay == 1.0:
        return {}
    layers = layers_by_depth(model)
    if len(layers) < 2:
        raise ConfigError(
            f"optim.layer_decay={layer_decay:g}: {type(model).__name__} has one layer; give it a method layer_groups() "
            "that names its layers from the input to the output, or set optim.layer_decay=1"
        )
    depth_of = {part: depth for depth, layer in enumerate(layers) for part in layer}
    scales = {}
    for name, _ in model.named_parameters():
        part = max((part for part in depth_of if _matches(name, part)), key=len, default=None)
        if part is not None:
            scales[name] = layer_decay ** (len(layers) - 1 - depth_of[part])
    return scales


def _spared_names(model: nn.Module) -> Iterator[str]:
    """Full names of everything that a `no_decay` attribute spares from weight decay."""
    for prefix, part in model.named_modules():
        names = getattr(part, "no_decay", ())
        if isinstance(names, str):
            raise ConfigError(f"{type(part).__name__}.no_decay is the string {names!r}; make it a tuple of names")
        _check_names(part, names, f"{type(part).__name__}.no_decay")
        yield from (f"{prefix}.{name}" if prefix else name for name in names)


def _matches(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _check_names(model: nn.Module, modules: Iterable[str], key: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    known = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    for module in modules:
        if module not in known:
            top = sorted({name.split(".")[0] for name in names})
            raise ConfigError(
                f"{key}: the model has no part {module!r}{nearest(module, known if module in known else top)}"
            )
