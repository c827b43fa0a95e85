"""The keys that say which frames and which part of them are seen, through the real entry point."""

from __future__ import annotations

import json
import re

import pytest

from cli.command_line import SMALL, twinreel

STRIDED = "model.preprocessing={num_frames: 4, frame_stride: 2, crop_size: 32, short_side: 40}"


def small(root, *overrides):
    """The shrunken demo with two steps."""
    kept = [value for value in SMALL if not value.startswith(("model.preprocessing", "train.num_steps", "optim.warm"))]
    return ("demo", *kept, f"data.root={root}", "train.num_steps=2", "optim.warmup_steps=1", *overrides)


def losses(run):
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_model_that_counts_in_frames_of_the_file_trains_is_judged_and_checked(trained, tmp_path):
    recipe = small(trained.root, STRIDED, "eval.num_crops=3", "eval.num_clips=2")
    shown = twinreel("show", *recipe)
    assert shown.code == 0 and "frame_stride: 2" in shown.out and "frame_rate" not in shown.out
    assert "num_crops: 3" in shown.out
    done = twinreel("train", *recipe, "--out", tmp_path / "run")
    assert done.code == 0, done
    assert "a clip is 4 frames, 1 of every 2 of the file's, 32 x 32 pixels" in done.err
    assert len(losses(tmp_path / "run")) == 2
    assert "windows: 2 a video, uniform" in done.out and "frames: 4 frames, 1 of every 2 of the file's" in done.out
    assert "crop: start, center and end 32 of short side 40" in done.out
    judged = twinreel("eval", tmp_path / "run", "--split", "test")
    assert judged.code == 0 and "evaluated: 6/6 videos" in judged.out
    checked = twinreel("check", *recipe, "--out", tmp_path / "sheet.png")
    assert checked.code == 0, checked
    assert "4 frames, 1 of every 2 of the file's" in checked.out and (tmp_path / "sheet.png").is_file()


def test_two_views_of_each_row_train_and_the_number_of_readers_changes_nothing(trained, tmp_path):
    recipe = small(
        trained.root,
        STRIDED,
        "data.repeated_augmentation=2",
        "data.crop=resized",
        "data.flip=0.5",
        "eval.split=null",
        "train.global_batch_size=10",
    )
    for workers, run in ((0, "alone"), (2, "readers")):
        done = twinreel("train", *recipe, f"data.num_workers={workers}", "--out", tmp_path / run)
        assert done.code == 0, done
        assert "10 clips (2 views of each row)" in done.err
        assert "1 steps an epoch (3 rows wait for a later epoch" in done.err
    assert losses(tmp_path / "alone") == losses(tmp_path / "readers")
    replayed = twinreel("replay", tmp_path / "alone", "--step", "1")
    assert replayed.code == 0 and f"loss {losses(tmp_path / 'alone')[0]:.6g}" in replayed.out, replayed
    rows = dict(re.findall(r"^ +(\d+) .*?(train_\d+):", replayed.out, re.MULTILINE))
    assert rows["0"] == rows["1"] != rows["2"] == rows["3"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.repeated_augmentation=3"], "train.global_batch_size=4 is not a whole number of"),
        (
            ["data.repeated_augmentation=4", "train.micro_batch_size=2"],
            "train.micro_batch_size=2 is not a whole number",
        ),
        (["data.crop=pad"], "data.crop=pad with model.preprocessing.fit=crop"),
        (["model.preprocessing.frame_stride=2"], "give exactly one of frame_rate and frame_stride"),
        (["data.short_side=[320, 256]"], "data.short_side: [320, 256]; give the least first"),
        (["data.short_side=40", "data.crop=square"], "data.short_side goes with data.crop=random"),
        (["data.crop=resized", "data.crop_area=[0, 1]"], "data.crop_area"),
        (["data.short_side_draw=inverse"], "data.short_side=[256, 320]"),
        (["data.flip_labels={left: right, right: up}"], "'right' would become 'left' and 'up'"),
        (["eval.num_crops=2"], "eval.num_crops: got 2"),
        (["eval.windows=clip"], 'eval.windows: got "clip"'),
        (["data.clip_start=middle"], 'data.clip_start: got "middle"'),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(trained, tmp_path, overrides, words):
    base = small(trained.root, "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}")
    twinreel("train", *base, *overrides, "--out", tmp_path / "run").fails(words)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_founding_windows_that_count_in_seconds_are_refused_for_a_model_that_does_not(trained, tmp_path):
    recipe = small(trained.root, STRIDED, "eval.windows=milnce")
    twinreel("train", *recipe, "--out", tmp_path / "run").fails(
        "eval.windows=milnce counts in seconds", "frame_stride=2", "eval.windows=uniform"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_views_are_not_wrong_ones_of_each_other(trained, tmp_path, monkeypatch):
    """A loss that cannot be told which captions are equal would push the views of a row apart."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blind_loss.py").write_text(
        "def blind(video_embeddings, text_embeddings, *, mask=None, valid=None):\n"
        "    return (video_embeddings.sum() - text_embeddings.sum()) ** 2\n"
    )
    recipe = small(trained.root, "task={loss: 'blind_loss:blind'}", "eval.split=null")
    twinreel("train", *recipe, "data.repeated_augmentation=2", "--out", tmp_path / "run").fails(
        "data.repeated_augmentation=2", "task.loss=blind_loss:blind", "`text_ids`"
    )
    assert twinreel("train", *recipe, "--out", tmp_path / "run").code == 0
