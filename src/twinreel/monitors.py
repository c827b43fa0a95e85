"""What a run says about its own health: numbers of its embeddings, and warnings that name a remedy.

Nothing here changes a run. A warning says what is seen, why it is bad, and which key of the recipe to turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from twinreel.tasks import Contrastive, Facts, PairFacts, Task

__all__ = ["SAFE_TEMPERATURES", "Monitor", "embedding_statistics", "output_statistics"]

SAFE_TEMPERATURES = (0.05, 0.2)  # of a loss on embeddings of unit length

MOST_CLIPS = 128  # compared in one look: the scores of more say the same and cost more
# Whose rank is taken. Up to here LAPACK works in one thread (0.3 ms); at 128 rows its threads meet hundreds of times,
# which takes half a second and more where readers share the cores.
MOST_ROWS = 96

LARGEST_SCORE = 50.0  # exp(-50) is nothing in float32: one pair of a softmax has all the weight
# Of unit vectors; a mean cosine of about 0.94 with 32 clips. The demo's model starts at 1.4 to 1.8, is at 4 after its
# 20 steps of warm-up and at 6 after 100; with a learning rate of 0.3 it stays at 1.00 to 1.05.
LOWEST_RANK = 1.5
FEWEST_CLIPS = 8  # whose rank says something
LOWEST_SPREAD = 1e-4  # of cosines
NUM_LOSSES = 5  # looks whose mean loss is compared with chance
CHANCE_MARGIN = 0.01
LOWEST_LOSS_SCALE = 1.0
LARGEST_WAITING_SHARE = 0.2
LARGEST_MASKED_SHARE = 0.5

Numbers = Mapping[str, float]


def output_statistics(task: Task, outputs: Sequence[Tensor], facts: Facts) -> dict[str, float]:
    """How the outputs of a batch lie: `embedding_statistics` of two towers, accuracy of the other tasks."""
    if not isinstance(task, Contrastive):
        found: dict[str, float] = task.statistics(outputs, facts)  # type: ignore[arg-type]
        return found
    assert isinstance(facts, PairFacts), "two towers have captions"
    return embedding_statistics(*outputs, mask=facts.mask, valid=facts.valid)


def embedding_statistics(
    video_embeddings: Tensor, text_embeddings: Tensor, *, mask: Tensor, valid: Tensor
) -> dict[str, float]:
    """How the embeddings of a batch lie: lengths, cosines of right and of wrong pairs, effective ranks.

    Clips that `valid` or `mask` leave without a video or without a caption take no part, nor do masked captions,
    whatever their embeddings hold. Of the other clips the first 128 are looked at. Computed in float32 on the CPU,
    so that the numbers are the same on every device.

    Args:
        video_embeddings: (B, D), or (B, S, D): S segments, which are averaged first. Any length, any precision.
        text_embeddings: (B * K, D); rows `i * K` to `i * K + K - 1` are the candidates of clip i.
        mask: (B, K) bool, True for captions that are real and hold a known word.
        valid: (B,) bool, False for clips that were excluded.

    Returns:
        Nothing if fewer than 2 clips take part, else

        - `video_norm`, `text_norm`: mean lengths;
        - `positive_similarity`: mean over clips of the cosine of the video and the best of its own captions;
        - `negative_similarity`: mean cosine of a video and a caption of another clip, equal texts included;
        - `similarity_gap`: the first less the second;
        - `similarity_spread`: standard deviation of the cosines of all pairs;
        - `effective_rank`, `text_effective_rank`: of the videos and of the best caption of each, at most 96 rows
          of unit length, not centered: exp of the entropy of the normalized eigenvalues of the Gram matrix. From 1
          (all point the same way) to the smaller of rows and D (all directions are used alike). Roy and Vetterli,
          "The effective rank: a measure of effective dimensionality", EUSIPCO 2007, with the Gram matrix as the
          matrix whose rank is measured.

        Embeddings that are not finite give NaN in what depends on them; so does the rank of rows that are all zero.
    """
    real = mask.cpu() & valid.cpu()[:, None]
    clips = real.any(1).nonzero().flatten()[:MOST_CLIPS]
    if len(clips) < 2:
        return {}
    real = real[clips]
    videos = video_embeddings.detach()[clips.to(video_embeddings.device)].float().cpu()
    texts = text_embeddings.detach().reshape(*mask.shape, -1)[clips.to(text_embeddings.device)].float().cpu()
    if videos.ndim == 3:
        videos = videos.mean(1)
    with torch.autocast("cpu", enabled=False):
        return _statistics(videos, texts[real], own=_own_pairs(real))


def _own_pairs(real: Tensor) -> Tensor:
    """Bool (clips, real captions): True where the caption is one of the clip's own. From `real` (clips, K)."""
    owners = real.nonzero()[:, 0]
    return owners == torch.arange(len(real))[:, None]


