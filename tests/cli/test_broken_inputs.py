"""Whatever the user gets wrong: one message that says what, where and what to do, exit 2, and nothing lost."""

import argparse
import json
import os
import shutil

import pytest
import torch

from cli.command_line import SMALL, hashes, twinreel
from videos import make_audio, make_video

# What may be wrong with a file, and the words that say so.
BROKEN = {
    "missing": "no such file",
    "empty": "an empty file (0 bytes)",
    "text": "a text file, not a video",
    "audio": "no video stream (the file holds: audio)",
    "cut": "an MP4 file without its index (no moov box)",
    "damaged": "the video is damaged",
}
# An untrained model has no quality to lose: 16 pixels, and rows of the user's own.
OWN = (
    *(item for item in SMALL if not item.startswith(("data.num_videos", "data.num_test", "model.prep"))),
    *("model.name=conv3d_small", "train.num_epochs=null", "optim.warmup_epochs=null", "optim.warmup_steps=0"),
    *("data.clip_start=center", "eval.split=null"),
    "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 16}",
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A file of each kind of BROKEN, under the kind's name."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("this is the page of an error, not a video")
    make_audio(folder / "audio.mp4")
    for name, options in (("cut", {}), ("damaged", {"movflags": "faststart"})):
        whole = make_video(
            folder / f"{name}.mp4", num_frames=64, frame_rate=8, size=(96, 96), container_options=options
        )
        data = whole.read_bytes()
        whole.write_bytes(data[: len(data) // 2])
    return {kind: folder / f"{kind}.mp4" for kind in BROKEN}


def own(manifest, *more):
    return ("s3dg_small_own_videos", f"data.manifest={manifest}", *OWN, *more)


def faults_of(folder):
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


# ---- videos that cannot be read


def test_training_goes_on_without_a_few_broken_videos_and_names_each(collection, broken, tmp_path):
    """Two epochs over 40 rows: each broken row is two faults, one an epoch, and the run is complete."""
    for kinds, limit in ((["missing"], 0.05), (list(BROKEN), 0.2)):
        bad = {str(broken[kind]): BROKEN[kind] for kind in kinds}
        manifest = collection.manifest(tmp_path / f"{len(bad)}.csv", [*collection.names[: 40 - len(bad)], *bad])
        recipe = own(manifest, "train.num_steps=4", "train.global_batch_size=20", f"data.max_faults={limit}")
        outcome = twinreel("train", *recipe, "--out", tmp_path / str(len(bad)))
        assert outcome.code == 0 and "done: 4 steps" in outcome.err, outcome
        faults = faults_of(tmp_path / str(len(bad)))
        assert sorted((fault["id"], (fault["step"] + 1) // 2) for fault in faults) == sorted(
            (video, epoch) for video in bad for epoch in (1, 2)
        )
        for fault in faults:
            assert fault["id"] == fault["video"] and bad[fault["video"]] in fault["reason"], fault
        last = json.loads((tmp_path / str(len(bad)) / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["faults"] == 2 * len(bad)


def test_training_stops_at_too_many_broken_videos_and_names_them(collection, broken, tmp_path):
    kinds = ("empty", "text", "audio")
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:37], *(str(broken[k]) for k in kinds)])
    recipe = own(manifest, "train.num_steps=4", "train.global_batch_size=40")
    outcome = twinreel("train", *recipe, "--out", tmp_path / "run")
    outcome.fails("3 of the last 40 samples could not be read (allowed data.max_faults=5%)", "data.max_faults",
                  "faults.jsonl", *(str(broken[kind]) for kind in kinds))  # fmt: skip
    assert {fault["video"] for fault in faults_of(tmp_path / "run")} == {str(broken[kind]) for kind in kinds}
    assert twinreel("train", *recipe, "data.max_faults=0.1", "--out", tmp_path / "more").code == 0


def test_training_does_not_begin_where_too_many_videos_are_missing(collection, tmp_path):
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:37], "a.mp4", "b.mp4", "c.mp4"])
    twinreel("train", *own(manifest), "--out", tmp_path / "run").fails(
        "3 of 40 listed videos do not exist (8%", str(collection.folder / "a.mp4"), "data.root", "data.max_faults"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", BROKEN)
def test_evaluation_does_not_leave_a_broken_video_out_unasked(trained, collection, broken, tmp_path, kind):
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:5], str(broken[kind])])
    before = hashes(trained.run)
    outcome = twinreel("eval", trained.run, "--input", manifest)
    outcome.fails("1 of 6 videos could not be read; scores would be over 5", str(broken[kind]), BROKEN[kind],
                  "eval.allow_missing=true")  # fmt: skip
    allowed = twinreel("eval", trained.run, "--input", manifest, "eval.allow_missing=true")
    assert allowed.code == 0
    assert "evaluated: 5/6 videos" in allowed.out and "candidates: 5" in allowed.out and "queries: 5" in allowed.out
    report = json.loads(twinreel("eval", trained.run, "--input", manifest, "eval.allow_missing=true", "--json").out)
    assert [fault["video"] for fault in report["faults"]] == [str(broken[kind])]
    assert BROKEN[kind] in report["faults"][0]["reason"]
    assert hashes(trained.run) == before


