"""Mixup and cutmix between neighbors of the global batch.

The partner of a clip, the share and the box are pure functions of (seed, step, position in the global batch). So they
do not depend on how a batch is cut into processes and micro-batches, as long as both clips of a pair are in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from twinreel.data.plan import keyed_rng
from twinreel.errors import ConfigError

__all__ = ["Mix", "draw_mix", "mix_pairs"]


class Mix(NamedTuple):
    """How the two clips of a pair are mixed.

    `share` is what a clip keeps of itself, 0 to 1; the rest is its partner's. `box` (top, left, bottom, right) in
    pixels is what it takes of its partner with cutmix; None with mixup.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


def draw_mix(
    *key: int | str,
    height: int,
    width: int,
    mixup_alpha: float,
    cutmix_alpha: float,
    probability: float,
    switch_probability: float,
) -> Mix | None:
    """How a pair is mixed, drawn from a generator of its own; None = not at all.

    Mixup: Zhang et al., arXiv:1710.09412. Cutmix: Yun et al., arXiv:1905.04899; its box has the drawn share of the
    area and a center anywhere, so a part of it may lie outside: the share is then that of the pixels that remain.

    Args:
        *key: of the generator.
        height: of the video, pixels.
        width: of the video, pixels.
        mixup_alpha: the share is drawn from Beta(alpha, alpha); 0 = no mixup.
        cutmix_alpha: likewise; 0 = no cutmix.
        probability: of being mixed at all.
        switch_probability: of cutmix, where both are on.
    """
    rng = keyed_rng(*key)
    mixed, switched = rng.random() < probability, rng.random() < switch_probability
    if not mixed or (mixup_alpha <= 0 and cutmix_alpha <= 0):
        return None
    if cutmix_alpha <= 0 or (mixup_alpha > 0 and not switched):
        return Mix(float(rng.beta(mixup_alpha, mixup_alpha)))
    side = math.sqrt(1 - float(rng.beta(cutmix_alpha, cutmix_alpha)))
    center = int(rng.integers(height)), int(rng.integers(width))
    top, bottom = _clipped(center[0], int(height * side), height)
    left, right = _clipped(center[1], int(width * side), width)
    area = (bottom - top) * (right - left)
    return Mix(1 - area / (height * width), (top, left, bottom, right))


def _clipped(center: int, size: int, whole: int) -> tuple[int, int]:
    return max(0, center - size // 2), min(whole, center + size // 2)


def mix_pairs(
    video: Tensor,
    targets: Tensor,
    *,
    positions: Sequence[int],
    valid: Tensor,
    seed: int,
    step: int,
    mixup_alpha: float = 0.0,
    cutmix_alpha: float = 0.0,
    probability: float = 1.0,
    switch_probability: float = 0.5,
    views_per_row: int = 1,
) -> tuple[Tensor, Tensor]:
    """Clips mixed with their neighbors, and their targets in the same shares; new tensors.

    The partner of the clip at position 2i of the global batch is the one at 2i + 1, and both are mixed alike, with
    one share and one box (the same in all frames). A clip whose partner is not valid stays as it is.

    Args:
        video: float (B, 3, T, H, W).
        targets: float (B, C).
        positions: of the clips in the global batch, B of them; both of a pair are there.
        valid: bool (B,).
        seed: of the run.
        step: from 0.
        mixup_alpha: as in `draw_mix`, like the options below.
        cutmix_alpha: see there.
        probability: see there.
        switch_probability: see there.
        views_per_row: so many clips side by side are views of one row, which are not mixed with one another: the
            partner of a view is the same view of the neighboring row.

    Returns:
        Of the same shapes, types and device.

    Raises:
        ConfigError: the partner of a clip is in another piece of the batch, or there is none.
    """
    video, targets = video.clone(), targets.clone()
    flags = valid.tolist()
    for number, (first, second) in _pairs(positions, views_per_row).items():
        mix = draw_mix(
            seed, step, number, "mix", height=video.shape[-2], width=video.shape[-1], mixup_alpha=mixup_alpha,
            cutmix_alpha=cutmix_alpha, probability=probability, switch_probability=switch_probability,
        )  # fmt: skip
        if mix is None or not (flags[first] and flags[second]):
            continue
        pair = [first, second]
        video[pair] = _mixed_videos(video[pair], mix)
        targets[pair] = _blend(targets[pair], mix.share)
    return video, targets


def _pairs(positions: Sequence[int], views_per_row: int) -> dict[int, tuple[int, int]]:
    """Row numbers of both clips of each pair, by the pair's number in the global batch."""
    row_of = {position: row for row, position in enumerate(positions)}
    pairs = {}
    for position, row in row_of.items():
        block, place = divmod(position, 2 * views_per_row)
        partner = row_of.get(position + (views_per_row if place < views_per_row else -views_per_row))
        if partner is None:
            raise ConfigError(
                f"data.mixup and data.cutmix mix neighbors of the global batch: the clip at position {position} has "
                f"its partner in another piece of it, or none. Set train.micro_batch_size (and with it "
                f"train.global_batch_size) to a multiple of {2 * views_per_row}, or data.mixup=0 data.cutmix=0"
            )
        if place < views_per_row:
            pairs[block * views_per_row + place] = (row, partner)
    return pairs


def _mixed_videos(pair: Tensor, mix: Mix) -> Tensor:
    if mix.box is None:
        return _blend(pair, mix.share)
    top, left, bottom, right = mix.box
    other = pair.flip(0)
    pair[..., top:bottom, left:right] = other[..., top:bottom, left:right]
    return pair


def _blend(pair: Tensor, share: float) -> Tensor:
    return pair * share + pair.flip(0) * (1 - share)