def _statistics(videos: Tensor, texts: Tensor, own: Tensor) -> dict[str, float]:
    """As `embedding_statistics`, of float32 videos (n, D), texts (N, D) that all take part; `own` bool (n, N)."""
    video_norms, text_norms = videos.norm(dim=1), texts.norm(dim=1)
    videos, texts = _unit(videos, video_norms), _unit(texts, text_norms)
    cosines = videos @ texts.T
    positives, best = cosines.masked_fill(~own, -math.inf).max(1)
    positive, negative = positives.mean().item(), cosines[~own].mean().item()
    return {
        "video_norm": video_norms.mean().item(),
        "text_norm": text_norms.mean().item(),
        "positive_similarity": positive,
        "negative_similarity": negative,
        "similarity_gap": positive - negative,
        "similarity_spread": cosines.std(correction=0).item(),
        "effective_rank": _effective_rank(videos),
        "text_effective_rank": _effective_rank(texts[best]),
    }


def _unit(rows: Tensor, norms: Tensor) -> Tensor:
    """Rows of length 1; rows of zeros stay so; a length that float32 cannot hold gives NaN, not zeros."""
    norms = torch.where(norms.isfinite(), norms, math.nan)
    return rows / norms.clamp(min=torch.finfo(rows.dtype).tiny)[:, None]


def _effective_rank(units: Tensor) -> float:
    units = units[:MOST_ROWS]
    gram = units @ units.T
    if not gram.isfinite().all():
        return math.nan  # LAPACK raises
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    return float(torch.special.entr(eigenvalues / eigenvalues.sum()).sum().exp())