def test_evaluation_of_nothing_readable_is_an_error_even_if_missing_is_allowed(trained, collection, broken, tmp_path):
    manifest = collection.manifest(tmp_path / "rows.csv", [str(broken["empty"]), str(broken["text"])])
    outcome = twinreel("eval", trained.run, "--input", manifest, "eval.allow_missing=true")
    outcome.fails("2 of 2 videos could not be read")


def test_embed_writes_what_it_can_and_names_the_rest(trained, collection, broken, tmp_path):
    names = [item for pair in zip(collection.names, map(str, broken.values()), strict=False) for item in pair]
    manifest = collection.manifest(tmp_path / "rows.csv", names)
    outcome = twinreel("embed", trained.run, "--input", manifest, "--out", tmp_path / "index")
    assert outcome.code == 2 and "Traceback" not in outcome.err
    assert outcome.out.startswith("12 videos listed: 6 written, 0 already there, 6 failed; ")
    reasons = {fault["video"]: fault["reason"] for fault in faults_of(tmp_path / "index")}
    assert reasons.keys() == set(map(str, broken.values()))
    for kind, words in BROKEN.items():
        assert words in reasons[str(broken[kind])]
    assert outcome.err.count("not embedded") == 5 and "all 6 are in" in outcome.err
    found = json.loads(twinreel("search", tmp_path / "index", "red", "--top", 99, "--json").out)
    assert {item["video"] for item in found} == {str(collection.folder / name) for name in collection.names[:6]}


@pytest.mark.parametrize("kind", BROKEN)
def test_predict_names_a_broken_video(trained, broken, kind):
    twinreel("predict", trained.run, broken[kind], "--sentence", "red").fails(str(broken[kind]), BROKEN[kind])


def test_check_names_a_broken_video(collection, broken, tmp_path):
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:3], str(broken["text"])])
    outcome = twinreel("check", *own(manifest), "--out", tmp_path / "sheet.png")
    assert outcome.code == 0 and "unreadable           1 of the first 4 samples" in outcome.out
    assert f"warning: {broken['text']}: can't be read as a video: {BROKEN['text']}" in outcome.out


def test_a_window_outside_its_video_is_an_excluded_sample(collection, tmp_path):
    columns = {"caption": ["a b"] * 40, "start": [0] * 39 + [9], "end": [1] * 39 + [10]}
    manifest = collection.manifest(tmp_path / "rows.csv", **columns)
    recipe = own(manifest, "train.num_steps=2", "train.global_batch_size=20")
    assert twinreel("train", *recipe, "--out", tmp_path / "run").code == 0
    (fault,) = faults_of(tmp_path / "run")
    assert (
        fault["reason"]
        == f"{collection.folder / '39.mp4'}: the window [9, 10) s lies outside the video, which has 1.000 s"
    )


# ---- manifests and captions


