"""Weight files, strictly loaded: all of a model, all but its heads, or one tower; never half.

Recognized are twinreel's own keys (`.safetensors`, or a dict saved by torch), and of the founding MIL-NCE code the
released flat `s3d_howto100m.pth`, training checkpoints `{"state_dict": {"module....": ...}}`, and dicts with
`model_state`. Its `text_module.X` becomes `text_tower.X`, everything else `video_tower.X`. Files are read with
safetensors or `weights_only=True`; one that needs arbitrary unpickling is refused.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twinreel.config import nearest
from twinreel.errors import CheckpointError, ConfigError

__all__ = ["LoadReport", "Scope", "Weights", "load_partial", "load_weights", "read_tensor", "read_weights", "sizes_of"]

Scope: TypeAlias = Literal["all", "backbone"]
Source: TypeAlias = str | Path | Mapping[str, Any]

_LEAST_SHARE = 0.5
_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Tensors under twinreel's keys. `layout` is `howto100m` where they were renamed, else `twinreel`."""

    source: str
    layout: Literal["howto100m", "twinreel"]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a file gave to a model.

    `loaded` are the model's keys that were set, `dropped` the file's keys that were left out on purpose, `kept` the
    model's keys that stay at their start values. `parameter_share` is the loaded fraction of the parameters asked for:
    of the video tower (of the whole model where it has none), or of the tower that `load_partial` names.
    """

    source: str
    loaded: tuple[str, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    parameter_share: float

    def __str__(self) -> str:
        text = f"{self.source}: {len(self.loaded)} tensors loaded, {100 * self.parameter_share:.1f} % of the parameters"
        if self.dropped:
            text += f"; left out of the file: {_listed(self.dropped)}"
        if self.kept:
            text += f"; at their start values: {_listed(self.kept)}"
        return text


def load_weights(model: nn.Module, source: Source | Weights, *, scope: Scope = "all") -> LoadReport:
    """Set a model's weights from a file or a state dict. Everything is checked before anything is copied.

    Args:
        model: any module; for `backbone` it needs an attribute `head_prefixes`.
        source: a file, a state dict, or what `read_weights` returned.
        scope: `all`: the keys must be exactly the model's. `backbone`: keys of the model's `head_prefixes` are left
            out on both sides (a pair of towers: `fc` of the video tower and all of the text tower), the rest is as
            strict. Counters `num_batches_tracked`, which old files lack and nothing reads, may be missing.

    Raises:
        CheckpointError: the file cannot be read, or keys are missing, unexpected or mis-shaped: all in one message.
            Or `backbone` would load less than half of the parameters.
        ConfigError: another scope, or a model without `head_prefixes`.
    """
    weights = source if isinstance(source, Weights) else read_weights(source)
    heads: tuple[str, ...] = ()
    if scope == "backbone":
        heads = _heads(model)
        if not heads:
            raise ConfigError(
                f"weights_scope=backbone: {type(model).__name__} does not say which keys are its head; give it an "
                "attribute head_prefixes, for example ('video_tower.fc.', 'text_tower.')"
            )
    elif scope != "all":
        raise ConfigError(f"weights_scope must be all or backbone; got {scope!r}")
    names = [name for name, _ in model.named_parameters()]
    counted = [name for name in names if name.startswith("video_tower.")] or names
    return _copy(model, weights.tensors, weights.source, heads=heads, prefix="", counted=counted)


def load_partial(model: nn.Module, prefix: str, source: Source, *, scope: Scope = "all") -> LoadReport:
    """Set the weights of one part of a model, such as a tower, from a file of the whole or of that part alone.

    Args:
        model: the whole model.
        prefix: dotted name of the part, `video_tower`.
        source: a file or a state dict; keys of other parts are left out and reported.
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
    start = f"{prefix}."
    inside = {name: tensor for name, tensor in weights.tensors.items() if name.startswith(start)}
    others = tuple(name for name in weights.tensors if name not in inside)
    if not inside:  # a file of that part alone, with its own keys
        inside, others = {start + name: tensor for name, tensor in weights.tensors.items()}, ()
    heads = _heads(model) if scope == "backbone" else ()
    counted = [name for name, _ in model.named_parameters() if name.startswith(start)]
    report = _copy(model, inside, weights.source, heads=heads, prefix=start, counted=counted)
    return replace(report, dropped=report.dropped + others)


def read_weights(source: Source) -> Weights:
    """The tensors of a file or a state dict under twinreel's keys, on the CPU, with nothing checked against a model.

    Raises:
        CheckpointError: the file is missing, damaged, holds objects that need unpickling, or is no state dict.
    """
    if isinstance(source, Mapping):
        where, content = "the given state dict", source
    else:
        where, content = str(source), _read_file(Path(source).expanduser())
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where}: holds a {type(content).__name__}, not a dict of weights")
    for wrapper in ("state_dict", "model_state"):
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        got = f"these are no tensors: {_listed(others)}" if others else "it is empty"
        raise CheckpointError(
            f"{where}: expected tensors by name, or such a dict under state_dict or model_state; {got}"
        )
    tensors = {str(name): tensor for name, tensor in content.items()}
    if any(name.startswith(("video_tower.", "text_tower.")) for name in tensors):
        return Weights(source=where, layout="twinreel", tensors=tensors)
    if all(name.startswith("module.") for name in tensors):  # saved from (Distributed)DataParallel
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    if "conv1.conv1.weight" in tensors or any(name.startswith("text_module.") for name in tensors):
        return Weights(source=where, layout="howto100m", tensors={_renamed(key): t for key, t in tensors.items()})
    return Weights(source=where, layout="twinreel", tensors=tensors)


