"""Going on from an older checkpoint: the later ones are of a way that was left, and are moved aside."""

import os
import signal

import pytest
from small_runs import assert_same, assert_same_runs, in_step, own, recipe, records, weights_of

from twinreel import parts, training
from twinreel.checkpoint import find_checkpoint
from twinreel.errors import CheckpointError
from twinreel.training import train

EVERY_OTHER = ("train.save_every=2 steps", "train.keep_last=9")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


def link(run, name):
    """The checkpoint that a link points at, which is there; None without a link."""
    path = run / "checkpoints" / name
    return path.resolve(strict=True).name if path.is_symlink() else None


def folders(run, start="step_"):
    return sorted(item.name for item in (run / "checkpoints").iterdir() if item.name.startswith(start))


def stopped_in(monkeypatch, step, *arguments, **options):
    """Train until SIGTERM comes in a step."""
    with monkeypatch.context() as patch:
        in_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = train(*arguments, quiet=True, **options)
    assert (result.steps, result.stopped_by) == (step, "SIGTERM")


def scored(monkeypatch, *scores):
    """Let the evaluations that come have these scores."""
    real, left = training._evaluate, iter(scores)

    def planted(parts, wanted, log):
        report = real(parts, wanted, log)
        report.metrics[wanted.best_metric] = next(left)
        return report

    monkeypatch.setattr(training, "_evaluate", planted)


def test_later_checkpoints_are_moved_aside_and_the_run_goes_on_from_its_newest(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    for folder in (run, tmp_path / "whole"):
        train(own(videos, *EVERY_OTHER, "eval.split=null"), folder, quiet=True)
    left = weights_of(run)
    fewer = own(videos, "train.save_every=2 steps", "train.keep_last=1", "eval.split=null")
    stopped_in(monkeypatch, 3, fewer, run, resume="step_2")
    words = "warning: going on from step_0000002: step_0000004, step_0000006 moved to checkpoints/aside_"
    assert words in (run / "log.txt").read_text()
    assert folders(run) == ["step_0000003"] and link(run, "last") == "step_0000003"
    assert folders(run, "aside_") == ["aside_step_0000004", "aside_step_0000006"]
    assert_same(weights_of(run, "aside_step_0000006"), left)

    train(fewer, run, resume=True, quiet=True)
    assert (run / "log.txt").read_text().count("; going on from step 3") == 1
    assert folders(run) == ["step_0000006"] and link(run, "last") == "step_0000006"
    assert_same_runs(tmp_path / "whole", run)
    assert [record["step"] for record in records(run)] == list(range(1, 7))


def test_a_broken_newest_checkpoint_is_moved_aside_too(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    wanted = own(videos, "train.save_every=2 steps", "train.keep_last=1")
    train(own(videos, *EVERY_OTHER), tmp_path / "whole", quiet=True)
    train(own(videos, *EVERY_OTHER), run, quiet=True)
    (run / "checkpoints" / "step_0000006" / "weights.safetensors").write_bytes(b"half of it")
    stopped_in(monkeypatch, 5, wanted, run, resume=True)
    said = (run / "log.txt").read_text()
    assert "warning: step_0000006 is broken (weights.safetensors has 10 bytes instead of " in said
    assert "warning: going on from step_0000004: step_0000006 moved to checkpoints/aside_" in said
    assert folders(run) == ["step_0000005"] and link(run, "last") == "step_0000005" and link(run, "best") is None
    train(wanted, run, resume=True, quiet=True)
    assert folders(run) == ["step_0000006"] == [link(run, "last")] == [link(run, "best")]
    assert_same_runs(tmp_path / "whole", run)


def test_the_best_is_chosen_again_when_its_checkpoint_was_moved_aside(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    wanted = recipe(videos, *EVERY_OTHER, "eval.every=2 steps")
    scored(monkeypatch, 0.5, 0.9, 0.7, 0.4, 0.3)
    train(wanted, run, quiet=True)
    assert link(run, "best") == "step_0000004"
    stopped_in(monkeypatch, 3, wanted, run, resume="step_2")
    assert link(run, "best") is None and find_checkpoint(run)[0].name == "step_0000003"
    train(wanted, run, resume=True, quiet=True)
    assert link(run, "best") == "step_0000002"  # 0.5, of those that are left and judged
    metric = wanted.best_metric
    assert [(line["step"], line[metric]) for line in records(run, "eval")] == [(2, 0.5), (4, 0.4), (6, 0.3)]


def test_the_best_stays_when_its_checkpoint_does(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    wanted = recipe(videos, *EVERY_OTHER, "eval.every=2 steps")
    scored(monkeypatch, 0.9, 0.5, 0.7, 0.8, 0.6)
    train(wanted, run, quiet=True)
    train(wanted, run, resume="step_2", quiet=True)
    assert link(run, "best") == "step_0000002" and link(run, "last") == "step_0000006"


@pytest.mark.parametrize("name", [True, "last", "step_4"])
def test_nothing_is_moved_where_nothing_is_later(tmp_path, videos, monkeypatch, name):
    wanted = recipe(videos, *EVERY_OTHER, "eval.split=null")
    stopped_in(monkeypatch, 4, wanted, tmp_path / "run")
    train(wanted, tmp_path / "run", resume=name, quiet=True)
    assert folders(tmp_path / "run", "aside_") == []
    assert "moved to" not in (tmp_path / "run" / "log.txt").read_text()


def test_a_resume_that_is_refused_moves_nothing(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    wanted = recipe(videos, *EVERY_OTHER)
    train(wanted, run, quiet=True)
    before = {item: os.readlink(item) if item.is_symlink() else None for item in run.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_rows_digest", lambda rows: "other rows")
        with pytest.raises(CheckpointError, match="the training rows have changed since"):
            train(wanted, run, resume="step_2", quiet=True)
    assert {item: os.readlink(item) if item.is_symlink() else None for item in run.rglob("*")} == before
