"""MViTv2-S 16x4 (arXiv:2112.01526): a transformer over video whose tokens become fewer and wider.

Attention pools its queries, keys and values by depthwise convolutions, adds decomposed relative positions (time,
height, width) to the logits and the pooled queries to what it returns. Sub-modules have the names of the authors' code
(PySlowFast), so that their weights load. What differs: the logits' positions are part of the matrix product (see
`PooledAttention`), tables follow another crop or number of frames once, not in every pass, and sizes that pooling does
not divide are rounded up as the convolutions do. Numbers are compared in tests/parity/test_x3d_mvit.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.classifier import HeadActivation, activate
from twinreel.models.drop_path import DropPath
from twinreel.models.layers import Triple, check_video
from twinreel.models.preprocessing import Preprocessing

__all__ = ["MViT", "mvitv2_s_16x4", "resize_positions"]

PATCH_STRIDE: Triple = (2, 4, 4)
AXES = ("t", "h", "w")

_log = logging.getLogger(__name__)


class PatchEmbed(nn.Module):
    """Overlapping patches of 3 x 7 x 7 with stride 2 x 4 x 4, each a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, width, (3, 7, 7), PATCH_STRIDE, (1, 3, 3))

    def forward(self, video: Tensor) -> Tensor:
        """Video (B, 3, T, H, W) -> tokens (B, T / 2 * H / 4 * W / 4, width), sizes rounded up."""
        tokens: Tensor = self.proj(video).flatten(2).transpose(1, 2)
        return tokens


