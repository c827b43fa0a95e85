"""The renaming of Caffe2 blobs against what the founding converter made of every blob of three networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fill import fill_all

from python2_pickles import write_python2_pickle
from twinreel.errors import CheckpointError
from twinreel.models.resnet3d import i3d_nln_8x8_r50, slow_8x8_r50
from twinreel.models.slowfast import slowfast_8x8_r50
from twinreel.models.weights import load_weights, read_weights
from twinreel.models.weights.caffe2 import blob_key, rename_blobs

GOLDEN = Path(__file__).parent / "golden"
NAMES = json.loads((GOLDEN / "slowfast_caffe2_names.json").read_text())["models"]
BUILDERS = {"slowfast_8x8_r50": slowfast_8x8_r50, "slow_8x8_r50": slow_8x8_r50, "i3d_nln_8x8_r50": i3d_nln_8x8_r50}


@pytest.mark.parametrize("model", NAMES)
def test_every_blob_has_the_founding_key(model: str):
    assert {blob: blob_key(blob) for blob in NAMES[model]} == NAMES[model]


@pytest.mark.parametrize("model", NAMES)
def test_a_file_of_the_model_zoo_loads_in_whole(model: str, tmp_path: Path):
    """Written as Python 2 did, with the training's own blobs in it."""
    table = json.loads((GOLDEN / f"{model}.json").read_text())["state_dict"]
    state = fill_all({key: value for key, value in table.items() if not key.endswith("num_batches_tracked")})
    blobs: dict[str, Any] = {blob: state[key].numpy() for blob, key in NAMES[model].items()}
    training = {"conv1_w_momentum": blobs["conv1_w"], "lr": np.float32([0.1]), "model_iter": np.int64([9])}
    write_python2_pickle({"blobs": {**blobs, **training}}, tmp_path / "a.pkl")
    weights = read_weights(tmp_path / "a.pkl")
    assert (weights.layout, weights.left_out) == ("caffe2", ("conv1_w_momentum", "lr", "model_iter"))
    with torch.device("meta"):
        network = BUILDERS[model]()
    report = load_weights(network, weights)
    assert all(key.endswith("num_batches_tracked") for key in report.kept) and report.parameter_share == 1.0
    assert all(torch.equal(weights.tensors[key], value) for key, value in state.items())


def test_blobs_of_x3d():
    """From the founding rules; the names of no whole X3D are recorded."""
    expected = {
        "conv1_xy_w": "s1.pathway0_stem.conv_xy.weight",
        "res3_2_branch2b_bn_fc1_w": "s3.pathway0_res2.branch2.se.fc1.weight",
        "res3_2_branch2b_bn_fc2_b": "s3.pathway0_res2.branch2.se.fc2.bias",
        "conv_5_w": "head.conv_5.weight",
        "conv_5_bn_riv": "head.conv_5_bn.running_var",
        "lin_5_w": "head.lin_5.weight",
    }
    assert {blob: blob_key(blob) for blob in expected} == expected
    tensors, _ = rename_blobs({"lin_5_w": np.zeros((8, 4)), "pred_w": np.zeros((3, 8))}, "a.pkl")
    assert tensors["head.lin_5.weight"].shape == (8, 4, 1, 1, 1) and tensors["head.projection.weight"].shape == (3, 8)


def test_the_running_variance_is_taken_as_it_is():  # riv is no inverse
    tensors, _ = rename_blobs({"res_conv1_bn_riv": np.float32([4.0])}, "a.pkl")
    assert tensors["s1.pathway0_stem.bn.running_var"].tolist() == [4.0]


@pytest.mark.parametrize(
    ("blobs", "words"),
    [
        ({"roi_conv_w": np.zeros(3)}, "a.pkl: Caffe2 blobs that are none of .* network: roi_conv_w"),
        ({"res2_0_branch2a_bn_w": np.zeros(3)}, "none of .*: res2_0_branch2a_bn_w"),
        ({"conv1_rm": np.zeros(3)}, "none of .*: conv1_rm"),
        ({"conv1_w": "text"}, "hold no array of numbers: conv1_w"),
        ({"t_res2_1_branch2c_bn_subsample_w": np.zeros(3), "t_res2_2_branch2c_bn_subsample_w": np.zeros(3)}, "one key"),
    ],
)
def test_what_no_rule_knows_is_refused_by_name(blobs: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words):
        rename_blobs(blobs, "a.pkl")
