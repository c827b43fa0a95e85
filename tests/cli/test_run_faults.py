"""Whatever happens to a run: a sentence that says what and where, the exit code, and nothing is lost."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from cli.command_line import hashes
from cli.launched import (
    ALONE,
    SETTINGS,
    TORCHRUN,
    alone,
    end,
    exit_codes,
    launch,
    launched,
    make_videos,
    messages,
    ranks,
    readers,
    recipe,
    records,
    same_runs,
    saved,
    troubled_towers,
    wait_for,
)

LOST = "lost contact with another process, which says itself why it ended, or was killed"
INTACT = "The last checkpoint is intact: go on with --resume."
FULL_BYTES = 2 << 20


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return make_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    yield from troubled_towers(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def whole(videos, tmp_path_factory):
    """A run of 12 steps in one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        for _ in troubled_towers(folder, patch):
            assert alone("train", *twelve(videos), "--out", folder / "run").code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def whole_of_two(videos, tmp_path_factory):
    """The same in two processes."""
    folder = tmp_path_factory.mktemp("whole_of_two")
    with pytest.MonkeyPatch.context() as patch:
        for _ in troubled_towers(folder, patch):
            outcome = launch("train", *twelve(videos), "--out", folder / "run")
            assert outcome.code == 0, outcome
    return folder / "run"


def twelve(videos, *more):
    return recipe(videos, "train.num_steps=12", *more)


def mount(*arguments):
    if subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount file systems")


@pytest.fixture
def small_disk(folder):
    """A file system of its own with 2 MB; `small_disk / "filler"` is what fills it."""
    place = folder / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", place)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def read_only(folder):
    """A folder of which only `folder / "writable"` can be written to."""
    (folder / "writable").mkdir()
    place = folder / "read_only"
    place.mkdir()
    mount("--bind", folder / "writable", place)
    mount("-o", "remount,ro,bind", place)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


# ---- two jobs, one folder


def test_a_second_job_on_a_folder_is_refused_or_waits_and_gets_it_when_the_first_is_killed(videos, folder, whole):
    line = ("train", *twelve(videos), "--out", "run")
    with launched(*line, program=ALONE, STEP_SECONDS="0.4") as first:
        wait_for(lambda: (folder / "run" / "checkpoints" / "last").exists(), first)
        holder = f"process {first.pid} on {socket.gethostname()} (since "
        refused = alone(*line)
        refused.fails(f"run is in use: {holder}", "trains there. Wait for it, stop it, or choose another --out")
        with launched(*line, "--resume", program=ALONE) as second:
            assert second.stderr is not None
            waits = second.stderr.readline()
            before = len(records(folder / "run", "train"))
            wait_for(lambda: len(records(folder / "run", "train")) > before + 1, first)  # it is not disturbed
            assert second.poll() is None
            os.kill(first.pid, signal.SIGKILL)
            resumed = end(second)
        first.communicate()
    assert waits.startswith(f"run is held by {holder}") and waits.endswith("; waiting up to 15 s for it to end\n")
    assert resumed.code == 0, resumed
    assert re.search(r"going on from step ([2468]|10)$", resumed.err, re.MULTILINE), resumed.err
    same_runs(whole, folder / "run")


# ---- the disk


def test_a_full_disk_at_a_checkpoint(videos, folder, small_disk):
    run = small_disk / "run"
    line = ("train", *twelve(videos, "train.log_every=100"), "--out")
    full = alone(*line, run, TROUBLE="fill 0 4", FILLER=str(small_disk / "filler"))
    full.fails(
        f"{run}/checkpoints/step_0000004: the checkpoint could not be written: ", "No space left on device",
        "The checkpoints before it are intact; free space or mend the folder, then go on with --resume.",
    )  # fmt: skip
    assert saved(run) == 2
    (small_disk / "filler").unlink()
    resumed = alone(*line, run, "--resume")
    assert resumed.code == 0 and "going on from step 2" in resumed.err
    assert alone(*line, folder / "whole").code == 0
    same_runs(folder / "whole", run)


