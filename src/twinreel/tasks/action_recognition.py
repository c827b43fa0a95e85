"""The task of naming what happens: a classifier. Batch -> model -> loss, and how a clip is scored."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from twinreel.data.classes import ClassTable
from twinreel.data.clip import Batch
from twinreel.data.mixing import mix_pairs
from twinreel.errors import ConfigError
from twinreel.models.classifier import activate
from twinreel.tasks.whole import WholeModel, logits_share

__all__ = ["ActionRecognition", "ClassFacts", "Mixing"]


class ClassFacts(NamedTuple):
    """What the loss must know of each clip beside its logits; as one float64 matrix it travels between processes.

    `valid` bool (B,); `targets` float32 (B, C): 1 where a clip has a class, or shares of two clips that are mixed.
    """

    valid: Tensor
    targets: Tensor

    @property
    def usable(self) -> Tensor:
        """Bool (B,): which clips count."""
        return self.valid

    @property
    def num_captions(self) -> int:
        """None are used."""
        return 0

    @property
    def num_masked(self) -> int:
        """None are used."""
        return 0

    def pack(self) -> Tensor:
        """Float64 (B, 1 + C)."""
        return torch.cat([self.valid[:, None].double(), self.targets.double()], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How neighbors of the global batch are mixed, see `mixing.mix_pairs`; alphas of 0 mix nothing."""

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    probability: float = 1.0
    switch_probability: float = 0.5

    @property
    def mixes(self) -> bool:
        """Whether anything is mixed."""
        return (self.mixup_alpha > 0 or self.cutmix_alpha > 0) and self.probability > 0