class PooledAttention(nn.Module):
    """Multi-head attention over pooled queries, keys and values, with relative positions.

    The position term of query q and key k is the sum of q's products with the table rows of their distances in time,
    height and width. It has one value for each time, row and column of the keys; a key picks its three by ones in as
    many more channels. So query-key products contain it, and no map of all pairs has to be kept.
    """

    rel_pos_t: Tensor
    rel_pos_h: Tensor
    rel_pos_w: Tensor
    distance_t: Tensor
    distance_h: Tensor
    distance_w: Tensor
    key_places: Tensor

    def __init__(
        self, width: int, out_width: int, num_heads: int, grid: Triple, stride_q: Triple, stride_kv: Triple
    ) -> None:
        super().__init__()
        self.num_heads, self.stride_q, self.stride_kv = num_heads, stride_q, stride_kv
        self.channels = channels = out_width // num_heads
        self.scale = channels**-0.5
        self.qkv = nn.Linear(width, 3 * out_width)
        self.proj = nn.Linear(out_width, out_width)
        self.pool_q, self.norm_q = _pool(channels, stride_q), nn.LayerNorm(channels, eps=1e-6)
        self.pool_k, self.norm_k = _pool(channels, stride_kv), nn.LayerNorm(channels, eps=1e-6)
        self.pool_v, self.norm_v = _pool(channels, stride_kv), nn.LayerNorm(channels, eps=1e-6)
        self.fit(grid)

    def fit(self, grid: Triple) -> None:
        """Set the size (time, height, width) of the input's grid of tokens; position tables are interpolated to it."""
        self.grid, self.q_grid, self.kv_grid = grid, _pooled(grid, self.stride_q), _pooled(grid, self.stride_kv)
        device = self.proj.weight.device
        for axis, q_size, kv_size in zip(AXES, self.q_grid, self.kv_grid, strict=True):
            table, length = self._parameters.get(f"rel_pos_{axis}"), 2 * max(q_size, kv_size) - 1
            if table is None:
                new = nn.init.trunc_normal_(torch.empty(length, self.channels, device=device), std=0.02)
                self.register_parameter(f"rel_pos_{axis}", nn.Parameter(new))
            elif len(table) != length:
                self.register_parameter(f"rel_pos_{axis}", nn.Parameter(_interpolated(table.detach(), length)))
            self.register_buffer(f"distance_{axis}", _distances(q_size, kv_size).to(device), persistent=False)
        self.register_buffer("key_places", _places(self.kv_grid).to(self.proj.weight), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, 1 + T * H * W, width) -> (B, 1 + T' * H' * W', out_width), pooled by the queries' stride."""
        batch, count, _ = tokens.shape
        qkv = self.qkv(tokens).view(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q = self.norm_q(_pool_tokens(qkv[0], self.pool_q, self.grid))
        k = self.norm_k(_pool_tokens(qkv[1], self.pool_k, self.grid))
        v = self.norm_v(_pool_tokens(qkv[2], self.pool_v, self.grid))
        places = self.key_places.to(k.dtype).expand(*k.shape[:2], -1, -1)
        queries = torch.cat((q * self.scale, self._position_terms(q)), dim=-1)
        keys = torch.cat((k, places), dim=-1)
        # As many channels of the values as of the keys: without them torch's fused kernels refuse.
        values = functional.pad(v, (0, places.shape[-1]))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, scale=1.0)[..., : self.channels]
        mixed = mixed + functional.pad(q[:, :, 1:], (0, 0, 1, 0))  # not to the class token
        attended: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return attended

    def _position_terms(self, q: Tensor) -> Tensor:
        """(B, heads, queries, times + rows + columns of the keys); 0 for the class token."""
        times, rows, columns = self.q_grid
        grid = q[:, :, 1:].reshape(*q.shape[:2], times, rows, columns, -1)
        terms = torch.cat(
            (
                torch.einsum("bnthwc,tkc->bnthwk", grid, self.rel_pos_t[self.distance_t]),
                torch.einsum("bnthwc,hkc->bnthwk", grid, self.rel_pos_h[self.distance_h]),
                torch.einsum("bnthwc,wkc->bnthwk", grid, self.rel_pos_w[self.distance_w]),
            ),
            dim=-1,
        )
        return functional.pad(terms.flatten(2, 4), (0, 0, 1, 0))


class MLP(nn.Module):
    """Two linear layers with GELU between, 4 times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (..., width) -> the same shape."""
        mixed: Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return mixed


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input; widths change in the attention."""

    def __init__(
        self,
        width: int,
        out_width: int,
        num_heads: int,
        *,
        grid: Triple,
        stride_q: Triple,
        stride_kv: Triple,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = PooledAttention(width, out_width, num_heads, grid, stride_q, stride_kv)
        self.norm2 = nn.LayerNorm(out_width, eps=1e-6)
        self.mlp = MLP(out_width)
        self.proj = nn.Linear(width, out_width) if width != out_width else None
        self.halves = max(stride_q) > 1
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, 1 + T * H * W, width) -> (B, 1 + T' * H' * W', out_width)."""
        normalized = self.norm1(tokens)
        shortcut = tokens if self.proj is None else self.proj(normalized)
        if self.halves:
            shortcut = _halved(shortcut, self.attn.grid)
        tokens = shortcut + self.drop_path(self.attn(normalized))
        added: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return added


class Head(nn.Module):
    """Dropout and the classes."""

    def __init__(self, width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.projection = nn.Linear(width, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, width) -> logits (B, num_classes)."""
        logits: Tensor = self.projection(self.dropout(features))
        return logits


class MViT(nn.Module):
    """Video (B, 3, T, H, W) of the preprocessing's size -> logits (B, num_classes) in train mode, scores in eval mode.

    Another `preprocessing` may be set; where its number of frames or crop size is another one, the position tables are
    interpolated, which makes new parameters: set it before an optimizer is made.

    Args:
        preprocessing: what it reads; its num_frames and crop_size are the only input size that fits.
        num_classes: of the head.
        width: of the first block, per head.
        depth: blocks.
        widen_at: blocks that double width and heads and halve height and width.
        dropout: before the classes, 0 to 1.
        head_activation: `softmax`, `sigmoid` or `none`.
        drop_path: rate of the last block; it grows linearly from 0 in the first.

    Raises:
        ConfigError: an argument out of its range.
    """

    head_prefixes = ("head.projection.",)

    def __init__(
        self,
        *,
        preprocessing: Preprocessing,
        num_classes: int = 400,
        width: int = 96,
        depth: int = 16,
        widen_at: Sequence[int] = (1, 3, 14),
        dropout: float = 0.5,
        head_activation: HeadActivation = "softmax",
        drop_path: float = 0.2,
    ) -> None:
        super().__init__()
        _check(num_classes, dropout, head_activation)
        self.num_classes, self.head_activation = num_classes, head_activation
        self._preprocessing = preprocessing
        self.patch_embed = PatchEmbed(width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.ModuleList()
        grid, heads, stride_kv = _token_grid(preprocessing), 1, 8
        for index in range(depth):
            step = 2 if index in widen_at else 1
            stride_kv, heads = max(stride_kv // step, 1), heads * step
            block = Block(
                width,
                width * step,
                heads,
                grid=grid,
                stride_q=(1, step, step),
                stride_kv=(1, stride_kv, stride_kv),
                drop_path=drop_path * index / max(depth - 1, 1),
            )
            self.blocks.append(block)
            grid, width = block.attn.q_grid, width * step
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.feature_size = width
        self.head = Head(width, num_classes, dropout)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.apply(_initialize)

    @property
    def preprocessing(self) -> Preprocessing:
        """What the model reads."""
        return self._preprocessing

    @preprocessing.setter
    def preprocessing(self, preprocessing: Preprocessing) -> None:
        before, after = self._preprocessing, preprocessing
        self._preprocessing = preprocessing
        grid = _token_grid(preprocessing)
        if grid == _token_grid(before):
            return
        for block in self.blocks.children():
            if isinstance(block, Block):
                block.attn.fit(grid)
                grid = block.attn.q_grid
        _log.info("MViT: position tables interpolated from %s to %s", _size(before), _size(after))

    def forward(self, video: Tensor) -> Tensor:
        """(B, num_classes) of a float video (B, 3, T, H, W).

        Raises:
            ConfigError: not a float video (B, 3, T, H, W), or not of the preprocessing's number of frames and size.
        """
        logits: Tensor = self.head(self.forward_features(video))
        return logits if self.training else activate(logits, self.head_activation)

    def forward_features(self, video: Tensor) -> Tensor:
        """What the classes are told apart by, (B, feature_size): the class token after the last norm.

        Raises:
            ConfigError: as for `forward`.
        """
        check_video(video, "MViT", (1, 1, 1), training=False)
        wanted = (self.preprocessing.num_frames, self.preprocessing.crop_size, self.preprocessing.crop_size)
        if tuple(video.shape[2:]) != wanted:
            frames, height, width = video.shape[2:]
            raise ConfigError(
                f"MViT reads {_size(self.preprocessing)}; got {frames} frames of {height} x {width}; set "
                f"model.preprocessing.num_frames={frames} and model.preprocessing.crop_size={height} (a square) before "
                "the weights are loaded: their position tables are interpolated"
            )
        tokens = self.patch_embed(video)
        tokens = torch.cat((self.cls_token.expand(len(tokens), -1, -1), tokens), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        features: Tensor = self.norm(tokens)[:, 0]
        return features

    def layer_groups(self) -> list[list[str]]:
        """The layers from the input to the classes, for layer-wise learning rates: norm and head are one, as there."""
        blocks = [[f"blocks.{place}"] for place in range(len(self.blocks))]
        return [["cls_token", "patch_embed"], *blocks, ["norm", "head"]]

    def reset_head(self, num_classes: int) -> None:
        """Start a new last layer for another number of classes, with the start values of a new model.

        Raises:
            ConfigError: less than one class.
        """
        _check(num_classes, 0.0, self.head_activation)
        old = self.head.projection.weight
        self.head.projection = nn.Linear(self.feature_size, num_classes, device=old.device, dtype=old.dtype)
        _initialize(self.head.projection)
        self.num_classes = num_classes


def resize_positions(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors, with position tables that have another length than the model's interpolated to it.

    Linearly over the distances, as the authors' code does; a line of the log names both sizes. Everything else is
    passed on as it is, and so are tables that differ in their channels.

    Args:
        tensors: weights under the model's keys.
        model: the one they are for; of any other kind than MViT, nothing changes.
    """
    own = model.state_dict()
    resized = dict(tensors)
    changed: dict[str, tuple[int, int]] = {}
    for name, table in tensors.items():
        wanted = own.get(name)
        if wanted is None or not name.endswith(tuple(f".rel_pos_{axis}" for axis in AXES)):
            continue
        if table.ndim == 2 and table.shape[1] == wanted.shape[1] and len(table) != len(wanted):
            resized[name] = _interpolated(table, len(wanted))
            changed[name] = (len(table), len(wanted))
    if changed:
        given, wanted_size = _sizes_of(tensors), _sizes_of(own)
        _log.info(
            "%d position tables interpolated: the weights are for about %s, the model reads %s",
            len(changed),
            given,
            wanted_size,
        )
    return resized


def _sizes_of(tensors: Mapping[str, Tensor]) -> str:
    """Frames and pixels that the first block's tables stand for."""
    sizes = []
    for axis, stride in zip(AXES, PATCH_STRIDE, strict=True):
        lengths = [len(table) for name, table in tensors.items() if name.endswith(f".rel_pos_{axis}")]
        sizes.append((max(lengths, default=0) + 1) // 2 * stride)
    return f"{sizes[0]} frames of {sizes[1]} x {sizes[2]}"


def _interpolated(table: Tensor, length: int) -> Tensor:
    """A table (distances, channels) of another length, (length, channels); the distance 0 stays in the middle."""
    rows = functional.interpolate(table.float().T[None], size=length, mode="linear")[0].T
    return rows.to(table.dtype).contiguous()


def _distances(q_size: int, kv_size: int) -> Tensor:
    """Table rows (q_size, kv_size) of each query's distance to each key, on the finer one's grid."""
    q_step, kv_step = max(kv_size / q_size, 1.0), max(q_size / kv_size, 1.0)
    distances = torch.arange(q_size)[:, None] * q_step - torch.arange(kv_size)[None, :] * kv_step
    return (distances + (kv_size - 1) * kv_step).long()


def _places(grid: Triple) -> Tensor:
    """(1 + T * H * W, T + H + W): ones at each key's time, row and column; none for the class token."""
    coordinates = torch.cartesian_prod(*[torch.arange(size) for size in grid])
    ones = [functional.one_hot(column, size) for column, size in zip(coordinates.T, grid, strict=True)]
    return functional.pad(torch.cat(ones, dim=1), (0, 0, 1, 0)).float()


def _pool(channels: int, stride: Triple) -> nn.Conv3d:
    return nn.Conv3d(channels, channels, 3, stride, 1, groups=channels, bias=False)


def _pooled(grid: Triple, stride: Triple) -> Triple:
    times, rows, columns = (math.ceil(size / step) for size, step in zip(grid, stride, strict=True))
    return times, rows, columns


def _pool_tokens(tokens: Tensor, pool: nn.Conv3d, grid: Triple) -> Tensor:
    """Tokens (B, heads, 1 + T * H * W, C) pooled on their grid, the class token left out of it and put back."""
    batch, heads, _, channels = tokens.shape
    maps = tokens[:, :, 1:].transpose(2, 3).reshape(batch * heads, channels, *grid)
    pooled = pool(maps).flatten(2).transpose(1, 2)
    return torch.cat((tokens[:, :, :1], pooled.reshape(batch, heads, -1, channels)), dim=2)


def _halved(tokens: Tensor, grid: Triple) -> Tensor:
    """Tokens (B, 1 + T * H * W, C), height and width halved by a 3 x 3 max pool with stride 2; not the class token.

    In two dimensions, because the backward pass of the 3-D pool is not repeatable on a GPU.
    """
    batch, _, channels = tokens.shape
    frames = tokens[:, 1:].reshape(batch * grid[0], grid[1], grid[2], channels).permute(0, 3, 1, 2)
    pooled = functional.max_pool2d(frames, 3, 2, 1).permute(0, 2, 3, 1)
    return torch.cat((tokens[:, :1], pooled.reshape(batch, -1, channels)), dim=1)


def _token_grid(preprocessing: Preprocessing) -> Triple:
    return _pooled((preprocessing.num_frames, preprocessing.crop_size, preprocessing.crop_size), PATCH_STRIDE)


def _size(preprocessing: Preprocessing) -> str:
    return f"{preprocessing.num_frames} frames of {preprocessing.crop_size} x {preprocessing.crop_size}"


def _initialize(part: nn.Module) -> None:
    """The authors' start values of one module."""
    if isinstance(part, nn.Linear | nn.Conv3d):
        nn.init.trunc_normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear):
        nn.init.constant_(part.bias, 0.02)
    elif isinstance(part, nn.LayerNorm):
        nn.init.ones_(part.weight)
        nn.init.constant_(part.bias, 0.02)


def _check(num_classes: int, dropout: float, head_activation: HeadActivation) -> None:
    problems = []
    if num_classes < 1:
        problems.append(f"num_classes must be at least 1; got {num_classes}")
    if not 0 <= dropout <= 1:
        problems.append(f"dropout must be from 0 to 1; got {dropout}")
    if head_activation not in ("softmax", "sigmoid", "none"):
        problems.append(f"head_activation must be softmax, sigmoid or none; got {head_activation!r}")
    if problems:
        raise ConfigError("MViT: " + "; ".join(problems))


def mvitv2_s_16x4(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    drop_path: float = 0.2,
    preprocessing: Preprocessing | None = None,
) -> MViT:
    """MViTv2-S 16x4: 16 frames, 1 of every 4, of 224 pixels (test: center of 256); 34.5 million parameters.

    The number of frames and the crop size are part of the model: those of `preprocessing` are the only ones that fit.
    """
    return MViT(
        preprocessing=preprocessing
        or Preprocessing(
            num_frames=16,
            frame_stride=4,
            crop_size=224,
            short_side=256,
            mean=(0.45, 0.45, 0.45),
            std=(0.225, 0.225, 0.225),
        ),
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        drop_path=drop_path,
    )
