"""Two processes and more, started as their user starts them: one result, words said once, exit codes, signals."""

import json
import os
import re
import signal
import socket

import pytest
import torch

from cli.command_line import hashes, twinreel
from cli.launched import (
    ALONE,
    PLAIN,
    TORCHRUN,
    alone,
    end,
    exit_codes,
    launch,
    launched,
    make_videos,
    messages,
    ranks,
    recipe,
    records,
    same_runs,
    saved,
    troubled_towers,
    wait_for,
)
from twinreel.checkpoint import find_checkpoint, read_weights

LATE_MAIN_PROCESS = """
import os
import time

time.sleep(1.5 if os.environ.get("RANK") == "0" else 0)
"""
SLOW = ("train.num_steps=10", "train.save_every=100 steps")  # with STEP_SECONDS: time to be signaled before the end


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return make_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    yield from troubled_towers(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(videos, tmp_path_factory):
    """The run of SLOW in two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        for _ in troubled_towers(folder, patch):
            outcome = launch("train", *recipe(videos, *SLOW), "--out", folder / "run")
            assert outcome.code == 0, outcome
    return folder / "run"


def test_two_processes_train_judge_and_resume_as_one_program(videos, folder):
    line = ("train", *recipe(videos, "train.micro_batch_size=2"), "--out", "run")
    trained = launch(*line)
    assert trained.code == 0 and messages(trained) == [], trained
    assert trained.out.count("\ntext to video ") == trained.out.count("evaluated: 8/8 videos") == 1, trained.out
    for words in (
        "global batch 8 = 2 processes x 2 micro-batches x 2 clips on cpu, 12 negative captions a clip (of the "
        "micro-batch across processes), precision fp32, channels last layout, batch norm per_process",
        "learning rate first", "from step 0", "step 6: text to video R@1", "done: 6 steps",
    ):  # fmt: skip
        assert trained.err.count(words) == 1, (words, trained.err)

    two = launch("eval", "run", "--json")
    assert two.code == 0 and two.err == "judging 8/8 videos\n", two
    assert json.loads(two.out) == json.loads(twinreel("eval", "run", "--json").out)

    before = hashes(folder / "run" / "checkpoints")
    again = launch(*line, "--resume")
    assert again.code == 0 and again.out == "", again
    assert again.err.count("run is finished (6 of 6 steps): nothing to do") == 1
    assert hashes(folder / "run" / "checkpoints") == before
    for outcome in (trained, two, again):
        assert "Warning" not in outcome.err and "Traceback" not in outcome.err, outcome.err


def test_a_mistake_is_said_once_though_the_main_process_is_the_last_to_find_it(videos, folder):
    (folder / "late").mkdir()
    (folder / "late" / "sitecustomize.py").write_text(LATE_MAIN_PROCESS)
    path = os.pathsep.join([str(folder / "late"), os.environ.get("PYTHONPATH", "")])
    outcome = launch("train", *recipe(videos, "train.sedd=3"), "--out", "run", PYTHONPATH=path)
    assert outcome.code == 1 and outcome.out == ""
    assert messages(outcome) == ["twinreel: command line: unknown key train.sedd; did you mean train.seed?"], outcome
    assert 2 in exit_codes(outcome)
    assert not (folder / "run").exists()


ONE_PROCESS = {
    "list": (),
    "show": ("demo",),
    "check": ("demo",),
    "demo": (),
    "replay": ("run", "--step", "1"),
    "predict": ("run", "a.mp4", "--sentence", "a"),
    "embed": ("run", "--input", "videos", "--out", "index"),
    "search": ("index", "a"),
}


@pytest.mark.parametrize("verb", ONE_PROCESS)
def test_verbs_of_one_process_refuse_two(folder, verb):
    before = hashes(folder)
    for rank in "01":
        outcome = alone(verb, *ONE_PROCESS[verb], RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        said = (
            f"twinreel: twinreel {verb} runs as one process, but torchrun started 2; start it without torchrun (train "
        )
        assert (outcome.code, outcome.out) == (2, "") and "Traceback" not in outcome.err
        assert outcome.err == (said + "and eval run as several)\n" if rank == "0" else "")
    assert hashes(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["list", "replay", "embed", "search"])
def test_verbs_of_one_process_refuse_torchrun(verb):
    outcome = launch(verb, *ONE_PROCESS[verb])
    assert outcome.code == 1 and outcome.out == "" and 2 in exit_codes(outcome)
    (said,) = messages(outcome)
    assert said.startswith(f"twinreel: twinreel {verb} runs as one process, but torchrun started 2; start it without")


REFUSED = {
    ("train.global_batch_size=1",): (  # B052
        "train.global_batch_size=1 on 2 processes leaves 1 of them without a clip; raise it to 2 or more, or start "
        "fewer processes"
    ),
    ("train.global_batch_size=12", "train.micro_batch_size=4"): (
        "train.global_batch_size=12 is not a whole number of 2 processes x train.micro_batch_size=4; micro-batches "
        "that fit: 1, 2, 3, 6; or leave train.micro_batch_size out: the batch is then cut as evenly as can be"
    ),
    ("train.batch_norm=sync",): (
        "train.batch_norm=sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use per_process or frozen"
    ),
    ("train.cached_negatives=true",): (
        "train.cached_negatives=true with 1 batch norms in train.batch_norm=per_process: each micro-batch would be "
        "normalized by its own few clips, and the gradient would not be that of the global batch. Set "
        "train.batch_norm=frozen (or sync, on GPUs), or train.cached_negatives=false"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("more", REFUSED)
def test_what_two_processes_cannot_do_is_refused_in_one_sentence_and_leaves_nothing(videos, folder, more):
    outcome = launch("train", *recipe(videos, *more), "--out", "run")
    assert outcome.code == 1 and outcome.out == "" and 2 in exit_codes(outcome)
    assert messages(outcome) == [f"twinreel: {REFUSED[more]}"], outcome.err
    assert not (folder / "run").exists()


@pytest.mark.parametrize("more", [key for key in REFUSED if len(key) == 1 and "batch_size" not in key[0]])
def test_what_one_process_cannot_do_either(videos, folder, more):
    outcome = alone("train", *recipe(videos, *more), "--out", "run")
    outcome.fails(REFUSED[more])
    assert not (folder / "run").exists()


# ---- machines and jobs


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_machines_agree_with_one_process(videos, folder):
    """Two launchers that meet at a port, as on two machines; towers without batch norm and dropout."""
    line = ("train", *recipe(videos, PLAIN, "optim.name=sgd"), "--out")
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "together")
    machines = [
        ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", rank, *meet, *ALONE)
        for rank in "01"
    ]
    with launched(*line, "two", program=machines[0]) as first, launched(*line, "two", program=machines[1]) as second:
        outcomes = [end(first), end(second)]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    said = "".join(outcome.err for outcome in outcomes)
    assert said.count("2 processes x 1 micro-batch x 4 clips") == said.count("done: 6 steps") == 1
    assert sum(outcome.out.count("evaluated: 8/8 videos") for outcome in outcomes) == 1
    assert alone(*line, "one").code == 0
    one, two = (read_weights(find_checkpoint(folder / run)[0]) for run in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    losses = [[line["loss"] for line in records(folder / run, "train")] for run in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torchrun without --standalone has a fixed port"
)
def test_two_jobs_started_at_the_same_moment_do_not_meet(videos, folder):  # B070
    program = tuple(word for word in TORCHRUN if word != "--standalone")
    lines = [("train", *recipe(videos, f"train.seed={seed}"), "--out", f"run_{seed}") for seed in (1, 2)]
    with launched(*lines[0], program=program) as first, launched(*lines[1], program=program) as second:
        outcomes = [end(first, 120), end(second, 120)]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [saved(folder / f"run_{seed}") for seed in (1, 2)] == [6, 6]
    one, two = (records(folder / f"run_{seed}", "train") for seed in (1, 2))
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 2, 3, 4, 5, 6]
    assert one != two


# ---- signals


def signaled(videos, folder, choose, number):
    """Start, wait for two steps, signal; how the run ended."""
    line = ("train", *recipe(videos, *SLOW), "--out", "run")
    with launched(*line, STEP_SECONDS="0.2") as process:
        wait_for(lambda: len(records(folder / "run", "train")) >= 2, process)
        for pid in choose(process):
            os.kill(pid, number)
        outcome = end(process)
    assert "Traceback" not in outcome.err.split("stopped by")[0], outcome.err
    return line, outcome


def test_sigusr1_to_one_process_saves_by_agreement_and_the_run_goes_on(videos, folder, undisturbed):
    _, outcome = signaled(videos, folder, lambda process: ranks(process)[1:], signal.SIGUSR1)
    assert outcome.code == 0 and outcome.out.count("evaluated: 8/8 videos") == 1, outcome
    (step,) = re.findall(r"^step (\d+): saved, because of SIGUSR1$", outcome.err, re.MULTILINE)
    assert f" step {step}: saved, because of SIGUSR1\n" in (folder / "run" / "log.txt").read_text()
    names = {item.name for item in (folder / "run" / "checkpoints").glob("step_*")}
    assert 2 <= int(step) < 10 and names == {f"step_{int(step):07d}", "step_0000010"}
    same_runs(undisturbed, folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["both", "the second", "torchrun"])
def test_sigterm_saves_at_one_step_and_the_resumed_run_equals_an_undisturbed_one(videos, folder, undisturbed, whom):
    choose = {"both": ranks, "the second": lambda process: ranks(process)[1:], "torchrun": lambda p: [p.pid]}[whom]
    line, outcome = signaled(videos, folder, choose, signal.SIGTERM)
    step = saved(folder / "run")
    assert outcome.code == 1 and outcome.out == "" and messages(outcome) == [], outcome
    assert 2 <= step < 10 and len(records(folder / "run", "train")) == step
    assert outcome.err.count(f"stopped by SIGTERM after step {step}; saved. Go on with --resume") == 1
    if whom != "torchrun":
        assert exit_codes(outcome) == [143, 143], outcome.err

    resumed = launch(*line, "--resume")
    assert resumed.code == 0 and f"going on from step {step}" in resumed.err, resumed
    same_runs(undisturbed, folder / "run")
