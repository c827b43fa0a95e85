"""ClipBERT (arXiv:2102.06183): a CNN over sparse frames and a BERT over text and picture, trained end to end.

The CNN sees each frame; the mean over a clip's frames is a grid of visual tokens (section 3.1), which BERT reads
together with the text. Each of several clips is compared with the text alone, and the task puts their answers together.
The CNN is in `grid_features.py`, BERT in `bert.py`, the heads in `bert_heads.py`. Sub-modules have the names of the
authors' code; the detector's heads in their files, which nothing uses, do not exist here. What differs besides what
those files say: frames come in the network's own channel order and range, as `preprocessing` states them; clips are one
batch, not one forward each; any network can be the CNN. Numbers are compared in tests/parity/test_clipbert_network.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models.bert import INITIAL_STD, Bert
from twinreel.models.bert_heads import Transformer
from twinreel.models.grid_features import CnnNorm, GridEncoder, GridResNet
from twinreel.models.image_tower import feature_channels, load_image_tower
from twinreel.models.layers import check_video
from twinreel.models.preprocessing import Preprocessing
from twinreel.wordpiece import WordPiece

__all__ = ["ClipBert", "clipbert_base", "clipbert_small", "clipbert_tiny"]


class _CnnOptions(NamedTuple):
    """Of the ResNet; None where the builder decides."""

    cnn_blocks: Sequence[int] | None
    cnn_width: int | None
    cnn_norm: CnnNorm | None
    freeze_stages: int | None


_RESNET_50 = _CnnOptions((3, 4, 6, 3), 64, "frozen", 2)
_RESNET_SMALL = _CnnOptions((1, 1, 1, 1), 16, "group", 0)
# The founding mean is (123.675, 116.28, 103.53) in RGB, subtracted before the channels change places.
_PUBLISHED = Preprocessing(
    num_frames=2,
    frame_rate=2.0,
    crop_size=448,
    fit="pad",
    value_range=(0.0, 255.0),
    mean=(103.53, 116.28, 123.675),
    channel_order="bgr",
)
_SMALL = Preprocessing(
    num_frames=2, frame_rate=2.0, crop_size=112, fit="pad", mean=(0.45, 0.45, 0.45), std=(0.225, 0.225, 0.225)
)


class ClipBert(nn.Module):
    """Clips (B, 3, C * T, H, W) and R texts a video (B, R, L) -> logits (B, C, R, num_outputs).

    Args:
        cnn: pixels (N, 3, H, W) -> grids (N, hidden_size, h, w).
        transformer: BERT with a head.
        preprocessing: what the CNN wants; its num_frames T are one clip.
        vocabulary: the word pieces behind the ids; None leaves texts to the caller.
        max_text_tokens: length to which texts are cut and padded, [CLS] and [SEP] included.
        sampled_grid_tokens: in training, `pretraining` sees so many visual tokens of a grid, drawn anew each time; 0
            means all.

    Raises:
        ConfigError: max_text_tokens is not from 3 to the number of BERT's places, or the vocabulary is larger than the
            word table.
    """

    # What weights_scope="backbone" leaves at its start values.
    head_prefixes: ClassVar[tuple[str, ...]] = ("transformer.classifier.", "transformer.cls.")

    def __init__(
        self,
        *,
        cnn: GridEncoder,
        transformer: Transformer,
        preprocessing: Preprocessing,
        vocabulary: WordPiece | None = None,
        max_text_tokens: int = 20,
        sampled_grid_tokens: int = 0,
    ) -> None:
        super().__init__()
        embeddings = transformer.bert.embeddings
        places, words = embeddings.position_embeddings.num_embeddings, embeddings.word_embeddings.num_embeddings
        if not 3 <= max_text_tokens <= places:
            raise ConfigError(
                f"max_text_tokens must be from 3 ([CLS], a word, [SEP]) to the {places} places of BERT; got "
                f"{max_text_tokens}"
            )
        if vocabulary is not None and vocabulary.num_embeddings > words:
            raise ConfigError(f"the vocabulary has {vocabulary.num_embeddings} words, the word table {words} rows")
        if sampled_grid_tokens < 0:
            raise ConfigError(f"sampled_grid_tokens must be at least 0; got {sampled_grid_tokens}")
        self.cnn = cnn
        self.transformer = transformer
        self.preprocessing = preprocessing
        self.vocabulary = vocabulary
        self.max_text_tokens = max_text_tokens
        self.sampled_grid_tokens = sampled_grid_tokens

    @property
    def num_outputs(self) -> int:
        """How many logits a text gets."""
        return self.transformer.num_outputs

    @property
    def pad_id(self) -> int:
        """The word id that fills up a text."""
        return 0 if self.vocabulary is None else self.vocabulary.pad_id

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device

    def forward(self, video: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, C, R, num_outputs) of every clip of a video with each of its texts.

        Args:
            video: float (B, 3, C * T, H, W), T = preprocessing.num_frames; clip c is frames c * T up to (c + 1) * T.
            tokens: word ids int64 (B, R, L), padded with `pad_id`.

        Raises:
            ConfigError: not such a video, or not such tokens.
        """
        check_video(video, "ClipBERT", (1, 1, 1), training=False)
        num_frames = self.preprocessing.num_frames
        num_clips, rest = divmod(video.shape[2], num_frames)
        if rest or not num_clips:
            raise ConfigError(
                f"ClipBERT: {video.shape[2]} frames are no whole number of clips of {num_frames} frames "
                "(preprocessing.num_frames)"
            )
        batch, channels, _, height, width = video.shape
        clips = video.reshape(batch, channels, num_clips, num_frames, height, width).transpose(1, 2).flatten(0, 1)
        logits = self.match(self.encode_grid(clips), tokens.repeat_interleave(num_clips, dim=0))
        return logits.reshape(batch, num_clips, *logits.shape[1:])

    def encode_grid(self, video: Tensor) -> Tensor:
        """The grid (B, h, w, hidden_size) of each clip (B, 3, T, H, W), the mean over its frames.

        Raises:
            ConfigError: not such a video, or too small for one position.
        """
        check_video(video, "ClipBERT", (1, 1, 1), training=False)
        grids: Tensor = self.cnn(video.transpose(1, 2).flatten(0, 1))
        return grids.reshape(len(video), -1, *grids.shape[1:]).mean(dim=1).permute(0, 2, 3, 1)

    def match(self, grid: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, R, num_outputs) of clips' grids (B, h, w, hidden_size) with R texts each, int64 (B, R, L).

        A pair's logits do not depend on what else is in the batch (in eval mode, to rounding).

        Raises:
            ConfigError: the shapes do not go together.
        """
        logits: Tensor = self.transformer(*self._pairs(grid, tokens))
        return logits.reshape(*tokens.shape[:2], -1)

    def pretraining(self, video: Tensor, tokens: Tensor, grid_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of masked words (B, R, L, vocab_size), and of whether a text fits (B, R, 2).

        Args:
            video: float (B, 3, T, H, W), one clip or picture each.
            tokens: word ids int64 (B, R, L), some of them masked.
            grid_tokens: which visual tokens BERT sees, numbered row by row; None means all, or in training
                `sampled_grid_tokens` of them, drawn from PyTorch's generator and the same for the whole batch.

        Raises:
            ConfigError: the model has no heads of pretraining, or the shapes do not go together.
        """
        texts, padding, visual = self._pairs(self.encode_grid(video), tokens)
        size = visual.shape[1]
        if grid_tokens is None and self.training and 0 < self.sampled_grid_tokens < size:
            grid_tokens = torch.randperm(size)[: self.sampled_grid_tokens].sort().values
        if grid_tokens is not None:
            visual = visual[:, grid_tokens.to(visual.device)]
        words, fits = self.transformer.pretraining(texts, padding, visual)
        return words.reshape(*tokens.shape, -1), fits.reshape(*tokens.shape[:2], -1)

    def tokenize(self, captions: Sequence[str], max_tokens: int | None = None) -> Tensor:
        """Word ids int64 (N, max_tokens) on the model's device, padded.

        Args:
            captions: texts.
            max_tokens: length to which they are cut and padded; None means `max_text_tokens`.

        Raises:
            ConfigError: the model has no vocabulary, or captions is a single str.
        """
        if self.vocabulary is None:
            raise ConfigError(
                "this model has no vocabulary, so it cannot read texts; create it with vocabulary=... (the vocab.txt "
                "that its BERT was trained with), or pass word ids"
            )
        length = self.max_text_tokens if max_tokens is None else max_tokens
        return torch.from_numpy(self.vocabulary.tokenize(captions, length)).to(self.device)

    def activation_parts(self) -> list[nn.Module]:
        """What activation checkpointing may recompute one by one: the CNN's stages, and BERT's layers."""
        feature = self.cnn.feature
        stated = getattr(feature, "activation_parts", None)
        parts = stated() if callable(stated) else list(feature.children()) or [feature]
        return [*parts, self.cnn.grid_encoder, self.transformer.bert.encoder.layer]

    def _pairs(self, grid: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Texts (B * R, L), their padding, and visual tokens (B * R, h * w, D), those of a video once for each text."""
        if tokens.ndim != 3 or tokens.dtype != torch.int64 or tokens.shape[0] != len(grid) or tokens.numel() == 0:
            raise ConfigError(
                f"ClipBERT wants word ids int64 (B, R, L), R texts for each of the {len(grid)} clips; got "
                f"{tokens.dtype} {tuple(tokens.shape)}"
            )
        visual: Tensor = self.transformer.bert.visual_embeddings(grid)
        texts = tokens.flatten(0, 1)
        return texts, texts == self.pad_id, visual.repeat_interleave(tokens.shape[1], dim=0)


def clipbert_base(
    *,
    vocabulary: WordPiece | None = None,
    num_outputs: int = 2,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate_size: int = 3072,
    max_positions: int = 512,
    vocab_size: int | None = None,
    max_text_tokens: int = 20,
    dropout: float = 0.1,
    image_tower: str | None = None,
    cnn_blocks: tuple[int, int, int, int] | None = None,
    cnn_width: int | None = None,
    cnn_norm: CnnNorm | None = None,
    freeze_stages: int | None = None,
    grid_pool: int = 2,
    pretraining_heads: bool = False,
    sampled_grid_tokens: int = 0,
    preprocessing: Preprocessing | None = None,
) -> ClipBert:
    """ClipBERT as published: ResNet-50 and BERT-base, 148 million parameters; stem, `res2` and batch norms are frozen.

    Reads 2 frames at 2 a second, the long side 448, padded, in BGR with the mean subtracted. It needs trained weights.

    Args:
        vocabulary: the word pieces; None for a model that reads word ids only.
        num_outputs: of the head: 2 for retrieval by cross entropy, 1 for the hinge and multiple choice, or the number
            of answers.
        hidden_size: of BERT's tokens, a multiple of num_heads.
        num_layers: of BERT.
        num_heads: of attention.
        intermediate_size: of the inner linear layers.
        max_positions: the longest text, tokens.
        vocab_size: rows of the word table; None means those of the vocabulary, or 30522 without one.
        max_text_tokens: length to which texts are cut and padded, [CLS] and [SEP] included.
        dropout: everywhere in BERT and before the head, from 0 to below 1.
        image_tower: `package.module:function` of your own, called without arguments: a network, pixels (N, 3, H, W) ->
            features (N, C, h, w), with its own weights. It takes the ResNet's place; its attribute `preprocessing`, if
            it has one, is the model's. It trains, unless the recipe has `model.freeze: [cnn.feature]`; after its own
            `requires_grad_(False)` alone, batch norms and dropout would still be in training mode.
        cnn_blocks: blocks of the ResNet's stages; None means (3, 4, 6, 3).
        cnn_width: channels of its stem; None means 64.
        cnn_norm: `frozen` or `group`; None means frozen.
        freeze_stages: how many parts of the ResNet do not train, 0 to 5: stem, `res2`, ...; None means 2.
        grid_pool: the grid has 1 / grid_pool of the CNN's height and width.
        pretraining_heads: heads for masked words and matching, for the method `pretraining`.
        sampled_grid_tokens: so many visual tokens in training of these; 0 means all.
        preprocessing: None means the image tower's own, else the published one.

    Raises:
        ConfigError: a value out of its range, options of the ResNet beside an image tower, or a tower that does not do.
    """
    return _assemble(
        _PUBLISHED,
        _RESNET_50,
        30522,
        INITIAL_STD,
        vocabulary=vocabulary,
        num_outputs=num_outputs,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
        vocab_size=vocab_size,
        max_text_tokens=max_text_tokens,
        dropout=dropout,
        image_tower=image_tower,
        cnn=_CnnOptions(cnn_blocks, cnn_width, cnn_norm, freeze_stages),
        grid_pool=grid_pool,
        pretraining_heads=pretraining_heads,
        sampled_grid_tokens=sampled_grid_tokens,
        preprocessing=preprocessing,
    )


def clipbert_tiny(
    *,
    vocabulary: WordPiece | None = None,
    num_outputs: int = 2,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 128,
    max_positions: int = 64,
    vocab_size: int | None = None,
    max_text_tokens: int = 20,
    dropout: float = 0.1,
    image_tower: str | None = None,
    cnn_blocks: tuple[int, int, int, int] | None = None,
    cnn_width: int | None = None,
    cnn_norm: CnnNorm | None = None,
    freeze_stages: int | None = None,
    grid_pool: int = 2,
    pretraining_heads: bool = False,
    sampled_grid_tokens: int = 0,
    preprocessing: Preprocessing | None = None,
) -> ClipBert:
    """The published CNN with a BERT of two thin layers, for tests; 25 million parameters.

    Reads what `clipbert_base` reads, and has its options; the word table has 1000 rows without a vocabulary.
    """
    return _assemble(
        _PUBLISHED,
        _RESNET_50,
        1000,
        INITIAL_STD,
        vocabulary=vocabulary,
        num_outputs=num_outputs,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
        vocab_size=vocab_size,
        max_text_tokens=max_text_tokens,
        dropout=dropout,
        image_tower=image_tower,
        cnn=_CnnOptions(cnn_blocks, cnn_width, cnn_norm, freeze_stages),
        grid_pool=grid_pool,
        pretraining_heads=pretraining_heads,
        sampled_grid_tokens=sampled_grid_tokens,
        preprocessing=preprocessing,
    )


def clipbert_small(
    *,
    vocabulary: WordPiece | None = None,
    num_outputs: int = 2,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 512,
    max_positions: int = 128,
    vocab_size: int | None = None,
    max_text_tokens: int = 20,
    dropout: float = 0.0,
    image_tower: str | None = None,
    cnn_blocks: tuple[int, int, int, int] | None = None,
    cnn_width: int | None = None,
    cnn_norm: CnnNorm | None = None,
    freeze_stages: int | None = None,
    grid_pool: int = 1,
    pretraining_heads: bool = False,
    sampled_grid_tokens: int = 0,
    preprocessing: Preprocessing | None = None,
) -> ClipBert:
    """A small one that trains from scratch on a CPU: four bottleneck blocks with group norm, a BERT of two layers.

    Reads 2 frames at 2 a second, the long side 112, padded: 4 x 4 visual tokens. The options are those of
    `clipbert_base`, where None means cnn_blocks (1, 1, 1, 1), cnn_width 16, cnn_norm group, freeze_stages 0. Nothing
    is dropped, and BERT's linear layers start from a normal of deviation 1 / sqrt(hidden_size): 0.02, which is meant
    for 768, and dropout keep a narrow BERT at chance for hundreds of steps.
    """
    return _assemble(
        _SMALL,
        _RESNET_SMALL,
        30522,
        hidden_size**-0.5,
        vocabulary=vocabulary,
        num_outputs=num_outputs,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
        vocab_size=vocab_size,
        max_text_tokens=max_text_tokens,
        dropout=dropout,
        image_tower=image_tower,
        cnn=_CnnOptions(cnn_blocks, cnn_width, cnn_norm, freeze_stages),
        grid_pool=grid_pool,
        pretraining_heads=pretraining_heads,
        sampled_grid_tokens=sampled_grid_tokens,
        preprocessing=preprocessing,
    )


def _assemble(
    published: Preprocessing,
    resnet: _CnnOptions,
    num_words: int,
    initial_std: float,
    *,
    vocabulary: WordPiece | None,
    num_outputs: int,
    hidden_size: int,
    vocab_size: int | None,
    max_text_tokens: int,
    dropout: float,
    image_tower: str | None,
    cnn: _CnnOptions,
    grid_pool: int,
    pretraining_heads: bool,
    sampled_grid_tokens: int,
    preprocessing: Preprocessing | None,
    **bert_sizes: int,
) -> ClipBert:
    """A ClipBert of a builder's options, and of what the builder decides: all that comes before them."""
    if vocab_size is None:
        vocab_size = num_words if vocabulary is None else vocabulary.num_embeddings
    bert = Bert(vocab_size=vocab_size, hidden_size=hidden_size, dropout=dropout, **bert_sizes)
    transformer = Transformer(bert, num_outputs, dropout, pretraining_heads, initial_std)
    if image_tower is None:
        feature, channels = _resnet(cnn, resnet)
    else:
        refused = [f"model.{option}" for option, value in cnn._asdict().items() if value is not None]
        if refused:
            raise ConfigError(
                f"{', '.join(refused)}: of the ResNet, whose place image_tower={image_tower} takes; leave them out "
                "(model.freeze=[cnn.feature] freezes a tower, the statistics of its batch norms too)"
            )
        feature, own = load_image_tower(image_tower)
        published = own or published
        channels = feature_channels(feature, (preprocessing or published).crop_size, image_tower)
    return ClipBert(
        cnn=GridEncoder(feature, channels, hidden_size, grid_pool),
        transformer=transformer,
        preprocessing=preprocessing or published,
        vocabulary=vocabulary,
        max_text_tokens=max_text_tokens,
        sampled_grid_tokens=sampled_grid_tokens,
    )


def _resnet(asked: _CnnOptions, defaults: _CnnOptions) -> tuple[nn.Module, int]:
    """The ResNet, and its number of output channels."""
    options: Any = [default if option is None else option for option, default in zip(asked, defaults, strict=True)]
    blocks, width, norm, freeze_stages = options
    return GridResNet(blocks=blocks, width=width, norm=norm, freeze_stages=freeze_stages), 32 * width
