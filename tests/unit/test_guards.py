"""Signals are acted upon by all processes after a step, and out of memory ends with advice."""

import os
import signal

import pytest
import torch
from small_runs import assert_same_runs, in_step, recipe

from twinreel import training
from twinreel.checkpoint import find_checkpoint
from twinreel.errors import TrainingError
from twinreel.training import train


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


def test_sigterm_saves_and_the_resumed_run_equals_an_undisturbed_one(tmp_path, videos, monkeypatch):
    wanted = recipe(videos)
    train(wanted, tmp_path / "whole", quiet=True)
    in_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    assert (result.steps, result.stopped_by) == (3, "SIGTERM")
    assert find_checkpoint(tmp_path / "parts")[0].name == "step_0000003"
    train(wanted, tmp_path / "parts", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


def test_sigusr1_saves_and_the_run_goes_on(tmp_path, videos, monkeypatch, capsys):
    wanted = recipe(videos, "train.save_every=4 steps")
    train(wanted, tmp_path / "whole", quiet=True)
    in_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    result = train(wanted, tmp_path / "run")
    monkeypatch.undo()
    assert (result.steps, result.stopped_by) == (6, None) and signal.getsignal(signal.SIGUSR1) == before
    assert "step 3: saved, because of SIGUSR1" in capsys.readouterr().err
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert checkpoints == ["step_0000003", "step_0000004", "step_0000006"]  # and is not saved once more after step 5
    assert_same_runs(tmp_path / "whole", tmp_path / "run")
    train(wanted, tmp_path / "run", resume="step_3", quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("moment", ["exchange", "_note_faults"])
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, None)])
def test_a_signal_that_comes_too_late_for_the_other_processes_is_told_after_the_next_step(
    tmp_path, videos, monkeypatch, number, name, moment
):
    """Not lost, and not acted upon by this process alone: the others would wait for it in another place."""
    real, calls = getattr(training, moment), []

    def disturbed(*args):
        calls.append(1)
        if len(calls) == 3:  # this process has said already that nobody asked it for anything
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(training, moment, disturbed)
    result = train(recipe(videos, "train.save_every=6 steps"), tmp_path / "run", quiet=True)
    assert (result.stopped_by, result.steps) == (name, 4 if name else 6)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == (["step_0000004"] if name else ["step_0000004", "step_0000006"])


def test_out_of_memory_names_the_peak_and_the_ladder(tmp_path, videos, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(training, "global_gradient", too_large)
    for frugal, words in (
        ("false", r"micro_batch_size=2.*stays 4.*train.activation_checkpointing=true; .*bf16.*fewer frames last"),
        ("true", r"micro_batch_size=2 \(the global batch stays 4\); train.precision=bf16; .*fewer frames last"),
    ):
        with pytest.raises(TrainingError, match=rf"peak \d+\.\d GB\) with 4 clips at once.*{words}"):
            train(recipe(videos, f"train.activation_checkpointing={frugal}"), tmp_path / frugal, quiet=True)
