"""Losses: tensors already gathered from every process -> one scalar.

A loss here knows nothing of processes, recipes or data sets. Similarities are computed in float32 at least,
whatever the precision of the towers, and autocast is switched off inside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError

__all__ = ["LOSSES", "equal_texts", "milnce"]

NORMALIZED_TEMPERATURE_RANGE = (0.01, 1.0)


def milnce(
    video_embeddings: Tensor,
    text_embeddings: Tensor,
    *,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    same_text: Tensor | None = None,
    positives_twice: bool = False,
    normalize: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """MIL-NCE: the best of a clip's K candidate captions should stand out from all other pairs of the batch.

    Miech et al., "End-to-End Learning of Visual Representations from Uncurated Instructional Videos",
    arXiv:1912.06430. With `x[i, j, k]` the score of video i and caption k of clip j, the loss of clip i is

        log( sum_positives + sum_negatives ) - log( sum_positives )

    where the sums are of `exp(x)`. Its positives are the pairs (video i, caption k of clip i). Its negatives are
    the pairs (video i, caption k of clip j) and (video j, caption k of clip i) for all j other than i. The result
    is the mean over the clips that contribute. It is never below 0.

    Who takes part:

    - A caption that `mask` marks as not real (padding, no known word) is in no pair at all.
    - A clip that `valid` marks as False is in no pair at all, neither its video nor its captions. What its
      embeddings hold does not matter, NaN included.
    - A valid clip without a real caption contributes no term to the mean; its video stays a negative for the
      captions of the other clips.
    - A pair (video i, caption c of another clip) marked in `same_text` is a negative nowhere: not for clip i, whose
      video it shows, and not for the clip that owns caption c. The pair does not become a positive either. Entries
      of `same_text` at a clip's own captions are ignored: positives stay positives.
    - If no clip contributes the loss is 0 with gradients of exactly 0, never NaN.

    Non-finite embeddings of clips that do take part are not hidden: the loss or its gradient is then not finite.

    Args:
        video_embeddings: (B, D), floating point.
        text_embeddings: (B * K, D); rows `i * K` to `i * K + K - 1` are the candidates of clip i.
        mask: (B, K) bool, True for real captions. None: all are real.
        valid: (B,) bool, False for clips that were excluded. None: all take part.
        same_text: (B, B * K) bool, True where a caption of another clip has a text equal to one of clip i's own
            (see `equal_texts`). None, as in the paper and its released code: every other caption is a negative.
        positives_twice: Count each positive pair twice in the first logarithm, as the released code does
            (2BK terms a clip instead of 2BK - K). The loss then cannot fall below log 2.
        normalize: Scale embeddings to unit length first. Off by default as in the paper, which uses plain dot
            products.
        temperature: Divides the scores. 1 by default: the paper has no temperature. With `normalize` it must lie
            in 0.01 to 1, otherwise above 0.

    Returns:
        Scalar; float64 if an embedding is float64, else float32.

    Raises:
        ConfigError: Shapes or types do not fit together, or the temperature is refused.
    """
    num_clips, num_candidates = _milnce_sizes(video_embeddings, text_embeddings)
    _check_temperature(temperature, normalize)
    device = video_embeddings.device
    clip_valid = _flags("valid", valid, (num_clips,), device)
    caption_real = _flags("mask", mask, (num_clips, num_candidates), device) & clip_valid[:, None]
    equal = None
    if same_text is not None:
        equal = _flags("same_text", same_text, (num_clips, num_clips * num_candidates), device)

    dtype = torch.promote_types(torch.promote_types(video_embeddings.dtype, text_embeddings.dtype), torch.float32)
    with torch.autocast(device.type, enabled=False):
        videos = _ready(video_embeddings.to(dtype), clip_valid, normalize) / temperature
        texts = _ready(text_embeddings.to(dtype), caption_real.flatten(), normalize)
        is_negative = _negative_pairs(clip_valid, caption_real, equal)
        log_positives, log_negatives = _log_sums(videos, texts, caption_real, is_negative)
        # log(n + N / P) with P, N the two sums and n how often the positives are counted: in this form small losses
        # keep their digits and the floor log(n) is exact.
        floor = torch.full_like(log_positives, math.log(2.0) if positives_twice else 0.0)
        clip_losses = torch.logaddexp(log_negatives - log_positives, floor)
        contributes = caption_real.any(dim=1)
        total = torch.where(contributes, clip_losses, 0.0).sum()
        return total / contributes.sum().clamp(min=1)


def equal_texts(captions: Sequence[Sequence[str]], mask: Tensor | None = None) -> Tensor:
    """Which captions of other clips say the same as one of a clip's own, for `milnce(same_text=...)`.

    Texts are compared after case folding, with surrounding space removed and inner space collapsed; nothing else
    (punctuation, spelling) is ignored.

    Args:
        captions: B lists of K sentences, in the order of the text embeddings.
        mask: (B, K) bool of real captions; others equal nothing. None: all are real.

    Returns:
        Bool (B, B * K) on the CPU: True at (i, c) where caption c belongs to another clip than i and its text
        equals the text of a caption of clip i.

    Raises:
        ConfigError: The clips have different numbers of captions, or `mask` has another shape.
    """
    num_clips = len(captions)
    num_candidates = len(captions[0]) if captions else 0
    for clip, sentences in enumerate(captions):
        if len(sentences) != num_candidates:
            raise ConfigError(
                f"equal_texts: clip {clip} has {len(sentences)} captions and clip 0 has {num_candidates}; "
                "every clip needs the same number. Pad the shorter lists and mark the padding in mask."
            )
    real = _flags("mask", mask, (num_clips, num_candidates), torch.device("cpu"), where="equal_texts")
    is_real = real.flatten().tolist()
    places: dict[str, list[int]] = defaultdict(list)
    for clip, sentences in enumerate(captions):
        for k, sentence in enumerate(sentences):
            if is_real[clip * num_candidates + k]:
                places[" ".join(sentence.casefold().split())].append(clip * num_candidates + k)
    equal = torch.zeros(num_clips, num_clips * num_candidates, dtype=torch.bool)
    for positions in places.values():
        if len(positions) > 1:
            columns = torch.tensor(positions)
            equal[(columns // num_candidates)[:, None], columns[None, :]] = True
    own = torch.eye(num_clips, dtype=torch.bool).repeat_interleave(num_candidates, dim=1)
    return equal & ~own


def _ready(embeddings: Tensor, takes_part: Tensor, normalize: bool) -> Tensor:
    """Rows that take no part become 0, so that not even a NaN in them reaches a score or a gradient."""
    embeddings = torch.where(takes_part[:, None], embeddings, 0.0)
    return functional.normalize(embeddings, dim=1) if normalize else embeddings


def _negative_pairs(valid: Tensor, real: Tensor, same_text: Tensor | None) -> Tensor:
    """Bool (B, B, K): True at (i, j, k) where video i and caption k of clip j are a pair that should not match."""
    num_clips, num_candidates = real.shape
    other = ~torch.eye(num_clips, dtype=torch.bool, device=real.device)
    negative = (other & valid[:, None])[:, :, None] & real[None, :, :]
    if same_text is not None:
        negative &= ~same_text.view(num_clips, num_clips, num_candidates)
    return negative


def _log_sums(videos: Tensor, texts: Tensor, real: Tensor, is_negative: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of each clip's sum of exp(score) over its positives and over its negatives, both (B,)."""
    num_clips, num_candidates = real.shape
    # A finite stand-in for minus infinity: whether a sum is empty (a clip alone, a clip without captions) then never
    # turns on inf - inf = NaN, forward or backward. Halved so that differences cannot overflow.
    nothing = torch.finfo(videos.dtype).min / 2
    own = torch.einsum("id,ikd->ik", videos, texts.view(num_clips, num_candidates, -1))
    log_positives = own.masked_fill(~real, nothing).logsumexp(dim=1)
    pairs = (videos @ texts.T).view(num_clips, num_clips, num_candidates)
    pairs = pairs.masked_fill_(~is_negative, nothing)  # in place: this is the one large tensor
    rows = pairs.logsumexp(dim=(1, 2))
    columns = pairs.logsumexp(dim=(0, 2))
    return log_positives, torch.logaddexp(rows, columns)