def read_tensor(path: str | Path) -> Tensor:
    """A 2-D float tensor from a file that torch saved, such as a table of word vectors (rows, size).

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    content = _read_file(Path(path))
    if not isinstance(content, Tensor) or content.ndim != 2 or not content.is_floating_point():
        got = f"{content.dtype} {tuple(content.shape)}" if isinstance(content, Tensor) else type(content).__name__
        raise CheckpointError(f"{path}: expected one float tensor (words, size), saved by torch.save; got {got}")
    return content


def sizes_of(tensors: Mapping[str, Tensor], *, scope: Scope = "all") -> dict[str, int | bool | str]:
    """Options of the two-tower builders that the shapes of the weights state; `backbone`: of the backbone alone."""
    sizes: dict[str, int | bool | str] = {}
    first = tensors.get("video_tower.conv1.conv1.weight")
    if first is not None:
        sizes["space_to_depth"] = first.shape[1] == 24
    if scope == "backbone":
        return sizes
    for key, options in (
        ("video_tower.fc.weight", ("embedding_size", None)),
        ("text_tower.word_embd.weight", ("num_words", "word_embedding_size")),
        ("text_tower.fc1.weight", ("text_hidden_size", None)),
    ):
        if key in tensors:
            sizes.update((name, size) for name, size in zip(options, tensors[key].shape, strict=False) if name)
    if "text_tower.fc1.weight" in tensors:
        sizes["text_tower"] = "word_max"
    elif "text_tower.fc.weight" in tensors:
        sizes["text_tower"] = "word_mean"
    return sizes


def _heads(model: nn.Module) -> tuple[str, ...]:
    prefixes: Iterable[str] = getattr(model, "head_prefixes", ())
    return tuple(prefixes)


def _renamed(key: str) -> str:
    if key.startswith("text_module."):
        return "text_tower." + key.removeprefix("text_module.")
    return "video_tower." + key


def _copy(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    heads: tuple[str, ...],
    prefix: str,
    counted: Iterable[str],
) -> LoadReport:
    targets = {name: target for name, target in model.state_dict().items() if name.startswith(prefix)}
    wanted = {name: target for name, target in targets.items() if not name.startswith(heads)}
    given = {name: tensor for name, tensor in tensors.items() if not name.startswith(heads)}
    loaded = [name for name in wanted if name in given]
    missing = [name for name in wanted if name not in given and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in given if name not in wanted]
    misshaped = [name for name in loaded if not _fits(given[name], wanted[name])]
    if missing or unexpected or misshaped:
        shapes = [f"{name}: file {_kind(given[name])}, model {_kind(wanted[name])}" for name in misshaped]
        problems = [
            f"{len(names)} {kind} ({_listed(names)})"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", shapes))
            if names
        ]
        text = f"{source}: does not fit {type(model).__name__}, nothing was loaded: " + ", ".join(problems)
        raise CheckpointError(text + _advice(model, [*missing, *unexpected, *misshaped], heads))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    asked = sum(sizes[name] for name in counted)
    share = sum(sizes[name] for name in set(counted) & set(loaded)) / asked if asked else 1.0
    report = LoadReport(
        source=source,
        loaded=tuple(loaded),
        dropped=tuple(name for name in tensors if name not in given),
        kept=tuple(name for name in targets if name not in loaded),
        parameter_share=share,
    )
    if share < _LEAST_SHARE:
        raise CheckpointError(f"{report}. That is less than half, so nothing was changed: these are another model's")
    with torch.no_grad():
        for name in loaded:
            wanted[name].copy_(given[name])
    return report


def _fits(given: Tensor, wanted: Tensor) -> bool:
    return given.shape == wanted.shape and given.is_floating_point() == wanted.is_floating_point()


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _advice(model: nn.Module, problems: list[str], heads: tuple[str, ...]) -> str:
    if not heads and _heads(model) and all(name.startswith(_heads(model)) for name in problems):
        return '. Only the heads differ: weights_scope="backbone" loads the rest and starts new heads'
    return ". Create the model with the options that the weights were trained with"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", ... {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _read_file(path: Path) -> Any:
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder; name a file of weights in it, or use twinreel.load_model for a run")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        names = _refused(path, str(error))
        if names:
            raise CheckpointError(_how_to_convert(path, names)) from error
        raise CheckpointError(_unreadable(path)) from error
    except Exception as error:  # a damaged file can make an unpickler raise anything, struct.error among them
        raise CheckpointError(f"{_unreadable(path)}: {type(error).__name__} {error}") from error


def _refused(path: Path, message: str) -> list[str]:
    """The classes and functions that unpickling this file would import and that torch does not allow."""
    found = re.findall(r"GLOBAL ([\w.]+) was not an allowed", message)
    try:
        found += torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (ValueError, OSError, RuntimeError):  # files from before torch 1.6 name only the first one
        pass
    return sorted(set(found))


def _how_to_convert(path: Path, names: list[str]) -> str:
    modules = ", ".join(sorted({"torch", *(name.rpartition(".")[0] for name in names)}))
    code = (
        f"import {modules}; torch.serialization.add_safe_globals([{', '.join(names)}]); "
        f"c = torch.load('{path}', map_location='cpu', weights_only=True); "
        f"torch.save(c.get('state_dict', c.get('model_state', c)), '{path.with_suffix('')}_weights.pth')"
    )
    return (
        f"{path}: holds Python objects beside tensors ({', '.join(names)}), refused because unpickling can run code. "
        f'Convert it once, where these can be imported; this allows them and nothing else: python -c "{code}"'
    )


def _unreadable(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(24)
    if not head:
        return f"{path}: an empty file"
    if head.startswith(b"version https://git-lfs"):
        return f"{path}: a git-lfs pointer, not the weights; run git lfs pull"
    return f"{path}: not a readable file of weights (it begins with {head!r}); it may be damaged or cut off"