@pytest.mark.parametrize(
    ("columns", "more", "words"),
    [
        ({"caption": ["a"] * 8, "start": [1.0] * 8, "end": [1.0] * 8}, (), ("rows.csv:2: [1, 1) is a window of no",)),
        ({"caption": ["a"] * 8, "start": [2] * 8, "end": [1] * 8}, (), ("rows.csv:9:", "ends before it starts")),
        ({"caption": ["a"] * 8, "start": ["soon"] * 8}, (), ("'soon' must be a number of seconds",)),
        ({"caption": ["a"] * 8}, ("data.caption_template=a {label}",), ("no column 'label'", "caption_template")),
        ({"label": ["run"] * 7 + [""]}, ("data.caption_template=a {label}",), ("rows.csv:9", "neither caption nor")),
        ({"label": ["3"] * 8}, ("data.caption_template=a {label}",), ("label 3 is a number",)),
        ({"label": ["run"] * 8}, ("data.caption_template=a {lable}",), ("caption_template", "{label}")),
        ({"caption_file": ["gone.csv"] * 8}, (), ("listed caption files do not exist", "gone.csv", "data.root")),
        ({"caption": ["!?, ..."] * 8}, (), ("no word",)),
        ({"split": ["train"] * 8}, ("data.split=train",), ("no word",)),
        ({"caption": ["a"] * 8, "split": ["train"] * 8}, (), ("the rows have splits (train)", "data.split=NAME")),
        ({"caption": ["a"] * 8, "split": ["train"] * 8}, ("data.split=trian",), ("no row has split 'trian'", "train")),
        ({"caption": ["a"] * 8}, ("data.split=train",), ("no column 'split'",)),
        ({"caption": ["a"] * 8, "text": ["b"] * 8}, (), ("'caption' and 'text' both mean 'caption'",)),
        ({"caption": ["a"] * 8, "id": ["one"] * 8}, (), ("ids are used twice", "rows.csv:3: id 'one'")),
        ({"caption": ["a"] * 8}, ("train.global_batch_size=16",), ("more than the 8 rows", "to 8 or less")),
        ({"caption": ["a"] * 8}, ("model.min_word_count=9",), ("no word", "8 times")),
        ({"caption": ["a"] * 8}, ("eval.split=val",), ("no column 'split'",)),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_stops_before_anything_is_written(collection, tmp_path, columns, more, words):
    manifest = collection.manifest(tmp_path / "rows.csv", collection.names[:8], **columns)
    for verb, out in (("train", tmp_path / "run"), ("check", tmp_path / "sheet.png")):
        outcome = twinreel(verb, *own(manifest, *more), "--out", out)
        outcome.fails(*words)
        assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, ("manifest", "none.csv' does not exist")),
        ("rows.csv", b"", ("rows.csv' is empty",)),
        ("rows.csv", b"video,caption\n", ("a header and no rows",)),
        ("rows.csv", b"file,caption\na.mp4,b\n", ("no column 'video'", "columns found: file, caption")),
        ("rows.csv", b"video,caption\na.mp4,b,c\n", ("rows.csv:2: 3 values for 2 columns",)),
        ("rows.csv", b"video,caption\na.mp4,\xff\n", ("rows.csv:2: byte 0xff is not UTF-8",)),
        ("rows.csv", b'video,caption\na.mp4,"b\n', ("rows.csv:2:", "double quotes")),
        ("rows.jsonl", b'{"video": "a.mp4", "caption": 5}\n', ("rows.jsonl:1: caption must be text, got 5",)),
        ("rows.jsonl", b"{video}\n", ("rows.jsonl:1: not a JSON object",)),
        ("rows.xlsx", b"PK", ("ends in '.xlsx'", ".csv")),
    ],
)
def test_a_file_that_is_no_manifest(trained, tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    before = hashes(trained.run)
    twinreel("train", *own(path), "--out", tmp_path / "run").fails(*words)
    twinreel("eval", trained.run, "--input", path).fails(*words)
    twinreel("embed", trained.run, "--input", path, "--out", tmp_path / "index").fails(*words)
    assert hashes(trained.run) == before
    assert {item.name for item in tmp_path.iterdir()} <= {name}


def test_a_few_caption_files_that_cannot_be_read_are_faults_and_said_before_the_first_step(collection, tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.csv").write_text(f"start,end,text\n0,1,video number {i}\n")
    (tmp_path / "3.csv").unlink()
    (tmp_path / "7.csv").write_text("start,end,text\nsoon,1,what\n")
    files = [tmp_path / f"{i}.csv" for i in range(40)]
    manifest = collection.manifest(tmp_path / "rows.csv", caption_file=files)
    outcome = twinreel(
        "train", *own(manifest, "train.num_steps=2", "train.global_batch_size=20"), "--out", tmp_path / "run"
    )
    assert outcome.code == 0, outcome
    before = outcome.err.split("step 1/2")[0]
    for words in ("3.csv' does not exist", "7.csv:2:", "'soon' must be a number of seconds"):
        assert words in before, words
    reasons = sorted(fault["reason"] for fault in faults_of(tmp_path / "run"))
    assert len(reasons) == 2 and "3.csv' does not exist" in reasons[0] and "7.csv" in reasons[1], reasons


# ---- recipes


UNKNOWN = {  # a key with a slip, and the one that was meant
    "model.nmae": "model.name", "model.embeding_size": "model.embedding_size",
    "model.preprocessing.crop_sise": "model.preprocessing.crop_size", "task.num_candidate": "task.num_candidates",
    "task.temprature": "task.temperature", "data.num_wrokers": "data.num_workers", "data.num_vidoes": "data.num_videos",
    "optim.leraning_rate": "optim.learning_rate", "train.sede": "train.seed", "eval.num_clip": "eval.num_clips",
    "trian.seed": "train",
}  # fmt: skip


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_key_of_every_section_names_the_nearest(trained, key):
    before = hashes(trained.run)
    unknown = key if not key.startswith("trian") else "trian"
    words = (f"command line: unknown key {unknown}", f"did you mean {UNKNOWN[key]}?")
    twinreel("show", "demo", f"{key}=1").fails(*words)
    twinreel("train", *trained.recipe, f"{key}=1", "--out", trained.run, "--resume").fails(*words)
    twinreel("eval", trained.run, f"{key}=1").fails(*words)
    assert hashes(trained.run) == before


@pytest.mark.parametrize("section", ["model", "model.preprocessing", "task", "data", "optim", "train", "eval"])
def test_a_key_like_no_other_is_unknown_too(section):
    twinreel("show", "demo", f"{section}.xyzzy=1").fails(f"command line: unknown key {section}.xyzzy", f"{section}.")


WRONG = [
    ("model.embedding_size=big", "got \"big\"; input should be a valid integer"),
    ("model.freeze=text_tower", "model.freeze"),
    ("model.text_tower=word_min", "word_max"),
    ("model.preprocessing.num_frames=0", "model.preprocessing.num_frames: got 0; input should be greater than"),
    ("model.preprocessing.num_frames=1.5", "model.preprocessing.num_frames: got 1.5"),
    ("model.preprocessing.short_side=8", "short_side (8) must be at least crop_size (56)"),
    ("task.num_candidates=0", "task.num_candidates: got 0"),
    ("task.temperature=warm", 'task.temperature: got "warm"; input should be a valid number'),
    ("task.normalize=yes", 'task.normalize: got "yes"; input should be a valid boolean'),
    ("task.name=contrast", "unknown task 'contrast'; did you mean contrastive?"),
    ("task.loss=milcne", "task.loss: unknown name 'milcne'; did you mean milnce?"),
    ("data.flip=1.5", "data.flip: got 1.5; input should be less than or equal to 1"),
    ("data.source=generate", "data.source: unknown name 'generate'; did you mean generated?"),
    ("data.crop=middle", "data.crop: got \"middle\"; input should be 'random', 'square',"),
    ("data.num_workers=-1", "data.num_workers: got -1"),
    ("data.num_videos=many", 'data.num_videos: got "many"'),
    ("optim.learning_rate=0", "optim.learning_rate: got 0; input should be greater than 0"),
    ("optim.learning_rate=.nan", "optim.learning_rate"),
    ("optim.betas=0.9", "optim.betas: got 0.9"),
    ("optim.name=adagrad", "'adam', 'adamw' or 'sgd'"),
    ("optim.warmup_epochs=1", "give optim.warmup_steps or optim.warmup_epochs, not both"),
    ("train.num_epochs=3", "give exactly one of train.num_epochs and train.num_steps"),
    ("train.micro_batch_size=5", "is not a whole number of train.micro_batch_size=5; choose a divisor"),
    ("train.global_batch_size=2e1", "train.global_batch_size: got 20.0; input should be a valid integer"),
    ("train.save_every=often", "train.save_every: got \"often\""),
    ("train.precision=fp8", "'fp32', 'bf16' or 'fp16'"),
    ("eval.every=0 steps", "eval.every: got \"0 steps\""),
    ("eval.num_clips=null", "eval.num_clips: got null"),
    ("eval.allow_missing=1", "eval.allow_missing: got 1; input should be a valid boolean"),
    ("train=5", "train: got 5; input should be an object"),
    ("train.seed.x=5", "cannot set train.seed.x"),
    ("train.seed", "'train.seed' is not key=value"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "words"), WRONG, ids=[override for override, _ in WRONG])
def test_a_value_of_the_wrong_type_says_what_was_got_and_what_is_allowed(override, words):
    twinreel("show", "demo", override).fails(words)


def test_all_problems_of_a_recipe_come_at_once_with_their_lines(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# mine\nmodel:\n  name: conv3d_smal\ntask: {los: milnce}\ndata:\n  source: generated\n  root: here\n"
        "optim:\n  leraning_rate: 0.1\n  eps: tiny\ntrain: {num_steps: 1}\n"
    )
    outcome = twinreel("train", path, "train.seed=x", "--out", tmp_path / "run")
    outcome.fails("mine.yaml:3: model.name: unknown name 'conv3d_smal'; did you mean conv3d_small?",
                  "mine.yaml:4: unknown key task.los", "mine.yaml:9: unknown key optim.leraning_rate",
                  'mine.yaml:10: optim.eps: got "tiny"', 'command line: train.seed: got "x"')  # fmt: skip
    assert len(outcome.err.splitlines()) == 5
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: [", "mine.yaml:1: not valid YAML"),
        (b"model:\n\tname: s3dg", "mine.yaml:2: not valid YAML"),
        (b"- model\n- task\n", "mine.yaml:1: a recipe is a mapping of sections"),
        (b"just words", "mine.yaml:1: a recipe is a mapping of sections"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        (b"", "model is missing and has no default"),
        (b"model: {name: s3dg}\nmodel: {name: s3dg}\n", "mine.yaml:2: key model stands twice (first at mine.yaml:1)"),
        (b"model: 5\ntask:\ndata: x\n", "mine.yaml:1: model: got 5; input should be an object"),
        pytest.param(b"model: \x00", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_none(tmp_path, content, words):
    (tmp_path / "mine.yaml").write_bytes(content)
    twinreel("show", tmp_path / "mine.yaml").fails(words)


def test_a_recipe_that_does_not_exist():
    twinreel("show", "demoo").fails("unknown recipe 'demoo'; did you mean demo?", ".yaml")
    twinreel("show", "none.yaml").fails("none.yaml: no such recipe file; shipped recipes: ")


# ---- runs, checkpoints, weights, the user's own functions


@pytest.mark.parametrize("verb", ["eval", "embed", "predict", "search", "resume"])
@pytest.mark.parametrize("what", ["missing", "file", "other folder", "no checkpoint"])
def test_a_run_folder_that_is_none(trained, tmp_path, verb, what):
    run = tmp_path / "run"
    if what == "file":
        run.write_text("mine")
    elif what != "missing":
        run.mkdir()
        (run / "notes.txt").write_text("mine")
    if what == "no checkpoint":
        shutil.copy(trained.run / "recipe.yaml", run)
    before = hashes(tmp_path)
    arguments = {
        "eval": ("eval", run),
        "embed": ("embed", run, "--input", trained.root / "test" / "videos", "--out", tmp_path / "index"),
        "predict": ("predict", run, trained.root / "test" / "videos" / "test_0000.mp4", "--sentence", "red"),
        "search": ("search", run, "red"),
        "resume": ("train", *trained.recipe, "--out", run, "--resume", "step_2"),
    }[verb]
    words = {"search": "not an index", "resume": "nothing to resume here"}.get(verb, "not a run folder")
    if what == "no checkpoint" and verb != "search":
        words = "no checkpoint here"
    twinreel(*arguments).fails(str(run), words)
    assert hashes(tmp_path) == before


def test_an_unknown_checkpoint_lists_those_there_are(trained, tmp_path):
    before = hashes(trained.run)
    words = ("no checkpoint 'step_99'", "there are: last, best, step_0000002, step_0000004, step_0000006")
    videos = trained.root / "test" / "videos"
    for arguments in (
        ("eval", trained.run),
        ("embed", trained.run, "--input", videos, "--out", tmp_path / "index"),
        ("predict", trained.run, videos / "test_0000.mp4", "--sentence", "red"),
    ):
        twinreel(*arguments, "--checkpoint", "step_99").fails(*words)
    assert hashes(trained.run) == before and not list(tmp_path.iterdir())


def test_a_broken_checkpoint_that_was_asked_for_is_refused(trained, copy_of):
    run = copy_of(trained.run)
    weights = run / "checkpoints" / "step_0000004" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    for arguments in (
        ("eval", run, "--checkpoint", "step_4"),
        ("train", *trained.recipe, "--out", run, "--resume", "step_4"),
    ):
        before = hashes(run)
        twinreel(*arguments).fails("step_0000004: broken: weights.safetensors differs from its checksum")
        assert hashes(run) == before


def test_a_broken_newest_checkpoint_is_said_when_another_one_is_judged(trained, copy_of):
    run = copy_of(trained.run)
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "step_0000006" / "weights.safetensors").write_bytes(b"half")
    outcome = twinreel("eval", run)
    assert outcome.code == 0 and "checkpoint: copy/step_0000004" in outcome.out
    assert "step_0000006 is broken" in outcome.err


def test_a_changed_recipe_cannot_be_resumed(trained):
    before = hashes(trained.run)
    twinreel("train", *trained.recipe, "train.seed=5", "optim.learning_rate=1", "--out", trained.run, "--resume").fails(
        "optim.learning_rate: 0.002 in the run, 1.0 now", "train.seed: 0 in the run, 5 now", "recipe.yaml --out"
    )
    assert hashes(trained.run) == before


@pytest.fixture
def weights(tmp_path):
    torch.save({"layer.weight": torch.zeros(2, 2)}, tmp_path / "other.pth")
    torch.save({"state_dict": {"a": torch.zeros(2)}, "args": argparse.Namespace(batch=4)}, tmp_path / "namespace.pth")
    torch.save({"epoch": 3}, tmp_path / "no_tensors.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "pointer.pth").write_text("version https://git-lfs.github.com/spec/v1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.pth", ("gone.pth: no such file of weights",)),
        ("other.pth", ("other.pth: does not fit TwoTowers, nothing was loaded", "layer.weight")),
        ("namespace.pth", ("argparse.Namespace", "Convert it once", "weights_only=True", "namespace_weights.pth")),
        ("no_tensors.pth", ("expected tensors by name", "epoch")),
        ("empty.pth", ("empty.pth: an empty file",)),
        pytest.param("junk.pth", ("not a readable file of weights",)),
        ("junk.safetensors", ("not a readable file of weights",)),
        ("pointer.pth", ("git-lfs pointer",)),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_loaded(trained, weights, name, words):
    before = hashes(trained.run)
    path = weights / name
    for override in (f"model.weights={path}", f"model.weights={{video_tower: {path}}}"):
        out = weights / "run"
        twinreel("train", *trained.recipe, override, "--out", out).fails(str(path), *words)
        assert not out.exists()
    twinreel("check", *trained.recipe, f"model.weights={path}", "--out", weights / "s.png").fails(str(path), *words)
    assert hashes(trained.run) == before and not (weights / "s.png").exists()


def test_the_way_to_convert_a_pickled_checkpoint_works(weights, tmp_path):
    """B058: the text that refuses the file holds a command; it does what it says."""
    outcome = twinreel("check", "demo", *SMALL, f"data.root={tmp_path}", f"model.weights={weights / 'namespace.pth'}")
    code = outcome.err.split('python -c "')[1].split('"')[0]
    try:
        exec(code, {})
    finally:
        torch.serialization.clear_safe_globals()  # other tests rely on the refusal
    assert torch.load(weights / "namespace_weights.pth", weights_only=True).keys() == {"a"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model={name: 'no_such_module:towers'}", ("model.name", "no module named no_such_module", "current folder")),
        ("model={name: 'our_towers:tower'}", ("our_towers has no function tower; did you mean towers?",)),
        ("model={name: 'our_towers:'}", ("package.module:function",)),
        ("model={name: 'broken_module:towers'}", ("importing broken_module failed: SyntaxError",)),
        ("model={name: 'needs_module:towers'}", ("importing needs_module failed", "no_such_dependency")),
        ("model={name: 'our_towers:towers', sizes: 4}", ("unknown key model.sizes", "did you mean model.size?")),
        ("model={name: 'our_towers:torch.nn'}", ("our_towers has no function torch.nn",)),
        ("model={name: 'not_towers:towers'}", ("no pair of towers", "encode_video", "encode_text", "preprocessing")),
        ("task={loss: 'no_such_module:loss'}", ("task.loss", "no module named no_such_module")),
        ("data={source: 'no_such_module:rows'}", ("data.source", "no module named no_such_module")),
    ],
)
def test_a_function_of_the_users_that_is_not_there(trained, own_towers, tmp_path, override, words):
    (tmp_path / "broken_module.py").write_text("def towers(:\n")
    (tmp_path / "needs_module.py").write_text("import no_such_dependency\n")
    (tmp_path / "not_towers.py").write_text("import torch\n\n\ndef towers():\n    return torch.nn.Linear(1, 1)\n")
    outcome = twinreel("train", *(item for item in trained.recipe if "model." not in item), override, "--out", "run")
    outcome.fails(*words)
    assert not (tmp_path / "run").exists()


def test_other_things_in_the_way(trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "words.npy").write_bytes(b"junk")
    os.mkdir(tmp_path / "sentences")
    twinreel("train", *trained.recipe, "--out", tmp_path / "file").fails("no run folder can be made there")
    twinreel("train", *trained.recipe, "--out", tmp_path / "file" / "run").fails("no run folder can be made there")
    twinreel("check", *trained.recipe, "--out", tmp_path / "file" / "sheet.png").fails("cannot be written")
    twinreel("train", *trained.recipe, f"model.vocabulary={tmp_path / 'gone.txt'}", "--out", tmp_path / "run").fails(
        "gone.txt: no such vocabulary file"
    )
    twinreel("train", *trained.recipe, f"model.vocabulary={tmp_path / 'words.npy'}", "--out", tmp_path / "run").fails(
        "words.npy: not a readable .npy file"
    )
    twinreel("train", *trained.recipe, "optim.learning_rates={tower: 1.0}", "--out", tmp_path / "run").fails(
        "the model has no part 'tower'; did you mean text_tower?"
    )
    video = trained.root / "test" / "videos" / "test_0000.mp4"
    twinreel("predict", trained.run, video).fails("no sentence to choose from")
    twinreel("predict", trained.run, video, "--sentences", tmp_path / "gone.txt").fails("gone.txt", "cannot read")
    twinreel("predict", trained.run, video, "--sentences", tmp_path / "sentences").fails("sentences", "cannot read")
    twinreel("embed", trained.run, "--input", tmp_path / "sentences", "--out", tmp_path / "index").fails("no video in")
    twinreel("eval", trained.run, "--source", "generatd", "--split", "test").fails("did you mean generated?")
    twinreel("eval", trained.run, "--split", "tset").fails("no split 'tset'")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "sentences", "words.npy"]


# ---- nothing lost


def test_what_was_trained_is_saved_though_the_evaluation_at_the_end_fails(collection, broken, tmp_path):
    names = [*collection.names[:9], str(broken["empty"])]
    manifest = collection.manifest(
        tmp_path / "rows.csv", names, caption=["a b"] * 10, split=["train"] * 8 + ["val"] * 2
    )
    recipe = own(manifest, "data.split=train", "eval.split=val", "train.save_every=100 steps")
    twinreel("train", *recipe, "--out", tmp_path / "run").fails("1 of 2 videos could not be read")
    assert (tmp_path / "run" / "checkpoints" / "step_0000006" / "contents.json").is_file()


def test_a_missing_video_of_the_evaluation_is_found_before_the_first_step(collection, tmp_path):
    names = [*collection.names[:9], "gone.mp4"]
    manifest = collection.manifest(
        tmp_path / "rows.csv", names, caption=["a b"] * 10, split=["train"] * 8 + ["val"] * 2
    )
    outcome = twinreel("train", *own(manifest, "data.split=train", "eval.split=val"), "--out", tmp_path / "run")
    assert outcome.code == 2 and "gone.mp4" in outcome.err
    assert "step 1/6" not in outcome.err


def test_a_metric_that_is_not_reported_is_found_before_the_first_step(trained, tmp_path):
    outcome = twinreel(
        "train", *trained.recipe, "eval.best_metric=text_to_video/recall_at_2", "--out", tmp_path / "run"
    )
    assert outcome.code == 2 and "'text_to_video/recall_at_1'" in outcome.err
    assert "step 1/6" not in outcome.err


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_its_metrics_anew(trained, copy_of):
    run = copy_of(trained.run)
    shutil.rmtree(run / "checkpoints")
    assert twinreel("train", *trained.recipe, "--out", run, "--resume").code == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_does_not_mix_with_what_another_left_behind(trained, copy_of):
    run = copy_of(trained.run)
    shutil.rmtree(run / "checkpoints")
    before = hashes(run)
    twinreel("train", *trained.recipe, "train.seed=9", "--out", run).fails(str(run))
    assert hashes(run) == before


def fault_counts(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["faults"] for line in lines if line["kind"] == "train"]


def test_faults_of_a_resumed_run_are_those_of_an_undisturbed_one(collection, broken, tmp_path):
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:39], str(broken["empty"])])
    recipe = own(manifest, "train.num_steps=6", "train.global_batch_size=20")
    run = tmp_path / "run"
    assert twinreel("train", *recipe, "--out", run).code == 0
    before = [(run / name).read_text() for name in ("faults.jsonl",)]
    counts = fault_counts(run)
    assert len(counts) == 6 and counts[-1] > 0
    assert twinreel("train", *recipe, "--out", run, "--resume", "step_4").code == 0
    assert fault_counts(run) == counts
    assert [(run / name).read_text() for name in ("faults.jsonl",)] == before


