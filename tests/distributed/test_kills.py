"""Killed without warning under torchrun and resumed: order, losses and weights are those of an undisturbed run."""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time

import own_parts
import pytest
import torch
from launches import Launch, records
from torch import nn

from twinreel.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    load_training_state,
    prune_checkpoints,
    read_weights,
    save_checkpoint,
    set_link,
)

STEPS, SAVE_EVERY, EVAL_EVERY = 180, 2, 6
VICTIMS = ("launcher", "rank 0", "rank 1", "a reader", "everybody")
KILLS_EACH, SEED = 4, 7
FILE_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.symlink")


# ---- one checkpoint, killed before each of its file operations


def killed_before(operation, work):
    """Whether `work` in a process of its own came to this file operation, where SIGKILL waited for it."""
    child = os.fork()
    if child == 0:
        number = itertools.count()

        def look(event, _):
            if event in FILE_OPERATIONS and next(number) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)  # never to be removed: hence the process of its own
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def save(run, step):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, step)
    return save_checkpoint(run, step, model, {}, {"step": step})


@pytest.mark.parametrize("keep_last", [1, 3])
def test_whenever_the_writing_of_a_checkpoint_is_killed_a_whole_one_is_found(tmp_path, keep_last):
    save(tmp_path / "before", 2)

    def work():
        """What a run does at a step that is saved, judged for the first time and hence the best."""
        saved = save(run, 4)
        prune_checkpoints(run, keep_last)
        set_link(run, "best", saved)
        prune_checkpoints(run, keep_last)

    found = []
    for operation in itertools.count():
        run = tmp_path / str(operation)
        shutil.copytree(tmp_path / "before", run, symlinks=True)
        if not killed_before(operation, work):
            break
        for name in (None, "best") if (run / "checkpoints" / "best").is_symlink() else (None,):
            checkpoint, warnings = find_checkpoint(run, name)
            step = load_training_state(checkpoint)["step"]
            assert checkpoint.name == f"step_{step:07d}" and not warnings
            assert read_weights(checkpoint)["weight"].eq(step).all()
        found.append(find_checkpoint(run)[0].name)
        save(run, 6)
        prune_checkpoints(run, keep_last)
        assert not list((run / "checkpoints").glob(".part_*")), "something half written is left"
    assert len(found) > 15 and set(found) == {"step_0000002", "step_0000004"}


# ---- whole runs


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    for split in ("train", "test"):
        own_parts.rows(root, split)
    (root / own_parts.BROKEN).write_text("no video")
    return root


@pytest.fixture
def seen(tmp_path):
    """Where every process says what it trains on."""
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


def arguments(videos, run, *, steps=STEPS, uneven=True):
    return (
        "demo", f"model={{name: 'own_parts:towers', size: 8, uneven: {str(uneven).lower()}}}", f"data.root={videos}",
        "data.source=own_parts:rows", "data.num_workers=2", "data.max_faults=0.5", "task.num_candidates=2",
        f"train.num_steps={steps}", "train.global_batch_size=8", "train.log_every=1", "train.keep_last=3",
        f"train.save_every={SAVE_EVERY} steps", "optim.warmup_steps=2", f"eval.every={EVAL_EVERY} steps",
        "eval.num_clips=2", "eval.batch_size=4", "--out", run,
    )  # fmt: skip


def end(folder, name, num_processes, *line, code=0, **environment):
    """Launch and let it end; the launch."""
    with Launch(folder, name, num_processes, *line, **environment) as launch:
        assert launch.exit_code() == code, str(launch)
    return launch


def by_step(seen, launch, num_processes):
    """What the ranks together trained on at each step of a launch: checksums of clips, and captions."""
    first = launch.first_step()
    if first is None:
        return {}  # killed before its first step
    lines = [
        [json.loads(line) for line in (seen / f"{launch.name}_{rank}.jsonl").read_text().splitlines()]
        for rank in range(num_processes)
    ]
    return {
        first + index: tuple([item for own in everyone for item in own[part]] for part in (0, 1))
        for index, everyone in enumerate(zip(*lines, strict=False))  # the dead may be a step behind
    }


