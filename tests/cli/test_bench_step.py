"""`twinreel bench step`: both tasks through the real entry point, no data needed."""

import json

import pytest

from cli.command_line import SMALL, twinreel

CLASSES = ("own_actions_small", "data.manifest=none.csv", "model.num_classes=3", "train.device=cpu")


def test_table_and_json_of_a_classifier():
    outcome = twinreel("bench", "step", *CLASSES)
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    for name in ("backbone", "temporal", "head", "loss", "all", "optimizer"):
        assert any(line.startswith(name) for line in lines), name
    assert "buffers: parameters " in outcome.out and "free memory" in outcome.out
    assert any(line.startswith("turn: ") for line in lines)
    told = json.loads(twinreel("bench", "step", *CLASSES, "--clips", 1, "--json").out)
    assert told["measured_clips"] == 1 and told["largest_micro_batch"] > 0
    assert told["kept_per_clip"] == pytest.approx(sum(part["kept"] for part in told["parts"].values()))
    assert told["milliseconds_a_clip"] > 0 and told["turn"]


def test_towers_need_no_videos(tmp_path):
    outcome = twinreel("bench", "step", "demo", *SMALL, f"data.root={tmp_path / 'none'}")
    assert outcome.code == 0, outcome
    assert any(line.startswith("text ") for line in outcome.out.splitlines())
    assert not (tmp_path / "none").exists()


def test_what_is_wrong_is_said():
    twinreel("bench", "step", "own_action_small").fails("did you mean own_actions_small")
    twinreel("bench", "step", *CLASSES, "task.loss=cross_entropie").fails("did you mean cross_entropy")
