from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import TwoTowers, create_model
from twinreel.models.weights import load_partial, load_weights, read_weights

State = dict[str, Tensor]
SIZES = {"embedding_size": 6, "word_embedding_size": 5, "text_hidden_size": 7, "num_words": 9}


def tiny(seed: int = 0, **options: Any) -> TwoTowers:
    torch.manual_seed(seed)
    model = create_model("conv3d_small", **{**SIZES, **options})
    assert isinstance(model, TwoTowers)
    return model


def same(model: nn.Module, state: State) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def copied(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def founding() -> State:
    """A small S3D-G under the founding code's keys."""
    torch.manual_seed(3)
    state = create_model("s3dg_small", **SIZES).state_dict()
    return {key.replace("video_tower.", "").replace("text_tower.", "text_module."): t for key, t in state.items()}


def founding_containers(state: State) -> dict[str, Any]:
    wrapped = {f"module.{key}": value for key, value in state.items()}
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))]).state_dict()
    return {
        "flat": state,
        "data parallel, flat": wrapped,
        "training checkpoint": {"epoch": 3, "state_dict": wrapped, "optimizer": optimizer, "scheduler": {"a": [0.1]}},
        "model_state": {"epoch": 3, "model_state": state, "optimizer_state": optimizer, "cfg": "A: 1"},
    }


@pytest.mark.parametrize("container", ["flat", "data parallel, flat", "training checkpoint", "model_state"])
@pytest.mark.parametrize("as_file", [False, True])
def test_founding_files(founding: State, container: str, as_file: bool, tmp_path: Path):
    source: Any = founding_containers(founding)[container]
    if as_file:
        torch.save(source, tmp_path / "epoch0001.pth.tar")
        source = tmp_path / "epoch0001.pth.tar"
    weights = read_weights(source)
    assert weights.layout == "howto100m"
    model = create_model("s3dg_small", weights=source)
    assert torch.equal(model.text_tower.fc2.bias, founding["text_module.fc2.bias"])
    assert torch.equal(model.video_tower.mixed_5c.gating_b3.fc.bias, founding["mixed_5c.gating_b3.fc.bias"])
    assert not model.text_tower.word_embd.weight.requires_grad
    assert len(weights.tensors) == len(founding) == len(model.state_dict())


def test_files_from_before_torch_1_6_load(founding: State, tmp_path: Path):
    torch.save(founding, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "old.pth").tensors.keys() == read_weights(founding).tensors.keys()


def test_own_files_and_the_report(tmp_path: Path):
    model, other = tiny(0), tiny(1)
    save_file(copied(model), tmp_path / "a.safetensors")
    report = load_weights(other, tmp_path / "a.safetensors")
    assert same(other, model.state_dict())
    assert set(report.loaded) == set(model.state_dict())
    assert (report.dropped, report.kept, report.parameter_share) == ((), (), 1.0)
    assert str(report) == f"{tmp_path / 'a.safetensors'}: 37 tensors loaded, 100.0 % of the parameters"


def test_counters_that_old_files_lack_are_kept_and_reported():
    model = tiny()
    state = {key: value for key, value in copied(model).items() if not key.endswith("num_batches_tracked")}
    report = load_weights(tiny(1), state)
    assert len(report.kept) == 5 and all(key.endswith("num_batches_tracked") for key in report.kept)


def broken(state: State) -> State:
    state = dict(state)
    del state["video_tower.fc.bias"], state["text_tower.fc1.weight"]
    state["video_tower.extra.weight"] = torch.zeros(1)
    state["video_tower.layers.0.0.weight"] = torch.zeros(7, 3, 3, 3, 3)
    state["video_tower.layers.1.1.weight"] = torch.zeros(48, dtype=torch.int8)
    return state


def test_everything_that_does_not_fit_is_listed_and_nothing_is_copied():
    model = tiny(1)
    before = copied(model)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, broken(copied(tiny(0))))
    for part in (
        "the given state dict: does not fit TwoTowers, nothing was loaded",
        "2 missing (video_tower.fc.bias, text_tower.fc1.weight)",
        "1 unexpected (video_tower.extra.weight)",
        "2 mis-shaped (video_tower.layers.0.0.weight: file (7, 3, 3, 3, 3) float32, model (24, 3, 3, 3, 3) float32",
        "video_tower.layers.1.1.weight: file (48,) int8, model (48,) float32)",
    ):
        assert part in str(caught.value)
    assert "weights_scope" not in str(caught.value)
    assert same(model, before)


def test_one_unexpected_key_is_enough():
    state = {**copied(tiny()), "video_tower.extra.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"nothing was loaded: 1 unexpected \(video_tower\.extra\.weight\)"):
        load_weights(tiny(), state)


def test_long_lists_are_cut_with_a_count(founding: State):
    with pytest.raises(
        CheckpointError, match=r"\d+ missing \(.*, \.\.\. \d+ more\), \d+ unexpected \(.*, \.\.\. \d+ more\)"
    ):
        load_weights(tiny(), founding)


def test_another_head_suggests_backbone_which_then_loads():
    model = tiny(1, embedding_size=8)
    source = copied(tiny(0))
    before = copied(model)
    with pytest.raises(CheckpointError, match=r"Only the heads differ: weights_scope=backbone"):
        load_weights(model, source)
    assert same(model, before)
    report = load_weights(model, source, scope="backbone")
    heads = ("video_tower.fc.", "text_tower.")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key] if key.startswith(heads) else source[key]), key
    assert set(report.dropped) == {key for key in source if key.startswith(heads)} == set(report.kept)
    fc, total = model.video_tower.fc, sum(p.numel() for p in model.video_tower.parameters())
    assert report.parameter_share == 1 - (fc.weight.numel() + fc.bias.numel()) / total
    assert "left out of the file: video_tower.fc.weight" in str(report)