@dataclass(slots=True)
class Monitor:
    """Looks at the numbers of a run and warns, once for each illness, with what is seen and the key to turn.

    Nothing needs to be saved: a resumed run looks anew and says again what still holds.

    Attributes:
        warn: called as `warn(text, key)`; a key is used once in the life of a monitor.
        normalize: whether the loss compares embeddings at unit length.
        temperature: the fixed one; None: learned, or the loss has none.
        num_clips: clips whose embeddings are compared at once (the micro-batch, over all processes).
        num_workers: reader processes, for the advice.
        patience_steps: before this step nothing is said of collapse, constant scores and a loss at chance: fresh
            towers show all three until the warm-up is over.
        chance_loss: what the loss is for a model to which all pairs look alike, such as log(num_clips) for InfoNCE;
            None: not known.
        safe_temperatures: lowest and highest for a loss that normalizes.
    """

    warn: Callable[[str, str], None]
    _: KW_ONLY
    normalize: bool
    temperature: float | None
    num_clips: int
    num_workers: int
    patience_steps: int
    chance_loss: float | None = None
    safe_temperatures: tuple[float, float] = SAFE_TEMPERATURES
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LOSSES), init=False)
    _said: set[str] = field(default_factory=set, init=False)

    def look(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Look at a line of metrics.jsonl; `look(0, {})` before the first step says what settings alone tell.

        Args:
            step: optimizer steps so far.
            values: the line. Looked for are loss, waiting_share, masked_captions, loss_scale, logit_scale (1 /
                temperature) and those of `embedding_statistics`; what is missing or not finite is passed over.
        """
        seen = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        if "loss" in seen:
            self._losses.append(seen["loss"])
        findings = {
            "temperature": self._temperature_unsafe(seen),
            "normalize": self._not_normalized(seen),
            "loss_scale": _loss_scale_underflow(seen),
            "masked_captions": _captions_masked(seen),
        }
        if len(self._losses) > 1:  # in the first line readers are still starting
            findings["waiting"] = self._waiting(seen)
        if step >= self.patience_steps:
            findings["collapse"] = self._collapse(seen)
            findings["similarity"] = _similarity_constant(seen)
            findings["chance"] = self._at_chance(step)
        for key, text in findings.items():
            if text is not None and key not in self._said:
                self._said.add(key)
                self.warn(text, key)

    def _current_temperature(self, seen: Numbers) -> float | None:
        if self.temperature is not None:
            return self.temperature
        logit_scale = seen.get("logit_scale", 0.0)
        return 1 / logit_scale if logit_scale > 0 else None

    def _temperature_unsafe(self, seen: Numbers) -> str | None:
        temperature = self._current_temperature(seen)
        low, high = self.safe_temperatures
        # Rounded: a learned one passes through float32, and starts at an end of the range if told to.
        if not self.normalize or temperature is None or low <= round(temperature, 5) <= high:
            return None
        if temperature < low:
            why = "a few pairs outweigh all others and training becomes unstable"
        else:
            why = "right and wrong pairs score nearly alike, so little is learned"
        kind = "learned" if self.temperature is None else "fixed"
        return (
            f"the {kind} temperature is {temperature:.3g}; {low:g} to {high:g} is safe for normalized embeddings: "
            f"{why}; set task.temperature within it" + (", and keep it fixed" if kind == "learned" else "")
        )

    def _not_normalized(self, seen: Numbers) -> str | None:
        temperature = self._current_temperature(seen)
        if self.normalize or temperature is None:
            return None
        remedy = "set task.normalize=true and task.temperature=0.1"
        if temperature < 1:
            return (
                f"the temperature is {temperature:.3g} and embeddings are not normalized: a temperature below 1 is for "
                f"scores between -1 and 1, longer embeddings saturate the softmax; {remedy}, or task.temperature=1"
            )
        video_norm, text_norm = seen.get("video_norm", 0.0), seen.get("text_norm", 0.0)
        if video_norm * text_norm / temperature <= LARGEST_SCORE:
            return None
        return (
            f"embeddings are not normalized and have mean lengths of {video_norm:.3g} (videos) and {text_norm:.3g} "
            f"(captions): scores reach {video_norm * text_norm / temperature:.3g}, the softmax saturates above "
            f"{LARGEST_SCORE:g} and most pairs teach nothing; {remedy}, or lower optim.learning_rate"
        )

    def _collapse(self, seen: Numbers) -> str | None:
        ranks = {"videos": seen.get("effective_rank"), "captions": seen.get("text_effective_rank")}
        low = {what: rank for what, rank in ranks.items() if rank is not None and rank < LOWEST_RANK}
        if not low or self.num_clips < FEWEST_CLIPS:
            return None
        numbers = ", ".join(f"{rank:.2f} for {what}" for what, rank in low.items())
        return (
            f"collapse: all {' and all '.join(low)} look alike (effective rank of the embeddings {numbers}; 1 is one "
            f"direction for all, below {LOWEST_RANK} nothing can be told apart); lower optim.learning_rate, raise "
            "optim.warmup_steps, raise train.micro_batch_size (more negatives), and look with `twinreel check` "
            "whether captions differ and fit their clips"
        )

    def _at_chance(self, step: int) -> str | None:
        if self.chance_loss is None or len(self._losses) < NUM_LOSSES:
            return None
        mean = sum(self._losses) / NUM_LOSSES
        if abs(mean - self.chance_loss) > CHANCE_MARGIN * self.chance_loss:
            return None
        return (
            f"the loss is stuck at chance: {mean:.4g} over the last {NUM_LOSSES} log lines at step {step}, and "
            f"{self.chance_loss:.4g} is what a model gets to which all pairs or classes look alike; change "
            "optim.learning_rate (first 10 times lower), raise optim.warmup_steps, start from model.weights, and look "
            "with `twinreel check` whether captions or labels fit their clips"
        )

    def _waiting(self, seen: Numbers) -> str | None:
        share = seen.get("waiting_share", 0.0)
        if share <= LARGEST_WAITING_SHARE:
            return None
        return (
            f"the step waited for data {share:.0%} of its computing time; raise data.num_workers "
            f"(now {self.num_workers}), or store smaller videos (short side near the crop size)"
        )


def _similarity_constant(seen: Numbers) -> str | None:
    spread = seen.get("similarity_spread", math.inf)
    if spread >= LOWEST_SPREAD:
        return None
    lengths = f"{seen.get('video_norm', math.nan):.3g} and {seen.get('text_norm', math.nan):.3g}"
    return (
        f"all pairs score alike: the cosines of videos and captions spread by {spread:.1e} (standard deviation; "
        f"mean lengths {lengths}), so no caption finds its clip; a tower gives the same for every input: lower "
        "optim.learning_rate, start from other model.weights, and see that model.freeze leaves a fresh head to train"
    )


def _loss_scale_underflow(seen: Numbers) -> str | None:
    scale = seen.get("loss_scale", LOWEST_LOSS_SCALE)
    if scale >= LOWEST_LOSS_SCALE:
        return None
    return (
        f"the fp16 loss scale fell to {scale:.3g}: gradients overflow again and again, and each such step changes no "
        "weight; set train.precision=bf16 (or fp32), or lower optim.learning_rate"
    )


def _captions_masked(seen: Numbers) -> str | None:
    share = seen.get("masked_captions", 0.0)
    if share <= LARGEST_MASKED_SHARE:
        return None
    return (
        f"{share:.0%} of the captions take no part: they hold no known word, or a clip has fewer than "
        "task.num_candidates of them; use a model.vocabulary that fits the captions (null = built from them), lower "
        "model.min_word_count, or lower task.num_candidates"
    )
