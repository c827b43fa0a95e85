"""What a step costs: bytes against counting by hand, the arithmetic of the largest micro-batch, which knob is named."""

import dataclasses

import pytest
import torch
from small_runs import recipe
from torch import nn

from twinreel import bench_step as measuring
from twinreel.bench_step import bench_step, part_names
from twinreel.errors import TrainingError
from twinreel.models import create_model
from twinreel.recipe import load_recipe
from twinreel.step_costs import PartCosts, StepCosts

GB = 2**30
SETTINGS = {"precision": "fp32", "memory_format": "contiguous", "activation_checkpointing": False}


def costs(**values):
    return StepCosts(
        **{
            "parts": {"backbone": PartCosts(forward=10.0, backward=20.0), "temporal": PartCosts(forward=30.0)},
            "optimizer_milliseconds": 5.0, "parameter_bytes": 4000, "gradient_bytes": 4000, "optimizer_bytes": 8000,
            "kept_per_clip": 0.5 * GB, "peak_per_clip": 0.9 * GB, "fixed_bytes": 0.0, "free_bytes": 10 * GB,
            "micro_batch": 8, "process_batch": 32, "unit": 1, "measured_clips": 2, "settings": SETTINGS,
            "preferred": {"memory_format": "contiguous"},
        }
        | values
    )  # fmt: skip


