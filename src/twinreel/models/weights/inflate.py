"""A network of pictures into one of videos: kernels are copied along time and divided by its length.

So a video that stands still answers as its picture did, away from the first and last frames, where zero padding tells
the ends from the middle (arXiv:1705.07750, section 2.2). Known are ResNets with torchvision's key names, into C2D,
I3D, Slow and the slow pathway of SlowFast, also with PySlowFast's names, and torchvision's GoogLeNet into S3D-G.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models.weights.files import listed
from twinreel.models.weights.layouts import Source, Weights, read_weights
from twinreel.models.weights.strict import LoadReport, Scope, check_share, heads_of, kind_of, share_of

__all__ = ["PICTURES", "googlenet_key", "inflate_2d", "resnet_key"]

PICTURES = ("resnet_2d", "slowfast_2d", "googlenet_2d")

_EPSILON = {"resnet_2d": 1e-5, "slowfast_2d": 1e-5, "googlenet_2d": 1e-3}  # of their batch norms
_WEIGHTS = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_RESNET = [
    (r"conv1\.weight", r"s1.pathway0_stem.conv.weight"),
    (rf"bn1\.{_WEIGHTS}", r"s1.pathway0_stem.bn.\1"),
    (r"fc\.(weight|bias)", r"head.projection.\1"),
]
_BLOCK = [
    (r"conv([123])\.weight", "branch2.{letter}.weight"),
    (rf"bn([123])\.{_WEIGHTS}", "branch2.{letter}_bn.{last}"),
    (r"downsample\.0\.weight", "branch1.weight"),
    (rf"downsample\.1\.{_WEIGHTS}", "branch1_bn.{last}"),
]
_HEADS = ("fc.", "aux1.", "aux2.", "head.projection.")
_MIXED = {"1": "conv_b0", "2.0": "conv_b1_a", "2.1": "conv_b1_b", "3.0": "conv_b2_a", "3.1": "conv_b2_b"}
_MIXED["4.1"] = "conv_b3_b"
_FIRST = {"conv1": "conv1", "conv2": "conv_2b", "conv3": "conv_2c"}


def inflate_2d(model: nn.Module, source: Source | Weights, *, scope: Scope = "all") -> LoadReport:
    """Set a video network's weights from a picture network's. Everything is checked before anything is copied.

    Left at their start values, and listed: what has no counterpart in a picture network (the fast pathway of SlowFast
    and what comes from it, non-local blocks, the gates of S3D-G), and new heads. The convolutions over time of S3D-G
    are made so that they change nothing. Running variances are shifted where the networks' epsilons differ.

    Args:
        model: C2D, I3D, Slow, SlowFast or S3D-G, alone or as a tower.
        source: a file or a state dict of torchvision's ResNet or GoogLeNet.
        scope: `all` also takes the head (fc), which must fit; `backbone` leaves heads out.

    Raises:
        CheckpointError: no such picture network, or it does not fit the model: all in one message.
        ConfigError: another scope, or a model without `head_prefixes`.
    """
    weights = source if isinstance(source, Weights) else read_weights(source)
    if weights.layout not in PICTURES:
        raise CheckpointError(
            f"{weights.source}: no picture network: expected torchvision's keys of a ResNet (layer1.0.conv1.weight) or "
            "GoogLeNet (inception3a.branch1.conv.weight), or PySlowFast's with flat kernels; got "
            f"{listed(list(weights.tensors))}"
        )
    heads = heads_of(model, scope)
    targets = model.state_dict()
    prefix = "video_tower." if any(name.startswith("video_tower.") for name in targets) else ""
    keys = {name: _KEYS[weights.layout](name) for name in weights.tensors}
    mapped = {prefix + key: name for name, key in keys.items() if key and not (prefix + key).startswith(heads)}
    plan = _plan(model, mapped, weights, targets)
    made = _identities(plan, targets)
    dropped = [name for name, key in keys.items() if not key or prefix + key not in plan]
    kept = [name for name in targets if name not in plan and name not in made]
    _check(model, weights, mapped, dropped, kept, heads)
    names = [name for name, _ in model.named_parameters()]
    counted = [name for name in names if name.startswith(prefix)]
    loaded = tuple(name for name in targets if name in plan or name in made)
    report = LoadReport(
        source=weights.source,
        loaded=loaded,
        dropped=tuple(dropped),
        kept=tuple(kept),
        parameter_share=share_of(model, loaded, counted),
        notes=_notes(weights, model, bool(made), two_pathways=_two_pathways(targets)),
    )
    check_share(report)
    with torch.no_grad():
        for name, tensor in {**plan, **made}.items():
            targets[name].copy_(tensor)
    return report


def resnet_key(name: str) -> str | None:
    """PySlowFast's key of a key of torchvision's bottleneck ResNets, or None."""
    for pattern, key in _RESNET:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(key)
    block = re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", name)
    for pattern, key in _BLOCK if block else ():
        match = re.fullmatch(pattern, block[3]) if block else None
        if block and match:
            letter = "abc"[int(match[1]) - 1] if match.lastindex and match[1] in "123" else ""
            last = match[match.lastindex] if match.lastindex else ""
            return f"s{int(block[1]) + 1}.pathway0_res{block[2]}.{key.format(letter=letter, last=last)}"
    return None


def googlenet_key(name: str) -> str | None:
    """S3D-G's key of a key of torchvision's GoogLeNet, or None; a separable unit takes it into its part over space."""
    match = re.fullmatch(rf"(?:inception(\d[a-e])\.branch([\d.]+)|(conv[123]))\.(conv|bn)\.{_WEIGHTS}", name)
    if match is None or (match[2] and match[2] not in _MIXED):
        return None
    unit = f"mixed_{_block_name(match[1])}.{_MIXED[match[2]]}" if match[1] else _FIRST[match[3]]
    return f"{unit}.{match[4]}1.{match[5]}"


def _block_name(name: str) -> str:
    return name[0] + chr(ord(name[1]) + 1)  # S3D-G counts the pool before a stage as its a: 3a is its 3b


def _own_key(name: str) -> str:
    return name


_KEYS: dict[str, Callable[[str], str | None]] = {
    "resnet_2d": resnet_key,
    "slowfast_2d": _own_key,
    "googlenet_2d": googlenet_key,
}


def _plan(
    model: nn.Module, mapped: Mapping[str, str], weights: Weights, targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The model's keys that get a tensor, inflated where it is a kernel.

    A norm whose convolution does not fit is left out with it: its statistics are those of other numbers.
    """
    plan = {}
    for key, name in mapped.items():
        if key in targets:
            tensor = _inflated(weights.tensors[name], targets[key])
            if tensor is not None:
                plan[key] = tensor
    for key in [key for key in plan if re.search(r"(_bn|\.bn\d?)\.\w+$", key)]:
        conv = _convolution_of(key)
        if conv in targets and conv not in plan:
            del plan[key]
    shift = _EPSILON[weights.layout] - _epsilon(model)
    if shift:
        for key in [key for key in plan if key.endswith(".running_var")]:
            plan[key] = plan[key] + shift
    return plan