class ActionRecognition(nn.Module):
    """Logits under a loss of classes.

    Args:
        loss: called as `loss(logits (B, C), targets (B, C), valid=(B,), **loss_options)`. One that takes `own`
            (positions of the clips of one process) returns their share; the shares of all processes add up to the loss.
        classes: what the outputs mean.
        loss_options: keyword options of the loss.
        mixing: mixup and cutmix.
        views_per_row: clips of a batch that are views of one row; they are mixed with those of the next row.
    """

    name: ClassVar[str] = "action_recognition"
    output_names: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(
        self,
        *,
        loss: Callable[..., Tensor],
        classes: ClassTable,
        loss_options: Mapping[str, Any] | None = None,
        mixing: Mixing | None = None,
        views_per_row: int = 1,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.classes = classes
        self.loss_options = dict(loss_options or {})
        self.mixing = mixing or Mixing()
        self.views_per_row = views_per_row
        self.takes = frozenset(inspect.signature(loss).parameters)
        self.log_scale: nn.Parameter | None = None  # nothing is learned beside the model

    def after_step(self) -> None:
        """Nothing is kept in bounds."""

    def inputs(self, model: nn.Module, batch: Batch) -> tuple[None, ClassFacts]:
        """What the loss must know of a batch; the model gets nothing beside its video."""
        return None, ClassFacts(batch.valid, self.classes.targets(batch.labels))

    def mix(
        self, video: Tensor, facts: ClassFacts, *, positions: Sequence[int], seed: int, step: int
    ) -> tuple[Tensor, ClassFacts]:
        """Video (B, 3, T, H, W) and targets with neighbors mixed, see `mixing.mix_pairs`.

        Args:
            video: network input of clips that lie side by side in the global batch.
            facts: of them.
            positions: of the clips in the global batch.
            seed: of the run.
            step: from 0.
        """
        if not self.mixing.mixes:
            return video, facts
        video, targets = mix_pairs(
            video,
            facts.targets,
            positions=positions,
            valid=facts.valid,
            seed=seed,
            step=step,
            mixup_alpha=self.mixing.mixup_alpha,
            cutmix_alpha=self.mixing.cutmix_alpha,
            probability=self.mixing.probability,
            switch_probability=self.mixing.switch_probability,
            views_per_row=self.views_per_row,
        )
        return video, facts._replace(targets=targets)

    def outputs(self, model: nn.Module, video: Tensor, text: None = None) -> tuple[Tensor, ...]:
        """Logits (B, C) of a model in train mode, or of a user's model, which returns logits always.

        Raises:
            ConfigError: the model has another number of outputs than there are classes.
        """
        logits: Tensor = model(video)
        if logits.ndim != 2 or logits.shape[1] != len(self.classes):
            raise ConfigError(
                f"{type(model).__name__} returns {tuple(logits.shape)} for {len(video)} clips; (clips, classes) = "
                f"({len(video)}, {len(self.classes)}) is needed: let its builder take num_classes"
            )
        return (logits,)

    @staticmethod
    def unpack(packed: Tensor) -> ClassFacts:
        """What `ClassFacts.pack` made, of one process or of several below each other."""
        return ClassFacts(packed[:, 0].bool(), packed[:, 1:].float())

    def share(
        self,
        outputs: Sequence[Tensor],
        facts: ClassFacts,
        *,
        own: Tensor | None = None,
        log_scale: Tensor | None = None,
        negative_seed: int = 0,
        num_processes: int = 1,
    ) -> Tensor:
        """One process's share of the mean loss over the valid clips of all processes.

        Args:
            outputs: logits (B, C) of all processes.
            facts: of all processes.
            own: positions of this process's clips; None = all, that is the whole loss.
            log_scale: not used.
            negative_seed: not used.
            num_processes: among how many a loss that knows no `own` is divided.

        Returns:
            A scalar, float32 whatever the precision of the model (float64 stays).
        """
        (logits,) = outputs
        return logits_share(
            self.loss, logits, facts.targets, facts.valid, self.loss_options, own=own, num_processes=num_processes
        )

    def compute_loss(self, model: nn.Module, video: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss of a batch in one process, and over how many clips it is the mean.

        Args:
            model: in train mode.
            video: network input (B, 3, T, H, W).
            batch: the labels that belong to it.
        """
        _, facts = self.inputs(model, batch)
        return self.share(WholeModel(model, self)(video), facts), int(facts.usable.sum())

    @torch.no_grad()
    def chance_loss(self, num_clips: int) -> float:
        """What a model scores that gives all classes the same logit, on clips of one class each."""
        targets = torch.zeros(num_clips, len(self.classes))
        targets[:, 0] = 1.0
        facts = ClassFacts(torch.ones(num_clips).bool(), targets)
        return float(self.share((torch.zeros_like(targets),), facts))

    @torch.no_grad()
    def statistics(self, outputs: Sequence[Tensor], facts: ClassFacts) -> dict[str, float]:
        """How a training batch was answered: `train_top_1_accuracy`, where a clip has one class and none is mixed."""
        (logits,) = outputs
        valid = facts.valid.cpu()
        if self.classes.multi_label or self.mixing.mixes or not bool(valid.any()):
            return {}
        right = logits.detach().argmax(1).cpu() == facts.targets.argmax(1).cpu()
        return {"train_top_1_accuracy": float(right[valid].float().mean())}

    def scores(self, model: nn.Module, video: Tensor) -> Tensor:
        """What a model in eval mode says of clips: float32 (B, C), higher is more likely.

        Probabilities, unless the model's head has no activation. A user's model returns logits; they become
        probabilities by softmax, or with `multi_label` by sigmoid.
        """
        (found,) = self.outputs(model, video)
        if getattr(model, "head_activation", None) is not None:
            return found.float()
        return activate(found.float(), "sigmoid" if self.classes.multi_label else "softmax")

    def loss_of_scores(self, model: nn.Module, scores: Tensor, targets: Tensor) -> float:
        """The mean over clips of what scores (N, C) cost: -log of the right one, or binary cross-entropy.

        NaN for a head without activation, whose scores are no probabilities.
        """
        if getattr(model, "head_activation", "softmax") == "none":
            return math.nan
        least = torch.finfo(torch.float64).tiny
        scores = scores.double()
        right = -(targets * scores.clamp(min=least).log())
        if self.classes.multi_label:
            return float((right - (1 - targets) * (1 - scores).clamp(min=least).log()).mean())
        return float(right.sum(1).mean())
