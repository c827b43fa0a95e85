"""SlowFast (arXiv:1812.03982): a slow pathway that sees few frames, a thin fast one that sees all of them.

After the stem and each of the next three stages the fast features are laid beside the slow ones. The slow frames are
taken inside: callers pass one video. Sub-modules have the names of the authors' PySlowFast code, so that its weights
load. What differs is said in `resnet3d.py`; besides, a longer video than that of training has several windows in time,
each `alpha` frames after the one before. Numbers are compared in tests/parity/test_slowfast_networks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.models.classifier import HeadActivation, positions_mean
from twinreel.models.layers import check_video
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.residual_stages import (
    ClassHead,
    Stage,
    StagePlan,
    Stems,
    check_train_crop,
    check_windows,
    initialize_residual,
    temporal_kernels,
    window_means,
)
from twinreel.models.resnet3d import NonLocalOption, kinetics_preprocessing

__all__ = [
    "SlowFast",
    "slow_indices",
    "slowfast_4x16_r50",
    "slowfast_8x8_r50",
    "slowfast_8x8_r101",
    "slowfast_16x8_r101",
    "slowfast_small",
]

_R50, _R101 = (3, 4, 6, 3), (3, 4, 23, 3)
# The temporal kernels of the stem and of the blocks of each stage (table 1 of the paper).
_SLOW_KERNELS, _FAST_KERNELS = (1, 1, 1, 3, 3), (5, 3, 3, 3, 3)
# The slow blocks of each stage that a non-local block follows, if there are any.
_NON_LOCAL_AFTER, _NON_LOCAL_AFTER_R101 = ((), (1, 3), (1, 3, 5), ()), ((), (), (6, 13, 20), ())


class Fusion(nn.Module):
    """Slow (B, C, T / alpha, H, W) and fast features (B, F, T, H, W) -> slow ones with C + 2 F channels, the fast ones.

    The fast features are brought to the slow pathway's frames by a strided convolution over time (section 3.3).
    """

    def __init__(self, fast_channels: int, alpha: int, kernel: int) -> None:
        super().__init__()
        size, padding = (kernel, 1, 1), (kernel // 2, 0, 0)
        self.conv_f2s = nn.Conv3d(fast_channels, 2 * fast_channels, size, (alpha, 1, 1), padding, bias=False)
        self.bn = nn.BatchNorm3d(2 * fast_channels)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Features of both pathways -> features of both pathways."""
        slow, fast = features
        return [torch.cat([slow, functional.relu(self.bn(self.conv_f2s(fast)))], dim=1), fast]