def test_backbone_is_strict_about_the_rest():
    with pytest.raises(CheckpointError, match=r"1 unexpected \(video_tower\.extra\.weight"):
        load_weights(tiny(), broken(copied(tiny())), scope="backbone")


def test_backbone_that_would_load_less_than_half_is_refused():
    model = tiny(1, embedding_size=20_000)  # a head larger than the network
    before = copied(model)
    with pytest.raises(CheckpointError, match="less than half, so nothing was changed"):
        load_weights(model, copied(tiny(0)), scope="backbone")
    assert same(model, before)
    with pytest.raises(ConfigError, match="weights_scope must be all or backbone; got 'head'"):
        load_weights(model, copied(model), scope="head")  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [True, False])
def test_one_tower_from_a_file_of_both_or_of_it_alone(whole: bool):
    source, model = tiny(0), tiny(1)
    before = copied(model)
    report = load_partial(model, "text_tower", source.state_dict() if whole else source.text_tower.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[key] if key.startswith("text_tower.") else before[key])
    assert len(report.loaded) == 5 and report.parameter_share == 1.0
    assert len(report.dropped) == (32 if whole else 0)


def test_one_tower_from_founding_files(founding: State):
    torch.manual_seed(4)
    model = create_model("s3dg_small", **SIZES)
    load_partial(model, "video_tower", founding)
    assert torch.equal(model.video_tower.fc.weight, founding["fc.weight"])
    video_only = {key: value for key, value in founding.items() if not key.startswith("text_module.")}
    load_partial(create_model("s3dg_small", **SIZES), "video_tower", video_only)
    with pytest.raises(CheckpointError, match=r"1 mis-shaped \(text_tower.word_embd.weight"):
        load_partial(create_model("s3dg_small", **{**SIZES, "num_words": 5}), "text_tower", founding)
    other_head = create_model("s3dg_small", **{**SIZES, "embedding_size": 4})
    with pytest.raises(CheckpointError, match="Only the heads differ"):
        load_partial(other_head, "video_tower", founding)
    report = load_partial(other_head, "video_tower", founding, scope="backbone")
    assert torch.equal(other_head.video_tower.gating.fc.bias, founding["gating.fc.bias"])
    assert set(report.kept) == {"video_tower.fc.weight", "video_tower.fc.bias"}


def test_a_part_that_does_not_exist():
    with pytest.raises(ConfigError, match="'video_towr': TwoTowers has no such part; did you mean video_tower"):
        load_partial(tiny(), "video_towr", {})


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_objects_are_refused_and_the_command_given_converts(tmp_path: Path, zipped: bool):
    path = tmp_path / "run.pth"
    state = copied(tiny())
    checkpoint = {"state_dict": state, "args": argparse.Namespace(lr=0.1)}
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        CheckpointError, match=r"\(argparse.Namespace\), refused because unpickling can run code"
    ) as caught:
        load_weights(tiny(), path)
    command = re.search(r'python -c "(.*)"', str(caught.value))
    assert command is not None and "weights_only=False" not in command[1]
    try:
        exec(command[1])
    finally:
        torch.serialization.clear_safe_globals()
    assert read_weights(tmp_path / "run_weights.pth").tensors.keys() == state.keys()


def test_nothing_is_run_while_reading(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": {}, "x": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="refused because unpickling can run code"):
        read_weights(tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pth", b"", "an empty file"),
        ("a.pth", b"<!DOCTYPE html>", "not a readable file of weights .it begins with b'<!DOCTYPE html>'"),
        ("a.pth", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer.*git lfs pull"),
        ("a.safetensors", b"hello world", "not a readable file of weights"),
        ("a.safetensors", b"", "an empty file"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_weights(tmp_path / name)


def test_cut_off_missing_and_folder(tmp_path: Path):
    torch.save(copied(tiny()), tmp_path / "a.pth")
    whole = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="may be damaged or cut off"):
        read_weights(tmp_path / "cut.pth")
    with pytest.raises(CheckpointError, match="no such file of weights"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match="a folder; name a file of weights in it"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "it is empty"),
        ({"epoch": 3, "weights": [1.0]}, "these are no tensors: epoch, weights"),
        (torch.zeros(3), "holds a Tensor, not a dict"),
    ],
)
def test_contents_that_are_no_state_dict(tmp_path: Path, content: Any, words: str):
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=words):
        read_weights(tmp_path / "a.pth")


def test_half_precision_files_load_into_float32():
    model = tiny(1)
    state = {key: value.half() if value.is_floating_point() else value for key, value in copied(tiny()).items()}
    load_weights(model, state)
    assert model.video_tower.fc.weight.dtype == torch.float32
    assert torch.equal(model.video_tower.fc.weight, state["video_tower.fc.weight"].float())
