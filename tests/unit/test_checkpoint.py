"""Checkpoints: whole or not at all; a broken one is named and the one before it taken."""

import os

import pytest
import torch
from torch import nn

from twinreel.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    load_training_state,
    prune_checkpoints,
    read_weights,
    save_checkpoint,
    set_aside,
    set_link,
)
from twinreel.errors import CheckpointError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4))


def save(run, step, model):
    return save_checkpoint(run, step, model, {"name": "x"}, {"state": {"step": step}, "t": torch.arange(3)})


def test_what_is_saved_is_loaded(tmp_path, model):
    path = save(tmp_path, 7, model)
    weights = read_weights(path)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    state = load_training_state(path)
    assert state["state"]["step"] == 7 and torch.equal(state["t"], torch.arange(3))
    assert (tmp_path / "checkpoints" / "last").resolve() == path


def test_names_of_checkpoints(tmp_path, model):
    paths = [save(tmp_path, step, model) for step in (1, 2, 30)]
    set_link(tmp_path, "best", paths[1])
    assert find_checkpoint(tmp_path) == (paths[2], [])
    assert find_checkpoint(tmp_path, "last")[0] == paths[2]
    assert find_checkpoint(tmp_path, "best")[0] == paths[1]
    for name in ("step_1", "step_0000001", "1"):
        assert find_checkpoint(tmp_path, name)[0] == paths[0]
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step_5'; there are: last, best, step_0000001"):
        find_checkpoint(tmp_path, "step_5")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no contents"])
def test_a_broken_newest_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, model, damage):
    good, bad = save(tmp_path, 1, model), save(tmp_path, 2, model)
    victim = bad / "weights.safetensors"
    if damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-5])
    elif damage == "flip":
        content = bytearray(victim.read_bytes())
        content[-3] ^= 1
        victim.write_bytes(content)
    elif damage == "missing":
        victim.unlink()
    else:
        (bad / "contents.json").unlink()
    found, warnings = find_checkpoint(tmp_path)
    assert found == good and len(warnings) == 1 and "step_0000002 is broken" in warnings[0]
    with pytest.raises(CheckpointError, match="broken"):
        find_checkpoint(tmp_path, "step_2")


def test_every_checkpoint_broken_is_an_error(tmp_path, model):
    (save(tmp_path, 1, model) / "training.pt").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint is broken"):
        find_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_checkpoints_before_it_and_no_litter(tmp_path, model, monkeypatch):
    good = save(tmp_path, 1, model)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*intact.*--resume"):
        save(tmp_path, 2, model)
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == [good] and find_checkpoint(tmp_path) == (good, [])
    assert not [
        item for item in (tmp_path / "checkpoints").iterdir() if item.name.startswith(".part") and item.is_dir()
    ]


def test_pruning_keeps_the_last_and_the_best(tmp_path, model):
    for step in range(1, 7):
        path = save(tmp_path, step, model)
        if step == 2:
            set_link(tmp_path, "best", path)
    prune_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_0000002", "step_0000005", "step_0000006"]


def test_what_comes_later_is_set_aside_whole_and_links_follow(tmp_path, model):
    paths = {step: save(tmp_path, step, model) for step in (2, 4, 12, 30)}
    set_link(tmp_path, "best", paths[12])
    assert set_aside(tmp_path, paths[4]) == ["step_0000012", "step_0000030"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_0000002", "step_0000004"]
    assert find_checkpoint(tmp_path, "aside_step_0000012")[0].name == "aside_step_0000012"  # and is whole
    links = {path.name: path.resolve() for path in (tmp_path / "checkpoints").iterdir() if path.is_symlink()}
    assert links == {"last": paths[4]}
    assert set_aside(tmp_path, paths[4]) == []


def test_what_was_set_aside_before_makes_room(tmp_path, model):
    for weight in (1.0, 2.0):
        nn.init.constant_(model[0].weight, weight)
        first, later = save(tmp_path, 1, model), save(tmp_path, 2, model)
        set_link(tmp_path, "best", first)
        assert set_aside(tmp_path, first) == [later.name]
    aside = find_checkpoint(tmp_path, "aside_step_0000002")[0]
    assert read_weights(aside)["0.weight"].eq(2.0).all()
    assert find_checkpoint(tmp_path, "best")[0] == first  # it did not come later
    prune_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*step_*")) == [aside.name, first.name]


def test_writing_a_step_again_replaces_it(tmp_path, model):
    save(tmp_path, 1, model)
    with torch.no_grad():
        model[0].weight.add_(1)
    save(tmp_path, 1, model)
    weights = read_weights(find_checkpoint(tmp_path)[0])
    assert torch.equal(weights["0.weight"], model[0].weight)
