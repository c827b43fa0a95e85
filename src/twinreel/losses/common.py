"""What every loss needs: sizes and masks that fit together, who takes part, and which texts are equal."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twinreel.errors import ConfigError

__all__ = [
    "Members",
    "absent",
    "check_sizes",
    "check_temperature",
    "prepared",
    "rows_per_chunk",
    "text_ids",
    "working_dtype",
]

NORMALIZED_TEMPERATURE_RANGE = (0.01, 1.0)
MATRIX, SEGMENTS = "a floating-point matrix (rows, D)", "floating-point embeddings of segments (rows, S, D)"
CHUNK_ELEMENTS = 2**19  # of a temporary; 2 MiB in float32 stays in a core's cache or near it


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who takes part in a batch of B clips with K captions each, and for which clips this process answers.

    Attributes:
        valid: (B,) bool.
        real: (B, K) bool, real captions of valid clips.
        everyone: Whether `valid` and `real` are True throughout: nothing has to be hidden then.
        codes: (B, K) int64, equal where texts are equal and 0 where no other real caption says the same. None: no
            two do.
        own: (b,) int64 positions of the clips whose terms are wanted. None: of all.
    """

    valid: Tensor
    real: Tensor
    everyone: bool
    codes: Tensor | None
    own: Tensor | None

    @classmethod
    def of(
        cls,
        where: str,
        videos: Tensor,
        texts: Tensor,
        *,
        mask: Tensor | None,
        valid: Tensor | None,
        text_ids: Tensor | None,
        own: Tensor | None,
    ) -> Members:
        """The members of a batch whose sizes are checked already; raises ConfigError for masks that do not fit."""
        num_clips, device = videos.shape[0], videos.device
        num_candidates = texts.shape[0] // num_clips
        clip_valid = flags_of(where, "valid", valid, (num_clips,), device)
        real = flags_of(where, "mask", mask, (num_clips, num_candidates), device) & clip_valid[:, None]
        unmasked = mask is None and valid is None
        return cls(
            valid=clip_valid,
            real=real,
            everyone=unmasked or bool(real.all()),
            codes=None if text_ids is None else _codes(where, text_ids, real),
            own=None if own is None else positions_of(where, own, num_clips, device),
        )

    @property
    def contributes(self) -> Tensor:
        """(b,) bool: own clips with a term, which are valid and have a real caption."""
        return self.of_own(self.real).any(dim=1)

    @property
    def num_contributing(self) -> Tensor:
        """Scalar: how many clips of the whole batch have a term, at least 1 so that it can divide."""
        return self.real.any(dim=1).sum().clamp(min=1)

    def of_own(self, rows: Tensor) -> Tensor:
        """The own clips' rows of (B, ...); `rows` itself if all are own."""
        return rows if self.own is None else rows[self.own]

    def mean(self, terms: Tensor) -> Tensor:
        """Own clips' terms (b,) -> their sum over the number of clips of the whole batch that contribute."""
        return torch.where(self.contributes, terms, 0.0).sum() / self.num_contributing

    def own_scores(self, scores: Tensor) -> Tensor:
        """(b, K), a copy: the own clips' scores with their own captions, out of (b, B * K) own videos, all captions."""
        return self._by_clip(scores)[self._own_pairs(columns=False)]

    def set_own_scores(self, scores: Tensor, values: Tensor) -> None:
        """Write what `own_scores` reads."""
        self._by_clip(scores)[self._own_pairs(columns=False)] = values

    def hide(self, scores: Tensor, *, columns: bool = False) -> None:
        """In place, make `absent` of every score that is not one of a negative pair.

        These are a clip's video with its own captions, whoever does not take part, and captions whose text equals
        one of the video's own captions.

        Args:
            scores: (b, B * K) own videos against all captions.
            columns: `scores` is (B, b * K) instead: all videos against the own clips' captions.
        """
        nothing = absent(scores.dtype)
        if not self.everyone:
            valid, real = (self.valid, self.of_own(self.real)) if columns else (self.of_own(self.valid), self.real)
            scores.masked_fill_(~real.flatten(), nothing)
            scores.masked_fill_(~valid[:, None], nothing)
        if self.codes is not None:
            own_codes = self.of_own(self.codes)
            _hide_equal_texts(scores, *((self.codes, own_codes) if columns else (own_codes, self.codes)))
        self._by_clip(scores)[self._own_pairs(columns=columns)] = nothing

    def _by_clip(self, scores: Tensor) -> Tensor:
        num_candidates = self.real.shape[1]
        return scores.view(scores.shape[0], scores.shape[1] // num_candidates, num_candidates)

    def _own_pairs(self, *, columns: bool) -> tuple[Tensor, Tensor]:
        """Where the own clips meet their own captions: (row, column) of `_by_clip`."""
        if self.own is None:
            everyone = torch.arange(len(self.real), device=self.real.device)
            return everyone, everyone
        here = torch.arange(len(self.own), device=self.own.device)
        return (self.own, here) if columns else (here, self.own)


def text_ids(captions: Sequence[Sequence[str]]) -> Tensor:
    """A number for each caption's text, for the argument `text_ids` of every loss.

    Texts are compared after case folding, with surrounding space removed and inner space collapsed; nothing else
    (punctuation, spelling) is ignored. The numbers are hashes of 63 bits: they depend on the text alone, so those of
    several processes can be gathered and compared.

    Args:
        captions: B lists of K sentences, in the order of the text embeddings.

    Returns:
        (B * K,) int64 on the CPU, at least 0.

    Raises:
        ConfigError: The clips have different numbers of captions.
    """
    num_candidates = len(captions[0]) if captions else 0
    for clip, sentences in enumerate(captions):
        if len(sentences) != num_candidates:
            raise ConfigError(
                f"text_ids: clip {clip} has {len(sentences)} captions and clip 0 has {num_candidates}; "
                "every clip needs the same number. Pad the shorter lists and mark the padding in mask."
            )
    return torch.tensor([_text_id(sentence) for sentences in captions for sentence in sentences], dtype=torch.int64)


def _text_id(sentence: str) -> int:
    text = " ".join(sentence.casefold().split())
    # A lone surrogate (half a character out of a broken file) is a text as well.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def absent(dtype: torch.dtype) -> float:
    """A finite stand-in for minus infinity.

    Whether a sum is empty (a clip alone, a clip without captions) then never turns on inf - inf = NaN, forward or
    backward. Halved so that differences cannot overflow.
    """
    return torch.finfo(dtype).min / 2


def rows_per_chunk(row_elements: int) -> int:
    """How many rows a temporary may have."""
    return max(1, CHUNK_ELEMENTS // max(1, row_elements))


def working_dtype(videos: Tensor, texts: Tensor) -> torch.dtype:
    """float64 if an embedding is float64, else float32."""
    return torch.promote_types(torch.promote_types(videos.dtype, texts.dtype), torch.float32)


def prepared(embeddings: Tensor, takes_part: Tensor, members: Members, dtype: torch.dtype, *, unit: bool) -> Tensor:
    """Embeddings as they are multiplied: of `dtype`, 0 where they take no part, at unit length if wanted.

    Zeros keep even a NaN of an excluded row out of scores and gradients. Nothing is copied without need.

    Args:
        embeddings: (rows, ..., D).
        takes_part: (rows,) bool.
        members: who takes part at all.
        dtype: see `working_dtype`.
        unit: scale to unit length along the last axis.
    """
    embeddings = embeddings.to(dtype)
    if not members.everyone:
        embeddings = torch.where(takes_part.view(-1, *[1] * (embeddings.ndim - 1)), embeddings, 0.0)
    return functional.normalize(embeddings, dim=-1) if unit else embeddings


def check_sizes(where: str, videos: Tensor, texts: Tensor, *, segments: bool = False) -> None:
    """Raise ConfigError unless (B, D) videos, or (B, S, D) with `segments`, and (B * K, D) texts fit together."""
    _check_embeddings(where, "video_embeddings", videos, SEGMENTS if segments else MATRIX)
    _check_embeddings(where, "text_embeddings", texts, MATRIX)
    if videos.shape[-1] != texts.shape[1]:
        raise ConfigError(
            f"{where}: video_embeddings have {videos.shape[-1]} dimensions and text_embeddings {texts.shape[1]}; "
            "both towers must end in the same space. Give them the same embedding_size."
        )
    num_clips, num_texts = videos.shape[0], texts.shape[0]
    if num_clips == 0:
        raise ConfigError(f"{where}: the batch is empty (0 video embeddings); it needs at least one clip.")
    if segments and videos.shape[1] == 0:
        raise ConfigError(f"{where}: the videos have 0 segments; each needs at least one.")
    if num_texts == 0 or num_texts % num_clips:
        below = num_texts - num_texts % num_clips
        nearest = f"{below} or {below + num_clips}" if below else f"{num_clips}"
        raise ConfigError(
            f"{where}: {num_texts} text embeddings for {num_clips} clips; every clip needs the same number of "
            f"candidates, so the rows must be a multiple of {num_clips} (nearest: {nearest}). "
            "Pad the captions of a clip and mark the padding in mask."
        )


def check_temperature(where: str, temperature: float | Tensor, *, unit: bool, when: str = "") -> None:
    """Refuse temperatures at which training cannot work. A tensor is learned: only its shape is checked.

    Args:
        where: the loss.
        temperature: what divides the scores.
        unit: whether these are scores of unit vectors.
        when: said after "refused", for a loss where unit vectors are a choice.
    """
    if isinstance(temperature, Tensor):
        if temperature.ndim != 0 or not temperature.is_floating_point():
            raise ConfigError(
                f"{where}: a temperature that is a tensor must be one floating-point number of shape (), got "
                f"{temperature.dtype} of shape {tuple(temperature.shape)}. Take temperature.squeeze()."
            )
        return
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"{where}: temperature={temperature} refused; it divides the scores and must be above 0.")
    low, high = NORMALIZED_TEMPERATURE_RANGE
    if unit and not low <= temperature <= high:
        raise ConfigError(
            f"{where}: temperature={temperature} refused{when}; allowed are {low} to {high} "
            "(scores of unit vectors lie in -1 to 1). 0.05 to 0.2 is a safe choice."
        )


def _check_embeddings(where: str, name: str, embeddings: Tensor, wanted: str) -> None:
    if embeddings.ndim != (3 if wanted == SEGMENTS else 2) or not embeddings.is_floating_point():
        raise ConfigError(
            f"{where}: {name} must be {wanted}, got {embeddings.dtype} of shape {tuple(embeddings.shape)}."
        )


def flags_of(where: str, name: str, value: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A mask, checked and on the device of the embeddings; all True if not given."""
    if value is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if value.dtype != torch.bool or tuple(value.shape) != shape:
        raise ConfigError(
            f"{where}: {name} must be bool of shape {shape}, got {value.dtype} of shape {tuple(value.shape)}."
        )
    return value.to(device)


def positions_of(where: str, own: Tensor, num_clips: int, device: torch.device) -> Tensor | None:
    """`Members.own`; all clips in any order are None, for which less has to be computed."""
    if own.dtype != torch.int64 or own.ndim != 1:
        raise ConfigError(f"{where}: own must be int64 of shape (b,), got {own.dtype} of shape {tuple(own.shape)}.")
    if len(own) and not 0 <= int(own.min()) <= int(own.max()) < num_clips:
        raise ConfigError(
            f"{where}: own has positions from {int(own.min())} to {int(own.max())} and the batch has {num_clips} "
            f"clips; positions of 0 to {num_clips - 1} are allowed."
        )
    if len(set(own.tolist())) != len(own):
        raise ConfigError(f"{where}: own names a clip twice; each clip's term counts once. Leave the repetition out.")
    return None if len(own) == num_clips else own.to(device)


def _codes(where: str, ids: Tensor, real: Tensor) -> Tensor | None:
    """`Members.codes` of text ids (B * K,)."""
    if ids.dtype != torch.int64 or tuple(ids.shape) != (real.numel(),):
        raise ConfigError(
            f"{where}: text_ids must be int64 of shape ({real.numel()},), got {ids.dtype} of shape "
            f"{tuple(ids.shape)}. twinreel.losses.text_ids makes them of the captions."
        )
    ids = ids.to(real.device).view_as(real)
    _, places, counts = torch.unique(ids[real], return_inverse=True, return_counts=True)
    repeated = counts[places] > 1
    if not repeated.any():
        return None
    codes = torch.zeros_like(ids)
    codes[real] = torch.where(repeated, places + 1, 0)
    return codes


def _hide_equal_texts(scores: Tensor, video_codes: Tensor, text_codes: Tensor) -> None:
    """In place: the scores of a video with every text that equals one of its own captions become `absent`.

    Args:
        scores: (n, m * K).
        video_codes: (n, K), those of the own captions of each row's video.
        text_codes: (m, K).
    """
    columns = text_codes.flatten().nonzero().squeeze(1)
    said = text_codes.flatten()[columns]
    rows = (video_codes > 0).any(dim=1).nonzero().squeeze(1)
    # In chunks: with many repetitions, the comparison of all rows would be larger than the scores.
    for chunk in torch.split(rows, rows_per_chunk(video_codes.shape[1] * len(columns))):
        equal = (video_codes[chunk][:, :, None] == said).any(dim=1)
        row, column = equal.nonzero(as_tuple=True)
        scores[chunk[row], columns[column]] = absent(scores.dtype)
