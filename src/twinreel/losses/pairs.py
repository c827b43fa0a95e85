"""Losses of one caption a clip: symmetric cross entropy, the same over pooled segments, and two-way decisions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from twinreel.errors import ConfigError
from twinreel.losses.common import Members, check_sizes, check_temperature, prepared, working_dtype

__all__ = ["Pooling", "binary_nce", "clip_bag", "info_nce", "pooled_similarity"]

Pooling = Literal["max", "attention", "logsumexp"]


def info_nce(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    *,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    text_ids: Tensor | None = None,
    own: Tensor | None = None,
    temperature: float | Tensor = 0.07,
) -> Tensor:
    """InfoNCE: each video finds its caption among all captions of the batch, each caption its video.

    The symmetric cross entropy of CLIP, Radford et al., "Learning Transferable Visual Models From Natural Language
    Supervision", arXiv:2103.00020. With `x[i, j]` the cosine of video i and caption j over the temperature, the loss
    of clip i is

        1/2 [ logsumexp_j x[i, j] - x[i, i] ] + 1/2 [ logsumexp_j x[j, i] - x[i, i] ]

    and the result is the mean over the clips that contribute. Who takes part, and what the masks, `text_ids` and
    `own` mean, is told in `twinreel.losses`.

    Args:
        video_embeddings: (B, D), floating point; scaled to unit length here.
        text_embeddings: (B, D), one caption a clip; scaled to unit length here.
        mask: (B, 1) bool, True for real captions. None: all are real.
        valid: (B,) bool, False for clips that were excluded. None: all take part.
        text_ids: (B,) int64, equal where texts are equal. None: every caption of another clip is a negative.
        own: (b,) int64 positions of the clips whose terms are summed. None: all.
        temperature: Divides the cosines: a number in 0.01 to 1, or a tensor of shape () that is learned and not
            checked.

    Returns:
        Scalar; float64 if an embedding is float64, else float32.

    Raises:
        ConfigError: Shapes or types do not fit together, a clip has several captions, the temperature is refused.
    """
    check_sizes("info_nce", video_embeddings, text_embeddings)
    members = _pair_members("info_nce", video_embeddings, text_embeddings, mask, valid, text_ids, own)
    check_temperature("info_nce", temperature, unit=True)
    return _symmetric_cross_entropy(video_embeddings, text_embeddings, members, temperature, _cosines)


def clip_bag(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    *,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    text_ids: Tensor | None = None,
    own: Tensor | None = None,
    pooling: Pooling = "max",
    pooling_temperature: float = 0.1,
    temperature: float | Tensor = 0.07,
) -> Tensor:
    """InfoNCE over bags: a video is the bag of its segments, and a caption need fit only some of them.

    The loss of `info_nce` where the cosine of a video and a caption is pooled from those of the video's segments
    (see `pooled_similarity`). Needs a model that returns embeddings of segments.

    Args:
        video_embeddings: (B, S, D), floating point; each segment is scaled to unit length here.
        text_embeddings: (B, D), one caption a clip; scaled to unit length here.
        mask: (B, 1) bool, True for real captions. None: all are real.
        valid: (B,) bool, False for clips that were excluded. None: all take part.
        text_ids: (B,) int64, equal where texts are equal. None: every caption of another clip is a negative.
        own: (b,) int64 positions of the clips whose terms are summed. None: all.
        pooling: max, attention or logsumexp.
        pooling_temperature: How soft the pooling is, above 0; unused for max.
        temperature: Divides the pooled cosines: a number in 0.01 to 1, or a tensor of shape () that is learned and
            not checked.

    Returns:
        Scalar; float64 if an embedding is float64, else float32.

    Raises:
        ConfigError: Shapes or types do not fit together, a clip has several captions, an option is refused.
    """
    check_sizes("clip_bag", video_embeddings, text_embeddings, segments=True)
    members = _pair_members("clip_bag", video_embeddings, text_embeddings, mask, valid, text_ids, own)
    check_temperature("clip_bag", temperature, unit=True)
    _check_pooling("clip_bag", pooling, pooling_temperature)
    similarity = partial(pooled_similarity, pooling=pooling, pooling_temperature=pooling_temperature)
    return _symmetric_cross_entropy(video_embeddings, text_embeddings, members, temperature, similarity)


def pooled_similarity(
    video_segments: Tensor, text: Tensor, *, pooling: Pooling = "max", pooling_temperature: float = 0.1
) -> Tensor:
    """Similarity of videos and texts, pooled from the scores of a video's segments.

    With `x[s]` the dot product of segment s and the text and p the pooling temperature:

    - max: the best segment, `max_s x[s]`
    - attention: `sum_s w[s] x[s]` with weights `w = softmax(x / p)`
    - logsumexp: `p log mean_s exp(x[s] / p)`

    All three are the score itself for one segment, or for segments that score the same. For p towards 0 the last two
    become the first.

    Args:
        video_segments: (N, S, D), used as they are: scale them to unit length first for cosines.
        text: (Q, D), used as they are.
        pooling: max, attention or logsumexp.
        pooling_temperature: p, above 0.

    Returns:
        (N, Q).

    Raises:
        ConfigError: Shapes do not fit together, or an option is refused.
    """
    _check_pooling("pooled_similarity", pooling, pooling_temperature)
    fit = video_segments.ndim == 3 and text.ndim == 2 and video_segments.shape[2] == text.shape[1]
    if not fit or video_segments.shape[1] == 0:
        raise ConfigError(
            f"pooled_similarity: got video segments of shape {tuple(video_segments.shape)} and texts of shape "
            f"{tuple(text.shape)}; they must be (N, S, D) with at least one segment and (Q, D)."
        )
    scores = video_segments @ text.T  # (N, S, Q)
    if pooling == "max":
        return scores.amax(dim=1)
    if pooling == "attention":
        return ((scores / pooling_temperature).softmax(dim=1) * scores).sum(dim=1)
    mean = (scores / pooling_temperature).logsumexp(dim=1) - math.log(scores.shape[1])
    return mean * pooling_temperature


def binary_nce(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    *,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    text_ids: Tensor | None = None,
    own: Tensor | None = None,
    num_negatives: int = 16,
    temperature: float | Tensor = 0.07,
    negative_seed: int = 0,
) -> Tensor:
    """Binary noise contrast: whether a video and a caption belong together, decided for each pair alone.

    With `x[i, j]` the cosine of video i and caption j over the temperature, the loss of clip i is

        softplus(-x[i, i]) + mean over its negatives j of softplus(x[i, j])

    and the result is the mean over the clips that contribute. The negatives of clip i are `num_negatives` captions
    of other clips, drawn without replacement. All are taken if there are fewer, none if there is none: only the first
    term is left then. Who takes part, and what the masks, `text_ids` and `own` mean, is told in `twinreel.losses`.

    Args:
        video_embeddings: (B, D), floating point; scaled to unit length here.
        text_embeddings: (B, D), one caption a clip; scaled to unit length here.
        mask: (B, 1) bool, True for real captions. None: all are real.
        valid: (B,) bool, False for clips that were excluded. None: all take part.
        text_ids: (B,) int64, equal where texts are equal. None: every caption of another clip may be a negative.
        own: (b,) int64 positions of the clips whose terms are summed. None: all.
        num_negatives: Negative captions a clip, at least 1.
        temperature: Divides the cosines: a number in 0.01 to 1, or a tensor of shape () that is learned and not
            checked.
        negative_seed: With the clip's position, B and the masks it decides the negatives: another one for each batch,
            the same in every process.

    Returns:
        Scalar; float64 if an embedding is float64, else float32.

    Raises:
        ConfigError: Shapes or types do not fit together, a clip has several captions, an option is refused.
    """
    check_sizes("binary_nce", video_embeddings, text_embeddings)
    members = _pair_members("binary_nce", video_embeddings, text_embeddings, mask, valid, text_ids, own)
    check_temperature("binary_nce", temperature, unit=True)
    if num_negatives < 1:
        raise ConfigError(f"binary_nce: num_negatives={num_negatives} refused; a clip needs at least 1. 16 is usual.")
    places, drawn = _draw_negatives(members, num_negatives, negative_seed)
    with torch.autocast(video_embeddings.device.type, enabled=False):
        videos, texts = _unit_vectors(video_embeddings, text_embeddings, members)
        scores = _cosines(members.of_own(videos), texts) / temperature
        accepted = _softplus(-members.own_scores(scores).squeeze(1))
        rejected = torch.where(drawn, _softplus(scores.gather(1, places)), 0.0).sum(dim=1)
        return members.mean(accepted + rejected / drawn.sum(dim=1).clamp(min=1))


def _draw_negatives(members: Members, num_negatives: int, seed: int) -> tuple[Tensor, Tensor]:
    """For each own clip the positions of its negative captions, and which of them count: both (b, n)."""
    real = members.real[:, 0].cpu().numpy()
    codes = None if members.codes is None else members.codes[:, 0].cpu().numpy()
    clips = range(len(real)) if members.own is None else members.own.tolist()
    places = np.zeros((len(clips), min(num_negatives, len(real))), dtype=np.int64)
    drawn = np.zeros(places.shape, dtype=np.bool_)
    for row, clip in enumerate(clips):
        if not real[clip]:
            continue
        # A whole permutation, though few are taken: what is left out does not shift the draw of the others.
        key = hashlib.blake2b(f"binary_nce:{seed}:{clip}".encode(), digest_size=16).digest()
        order = np.random.Generator(np.random.PCG64(int.from_bytes(key, "big"))).permutation(len(real))
        allowed = real[order] & (order != clip)
        if codes is not None and codes[clip] > 0:
            allowed &= codes[order] != codes[clip]
        chosen = order[allowed][:num_negatives]
        places[row, : len(chosen)] = chosen
        drawn[row, : len(chosen)] = True
    device = members.real.device
    return torch.from_numpy(places).to(device), torch.from_numpy(drawn).to(device)


def _symmetric_cross_entropy(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    members: Members,
    temperature: float | Tensor,
    similarity: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The loss of `info_nce` for videos of any form that `similarity` can compare with texts."""
    with torch.autocast(text_embeddings.device.type, enabled=False):
        videos, texts = _unit_vectors(video_embeddings, text_embeddings, members)
        rows = columns = similarity(members.of_own(videos), texts) / temperature
        if members.own is not None:
            columns = similarity(videos, members.of_own(texts)) / temperature
        positives = members.own_scores(rows).squeeze(1)
        members.hide(rows)
        if columns is not rows:
            members.hide(columns, columns=True)
        # softplus(log N - x) is log(exp(x) + N) - x, and keeps the digits of small losses.
        to_text = _softplus(rows.logsumexp(dim=1) - positives)
        to_video = _softplus(columns.logsumexp(dim=0) - positives)
        return members.mean((to_text + to_video) / 2)


