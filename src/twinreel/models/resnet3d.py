"""3-D residual networks of one pathway: C2D, I3D (arXiv:1711.07971) and Slow (arXiv:1812.03982), with ResNet-50.

They differ in where kernels reach through time and in whether time is halved after the second stage. Any of them takes
non-local blocks. Sub-modules have the names of the authors' PySlowFast code, so that its weights load. What differs:
the head's window covers what the training crop gives even if 32 does not divide the crop, where the authors round down
and train on several positions at once; a video larger than that is fine in train mode too; too small ones are refused
in words. Numbers are compared in tests/parity/test_slowfast_networks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional

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

__all__ = [
    "NonLocalOption",
    "ResNet3D",
    "c2d_8x8_r50",
    "c2d_nopool_8x8_r50",
    "i3d_8x8_r50",
    "i3d_nln_8x8_r50",
    "kinetics_preprocessing",
    "slow_4x16_r50",
    "slow_8x8_r50",
]

NonLocalOption: TypeAlias = Literal["none", "softmax", "dot_product"]

# The temporal kernels of the stem and, over and over, of the blocks of each stage.
_C2D = ((1,), (1,), (1,), (1,), (1,))
_I3D = ((5,), (3,), (3, 1), (3, 1), (1, 3))
_SLOW = ((1,), (1,), (1,), (3,), (3,))
# The blocks of each stage that a non-local block follows, if there are any.
_NON_LOCAL_AFTER = ((), (1, 3), (1, 3, 5), ())


class ResNet3D(nn.Module):
    """Video (B, 3, T, H, W) -> (B, num_classes): logits in train mode, scores in eval mode.

    The head averages the last features over windows of the size that the training clip gives. A larger video has
    several windows: see `residual_stages.ClassHead`.

    Args:
        kernels: the temporal kernels of the stem and, over and over, of the blocks of each stage.
        width: channels of the stem; the stages have 4, 8, 16 and 32 times as many.
        depths: blocks of each stage.
        pool_time: halve time after the first stage of blocks (`s2`).
        non_local: the form of the non-local blocks after blocks 1 and 3 of `s3` and 1, 3 and 5 of `s4`, or `none`.
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
        kernels: Sequence[Sequence[int]],
        width: int = 64,
        depths: tuple[int, int, int, int] = (3, 4, 6, 3),
        pool_time: bool,
        non_local: NonLocalOption = "none",
        num_classes: int,
        dropout: float,
        head_activation: HeadActivation,
        zero_init_residual: bool,
        train_crop_size: int | None,
        preprocessing: Preprocessing,
    ) -> None:
        super().__init__()
        check_train_crop(train_crop_size)
        self.preprocessing, self.train_crop_size = preprocessing, train_crop_size
        self.time_stride = 2 if pool_time else 1
        self.s1 = Stems([width], kernels[0])
        self.s2, self.s3, self.s4, self.s5 = (
            _stage(index, width, temporal_kernels(kernels[index + 1], depths[index]), non_local) for index in range(4)
        )
        self.head = ClassHead(32 * width, num_classes, dropout, head_activation)
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
            ConfigError: not such a video, or one smaller than the training clip.
        """
        scores: Tensor = self.head(self._pooled(video))
        return scores

    def forward_features(self, video: Tensor) -> Tensor:
        """Last features averaged over time and space, (B, 2048) at width 64: the head's input, without dropout.

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
        """Features (B, T', H', W', 2048) of the head's windows."""
        check_video(video, "ResNet3D", (self.time_stride, 32, 32), training=self.training)
        crop_size = self.train_crop_size or self.preprocessing.crop_size
        window = self._positions(max(self.preprocessing.num_frames, self.time_stride), crop_size, crop_size)
        trained_on = f"{self.preprocessing.num_frames} frames of {crop_size} x {crop_size}"
        check_windows("ResNet3D", video, self._positions(*video.shape[2:]), window, trained_on)
        features = self.s2(self.s1([video]))
        if self.time_stride > 1:
            features = [functional.max_pool3d(features[0], (self.time_stride, 1, 1))]
        features = self.s5(self.s4(self.s3(features)))
        return window_means(features[0], window)

    def _positions(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frames // self.time_stride, -(-height // 32), -(-width // 32)


def kinetics_preprocessing(num_frames: int, frame_stride: int) -> Preprocessing:
    """The published one: 224 x 224 of short side 256, mean 0.45, standard deviation 0.225."""
    return Preprocessing(
        num_frames=num_frames,
        frame_stride=frame_stride,
        crop_size=224,
        short_side=256,
        mean=(0.45, 0.45, 0.45),
        std=(0.225, 0.225, 0.225),
    )


def _stage(index: int, width: int, kernels: tuple[int, ...], non_local: NonLocalOption) -> Stage:
    """Stage `s2` (index 0) to `s5` (index 3)."""
    plan = StagePlan(
        in_channels=width if index == 0 else 2 * width * 2**index,
        inner_channels=width * 2**index,
        out_channels=4 * width * 2**index,
        kernels=kernels,
        stride=1 if index == 0 else 2,
        non_local_after=() if non_local == "none" else _NON_LOCAL_AFTER[index],
        non_local="softmax" if non_local == "none" else non_local,
    )
    return Stage([plan])


def c2d_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """C2D: ResNet-50 frame by frame, time halved after the second stage; 24.3 million parameters.

    Reads 8 frames, 1 of every 8, 224 x 224.

    Args:
        num_classes: at least 1.
        dropout: before the projection, from 0 to below 1.
        head_activation: of the scores in eval mode: `softmax`, `sigmoid` or `none`.
        non_local: the form of the non-local blocks after blocks 1 and 3 of the third and 1, 3 and 5 of the fourth stage
            (`s3`, `s4`), counted from 0; `none` leaves them out.
        zero_init_residual: every residual and non-local block starts as its shortcut.
        train_crop_size: the crop that the head's window follows, pixels; None means that of the preprocessing.
        preprocessing: None means the published one.

    Raises:
        ConfigError: a value out of its range.
    """
    return ResNet3D(
        kernels=_C2D,
        pool_time=True,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(8, 8),
    )


def c2d_nopool_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """C2D without the pool in time, as the released weights want it; 24.3 million parameters.

    Reads 8 frames, 1 of every 8, 224 x 224. Keys, shapes and options are those of `c2d_8x8_r50`: weights cannot tell
    the two apart.
    """
    return ResNet3D(
        kernels=_C2D,
        pool_time=False,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(8, 8),
    )


def i3d_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """I3D: ResNet-50 with temporal kernels in every stage, time halved after the second; 28.0 million parameters.

    Reads 8 frames, 1 of every 8, 224 x 224. The options are those of `c2d_8x8_r50`.
    """
    return ResNet3D(
        kernels=_I3D,
        pool_time=True,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(8, 8),
    )


def i3d_nln_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "softmax",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """I3D with five non-local blocks; 35.4 million parameters.

    Reads 8 frames, 1 of every 8, 224 x 224. The options are those of `c2d_8x8_r50`.
    """
    return ResNet3D(
        kernels=_I3D,
        pool_time=True,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(8, 8),
    )


def slow_8x8_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """The slow pathway alone: temporal kernels in the last two stages; 32.5 million parameters.

    Reads 8 frames, 1 of every 8, 224 x 224. The options are those of `c2d_8x8_r50`.
    """
    return ResNet3D(
        kernels=_SLOW,
        pool_time=False,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(8, 8),
    )


def slow_4x16_r50(
    *,
    num_classes: int = 400,
    dropout: float = 0.5,
    head_activation: HeadActivation = "softmax",
    non_local: NonLocalOption = "none",
    zero_init_residual: bool = True,
    train_crop_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> ResNet3D:
    """The slow pathway alone, on half the frames; 32.5 million parameters.

    Reads 4 frames, 1 of every 16, 224 x 224. The options are those of `c2d_8x8_r50`.
    """
    return ResNet3D(
        kernels=_SLOW,
        pool_time=False,
        non_local=non_local,
        num_classes=num_classes,
        dropout=dropout,
        head_activation=head_activation,
        zero_init_residual=zero_init_residual,
        train_crop_size=train_crop_size,
        preprocessing=preprocessing or kinetics_preprocessing(4, 16),
    )