@pytest.mark.parametrize("what", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_at_the_log(videos, folder, small_disk, what):
    """The log's files and TensorBoard's lie on two file systems, one of which is full; nothing is saved meanwhile."""
    line = ("train", *twelve(videos, "train.num_steps=30", "train.save_every=100 steps"), "--out")
    assert alone(*line, "whole").code == 0
    run, other = (small_disk / "run", folder / "tensorboard")
    if what == "tensorboard":
        run, other = (folder / "run", small_disk / "tensorboard")
    assert alone(*line, run, TROUBLE="stop 0 2").code == 143
    shutil.move(run / "tensorboard", other)
    (run / "tensorboard").symlink_to(other)
    full = alone(*line, run, "--resume", TROUBLE="fill 0 1", FILLER=str(small_disk / "filler"))
    full.fails(str(run), "No space left on device", "checkpoint is intact", "--resume")
    assert saved(run) == 2
    (small_disk / "filler").unlink()
    resumed = alone(*line, run, "--resume")
    assert resumed.code == 0 and "going on from step 2" in resumed.err
    same_runs(folder / "whole", run)


def test_a_disk_that_is_full_from_the_start(videos, small_disk):
    (small_disk / "filler").write_bytes(bytes(FULL_BYTES))
    alone("train", *twelve(videos), "--out", small_disk / "run").fails(
        str(small_disk / "run"), "No space left on device"
    )
    (small_disk / "filler").unlink()
    assert alone("train", *recipe(videos), "--out", small_disk / "run").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint", "log"])
def test_a_full_disk_under_two_processes(videos, folder, small_disk, whole_of_two, what):
    more = ("train.save_every=100 steps", "train.num_steps=30") if what == "log" else ()
    line = ("train", *twelve(videos, *more), "--out", small_disk / "run")
    full = launch(*line, TROUBLE="fill 1 4", FILLER=str(small_disk / "filler"))
    assert full.code == 1 and full.out == "" and set(exit_codes(full)) <= {2, -15}, full
    said = [text for text in messages(full) if LOST not in text]
    assert len(said) == 1 and "No space left on device" in said[0] and str(small_disk / "run") in said[0], full.err
    assert "--resume" in said[0] and not re.search("^Traceback.*(?s:.*)^twinreel: ", full.err, re.MULTILINE)
    (small_disk / "filler").unlink()
    resumed = launch(*line, "--resume")
    assert resumed.code == 0, resumed
    if what == "checkpoint":
        assert "going on from step 2" in resumed.err
        same_runs(whole_of_two, small_disk / "run")


def test_a_place_that_cannot_be_written_to(videos, folder, read_only):
    for run, why in (
        (read_only / "run", "Read-only file system"),
        (folder / "troubled_towers.py" / "run", "Not a dir"),
    ):
        outcome = alone("train", *recipe(videos), "--out", run)
        outcome.fails(f"{run}: no run folder can be made there: {why}", "choose another --out")


def test_a_run_on_a_disk_that_has_become_read_only_can_be_judged_and_copied_but_not_resumed(videos, folder, read_only):
    line = ("train", *recipe(videos), "--out")
    assert alone(*line, "writable/run", TROUBLE="stop 0 3").code == 143
    alone(*line, read_only / "run", "--resume").fails(f"{read_only / 'run'}: no run folder", "Read-only file system")
    assert alone("eval", read_only / "run").code == 0
    shutil.copytree(read_only / "run", "copy", symlinks=True)
    assert alone(*line, "copy", "--resume").code == alone(*line, "whole").code == 0
    same_runs(folder / "whole", folder / "copy")


# ---- the data and the recipe


@pytest.fixture
def own_data(videos, folder):
    """Rows of a manifest in a root that may go away: what a recipe needs of it."""
    shutil.copytree(videos / "train", folder / "root")
    shutil.move(folder / "root" / "manifest.csv", folder / "rows.csv")
    data = "{source: manifest, manifest: rows.csv, root: root, split: train, num_workers: 0, flip: 0.5}"
    return ("demo", f"data={data}", *SETTINGS, "eval.split=null")


def test_a_data_root_that_is_gone_when_a_run_is_resumed(own_data, folder):
    line = ("train", *own_data, "--out")
    assert alone(*line, "run", TROUBLE="stop 0 3").code == 143
    before = hashes(folder / "run" / "checkpoints")
    (folder / "root").rename("elsewhere")
    alone(*line, "run", "--resume").fails("root 'root' does not exist")
    assert hashes(folder / "run" / "checkpoints") == before
    moved = alone("train", *own_data, "data.root=elsewhere", "--out", "run", "--resume")
    assert moved.code == 0 and "going on from step 3" in moved.err, moved
    (folder / "elsewhere").rename("root")
    assert alone(*line, "whole").code == 0
    same_runs(folder / "whole", folder / "run")


@pytest.mark.parametrize(("max_faults", "moment", "said", "steps"), [
    (0.05, 4, "8 of the last 40 samples could not be read (allowed data.max_faults=5%)", {5}),
    (0.3, 3, "16 of the last 40 samples could not be read (allowed data.max_faults=30%)", {4, 5}),
])  # fmt: skip
def test_a_data_root_that_goes_away_in_the_middle(own_data, folder, max_faults, moment, said, steps):
    """With the greater limit a batch is left out, and a checkpoint says so, before the run stops."""
    line = ("train", *own_data, "train.num_steps=12", f"data.max_faults={max_faults}", "--out")
    gone = alone(*line, "run", TROUBLE=f"move 0 {moment}", MOVED=str(folder / "root"))
    gone.fails(said, "no such file", "run/faults.jsonl; mend or remove these rows, or raise data.max_faults.")
    assert {(fault["step"], fault["reason"].rpartition(": ")[2]) for fault in faults_of("run")} == {
        (step, "no such file") for step in steps
    }
    assert len(faults_of("run")) == 8 * len(steps) and saved(folder / "run") == 4
    (folder / "root_gone").rename("root")
    resumed = alone(*line, "run", "--resume")
    assert resumed.code == 0 and "going on from step 4" in resumed.err
    if steps == {5}:  # no checkpoint knows of it
        assert alone(*line, "whole").code == 0
        same_runs(folder / "whole", folder / "run")
    else:
        assert "8 samples were left out, see run/faults.jsonl" in resumed.err
        assert [fault["step"] for fault in faults_of("run")] == [4] * 8


def faults_of(run):
    return [json.loads(text) for text in (Path(run) / "faults.jsonl").read_text().splitlines()]


def test_a_changed_recipe_and_changed_rows_are_refused(own_data, folder):
    line = ("train", *own_data, "--out", "run")
    assert alone(*line, TROUBLE="stop 0 3").code == 143
    before = hashes(folder / "run")
    changed = alone("train", *own_data, "train.seed=5", "optim.learning_rate=0.1", "--out", "run", "--resume")
    changed.fails("run: the recipe differs from the run's:\n", "  train.seed: 0 in the run, 5 now\n",
                  "  optim.learning_rate: 0.002 in the run, 0.1 now\n", "Resume with the same recipe")  # fmt: skip
    assert changed.err.count(" in the run, ") == 2
    rows = (folder / "rows.csv").read_text().splitlines(keepends=True)
    (folder / "rows.csv").write_text("".join([*rows[:3], *rows[4:], rows[3]]))
    alone(*line, "--resume").fails("step_0000003: the training rows have changed since (16 rows, ", "order")
    assert {**hashes(folder / "run"), "lock": 0} == {**before, "lock": 0}
    (folder / "rows.csv").write_text("".join(rows))
    assert alone(*line, "--resume").code == 0


# ---- one process alone


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        pytest.param("raise 1 3", 2),
        pytest.param("raise 0 3", 2, marks=pytest.mark.slow),
        pytest.param("leave 1 3", 9, marks=pytest.mark.slow),
        pytest.param("leave 0 3", 9, marks=pytest.mark.slow),
    ],
)
def test_one_process_that_fails_alone_takes_the_others_with_it(videos, folder, trouble, code):
    what, rank, _ = trouble.split()
    line = ("train", *recipe(videos), "--out", "run")
    outcome = launch(*line, TROUBLE=trouble)  # ends in time, whatever happens
    other = 1 - int(rank)
    assert outcome.code == 1 and code in exit_codes(outcome) and set(exit_codes(outcome)) <= {code, 2, -15}, outcome
    lost = [text for text in messages(outcome) if LOST in text]
    assert len(lost) == 1 and lost[0].startswith(f"twinreel: process {other}: ") and lost[0].endswith(INTACT), outcome
    if what == "raise":
        assert "ValueError: these towers do not like this video" in outcome.err
        assert f"twinreel: the error comes from your own code: {folder / 'troubled_towers.py'}:" in outcome.err
    assert saved(folder / "run") == 2
    resumed = alone(*line, "--resume")
    assert resumed.code == 0 and "2 in the run, 1 now" in resumed.err


