"""Losses: tensors already gathered from every process -> one scalar.

A loss here knows nothing of processes, recipes or data sets. Those of classifiers (`CLASS_LOSSES`) and of models that
match texts with videos (`MATCHING_LOSSES`, by what is wanted of such a model) are called

    loss(logits, targets, *, valid=None, own=None, **options)

and all others

    loss(video_embeddings, text_embeddings, *, mask=None, valid=None, text_ids=None, own=None, **options)

with the embeddings of B clips and of the K captions of each. Similarities are computed in float32 at least, whatever
the precision of the towers, and autocast is switched off inside.

Who takes part:

- A caption that `mask` marks as not real (padding, no known word) is in no pair at all.
- A clip that `valid` marks as False is in no pair at all, neither its video nor its captions. What its embeddings
  hold does not matter, NaN included.
- A valid clip without a real caption contributes no term to the mean; its video stays a negative for the captions of
  the other clips, where a loss compares captions with videos.
- A caption of another clip whose `text_ids` equals that of one of clip i's own real captions is a negative nowhere
  with video i.
- If no clip contributes the loss is 0 with gradients of exactly 0, never NaN.

Non-finite embeddings of clips that do take part are not hidden: the loss or its gradient is then not finite.

`own` names the clips for which a process answers. The result is the sum of their terms over the number of contributing
clips of the whole batch: the results of processes that share out the clips add up to the loss of the batch, and so do
their gradients with respect to all embeddings. Only the own clips' rows and columns of scores are computed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twinreel.losses.classes import binary_cross_entropy, cross_entropy
from twinreel.losses.common import text_ids
from twinreel.losses.matching import (
    answer_binary_cross_entropy,
    answer_cross_entropy,
    choice_cross_entropy,
    match_and_choice,
    match_cross_entropy,
    match_hinge,
    pretraining_loss,
)
from twinreel.losses.milnce import milnce
from twinreel.losses.pairs import binary_nce, clip_bag, info_nce, pooled_similarity
from twinreel.losses.pooling import pool_clips

__all__ = [
    "CLASS_LOSSES",
    "LOSSES",
    "MATCHING_LOSSES",
    "SEGMENT_LOSSES",
    "answer_binary_cross_entropy",
    "answer_cross_entropy",
    "binary_cross_entropy",
    "binary_nce",
    "choice_cross_entropy",
    "clip_bag",
    "cross_entropy",
    "info_nce",
    "match_and_choice",
    "match_cross_entropy",
    "match_hinge",
    "milnce",
    "pool_clips",
    "pooled_similarity",
    "pretraining_loss",
    "text_ids",
]

# The keyword-only parameters of a loss, but for mask, valid, text_ids, own and negative_seed, are the options of the
# recipe's task section.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "milnce": milnce,
    "info_nce": info_nce,
    "clip_bag": clip_bag,
    "binary_nce": binary_nce,
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "match_cross_entropy": match_cross_entropy,
    "match_hinge": match_hinge,
    "match_and_choice": match_and_choice,
    "choice_cross_entropy": choice_cross_entropy,
    "answer_cross_entropy": answer_cross_entropy,
    "answer_binary_cross_entropy": answer_binary_cross_entropy,
}
# Losses of classifiers: logits and targets (B, C).
CLASS_LOSSES: tuple[Callable[..., Tensor], ...] = (cross_entropy, binary_cross_entropy)
# Names of the losses of pairs of a video and a text, by the goal, the usual one first: logits (B, C, R, K).
MATCHING_LOSSES: dict[str, tuple[str, ...]] = {
    "retrieval": ("match_cross_entropy", "match_hinge", "match_and_choice", "choice_cross_entropy"),
    "multiple_choice": ("choice_cross_entropy",),
    "question_answering": ("answer_cross_entropy", "answer_binary_cross_entropy"),
}
# Losses whose videos are embeddings of segments, (B, S, D).
SEGMENT_LOSSES: tuple[Callable[..., Tensor], ...] = (clip_bag,)
