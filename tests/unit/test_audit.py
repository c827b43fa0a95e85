"""A number that is not finite stops a run before the step, names the samples, and keeps the step for a replay."""

import json

import pytest
import torch
from small_runs import CPU, assert_same, assert_same_runs, recipe, weights_of

from twinreel import training
from twinreel.checkpoint import find_checkpoint, load_training_state
from twinreel.errors import TrainingError
from twinreel.parts import build_parts
from twinreel.tasks import Contrastive, WholeModel
from twinreel.training import train


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


def test_a_non_finite_loss_stops_before_the_step_and_names_the_samples(tmp_path, videos, monkeypatch):
    real, calls = Contrastive.share, []

    def poisoned(self, *args, **options):
        share = real(self, *args, **options)
        in_a_step = "negative_seed" in options
        return share * float("nan") if in_a_step and (calls.append(1) or len(calls) == 4) else share

    monkeypatch.setattr(Contrastive, "share", poisoned)
    words = r"step 4: the loss is nan; no weight was changed. Samples: .*train_0.*; all embeddings are finite"
    with pytest.raises(TrainingError, match=words):
        train(recipe(videos), tmp_path / "run", quiet=True)
    assert find_checkpoint(tmp_path / "run")[0].name == "step_0000002"


@pytest.mark.parametrize("tower", ["video", "text"])
def test_the_sample_whose_embedding_is_not_finite_is_named_and_the_step_is_kept_for_a_replay(
    tmp_path, videos, monkeypatch, tower
):
    wanted = recipe(videos, "train.save_every=1 steps", "train.micro_batch_size=2", "train.keep_last=9")
    train(wanted, tmp_path / "whole", quiet=True)
    real, calls = WholeModel.forward, []

    def poisoned(self, video, text):
        embeddings = dict(zip(("video", "text"), real(self, video, text), strict=True))
        calls.append(1)
        if len(calls) == 8:  # the second micro-batch of step 4
            embeddings[tower] = embeddings[tower].clone()
            embeddings[tower][-1] = float("nan")  # of its last clip
        return tuple(embeddings.values())

    monkeypatch.setattr(WholeModel, "forward", poisoned)
    run = tmp_path / "run"
    with pytest.raises(TrainingError) as told:
        train(wanted, run, quiet=True)
    monkeypatch.undo()
    assert_same(weights_of(run), weights_of(tmp_path / "whole", "step_3"))  # the last checkpoint is intact
    file = run / "non_finite" / "step_0000004.json"
    record = json.loads(file.read_text())
    assert (record["step"], record["what"], record["value"], record["num_processes"]) == (4, "loss", "nan", 1)
    parts = build_parts(wanted, CPU)
    assert [(row["epoch"], row["row"]) for row in record["batch"]] == parts.plan.batch(3)
    assert [row["id"] for row in record["batch"]] == [parts.rows[index].id for _, index in parts.plan.batch(3)]
    assert [row[f"{tower}_finite"] for row in record["batch"]] == [True, True, True, False]
    assert all(row["video_finite"] for row in record["batch"]) == (tower == "text")
    bad = record["batch"][-1]["id"]
    assert f"embeddings that are not finite: {bad}. All are in {file}" in str(told.value)
    assert f"twinreel replay {run} --step 4" in str(told.value) and "optim.clip_norm" in str(told.value)
    kept, _ = find_checkpoint(run / "non_finite")
    assert kept.name == "step_0000003"
    state = load_training_state(kept)["optimizer"]["state"]
    for one, other in zip(
        state.values(), load_training_state(find_checkpoint(run)[0])["optimizer"]["state"].values(), strict=True
    ):
        assert_same(one, other)
    train(wanted, run, resume=True, quiet=True)
    assert_same_runs(run, tmp_path / "whole")


def test_a_non_finite_gradient_stops_too(tmp_path, videos, monkeypatch):
    real = training.global_gradient

    def poisoned(parts, *args):
        result = real(parts, *args)
        next(p for p in parts.model.parameters() if p.grad is not None).grad.fill_(float("inf"))
        return result

    monkeypatch.setattr(training, "global_gradient", poisoned)
    with pytest.raises(TrainingError, match=r"step 1: the gradient norm is (inf|nan); no weight was changed"):
        train(recipe(videos), tmp_path / "run", quiet=True)
    monkeypatch.undo()
    start = build_parts(recipe(videos), CPU).model.state_dict()
    kept = weights_of(tmp_path / "run" / "non_finite", "step_0")
    assert all(
        torch.equal(value, kept[name])
        for name, value in start.items()
        if "running" not in name and "batches" not in name
    )
    assert train(recipe(videos), tmp_path / "run", resume=True, quiet=True).steps == 6
