"""MODEL, RESNET, SLOWFAST, NONLOCAL, X3D and MVIT as the name and the options of one of twinreel's models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short
from twinreel.models import find_builder

__all__ = ["NETWORKS", "choose_network"]

_PLAIN = {
    "RESNET.TRANS_FUNC": "bottleneck_transform",
    "RESNET.NUM_GROUPS": 1,
    "RESNET.WIDTH_PER_GROUP": 64,
    "RESNET.STRIDE_1X1": False,
    "RESNET.ZERO_INIT_FINAL_CONV": False,
    "RESNET.SPATIAL_STRIDES": [1, 2, 2, 2],
    "RESNET.SPATIAL_DILATIONS": [1, 1, 1, 1],
}
_RESNET50 = _PLAIN | {"RESNET.DEPTH": 50, "RESNET.NUM_BLOCK_TEMP_KERNEL": [3, 4, 6, 3]}
_SLOWFAST = {"SLOWFAST.BETA_INV": 8, "SLOWFAST.FUSION_CONV_CHANNEL_RATIO": 2}
_SLOWFAST50 = _RESNET50 | _SLOWFAST
_SLOWFAST101 = (
    _PLAIN
    | _SLOWFAST
    | {
        "RESNET.DEPTH": 101,
        "SLOWFAST.ALPHA": 4,
        "SLOWFAST.FUSION_KERNEL_SZ": 5,
    }
)
_X3D = {
    "RESNET.TRANS_FUNC": "x3d_transform",
    "RESNET.NUM_GROUPS": 1,
    "RESNET.WIDTH_PER_GROUP": 64,
    "RESNET.STRIDE_1X1": False,
    "RESNET.ZERO_INIT_FINAL_CONV": False,
    "RESNET.DEPTH": 50,
    "X3D.WIDTH_FACTOR": 2.0,
    "X3D.DEPTH_FACTOR": 2.2,
    "X3D.BOTTLENECK_FACTOR": 2.25,
    "X3D.DIM_C5": 2048,
    "X3D.DIM_C1": 12,
    "X3D.SCALE_RES2": False,
    "X3D.BN_LIN5": False,
    "X3D.CHANNELWISE_3x3x3": True,
}
_MVITV2_S = {
    "MVIT.MODE": "conv",
    "MVIT.POOL_FIRST": False,
    "MVIT.CLS_EMBED_ON": True,
    "MVIT.PATCH_KERNEL": [3, 7, 7],
    "MVIT.PATCH_STRIDE": [2, 4, 4],
    "MVIT.PATCH_PADDING": [1, 3, 3],
    "MVIT.PATCH_2D": False,
    "MVIT.EMBED_DIM": 96,
    "MVIT.NUM_HEADS": 1,
    "MVIT.MLP_RATIO": 4.0,
    "MVIT.QKV_BIAS": True,
    "MVIT.LAYER_SCALE_INIT_VALUE": 0.0,
    "MVIT.DEPTH": 16,
    "MVIT.NORM": "layernorm",
    "MVIT.DIM_MUL": [[1, 2.0], [3, 2.0], [14, 2.0]],
    "MVIT.HEAD_MUL": [[1, 2.0], [3, 2.0], [14, 2.0]],
    "MVIT.POOL_KV_STRIDE": [],
    "MVIT.POOL_KV_STRIDE_ADAPTIVE": [1, 8, 8],
    "MVIT.POOL_Q_STRIDE": [[1, 1, 2, 2], [3, 1, 2, 2], [14, 1, 2, 2]],
    "MVIT.POOL_KVQ_KERNEL": [3, 3, 3],
    "MVIT.NORM_STEM": False,
    "MVIT.DROPOUT_RATE": 0.0,
    "MVIT.USE_ABS_POS": False,
    "MVIT.REL_POS_SPATIAL": True,
    "MVIT.REL_POS_TEMPORAL": True,
    "MVIT.REL_POS_ZERO_INIT": False,
    "MVIT.RESIDUAL_POOLING": True,
    "MVIT.DIM_MUL_IN_ATT": True,
    "MVIT.SEPARATE_QKV": False,
    "MVIT.HEAD_INIT_SCALE": 1.0,
    "MVIT.USE_MEAN_POOLING": False,
    "MVIT.USE_FIXED_SINCOS_POS": False,
}
_WITHOUT_ABSOLUTE = ("MVIT.SEP_POS_EMBED",)  # says how absolute positions are stored; there are none


@dataclass(frozen=True, slots=True)
class Network:
    """A model of twinreel: the ARCH values that mean it, what must go with them, and the clip it is made for."""

    name: str
    archs: tuple[str, ...]
    frames: tuple[int, int]
    needs: Mapping[str, Any] = field(default_factory=dict)
    nopool: bool = False
    non_local: str = "none"


_ALPHA8 = {"SLOWFAST.ALPHA": 8, "SLOWFAST.FUSION_KERNEL_SZ": 5}
_ALPHA4 = {"SLOWFAST.ALPHA": 4, "SLOWFAST.FUSION_KERNEL_SZ": 7}
NETWORKS = (
    Network("c2d_8x8_r50", ("c2d",), (8, 8), _RESNET50),
    Network("c2d_nopool_8x8_r50", ("c2d", "slow_c2d"), (8, 8), _RESNET50, nopool=True),
    Network("i3d_8x8_r50", ("i3d",), (8, 8), _RESNET50),
    Network("i3d_nln_8x8_r50", ("i3d",), (8, 8), _RESNET50, non_local="softmax"),
    Network("slow_8x8_r50", ("slow",), (8, 8), _RESNET50),
    Network("slow_4x16_r50", ("slow",), (4, 16), _RESNET50),
    Network("slowfast_4x16_r50", ("slowfast",), (32, 2), _SLOWFAST50 | _ALPHA8),
    Network("slowfast_8x8_r50", ("slowfast",), (32, 2), _SLOWFAST50 | _ALPHA4),
    Network("slowfast_8x8_r101", ("slowfast",), (32, 2), _SLOWFAST101),
    Network("slowfast_16x8_r101", ("slowfast",), (64, 2), _SLOWFAST101),
    Network("x3d_xs", ("x3d",), (4, 12), _X3D),
    Network("x3d_s", ("x3d",), (13, 6), _X3D),
    Network("x3d_m", ("x3d",), (16, 5), _X3D),
    Network("x3d_l", ("x3d",), (16, 5), _X3D | {"X3D.DEPTH_FACTOR": 5.0}),
    Network("mvitv2_s_16x4", ("mvit",), (16, 4), _MVITV2_S),
)
ARCHS = tuple(dict.fromkeys(arch for network in NETWORKS for arch in network.archs))

# Founding keys that are options of some builders: where a builder has the option, it takes any value of the key.
_OPTIONS = {
    "SLOWFAST.ALPHA": "alpha",
    "SLOWFAST.FUSION_KERNEL_SZ": "fusion_kernel",
    "RESNET.ZERO_INIT_FINAL_BN": "zero_init_residual",
    "MVIT.DROPPATH_RATE": "drop_path",
}
_MODEL_NAMES = {
    "c2d": ("ResNet", "PTVResNet", "ResNet_nopool"),
    "slow_c2d": ("ResNet", "PTVResNet", "ResNet_nopool"),
    "i3d": ("ResNet", "PTVResNet"),
    "slow": ("ResNet", "PTVResNet"),
    "slowfast": ("SlowFast", "PTVSlowFast"),
    "x3d": ("X3D", "PTVX3D"),
    "mvit": ("MViT",),
}
_TEMPORAL = "RESNET.NUM_BLOCK_TEMP_KERNEL"
# The blocks of each stage that non-local blocks follow, by depth.
_NON_LOCAL_AFTER = {50: [[], [1, 3], [1, 3, 5], []], 101: [[], [], [6, 13, 20], []]}


def choose_network(draft: Draft) -> str | None:
    """Set model.name and the options that the network's shape gives; its name.

    None where no model of twinreel is that network; the draft then has the problems.
    """
    arch = _arch(draft)
    if arch is None:
        return None
    nopool = arch == "slow_c2d" or _given(draft, "MODEL.MODEL_NAME") == "ResNet_nopool"
    candidates = [network for network in NETWORKS if arch in network.archs and network.nopool == nopool]
    non_local = _non_local(draft)
    best = min(candidates, key=lambda network: _distance(draft, network, non_local))
    wrong = _mismatches(draft, best)
    for key in wrong:
        values = dict.fromkeys(short(network.needs[key]) for network in candidates if key in network.needs)
        others = f"; those of MODEL.ARCH={arch} have {' or '.join(values)}" if len(values) > 1 else ""
        nobody = "" if key in draft.settings else " (its default, as it is not in the file)"
        draft.refuse(
            key,
            f"{key}={short(_shape(draft, key))}{nobody}: the nearest model, {best.name}, has "
            f"{short(best.needs[key])}{others}",
        )
    blocks = _temporal_blocks(draft, best) if not wrong else {}
    if wrong or non_local is None or blocks is None:
        return None
    _put(draft, best, arch, blocks)
    _put_non_local(draft, best, non_local)
    for group in ("RESNET", "NONLOCAL", "SLOWFAST", "X3D", "MVIT"):
        for key in draft.settings.written:
            if key.startswith(f"{group}.") and key not in draft.outcomes:
                draft.drop(key, f"says nothing about {best.name}")
    return best.name


def _arch(draft: Draft) -> str | None:
    given = draft.settings["MODEL.ARCH"]
    arch = "slowfast" if given == "slowfast_50" else given
    if arch not in ARCHS:
        text = f"MODEL.ARCH={given}: twinreel has no such network; it has {', '.join(ARCHS)} and slowfast_50"
        draft.refuse("MODEL.ARCH", text)
        return None
    name, allowed = draft.settings["MODEL.MODEL_NAME"], _MODEL_NAMES[arch]
    if "MODEL.MODEL_NAME" in draft.settings and name not in allowed:
        draft.refuse(
            ["MODEL.MODEL_NAME"],
            f"MODEL.MODEL_NAME={name} with MODEL.ARCH={arch}: twinreel has {' or '.join(allowed)} of that architecture",
        )
        return None
    return str(arch)


def _given(draft: Draft, key: str) -> Any:
    return draft.settings[key] if key in draft.settings else None


def _non_local(draft: Draft) -> str | None:
    """`none`, `softmax` or `dot_product`; None, with a problem, for other blocks than the published ones."""
    location = draft.settings["NONLOCAL.LOCATION"]
    slow = [stage[0] if isinstance(stage, list) and stage else stage for stage in location]
    fast = [blocks for stage in location if isinstance(stage, list) for blocks in stage[1:] if blocks]
    if not any(slow) and not fast:
        return "none"
    after = _NON_LOCAL_AFTER.get(draft.settings["RESNET.DEPTH"], _NON_LOCAL_AFTER[50])
    problems = []
    if slow != after or fast:
        problems.append(
            f"NONLOCAL.LOCATION={short(location)}: of the stages of RESNET.DEPTH={draft.settings['RESNET.DEPTH']} "
            f"(slow pathway) blocks {after} have non-local blocks in twinreel, or none have"
        )
    for key, value in {"NONLOCAL.GROUP": 1, "NONLOCAL.POOL": [1, 2, 2]}.items():
        if any(item != value for item in _flat(draft.settings[key])):
            problems.append(f"{key}={short(draft.settings[key])}: twinreel's non-local blocks have {value} everywhere")
    form = draft.settings["NONLOCAL.INSTANTIATION"]
    if form not in ("softmax", "dot_product"):
        problems.append(f"NONLOCAL.INSTANTIATION={form}: there are softmax and dot_product")
    for problem in problems:
        draft.refuse(problem.partition("=")[0], problem)
    return None if problems else str(form)


def _temporal_blocks(draft: Draft, network: Network) -> dict[str, int] | None:
    """Options for how many blocks of the fourth stage are temporal, where the model has them; None with a problem."""
    if "slow_temporal_blocks" not in _options(network.name):
        return {}
    stages = draft.settings[_TEMPORAL]
    pathways = [[stage[0], stage[-1]] for stage in stages if isinstance(stage, list) and stage]
    whole = all(type(number) is int for pathway in pathways for number in pathway)
    least = [[3, 3], [4, 4], [0, 0], [3, 3]]
    fits = len(pathways) == 4 and whole and all(pathways[i] == least[i] for i in (0, 1, 3)) and max(pathways[2]) <= 23
    if not fits:
        text = "twinreel counts temporal blocks in the third stage alone, [[3, 3], [4, 4], [SLOW, FAST], [3, 3]], to 23"
        draft.refuse(_TEMPORAL, f"{_TEMPORAL}={short(stages)}: {text}")
        return None
    return {"slow_temporal_blocks": pathways[2][0], "fast_temporal_blocks": pathways[2][1]}


def _flat(stages: list[Any]) -> list[Any]:
    """The values of all stages and pathways."""
    return [value for stage in stages for value in (stage if isinstance(stage, list) else [stage])]


def _shape(draft: Draft, key: str) -> Any:
    """A key's value; of lists with a value for each pathway, the common one; of steps, those that step."""
    value = draft.settings[key]
    if key.startswith("RESNET.") and isinstance(value, list):
        same = all(isinstance(stage, list) and len(set(map(str, stage))) == 1 for stage in value)
        return [stage[0] for stage in value] if same else value
    if key == "MVIT.POOL_Q_STRIDE":
        return [step for step in value if not (isinstance(step, list) and step[1:] == [1, 1, 1])]
    return value


