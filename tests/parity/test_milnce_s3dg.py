"""S3D-G and its text tower against the numbers that the founding code returned for the same weights and input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fill import fill, fill_all
from torch import Tensor

from twinreel.losses import milnce
from twinreel.models import create_model
from twinreel.models.two_towers import TwoTowers

GOLDEN = Path(__file__).parent / "golden"

# float32: the founding code itself differs from its float64 twin by up to 1.3e-6 on stages of size 7 and 9e-7 on the
# embeddings (`float32_vs_float64` of the files); ours adds the same again from another order of sums. 1e-5 leaves room
# for other machines, and is far below what a mistake does (batch norm's eps 1e-3 moves embeddings by 4e-3).
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}
# float64: the same arithmetic up to the order of sums; the gradients of batch norm over two clips amplify rounding.
FLOAT64 = {"atol": 1e-10, "rtol": 1e-7}


class Golden:
    def __init__(self, name: str) -> None:
        self.spec: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        self.state = fill_all(self.spec["state_dict"])
        self.video = fill(*self.spec["inputs"]["video"])
        self.tokens = torch.tensor(self.spec["inputs"]["text_tokens"])

    def model(self) -> TwoTowers:
        model = create_model("s3dg", weights=self.state)
        assert isinstance(model, TwoTowers)
        return model

    def check(self, name: str, ours: Tensor, tolerance: dict[str, float]) -> None:
        theirs = torch.from_numpy(np.asarray(self.arrays[name]))
        torch.testing.assert_close(ours.detach(), theirs, **tolerance, msg=lambda text: f"{name}: {text}")


@pytest.fixture(scope="module", params=["milnce_s3dg", "milnce_s3dg_s2d"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def submodule(model: TwoTowers, founding_name: str) -> torch.nn.Module:
    return model.video_tower.get_submodule(founding_name)


def test_stages_embeddings_and_features_in_float32(golden: Golden):
    model = golden.model()
    means: dict[str, Tensor] = {}
    for stage in golden.spec["stages"]:
        # conv1 of the space-to-depth network is compared before its first outputs are cut off, as in the file.
        model.video_tower.get_submodule(stage).register_forward_hook(
            lambda module, inputs, output, stage=stage: means.update({stage: output.mean(dim=(2, 3, 4))})
        )
    with torch.no_grad():
        features = model.forward_features(golden.video)
        golden.check("mixed_5c", features, FLOAT32)
        golden.check("video_embd", model.video_tower.fc(features), FLOAT32)
        golden.check("text_embd", model.encode_text(golden.tokens), FLOAT32)
    assert set(means) == set(golden.spec["stages"])
    for stage, mean in means.items():
        golden.check(f"stage.{stage}", mean, FLOAT32)


def test_training_step_in_float64(golden: Golden):
    model = golden.model().double().train()
    video_embeddings, text_embeddings = model(golden.video.double(), golden.tokens)
    loss = milnce(video_embeddings, text_embeddings, positives_twice=True)
    loss.backward()
    golden.check("f64.train.video_embd", video_embeddings, FLOAT64)
    golden.check("f64.train.text_embd", text_embeddings, FLOAT64)
    golden.check("f64.train.loss", loss, FLOAT64)

    parameters = dict(model.named_parameters())

    def gradient(founding_name: str) -> Tensor:
        name = f"video_tower.{founding_name}"
        if founding_name.startswith("text_module."):
            name = founding_name.replace("text_module.", "text_tower.")
        value = parameters[name].grad
        assert value is not None, name
        return value

    norms = torch.stack([gradient(name).norm() for name in golden.spec["grad_norm_keys"]])
    golden.check("f64.train.grad_norms", norms, FLOAT64)
    golden.check("f64.train.grad_fc_bias", gradient("fc.bias"), FLOAT64)
    golden.check("f64.train.grad_conv1_sum_k", gradient("conv1.conv1.weight").sum(dim=(2, 3, 4)), FLOAT64)
    assert parameters["text_tower.word_embd.weight"].grad is None  # a table from a founding file stays frozen
    buffers = dict(model.video_tower.named_buffers())
    for name in golden.spec["buffer_keys"]:
        golden.check(f"f64.train.buf.{name}", buffers[name], FLOAT64)


def test_keys_are_exactly_the_founding_ones(golden: Golden):
    ours = {
        (name.removeprefix("video_tower.") if name.startswith("video") else name.replace("text_tower", "text_module"))
        for name in golden.model().state_dict()
    }
    assert ours == set(golden.state)
    assert len(ours) == 537