class SlowFast(nn.Module):
    """Video (B, 3, T, H, W) -> (B, num_classes): logits in train mode, scores in eval mode.

    T is a multiple of alpha. The head averages the last features of each pathway over windows of the size that the
    training clip gives. A larger video has several windows: see `residual_stages.ClassHead`.

    Args:
        width: channels of the slow stem; the stages have 4, 8, 16 and 32 times as many.
        fast_width: the same for the fast pathway: beta times width in the paper.
        depths: blocks of each stage.
        alpha: the slow pathway sees T / alpha frames.
        fusion_kernel: frames that the lateral convolutions reach over, an odd number.
        temporal_blocks: how many blocks of stage `s4` have temporal kernels, slow and fast; None means all.
        non_local: the form of the slow pathway's non-local blocks, or `none`.
        num_classes: at least 1.
        dropout: before the projection, from 0 to below 1.
        head_activation: of the scores in eval mode.
        zero_init_residual: every residual and non-local block starts as its shortcut.
        train_crop_size: the crop that the head's window follows, pixels; None means that of the preprocessing.
        preprocessing: what the network wants of a video; the head's window follows its num_frames and crop_size.

    Raises:
        ConfigError: a value out of its range.
    """

    head_prefixes = ("head.projection.",)

    def __init__(
        self,
        *,
        width: int = 64,
        fast_width: int = 8,
        depths: tuple[int, int, int, int] = _R50,
        alpha: int,
        fusion_kernel: int,
        temporal_blocks: tuple[int | None, int | None] = (None, None),
        non_local: NonLocalOption = "none",
        num_classes: int,
        dropout: float,
        head_activation: HeadActivation,
        zero_init_residual: bool,
        train_crop_size: int | None,
        preprocessing: Preprocessing,
    ) -> None:
        super().__init__()
        if alpha < 1 or fusion_kernel < 1 or fusion_kernel % 2 == 0:
            raise ConfigError(
                f"SlowFast: alpha must be at least 1 and fusion_kernel an odd number; got {alpha} and {fusion_kernel}"
            )
        check_train_crop(train_crop_size)
        self.preprocessing, self.train_crop_size, self.alpha = preprocessing, train_crop_size, alpha
        widths = (width, fast_width)
        stages = [_stage(index, widths, depths, temporal_blocks, non_local) for index in range(4)]
        self.s1 = Stems(widths, (_SLOW_KERNELS[0], _FAST_KERNELS[0]))
        self.s1_fuse = Fusion(fast_width, alpha, fusion_kernel)
        self.s2 = stages[0]
        self.s2_fuse = Fusion(4 * fast_width, alpha, fusion_kernel)
        self.s3 = stages[1]
        self.s3_fuse = Fusion(8 * fast_width, alpha, fusion_kernel)
        self.s4 = stages[2]
        self.s4_fuse = Fusion(16 * fast_width, alpha, fusion_kernel)
        self.s5 = stages[3]
        self.head = ClassHead(32 * (width + fast_width), num_classes, dropout, head_activation)
        initialize_residual(self, zero_init_residual=zero_init_residual)

    @property
    def num_classes(self) -> int:
        """How many classes the head tells apart."""
        return self.head.projection.out_features

    @property
    def head_activation(self) -> HeadActivation:
        """What turns logits into scores in eval mode."""
        return self.head.head_activation

    def forward(self, video: Tensor) -> Tensor:
        """(B, num_classes) of a float video (B, 3, T, H, W): logits in train mode, scores in eval mode.

        Raises:
            ConfigError: not such a video, one smaller than the training clip, or alpha does not divide T.
        """
        scores: Tensor = self.head(self._pooled(video))
        return scores

    def forward_features(self, video: Tensor) -> Tensor:
        """Last features of both pathways averaged over time and space, (B, 2304) at the published widths.

        They are the head's input, without dropout.

        Raises:
            ConfigError: as `forward`.
        """
        return positions_mean(self._pooled(video))

    def reset_head(self, num_classes: int) -> None:
        """Start a new head for other classes.

        Raises:
            ConfigError: less than one class.
        """
        self.head.reset(num_classes)

    def _pooled(self, video: Tensor) -> Tensor:
        """Features (B, T', H', W', 2304) of the head's windows, slow channels first."""
        window = self._check(video)
        slow_frames = slow_indices(video.shape[2], self.alpha).to(video.device)
        features = self.s1_fuse(self.s1([video.index_select(2, slow_frames), video]))
        features = self.s2_fuse(self.s2(features))
        features = self.s3_fuse(self.s3(features))
        features = self.s4_fuse(self.s4(features))
        slow, fast = self.s5(features)
        slow_means = window_means(slow, window)
        fast_means = window_means(fast, (window[0] * self.alpha, *window[1:]), stride=self.alpha)
        return torch.cat([slow_means, fast_means], dim=-1)

    def _check(self, video: Tensor) -> tuple[int, int, int]:
        """The head's window on the slow features, if the video is large enough for it."""
        check_video(video, "SlowFast", (self.alpha, 32, 32), training=self.training)
        num_frames, crop_size = self.preprocessing.num_frames, self.train_crop_size or self.preprocessing.crop_size
        for name, frames in (("the video", video.shape[2]), ("the model's preprocessing", num_frames)):
            if frames % self.alpha:
                below = frames - frames % self.alpha
                nearest = " or ".join(str(size) for size in (below, below + self.alpha) if size)
                raise ConfigError(
                    f"SlowFast: alpha={self.alpha} must divide the number of frames, so that every frame of the slow "
                    f"pathway has its part of the fast one; {name} has {frames}, nearest: {nearest}"
                )
        window = self._positions(num_frames, crop_size, crop_size)
        trained_on = f"{num_frames} frames of {crop_size} x {crop_size}"
        check_windows("SlowFast", video, self._positions(*video.shape[2:]), window, trained_on)
        return window

    def _positions(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frames // self.alpha, -(-height // 32), -(-width // 32)


def slow_indices(num_frames: int, alpha: int) -> Tensor:
    """The frames that the slow pathway sees, int64 (num_frames // alpha,): the first, the last, and between.

    They are not alpha apart: 0, 4, 8, 13, 17, 22, 26, 31 for 32 frames and alpha 4. In float32 and on the CPU as in
    the authors' code: other arithmetic chooses other frames here and there.
    """
    return torch.linspace(0, num_frames - 1, num_frames // alpha, dtype=torch.float32, device="cpu").long()


def _stage(
    index: int,
    widths: tuple[int, int],
    depths: tuple[int, int, int, int],
    temporal_blocks: tuple[int | None, int | None],
    non_local: NonLocalOption,
) -> Stage:
    """Stage `s2` (index 0) to `s5` (index 3) of both pathways."""
    plans = []
    for pathway, (width, kernels) in enumerate(zip(widths, (_SLOW_KERNELS, _FAST_KERNELS), strict=True)):
        own = width if index == 0 else 2 * width * 2**index
        from_fast = 2 * (widths[1] if index == 0 else 2 * widths[1] * 2**index)
        has_non_local = pathway == 0 and non_local != "none"
        after = _NON_LOCAL_AFTER_R101 if depths == _R101 else _NON_LOCAL_AFTER
        plan = StagePlan(
            in_channels=own + from_fast if pathway == 0 else own,
            inner_channels=width * 2**index,
            out_channels=4 * width * 2**index,
            kernels=temporal_kernels(
                kernels[index + 1 : index + 2], depths[index], temporal_blocks[pathway] if index == 2 else None
            ),
            stride=1 if index == 0 else 2,
            non_local_after=after[index] if has_non_local else (),
            non_local="softmax" if non_local == "none" else non_local,
        )
        plans.append(plan)
    return Stage(plans)


def slowfast_4x16_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    alpha: int = 8,
    fusion_kernel: int = 5,
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> SlowFast:
    """SlowFast 4x16 with ResNet-50: 34.5 million parameters.

    Reads 32 frames, 1 of every 2, 224 x 224; the slow pathway sees 4 of them.

    Args:
        num_classes: at least 1.
        dropout: before the projection, from 0 to below 1.
        head_activation: of the scores in eval mode: `softmax`, `sigmoid` or `none`.
        alpha: the slow pathway sees one frame for every alpha frames; it divides num_frames.
        fusion_kernel: frames that the lateral convolutions reach over, an odd number.
        non_local: the form of non-local blocks in the third and fourth stage of the slow pathway; `none` leaves them
            out. With ResNet-50 they follow blocks 1, 3 and 1, 3, 5, with ResNet-101 blocks 6, 13, 20 of the fourth.
        zero_init_residual: every residual and non-local block starts as its shortcut.
        train_crop_size: the crop that the head's window follows, pixels; None means that of the preprocessing.
        preprocessing: None means the published one.

    Raises:
        ConfigError: a value out of its range.
    """
    return SlowFast(
        alpha=alpha,
        fusion_kernel=fusion_kernel,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(32, 2),
    )


def slowfast_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    alpha: int = 4,
    fusion_kernel: int = 7,
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> SlowFast:
    """SlowFast 8x8 with ResNet-50: 34.6 million parameters.

    Reads 32 frames, 1 of every 2, 224 x 224; the slow pathway sees 8 of them. The options are those of
    `slowfast_4x16_r50`.
    """
    return SlowFast(
        alpha=alpha,
        fusion_kernel=fusion_kernel,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(32, 2),
    )


def slowfast_8x8_r101(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    alpha: int = 4,
    fusion_kernel: int = 5,
    slow_temporal_blocks: int = 23,
    fast_temporal_blocks: int = 23,
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> SlowFast:
    """SlowFast 8x8 with ResNet-101: 62.8 million parameters.

    Reads 32 frames, 1 of every 2, 224 x 224; the slow pathway sees 8 of them. `slow_temporal_blocks` and
    `fast_temporal_blocks` say how many of the 23 blocks of stage `s4` have temporal kernels: all of them here, 6 in
    the variants whose names say 50. The other options are those of `slowfast_4x16_r50`.
    """
    return SlowFast(
        depths=_R101,
        alpha=alpha,
        fusion_kernel=fusion_kernel,
        temporal_blocks=(slow_temporal_blocks, fast_temporal_blocks),
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(32, 2),
    )


def slowfast_16x8_r101(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    alpha: int = 4,
    fusion_kernel: int = 5,
    slow_temporal_blocks: int = 6,
    fast_temporal_blocks: int = 6,
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> SlowFast:
    """SlowFast 16x8 with ResNet-101, "50-50": 53.8 million parameters.

    Reads 64 frames, 1 of every 2, 224 x 224; the slow pathway sees 16 of them. In either pathway 6 of the 23 blocks of
    stage `s4` have temporal kernels, as many as in ResNet-50: hence the name. The options are those of
    `slowfast_8x8_r101`.
    """
    return SlowFast(
        depths=_R101,
        alpha=alpha,
        fusion_kernel=fusion_kernel,
        temporal_blocks=(slow_temporal_blocks, fast_temporal_blocks),
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(64, 2),
    )


def slowfast_small(
    *,
    num_classes: int = 400,
    dropout: float = 0.2,
    head_activation: HeadActivation = "softmax",
    alpha: int = 4,
    fusion_kernel: int = 5,
    zero_init_residual: bool = False,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> SlowFast:
    """A narrow, shallow SlowFast for small videos on a CPU: 0.8 million parameters with 10 classes.

    One block a stage; the stages have 64, 128, 256 and 512 channels in the slow pathway, 16, 32, 64 and 128 in the
    fast one. Reads 16 frames at 4 a second, 112 x 112; the slow pathway sees 4 of them. The options are those of
    `slowfast_4x16_r50`, but for short training runs residual branches start open and dropout is low.
    """
    return SlowFast(
        width=16,
        fast_width=4,
        depths=(1, 1, 1, 1),
        alpha=alpha,
        fusion_kernel=fusion_kernel,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or _small_preprocessing(),
    )


def _small_preprocessing() -> Preprocessing:
    return Preprocessing(
        num_frames=16,
        frame_rate=4.0,
        crop_size=112,
        mean=(0.45, 0.45, 0.45),
        std=(0.225, 0.225, 0.225),
    )
