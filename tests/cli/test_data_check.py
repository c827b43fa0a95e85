"""`twinreel data check` and training from foreign lists, through the real entry point."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.command_line import SMALL, start, twinreel
from cli.conftest import Collection
from twinreel.data.manifest import read_manifest

OWN = (
    *(item for item in SMALL if not item.startswith(("data.num_videos", "data.num_test", "model.prep"))),
    *("model.name=conv3d_small", "train.num_epochs=null", "optim.warmup_epochs=null", "optim.warmup_steps=0"),
    *("data.clip_start=center", "eval.split=null", "train.num_steps=2", "train.global_batch_size=4"),
    "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 16}",
)


def train(manifest: Path, out: Path, *more: str) -> object:
    return twinreel("train", "s3dg_small_own_videos", f"data.manifest={manifest}", *OWN, *more, "--out", out)


@pytest.fixture
def good(collection: Collection, tmp_path: Path) -> Path:
    """A list as PySlowFast has it, of eight videos and four classes, one with spaces and a comma in its name."""
    for i in range(7):
        shutil.copy(collection.folder / f"{i}.mp4", tmp_path / f"{i}.mp4")
    shutil.copy(collection.folder / "7.mp4", tmp_path / "a clip, \u8996\u983b \xe9.mp4")
    lines = [*(f"{i}.mp4 {i % 4}" for i in range(7)), '"a clip, \u8996\u983b \xe9.mp4" 3']
    path = tmp_path / "train.csv"
    path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    return path


def test_a_good_list(good: Path) -> None:
    outcome = twinreel("data", "check", good, "--num-classes", "4", "--workers", "2")
    assert outcome.code == 0, outcome
    assert "opening 8/8 videos" in outcome.err
    for words in (
        "videos         8\n",
        "classes        4\n",
        "lowest label   0\n",
        "highest label  3\n",
        "codecs         h264 x 8\n",
    ):
        assert words in outcome.out
    assert outcome.out.endswith("0 of 8 rows (0.0%) are excluded, with 0 bad videos; the limit is 5.0%\n")


def test_training_from_a_list_with_names_of_its_classes(good: Path, tmp_path: Path) -> None:  # B031
    names = tmp_path / "classes.txt"
    names.write_text("run\nsit_down\njump\nwalk\n")
    outcome = train(good, tmp_path / "run", "data.caption_template=a person does {label}", f"data.class_names={names}")
    assert outcome.code == 0, outcome
    refused = train(good, tmp_path / "other", "data.caption_template=a person does {label}")
    refused.fails("label 0 is a number; caption_template needs names: give class_names", "train.csv:1")


def test_a_bad_collection(good: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").write_bytes(b"")
    with good.open("a", encoding="utf-8") as file:
        file.write("empty.mp4 4\nnone.mp4 1\n")
    for name in ("clean.csv", "again.csv", "clean.jsonl"):
        outcome = twinreel("data", "check", good, "--num-classes", "4", "--write-clean", tmp_path / name)
        assert outcome.code == 2
    assert "bad video: " + str(tmp_path / "empty.mp4") + ": can't be read as a video: an empty file" in outcome.out
    assert "bad video: " + str(tmp_path / "none.mp4") + ": no such file" in outcome.out
    assert "wrong labels: 1 rows have labels outside 0 to 3 (found: 0 to 4, 4 classes)" in outcome.out
    assert "2 of 10 rows (20.0%) are excluded, with 2 bad videos; the limit is 5.0%" in outcome.out
    assert (tmp_path / "clean.csv").read_bytes() == (tmp_path / "again.csv").read_bytes()  # B040
    rows = read_manifest(tmp_path / "clean.csv")
    assert rows == read_manifest(tmp_path / "clean.jsonl") == read_manifest(good)[:8]
    assert twinreel("data", "check", tmp_path / "clean.csv", "--num-classes", "4").code == 0
    assert twinreel("data", "check", good, "--max-faults", "0.2").code == 0
    assert twinreel("data", "check", good, "--max-faults", "0.2", "--num-classes", "4").code == 2


def test_json(good: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\n")
    outcome = twinreel("data", "check", tmp_path, "--json", "--vocabulary", tmp_path / "words.txt")
    result = json.loads(outcome.out)
    assert outcome.code == 0 and result["passed"] and result["num_rows"] == 8
    assert result["facts"]["videos"] == 8 and result["facts"]["seconds"]["total"] == pytest.approx(8)
    assert result["faults"] == result["excluded"] == []


def test_nothing_is_left_to_write(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("none.mp4 1\n")
    outcome = twinreel("data", "check", tmp_path / "l.csv", "--write-clean", tmp_path / "clean.csv")
    assert outcome.code == 2 and "no rows to write" in outcome.err and "no such file" in outcome.out
    assert not (tmp_path / "clean.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.csv"], "manifest 'none.csv' does not exist"),
        (["l.csv", "--vocabulary", "none.txt"], "none.txt: no such vocabulary file"),
        (["l.csv", "--root", "none"], "root 'none' does not exist"),
        (["l.csv", "--split", "val"], "no column 'split', but split 'val' is asked for"),
        (["l.csv", "--class-names", "none.txt"], "file of class names 'none.txt' does not exist"),
        (["l.csv", "--timeout", "0"], "a check needs 1 process or more and some seconds a video"),
        (["bad.csv"], "bad.csv:2: no class number at its end, in 'b.mp4 x'; expected `path label`"),
        (["split.csv", "--write-clean", "clean.xml"], "clean.xml' ends in '.xml'; allowed are .csv"),
        (["split.csv", "--write-clean", "none/c.csv"], "none/c.csv: cannot be written: there is no folder 'none'"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text("a.mp4 1\n")
    Path("split.csv").write_text("a.mp4 1\n")
    Path("bad.csv").write_text("a.mp4 1\nb.mp4 x\n")
    twinreel("data", "check", *arguments).fails(words)


def test_kinetics_and_start_frames_train(collection: Collection, tmp_path: Path) -> None:
    lines = ["label,youtube_id,time_start,time_end,split,is_cc"]
    for i in range(8):
        (tmp_path / f"k/class {i % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(collection.folder / f"{i}.mp4", tmp_path / f"k/class {i % 2}/-id_{i}_00000{i}_00001{i}.mp4")
        lines.append(f"class {i % 2},-id_{i},{i},1{i},train,0")
    (tmp_path / "k/train.csv").write_text("\n".join(lines) + "\n")
    template = "data.caption_template=a person does {label}"
    outcome = train(tmp_path / "k/train.csv", tmp_path / "run_k", "data.split=train", template)
    assert outcome.code == 0, outcome
    assert twinreel("data", "check", tmp_path / "k/train.csv").code == 0

    for folder in ("s/videos", "s/annotations"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(collection.folder / "0.mp4", tmp_path / "s/videos/0.mp4")
    rows = "".join(f"0.mp4,{frame},class {frame}\n" for frame in (0, 2, 4, 6))
    (tmp_path / "s/annotations/train.csv").write_text("video_name,start_frame,label\n" + rows)
    outcome = train(tmp_path / "s/annotations/train.csv", tmp_path / "run_s", template)
    assert outcome.code == 0, outcome
    assert "start frames became seconds: 1 videos were opened for it" in outcome.err
    outcome = twinreel("data", "check", tmp_path / "s", "--write-clean", tmp_path / "clean.csv")
    assert outcome.code == 0 and "splits         train 4" in outcome.out
    assert [row.start_seconds for row in read_manifest(tmp_path / "clean.csv")] == [0.0, 0.25, 0.5, 0.75]


def test_a_killed_check_is_run_again(collection: Collection, tmp_path: Path) -> None:
    """Its processes end with it, and nothing is left behind."""
    manifest = collection.manifest(tmp_path / "rows.csv")
    process = start("data", "check", manifest, "--deep", "--workers", "2", "--write-clean", tmp_path / "clean.csv")
    assert process.stderr is not None and "opening" in process.stderr.readline()
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while _group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group(process.pid)
    assert sorted(os.listdir(tmp_path)) == ["rows.csv"]
    assert twinreel("data", "check", manifest).code == 0


def _group(number: int) -> list[str]:
    """The live processes of a process group."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-g", str(number)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if "Z" not in line]


def test_ctrl_c_ends_a_check(collection: Collection, tmp_path: Path) -> None:
    manifest = collection.manifest(tmp_path / "rows.csv")
    process = start("data", "check", manifest, "--deep", "--workers", "2")
    assert process.stderr is not None and "opening" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130), err  # 0: it was done before the signal came
    assert "Traceback" not in err
