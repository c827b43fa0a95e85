"""The contrastive task: two towers into one space. Batch -> model -> loss, and how its embeddings are compared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.data.clip import Batch
from twinreel.errors import ConfigError
from twinreel.losses import SEGMENT_LOSSES, binary_nce, clip_bag, info_nce, pooled_similarity, text_ids
from twinreel.losses.common import check_temperature
from twinreel.tasks.whole import WholeModel, at_least_float32

__all__ = ["Contrastive", "PairFacts"]

ALWAYS_NORMALIZED = (info_nce, clip_bag, binary_nce)
LARGEST_LOGIT_SCALE = 100.0  # of a learned temperature, that is a temperature of 0.01; 1 is the largest temperature


class PairFacts(NamedTuple):
    """What the loss must know of each clip beside its embeddings; as one int64 matrix it travels between processes.

    `valid` bool (B,); `mask` bool (B, K) of real captions; `text_ids` int64 (B, K), equal for equal captions.
    """

    valid: Tensor
    mask: Tensor
    text_ids: Tensor

    @property
    def usable(self) -> Tensor:
        """Bool (B,): the clip is valid and has a real caption."""
        return self.valid & self.mask.any(1)

    @property
    def num_captions(self) -> int:
        """Captions of the clips that could be read, masked ones included."""
        return self.mask[self.valid].numel()

    @property
    def num_masked(self) -> int:
        """Those that say nothing: padding, or no known word."""
        return int((~self.mask[self.valid]).sum())

    def pack(self) -> Tensor:
        """Int64 (B, 1 + 2K)."""
        return torch.cat([self.valid[:, None].long(), self.mask.long(), self.text_ids], dim=1)

    @classmethod
    def unpack(cls, packed: Tensor) -> PairFacts:
        """What `pack` made, of one process or of several below each other."""
        candidates = (packed.shape[1] - 1) // 2
        return cls(packed[:, 0].bool(), packed[:, 1 : 1 + candidates].bool(), packed[:, 1 + candidates :])


class Contrastive(nn.Module):
    """Video and text embeddings under a loss that sees all pairs of a batch.

    Args:
        loss: called as `loss(video_embeddings (B, D), text_embeddings (B * K, D), mask=(B, K), valid=(B,),
            **loss_options)`. It gets `text_ids` (B * K,), equal for equal captions, if it takes them. A loss that takes
            `own` (positions of the clips of one process) returns their share; the shares of all processes add up to
            the loss. One that does not is computed whole by every process.
        num_candidates: K captions a clip.
        max_words: words a caption in training.
        loss_options: keyword options of the loss.
        learn_temperature: the temperature is trained too, from its value in `loss_options`.

    Raises:
        ConfigError: the loss has no temperature to learn.
    """

    name: ClassVar[str] = "contrastive"
    output_names: ClassVar[tuple[str, ...]] = ("video", "text")  # embeddings; a learned scale comes behind them

    def __init__(
        self,
        *,
        loss: Callable[..., Tensor],
        num_candidates: int = 1,
        max_words: int = 20,
        loss_options: Mapping[str, Any] | None = None,
        learn_temperature: bool = False,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.num_candidates = num_candidates
        self.max_words = max_words
        self.loss_options = dict(loss_options or {})
        self.takes = frozenset(inspect.signature(loss).parameters)
        self.segments = loss in SEGMENT_LOSSES
        self.log_scale: nn.Parameter | None = None
        if learn_temperature:
            if self.temperature is None or not self.normalize:
                raise ConfigError(
                    "task.learn_temperature needs a loss on normalized embeddings that has a temperature: info_nce, "
                    "clip_bag, binary_nce, or milnce with task.normalize=true"
                )
            check_temperature(
                f"{getattr(loss, '__name__', 'the loss')} with task.learn_temperature", self.temperature, unit=True
            )
            self.log_scale = nn.Parameter(torch.tensor(-math.log(self.temperature)))

    def _option(self, name: str) -> Any:
        """The value of an option of the loss: as given, else its default; None if it has no such option."""
        if name in self.loss_options:
            return self.loss_options[name]
        parameter = inspect.signature(self.loss).parameters.get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    @property
    def normalize(self) -> bool:
        """Whether embeddings are compared at unit length; search and evaluation follow the loss."""
        return self.loss in ALWAYS_NORMALIZED or bool(self._option("normalize"))

    @property
    def drawn_negatives(self) -> int | None:
        """How many wrong captions a clip is compared with, where the loss draws some; None = with all."""
        value = self._option("num_negatives")
        return None if value is None else int(value)

    @property
    def temperature(self) -> float | None:
        """What divides the scores now; None for a loss without one."""
        if self.log_scale is not None:
            return math.exp(-self.log_scale.item())
        value = self._option("temperature")
        return None if value is None else float(value)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep a learned temperature in 0.01 to 1."""
        if self.log_scale is not None:
            self.log_scale.clamp_(0.0, math.log(LARGEST_LOGIT_SCALE))

    def inputs(self, model: nn.Module, batch: Batch) -> tuple[Any, PairFacts]:
        """What `encode_text` gets of a batch, and what the loss must know of it; nothing is computed yet."""
        sentences = [text for candidates in batch.captions for text in candidates]
        text, known = self._text_input(model, sentences, self.max_words)
        mask = batch.caption_mask & known.view(batch.caption_mask.shape)
        return text, PairFacts(batch.valid, mask, text_ids(batch.captions).view(mask.shape))

    def outputs(self, model: nn.Module, video: Tensor, text: Any) -> tuple[Tensor, ...]:
        """Video embeddings (B, D) or (B, S, D), text embeddings (N, D) and, if it is learned, the log of the scale.

        Args:
            model: two towers.
            video: network input (B, 3, T, H, W).
            text: word ids int64 (N, W), or N sentences for towers that read sentences.
        """
        towers: Any = model
        embeddings = (_encode_video(model, video, self.segments), towers.encode_text(text))
        return embeddings if self.log_scale is None else (*embeddings, self.log_scale * 1.0)

    @staticmethod
    def unpack(packed: Tensor) -> PairFacts:
        """What `PairFacts.pack` made."""
        return PairFacts.unpack(packed)

    def share(
        self,
        outputs: Sequence[Tensor],
        facts: PairFacts,
        *,
        own: Tensor | None = None,
        log_scale: Tensor | None = None,
        negative_seed: int = 0,
        num_processes: int = 1,
    ) -> Tensor:
        """One process's share of the mean loss over the usable clips of all processes.

        Args:
            outputs: video embeddings (B, D), or (B, S, D) for a loss of segments, and text embeddings (B * K, D), of
                all processes.
            facts: of all processes.
            own: positions of this process's clips; None = all, that is the whole loss.
            log_scale: the learned temperature as it came out of `outputs`.
            negative_seed: of the negatives that are drawn.
            num_processes: among how many a loss that knows no `own` is divided.

        Returns:
            A scalar, float32 whatever the precision of the towers (float64 stays).
        """
        video_embeddings, text_embeddings = outputs
        device = video_embeddings.device
        options = dict(self.loss_options)
        if log_scale is not None:
            options["temperature"] = (-log_scale.to(device)).exp()
        if "negative_seed" in self.takes:
            options["negative_seed"] = negative_seed
        if "text_ids" in self.takes:
            options["text_ids"] = facts.text_ids.flatten().to(device)
        shares = 1
        if own is not None and "own" in self.takes:
            options["own"] = own.to(device)
        elif own is not None:
            shares = num_processes  # each process computes the whole of it
        with torch.autocast(device.type, enabled=False):
            loss = self.loss(
                at_least_float32(video_embeddings),
                at_least_float32(text_embeddings),
                mask=facts.mask.to(device),
                valid=facts.valid.to(device),
                **options,
            )
        return loss if shares == 1 else loss / shares

    def compute_loss(self, model: nn.Module, video: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss of a batch in one process, and over how many clips it is the mean.

        Args:
            model: anything with `encode_video` and `encode_text`.
            video: network input (B, 3, T, H, W).
            batch: the captions and masks that belong to it.
        """
        text, facts = self.inputs(model, batch)
        outputs = WholeModel(model, self)(video, text)
        return self.share(outputs[:2], facts, log_scale=self.log_scale), int(facts.usable.sum())

    def pair_loss(self, video_embeddings: Tensor, text_embeddings: Tensor, captions: list[list[str]]) -> Tensor:
        """The loss of embeddings that exist already: (B, D), (B * K, D) and B lists of K sentences, all real."""
        shape = (len(captions), len(captions[0]))
        facts = PairFacts(torch.ones(shape[0]).bool(), torch.ones(shape).bool(), text_ids(captions).view(shape))
        return self.share((video_embeddings, text_embeddings), facts, log_scale=self.log_scale)

    @torch.no_grad()
    def chance_loss(self, num_clips: int) -> float:
        """What a model scores whose similarities are all 0, on a batch of so many clips."""
        shape = (num_clips, self.num_candidates)
        facts = PairFacts(
            torch.ones(num_clips).bool(), torch.ones(shape).bool(), torch.arange(math.prod(shape)).view(shape)
        )
        video = torch.zeros(num_clips, 1, 1) if self.segments else torch.zeros(num_clips, 1)
        own = torch.zeros(1, dtype=torch.long) if "own" in self.takes else None  # all clips score alike
        share = self.share((video, torch.zeros(math.prod(shape), 1)), facts, own=own, log_scale=self.log_scale)
        return float(share) * (1 if own is None else num_clips)

    def encode_video(self, model: nn.Module, video: Tensor) -> Tensor:
        """Embeddings as they are compared: float32 (B, D), unit length if the loss normalizes; (B, S, D) segments
        for a loss of segments.
        """
        return self._comparable(_encode_video(model, video, self.segments))

    def encode_text(self, model: nn.Module, sentences: Sequence[str], max_words: int) -> Tensor:
        """Embeddings as they are compared: float32 (N, D), unit length if the loss normalizes."""
        towers: Any = model
        text, _ = self._text_input(model, list(sentences), max_words)
        return self._comparable(towers.encode_text(text))

    def combine_views(self, embeddings: Tensor) -> Tensor:
        """Embeddings of N views as one: (B, N, D) -> (B, D), their mean, again at unit length if the loss normalizes.

        For a loss of segments (B, N, S, D) -> (B, N * S, D): the segments of all views are the video's.
        """
        if self.segments:
            return embeddings.flatten(1, 2)
        mean = embeddings.mean(1)
        return functional.normalize(mean, dim=-1) if self.normalize else mean

    def similarity(self, videos: Tensor, texts: Tensor) -> Tensor:
        """Scores (videos, texts) of embeddings as `encode_video`, `combine_views` and `encode_text` return them."""
        if not self.segments:
            return videos @ texts.T
        return pooled_similarity(
            videos,
            texts,
            pooling=self._option("pooling"),
            pooling_temperature=self._option("pooling_temperature"),
        )

    def _comparable(self, embeddings: Tensor) -> Tensor:
        embeddings = embeddings.float()
        return functional.normalize(embeddings, dim=-1) if self.normalize else embeddings

    def _text_input(self, model: nn.Module, sentences: list[str], max_words: int) -> tuple[Any, Tensor]:
        """What `encode_text` gets, and which sentences say anything: a caption without a known word is masked."""
        towers: Any = model
        if getattr(model, "tokenize", None) is None:
            return sentences, torch.tensor([bool(text.strip()) for text in sentences])
        tokens = towers.tokenize(sentences, max_words)
        return tokens, (tokens != 0).any(-1).cpu()


def _encode_video(model: nn.Module, video: Tensor, segments: bool) -> Tensor:
    towers: Any = model
    embeddings: Tensor = towers.encode_video(video, segments=True) if segments else towers.encode_video(video)
    return embeddings
