"""MIL-NCE, holding the scores once and nothing large until the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinreel.losses.common import (
    Members,
    absent,
    check_sizes,
    check_temperature,
    prepared,
    rows_per_chunk,
    working_dtype,
)

__all__ = ["milnce"]


def milnce(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    *,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    text_ids: Tensor | None = None,
    own: Tensor | None = None,
    positives_twice: bool = False,
    normalize: bool = False,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """MIL-NCE: the best of a clip's K candidate captions should stand out from all other pairs of the batch.

    Miech et al., "End-to-End Learning of Visual Representations from Uncurated Instructional Videos",
    arXiv:1912.06430. With `x[i, j, k]` the score of video i and caption k of clip j, the loss of clip i is

        log( sum_positives + sum_negatives ) - log( sum_positives )

    where the sums are of `exp(x)`. Its positives are the pairs (video i, caption k of clip i). Its negatives are
    the pairs (video i, caption k of clip j) and (video j, caption k of clip i) for all j other than i. The result
    is the mean over the clips that contribute. It is never below 0.

    Who takes part, and what the masks, `text_ids` and `own` mean, is told in `twinreel.losses`. A caption of clip j
    whose text equals one of clip i's own is a negative nowhere with video i: not for clip i, whose video it shows,
    and not for clip j, which owns it. It does not become a positive of clip i either.

    The gradient is worked out with the value: one (B, B * K) block of scores is held meanwhile, or with `own` a
    (b, B * K) and a (B, b * K) block, and only the gradients of the embeddings live on. There is no second
    derivative.

    Args:
        video_embeddings: (B, D), floating point.
        text_embeddings: (B * K, D); rows `i * K` to `i * K + K - 1` are the candidates of clip i.
        mask: (B, K) bool, True for real captions. None: all are real.
        valid: (B,) bool, False for clips that were excluded. None: all take part.
        text_ids: (B * K,) int64, equal where texts are equal. None, as in the paper and its released code: every
            caption of another clip is a negative.
        own: (b,) int64 positions of the clips whose terms are summed. None: all.
        positives_twice: Count each positive pair twice in the first logarithm, as the released code does
            (2BK terms a clip instead of 2BK - K). The loss then cannot fall below log 2.
        normalize: Scale embeddings to unit length first. Off by default as in the paper, which uses plain dot
            products.
        temperature: Divides the scores. 1 by default: the paper has no temperature. A number must lie in 0.01 to 1
            with `normalize`, otherwise above 0; a tensor of shape () is learned and not checked.

    Returns:
        Scalar; float64 if an embedding is float64, else float32.

    Raises:
        ConfigError: Shapes or types do not fit together, or the temperature is refused.
    """
    check_sizes("milnce", video_embeddings, text_embeddings)
    check_temperature("milnce", temperature, unit=normalize, when=" with normalize=True")
    members = Members.of(
        "milnce", video_embeddings, text_embeddings, mask=mask, valid=valid, text_ids=text_ids, own=own
    )
    dtype = working_dtype(video_embeddings, text_embeddings)
    with torch.autocast(video_embeddings.device.type, enabled=False):
        videos = prepared(video_embeddings, members.valid, members, dtype, unit=normalize)
        texts = prepared(text_embeddings, members.real.flatten(), members, dtype, unit=normalize)
        if isinstance(temperature, Tensor) or temperature != 1.0:
            videos = videos / temperature
        wanted = [torch.is_grad_enabled() and embeddings.requires_grad for embeddings in (videos, texts)]
        total: Tensor = _OwnTotal.apply(videos, texts, members, positives_twice, wanted)  # type: ignore[no-untyped-call]
        return total / members.num_contributing


class _OwnTotal(torch.autograd.Function):
    """The sum of the own clips' terms. Its gradient is worked out with it, in the memory of the scores."""

    @staticmethod
    def forward(
        ctx: Any, videos: Tensor, texts: Tensor, members: Members, positives_twice: bool, wanted: list[bool]
    ) -> Tensor:
        rows, columns = _score_blocks(videos, texts, members)
        own_scores = members.own_scores(rows).masked_fill_(~members.of_own(members.real), absent(rows.dtype))
        members.hide(rows)
        if columns is not rows:
            members.hide(columns, columns=True)
        log_positives = own_scores.logsumexp(dim=1)
        of_captions = _logsumexp(columns, dim=0).view_as(own_scores)
        log_negatives = torch.logaddexp(_logsumexp(rows, dim=1), of_captions.logsumexp(dim=1))
        # log(n + N / P) with P, N the two sums and n how often the positives are counted: in this form small losses
        # keep their digits and the floor log(n) is exact.
        excess = log_negatives - log_positives
        floor = torch.full_like(excess, math.log(2.0) if positives_twice else 0.0)
        terms = torch.logaddexp(excess, floor)
        contributes = members.contributes
        if any(wanted):
            # d term / d positive is -N / (n P + N) of its share of P; in this form it keeps its digits as well.
            weight = torch.where(contributes, (excess - floor).sigmoid(), 0.0)
            log_all = torch.where(contributes, log_positives + terms, math.inf)
            _differentiate(rows, columns, log_all, own_scores.shape[1])
            members.set_own_scores(rows, -weight[:, None] * (own_scores - log_positives[:, None]).exp())
            ctx.save_for_backward(*_embedding_gradients(rows, columns, videos, texts, members, wanted))
        return torch.where(contributes, terms, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_videos, of_texts = (None if saved is None else saved * gradient for saved in ctx.saved_tensors)
        return of_videos, of_texts, None, None, None


def _score_blocks(videos: Tensor, texts: Tensor, members: Members) -> tuple[Tensor, Tensor]:
    """Own videos with all texts (b, B * K), all videos with own texts (B, b * K); one square if all are own."""
    if members.own is None:
        square = videos @ texts.T
        return square, square
    return videos[members.own] @ texts.T, videos @ _own_texts(texts, members).T


def _own_texts(texts: Tensor, members: Members) -> Tensor:
    return members.of_own(texts.view(*members.real.shape, texts.shape[1])).flatten(0, 1)


def _logsumexp(scores: Tensor, dim: int) -> Tensor:
    """Along one axis of a matrix, without a temporary of its size."""
    highest = scores.amax(dim=dim, keepdim=True)
    total = torch.zeros_like(highest)
    for chunk, peak, part, buffer in _chunks(scores, highest, total):
        part += torch.sub(chunk, peak, out=buffer).exp_().sum(dim=dim, keepdim=True)
    return (highest + total.log()).squeeze(dim)


def _chunks(scores: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time of `scores` and of the others (single rows as they are), and a buffer of their size.

    There is one buffer: a new temporary for each chunk would leave holes in the heap that add up.
    """
    size = rows_per_chunk(scores.shape[1])
    buffer = torch.empty_like(scores[:size])
    for start in range(0, len(scores), size):
        chunk = scores[start : start + size]
        parts = (other if len(other) == 1 else other[start : start + size] for other in others)
        yield chunk, *parts, buffer[: len(chunk)]


def _differentiate(rows: Tensor, columns: Tensor, log_all: Tensor, num_candidates: int) -> None:
    """In place: scores of negative pairs become the derivatives of the own clips' sum with respect to them.

    A score is in the sum of the clip whose video it has and in that of the clip whose caption it has. `log_all` (b,)
    is the logarithm of each own clip's whole sum, infinite for a clip without a term.
    """
    by_video = log_all[:, None]
    by_caption = log_all.repeat_interleave(num_candidates)[None, :]
    if columns is not rows:
        rows.sub_(by_video).exp_()
        columns.sub_(by_caption).exp_()
        return
    for chunk, of_video, of_caption, buffer in _chunks(rows, by_video, by_caption):
        torch.sub(chunk, of_caption, out=buffer).exp_()
        chunk.sub_(of_video).exp_().add_(buffer)


def _embedding_gradients(
    rows: Tensor, columns: Tensor, videos: Tensor, texts: Tensor, members: Members, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Derivatives with respect to scores -> with respect to videos (B, D) and texts (B * K, D), where wanted."""
    own, of_videos, of_texts = members.own, None, None
    if own is None:
        return rows @ texts if wanted[0] else None, rows.T @ videos if wanted[1] else None
    if wanted[0]:
        of_videos = columns @ _own_texts(texts, members)
        of_videos.index_add_(0, own, rows @ texts)
    if wanted[1]:
        of_texts = rows.T @ videos[own]
        by_clip = (*members.real.shape, videos.shape[1])
        of_own_texts = (columns.T @ videos).view(len(own), *by_clip[1:])
        of_texts.view(by_clip).index_add_(0, own, of_own_texts)
    return of_videos, of_texts
