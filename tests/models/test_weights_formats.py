"""Founding files of action recognition: recognized, renamed, refused where reading them could run code."""

from __future__ import annotations

import collections
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from python2_pickles import write_python2_pickle
from twinreel.errors import CheckpointError
from twinreel.models.mvit import MViT
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.weights import load_weights, read_weights, save_weights
from twinreel.models.weights.pytorchvideo import rename_pytorchvideo
from twinreel.models.x3d import x3d_small

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def state() -> State:
    torch.manual_seed(0)
    return x3d_small(num_classes=7).state_dict()


def same(model: nn.Module, state: State) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def pyth(state: State) -> dict[str, Any]:
    """A training checkpoint of PySlowFast."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1).state_dict()
    return {
        "epoch": 195,
        "model_state": state,
        "optimizer_state": optimizer,
        "cfg": "MODEL: {ARCH: x3d}\n",
        "scaler_state": {"scale": 65536.0},
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pyslowfast_checkpoint(state: State, tmp_path: Path, zipped: bool):
    path = tmp_path / "checkpoint_epoch_00196.pyth"
    torch.save(pyth(state), path, _use_new_zipfile_serialization=zipped)
    weights = read_weights(path)
    assert (weights.layout, weights.epoch, weights.config) == ("slowfast", 195, "MODEL: {ARCH: x3d}\n")
    assert weights.left_out == ("optimizer_state", "scaler_state")
    model = x3d_small(num_classes=7)
    report = load_weights(model, weights)
    assert same(model, state) and (report.kept, report.parameter_share) == ((), 1.0)


def test_a_head_of_400_classes_for_7():  # B055
    torch.manual_seed(1)
    source, model = x3d_small(num_classes=400).state_dict(), x3d_small(num_classes=7)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, pyth(source))
    assert "2 mis-shaped (head.projection.weight: file (400, " in str(caught.value)
    assert "Only the heads differ: weights_scope=backbone loads the rest" in str(caught.value)
    assert same(model, before)
    report = load_weights(model, pyth(source), scope="backbone")
    head = ("head.projection.weight", "head.projection.bias")
    assert report.dropped == report.kept == head
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key] if key in head else source[key]), key
    total, new = sum(p.numel() for p in model.parameters()), model.head.projection
    assert report.parameter_share == pytest.approx(1 - (new.weight.numel() + new.bias.numel()) / total)
    text = str(report)
    assert f"{100 * report.parameter_share:.1f} % of the parameters" in text
    assert "left out of the file: head.projection.weight" in text and "at their start values: head.proj" in text


def test_a_backbone_of_less_than_half_is_refused():  # B055
    model = x3d_small(num_classes=20_000)
    with pytest.raises(CheckpointError, match="less than half, so nothing was changed"):
        load_weights(model, x3d_small(num_classes=3).state_dict(), scope="backbone")


def mvit(num_frames: int, crop_size: int, num_classes: int = 5) -> MViT:
    reads = Preprocessing(num_frames=num_frames, frame_stride=4, crop_size=crop_size)
    return MViT(preprocessing=reads, num_classes=num_classes, width=8, depth=3, widen_at=(1,))


def test_position_tables_follow_the_models_input():  # B057
    source, model = mvit(8, 64).state_dict(), mvit(16, 96)
    report = load_weights(model, source)
    tables = {key for key in source if ".rel_pos_" in key}
    assert len(tables) == 9 and report.kept == report.dropped == ()
    for key, value in model.state_dict().items():
        assert (value.shape != source[key].shape) if key in tables else torch.equal(value, source[key]), key
    assert "position tables interpolated to the model's input: blocks.0.attn.rel_pos_" in str(report)
    assert "rel_pos_t 7 to 15" in str(report) and "rel_pos_h 31 to 47" in str(report)
    assert not load_weights(mvit(8, 64), source).notes
    with pytest.raises(CheckpointError, match="Only the heads differ"):
        load_weights(mvit(16, 96, num_classes=6), source)


def test_python_2_pickles_of_arrays(tmp_path: Path):
    values = {
        "float32": np.float32([[1.5, -2.0]]),
        "float64": np.float64([1e-300, np.nan]),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
        "scalar": np.float32(2.5),
        "none": None,
        "text": "caf\xe9",
        "ordered": collections.OrderedDict(a=[1, (2, 3)]),
    }
    from twinreel.models.weights.pickles import read_pickle

    write_python2_pickle(values, tmp_path / "two.pkl")
    (tmp_path / "three.pkl").write_bytes(pickle.dumps(values, protocol=2))
    (tmp_path / "four.pkl").write_bytes(pickle.dumps(values, protocol=4))
    for name in ("two", "three", "four"):
        read = read_pickle(tmp_path / f"{name}.pkl")
        assert read.keys() == values.keys()
        for key, value in values.items():
            np.testing.assert_equal(read[key], value)


class Touch:
    """Its unpickling would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["evil.pkl", "evil.pyth"])
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"blobs": {"conv1_w": Touch(tmp_path / "ran")}}, protocol=2))
    with pytest.raises(CheckpointError, match=r"the pickle names (posix|nt)\.mkdir, refused because .* run code; read"):
        read_weights(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\nload\n(S'/etc/passwd'\ntR.",  # a function of an allowed module
        b"cnumpy.core.multiarray\nfromfile\n(S'/etc/passwd'\ntR.",
        b"c__builtin__\neval\n(S'1 + 1'\ntR.",
        b"c__builtin__\ngetattr\n(ccollections\nOrderedDict\nS'fromkeys'\ntR.",
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",  # a dotted name
        b"cnumpy\ndtype.type\n.",
    ],
)
def test_names_beside_the_allowed_ones(tmp_path: Path, code: bytes):
    (tmp_path / "evil.pkl").write_bytes(code)
    with pytest.raises(CheckpointError, match="refused because unpickling it can run code"):
        read_weights(tmp_path / "evil.pkl")


