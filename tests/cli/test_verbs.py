"""Every verb through the real entry point: what is on stdout, what on stderr, the exit code, the JSON."""

import json
import os
import re
import signal
import time

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cli.command_line import SMALL, hashes, start, twinreel
from twinreel.checkpoint import find_checkpoint, load_training_state
from twinreel.data.sources import SOURCES
from twinreel.losses import LOSSES
from twinreel.models import MODELS
from twinreel.recipe import list_recipes, load_recipe

PROTOCOL = (
    "source: generated", "split: test", "queries: 6", "candidates: 6", "evaluated: 6/6 videos",
    "windows: 2 a video, uniform, embeddings averaged", "frames: 4 at 8 a second (0.5 s)",
    "crop: center 32 of short side 40", "similarity: cosine", "ties: count against the model",
)  # fmt: skip
SENTENCE = "a red circle moves left"


def cells(table, label):
    """The numbers of a row of a table."""
    line = next(line for line in table.splitlines() if line.startswith(label))
    return [float(cell) for cell in line.removeprefix(label).split()]


def same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def same_runs(one, other):
    """Weights, optimizer state, counters and metrics are equal bit for bit."""
    (first, _), (second, _) = find_checkpoint(one), find_checkpoint(other)
    assert first.name == second.name
    same_tensors(load_file(first / "weights.safetensors"), load_file(second / "weights.safetensors"))
    states = [load_training_state(checkpoint) for checkpoint in (first, second)]
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        same_tensors(a, b)
    for state in states:
        state["state"].pop("seconds")
    assert states[0]["state"] == states[1]["state"]
    assert metrics(one) == metrics(other)


def metrics(run):
    noisy = {"clips_per_second", "step_seconds", "data_seconds", "waiting_share", "memory_gb"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in noisy}
        for record in records
        if record["kind"] != "start"  # one more of these each time a run goes on
    ]