def test_a_run_with_faults_says_so(collection, broken, tmp_path):
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:39], str(broken["empty"])])
    recipe = own(manifest, "train.num_steps=2", "train.global_batch_size=20")
    outcome = twinreel("train", *recipe, "--out", tmp_path / "run")
    assert outcome.code == 0 and "faults.jsonl" in outcome.err
    assert "faults.jsonl" in (tmp_path / "run" / "log.txt").read_text()


def test_an_index_that_was_killed_while_a_list_was_written_goes_on(trained, tmp_path):
    arguments = ("embed", trained.run, "--input", trained.root / "test" / "videos", "--out", tmp_path / "index")
    first = twinreel(*arguments)
    (tmp_path / "index" / "parts" / ".part_000001.json").write_text('[{"row": "te')
    again = twinreel(*arguments)
    assert (again.code, again.out) == (0, first.out.replace("6 written, 0 already", "0 written, 6 already")), again
    assert twinreel("search", tmp_path / "index", "red").code == 0


def test_an_index_cannot_be_a_file(trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    twinreel("embed", trained.run, "--input", trained.root / "test" / "videos", "--out", tmp_path / "file").fails(
        str(tmp_path / "file")
    )


def test_the_advice_about_splits_works(trained):
    manifest = trained.root / "test" / "manifest.csv"
    twinreel("eval", trained.run, "--input", manifest).fails("eval.split=NAME")
    assert twinreel("eval", trained.run, "--input", manifest, "eval.split=test").code == 0


@pytest.mark.parametrize("override", ["model.embedding_size=99", "model.preprocessing.num_frames=8"])
def test_an_override_that_cannot_have_an_effect_is_refused(trained, override):
    twinreel("eval", trained.run, override).fails(override.split("=")[0])


def test_the_demo_does_not_delete_what_it_did_not_make(tmp_path, monkeypatch):
    mine = tmp_path / "films" / "videos" / "holiday.mp4"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    monkeypatch.setattr("twinreel.demo.load_recipe", lambda *_: pytest.fail("went on"))
    twinreel("demo", "--out", tmp_path / "films").fails(str(tmp_path / "films"))
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("columns", [{"caption": ["!?"] * 8}, {"label": ["run"] * 8}])
def test_a_collection_without_words_is_told_what_to_do(collection, tmp_path, columns):
    manifest = collection.manifest(tmp_path / "rows.csv", collection.names[:8], **columns)
    outcome = twinreel("train", *own(manifest), "--out", tmp_path / "run")
    outcome.fails("caption")
    assert "lower min_count" not in outcome.err