def _milnce_sizes(videos: Tensor, texts: Tensor) -> tuple[int, int]:
    """The number of clips and of candidates per clip, after checking that the embeddings fit together."""
    for name, embeddings in (("video_embeddings", videos), ("text_embeddings", texts)):
        if embeddings.ndim != 2 or not embeddings.is_floating_point():
            raise ConfigError(
                f"milnce: {name} must be a floating-point matrix (rows, D), "
                f"got {embeddings.dtype} of shape {tuple(embeddings.shape)}."
            )
    if videos.shape[1] != texts.shape[1]:
        raise ConfigError(
            f"milnce: video_embeddings have {videos.shape[1]} dimensions and text_embeddings {texts.shape[1]}; "
            "both towers must end in the same space. Give them the same embedding_size."
        )
    num_clips, num_texts = videos.shape[0], texts.shape[0]
    if num_clips == 0:
        raise ConfigError("milnce: the batch is empty (0 video embeddings); it needs at least one clip.")
    if num_texts == 0 or num_texts % num_clips:
        below = num_texts - num_texts % num_clips
        nearest = f"{below} or {below + num_clips}" if below else f"{num_clips}"
        raise ConfigError(
            f"milnce: {num_texts} text embeddings for {num_clips} clips; every clip needs the same number of "
            f"candidates, so the rows must be a multiple of {num_clips} (nearest: {nearest}). "
            "Pad the captions of a clip and mark the padding in mask."
        )
    return num_clips, num_texts // num_clips


def _flags(
    name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device, where: str = "milnce"
) -> Tensor:
    """A mask, checked and on the device of the embeddings; all True if not given."""
    if value is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if value.dtype != torch.bool or tuple(value.shape) != shape:
        raise ConfigError(
            f"{where}: {name} must be bool of shape {shape}, got {value.dtype} of shape {tuple(value.shape)}."
        )
    return value.to(device)


def _check_temperature(temperature: float, normalize: bool) -> None:
    """Refuse temperatures at which training cannot work."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"milnce: temperature={temperature} refused; it divides the scores and must be above 0.")
    low, high = NORMALIZED_TEMPERATURE_RANGE
    if normalize and not low <= temperature <= high:
        raise ConfigError(
            f"milnce: temperature={temperature} refused with normalize=True; allowed are {low} to {high} "
            "(scores of unit vectors lie in -1 to 1). 0.05 to 0.2 is a safe choice."
        )


# The keyword-only parameters of a loss, but for the masks, are the options of the recipe's task section.
LOSSES: dict[str, Callable[..., Tensor]] = {"milnce": milnce}