def wait_for(condition, process, seconds=120):
    """Wait until a condition holds while a process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


# ---- list, show, check


def test_the_module_is_the_command_line():
    process = start("list", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    assert set(json.loads(out)["recipes"]) == set(list_recipes())


def test_list_names_everything_there_is():
    outcome = twinreel("list")
    assert outcome.code == 0 and outcome.err == ""
    tables = json.loads(twinreel("list", "--json").out)
    for title, names in (("models", MODELS), ("losses", LOSSES), ("sources", SOURCES), ("recipes", list_recipes())):
        assert set(tables[title]) == set(names)
        for name, text in tables[title].items():
            assert len(text) > 20 and f"  {name:24} {text}\n" in outcome.out


def test_show_prints_a_recipe_that_is_complete_and_loads_again(tmp_path):
    outcome = twinreel("show", "demo", "train.seed=7", "data.root=elsewhere")
    assert outcome.code == 0 and outcome.err == ""
    (tmp_path / "mine.yaml").write_text(outcome.out)
    expected = load_recipe("demo", ["train.seed=7", "data.root=elsewhere"])
    assert load_recipe(tmp_path / "mine.yaml") == expected
    assert json.loads(twinreel("show", "demo", "train.seed=7", "data.root=elsewhere", "--json").out) == (
        expected.model_dump(mode="json")
    )


def test_check_says_what_it_found_and_draws_it(trained, tmp_path):
    outcome = twinreel("check", *trained.recipe, "--out", tmp_path / "sheet.png")
    assert outcome.code == 0 and outcome.err == ""
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    assert {name: value.strip() for name, value in lines.items()}.items() >= {
        "rows": "8", "missing files": "0", "captions": "56", "steps": "2 an epoch, 6 in all",
        "network input": "4x3x4x32x32",
        "unreadable": "0 of the first 4 samples", "contact sheet": str(tmp_path / "sheet.png"),
    }.items()  # fmt: skip
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (4 * 112, 4 * (112 + 34))
    read = json.loads(twinreel("check", *trained.recipe, "--out", tmp_path / "again.png", "--json").out)
    assert read["warnings"] == [] and read["facts"]["rows"] == 8
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "sheet.png").read_bytes()


# ---- train


def test_train_prints_the_result_on_stdout_and_the_way_there_on_stderr(trained):
    out, err = trained.outcome.out, trained.outcome.err
    for words in ("text to video", "video to text", "chance, text to video", *PROTOCOL[2:]):
        assert words in out, words
    assert "step 1" not in out and "clips/s" not in out
    for words in ("rows 8 (evaluated on 6)", "global batch 4", "4 frames at 8 a second", "learning rate first",
                  "parameters", "from step 0", "step 1/6  loss", "clips/s", "step 6: text to video R@1",
                  "done: 6 steps"):  # fmt: skip
        assert words in err, words
    names = {item.name for item in trained.run.iterdir()}
    assert names == {"recipe.yaml", "versions.json", "log.txt", "metrics.jsonl", "tensorboard", "checkpoints", "lock"}


def test_a_finished_run_has_nothing_to_do_and_is_not_touched(trained):
    kept = ("recipe.yaml", "metrics.jsonl", "checkpoints/step_0000006/weights.safetensors")
    before = {name: (trained.run / name).read_bytes() for name in kept}
    outcome = twinreel("train", *trained.recipe, "--out", trained.run, "--resume")
    assert outcome.code == 0 and outcome.out == ""
    assert "is finished (6 of 6 steps): nothing to do" in outcome.err
    assert before == {name: (trained.run / name).read_bytes() for name in kept}


def test_a_run_is_not_overwritten_and_needs_a_folder(trained):
    before = hashes(trained.run)
    twinreel("train", *trained.recipe, "--out", trained.run).fails("already holds a run", "--resume")
    twinreel("train", *trained.recipe).fails("where to?", "--out")
    assert hashes(trained.run) == before


@pytest.mark.parametrize("value", ["step_4", "step_0000004", "4"])
def test_resume_from_a_named_checkpoint_ends_as_before(trained, copy_of, value):
    run = copy_of(trained.run)
    outcome = twinreel("train", *trained.recipe, "--out", run, "--resume", value)
    assert outcome.code == 0 and "going on from step 4" in outcome.err
    assert "step 5/6" in outcome.err and "step 4/6" not in outcome.err
    same_runs(trained.run, run)
    assert twinreel("train", run / "recipe.yaml", "--out", run, "--resume", "best").code == 0


def test_resume_says_which_checkpoints_there_are(trained, copy_of):
    run = copy_of(trained.run)
    before = hashes(run)
    twinreel("train", *trained.recipe, "--out", run, "--resume", "step_5").fails(
        "no checkpoint 'step_5'", "last, best, step_0000002, step_0000004, step_0000006"
    )
    assert hashes(run) == before


def own_recipe(trained, name, *more):
    model = f"model={{name: '{name}', size: 8}}"
    return ("demo", *(item for item in SMALL if not item.startswith("model.")), model, f"data.root={trained.root}",
            "train.num_steps=12", *more)  # fmt: skip


def test_sigterm_saves_exits_143_and_the_resumed_run_equals_an_undisturbed_one(trained, own_towers, tmp_path):
    recipe = own_recipe(trained, own_towers, "train.save_every=100 steps")
    process = start("train", *recipe, "--out", "run", folder=tmp_path, STEP_SECONDS="0.2")
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143 and out == ""
    saved = [item.name for item in (tmp_path / "run" / "checkpoints").glob("step_*")]
    step = int(saved[0].removeprefix("step_"))
    assert len(saved) == 1 and 1 <= step < 12
    assert f"stopped by SIGTERM after step {step}; saved. Go on with --resume" in err and "Traceback" not in err

    resumed = twinreel("train", *recipe, "--out", "run", "--resume")
    assert resumed.code == 0 and f"going on from step {step}" in resumed.err
    assert twinreel("train", *recipe, "--out", "whole").code == 0
    same_runs(tmp_path / "whole", tmp_path / "run")


def test_sigterm_at_any_moment_saves_what_it_says_it_saved(trained, tmp_path, monkeypatch):
    from twinreel import training

    real = training._due

    def ask_to_stop(cadence, step, parts):
        if step == 2 and cadence == "2 steps":  # told after the next step, and nothing is due after step 3
            os.kill(os.getpid(), signal.SIGTERM)
        return real(cadence, step, parts)

    monkeypatch.setattr(training, "_due", ask_to_stop)
    outcome = twinreel("train", *trained.recipe, "--out", tmp_path / "run")
    assert outcome.code == 143 and "stopped by SIGTERM after step 3; saved" in outcome.err
    assert (tmp_path / "run" / "checkpoints" / "step_0000003").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("worker_start", ["fork", "spawn"])
def test_sigterm_to_all_processes_saves_too(trained, own_towers, tmp_path, worker_start):
    """Batch systems, `timeout` and service managers signal the whole process group, readers included."""
    readers = ("data.num_workers=2", f"data.worker_start={worker_start}")
    recipe = own_recipe(trained, own_towers, "train.save_every=100 steps", *readers)
    process = start("train", *recipe, "--out", "run", folder=tmp_path, STEP_SECONDS="0.3")
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_and_equals_an_undisturbed_one(trained, own_towers, tmp_path):
    recipe = own_recipe(trained, own_towers, "train.save_every=3 steps", "eval.every=4 steps")
    process = start("train", *recipe, "--out", "run", folder=tmp_path, STEP_SECONDS="0.2")
    lines = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: lines.exists() and lines.read_text().count('"train"') >= 5, process)
    process.kill()
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    with lines.open("a") as file:
        file.write('{"kind": "train", "st')  # as if it had been killed in the middle of a line

    resumed = twinreel("train", *recipe, "--out", "run", "--resume")
    assert resumed.code == 0, resumed
    assert re.search(r"going on from step [3-9]", resumed.err), resumed.err
    assert twinreel("train", *recipe, "--out", "whole").code == 0
    same_runs(tmp_path / "whole", tmp_path / "run")


# ---- eval


def test_eval_prints_both_directions_and_the_protocol(trained):
    outcome = twinreel("eval", trained.run)
    assert outcome.code == 0 and outcome.err == "judging 6/6 videos\n"
    for words in (*PROTOCOL, f"checkpoint: run/{(trained.run / 'checkpoints' / 'best').resolve().name}"):
        assert words in outcome.out.splitlines(), words
    report = json.loads(twinreel("eval", trained.run, "--json").out)
    assert report["faults"] == [] and report["protocol"]["queries"] == 6
    for label in ("text to video", "video to text", "chance, text to video", "chance, video to text"):
        key = label.replace(", ", "/").replace(" ", "_")
        values = [report["metrics"].get(f"{key}/{name}") for name in ("recall_at_1", "recall_at_5", "recall_at_10")]
        ranks = [report["metrics"][f"{key}/{name}"] for name in ("median_rank", "mean_rank")]
        expected = [100 * value for value in values if value is not None] + ranks
        assert cells(outcome.out, label) == pytest.approx(expected, abs=0.051)


def test_eval_judges_as_training_did(trained):
    for label in ("text to video", "video to text"):
        assert cells(twinreel("eval", trained.run, "--checkpoint", "last").out, label) == cells(
            trained.outcome.out, label
        )


def test_eval_of_a_checkpoint_with_overrides(trained):
    outcome = twinreel("eval", trained.run, "eval.num_clips=3", "eval.windows=milnce", "--checkpoint", "step_2")
    assert outcome.code == 0
    assert "windows: 3 a video, milnce, embeddings averaged" in outcome.out
    assert "checkpoint: run/step_0000002" in outcome.out


def test_eval_of_a_manifest_and_of_a_source_are_the_same_where_they_are_the_same(trained):
    manifest = trained.root / "test" / "manifest.csv"
    by_recipe, by_manifest, by_source = (
        json.loads(twinreel("eval", trained.run, *more, "--json").out)
        for more in (
            (),
            ("--input", manifest, "--split", "test"),
            ("--source", "generated", "--split", "test", "--root", trained.root),
        )
    )
    assert by_recipe["metrics"] == by_manifest["metrics"] == by_source["metrics"]
    assert str(manifest) in str(by_manifest["protocol"]["source"]) and by_source["protocol"]["source"] == "generated"


def test_eval_refuses_what_contradicts(trained):
    manifest = trained.root / "test" / "manifest.csv"
    twinreel("eval", trained.run, "--input", manifest, "--source", "generated").fails("not both")
    twinreel("eval", trained.run, "--input", manifest).fails("the rows have splits (test)")


# ---- predict, embed, search


def test_predict_ranks_the_sentences_of_each_video(trained, tmp_path):
    videos = [trained.root / "test" / "videos" / f"test_000{i}.mp4" for i in (0, 1)]
    (tmp_path / "more.txt").write_text("a blue ring grows\n\n  a white cross shrinks \n")
    arguments = ("predict", trained.run, *videos, "--sentence", SENTENCE, "--sentences", tmp_path / "more.txt")
    read = json.loads(twinreel(*arguments, "--json").out)
    assert [{item["video"] for item in ranked} for ranked in read] == [{str(video)} for video in videos]
    for ranked in read:
        assert {item["sentence"] for item in ranked} == {SENTENCE, "a blue ring grows", "a white cross shrinks"}
        assert [item["score"] for item in ranked] == sorted((item["score"] for item in ranked), reverse=True)
    outcome = twinreel(*arguments, "--top", 2)
    assert outcome.code == 0 and outcome.err == ""
    expected = []
    for ranked in read:
        expected.append(ranked[0]["video"])
        for item in ranked[:2]:
            seconds = f"{item['start_seconds']:7.2f}-{item['end_seconds']:.2f} s"
            expected.append(f"  {item['score']:7.3f}  {seconds}  {item['sentence']}")
    assert outcome.out.splitlines() == expected


def test_embed_a_folder_then_search_it(trained, tmp_path):
    videos = trained.root / "test" / "videos"
    outcome = twinreel("embed", trained.run, "--input", videos, "--out", tmp_path / "index")
    assert outcome.code == 0 and outcome.err == "embedding 6/6 videos\n"
    assert outcome.out.startswith("6 videos listed: 6 written, 0 already there, 0 failed; ")
    again = json.loads(twinreel("embed", trained.run, "--input", videos, "--out", tmp_path / "index", "--json").out)
    assert (again["listed"], again["written"], again["already_there"], again["faults"]) == (6, 0, 6, [])
    assert f"{again['windows']} windows in {tmp_path / 'index'}\n" in outcome.out

    found = json.loads(twinreel("search", tmp_path / "index", SENTENCE, "--top", 4, "--json").out)
    assert len(found) == 4
    printed = twinreel("search", tmp_path / "index", SENTENCE, "--top", 4)
    assert printed.code == 0 and printed.err == ""
    assert printed.out.splitlines() == [
        f"{item['score']:7.3f}  {item['start_seconds']:7.2f}-{item['end_seconds']:.2f} s  {item['video']}"
        for item in found
    ]
    assert all(item["video"].startswith(str(videos)) and item["end_seconds"] > item["start_seconds"] for item in found)
    assert len(twinreel("search", tmp_path / "index", SENTENCE).out.splitlines()) == 5


def test_a_sentence_without_a_known_word_cannot_be_searched(trained, tmp_path):
    twinreel("embed", trained.run, "--input", trained.root / "test" / "videos", "--out", tmp_path / "index")
    before = hashes(tmp_path / "index")
    for sentence in ("zzz qqq", "  ", "!?"):
        twinreel("search", tmp_path / "index", sentence).fails("no word of it is in the model's vocabulary")
    video = trained.root / "test" / "videos" / "test_0000.mp4"
    twinreel("predict", trained.run, video, "--sentence", SENTENCE, "--sentence", "zzz").fails("'zzz'", "vocabulary")
    assert hashes(tmp_path / "index") == before


@pytest.mark.parametrize("verb", ["predict", "search"])
def test_no_answers_at_all_cannot_be_asked_for(trained, verb, tmp_path):
    rest = ("video.mp4", "--sentence", SENTENCE) if verb == "predict" else (SENTENCE,)
    outcome = twinreel(verb, trained.run, *rest, "--top", 0)
    assert outcome.code == 2 and outcome.out == "" and "--top" in outcome.err and "Traceback" not in outcome.err


def test_embed_of_a_folder_takes_no_options_of_a_manifest(trained, tmp_path):
    videos = trained.root / "test" / "videos"
    for option in (("--split", "test"), ("--root", tmp_path)):
        twinreel("embed", trained.run, "--input", videos, "--out", tmp_path / "index", *option).fails("is a folder")
    assert not (tmp_path / "index").exists()


def test_embed_names_what_it_could_not_read_and_tries_it_again_next_time(trained, collection, tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"")
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:3], str(broken)])
    arguments = ("embed", trained.run, "--input", manifest, "--out", tmp_path / "index")
    outcome = twinreel(*arguments)
    assert outcome.code == 2
    assert outcome.out.startswith("4 videos listed: 3 written, 0 already there, 1 failed; ")
    assert f"not embedded: {broken}: can't be read as a video: an empty file" in outcome.err
    assert str(tmp_path / "index" / "faults.jsonl") in outcome.err and "Traceback" not in outcome.err
    faults = [json.loads(line) for line in (tmp_path / "index" / "faults.jsonl").read_text().splitlines()]
    assert [(fault["id"], fault["video"]) for fault in faults] == [(str(broken), str(broken))]
    read = json.loads(twinreel(*arguments, "--json").out)
    assert read["listed"] == read["written"] + read["already_there"] + len(read["faults"]) == 4

    broken.write_bytes((collection.folder / "3.mp4").read_bytes())  # mended
    read = json.loads(twinreel(*arguments, "--json").out)
    assert (read["listed"], read["written"], read["already_there"], read["faults"]) == (4, 1, 3, [])
    assert (tmp_path / "index" / "faults.jsonl").read_text() == ""


SLOW_EMBED = """
import time
import twinreel.search as search

