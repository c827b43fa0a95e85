"""Killed without warning under torchrun and resumed: order, losses and weights are those of an undisturbed run."""

import json
import random
import shutil
import time

import own_parts
import pytest
import torch
from launches import Launch, records

from twinreel.checkpoint import find_checkpoint, list_checkpoints, load_training_state, read_weights

STEPS, SAVE_EVERY, EVAL_EVERY = 100, 2, 6
VICTIMS = ("launcher", "rank 0", "rank 1", "a reader", "everybody")
KILLS_EACH, SEED = 4, 7


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    for split in ("train", "test"):
        own_parts.rows(root, split)
    (root / own_parts.BROKEN).write_text("no video")
    return root


def arguments(videos, run, *more, uneven=True):
    return (
        "demo", f"model={{name: 'own_parts:towers', size: 8, uneven: {str(uneven).lower()}}}", f"data.root={videos}",
        "data.source=own_parts:rows", "data.num_workers=2", "data.max_faults=0.5", "task.num_candidates=2",
        f"train.num_steps={STEPS}", "train.global_batch_size=8", "train.log_every=1", "train.keep_last=3",
        f"train.save_every={SAVE_EVERY} steps", "optim.warmup_steps=2", f"eval.every={EVAL_EVERY} steps",
        "eval.num_clips=2", "eval.batch_size=4", *more, "--out", run,
    )  # fmt: skip


def finish(folder, name, num_processes, *line, **environment):
    """Launch and let it end; the launch, with exit code 0."""
    with Launch(folder, name, num_processes, *line, **environment) as launch:
        launch.process.wait(240)
        assert launch.process.returncode == 0, str(launch)
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


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_same_runs(one, other):
    """Weights, averaged statistics, optimizer and counters bit for bit; losses, scores and faults as written."""
    (first, _), (second, _) = find_checkpoint(one), find_checkpoint(other)
    assert first.name == second.name == f"step_{STEPS:07d}"
    assert_same_tensors(read_weights(first), read_weights(second))
    assert_same_tensors(read_weights(find_checkpoint(one, "best")[0]), read_weights(find_checkpoint(other, "best")[0]))
    states = [load_training_state(checkpoint) for checkpoint in (first, second)]
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert_same_tensors(a, b)
    for state in states:
        state["state"].pop("seconds")
        state["optimizer"].pop("state")
    assert states[0] == states[1]
    for kind, steps in (("train", range(1, STEPS + 1)), ("eval", [*range(EVAL_EVERY, STEPS, EVAL_EVERY), STEPS])):
        assert records(one, kind) == records(other, kind)
        assert [line["step"] for line in records(one, kind)] == list(steps)
    assert (one / "faults.jsonl").read_text() == (other / "faults.jsonl").read_text() != ""


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
    """Kill somebody at a moment after the target step; where that was, and how long the last one took to end."""
    launch.wait_for(launch.readers)  # work has begun, and metrics.jsonl is cut back
    if moment == "evaluating":
        launch.wait_for(lambda: (at := doing(run))[0] >= target and at[1] == "evaluating")
        time.sleep(rng.uniform(0, 0.2))
    else:
        launch.wait_for(lambda: doing(run)[0] >= target)
        time.sleep(rng.uniform(0, 0.15))
    chosen = victims(launch, who, rng)
    step, place = doing(run)
    launch.kill(chosen)
    return {"killed": who, "after step": step, "while": place, "ended in": launch.ended()}


def kill_and_resume(folder, line, seen):
    """20 kills of one run, each victim at each kind of moment; the launches and where the kills fell."""
    rng, run = random.Random(SEED), folder / "killed"
    kills = [(who, "evaluating" if i == 0 else "training") for who in VICTIMS for i in range(KILLS_EACH)]
    rng.shuffle(kills)
    launches, log = [], []
    for number, (who, moment) in enumerate(kills):
        target = max(doing(run)[0], (STEPS - 20) * number // len(kills)) + rng.randint(1, 3)
        resume = ("--resume",) if number else ()
        with Launch(folder, f"killed_{number}", 2, *line, *resume, SEEN=str(seen)) as launch:
            log.append(kill_once(launch, run, who, moment, target, rng))
        print(number, log[-1], launch.said()[-600:])
        launches.append(launch)
        assert find_checkpoint(run)[1] == [], "the newest checkpoint is broken"
    return launches, log


def pause_and_kill(folder, line, seen):
    """Killed while the checkpoint after the next is half written; the launch."""
    run = folder / "killed"
    before = doing(run)[0]
    target = (before // SAVE_EVERY + 2) * SAVE_EVERY
    with Launch(folder, "paused", 2, *line, "--resume", SEEN=str(seen), PAUSE_AT=str(target)) as launch:
        launch.wait_for((folder / own_parts.PAUSED).exists)
        assert list((run / "checkpoints").glob(f".part_step_{target:07d}"))
        launch.kill(launch.members())
        launch.ended()
    assert max(list_checkpoints(run)).name == f"step_{target - SAVE_EVERY:07d}"
    return launch


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_an_undisturbed_one(tmp_path, videos):
    seen = tmp_path / "seen"
    seen.mkdir()
    whole = finish(tmp_path, "whole", 2, *arguments(videos, "whole"), SEEN=str(seen))
    wanted = by_step(seen, whole, 2)
    assert sorted(wanted) == list(range(STEPS)) and len({str(both) for both in wanted.values()}) == STEPS

    line = arguments(videos, "killed")
    launches, log = kill_and_resume(tmp_path, line, seen)
    launches.append(pause_and_kill(tmp_path, line, seen))
    last_saved = int(find_checkpoint(tmp_path / "killed")[0].name.removeprefix("step_"))
    others = {n: shutil.copytree(tmp_path / "killed", tmp_path / f"on_{n}", symlinks=True) for n in (1, 3)}
    launches.append(finish(tmp_path, "finished", 2, *line, "--resume", SEEN=str(seen)))
    print(*log, sep="\n")
    assert launches[-1].first_step() == last_saved
    assert {place for place in (kill["while"] for kill in log)} >= {"training", "evaluating"}
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".part_*"))
    for launch in launches:
        for step, both in by_step(seen, launch, 2).items():
            assert both == wanted[step], (launch.name, step)

    again = finish(tmp_path, "again", 2, *line, "--resume")
    assert f"killed is finished ({STEPS} of {STEPS} steps): nothing to do" in again.said()
    for number, run in others.items():
        launch = finish(tmp_path, run.name, number, *arguments(videos, run.name), "--resume", SEEN=str(seen))
        found = by_step(seen, launch, number)
        assert found == {step: wanted[step] for step in range(last_saved, STEPS)}
