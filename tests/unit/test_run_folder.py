"""A run folder belongs to one job at a time, and a run that is refused leaves nothing behind."""

import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from small_runs import assert_same_runs, in_step, recipe

from twinreel import training
from twinreel.errors import ConfigError
from twinreel.run_folder import locked
from twinreel.training import train

FORK = multiprocessing.get_context("fork")  # no second import of torch


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


class Job:
    """Another process that holds a run folder, with a reader that it has forked."""

    def __init__(self, run):
        told, tell = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_hold, args=(run, tell))
        self.process.start()
        self.reader = told.recv()
        self.name = f"process {self.process.pid} on {socket.gethostname()}"

    def kill(self):
        self.process.kill()
        self.process.join()

    def close(self):
        self.kill()
        os.kill(self.reader, signal.SIGKILL)


def _hold(run, tell):
    with locked(run):
        reader = os.fork()
        if reader:
            tell.send(reader)
        time.sleep(60)  # they are killed long before


@pytest.fixture
def hold():
    """Start jobs; they end with the test."""
    jobs = []

    def start(run):
        jobs.append(Job(run))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def refusal(run):
    """What another process is told that wants the folder now; None if it gets it."""
    told, tell = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_try_to_hold, args=(run, tell))
    process.start()
    text = told.recv()
    process.join()
    return text


def _try_to_hold(run, tell):
    try:
        with locked(run):
            tell.send(None)
    except ConfigError as error:
        tell.send(str(error))


def files_of(run):
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


# ---- one job at a time


def test_a_second_new_run_is_refused_and_told_who_is_there(tmp_path, videos, hold):
    run = tmp_path / "run"
    job = hold(run)
    before = files_of(run)
    words = (
        rf"run is in use: {re.escape(job.name)} \(since \d{{4}}-\d\d-\d\d .*\) trains there\. Wait for it, stop it, or"
    )
    with pytest.raises(ConfigError, match=words):
        train(recipe(videos), run, quiet=True)
    assert files_of(run) == before and list(before) == [str(run / "lock")]


def test_a_second_resume_waits_is_told_for_whom_and_touches_nothing(tmp_path, videos, hold, monkeypatch, capfd):
    run = tmp_path / "run"
    train(recipe(videos), run, quiet=True)
    job = hold(run)
    before = files_of(run)
    monkeypatch.setattr(training, "LOCK_WAIT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=rf"in use: {re.escape(job.name)}"):
        train(recipe(videos), run, resume="step_2", quiet=True)
    said = capfd.readouterr().err
    assert said.count(f"is held by {job.name}") == 1 and "waiting up to 0.5 s for it to end" in said
    assert files_of(run) == before


def test_a_resume_goes_on_when_the_other_job_is_gone_however_it_ended(tmp_path, videos, hold, capfd):
    """A killed job unlocks at once, though a reader that it forked still lives."""
    run = tmp_path / "run"
    train(recipe(videos), tmp_path / "whole", quiet=True)
    train(recipe(videos), run, quiet=True)
    job = hold(run)
    end = threading.Timer(0.5, job.kill)
    end.start()
    assert train(recipe(videos), run, resume="step_2", quiet=True).steps == 6
    end.join()
    assert f"is held by {job.name}" in capfd.readouterr().err
    os.kill(job.reader, 0)  # it lives
    assert_same_runs(tmp_path / "whole", run)
    assert json.loads((run / "lock").read_text())["pid"] == os.getpid()


def test_a_run_that_was_killed_before_it_wrote_anything_may_begin_again(tmp_path, videos, hold):
    run = tmp_path / "run"
    hold(run).kill()
    assert [path.name for path in run.iterdir()] == ["lock"]
    assert train(recipe(videos), run, quiet=True).steps == 6


def test_a_job_holds_its_folder_until_it_ends(tmp_path, videos, monkeypatch):
    """While it trains, while it judges, and no longer."""
    run, seen = tmp_path / "run", []
    real = training.evaluate_task

    def judged(*args, **options):
        seen.append(refusal(run))
        return real(*args, **options)

    in_step(monkeypatch, 3, lambda: seen.append(refusal(run)))
    monkeypatch.setattr(training, "evaluate_task", judged)
    train(recipe(videos), run, quiet=True)
    assert len(seen) == 2 and all(f"process {os.getpid()} on" in text for text in seen)
    assert refusal(run) is None


# ---- the lock itself


def test_a_lock_says_who_holds_it_and_stays_with_what_was_written(tmp_path):
    run = tmp_path / "runs" / "one"
    with locked(run):
        held = json.loads((run / "lock").read_text())
        assert (held["host"], held["pid"]) == (socket.gethostname(), os.getpid()) and held["since"]
        (run / "recipe.yaml").touch()
    assert sorted(path.name for path in run.iterdir()) == ["lock", "recipe.yaml"]
    with locked(run):
        pass
    assert sorted(path.name for path in run.iterdir()) == ["lock", "recipe.yaml"]


def test_a_file_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "run").touch()
    for run in (tmp_path / "run", tmp_path / "run" / "below"):
        with (
            pytest.raises(ConfigError, match=r"no run folder can be made there: .*; choose another --out"),
            locked(run),
        ):
            pass


# ---- what is refused


REFUSED = {
    "a warm-up of 9 steps": ["optim.warmup_steps=9"],
    "more than the 8 rows": ["train.global_batch_size=9"],
    "batch norms in train.batch_norm=per_process": ["train.cached_negatives=true", "train.micro_batch_size=2"],
    "no part 'video'": ["model.freeze=[video]"],
    "only 6 candidates": ["eval.best_metric=text_to_video/recall_at_10"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_new_run_that_is_refused_leaves_no_folder_behind(tmp_path, videos, words):
    with pytest.raises(ConfigError, match=words):
        train(recipe(videos, *REFUSED[words]), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_that_was_there_stays_when_a_run_is_refused(tmp_path, videos):
    """It may be somebody's mount, or the only one that they may write to."""
    with pytest.raises(ConfigError, match="a warm-up of 9 steps"):
        train(recipe(videos, "optim.warmup_steps=9"), tmp_path, quiet=True)
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_removed_does_not_hide_why_a_run_was_refused(tmp_path, videos, monkeypatch):
    def not_allowed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rmdir", not_allowed)
    with pytest.raises(ConfigError, match="a warm-up of 9 steps"):
        train(recipe(videos, "optim.warmup_steps=9"), tmp_path / "run", quiet=True)


def test_a_refused_resume_touches_nothing(tmp_path, videos):
    run = tmp_path / "run"
    train(recipe(videos), run, quiet=True)
    before = files_of(run)
    with pytest.raises(ConfigError, match=r"train\.batch_norm: 'per_process' in the run, 'frozen' now"):
        train(recipe(videos, "train.batch_norm=frozen"), run, resume=True, quiet=True)
    assert files_of(run) == before
