"""Two networks into one space, and what any pair of towers must offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing
from twinreel.text import Vocabulary

__all__ = ["TwoTowers", "VideoTextModel", "check_towers"]


@runtime_checkable
class VideoTextModel(Protocol):
    """What twinreel asks of a pair of towers, its own or a user's."""

    preprocessing: Preprocessing

    def encode_video(self, video: Tensor) -> Tensor:
        """Embeddings (B, D) of a float video (B, 3, T, H, W)."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embeddings (N, D) of N sentences."""


class TwoTowers(nn.Module):
    """A video network and a text network with one joint space; embeddings are not normalized.

    State-dict keys are those of the towers behind `video_tower.` and `text_tower.`.

    Args:
        video_tower: float (B, 3, T, H, W) -> (B, D), with `forward_features`, and with `forward_segments` -> (B, S, D)
            if it can tell segments of time apart.
        text_tower: int64 (N, W) -> (N, D); None for a model that cannot read text.
        preprocessing: what the video network wants.
        vocabulary: the words behind the ids; None leaves `encode_text` to tokens.
        max_words: length to which sentences are cut and padded unless said otherwise.

    Raises:
        ConfigError: the towers end in spaces of different size, or max_words is below 1.
    """

    # What weights_scope="backbone" leaves at its start values: both ways into the joint space, hence all of the text.
    head_prefixes: ClassVar[tuple[str, ...]] = ("video_tower.fc.", "text_tower.")

    def __init__(
        self,
        *,
        video_tower: nn.Module,
        text_tower: nn.Module | None,
        preprocessing: Preprocessing,
        vocabulary: Vocabulary | None = None,
        max_words: int = 30,
    ) -> None:
        super().__init__()
        sizes = [getattr(tower, "embedding_size", None) for tower in (video_tower, text_tower)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError(f"the towers end in different spaces: video {sizes[0]}, text {sizes[1]}")
        if max_words < 1:
            raise ConfigError(f"max_words must be at least 1; got {max_words}")
        self.video_tower = video_tower
        self.text_tower = text_tower
        self.preprocessing = preprocessing
        self.vocabulary = vocabulary
        self.max_words = max_words

    def forward(self, video: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Video embeddings (B, D) and text embeddings (N, D) of a float video and word ids int64 (N, W)."""
        return self.encode_video(video), self.encode_text(tokens)

    def encode_video(self, video: Tensor, segments: bool = False) -> Tensor:
        """Embeddings (B, D) of a float video (B, 3, T, H, W), or (B, S, D) with segments.

        Args:
            video: float (B, 3, T, H, W).
            segments: one embedding for each of the S temporal positions of the video network's last feature map
                (S3D-G: T / 8, rounded up), in order of time. Their mean over S is the embedding without segments, to
                rounding.

        Raises:
            ConfigError: segments were asked of a video tower without `forward_segments`, or the video does not fit.
        """
        if not segments:
            embeddings: Tensor = self.video_tower(video)
            return embeddings
        forward_segments = getattr(self.video_tower, "forward_segments", None)
        if not callable(forward_segments):
            raise ConfigError(
                f"{type(self.video_tower).__name__}: this video tower gives no segments; the loss clip_bag needs them; "
                "give it a method forward_segments(video) -> (B, S, D), or choose another loss"
            )
        embeddings = forward_segments(video)
        return embeddings

    def forward_features(self, video: Tensor) -> Tensor:
        """Features (B, F) of a float video (B, 3, T, H, W) before the joint space."""
        features: Tensor = self.video_tower.forward_features(video)  # type: ignore[operator]
        return features

    def encode_text(self, captions: Sequence[str] | Tensor, max_words: int | None = None) -> Tensor:
        """Embeddings (N, D) of N sentences, or of word ids int64 (N, W).

        Args:
            captions: sentences; a sentence without a known word is all padding. Or word ids, padded with 0.
            max_words: length to which sentences are cut and padded; None means the model's own.

        Raises:
            ConfigError: there is no text tower, or sentences were given and there is no vocabulary.
        """
        if self.text_tower is None:
            raise ConfigError(
                "this model has no text tower, because nothing said which words it knows; create it with "
                "vocabulary=... (a word list .npy, .txt or .json)"
            )
        tokens = captions.to(self.device) if isinstance(captions, Tensor) else self.tokenize(captions, max_words)
        embeddings: Tensor = self.text_tower(tokens)
        return embeddings

    def tokenize(self, captions: Sequence[str], max_words: int | None = None) -> Tensor:
        """Word ids int64 (N, max_words) on the model's device, zero padded.

        Raises:
            ConfigError: the model has no vocabulary, or captions is a single str.
        """
        if self.vocabulary is None:
            raise ConfigError(
                "this model has no vocabulary, so it cannot read sentences; create it with vocabulary=... (the word "
                "list its text tower was trained with), or pass word ids"
            )
        tokens = self.vocabulary.tokenize(captions, self.max_words if max_words is None else max_words)
        return torch.from_numpy(tokens).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device


def check_towers(towers: object, name: str) -> VideoTextModel:
    """The object itself, if it offers what twinreel asks of a pair of towers.

    Args:
        towers: what a user's builder returned.
        name: how the recipe names it, for the message.

    Raises:
        ConfigError: with everything that is missing.
    """
    problems = []
    for method, shapes in (("encode_video", "(video) -> (B, D)"), ("encode_text", "(captions) -> (N, D)")):
        if not callable(getattr(towers, method, None)):
            problems.append(f"a method {method}{shapes}")
    if not isinstance(getattr(towers, "preprocessing", None), Preprocessing):
        problems.append("an attribute preprocessing that is a twinreel.models.preprocessing.Preprocessing")
    if problems:
        raise ConfigError(f"{name}: {type(towers).__name__} is no pair of towers; it lacks " + ", ".join(problems))
    return cast(VideoTextModel, towers)