def _convolution_of(norm_key: str) -> str:
    layer = norm_key.rpartition(".")[0]
    return (
        layer.removesuffix("_bn") if layer.endswith("_bn") else re.sub(r"\.bn(\d?)$", r".conv\1", layer)
    ) + ".weight"


def _inflated(tensor: Tensor, target: Tensor) -> Tensor | None:
    if tensor.shape == target.shape:
        return tensor
    if tensor.ndim == 4 and target.ndim == 5 and tensor.shape == target.shape[:2] + target.shape[3:]:
        return tensor[:, :, None].expand(target.shape) / target.shape[2]
    return None


def _identities(plan: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convolutions over time of separable units, with their norms, so that they change nothing."""
    made: dict[str, Tensor] = {}
    for key in plan:
        unit = key.removesuffix("conv1.weight")
        if unit == key or f"{unit}conv2.weight" not in targets:
            continue
        kernel = torch.zeros_like(targets[f"{unit}conv2.weight"])
        nn.init.dirac_(kernel)
        ones = torch.ones(kernel.shape[0])
        made[f"{unit}conv2.weight"] = kernel
        made[f"{unit}bn2.weight"], made[f"{unit}bn2.bias"] = ones, ones - 1
        made[f"{unit}bn2.running_mean"], made[f"{unit}bn2.running_var"] = ones - 1, ones - 1e-5
    return made


def _check(
    model: nn.Module,
    weights: Weights,
    mapped: Mapping[str, str],
    dropped: list[str],
    kept: list[str],
    heads: tuple[str, ...],
) -> None:
    """Refuse what is left over on either side without a reason.

    Raises:
        CheckpointError: with all of it.
    """
    targets = model.state_dict()
    two_pathways = _two_pathways(targets)
    free = ("pathway1", "_fuse.", "nonlocal", ".gating", "num_batches_tracked")
    missing = [key for key in kept if not key.startswith(heads or ("\0",)) and not any(part in key for part in free)]
    keys = {name: key for key, name in mapped.items()}
    shapes = [
        f"{name}: file {kind_of(weights.tensors[name])}, model {kind_of(targets[key])}"
        for name, key in keys.items()
        if name in dropped and key in targets and _inflated(weights.tensors[name], targets[key]) is None
    ]
    if two_pathways:  # the first convolutions of a stage also read what comes from the fast pathway
        missing = [key for key in missing if not re.search(r"_res0\.(branch1|branch2\.a)", key)]
        first = r"layer\d\.0\.(conv1|downsample)|s\d\.pathway0_res0\.(branch1|branch2\.a)\."
        shapes = [text for text in shapes if not re.match(first, text)]
    extra = [name for name in dropped if name in keys and keys[name] not in targets]
    extra += [name for name in dropped if name not in keys and not name.startswith(_HEADS)]
    if not (missing or shapes or extra):
        return
    text = f"{weights.source}: a {weights.layout} does not fit {type(model).__name__}, nothing was loaded"
    for kind, names in (("missing", missing), ("unexpected", extra), ("mis-shaped", shapes)):
        text += f"; {len(names)} {kind} ({listed(names)})" if names else ""
    prefixes = tuple(getattr(model, "head_prefixes", ()))
    head = not heads and prefixes and all(key.startswith(prefixes) for key in missing) and not extra
    if head and len(shapes) <= 2 and all(shape.startswith(_HEADS) for shape in shapes):
        text += ". Only the heads differ: weights_scope=backbone loads the rest and starts new heads"
    raise CheckpointError(text)


def _two_pathways(targets: Mapping[str, Tensor]) -> bool:
    return any("pathway1" in name for name in targets)


def _epsilon(model: nn.Module) -> float:
    found = {module.eps for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    if len(found) != 1:
        raise ConfigError(f"{type(model).__name__}: batch norms with epsilons {sorted(found)}; inflating wants one")
    return found.pop()


def _notes(weights: Weights, model: nn.Module, made: bool, *, two_pathways: bool) -> tuple[str, ...]:
    notes = ["kernels were copied along time and divided by its length"]
    if two_pathways:
        notes.append("the slow pathway alone, without the convolutions that also read the fast one and their norms")
    if made:
        notes.append("convolutions over time and their norms were made so that they change nothing at first")
    there, here = _EPSILON[weights.layout], _epsilon(model)
    if there != here:
        notes.append(f"running variances were raised by {there - here:g}, as its norms add {there:g} and ours {here:g}")
    return tuple(notes)