def last_saved(run):
    checkpoint, warnings = find_checkpoint(run)
    assert not warnings, "the newest checkpoint is broken"
    return int(checkpoint.name.removeprefix("step_"))


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_same_runs(one, other, steps=STEPS):
    """Weights, optimizer and counters bit for bit; losses, scores and faults as written; nothing said twice."""
    assert last_saved(one) == last_saved(other) == steps
    for name in ("last", "best"):
        (first, _), (second, _) = find_checkpoint(one, name), find_checkpoint(other, name)
        assert first.name == second.name
        assert_same_tensors(read_weights(first), read_weights(second))
        states = [load_training_state(checkpoint) for checkpoint in (first, second)]
        moments = [state["optimizer"].pop("state") for state in states]
        for a, b in zip(*(moment.values() for moment in moments), strict=True):
            assert_same_tensors(a, b)
        for state in states:
            state["state"].pop("seconds")
        assert states[0] == states[1]
    for kind, due in (("train", range(1, steps + 1)), ("eval", [*range(EVAL_EVERY, steps, EVAL_EVERY), steps])):
        assert records(one, kind) == records(other, kind)
        assert [line["step"] for line in records(one, kind)] == list(due)
    assert (one / "faults.jsonl").read_text() == (other / "faults.jsonl").read_text() != ""


# ---- twenty kills


def doing(run):
    """The last step that is logged, and what the run does after it."""
    lines = records(run, "train")
    step = lines[-1]["step"] if lines else 0
    if any((run / "checkpoints").glob(".part_*")):
        return step, "saving"
    judged = {line["step"] for line in records(run, "eval")}
    saved = (run / "checkpoints" / f"step_{step:07d}").exists()
    return step, "evaluating" if step % EVAL_EVERY == 0 and saved and step not in judged else "training"


def victims(launch, who, rng):
    members = launch.members()
    if who == "everybody":
        return rng.sample(sorted(members), len(members))
    if who == "a reader":
        return [rng.choice(launch.readers(members))]
    return [launch.process.pid if who == "launcher" else launch.ranks(members)[int(who[-1])]]


def kill_once(launch, run, who, moment, target, rng):
    """Kill somebody at a moment from the target step on; where that was, and how long the last one took to end."""
    launch.wait_for(launch.readers)  # work has begun, and metrics.jsonl is cut back
    if moment == "evaluating":
        launch.wait_for(lambda: (at := doing(run))[0] >= target and at[1] == moment)
        time.sleep(rng.uniform(0, 0.2))
    else:
        launch.wait_for(lambda: doing(run)[0] >= target)
        time.sleep(rng.uniform(0, 0.15))
    chosen = victims(launch, who, rng)
    step, place = doing(run)
    launch.kill(chosen)
    return {"killed": who, "after step": step, "while": place, "ended in": round(launch.ended(), 2)}


