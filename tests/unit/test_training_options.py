"""What a recipe may ask of training beside the plain loop: averaged weights, a learned temperature, batch norms,
cached negatives, recomputed activations.
"""

import math

import pytest
import torch
from small_runs import CPU, assert_same, assert_same_runs, be_killed, in_step, own, recipe, records, weights_of
from torch import nn

from twinreel import training
from twinreel.assembly import load_model, load_run
from twinreel.checkpoint import find_checkpoint, read_task_weights, read_weights, save_checkpoint
from twinreel.errors import CheckpointError, ConfigError
from twinreel.evaluation import evaluate
from twinreel.optim import WeightAverage
from twinreel.parts import build_parts
from twinreel.training import train


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


EVERYTHING = (
    "train.ema_decay=0.5", "task.learn_temperature=true", "train.batch_norm=frozen", "train.cached_negatives=true",
    "train.micro_batch_size=1", "train.activation_checkpointing=true",
)  # fmt: skip
CACHED = ("train.cached_negatives=true", "train.batch_norm=frozen", "train.micro_batch_size=2")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(own, ["train.ema_decay=0.9"], id="averaged weights"),
        pytest.param(own, ["task.learn_temperature=true"], id="learned temperature"),
        pytest.param(own, CACHED, id="cached negatives"),
        pytest.param(own, EVERYTHING, id="everything"),
        pytest.param(recipe, EVERYTHING, id="everything, conv3d_small"),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, videos, monkeypatch, make, options):
    wanted = make(videos, "train.save_every=4 steps", "eval.every=3 steps", *options)
    train(wanted, tmp_path / "whole", quiet=True)
    in_step(monkeypatch, 6, be_killed)  # step 4 is saved, step 5 is lost
    with pytest.raises(KeyboardInterrupt):
        train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    torch.manual_seed(12345)
    train(wanted, tmp_path / "parts", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    assert len(records(tmp_path / "parts")) == 6
    assert [record["step"] for record in records(tmp_path / "parts", "eval")] == [3, 6]


# ---- averaged weights


def test_averaged_weights_are_saved_loaded_and_judged_and_change_nothing_else(tmp_path, videos):
    every_step = ["train.save_every=1 steps", "train.keep_last=9", "optim.learning_rate=0.05"]
    wanted = own(videos, *every_step, "train.ema_decay=0.4")
    result = train(wanted, tmp_path / "run", quiet=True)
    average = {name: weight.detach().double() for name, weight in build_parts(wanted, CPU).model.named_parameters()}
    for step in range(1, 7):
        decay, weights = min(0.4, (1 + step) / (10 + step)), weights_of(tmp_path / "run", f"step_{step}")
        average = {name: decay * value + (1 - decay) * weights[name] for name, value in average.items()}
    saved = weights_of(tmp_path / "run", "step_6", averaged=True)
    for name, weight in saved.items():
        if name in average:
            torch.testing.assert_close(weight.double(), average[name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(weight, weights[name])
        else:
            assert torch.equal(weight, weights[name]), name  # running statistics are the model's own

    assert_same(dict(load_run(tmp_path / "run", "step_6").model.state_dict()), saved)
    best = find_checkpoint(tmp_path / "run", "best")[0]
    assert_same(dict(load_model(tmp_path / "run").state_dict()), weights_of(tmp_path / "run", best.name, averaged=True))
    for name, value in evaluate(tmp_path / "run", checkpoint="step_6").metrics.items():
        assert result.report.metrics[name] == pytest.approx(value, abs=1e-6), name

    plain = train(own(videos, *every_step), tmp_path / "plain", quiet=True)
    assert_same(weights_of(tmp_path / "plain"), weights)
    assert not (find_checkpoint(tmp_path / "plain")[0] / "averaged.safetensors").exists()
    assert plain.report.metrics["loss"] != pytest.approx(result.report.metrics["loss"], rel=1e-3)


def test_tied_weights_are_loaded_averaged_under_both_names(tmp_path):
    model = nn.ModuleDict({"video": nn.Linear(3, 3), "text": nn.Linear(3, 3)})
    model["text"].weight = model["video"].weight
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    average.update(model, 1)
    checkpoint = save_checkpoint(tmp_path, 1, model, {}, {}, averaged=average.weights)
    model.load_state_dict(read_weights(checkpoint, averaged=True))
    assert torch.equal(model["video"].weight, average.weights["video.weight"])


def test_another_decay_is_refused_on_resume(tmp_path, videos):
    train(recipe(videos, "train.ema_decay=0.9"), tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match=r"train\.ema_decay: 0\.9 in the run, None now"):
        train(recipe(videos), tmp_path / "run", resume=True, quiet=True)


# ---- a learned temperature


def plant(monkeypatch, scale):
    """Let a run begin with this logit scale."""
    real = training.build_parts

    def planted(*args):
        parts = real(*args)
        parts.task.log_scale.data.fill_(math.log(scale))
        return parts

    monkeypatch.setattr(training, "build_parts", planted)


def test_a_learned_temperature_moves_is_logged_saved_and_loaded(tmp_path, videos):
    run = tmp_path / "run"
    train(recipe(videos, "task.learn_temperature=true", "optim.learning_rate=0.05"), run, quiet=True)
    scales = [record["logit_scale"] for record in records(run)]
    assert len(set(scales)) == 6 and all(1 <= scale <= 100 for scale in scales)
    assert abs(scales[-1] - 10) > 0.1  # task.temperature=0.1
    last = find_checkpoint(run, "last")[0]
    assert read_task_weights(last)["log_scale"].exp().item() == pytest.approx(scales[-1])
    task = load_run(run, "last").task
    assert 1 / task.temperature == pytest.approx(scales[-1]) and not load_run(run, "last").model.training
    assert 1 / load_run(run, "step_4").task.temperature == pytest.approx(scales[3])
    train(recipe(videos), tmp_path / "fixed", quiet=True)
    assert not (find_checkpoint(tmp_path / "fixed")[0] / "task.safetensors").exists()
    assert {record["logit_scale"] for record in records(tmp_path / "fixed")} == {10.0}
    with pytest.raises(CheckpointError, match="no learned temperature in it"):
        read_task_weights(find_checkpoint(tmp_path / "fixed")[0])


def test_the_gradient_of_the_temperature_is_that_of_the_loss(tmp_path, videos):
    """One step of plain SGD moves the log of the scale by rate x gradient, which finite differences give."""
    settings = ["train.num_steps=1", "optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.decay=none",
                "optim.warmup_steps=null", "optim.learning_rate=0.01", "eval.split=null"]  # fmt: skip
    train(recipe(videos, *settings, "task.learn_temperature=true"), tmp_path / "run", quiet=True)
    moved = math.log(records(tmp_path / "run")[0]["logit_scale"]) - math.log(10)
    losses = []
    for log_scale in (math.log(10) - 0.01, math.log(10) + 0.01):
        run = tmp_path / f"{log_scale}"
        train(recipe(videos, *settings, f"task.temperature={math.exp(-log_scale)}"), run, quiet=True)
        losses.append(records(run)[0]["loss"])
    assert moved == pytest.approx(-0.01 * (losses[1] - losses[0]) / 0.02, rel=1e-2)


@pytest.mark.parametrize(("scale", "clamped"), [(1e4, 100), (1e-4, 1)])
def test_a_scale_beyond_the_limits_is_clamped_and_the_run_stays_finite(tmp_path, videos, monkeypatch, scale, clamped):
    plant(monkeypatch, scale)  # B082
    run = tmp_path / "run"
    train(
        recipe(videos, "task.learn_temperature=true", "train.save_every=1 steps", "train.keep_last=9"), run, quiet=True
    )
    lines = records(run)
    assert len(lines) == 6 and all(math.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in lines)
    assert lines[0]["logit_scale"] == pytest.approx(clamped)
    assert all(1 - 1e-5 <= line["logit_scale"] <= 100 + 1e-3 for line in lines)
    assert all(value.isfinite().all() for value in weights_of(run).values())
    assert load_run(run, "step_1").task.temperature == pytest.approx(1 / clamped)


@pytest.mark.parametrize("temperature", ["0", "-1", "0.0001", "100"])
def test_a_learned_temperature_cannot_start_where_a_fixed_one_cannot_be(tmp_path, videos, temperature):
    with pytest.raises(ConfigError, match="temperature"):
        train(
            recipe(videos, f"task.temperature={temperature}", "task.learn_temperature=true"),
            tmp_path / "run",
            quiet=True,
        )
    assert not (tmp_path / "run").exists()


def test_a_temperature_that_the_loss_does_not_have_cannot_be_learned(tmp_path, videos):
    words = r"task\.learn_temperature needs a loss on normalized embeddings .*normalize=true"
    with pytest.raises(ConfigError, match=words):
        train(recipe(videos, "task.normalize=false", "task.learn_temperature=true"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the fixed temperature is 0.02; 0.05 to 0.2 is safe"),
        (["task.learn_temperature=true"], "the learned temperature is 0.02"),
    ],
)
def test_an_unsafe_temperature_is_warned_of_once(tmp_path, videos, options, words):
    train(recipe(videos, "task.temperature=0.02", "train.num_steps=3", *options), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "log.txt").read_text().count(f"warning: {words}") == 1


# ---- batch norms


def test_frozen_batch_norms_keep_their_statistics_while_scale_and_shift_learn(tmp_path, videos):
    wanted = own(videos, "train.batch_norm=frozen")
    before = build_parts(wanted, CPU).model.state_dict()
    train(wanted, tmp_path / "frozen", quiet=True)
    train(own(videos), tmp_path / "learning", quiet=True)
    after, usual = weights_of(tmp_path / "frozen"), weights_of(tmp_path / "learning")
    statistics = {name for name in before if "running" in name or "num_batches" in name}
    assert len(statistics) == 3
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name in statistics), name
        assert not torch.equal(value, usual[name]), name
    assert "batch norm frozen" in (tmp_path / "frozen" / "log.txt").read_text()


def test_synchronized_batch_norms_are_refused_on_a_cpu(tmp_path, videos):
    with pytest.raises(ConfigError, match=r"train\.batch_norm=sync needs a GPU: .*use per_process or frozen"):
        train(own(videos, "train.batch_norm=sync", "train.device=cpu"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


# ---- cached negatives


def test_cached_negatives_of_micro_batches_are_those_of_the_whole_batch(tmp_path, videos):
    """Under SGD, in which a rounding difference stays one."""
    common = ["train.batch_norm=frozen", "optim.name=sgd", "optim.learning_rate=0.05", "eval.split=null"]
    runs = {
        "whole": [], "cached": ["train.micro_batch_size=1", "train.cached_negatives=true"],
        "plain": ["train.micro_batch_size=2"],
    }  # fmt: skip
    for name, options in runs.items():
        train(recipe(videos, *common, *options), tmp_path / name, quiet=True)
    losses = {name: [record["loss"] for record in records(tmp_path / name)] for name in runs}
    assert losses["cached"] == pytest.approx(losses["whole"], rel=1e-4)
    assert all(abs(plain / whole - 1) > 0.1 for plain, whole in zip(losses["plain"], losses["whole"], strict=True))
    whole, cached = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cached")
    for name, value in whole.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-3, atol=1e-5)
    for name, words in (
        ("whole", "12 negative captions a clip (of the global batch)"),
        ("cached", "4 micro-batches x 1 clips on cpu, 12 negative captions a clip (of the global batch (cached))"),
        ("plain", "2 micro-batches x 2 clips on cpu, 4 negative captions a clip (of the micro-batch across processes)"),
    ):
        assert words in (tmp_path / name / "log.txt").read_text()


def test_cached_negatives_with_batch_norms_that_see_one_micro_batch_are_refused(tmp_path, videos):
    settings = ["train.cached_negatives=true", "train.micro_batch_size=2"]
    with pytest.raises(ConfigError) as told:
        train(own(videos, *settings), tmp_path / "run", quiet=True)
    assert str(told.value) == (
        "train.cached_negatives=true with 1 batch norms in train.batch_norm=per_process: each micro-batch would be "
        "normalized by its own few clips, and the gradient would not be that of the global batch. Set "
        "train.batch_norm=frozen (or sync, on GPUs), or train.cached_negatives=false"
    )
    assert not (tmp_path / "run").exists()
    still = own(videos, *settings, "model.freeze=[video_tower]")  # its batch norm learns nothing
    assert train(still, tmp_path / "run", quiet=True).steps == 6


# ---- recomputed activations


@pytest.mark.parametrize("make", [recipe, own])
def test_recomputed_activations_give_the_same_bits(tmp_path, videos, make):
    for value in ("false", "true"):
        train(make(videos, f"train.activation_checkpointing={value}"), tmp_path / value, quiet=True)
    assert_same_runs(tmp_path / "false", tmp_path / "true")


def test_activations_are_recomputed_where_that_is_asked_for_and_it_may_change_on_resume(tmp_path, videos, monkeypatch):
    real, runs = training.build_parts, []

    def counting(*args):
        parts = real(*args)
        parts.model.video_tower[0][0].register_forward_hook(lambda *_: runs.append(parts.model.training))
        return parts

    monkeypatch.setattr(training, "build_parts", counting)
    for value, times in (("false", 1), ("true", 2)):
        runs.clear()
        wanted = own(videos, f"train.activation_checkpointing={value}", "eval.split=null")
        train(wanted, tmp_path / value, quiet=True)
        assert runs == [True] * 6 * times
    before = weights_of(tmp_path / "false")
    train(wanted, tmp_path / "false", resume="step_2", quiet=True)
    assert_same(before, weights_of(tmp_path / "false"))