def test_arrays_of_objects_and_damaged_pickles(tmp_path: Path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"blobs": {"conv1_w": np.array([{}])}}, protocol=2))
    with pytest.raises(CheckpointError, match=r"not a readable file of weights .*: an array of object, which holds no"):
        read_weights(tmp_path / "a.pkl")
    (tmp_path / "a.pkl").write_bytes(b"(dS'blobs'\nc_codecs\nencode\n(S'a'\nS'zip'\ntRs.")  # no other codec is run
    with pytest.raises(CheckpointError, match="bytes written as zip"):
        read_weights(tmp_path / "a.pkl")
    whole = pickle.dumps({"blobs": {"conv1_w": np.zeros(100)}}, protocol=2)
    for size in range(0, len(whole), 37):
        (tmp_path / "cut.pkl").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pkl: (an empty file|not a readable file of weights)"):
            read_weights(tmp_path / "cut.pkl")


def test_configuration_objects_are_refused_with_the_way_to_convert(state: State, tmp_path: Path):  # B058
    class CfgNode(dict):  # type: ignore[type-arg]
        pass

    CfgNode.__module__, CfgNode.__qualname__ = __name__, "CfgNode"
    globals()["CfgNode"] = CfgNode
    torch.save({**pyth(state), "cfg": CfgNode(a=1)}, tmp_path / "a.pyth")
    with pytest.raises(CheckpointError, match=r"\(.*CfgNode\), refused .* Convert it once") as caught:
        read_weights(tmp_path / "a.pyth")
    command = re.search(r'python -c "(.*)"', str(caught.value))
    assert command is not None and "weights_only=True" in command[1]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["blocks.0.conv.weight", "blocks.1.res_blocks.0.branch2.conv_x.weight"], "network than .*conv_x.weight"),
        (["blocks.0.conv.weight", "blocks.0.conv.conv_xy.weight"], "network than .*conv_xy.weight"),  # one key twice
        (["blocks.0.conv.weight", "blocks.9.what"], "network than .*blocks.9.what"),
        (["patch_embed.patch_model.weight"], "PyTorchVideo's MViT is the first version .* twinreel has the second"),
    ],
)
def test_pytorchvideo_networks_that_are_not_here(names: list[str], words: str):
    with pytest.raises(CheckpointError, match=words):
        rename_pytorchvideo({name: torch.zeros(1) for name in names}, "a.pyth")


def test_a_description_beside_the_weights(state: State, tmp_path: Path):
    about = {"model": "x3d_small", "options": {"num_classes": 7}, "preprocessing": {}, "layout": "slowfast", "epoch": 3}
    save_weights(state, tmp_path / "a.safetensors", about)
    weights = read_weights(tmp_path / "a.safetensors")
    assert (weights.model, weights.options, weights.layout, weights.epoch) == (
        "x3d_small",
        {"num_classes": 7},
        "slowfast",
        3,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    save_weights(state, tmp_path / "b.safetensors", {"model": "x3d_small"})
    with pytest.raises(CheckpointError, match=r"its description \(twinreel\) is damaged: .*; import it again"):
        read_weights(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_weights(state, tmp_path / "none" / "a.safetensors", about)
