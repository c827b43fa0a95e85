"""Classifiers on the loop: what is printed and kept, exact resume, faults, replay, precise statistics, frozen parts."""

import json

import pytest
import torch
from small_runs import (
    assert_same_runs,
    be_killed,
    class_recipe,
    in_step,
    labelled,
    records,
    weights_of,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from twinreel.assembly import evaluation_rows, load_model, load_run
from twinreel.check import check_recipe
from twinreel.checkpoint import find_checkpoint, read_model_json
from twinreel.data.decode import probe
from twinreel.data.transforms import network_input
from twinreel.errors import ConfigError, DataError, TrainingError
from twinreel.evaluation import evaluate, view_rules
from twinreel.parts import build_parts, read_batches, training_rules
from twinreel.recipe import load_recipe
from twinreel.replay import replay
from twinreel.training import train

EVERYTHING = (
    "data.mixup=0.8", "data.cutmix=1.0", "train.ema_decay=0.9", "train.micro_batch_size=2", "task.label_smoothing=0.1",
    "data.random_erasing=0.5", "train.precise_bn_batches=3", "optim.layer_decay=0.8",
)  # fmt: skip


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    labelled(folder)
    return folder


@pytest.mark.parametrize("options", [(), EVERYTHING], ids=["plain", "everything"])
def test_a_killed_run_goes_on_bit_for_bit(videos, tmp_path, monkeypatch, options):
    wanted = class_recipe(videos, *options)
    whole = train(wanted, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        in_step(patch, 4, be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, tmp_path / "killed", quiet=True)
    train(wanted, tmp_path / "killed", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")
    assert whole.report.metrics["top_1_accuracy"] == records(tmp_path / "whole", "eval")[-1]["top_1_accuracy"]


def test_rand_augment_and_a_users_transform_change_clips_alike_after_a_resume(videos, tmp_path, monkeypatch):
    pytest.importorskip("kornia", reason="the extra `augment` is not installed")
    wanted = class_recipe(
        videos, "data.rand_augment={num_ops: 2, magnitude: 7}", "data.transform=small_runs:darkened", "data.mixup=0.8"
    )
    train(wanted, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        in_step(patch, 4, be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, tmp_path / "killed", quiet=True)
    train(wanted, tmp_path / "killed", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")
    train(class_recipe(videos, "data.mixup=0.8"), tmp_path / "plain", quiet=True)
    assert records(tmp_path / "plain")[0]["loss"] != records(tmp_path / "whole")[0]["loss"]
    with pytest.raises(ConfigError, match=r"data\.transform=small_runs:halved returned torch\.uint8 \(4, 2"):
        train(class_recipe(videos, "data.transform=small_runs:halved"), tmp_path / "halved", quiet=True)


def test_what_a_run_says_and_keeps(videos, tmp_path, capsys):
    result = train(class_recipe(videos), tmp_path / "run")
    said = capsys.readouterr().err
    assert "2 classes (a, b)" in said and "negative" not in said and "caption" not in said
    assert read_model_json(find_checkpoint(tmp_path / "run")[0])["class_names"] == ["a", "b"]
    lines = records(tmp_path / "run")
    assert len(lines) == 6 and all(0 <= line["train_top_1_accuracy"] <= 1 for line in lines)
    assert set(result.report.metrics) >= {"top_1_accuracy", "loss", "chance/top_1_accuracy"}
    model = load_model(tmp_path / "run")
    assert model(torch.zeros(1, 3, 4, 16, 16)).shape == (1, 2)
    assert load_run(tmp_path / "run").task.classes.names == ("a", "b")


def test_samples_that_fail_are_masked_and_named(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    labelled(videos)
    (victim,) = [line.split(",")[0] for line in (videos / "train.csv").read_text().splitlines()[3:4]]
    with open(victim, "r+b") as file:
        file.truncate(100)
    train(class_recipe(videos, "data.max_faults=0.2"), tmp_path / "run", quiet=True)
    faults = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    assert faults and {fault["video"] for fault in faults} == {victim}
    with pytest.raises(TrainingError, match="samples could not be read"):
        train(class_recipe(videos, "data.max_faults=0.0"), tmp_path / "strict", quiet=True)


def test_replay_takes_a_mixed_step_apart(videos, tmp_path):
    train(class_recipe(videos, "data.mixup=0.8", "train.micro_batch_size=2"), tmp_path / "run", quiet=True)
    found = replay(tmp_path / "run", 5)
    assert found.weights_of_step == 4
    assert found.loss == pytest.approx(records(tmp_path / "run")[4]["loss"], rel=1e-6)
    assert [term.captions for term in found.terms if term.captions not in (["a"], ["b"])] == []
    assert sum(term.loss for term in found.terms) / 4 == pytest.approx(found.loss, rel=1e-5)
    assert "captions or labels" in found.to_table()


def test_precise_statistics_are_those_of_the_batches(videos, tmp_path):
    """Of a first layer: the mean over the next batches, whatever the running statistics were."""
    short = ("train.num_steps=2", "optim.warmup_steps=1")
    recipe = class_recipe(videos, *short, "train.precise_bn_batches=3")
    plain = train(class_recipe(videos, *short), tmp_path / "plain", quiet=True)
    train(
        class_recipe(videos, "train.num_steps=2", "optim.warmup_steps=1", "train.precise_bn_batches=3"),
        tmp_path / "precise",
        quiet=True,
    )
    assert plain.steps == 2
    one, other = weights_of(tmp_path / "plain"), weights_of(tmp_path / "precise")
    assert torch.equal(one["body.0.weight"], other["body.0.weight"])  # training is not changed by them
    mean, variance = other["body.1.running_mean"], other["body.1.running_var"]
    assert not torch.allclose(one["body.1.running_mean"], mean)

    parts = build_parts(recipe, torch.device("cpu"), find_checkpoint(tmp_path / "plain")[0])
    assert training_rules(recipe, parts.model, parts.rows).num_candidates == 0
    means, squares, variances = [], [], []
    for step in (2, 3, 4):
        (batch,) = read_batches(recipe, parts, step)
        features = parts.model.body[0](network_input(batch, parts.model.preprocessing, torch.device("cpu")))
        means.append(features.mean((0, 2, 3, 4)))
        squares.append(means[-1] ** 2)
        variances.append(features.var((0, 2, 3, 4)))
    wanted = torch.stack(means).mean(0)
    assert torch.allclose(mean, wanted, atol=1e-5)
    spread = torch.stack(squares).mean(0) - wanted**2
    assert torch.allclose(variance, torch.stack(variances).mean(0) + spread, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.num_candidates=2", "task.num_candidates goes with task.name=contrastive; leave it out"),
        ("train.cached_negatives=true", "train.cached_negatives goes with task.name=contrastive"),
        ("eval.best_metric=text_to_video/recall_at_1", "is none of task.name=action_recognition"),
        ("eval.best_metric=mean_average_precision", "does not go with task.multi_label=false"),
        ("task.loss=milnce", r"unknown name 'milnce' \(it goes with another task.name or task.goal\)"),
        ("model.name=conv3d_small", r"unknown name 'conv3d_small' \(it goes with another task.name or task.goal\)"),
        ("task.label_smoothin=0.1", "did you mean task.label_smoothing"),
        ("data.rand_augment={magnitud: 3}", "unknown key 'magnitud'; did you mean magnitude"),
    ],
)
def test_keys_of_another_task_and_typing_errors(videos, override, words):
    with pytest.raises(ConfigError, match=words):
        class_recipe(videos, override)


def test_pairs_must_fit_into_a_batch(videos):
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=1 is not a whole number of pairs"):
        class_recipe(videos, "data.mixup=0.8", "train.micro_batch_size=1")


def test_contrastive_recipes_refuse_keys_of_classes():
    for override, name in (("data.mixup=0.8", "data.mixup"), ("task.multi_label=true", "task.multi_label"),
                           ("model.num_classes=3", "model.num_classes")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name} goes with task.name=action_recognition"):
            load_recipe("demo", [override])


def test_labels_are_looked_at_before_the_first_step(videos, tmp_path):
    (tmp_path / "test.csv").write_text("path,label\nx.mp4,c\n")
    with pytest.raises(DataError, match=r"evaluation rows: 1 of 1 have a label that is none of the 2 classes"):
        train(class_recipe(videos, f"eval.manifest={tmp_path / 'test.csv'}"), tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match=r"model\.num_classes=5, but the training rows name 2 classes"):
        train(class_recipe(videos, "model.num_classes=5"), tmp_path / "run", quiet=True)


def test_check_says_what_a_clip_covers_and_how_often_each_class_occurs(videos, tmp_path):
    result = check_recipe(class_recipe(videos), tmp_path / "sheet.png")
    assert result.facts["classes"] == "2: a (6), b (6)" and result.facts["classes_without_a_row"] == "0"
    assert result.facts["seconds_covered"].startswith("0.38 from first to last")
    assert "captions" not in result.facts and (tmp_path / "sheet.png").stat().st_size > 1000
    long = "model.preprocessing={num_frames: 40, frame_rate: 8.0}"
    with pytest.raises(RuntimeError):  # this net's head is made for 4 frames
        check_recipe(class_recipe(videos, long), tmp_path / "sheet.png")


def test_pictures_for_tensorboard(videos, tmp_path):  # B095
    """Enabled means that they are there after the judgment."""
    wanted = class_recipe(
        videos,
        "train.histograms_every=3 steps",
        "eval.grad_cam_layer=body",
        "eval.every=3 steps",
        "train.ema_decay=0.9",
    )
    train(wanted, tmp_path / "run", quiet=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert [event.step for event in events.Images("eval/confusion_matrix")] == [3, 6]
    assert [event.step for event in events.Histograms("weights/head.weight")] == [3, 6]
    assert "gradients/body.0.weight" in tags["histograms"] and "weights/body.0.weight" in tags["histograms"]
    assert len([tag for tag in tags["images"] if tag.startswith("grad_cam/body/")]) == 4
    assert {"train/loss", "train/learning_rate", "train/train_top_1_accuracy", "eval/top_1_accuracy"} <= set(
        tags["scalars"]
    )
    with pytest.raises(ConfigError, match=r"bodi.*did you mean body"):
        train(class_recipe(videos, "eval.grad_cam_layer=bodi"), tmp_path / "other", quiet=True)


def test_several_classes_a_clip(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    labelled(videos)
    for split in ("train", "test"):
        lines = (videos / f"{split}.csv").read_text().splitlines()[1:]
        rows = [{"path": line.split(",")[0], "labels": [["a"], ["a", "b"], []][i % 3]} for i, line in enumerate(lines)]
        (videos / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    lists = (f"data.manifest={videos / 'train.jsonl'}", f"eval.manifest={videos / 'test.jsonl'}")
    with pytest.raises(DataError, match=r"a clip has exactly one class.*task\.multi_label=true"):
        train(class_recipe(videos, *lists), tmp_path / "one", quiet=True)
    recipe = class_recipe(videos, *lists, "task.multi_label=true")
    assert recipe.task.loss == "binary_cross_entropy" and recipe.best_metric == "mean_average_precision"
    report = train(recipe, tmp_path / "run", quiet=True).report
    assert 0 < report.metrics["mean_average_precision"] <= 1 and "top_1_accuracy" not in report.metrics
    with pytest.raises(ConfigError, match=r"head_activation=softmax does not go with task\.multi_label=true"):
        class_recipe(videos, *lists, "task.multi_label=true", "model={name: x3d_small, head_activation: softmax}")
    small = class_recipe(videos, *lists, "task.multi_label=true", "model={name: x3d_small}")
    assert small.model.options["head_activation"] == "sigmoid"


def test_judging_while_training_draws_nothing(videos, tmp_path):
    """One clip from the center, whatever the epoch and whatever was drawn elsewhere."""
    report = train(class_recipe(videos, "eval.num_clips=1"), tmp_path / "run", quiet=True).report
    assert "1 window (uniform) x 1 crop" in report.protocol["views"]
    run = load_run(tmp_path / "run")
    assert evaluate(run).metrics == report.metrics
    rules, row = view_rules(run.model.preprocessing, run.recipe.eval), evaluation_rows(run.recipe)[0]
    looks = []
    for epoch in (0, 5):
        torch.manual_seed(epoch)
        looks.append(rules(row, epoch))
    assert torch.equal(looks[0].frames, looks[1].frames) and not looks[0].flip
    middle = looks[0].pts_seconds.mean() + 1 / 16  # a frame lasts an eighth of a second
    assert float(middle) == pytest.approx(probe(row.video).duration_seconds / 2, abs=0.1)