def _cosines(videos: Tensor, texts: Tensor) -> Tensor:
    return videos @ texts.T


def _softplus(values: Tensor) -> Tensor:
    return torch.logaddexp(values, torch.zeros_like(values))  # functional.softplus drops digits above 20


def _unit_vectors(video_embeddings: Tensor, text_embeddings: Tensor, members: Members) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(video_embeddings, text_embeddings)
    videos = prepared(video_embeddings, members.valid, members, dtype, unit=True)
    return videos, prepared(text_embeddings, members.real.flatten(), members, dtype, unit=True)


def _pair_members(
    where: str,
    videos: Tensor,
    texts: Tensor,
    mask: Tensor | None,
    valid: Tensor | None,
    text_ids: Tensor | None,
    own: Tensor | None,
) -> Members:
    """The members of a batch with one caption a clip; more are refused."""
    num_candidates = texts.shape[0] // videos.shape[0]
    if num_candidates != 1:
        raise ConfigError(
            f"{where}: {num_candidates} captions a clip; it takes one. Set task.num_candidates=1, or take "
            "task.loss=milnce, which takes several."
        )
    return Members.of(where, videos, texts, mask=mask, valid=valid, text_ids=text_ids, own=own)


def _check_pooling(where: str, pooling: str, pooling_temperature: float) -> None:
    if pooling not in get_args(Pooling):
        raise ConfigError(f"{where}: pooling={pooling!r} is unknown; there are: {', '.join(get_args(Pooling))}.")
    if not (math.isfinite(pooling_temperature) and pooling_temperature > 0):
        raise ConfigError(
            f"{where}: pooling_temperature={pooling_temperature} refused; it must be above 0. 0.1 is a safe choice."
        )
