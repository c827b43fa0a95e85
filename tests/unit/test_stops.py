"""How a run ends when it must: gradients that stay NaN, no memory, readers that are killed, a closed terminal."""

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from small_runs import DropoutTowers, assert_same_runs, in_step, own, recipe, records, weights_of
from torch import nn

from twinreel import training
from twinreel.checkpoint import find_checkpoint, load_training_state
from twinreel.errors import TrainingError
from twinreel.optim import Schedule
from twinreel.training import train

FP16 = ("train.precision=fp16", "eval.split=null")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


# ---- fp16


def spoiled(monkeypatch, steps):
    """Put a NaN into the gradient at some steps, from 1."""
    real, calls = training.clip_gradient, []

    def spoil(parts, wanted):
        calls.append(1)
        if len(calls) in steps:
            next(p for p in parts.parameters if p.grad is not None).grad.fill_(math.nan)
        return real(parts, wanted)

    monkeypatch.setattr(training, "clip_gradient", spoil)


def test_a_gradient_that_no_loss_scale_mends_stops_the_run(tmp_path, videos, monkeypatch):
    """The scale begins at 2 ** 16 and is halved each time: after 17 steps it is below 1."""
    spoiled(monkeypatch, range(1, 99))
    run = tmp_path / "run"
    with pytest.raises(TrainingError, match="step 18: the gradient norm is nan; no weight was changed"):
        train(own(videos, "train.num_steps=30", "train.save_every=17 steps", *FP16), run, quiet=True)
    lines = records(run)
    assert [line["loss_scale"] for line in lines] == [2.0**-n for n in range(-15, 2)]
    assert [line["skipped_steps"] for line in lines] == list(range(1, 18))
    assert (run / "non_finite" / "step_0000018.json").is_file()
    assert find_checkpoint(run)[0].name == "step_0000017"


def test_a_skipped_step_does_not_move_the_schedule(tmp_path, videos, monkeypatch):  # B083
    """The loss scale that a run begins with may be too large of itself; the tenth step is skipped anyway."""
    spoiled(monkeypatch, [10])
    every_step = ("train.num_steps=12", "train.save_every=1 steps", "train.keep_last=12", "train.ema_decay=0.5")
    wanted = own(videos, *every_step, *FP16)
    run = tmp_path / "run"
    train(wanted, run, quiet=True)
    lines = records(run)
    skipped = [line["skipped_steps"] for line in lines]
    assert skipped[8] < skipped[9] == skipped[11] < 8
    schedule = Schedule(total_steps=12, warmup_steps=2)
    assert [line["learning_rate"] for line in lines] == [
        2e-3 * schedule.factor(step - before) for step, before in enumerate([0, *skipped[:-1]])
    ]
    assert lines[9]["learning_rate"] == lines[10]["learning_rate"] != lines[11]["learning_rate"]
    for averaged in (False, True):
        before, after, later = (weights_of(run, f"step_{step}", averaged=averaged) for step in (9, 10, 11))
        moved = {name.rpartition(".")[2] for name, value in before.items() if not torch.equal(value, after[name])}
        assert moved == {"running_mean", "running_var", "num_batches_tracked"}
        assert not torch.equal(after["text_tower.weight"], later["text_tower.weight"])
    train(wanted, run, resume="step_11", quiet=True)
    assert records(run) == lines
    assert load_training_state(find_checkpoint(run)[0])["state"]["skipped_steps"] == skipped[-1]


def test_in_fp32_no_step_is_skipped(tmp_path, videos, monkeypatch):
    spoiled(monkeypatch, [3])
    with pytest.raises(TrainingError, match="step 3: the gradient norm is nan"):
        train(own(videos, "eval.split=null"), tmp_path / "run", quiet=True)


# ---- a NaN for whose record there is no place


def test_a_nan_is_reported_though_nothing_can_be_written_of_it(tmp_path, videos, monkeypatch):
    run = tmp_path / "run"
    spoiled(monkeypatch, [3])
    in_step(monkeypatch, 2, lambda: (run / "non_finite").write_text("a file where a folder must be"))
    with pytest.raises(TrainingError) as told:
        train(recipe(videos), run, quiet=True)
    words = str(told.value)
    assert words.startswith("step 3: the gradient norm is nan; no weight was changed. Samples: train_0")
    assert f"They could not be written to {run / 'non_finite' / 'step_0000003.json'}: " in words
    assert "optim.clip_norm" in words and "twinreel replay" not in words
    assert find_checkpoint(run)[0].name == "step_0000002"


# ---- out of memory, out of readers


def test_out_of_memory_in_the_optimizer_is_answered_as_anywhere(tmp_path, videos, monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.optim.AdamW, "step", too_large)
    words = r"out of memory on cpu \(peak .* with 4 clips at once. In this order: train.micro_batch_size=2 .*2.00 GiB"
    with pytest.raises(TrainingError, match=words):
        train(own(videos, "eval.split=null"), tmp_path / "run", quiet=True)


class Killing(DropoutTowers):
    """A user's towers that kill the readers in the third step that they train."""

    armed = False

    def __init__(self, size):
        super().__init__(size)
        self.steps = 0

    def encode_video(self, video):
        self.steps += self.training
        if Killing.armed and self.training and self.steps == 3:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():  # Python's own helper
                    os.kill(int(child), signal.SIGKILL)
            time.sleep(10)  # torch's handler of the child's end raises here
        return super().encode_video(video)


def killing(*, size: int = 8) -> nn.Module:
    return Killing(size)


def test_a_reader_that_is_killed_ends_the_run_with_words_and_the_resumed_one_is_as_if_undisturbed(
    tmp_path, videos, monkeypatch
):
    base = own(videos, "data.num_workers=1")
    wanted = base.model_copy(update={"model": base.model.model_copy(update={"name": "test_stops:killing"})})
    train(wanted, tmp_path / "whole", quiet=True)
    monkeypatch.setattr(Killing, "armed", True)
    with pytest.raises(TrainingError, match=r"a reader process ended: .*lower data.num_workers.*--resume"):
        train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path / "parts")[0].name == "step_0000002"
    train(wanted, tmp_path / "parts", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


# ---- a terminal that is closed


@pytest.fixture
def hang_up():
    """SIGHUP for this process; what answers it stays as it was."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda: os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def unanswered(number, frame):
    raise AssertionError("nobody answers for the run")


def test_sighup_saves_and_ends(tmp_path, videos, monkeypatch, hang_up):
    wanted = recipe(videos, "train.save_every=6 steps")
    train(wanted, tmp_path / "whole", quiet=True)
    signal.signal(signal.SIGHUP, unanswered)
    in_step(monkeypatch, 3, hang_up)
    result = train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    assert (result.steps, result.stopped_by) == (3, "SIGHUP")
    assert signal.getsignal(signal.SIGHUP) is unanswered
    assert find_checkpoint(tmp_path / "parts")[0].name == "step_0000003"
    train(wanted, tmp_path / "parts", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_sighup_that_is_ignored_stays_ignored(tmp_path, videos, monkeypatch, hang_up):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    seen = []

    def look():
        seen.append(signal.getsignal(signal.SIGHUP))
        hang_up()

    in_step(monkeypatch, 3, look)
    result = train(recipe(videos), tmp_path / "run", quiet=True)
    assert (result.steps, result.stopped_by) == (6, None)
    assert [*seen, signal.getsignal(signal.SIGHUP)] == [signal.SIG_IGN] * 2
