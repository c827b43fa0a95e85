"""Losses of video-text matching: what the clips of a video say of its texts -> one scalar.

Logits are (B, C, R, K): B videos, C clips of each, R texts of each video, K outputs of the model for a pair. They are
pooled over the clips first. The loss of a video is the mean over its texts, the result the mean over the valid videos.

`valid` and `own` are those of every loss: a video that is not valid is as good as absent whatever its numbers are,
NaN included, and the results of processes that share out the videos add up to the loss of the batch, since all divide
by the number of all valid videos. So do the results of micro-batches: accumulation is a true mean. (The founding
code sums the micro-batches' losses, which multiplies the gradient by their number; only its clipping and Adam's scale
invariance hid that.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.losses.pooling import Pooling, case_of, pool_clips

__all__ = [
    "answer_binary_cross_entropy",
    "answer_cross_entropy",
    "choice_cross_entropy",
    "match_and_choice",
    "match_cross_entropy",
    "match_hinge",
    "pretraining_loss",
]

NOT_MASKED = -100  # in place of a word that need not be guessed


def match_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "lse",
) -> Tensor:
    """Softmax cross entropy of each pair: does this text belong to this video, or not.

    With `lse` this is the logarithm of the summed exponentials over all clips and both outputs, minus that over the
    clips of the right output.

    Args:
        logits: (B, C, R, 2), the second output for "matches".
        targets: (B, R), 1 where the text belongs to the video, else 0; any number type.
        valid: (B,) bool, False for videos that were excluded. None: all take part.
        own: (b,) int64 positions of the videos whose terms are summed. None: all.
        pooling: over the clips.

    Returns:
        Scalar; float64 if logits or targets are float64, else float32. 0 with gradients of 0 if no video is valid.

    Raises:
        ConfigError: shapes or types do not fit together, or a valid video's target is neither 0 nor 1.
    """
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("match_cross_entropy", logits, targets, valid, own, outputs=2)
        case.check_flags("match_cross_entropy")
        scores = functional.log_softmax(pool_clips(case.logits, pooling, 1), dim=2)
        wanted = torch.stack([1 - case.targets, case.targets], dim=2)
        return case.mean(-(wanted * scores).sum(dim=2).mean(dim=1))


def match_hinge(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "mean",
    margin: float = 0.2,
) -> Tensor:
    """Ranking loss: a text of the video should have a probability that is larger by a margin than any other's.

    The loss of a video is the mean over its (matching, other) pairs of texts of
    `max(0, margin + sigmoid(other) - sigmoid(matching))`.

    Args:
        logits: (B, C, R, 1).
        targets: (B, R), 1 where the text belongs to the video, else 0; each video has both.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.
        pooling: over the clips, before the sigmoid; `lse` is refused: its sum over clips is no logit of one video,
            more clips would make every text more probable.
        margin: above 0 and below 1.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: as for `match_cross_entropy`, the margin or the pooling is refused, or a valid video has no
            matching text or no other.
    """
    if pooling == "lse":
        raise ConfigError("match_hinge: pooling=lse refused, a sigmoid of it grows with the number of clips; use mean.")
    if not 0 < margin < 1:
        raise ConfigError(f"match_hinge: margin={margin} refused; probabilities differ by 0 to 1. 0.2 is usual.")
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("match_hinge", logits, targets, valid, own, outputs=1)
        case.check_flags("match_hinge")
        right = case.targets == 1
        case.refuse(
            "match_hinge", right.all(dim=1) | ~right.any(dim=1), "has no matching text or no other; it needs both"
        )
        chances = pool_clips(case.logits, pooling, 1).squeeze(2).sigmoid()
        pairs = right[:, :, None] & ~right[:, None, :]
        costs = functional.relu(margin + chances[:, None, :] - chances[:, :, None])
        return case.mean((costs * pairs).sum(dim=(1, 2)) / pairs.sum(dim=(1, 2)).clamp(min=1))


def choice_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "lse",
) -> Tensor:
    """Softmax cross entropy over the texts of a video: which of the R answers to choose from is right.

    Args:
        logits: (B, C, R, 1).
        targets: (B, R), 1 for the right one, else 0.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.
        pooling: over the clips.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: shapes or types do not fit together, or a valid video's targets do not sum to 1.
    """
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("choice_cross_entropy", logits, targets, valid, own, outputs=1)
        case.check_sums("choice_cross_entropy", "exactly one of the options is right")
        scores = functional.log_softmax(pool_clips(case.logits, pooling, 1).squeeze(2), dim=1)
        return case.mean(-(case.targets * scores).sum(dim=1))


def match_and_choice(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "lse",
) -> Tensor:
    """The sum of two questions to one score: which of a video's texts is right, and does each text belong to it.

    `choice_cross_entropy` learns from few videos what `match_cross_entropy` does not, but it compares the texts of one
    video only: a number that is added to all scores of a video costs nothing, and text-to-video ranks compare videos.
    The two-way cross entropy of (0, score) beside it gives the scores of all videos one zero. It is of no paper.

    Args:
        logits: (B, C, R, 1).
        targets: (B, R), 1 for the right one, else 0.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.
        pooling: over the clips.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: as for `choice_cross_entropy`.
    """
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("match_and_choice", logits, targets, valid, own, outputs=1)
        case.check_sums("match_and_choice", "exactly one of the texts is right")
        pairs = pool_clips(torch.cat([torch.zeros_like(case.logits), case.logits], dim=3), pooling, 1)
        choice = -(case.targets * functional.log_softmax(pairs[..., 1], dim=1)).sum(dim=1)
        wanted = torch.stack([1 - case.targets, case.targets], dim=2)
        match = -(wanted * functional.log_softmax(pairs, dim=2)).sum(dim=2).mean(dim=1)
        return case.mean(choice + match)


def answer_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "lse",
) -> Tensor:
    """Softmax cross entropy over a table of answers: what is the answer to the one question of each video.

    Args:
        logits: (B, C, 1, A).
        targets: (B, A), 1 for the right answer, else 0. A video whose answer is not in the table has no target: it
            must be marked in `valid`.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.
        pooling: over the clips.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: shapes or types do not fit together, or a valid video's targets do not sum to 1.
    """
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("answer_cross_entropy", logits, targets, valid, own, outputs=None)
        case.check_sums("answer_cross_entropy", "a question whose answer is not in the table must be left out (valid)")
        scores = functional.log_softmax(pool_clips(case.logits, pooling, 1).squeeze(1), dim=1)
        return case.mean(-(case.targets * scores).sum(dim=1))


def answer_binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "lse",
) -> Tensor:
    """Sigmoid cross entropy of every answer of a table, summed over the answers: the loss of VQA.

    Args:
        logits: (B, C, 1, A).
        targets: (B, A), each 0 to 1: how right an answer is. All 0: none of the table is.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.
        pooling: over the clips. The founding code has one clip here.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: shapes or types do not fit together, or a valid video's target is outside 0 to 1.
    """
    with torch.autocast(logits.device.type, enabled=False):
        case = case_of("answer_binary_cross_entropy", logits, targets, valid, own, outputs=None)
        outside = ~((case.targets >= 0) & (case.targets <= 1)).all(dim=1)
        case.refuse("answer_binary_cross_entropy", outside, "has a target outside 0 to 1")
        scores = pool_clips(case.logits, pooling, 1).squeeze(1)
        terms = functional.binary_cross_entropy_with_logits(scores, case.targets, reduction="none")
        return case.mean(terms.sum(dim=1))


def pretraining_loss(
    word_logits: Tensor,
    words: Tensor,
    pair_logits: Tensor,
    pairs: Tensor,
    *,
    valid: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Masked words plus matching: what a text and its picture are pretrained on.

    The words' part is the mean over ALL places of a text of the cross entropy, 0 where no word was masked (with 15 %
    masked this weighs it about 0.1 to the matching's 1, as in the founding code), the matching's part the cross
    entropy of the pair. Both are taken for pairs that do not match, too.

    Args:
        word_logits: (B, R, L, V), what the model says of each place.
        words: (B, R, L) int64, the word that was masked, -100 elsewhere.
        pair_logits: (B, R, 2), the second output for "matches".
        pairs: (B, R), 1 where the text belongs to the picture, else 0.
        valid: as for `match_cross_entropy`.
        own: as for `match_cross_entropy`.

    Returns:
        As for `match_cross_entropy`.

    Raises:
        ConfigError: shapes or types do not fit together, or a valid target is neither a word nor -100.
    """
    where = "pretraining_loss"
    if word_logits.ndim != 4 or words.shape != word_logits.shape[:3] or words.dtype != torch.int64:
        raise ConfigError(
            f"{where}: word_logits must be (pictures, texts, places, words) and words int64 (pictures, texts, places), "
            f"got {tuple(word_logits.shape)} and {words.dtype} of shape {tuple(words.shape)}."
        )
    if word_logits.shape[:2] != pair_logits.shape[:2]:
        raise ConfigError(
            f"{where}: word_logits of shape {tuple(word_logits.shape)} and pair_logits of shape "
            f"{tuple(pair_logits.shape)} must be of the same pictures and texts."
        )
    matching = match_cross_entropy(pair_logits[:, None], pairs, valid=valid, own=own)
    num_words = word_logits.shape[3]
    with torch.autocast(word_logits.device.type, enabled=False):
        case = case_of(where, word_logits.flatten(1, 2)[:, None], words.flatten(1), valid, own, outputs=num_words)
        known = (case.targets == NOT_MASKED) | ((case.targets >= 0) & (case.targets < num_words))
        case.refuse(where, ~known.all(dim=1), f"has a word that is neither {NOT_MASKED} nor 0 to {num_words - 1}")
        places = case.logits.squeeze(1).transpose(1, 2)
        costs = functional.cross_entropy(places, case.targets.long(), ignore_index=NOT_MASKED, reduction="none")
        return matching + case.mean(costs.mean(dim=1))