@pytest.mark.parametrize(
    "rank", [pytest.param(None), pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_reader_that_is_killed_ends_the_run_with_words(videos, folder, request, rank):
    """While it computes, while it waits for data; at the next batch at the latest, however many are there already."""
    line = ("train", *twelve(videos, "data.num_workers=2"), "--out", "run")
    with launched(*line, program=ALONE if rank is None else TORCHRUN, STEP_SECONDS="0.3") as job:
        wait_for(lambda: len(records(folder / "run", "train")) >= 3, job)
        os.kill(readers(job.pid if rank is None else ranks(job)[rank])[0], signal.SIGKILL)
        outcome = end(job)
    said = [text for text in messages(outcome) if LOST not in text]
    assert outcome.code == (2 if rank is None else 1) and outcome.out == "", outcome
    assert len(said) == 1 and "a reader process ended: " in said[0] and said[0].endswith(INTACT), outcome.err
    assert "lower data.num_workers" in said[0] and "your own code" not in outcome.err
    assert saved(folder / "run") in (2, 4)
    resumed = alone(*line, "--resume") if rank is None else launch(*line, "--resume")
    assert resumed.code == 0, resumed
    same_runs(request.getfixturevalue("whole" if rank is None else "whole_of_two"), folder / "run")


# ---- numbers that are not finite, and the step once more


def test_replay_shows_the_sample_that_a_nan_comes_from(videos, folder):
    line = ("train", *recipe(videos), "--out")
    stopped = alone(*line, "run", TROUBLE="spoil 0 3")
    stopped.fails("step 3: the loss is nan; no weight was changed", "run/non_finite/step_0000003.json",
                  "`twinreel replay run --step 3`", "The last checkpoint is intact.")  # fmt: skip
    (bad,) = re.findall(r"embeddings that are not finite: (\S+)\. All", stopped.err)
    assert saved(folder / "run") == 2

    read = json.loads(alone("replay", "run", "--step", 3, "--json", TROUBLE="spoil 0 1").out)
    assert (read["step"], read["weights_of_step"], read["loss"]) == (3, 2, "nan") and len(read["terms"]) == 8
    assert [term["id"] for term in read["terms"] if term["video_norm"] == "nan"] == [bad]
    assert read["bad_gradients"] != []
    table = alone("replay", "run", "--step", 3, TROUBLE="spoil 0 1")
    assert table.code == 0 and table.err == ""
    assert table.out.startswith("step 3, weights of step 2: loss nan, gradient norm nan\n")
    assert "gradients that are not finite: " in table.out and f"  {bad}: " in table.out

    healthy = json.loads(alone("replay", "run", "--step", 3, "--json").out)
    assert all(isinstance(term["loss"], float) for term in healthy["terms"]) and healthy["bad_gradients"] == []
    assert alone(*line, "run", "--resume").code == alone(*line, "whole").code == 0
    same_runs(folder / "whole", folder / "run")


def test_replay_of_a_healthy_step_has_the_numbers_of_the_run(videos, folder):
    assert alone("train", *recipe(videos), "--out", "run").code == 0
    lines = {line["step"]: line for line in records(folder / "run", "train")}
    for step in (1, 3, 5):
        read = json.loads(alone("replay", "run", "--step", step, "--json").out)
        assert read["weights_of_step"] == step - 1
        assert read["loss"] == pytest.approx(lines[step]["loss"], rel=1e-6)
        assert read["gradient_norm"] == pytest.approx(lines[step]["gradient_norm"], rel=1e-5)
        assert sum(term["loss"] for term in read["terms"]) / 8 == pytest.approx(read["loss"], rel=1e-5)
    far = alone("replay", "run", "--step", 6)
    assert "note: the batch is that of step 6, but the run kept no weights of step 5: these are of step 4" in far.out
    for step, words in ((7, "--step 7: the run has steps 1 to 6"), (9999, "--step 9999: the run has steps 1 to 6")):
        alone("replay", "run", "--step", step).fails(words)
    zero = alone("replay", "run", "--step", 0)
    assert zero.code == 2 and "greater than or equal to 1" in zero.err
    alone("replay", videos, "--step", 1).fails("not a run folder (no recipe.yaml)")


@pytest.mark.slow
def test_a_nan_in_one_of_two_processes_is_said_once_and_stops_both(videos, folder):
    outcome = launch("train", *recipe(videos), "--out", "run", TROUBLE="spoil 1 3")
    assert outcome.code == 1 and outcome.out == "" and 2 in exit_codes(outcome)
    (said,) = messages(outcome)
    assert "step 3: the loss is nan; no weight was changed" in said and "Traceback" not in outcome.err.split(said)[0]
    (bad,) = re.findall(r"embeddings that are not finite: (\S+)\. All", said)
    written = json.loads((folder / "run" / "non_finite" / "step_0000003.json").read_text())
    assert [row["id"] for row in written["batch"] if not row["video_finite"]] == [bad]
    read = json.loads(alone("replay", "run", "--step", 3, "--json").out)
    assert read["weights_of_step"] == 2 and bad in [term["id"] for term in read["terms"]]
    assert saved(folder / "run") == 2


# ---- a trial before the run


SHIFTED_LOSS = '''
"""A user's own loss that counts its clips from the start of the batch, wherever they lie."""

from twinreel.losses import info_nce


def shifted(video_embeddings, text_embeddings, *, mask=None, valid=None, own=None, temperature: float = 0.1):
    if own is not None:
        own = own - own.min()
    return info_nce(video_embeddings, text_embeddings, mask=mask, valid=valid, own=own, temperature=temperature)
'''
BUILT_IN = (
    "model={name: conv3d_small, embedding_size: 16, preprocessing: {num_frames: 4, frame_rate: 8.0, crop_size: 32}}"
)


@pytest.mark.slow
def test_check_with_steps_finds_what_is_wrong_with_a_recipe(videos, folder):
    check = ("check", *recipe(videos, BUILT_IN), "--steps", 50)
    good = alone(*check)
    assert good.code == 0 and "problem" not in good.out and good.err == "", good
    trial = r"^trial +loss (\S+) -> (\S+) over 50 steps on the same 16 clips \(chance (\S+)\)"
    (first, last, chance) = map(float, re.findall(trial, good.out, re.MULTILINE)[0])
    assert last < 0.5 * min(first, chance)
    assert re.search(r"^processes +2 processes agree with one on 8 clips$", good.out, re.MULTILINE)

    wild = alone(*check, "optim.learning_rate=1")
    assert wild.code == 2 and wild.err == ""
    (problem,) = re.findall(r"^problem: (.*)$", wild.out, re.MULTILINE)
    assert problem.startswith("the loss does not fall (") and "optim.learning_rate (too low or too high)" in problem

    (folder / "our_loss.py").write_text(SHIFTED_LOSS)
    own_loss = alone(*check, "task={name: contrastive, loss: 'our_loss:shifted', num_candidates: 1}", "--json")
    assert own_loss.code == 2
    (problem,) = json.loads(own_loss.out)["problems"]
    assert problem.startswith("label offset: ") and "own" in problem