def test_the_largest_micro_batch_is_what_fits_into_nine_tenths_of_free_memory():
    assert costs().largest_micro_batch == 10 and costs().best_micro_batch == 8
    assert costs(peak_per_clip=None).largest_micro_batch == 18  # what is kept counts then
    assert costs(peak_per_clip=0.1 * GB).largest_micro_batch == 18  # never less than what is kept
    assert costs(fixed_bytes=2 * GB).largest_micro_batch == 7
    assert costs(unit=4).largest_micro_batch == 8
    assert costs(free_bytes=GB // 2).largest_micro_batch == 0 == costs(free_bytes=GB // 2).best_micro_batch
    assert costs(process_batch=6).best_micro_batch == 6  # no more than there are


@pytest.mark.parametrize(
    ("values", "first", "words"),
    [
        ({}, "nothing", ["the micro-batch of 8 fits", "50% of the time is"]),
        ({"micro_batch": 32}, "train.micro_batch_size=8", ["28.80 GB", "10.00 GB are free"]),
        ({"micro_batch": 4}, "train.micro_batch_size=8", ["fits (now 4)"]),
        ({"preferred": {"memory_format": "channels_last"}}, "train.memory_format=channels_last", ["faster"]),
        ({"free_bytes": GB // 2}, "8 clips at once need", ["7.20 GB"]),
    ],
)
def test_the_knob_is_named(values, first, words):
    advice = costs(**values).advice()[0]
    assert advice.startswith(first), advice
    for word in words:
        assert word in advice


def test_what_comes_after_the_micro_batch():
    found = costs(micro_batch=32).advice()
    assert found[1].startswith("train.activation_checkpointing=true")
    nothing_fits = costs(free_bytes=GB // 2).advice()
    assert "train.precision=bf16" in nothing_fits[2] and "fewer num_frames" in nothing_fits[3]
    frugal = SETTINGS | {"activation_checkpointing": True}
    assert "activation_checkpointing=false" in costs(settings=frugal, micro_batch=1, process_batch=1).advice()[0]


def test_the_table_adds_up():
    table = costs().to_table().splitlines()
    assert any(line.split() == ["all", "40.00", "20.00", "100%", "512.0"] for line in table)
    assert "turn: " in table[-1]
    told = costs(notes=["note: one"]).to_json()
    assert told["largest_micro_batch"] == 10 and told["milliseconds_a_clip"] == 60 and told["notes"] == ["note: one"]


def test_parts_of_our_models():
    names = part_names(create_model("slowfast_small", num_classes=3))
    convolutions = {
        name: module.kernel_size[0]
        for name, module in create_model("slowfast_small", num_classes=3).named_modules()
        if isinstance(module, nn.Conv3d)
    }
    assert all(names[name] == ("temporal" if size > 1 else "backbone") for name, size in convolutions.items())
    assert names["head.projection"] == "head" and set(names.values()) == {"backbone", "temporal", "head"}
    towers = part_names(create_model("s3dg_small", num_words=5))
    assert towers["video_tower.fc"] == "head" and towers["text_tower.fc1"] == "text"
    assert towers["video_tower.mixed_3b.conv_b1_b.conv2"] == "temporal"


class Known(nn.Module):
    """A classifier whose kept bytes can be counted: the video, and the input of the last layer."""

    def __init__(self, classes):
        super().__init__()
        from twinreel.models.preprocessing import Preprocessing

        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16)
        self.conv = nn.Conv3d(3, 8, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.head = nn.Linear(8, classes)

    def forward(self, video):
        return self.head(self.conv(video).mean(dim=(2, 3, 4)))


def known(*, num_classes: int = 3) -> nn.Module:
    return Known(num_classes)


def classifier(*overrides):
    return load_recipe(
        "own_actions_small",
        ["data.manifest=none.csv", "train.device=cpu", "train.global_batch_size=4", "model.num_classes=3", *overrides],
    )


def own(*overrides):
    from twinreel.config import Tree
    from twinreel.recipe import build_recipe

    values = classifier(*overrides).model_dump(mode="json")
    values["model"] = {"name": "test_step_costs:known", "num_classes": 3}
    return build_recipe(Tree(values, {"": "test"}))


def test_kept_bytes_are_those_of_the_graph(monkeypatch):
    found = bench_step(own())
    video, pooled = 3 * 4 * 16 * 16 * 4, 8 * 4
    assert found.parts["temporal"].kept == video  # the convolution's input
    assert found.parts["head"].kept == pooled
    assert found.parameter_bytes == found.gradient_bytes == (3 * 8 * 3 + 8 * 3 + 3) * 4
    assert 0 <= found.kept_per_clip - video - pooled < 200  # and what the loss keeps
    assert found.parts["temporal"].forward > 0 and found.parts["temporal"].backward > 0


def test_both_tasks_are_measured_without_data(tmp_path):
    said = []
    found = bench_step(classifier(), say=said.append)
    assert {"backbone", "temporal", "head", "loss"} <= set(found.parts)
    assert found.optimizer_bytes >= 2 * found.gradient_bytes  # adamw has two numbers for each
    assert found.measured_clips == 2 and found.milliseconds > 0 and found.largest_micro_batch > 4
    assert said == ["memory of 2 clips", "memory of 3 clips", "time of 2 clips"]
    towers = bench_step(recipe(tmp_path / "none", "train.device=cpu"))
    assert {"backbone", "temporal", "head", "text", "loss"} <= set(towers.parts)
    assert towers.notes == ["note: a text tower of 16 made-up words; its table will be larger"]


def test_recomputing_keeps_less():
    plain, frugal = (
        bench_step(classifier(f"train.activation_checkpointing={on}", "train.precision=fp32")).kept_per_clip
        for on in ("false", "true")
    )
    assert frugal < plain / 2


def test_hooks_are_gone_and_too_little_memory_is_said_before_it_is_used(monkeypatch):
    built = []
    real = measuring._build
    monkeypatch.setattr(measuring, "_build", lambda *args: built.append(real(*args)) or built[-1])
    bench_step(own())
    [(parts, _)] = built
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in parts.whole.modules())
    monkeypatch.setattr(measuring, "_free_bytes", lambda device: 10_000)
    with pytest.raises(TrainingError, match=r"2 clips at once keep 0\.00 GB, and 0\.00 GB are free on cpu"):
        bench_step(own())


def test_free_memory_is_that_of_the_machine_or_less():
    free = measuring._free_bytes(torch.device("cpu"))
    assert 0 < free < 2**46
    assert dataclasses.replace(costs(), free_bytes=free).largest_micro_batch >= 0