def _options(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(find_builder(name, classifier=True)).parameters


def _mismatches(draft: Draft, network: Network) -> list[str]:
    options = _options(network.name)
    return [
        key for key, value in network.needs.items() if _shape(draft, key) != value and _OPTIONS.get(key) not in options
    ]


def _distance(draft: Draft, network: Network, non_local: str | None) -> tuple[int, ...]:
    """How far a network is from what was written: in what it cannot be, in shape, in the clip it is made for."""
    clip = abs(network.frames[0] - draft.settings["DATA.NUM_FRAMES"])
    stride = abs(network.frames[1] - draft.settings["DATA.SAMPLING_RATE"])
    wrong = [key for key, value in network.needs.items() if _shape(draft, key) != value]
    shape = len(wrong) + ("SLOWFAST.ALPHA" in wrong)  # which says more than the size of a kernel
    return len(_mismatches(draft, network)), shape, network.non_local != (non_local or "none"), clip, stride


def _put(draft: Draft, network: Network, arch: str, blocks: Mapping[str, int]) -> None:
    options = _options(network.name)
    draft.put("model.name", network.name, "MODEL.ARCH", "MODEL.MODEL_NAME")
    for key, value in network.needs.items():
        if _shape(draft, key) == value:
            draft.say(key, f"part of model.name: {network.name}")
    for key, option in _OPTIONS.items():
        same = key in network.needs and option in options and draft.settings[key] == options[option].default
        if option in options and not same and (arch == "mvit" or not key.startswith("MVIT.")):
            draft.put(f"model.{option}", draft.settings[key], key)
    for option, number in blocks.items():
        draft.put(f"model.{option}", number, _TEMPORAL)
    zero = "RESNET.ZERO_INIT_FINAL_BN"
    if "zero_init_residual" not in options and arch == "x3d":
        if draft.settings[zero]:
            draft.say(zero, f"part of model.name: {network.name}")
        else:
            draft.lose(zero, f"{network.name} always starts its residual branches at zero")


def _put_non_local(draft: Draft, network: Network, non_local: str) -> None:
    keys = ("NONLOCAL.LOCATION", "NONLOCAL.INSTANTIATION", "NONLOCAL.GROUP", "NONLOCAL.POOL")
    if non_local == "none":
        for key in keys:
            draft.drop(key, "there are no non-local blocks" if key != keys[0] else "none: as the model is")
        return
    if network.non_local == non_local:
        for key in keys[:2]:
            draft.say(key, f"part of model.name: {network.name}")
    elif "non_local" in _options(network.name):
        draft.put("model.non_local", non_local, *keys[:2])
    else:
        draft.refuse(keys[0], f"{keys[0]}: {network.name} takes no non-local blocks; c2d, i3d, slow, slowfast do")
    for key in keys[2:]:
        draft.drop(key, "as all non-local blocks have it here")
