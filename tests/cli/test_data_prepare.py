"""`twinreel data prepare` through the real entry point: what it prints, exit codes, kills."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from cli.command_line import SMALL, start, twinreel
from twinreel.data.storage import open_video
from videos import make_video

QUICK = ("--short-side", "32", "--gop", "4", "--workers", "0", "--measure", "0")


@pytest.fixture
def videos(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(3):
        make_video(tmp_path / "in" / f"{i}.mp4", num_frames=16, frame_rate=8, first_number=20 * i)
    return tmp_path / "in"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_prepared_and_said_so(videos, tmp_path):
    out = tmp_path / "out"
    outcome = twinreel("data", "prepare", videos, "--out", out, *QUICK[:-2], "--measure", "2")
    assert outcome.code == 0, outcome
    assert "3 videos listed: 3 written, 0 already there, 0 failed" in outcome.out
    assert "6.0 s of video, 48 frames" in outcome.out
    assert "clips/s before" in outcome.out and f"data.manifest={out / 'manifest.jsonl'}" in outcome.out
    assert "preparing 3/3 videos" in outcome.err
    again = twinreel("data", "prepare", videos, "--out", out, *QUICK, "--json")
    result = json.loads(again.out)
    assert (result["already_there"], result["written"], result["gain"], result["faults"]) == (3, 0, None, [])


def test_faults_are_named_and_end_with_2_above_the_limit(videos, tmp_path):
    (videos / "3.mp4").write_bytes(b"")
    data = (videos / "0.mp4").read_bytes()
    (videos / "4.mkv").write_bytes(data[: len(data) // 2])
    out = tmp_path / "out"
    outcome = twinreel("data", "prepare", videos, "--out", out, *QUICK)
    assert outcome.code == 2
    assert "5 videos listed: 3 written, 0 already there, 2 failed" in outcome.out
    assert "not prepared: " in outcome.err and "an empty file" in outcome.err
    assert f"2 of 5 rows; allowed --max-faults 0; all are in {out / 'faults.jsonl'}" in outcome.err
    assert twinreel("data", "prepare", videos, "--out", out, *QUICK, "--max-faults", "0.5").code == 0


def test_mistakes_are_explained(videos, tmp_path):
    out = tmp_path / "out"
    twinreel("data", "prepare", videos, "--out", videos / "x", *QUICK).fails(
        "--out", "lies in", "choose a place beside"
    )
    twinreel("data", "prepare", videos, "--out", out, *QUICK, "--short-side", 33).fails("short_side 33 must be an even")
    twinreel("data", "prepare", videos, "--out", out, *QUICK, "--clip-seconds", 5).fails("no row has a window")
    assert not out.exists()
    assert twinreel("data", "prepare", videos, "--out", out, *QUICK).code == 0
    twinreel("data", "prepare", videos, "--out", out, *QUICK, "--gop", 8).fails("gop: 4 there, 8 now", "another --out")
    twinreel("data", "prepare", tmp_path / "none.csv", "--out", out).fails("none.csv", "does not exist")


def test_a_prepared_collection_trains_as_the_original_does(videos, tmp_path):
    manifest = tmp_path / "rows.csv"
    rows = [f"in/{i}.mp4,word number {i},{start},{start + 0.5}" for i in range(3) for start in (0.0, 1.25)]
    manifest.write_text("video,caption,start,end\n" + "\n".join(rows) + "\n")
    out = tmp_path / "out"
    outcome = twinreel("data", "prepare", manifest, "--out", out, *QUICK, "--clip-seconds", "0.75")
    assert outcome.code == 0 and "6 rows" in outcome.out, outcome
    ids = [json.loads(line)["id"] for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert ids == ["in/0.mp4", "in/0.mp4#2", "in/1.mp4", "in/1.mp4#2", "in/2.mp4", "in/2.mp4#2"]
    small = [option for option in SMALL if not option.startswith(("data.num_videos", "data.num_test"))]
    arguments = ("s3dg_small_own_videos", *small, f"data.manifest={out / 'manifest.jsonl'}", "eval.every=null")
    outcome = twinreel(
        "train", *arguments, "train.num_epochs=null", "optim.warmup_epochs=null", "--out", tmp_path / "run"
    )
    assert outcome.code == 0, outcome
    assert not (tmp_path / "run" / "faults.jsonl").exists() or not (tmp_path / "run" / "faults.jsonl").read_text()


# ---- kills


@pytest.fixture(scope="module")
def long_videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    make_video(folder / "0.mp4", num_frames=200, frame_rate=25, size=(320, 240))
    for i in range(1, 6):
        shutil.copy(folder / "0.mp4", folder / f"{i}.mp4")
    return folder


def wait_for(condition, process, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("files", [0, 1, 3])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(long_videos, tmp_path, files):
    arguments = ("data", "prepare", long_videos, "--gop", "8", "--workers", "2", "--measure", "0")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert twinreel(*arguments, "--out", whole).code == 0
    process = start(*arguments, "--out", out)
    partial = out / ".partial"
    wait_for(lambda: partial.is_dir() and any(partial.iterdir()) and len(list(out.rglob("?.mp4"))) >= files, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "manifest.jsonl").exists()
    outcome = twinreel(*arguments, "--out", out)
    assert outcome.code == 0, outcome
    assert contents(out) == contents(whole)
    assert set(contents(out)) == {".lock", "prepare.json", "map.jsonl", "manifest.jsonl"} | {
        f"videos/{i}.mp4" for i in range(6)
    }


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_process_that_dies_costs_its_file_alone(long_videos, tmp_path):
    out = tmp_path / "out"
    process = start("data", "prepare", long_videos, "--out", out, "--workers", "1", "--measure", "0")
    wait_for(lambda: (out / ".partial").is_dir() and any((out / ".partial").iterdir()), process)
    workers = [grandchild for child in children(process.pid) for grandchild in children(child)]
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "6 videos listed: 5 written, 0 already there, 1 failed" in printed
    [fault] = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert "SIGKILL" in fault["reason"] and fault["video"] in fault["reason"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_no_process_outlives_a_killed_run(long_videos, tmp_path):
    out = tmp_path / "out"
    process = start("data", "prepare", long_videos, "--out", out, "--workers", "2", "--measure", "0")
    wait_for(lambda: (out / ".partial").is_dir() and any((out / ".partial").iterdir()), process)
    workers = [grandchild for child in children(process.pid) for grandchild in children(child)]
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "a worker goes on"
        time.sleep(0.02)


# ---- real clips


@pytest.mark.slow
def test_real_clips_keep_frames_and_times(test_data, tmp_path):
    out = tmp_path / "out"
    outcome = twinreel("data", "prepare", test_data / "torture", "--out", out, "--gop", "16", "--measure", "0")
    assert outcome.code == 2  # damaged files are among them, and each is named
    assert "11 failed" in outcome.out, outcome.out
    records = [json.loads(line) for line in (out / "map.jsonl").read_text().splitlines()]
    assert len(records) > 40
    for record in records:
        with open_video(record["video"]) as before, open_video(str(out / record["output"])) as after:
            rate = before.info.frame_rate or 25
            times = [time for k in range(0, 200, 7) if (time := k / rate) < record["seconds"]]
            wanted, given = before.frames_at(times), after.frames_at(times)
        assert torch.allclose(wanted.pts_seconds, given.pts_seconds, rtol=0, atol=1e-6), record["video"]
        size = tuple(given.data.shape[1:3])
        assert min(size) <= 256 and all(side % 2 == 0 for side in size)
        scaled = torch.nn.functional.interpolate(
            wanted.data.permute(0, 3, 1, 2).float(), size, mode="bilinear", antialias=True
        ).permute(0, 2, 3, 1)
        assert (scaled - given.data).abs().mean() < 8, record["video"]
