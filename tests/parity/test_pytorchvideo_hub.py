"""Networks of PyTorchVideo's hub: renamed one to one, and the same numbers as their own code.

golden/pytorchvideo_hub.json holds the key, shape and role of every tensor of three of them, and logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fill import fill, fill_all
from torch import nn

from twinreel.models.resnet3d import c2d_8x8_r50
from twinreel.models.slowfast import slowfast_8x8_r50
from twinreel.models.weights import load_weights, read_weights
from twinreel.models.x3d import x3d_s

GOLDEN = json.loads((Path(__file__).parent / "golden" / "pytorchvideo_hub.json").read_text())["models"]
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "c2d_r50": c2d_8x8_r50,
    "slowfast_r50": slowfast_8x8_r50,
    "x3d_s": x3d_s,
}


@pytest.mark.parametrize("wrapper", ["", "model."])  # of the hub, of PySlowFast's networks that PyTorchVideo built
@pytest.mark.parametrize("name", BUILDERS)
def test_names_and_numbers(name: str, wrapper: str):
    golden = GOLDEN[name]
    state = fill_all(golden["state_dict"])
    weights = read_weights({"model_state": {wrapper + key: value for key, value in state.items()}})
    assert weights.layout == "pytorchvideo"
    assert weights.pool_after_first_stage == (name == "c2d_r50")
    model: Any = BUILDERS[name](head_activation="none", train_crop_size=64)
    report = load_weights(model, weights)
    made = [key for key in report.loaded if key in weights.made]
    assert len(report.loaded) == len(state) + len(made) and not report.dropped
    # Its X3D has no norm after the first shortcut convolution; one that does nothing takes the place.
    norm = "s2.pathway0_res0.branch1_bn"
    assert {key.rpartition(".")[0] for key in made} == ({norm} if name == "x3d_s" else set())
    assert report.kept == ((f"{norm}.num_batches_tracked",) if name == "x3d_s" else ())
    assert (f"made so that they change nothing: {norm}" in str(report)) == (name == "x3d_s")
    if wrapper:
        return
    with torch.no_grad():
        logits = model.eval()(fill("input:frames", golden["input"], "clip"))
    torch.testing.assert_close(logits[0, :24], torch.tensor(golden["logits"]), atol=1e-4, rtol=1e-4)
