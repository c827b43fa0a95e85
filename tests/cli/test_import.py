"""`twinreel import`: founding files recognized, converted in whole, and refused by half."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from picture_networks import ResNet2d
from python2_pickles import write_python2_pickle
from twinreel.cli_import import import_weights
from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import create_model
from twinreel.models.weights import read_weights

State = dict[str, Tensor]
GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
X3D_M = """
MODEL: {ARCH: x3d, MODEL_NAME: X3D, NUM_CLASSES: 400, DROPOUT_RATE: 0.4, HEAD_ACT: sigmoid}
DATA: {NUM_FRAMES: 16, SAMPLING_RATE: 5, TRAIN_CROP_SIZE: 224, TEST_CROP_SIZE: 256, MEAN: [0.5, 0.5, 0.5],
  STD: [0.225, 0.225, 0.225], REVERSE_INPUT_CHANNEL: false}
TRAIN: {DATASET: kinetics}
NONLOCAL: {LOCATION: [[[]], [[]], [[]], [[]]], INSTANTIATION: dot_product}
"""


def command(*arguments: object) -> str:
    """What the verb prints; errors of twinreel go through."""
    app = typer.Typer()
    app.command()(import_weights)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def state_of(name: str, **options: Any) -> State:
    torch.manual_seed(3)
    model = create_model(name, **options)
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def x3d() -> State:
    return state_of("x3d_s", num_classes=400)


def equal(model: torch.nn.Module, state: State) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_pyth_whose_configuration_says_which_model(x3d: State, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, out = tmp_path / "checkpoint_epoch_00300.pyth", tmp_path / "out.safetensors"
    torch.save({"epoch": 299, "model_state": x3d, "optimizer_state": {}, "cfg": X3D_M}, path)
    text = command(path, "--inspect")
    assert not out.exists()
    for words in (
        f"{path}: PySlowFast",
        "568 tensors, 3,794,322 parameters, 400 classes",
        "epoch 299 (counted from 0)",
        "beside the weights, left out: optimizer_state",
        "configuration: x3d, dropout 0.4, head_activation sigmoid, num_frames 16, frame_stride 5, crop_size 224",
        "fits: x3d_m, x3d_s, x3d_xs",
        "model: x3d_m (by keys and shapes, the configuration inside)",
    ):
        assert words in text, text
    text = command(path, "--out", out)
    assert f"written: {out}" in text and f"use it: model.name=x3d_m model.weights={out}" in text
    model: Any = create_model("x3d_m", weights=out)
    assert equal(model, x3d)
    assert (model.head_activation, model.preprocessing.mean) == ("sigmoid", (0.5, 0.5, 0.5))
    assert (model.preprocessing.num_frames, model.preprocessing.frame_stride) == (16, 5)
    assert model.imported_options == {"dropout": 0.4, "head_activation": "sigmoid"}  # for whoever builds it again
    other: Any = create_model("x3d_m", weights=out, head_activation="softmax", preprocessing={"num_frames": 8})
    assert (other.head_activation, other.preprocessing.num_frames) == ("softmax", 8)
    assert other.preprocessing.mean == (0.5, 0.5, 0.5)
    new: Any = create_model("x3d_m", weights=out, weights_scope="backbone", num_classes=6)
    assert new.num_classes == 6 and torch.equal(new.head.lin_5.weight, x3d["head.lin_5.weight"])
    assert new.preprocessing.mean == (0.5, 0.5, 0.5) and new.head_activation == "softmax"
    with caplog.at_level(logging.WARNING):
        assert equal(create_model("x3d_s", weights=out), x3d)
    assert "is of a x3d_m; here it starts a x3d_s" in caplog.text
    with pytest.raises(ConfigError, match=r"num_classes is 400 in the weights, but 6 was asked for.*backbone"):
        create_model("x3d_m", weights=out, num_classes=6)


def test_the_form_of_non_local_blocks_goes_with_the_backbone(tmp_path: Path):
    torch.save(
        {
            "model_state": state_of("i3d_nln_8x8_r50", num_classes=400),
            "cfg": "MODEL: {ARCH: i3d, HEAD_ACT: none}\nNONLOCAL: {LOCATION: [[[1]]], INSTANTIATION: dot_product}",
        },
        tmp_path / "a.pyth",
    )
    command(tmp_path / "a.pyth")
    model: Any = create_model(
        "i3d_nln_8x8_r50", weights=tmp_path / "a.safetensors", weights_scope="backbone", num_classes=3
    )
    assert model.imported_options == {"non_local": "dot_product"} and model.head_activation == "softmax"


def test_caffe2_by_keys_and_shapes_alone(tmp_path: Path):
    names = json.loads((GOLDEN / "slowfast_caffe2_names.json").read_text())["models"]["slowfast_8x8_r50"]
    state = state_of("slowfast_8x8_r50", num_classes=400)
    path = tmp_path / "model.pkl"
    write_python2_pickle(
        {
            "blobs": {blob: state[key].numpy() for blob, key in names.items()}
            | {"lr": state["s1.pathway0_stem.bn.bias"].numpy()}
        },
        path,
    )
    result = json.loads(command(path, "--json"))
    assert (result["layout"], result["model"], result["fits"]) == ("caffe2", "slowfast_8x8_r50", ["slowfast_8x8_r50"])
    assert (result["num_classes"], result["parameters"], result["config_inside"]) == (400, 34_566_488, False)
    assert result["reason"] == "by keys and shapes" and result["out"] == str(tmp_path / "model.safetensors")
    assert equal(create_model("slowfast_8x8_r50", weights=result["out"]), state)
    with pytest.raises(CheckpointError, match=r"model.safetensors: exists already; name another file with --out"):
        command(path)


@pytest.mark.parametrize(
    ("file", "model"), [("X3D_S.pyth", "x3d_s"), ("my-x3d_xs.v2.pth", "x3d_xs"), ("best.pyth", None)]
)
def test_the_files_name_decides_among_equal_shapes(x3d: State, tmp_path: Path, file: str, model: str | None):
    torch.save({"model_state": x3d}, tmp_path / file)
    if model is None:
        with pytest.raises(ConfigError, match=r"fits x3d_m and x3d_s and x3d_xs, .* choose one: --model x3d_m"):
            command(tmp_path / file)
        assert [path.name for path in tmp_path.iterdir()] == [file]
        model = "x3d_m"
        command(tmp_path / file, "--model", model)
    else:
        assert f"model: {model} (by keys and shapes, the file's name)" in command(tmp_path / file)
    assert equal(create_model(model, weights=(tmp_path / file).with_suffix(".safetensors")), x3d)


def test_pytorchvideos_pool_tells_c2d_from_c2d_without(tmp_path: Path):
    golden = json.loads((GOLDEN / "pytorchvideo_hub.json").read_text())["models"]["c2d_r50"]["state_dict"]
    torch.save(
        {
            "model_state": {
                key: torch.zeros(shape, dtype=torch.int64 if role == "zero_i64" else torch.float32)
                for key, (shape, role) in golden.items()
            }
        },
        tmp_path / "hub.pyth",
    )
    text = command(tmp_path / "hub.pyth", "--inspect")
    assert "fits: c2d_8x8_r50, c2d_nopool_8x8_r50" in text
    assert "model: c2d_8x8_r50 (by keys and shapes, the pool after the first stage)" in text


def test_half_fits_are_refused_with_what_is_nearest(x3d: State, tmp_path: Path):
    state = {key: value for key, value in x3d.items() if not key.startswith("s5.pathway0_res6.")}
    torch.save({"model_state": state}, tmp_path / "a.pyth")
    missing = r"does not fit X3D: \d+ missing \(s5\.pathway0_res6"
    with pytest.raises(
        CheckpointError, match=rf"none of the models .*, nothing was written. Nearest: x3d_\w+: {missing}"
    ):
        command(tmp_path / "a.pyth")
    with pytest.raises(
        CheckpointError, match=r"x3d_m: does not fit X3D: \d+ missing \(s5.pathway0_res6.*nothing was wr"
    ):
        command(tmp_path / "a.pyth", "--model", "x3d_m")
    assert "fits: none of the models" in command(tmp_path / "a.pyth", "--inspect")
    torch.save({"model_state": x3d}, tmp_path / "b.pyth")
    with pytest.raises(CheckpointError, match=r"slow_8x8_r50: does not fit ResNet3D: .* It fits x3d_m, x3d_s, x3d_xs"):
        command(tmp_path / "b.pyth", "--model", "slow_8x8_r50")
    with pytest.raises(ConfigError, match="unknown model 'x3d_mm'; did you mean x3d_m"):
        command(tmp_path / "b.pyth", "--model", "x3d_mm")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        command(tmp_path / "b.pyth", "--model", "x3d_m", "--out", tmp_path / "b.pth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pyth", "b.pyth"]


def test_a_file_without_its_head_is_named_itself(x3d: State, tmp_path: Path):
    path = tmp_path / "body.pyth"
    torch.save({"model_state": {key: value for key, value in x3d.items() if "projection" not in key}}, path)
    words = rf"fits x3d_m, x3d_s, x3d_xs but for the head.*: model.weights={path} model.weights_scope=backbone"
    with pytest.raises(CheckpointError, match=words):
        command(path)
    model: Any = create_model("x3d_s", weights=path, weights_scope="backbone", num_classes=5)
    assert torch.equal(model.head.lin_5.weight, x3d["head.lin_5.weight"])


def test_networks_of_pictures_are_inflated_where_a_model_is_made(tmp_path: Path):
    path = tmp_path / "resnet50.pth"
    torch.save(ResNet2d().state_dict(), path)
    text = command(path, "--inspect")
    assert "a ResNet for pictures, torchvision's keys" in text and "1000 classes" in text and "to be inflated" in text
    with pytest.raises(
        CheckpointError, match=r"inflated where a model is made; name the file itself, model.weights=FILE"
    ):
        command(path)
    model: Any = create_model("slow_8x8_r50", weights=path, weights_scope="backbone", num_classes=3)
    assert model.num_classes == 3


def test_mil_nce_files(tmp_path: Path):
    sizes = {"embedding_size": 6, "word_embedding_size": 5, "text_hidden_size": 7, "num_words": 9}
    own = state_of("s3dg_small", **sizes)
    founding = {key.replace("video_tower.", "").replace("text_tower.", "text_module."): t for key, t in own.items()}
    torch.save(founding, tmp_path / "a.pth")
    result = json.loads(command(tmp_path / "a.pth", "--json"))
    assert (result["layout"], result["model"]) == ("howto100m", "s3dg_small")
    assert result["options"]["num_words"] == 9
    model: Any = create_model("s3dg_small", weights=result["out"])
    assert equal(model, own) and not model.text_tower.word_embd.weight.requires_grad
    assert read_weights(result["out"]).model == "s3dg_small"


@pytest.mark.parametrize("config", ["MODEL: [", "just words", "MODEL: {NAME: x}", "MODEL: {ARCH: x3d}\nDATA: 3"])
def test_a_configuration_that_is_none_of_pyslowfasts(x3d: State, tmp_path: Path, config: str):
    torch.save({"model_state": x3d, "cfg": config}, tmp_path / "a.pyth")
    with pytest.raises(CheckpointError, match=r"a.pyth: the configuration inside \(cfg\) is none of PySlowFast's"):
        command(tmp_path / "a.pyth")


def test_channel_order_and_non_local_blocks_of_a_configuration():
    from twinreel.models.founding_config import read_config

    def order(dataset: str, reverse: bool) -> object:
        text = f"MODEL: {{ARCH: slow}}\nTRAIN: {{DATASET: {dataset}}}\nDATA: {{REVERSE_INPUT_CHANNEL: {reverse}}}"
        return read_config(text, "a.pyth").preprocessing.get("channel_order", "rgb")

    assert [order("kinetics", False), order("kinetics", True)] == ["rgb", "bgr"]
    assert [order("ssv2", False), order("charades", True)] == ["bgr", "rgb"]
    some = "MODEL: {ARCH: i3d}\nNONLOCAL: {LOCATION: [[[]], [[1, 3]], [[1, 3, 5]], [[]]], INSTANTIATION: dot_product}"
    assert read_config(some, "a.pyth").options == {"non_local": "dot_product"}
    assert read_config(X3D_M, "a.pyth").options == {"dropout": 0.4, "head_activation": "sigmoid"}
