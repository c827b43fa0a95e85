"""One step's gradient: that of the mean loss over the global batch, whatever the processes and micro-batches.

Every process runs the model on its own clips; the outputs (embeddings, logits) and what the loss must know of them are
gathered; every process computes the share of the loss that its own clips have. The shares add up to the loss, and so
do their gradients: the gather adds up what all processes want of an output, and DistributedDataParallel, which
averages, gets shares that are multiplied by the number of processes.

With `train.cached_negatives` embeddings of all micro-batches are made first without a graph, the loss of the global
batch is taken on them, and then each micro-batch is embedded again with its part of the gradient (Gao et al., "Scaling
Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv:2101.06983).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twinreel.data.augment import RandAugment, own_transform, rand_augment, random_erasing
from twinreel.data.clip import Batch
from twinreel.data.plan import keyed_seed
from twinreel.data.transforms import network_input
from twinreel.distributed import gather_rows, scatter_order, world
from twinreel.models.training_modes import paused_statistics
from twinreel.optim import clip_gradients
from twinreel.parts import Parts
from twinreel.recipe import Recipe
from twinreel.tasks import Facts, at_least_float32

__all__ = ["Compared", "GradientStep", "StepResult", "clip_gradient", "finish", "global_gradient"]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Compared(NamedTuple):
    """What one evaluation of the loss saw: outputs and facts of all processes, in the order of `positions`.

    `outputs` are the task's, each with one or more rows a clip: video embeddings (B, D) or (B, S, D) and text
    embeddings (B * K, D), or logits (B, C); `positions` of these clips in the global batch; `own` the rows of this
    process; `share` its part of the mean loss over the `usable` clips.
    """

    outputs: tuple[Tensor, ...]
    facts: Facts
    positions: list[int]
    own: Tensor
    share: Tensor
    usable: int
    negative_seed: int


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step's forward and backward found; the gradients are in the parameters.

    `loss` is the sum over the usable clips, of this process until it is summed over all; `rows` is the number of
    usable clips in all processes. `repeated_frames` and `waited` (seconds) are noted by the loop.
    """

    loss: float = 0.0
    rows: int = 0
    compared: list[Compared] = field(default_factory=list)
    repeated_frames: int = 0
    waited: float = 0.0

    @property
    def mean_loss(self) -> float | None:
        """The loss of the step; None if no clip could be used."""
        return self.loss / self.rows if self.rows else None

    @property
    def captions(self) -> int:
        """Captions of the clips that could be read, masked ones included."""
        return sum(seen.facts.num_captions for seen in self.compared)

    @property
    def masked_captions(self) -> int:
        """Those that say nothing: padding, or no known word."""
        return sum(seen.facts.num_masked for seen in self.compared)

    def valid(self) -> list[bool]:
        """Which clips of the global batch could be read, in its order."""
        flags: dict[int, bool] = {}
        for seen in self.compared:
            flags |= dict(zip(seen.positions, seen.facts.valid.tolist(), strict=True))
        return [flags[position] for position in sorted(flags)]


def global_gradient(parts: Parts, recipe: Recipe, micro_batches: Sequence[Batch], step: int) -> StepResult:
    """Leave the gradient of the mean loss over the usable clips of the global batch in the parameters.

    Args:
        parts: what computes.
        recipe: how.
        micro_batches: this process's, in order.
        step: from 0; seeds dropout and drawn negatives.

    Returns:
        Losses are in units of the loss; with fp16 the gradients still carry the loss scale.
    """
    parts.optimizer.zero_grad(set_to_none=True)
    work = GradientStep(parts, recipe, micro_batches, step)
    return finish(parts, recipe, work.cached() if recipe.train.cached_negatives else work.plain())


def clip_gradient(parts: Parts, recipe: Recipe) -> float:
    """Take the loss scale out of the gradient and clip it; its norm before clipping, perhaps not finite."""
    parts.scaler.unscale_(parts.optimizer)
    gradients = [parameter.grad for parameter in parts.parameters if parameter.grad is not None]
    return clip_gradients(gradients, clip_norm=recipe.optim.clip_norm, clip_value=recipe.optim.clip_value)


def finish(parts: Parts, recipe: Recipe, seen: list[Compared]) -> StepResult:
    """Sum up what was compared; gradients, so far in parts of the global batch, become those of the usable clips."""
    result = StepResult(rows=sum(each.usable for each in seen), compared=seen)
    result.loss = sum(float(each.share) * each.usable for each in seen)
    global_batch_size = recipe.train.global_batch_size
    if result.rows and result.rows != global_batch_size:
        for parameter in parts.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(global_batch_size / result.rows)
    return result