def kill_and_resume(folder, line, seen):
    """20 kills of one run, each victim once while it evaluates; the launches, and what was done at each kill."""
    rng, run = random.Random(SEED), folder / "killed"
    kills = [(who, "evaluating" if i == 0 else "training") for who in VICTIMS for i in range(KILLS_EACH)]
    rng.shuffle(kills)
    launches, places = [], []
    for number, (who, moment) in enumerate(kills):
        target = max(doing(run)[0], (STEPS - 100) * number // len(kills)) + rng.randint(1, 3)
        resume = ("--resume",) if number else ()
        with Launch(folder, f"killed_{number}", 2, *line, *resume, SEEN=str(seen)) as launch:
            fell = kill_once(launch, run, who, moment, target, rng)
        print(fell)
        places.append(fell["while"])
        launches.append(launch)
        last_saved(run)
    return launches, places


def pause_and_kill(folder, line, seen):
    """Killed while the checkpoint after the next is half written; the launch."""
    run = folder / "killed"
    target = (doing(run)[0] // SAVE_EVERY + 2) * SAVE_EVERY
    with Launch(folder, "paused", 2, *line, "--resume", SEEN=str(seen), PAUSE_AT=str(target)) as launch:
        launch.wait_for((folder / own_parts.PAUSED).exists)
        assert list((run / "checkpoints").glob(f".part_step_{target:07d}"))
        launch.kill(launch.members())
        launch.ended()
    assert last_saved(run) == target - SAVE_EVERY
    assert target not in [int(checkpoint.name.removeprefix("step_")) for checkpoint in list_checkpoints(run)]
    return launch


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_an_undisturbed_one(tmp_path, videos, seen):
    wanted = by_step(seen, end(tmp_path, "whole", 2, *arguments(videos, "whole"), SEEN=str(seen)), 2)
    assert sorted(wanted) == list(range(STEPS)) and len({str(both) for both in wanted.values()}) == STEPS

    run, line = tmp_path / "killed", arguments(videos, "killed")
    launches, places = kill_and_resume(tmp_path, line, seen)
    assert {"training", "evaluating"} <= set(places)
    launches.append(pause_and_kill(tmp_path, line, seen))
    saved = last_saved(run)
    others = {number: shutil.copytree(run, tmp_path / f"on_{number}", symlinks=True) for number in (1, 3)}
    launches.append(end(tmp_path, "finished", 2, *line, "--resume", SEEN=str(seen)))

    assert launches[-1].first_step() == saved
    assert_same_runs(tmp_path / "whole", run)
    assert not list((run / "checkpoints").glob(".part_*"))
    for launch in launches:
        assert "bug in twinreel" not in launch.said(), str(launch)
        for step, both in by_step(seen, launch, 2).items():
            assert both == wanted[step], (launch.name, step)
    again = end(tmp_path, "again", 2, *line, "--resume")
    assert f"killed is finished ({STEPS} of {STEPS} steps): nothing to do" in again.said()
    for number, other in others.items():
        launch = end(tmp_path, other.name, number, *arguments(videos, other.name), "--resume", SEEN=str(seen))
        assert by_step(seen, launch, number) == {step: wanted[step] for step in range(saved, STEPS)}


# ---- other numbers of processes


@pytest.mark.slow
def test_order_and_losses_do_not_depend_on_the_number_of_processes(tmp_path, videos, seen):
    """Four steps on two processes, four on one, four on three = twelve on one."""
    whole = end(tmp_path, "one", 1, *arguments(videos, "one", steps=12, uneven=False), SEEN=str(seen))
    line = arguments(videos, "some", steps=12, uneven=False)
    stop = {"SEEN": str(seen), "STOP_AFTER": "4"}
    found = by_step(seen, end(tmp_path, "on_2", 2, *line, code=1, **stop), 2)
    found |= by_step(seen, end(tmp_path, "on_1", 1, *line, "--resume", code=128 + signal.SIGTERM, **stop), 1)
    last = end(tmp_path, "on_3", 3, *line, "--resume", SEEN=str(seen))
    assert "num_processes" not in last.said() and "processes: 1 in the run, 3 now" in last.said()
    found |= by_step(seen, last, 3)
    assert list(found) == list(range(12)) and found == by_step(seen, whole, 1)
    for one, other in zip(records(tmp_path / "one", "train"), records(tmp_path / "some", "train"), strict=True):
        assert one["step"] == other["step"] and one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert (tmp_path / "one" / "faults.jsonl").read_text() == (tmp_path / "some" / "faults.jsonl").read_text()


@pytest.mark.slow
def test_three_processes_stopped_and_resumed_end_as_if_undisturbed(tmp_path, videos):
    """Sums of three depend on their order, and that on DDP's buckets, which must not differ after a resume."""
    end(tmp_path, "whole", 3, *arguments(videos, "whole", steps=20))
    line = arguments(videos, "parts", steps=20)
    with Launch(tmp_path, "first", 3, *line) as launch:
        launch.wait_for(lambda: doing(tmp_path / "parts")[0] >= 5)
        launch.process.send_signal(signal.SIGTERM)
        launch.ended()
        assert "stopped by SIGTERM after step" in launch.said()
    assert 5 <= last_saved(tmp_path / "parts") < 20
    end(tmp_path, "second", 3, *line, "--resume")
    assert_same_runs(tmp_path / "whole", tmp_path / "parts", 20)
