"""A plain 3-D ConvNet for small videos and CPUs: the video tower of `twinreel demo`.

Not from a paper. Its first two layers keep every frame, because motion over a few pixels is all that the demo's actions
differ in.
"""

from __future__ import annotations

from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models.layers import Triple, WeightInit, check_video, initialize
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.text_towers import TextTowerName, build_text_tower
from twinreel.models.two_towers import TwoTowers
from twinreel.text import Vocabulary

__all__ = ["Conv3dSmall", "conv3d_small"]

# Channels and stride (time, height, width) of each 3 x 3 x 3 convolution.
LAYERS: tuple[tuple[int, Triple], ...] = (
    (24, (1, 2, 2)),
    (48, (1, 2, 2)),
    (96, (2, 2, 2)),
    (160, (1, 1, 1)),
    (160, (2, 2, 2)),
)


class Conv3dSmall(nn.Module):
    """Video (B, 3, T, H, W) -> embeddings (B, embedding_size), not normalized.

    Five convolutions with batch norm and ReLU, the mean over time and space, a linear layer.
    """

    def __init__(self, embedding_size: int = 128, *, weight_init: WeightInit = "uniform") -> None:
        super().__init__()
        if embedding_size < 1:
            raise ConfigError(f"Conv3dSmall: embedding_size must be above 0; got {embedding_size}")
        self.embedding_size = embedding_size
        layers: list[nn.Module] = []
        channels = 3
        for out_channels, stride in LAYERS:
            convolution = nn.Conv3d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
            layers.append(nn.Sequential(convolution, nn.BatchNorm3d(out_channels), nn.ReLU()))
            channels = out_channels
        self.layers = nn.Sequential(*layers)
        self.feature_size = channels
        self.fc = nn.Linear(channels, embedding_size)
        initialize(self, weight_init)

    def forward(self, video: Tensor) -> Tensor:
        """Embeddings (B, embedding_size) of a float video (B, 3, T, H, W)."""
        embeddings: Tensor = self.fc(self.forward_features(video))
        return embeddings

    def forward_features(self, video: Tensor) -> Tensor:
        """The last convolution's output averaged over time and space, (B, 160).

        Raises:
            ConfigError: not a float video (B, 3, T, H, W), or too small to train on.
        """
        return self._feature_map(video).mean(dim=(2, 3, 4))

    def forward_segments(self, video: Tensor) -> Tensor:
        """Embeddings (B, S, embedding_size), one for each of the S = T / 4 (rounded up) temporal positions.

        Their mean over S is what `forward` gives, to rounding.

        Raises:
            ConfigError: as for `forward_features`.
        """
        embeddings: Tensor = self.fc(self._feature_map(video).mean(dim=(3, 4)).transpose(1, 2))
        return embeddings

    def _feature_map(self, video: Tensor) -> Tensor:
        check_video(video, "conv3d_small", (4, 16, 16), training=self.training)
        features: Tensor = self.layers(video)
        return features


def conv3d_small(
    *,
    vocabulary: Vocabulary | None = None,
    preprocessing: Preprocessing | None = None,
    embedding_size: int = 128,
    text_tower: TextTowerName = "word_max",
    num_words: int | None = None,
    word_embedding_size: int = 128,
    text_hidden_size: int = 512,
    word_vectors: str | None = None,
    train_word_vectors: bool | None = None,
    weight_init: WeightInit = "uniform",
) -> TwoTowers:
    """A plain tower of five 3 x 3 x 3 convolutions and a text tower, for small videos on a CPU.

    1.3 million parameters in the video tower. Reads 8 frames at 8 a second, 56 x 56, values 0 to 1. The options of the
    text tower are those of `text_towers.build_text_tower`.
    """
    return TwoTowers(
        video_tower=Conv3dSmall(embedding_size, weight_init=weight_init),
        text_tower=build_text_tower(
            text_tower,
            embedding_size=embedding_size,
            vocabulary=vocabulary,
            num_words=num_words,
            word_embedding_size=word_embedding_size,
            hidden_size=text_hidden_size,
            word_vectors=word_vectors,
            train_word_vectors=train_word_vectors,
        ),
        preprocessing=preprocessing or Preprocessing(num_frames=8, frame_rate=8.0, crop_size=56),
        vocabulary=vocabulary,
    )