write = search._write_part
search.VIDEOS_A_PART = 1
search._write_part = lambda *part: (write(*part), time.sleep(0.5))
from twinreel.cli import main
main()
"""


@pytest.mark.slow
def test_a_killed_embed_goes_on_and_gives_the_index_of_an_undisturbed_one(trained, tmp_path, monkeypatch):
    videos = trained.root / "test" / "videos"
    arguments = ("embed", trained.run, "--input", videos, "--out")
    process = start(*arguments, tmp_path / "parts", program=("-c", SLOW_EMBED))
    parts = tmp_path / "parts" / "parts"
    wait_for(lambda: parts.is_dir() and len(list(parts.glob("0*.json"))) >= 2, process)
    process.kill()
    process.communicate(timeout=120)
    done = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert 2 <= len(list(parts.glob("0*.json"))) < 6

    monkeypatch.setattr("twinreel.search.VIDEOS_A_PART", 1)
    counts = [json.loads(twinreel(*arguments, tmp_path / name, "--json").out) for name in ("parts", "whole")]
    assert [count.pop("written") + count.pop("already_there") for count in counts] == [6, 6]
    assert counts[0] == counts[1]
    assert {path.name: path.read_bytes() for path in parts.iterdir()}.items() >= done.items()
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")
    answers = [twinreel("search", tmp_path / name, SENTENCE, "--json").out for name in ("parts", "whole")]
    assert answers[0] == answers[1] and len(json.loads(answers[0])) == 5


# ---- the user's own collection


def test_from_a_csv_to_seconds(collection, tmp_path):
    """Train, evaluate, embed, search and predict on numbered videos with a CSV beside them."""
    splits = ["train"] * 30 + ["val"] * 10
    captions = [f"the video number {i} is {'even' if i % 2 == 0 else 'odd'}" for i in range(40)]
    manifest = collection.manifest(tmp_path / "rows.csv", caption=captions, split=splits)
    small = [item for item in SMALL if not item.startswith(("data.num_videos", "data.num_test"))]
    recipe = ("s3dg_small_own_videos", f"data.manifest={manifest}", "data.split=train", "eval.split=val",
              "model.name=conv3d_small", *small, "train.num_epochs=null", "optim.warmup_epochs=null",
              "eval.every=2 steps")  # fmt: skip
    run = tmp_path / "run"
    outcome = twinreel("train", *recipe, "--out", run)
    assert outcome.code == 0, outcome
    assert [f"step {step}: text to video" in outcome.err for step in (2, 4, 6)] == [True] * 3
    judged = twinreel("eval", run)
    assert judged.code == 0
    for words in (str(manifest), "split: val", "queries: 10", "candidates: 10", "evaluated: 10/10 videos"):
        assert words in judged.out
    counted = json.loads(twinreel("embed", run, "--input", manifest, "--split", "val", "--out", tmp_path / "index",
                                  "--stride-seconds", "0.5", "--json").out)  # fmt: skip
    assert counted == {
        "listed": 10, "written": 10, "already_there": 0, "windows": 20, "repeated_frames": 0, "faults": [],
    }  # fmt: skip
    found = json.loads(twinreel("search", tmp_path / "index", "odd", "--top", 20, "--json").out)
    assert {(item["start_seconds"], item["end_seconds"]) for item in found} == {(0.0, 0.5), (0.5, 1.0)}
    assert {item["video"] for item in found} == {str(collection.folder / f"{i}.mp4") for i in range(30, 40)}
    assert twinreel("predict", run, collection.folder / "0.mp4", "--sentence", "even").code == 0


def test_resume_before_the_recipe_does_not_eat_it(trained, copy_of):
    run = copy_of(trained.run)
    outcome = twinreel("train", "--resume", *trained.recipe, "--out", run)
    assert outcome.code == 0 and "nothing to do" in outcome.err


def test_a_reader_that_has_seen_enough_is_no_error():
    process = start("list", "--json", PYTHONUNBUFFERED="1")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    process.stderr.close()
