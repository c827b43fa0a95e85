"""The key names of PyTorchVideo's networks as twinreel's keys, which are PySlowFast's.

`blocks.0` is the stem, then come the stages and the head; a pool between stages takes a number too (C2D and I3D after
the first stage, SlowFast before the head), so stages are counted, not numbered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.files import listed

__all__ = ["Renamed", "is_pytorchvideo", "rename_pytorchvideo"]

_BLOCK = re.compile(r"blocks\.(\d+)\.(?:multipathway_blocks\.(\d)\.)?(.+)")
_STEM = [
    # Its X3D calls the 1 x 3 x 3 convolution conv_t and the 5 x 1 x 1 one conv_xy; PySlowFast says it the right way.
    (r"conv\.conv_t\.(.+)", r"conv_xy.\1"),
    (r"conv\.conv_xy\.(.+)", r"conv.\1"),
    (r"conv\.(weight|bias)", r"conv.\1"),
    (r"norm\.(.+)", r"bn.\1"),
]
_RESIDUAL = [
    (r"branch1_conv\.(.+)", r"branch1.\1"),
    (r"branch1_norm\.(.+)", r"branch1_bn.\1"),
    (r"branch2\.conv_([abc])\.(.+)", r"branch2.\1.\2"),
    (r"branch2\.norm_b\.1\.block\.0\.(.+)", r"branch2.se.fc1.\1"),
    (r"branch2\.norm_b\.1\.block\.2\.(.+)", r"branch2.se.fc2.\1"),
    (r"branch2\.norm_b\.0\.(.+)", r"branch2.b_bn.\1"),
    (r"branch2\.norm_([abc])\.([a-z_]+)", r"branch2.\1_bn.\2"),
]
_FUSION = [(r"conv_fast_to_slow\.(.+)", r"conv_f2s.\1"), (r"norm\.(.+)", r"bn.\1")]
_HEAD = [
    (r"proj\.(.+)", r"projection.\1"),
    (r"pool\.pre_conv\.(.+)", r"conv_5.\1"),
    (r"pool\.pre_norm\.(.+)", r"conv_5_bn.\1"),
    (r"pool\.post_conv\.(.+)", r"lin_5.\1"),
    (r"pool\.post_norm\.(.+)", r"lin_5_bn.\1"),
]
_EPSILON = 1e-5  # of all batch norms of these networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """Tensors under twinreel's keys.

    `made` are norms that PyTorchVideo's X3D lacks and that do nothing; `pool` says whether the first stage is followed
    by a pool, which has no weights.
    """

    tensors: dict[str, Tensor]
    made: tuple[str, ...]
    pool: bool


def is_pytorchvideo(names: Iterable[str]) -> bool:
    """Whether these are key names of a PyTorchVideo network."""
    return any(re.match(r"blocks\.0\.(multipathway_blocks\.0\.)?conv\.|patch_embed\.patch_model\.", n) for n in names)


def rename_pytorchvideo(tensors: Mapping[str, Tensor], source: str) -> Renamed:
    """The tensors of a PyTorchVideo network under twinreel's keys.

    Raises:
        CheckpointError: a network that twinreel has not, or key names that no rule knows.
    """
    if any(name.startswith("patch_embed.patch_model.") for name in tensors):
        raise CheckpointError(
            f"{source}: PyTorchVideo's MViT is the first version (mvit_base_16x4, mvit_base_32x3), which adds "
            "positions to the tokens; twinreel has the second (mvitv2_s_16x4). Take PySlowFast's MViTv2 file"
        )
    stages, head = _stages(tensors)
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        key = _key(name, stages, head)
        if key is None or key in renamed:
            unknown.append(name)
        else:
            renamed[key] = tensor
    if unknown:
        raise CheckpointError(
            f"{source}: PyTorchVideo's keys of another network than SlowFast, Slow, I3D, C2D or X3D: {listed(unknown)}"
        )
    made = _missing_norms(renamed)
    first = min(stages, default=0)
    return Renamed(
        tensors={**renamed, **made},
        made=tuple(made),
        pool=first + 1 not in stages,
    )


def _stages(names: Iterable[str]) -> tuple[dict[int, int], int | None]:
    """PySlowFast's stage (2 to 5) of each block that has residual blocks, and the number of the head's block."""
    found = [(int(match[1]), match[3]) for match in map(_BLOCK.match, names) if match]
    numbers = sorted({number for number, rest in found if rest.startswith("res_blocks.")})
    heads = [number for number, rest in found if rest.startswith("proj.")]
    return {number: stage for stage, number in enumerate(numbers, start=2)}, heads[0] if heads else None


def _key(name: str, stages: Mapping[int, int], head: int | None) -> str | None:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    number, pathway, rest = int(match[1]), match[2] or "0", match[3]
    if rest.startswith("multipathway_fusion."):
        stage = stages.get(number, 1 if number == 0 else None)
        ending = _replaced(rest.removeprefix("multipathway_fusion."), _FUSION)
        return f"s{stage}_fuse.{ending}" if stage and ending else None
    if number == 0:
        ending = _replaced(rest, _STEM)
        return f"s1.pathway{pathway}_stem.{ending}" if ending else None
    if number == head:
        ending = _replaced(rest, _HEAD)
        return f"head.{ending}" if ending else None
    block = re.fullmatch(r"res_blocks\.(\d+)\.(.+)", rest)
    ending = _replaced(block[2], _RESIDUAL) if block else None
    return f"s{stages[number]}.pathway{pathway}_res{block[1]}.{ending}" if block and ending else None


def _replaced(text: str, rules: list[tuple[str, str]]) -> str | None:
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, text)
        if match:
            return match.expand(replacement)
    return None


def _missing_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms that change nothing, where a shortcut convolution has none: only PySlowFast's X3D has it."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".branch1.weight") and f"{name.removesuffix('.weight')}_bn.weight" not in tensors:
            norm = f"{name.removesuffix('.weight')}_bn."
            zeros = torch.zeros(tensor.shape[0])
            made[f"{norm}weight"], made[f"{norm}bias"] = zeros + 1, zeros.clone()
            made[f"{norm}running_mean"], made[f"{norm}running_var"] = zeros.clone(), zeros + (1 - _EPSILON)
    return made