@dataclass(slots=True)
class GradientStep:
    """Forward and backward of one step in this process.

    Attributes:
        parts: what computes.
        recipe: how.
        micro_batches: this process's.
        step: from 0.
        group: number of the first micro-batch among those of the step, for a replay of a later one.
        first_piece: number of this process's first piece of the global batch; None = that of its rank.
    """

    parts: Parts
    recipe: Recipe
    micro_batches: Sequence[Batch]
    step: int
    group: int = 0
    first_piece: int | None = None

    def plain(self) -> list[Compared]:
        """The negatives of a clip are those of its micro-batch in all processes."""
        seen = []
        for index, batch in enumerate(self.micro_batches):
            text, facts = self.inputs(batch)
            video, facts = self.mixed(self.video(batch), facts, index)
            with self.exchange_after(index):
                outputs = self.run(self.parts.whole, video, text, index)
                everyone = self.parts.shares.positions[index]
                compared = self.compare(outputs, facts, [[own] for own in everyone], index)
                self.backward(compared)
            seen.append(_detached(compared))
        return seen

    def cached(self) -> list[Compared]:
        """The negatives of a clip are those of the global batch: embed, compare, embed again with the gradient."""
        task: Any = self.parts.task
        inputs = [self.inputs(batch) for batch in self.micro_batches]
        texts = [text for text, _ in inputs]
        whole = getattr(self.parts.whole, "module", self.parts.whole)
        with torch.no_grad(), paused_statistics(self.parts.model):
            embedded = [self.run(whole, self.video(self.micro_batches[i]), text, i) for i, text in enumerate(texts)]
        leaves = [torch.cat(part) for part in zip(*(outputs[:2] for outputs in embedded), strict=True)]
        leaves += [outputs[2] for outputs in embedded[:1] if len(outputs) > 2]
        leaves = [at_least_float32(leaf).requires_grad_() for leaf in leaves]
        facts = task.unpack(torch.cat([each.pack() for _, each in inputs]))
        positions = [self.parts.shares.of_process(process) for process in range(self.parts.shares.num_processes)]
        compared = self.compare(tuple(leaves), facts, positions, 0)
        self.backward(compared)
        self.embed_again(texts, leaves)
        return [_detached(compared)]

    def embed_again(self, texts: Sequence[Any], leaves: Sequence[Tensor]) -> None:
        """The second pass: each micro-batch with the part of the gradient that belongs to its embeddings."""
        candidates = self.recipe.task.num_candidates
        first = 0
        for index, (batch, text) in enumerate(zip(self.micro_batches, texts, strict=True)):
            last = first + len(batch.ids)
            with self.exchange_after(index):
                outputs = self.run(self.parts.whole, self.video(batch), text, index)
                gradients = [leaves[0].grad[first:last], leaves[1].grad[first * candidates : last * candidates]]  # type: ignore[index]
                if len(leaves) > 2:  # the learned scale is one for all: its gradient counts once
                    gradients.append(leaves[2].grad * float(index == 0))  # type: ignore[operator]
                wanted = [
                    (output, gradient.to(output.dtype))
                    for output, gradient in zip(outputs, gradients, strict=True)
                    if output.requires_grad
                ]
                torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
            first = last

    def inputs(self, batch: Batch) -> tuple[Any, Facts]:
        """What the model and the loss need of a batch beside its video; wrong captions are added where they are due."""
        task: Any = self.parts.task
        if self.parts.negatives is not None:
            batch = self.parts.negatives.add(batch, self.step)
        made: tuple[Any, Facts] = task.inputs(self.parts.model, batch)
        return made

    def video(self, batch: Batch) -> Tensor:
        """Network input of a batch, on the device; made anew for each pass, because it is large."""
        preprocessing: Any = self.parts.model.preprocessing
        data, seed, device = self.recipe.data, self.recipe.train.seed, self.parts.device
        epoch = self.step // self.parts.plan.steps_per_epoch
        if data.rand_augment is not None or data.transform is not None:
            frames = batch.frames.to(device, non_blocking=True)
            if data.rand_augment is not None:
                rule = RandAugment.of(data.rand_augment)
                frames = rand_augment(frames, batch.ids, seed=seed, epoch=epoch, rule=rule)
            if data.transform is not None:
                frames = own_transform(data.transform, frames, batch.ids, seed=seed, epoch=epoch)
            batch = replace(batch, frames=frames)
        video = network_input(batch, preprocessing, device)
        if data.random_erasing > 0:
            video = random_erasing(video, batch.ids, seed=seed, epoch=epoch, probability=data.random_erasing)
        if self.recipe.train.memory_format == "channels_last":
            video = video.contiguous(memory_format=torch.channels_last_3d)
        return video

    def mixed(self, video: Tensor, facts: Facts, index: int) -> tuple[Tensor, Facts]:
        """Video and facts of a micro-batch with neighbors mixed, where the task mixes."""
        mix = getattr(self.parts.task, "mix", None)
        if mix is None:
            return video, facts
        process = world().rank if self.first_piece is None else 0
        positions = self.parts.shares.of_process(process)[index]
        mixed: tuple[Tensor, Facts] = mix(
            video, facts, positions=positions, seed=self.recipe.train.seed, step=self.step
        )
        return mixed

    def run(self, whole: nn.Module, video: Tensor, text: Any, index: int) -> tuple[Tensor, ...]:
        """Outputs of a micro-batch; dropout depends on the step and on which micro-batch of all processes it is."""
        first = world().rank if self.first_piece is None else self.first_piece
        number = first + index * self.parts.shares.num_processes
        torch.manual_seed(keyed_seed(self.recipe.train.seed, self.step, number, "dropout"))
        precision = self.recipe.train.precision
        with torch.autocast(self.parts.device.type, dtype=PRECISIONS[precision], enabled=precision != "fp32"):
            outputs: tuple[Tensor, ...] = whole(video, text)
        return outputs

    def exchange_after(self, index: int) -> AbstractContextManager[Any]:
        """Gradients are exchanged on the last micro-batch only."""
        if index == len(self.micro_batches) - 1 or not hasattr(self.parts.whole, "no_sync"):
            return nullcontext()
        context: AbstractContextManager[Any] = self.parts.whole.no_sync()  # type: ignore[operator]
        return context

    def compare(
        self, outputs: tuple[Tensor, ...], facts: Facts, everyone: Sequence[Sequence[range]], index: int
    ) -> Compared:
        """Gather outputs and facts of all processes, in the order of the global batch, and take this one's share.

        Args:
            outputs: this process's, each with one or more rows a clip, and perhaps the learned scale.
            facts: this process's.
            everyone: the positions that each process has here, in its order.
            index: of the micro-batch, for the drawn negatives.
        """
        task: Any = self.parts.task
        own_rows, scale = outputs[: len(task.output_names)], outputs[len(task.output_names) :]
        clips = len(facts.valid)
        held = [[at for piece in pieces for at in piece] for pieces in everyone]
        positions = sorted(at for process in held for at in process)
        sizes = [len(process) for process in held]
        rows = torch.cat([at_least_float32(part).reshape(clips, -1) for part in own_rows], dim=1)
        packed = facts.pack()
        own = torch.arange(clips)
        if len(sizes) > 1:
            order = scatter_order(held)
            rows = gather_rows(rows, sizes)[order.to(rows.device)]
            packed = gather_rows(packed, sizes)[order]
            own = torch.searchsorted(torch.tensor(positions), torch.tensor(held[world().rank]))
        parts = rows.split([part.numel() // clips for part in own_rows], dim=1)  # type: ignore[no-untyped-call]
        gathered = tuple(part.reshape(-1, *own_part.shape[1:]) for part, own_part in zip(parts, own_rows, strict=True))
        known = task.unpack(packed)
        seed = keyed_seed(self.recipe.train.seed, self.step, self.group + index, "negatives")
        share = task.share(
            gathered,
            known,
            own=own if len(sizes) > 1 else None,
            log_scale=scale[0] if scale else None,
            negative_seed=seed,
            num_processes=len(sizes),
        )
        for part in (rows, *scale):  # a loss may not depend on them (nothing usable): the exchange still needs them
            share = share + part.flatten()[:0].sum()
        return Compared(gathered, known, positions, own, share, int(known.usable.sum()), seed)

    def backward(self, compared: Compared) -> None:
        """The gradient of this process's share, weighted as its clips weigh in the global batch."""
        if not compared.share.requires_grad:
            return
        weight = compared.usable / self.recipe.train.global_batch_size * self.parts.shares.num_processes
        torch.autograd.backward(self.parts.scaler.scale(compared.share * weight))


def _detached(compared: Compared) -> Compared:
    return compared._replace(outputs=tuple(part.detach() for part in compared.outputs), share=compared.share.detach())
