"""Precise statistics of batch norms (Wu and Johnson, arXiv:2105.07576, section 3): of the weights as they are now.

The running statistics of training are an average over weights that change. Before a checkpoint is saved or a model is
judged they are taken anew from batches that are run without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from twinreel.data.dataset import ClipDataset
from twinreel.data.device_feed import feed_device
from twinreel.data.loader import load_batches
from twinreel.distributed import exchange, world
from twinreel.gradients import GradientStep
from twinreel.guards import repeatable_kernels
from twinreel.parts import Parts, training_rules
from twinreel.recipe import Recipe

__all__ = ["take_precise_statistics"]


@torch.no_grad()
def take_precise_statistics(parts: Parts, recipe: Recipe, step: int) -> None:
    """Set the running statistics of `parts.norms` to those of `train.precise_bn_batches` micro-batches.

    Each process runs micro-batches of its own, of the clips that can be read: those of the steps that come next, so
    that the same step always gives the same statistics (faults are counted when those steps are trained). Where
    weights are averaged the statistics are those of the averaged ones, which are judged; training reads none.

    Mean = mean of the batch means; variance = mean of the (unbiased) batch variances + variance of the batch means.
    Norms that are frozen stay as they are.

    Args:
        parts: what computes.
        recipe: how.
        step: optimizer steps so far.
    """
    norms: list[Any] = [norm for norm in parts.norms if getattr(norm, "running_mean", None) is not None]
    if not norms:
        return
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # the running statistics are then those of the last batch
    try:
        with parts.average.swapped_in(parts.model) if parts.average is not None else nullcontext():
            sums, count = _run(parts, recipe, step, norms)
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
    _set(norms, sums, count)


def _run(parts: Parts, recipe: Recipe, step: int, norms: Sequence[Any]) -> tuple[Tensor, int]:
    """Sums over micro-batches of all norms' means, squared means and variances, (3, channels) float64; how many."""
    wanted = recipe.train.precise_bn_batches
    shares = parts.shares
    last = step + -(-wanted // shares.num_micro_batches)
    loader = load_batches(
        ClipDataset(parts.rows, training_rules(recipe, parts.model, parts.rows)),
        islice(parts.plan.micro_batches(step, last, shares, world().rank), wanted),
        num_workers=recipe.data.num_workers,
        worker_start=recipe.data.worker_start,
        pin_memory=parts.device.type == "cuda",
    )
    whole: nn.Module = getattr(parts.whole, "module", parts.whole)
    task: Any = parts.task
    parts.train_mode()
    sums, count = torch.zeros(3, sum(len(norm.running_mean) for norm in norms), dtype=torch.float64), 0
    with closing(feed_device(loader, parts.device)) as batches, repeatable_kernels(recipe, parts.device):
        for index, batch in enumerate(batches):
            readable = bool(batch.valid.any())
            if recipe.train.batch_norm == "sync":  # all processes normalize together, or none does
                readable = bool(exchange([float(readable)]).all())
            if not readable:
                continue
            work = GradientStep(parts, recipe, [batch], step)
            text, _ = task.inputs(parts.model, batch)
            video = work.video(batch)
            work.run(whole, video[batch.valid.to(video.device)], text, index)
            means = torch.cat([norm.running_mean for norm in norms]).double().cpu()
            variances = torch.cat([norm.running_var for norm in norms]).double().cpu()
            sums += torch.stack([means, means**2, variances])
            count += 1
    return sums, count


def _set(norms: Sequence[Any], sums: Tensor, count: int) -> None:
    """Statistics of the sums of all processes, in every process."""
    told = exchange([float(count), *sums.flatten().tolist()])
    total = told[:, 0].sum().item()
    if not total:
        return
    mean, square, variance = (told[:, 1:].sum(0) / total).view(3, -1)
    variance = variance + (square - mean**2).clamp(min=0)
    sizes = [len(norm.running_mean) for norm in norms]
    for norm, own_mean, own_variance in zip(norms, mean.split(sizes), variance.split(sizes), strict=True):
        norm.running_mean.copy_(own_mean)
        norm.running_var.copy_(own_variance)
