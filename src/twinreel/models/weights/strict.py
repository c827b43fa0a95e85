"""Tensors into a model: everything is checked before anything is copied, and reported afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models.weights.files import listed
from twinreel.models.weights.unused import Unused

__all__ = ["LoadReport", "Scope", "check_share", "copy_strictly", "heads_of", "kind_of", "share_of"]

Scope: TypeAlias = Literal["all", "backbone"]

_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a file gave to a model.

    `loaded` are the model's keys that were set, `dropped` the file's keys that were left out on purpose, `kept` the
    model's keys that stay at their start values. `parameter_share` is the loaded fraction of the parameters asked for:
    of the video tower (of the whole model where it has none), or of the tower that `load_partial` names. `notes` say
    what was done to the numbers on the way, `unused` what the file holds that nothing reads.
    """

    source: str
    loaded: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    parameter_share: float
    notes: tuple[str, ...] = ()
    unused: tuple[Unused, ...] = ()

    def __str__(self) -> str:
        text = f"{self.source}: {len(self.loaded)} tensors loaded, {100 * self.parameter_share:.1f} % of the parameters"
        if self.dropped:
            text += f"; left out of the file: {listed(self.dropped)}"
        if self.kept:
            text += f"; at their start values: {listed(self.kept)}"
        return "; ".join([text, *self.notes, *(f"read by nothing: {kind}" for kind in self.unused)])


def heads_of(model: nn.Module, scope: Scope) -> tuple[str, ...]:
    """The beginnings of the keys that a scope leaves out: none, or the model's `head_prefixes`.

    Raises:
        ConfigError: another scope, or a model without `head_prefixes`.
    """
    if scope == "all":
        return ()
    if scope != "backbone":
        raise ConfigError(f"weights_scope must be all or backbone; got {scope!r}")
    prefixes: Iterable[str] = getattr(model, "head_prefixes", ())
    if not prefixes:
        raise ConfigError(
            f"weights_scope=backbone: {type(model).__name__} does not say which keys are its head; give it an "
            "attribute head_prefixes, for example ('video_tower.fc.', 'text_tower.')"
        )
    return tuple(prefixes)


def copy_strictly(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    heads: tuple[str, ...],
    prefix: str,
    counted: Iterable[str],
    notes: tuple[str, ...] = (),
) -> LoadReport:
    """Set the keys of a model that begin with `prefix`, less its heads, from exactly these tensors.

    Args:
        model: any module.
        tensors: by the model's keys; those of its heads are left out.
        source: for messages.
        heads: beginnings of keys that are left out on both sides.
        prefix: of the part that is set.
        counted: the parameters that the share is counted over.
        notes: for the report.

    Raises:
        CheckpointError: keys are missing, unexpected or mis-shaped, or less than half of the parameters would be set.
    """
    targets = {name: target for name, target in model.state_dict().items() if name.startswith(prefix)}
    wanted = {name: target for name, target in targets.items() if not name.startswith(heads)}
    given = {name: tensor for name, tensor in tensors.items() if not name.startswith(heads)}
    loaded = [name for name in wanted if name in given]
    missing = [name for name in wanted if name not in given and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in given if name not in wanted]
    misshaped = [name for name in loaded if not _fits(given[name], wanted[name])]
    if missing or unexpected or misshaped:
        shapes = [f"{name}: file {kind_of(given[name])}, model {kind_of(wanted[name])}" for name in misshaped]
        problems = [
            f"{len(names)} {kind} ({listed(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", shapes))
            if names
        ]
        text = f"{source}: does not fit {type(model).__name__}, nothing was loaded: " + ", ".join(problems)
        raise CheckpointError(text + _advice(model, [*missing, *unexpected, *misshaped], heads))
    report = LoadReport(
        source=source,
        loaded=tuple(loaded),
        dropped=tuple(name for name in tensors if name not in given),
        kept=tuple(name for name in targets if name not in loaded),
        parameter_share=share_of(model, loaded, counted),
        notes=notes,
    )
    check_share(report)
    with torch.no_grad():
        for name in loaded:
            wanted[name].copy_(given[name])
    return report


def share_of(model: nn.Module, loaded: Iterable[str], counted: Iterable[str]) -> float:
    """The loaded fraction of the counted parameters, by their sizes."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    names = set(counted)
    asked = sum(sizes[name] for name in names)
    return sum(sizes[name] for name in names & set(loaded)) / asked if asked else 1.0


def check_share(report: LoadReport) -> None:
    """Refuse what is less than half.

    Raises:
        CheckpointError: the report's share is below a half.
    """
    if report.parameter_share < _LEAST_SHARE:
        raise CheckpointError(f"{report}. That is less than half, so nothing was changed: these are another model's")


def kind_of(tensor: Tensor) -> str:
    """Shape and dtype of a tensor, for messages."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _fits(given: Tensor, wanted: Tensor) -> bool:
    return given.shape == wanted.shape and given.is_floating_point() == wanted.is_floating_point()


def _advice(model: nn.Module, problems: list[str], heads: tuple[str, ...]) -> str:
    prefixes = tuple(getattr(model, "head_prefixes", ()))
    if not heads and prefixes and all(name.startswith(prefixes) for name in problems):
        return ". Only the heads differ: weights_scope=backbone loads the rest and starts new heads"
    return ". Create the model with the options that the weights were trained with"
