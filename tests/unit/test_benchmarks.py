"""The decoding benchmark: its files tell their frames, its tables say what was measured, and it runs."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the script sets it where it is not set
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("decode")


@pytest.mark.parametrize("size", [(240, 320), (720, 1280), (360, 240)])
def test_numbers_are_read_from_whole_and_from_scaled_frames(decode: ModuleType, size: tuple[int, int]) -> None:
    videos = importlib.import_module("natural_videos")
    rng = np.random.default_rng(0)
    numbers = [0, 1, 2, 37, 1499, 4095]
    images = [videos.stamp(rng.integers(0, 256, (*size, 3), dtype=np.uint8), number) for number in numbers]
    frames = torch.from_numpy(np.stack(images))
    assert videos.frame_numbers(frames) == numbers
    side, top, left = min(size), (size[0] - min(size)) // 2, (size[1] - min(size)) // 2
    square = frames[:, top : top + side, left : left + side].permute(0, 3, 1, 2)
    scaled = functional.interpolate(square, (224, 224), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
    assert videos.frame_numbers(scaled) == numbers
    assert videos.frame_numbers(torch.full_like(scaled, 125)) == [-1] * len(numbers)
    assert videos.frame_numbers(255 - scaled) == [-1] * len(numbers)


def test_clips_lie_within_their_file(decode: ModuleType) -> None:
    for movie in (*decode.MOVIES, *decode.QUICK_MOVIES):
        for workload, count in zip(decode.WORKLOADS, (16, 32, 16, movie.seconds), strict=True):
            for seed in range(20):
                clip = decode.draw_clip(movie, Path("x"), workload, random.Random(seed))
                assert len(clip.indices) == count
                assert clip.indices == sorted(set(clip.indices))
                assert clip.indices[0] >= 0 and clip.indices[-1] < movie.num_frames


def results(**ms: list[float]) -> dict[str, Any]:
    row = "224; h264 1280x720 GOP 250; 8 clips x 2"
    times = {name.replace("_", " "): values for name, values in ms.items()}
    return {"absent": [], "kbit": {}, "ms": {row: times}, "wrong": {}, "pixels": {}}


FLOORS = {"floor": [4.0] * 5, "floor, discard": [3.0] * 5, "opening": [1.0] * 5}


def test_ratios_are_paired_by_round(decode: ModuleType) -> None:
    measured = results(twinreel=[10.0, 20.0, 30.0, 40.0, 50.0], OpenCV=[15.0, 30.0, 45.0, 60.0, 75.0], **FLOORS)
    table = decode.Table(measured, "224")
    (row,) = table.rows
    assert table.ratio(row, "OpenCV") == 1.5
    assert table.interval(row, "OpenCV") == (1.5, 1.5)
    assert table.mean([(row, "OpenCV")]) == pytest.approx((1.5, 1.5, 1.5))


def test_a_peer_with_wrong_frames_is_marked_and_not_the_best(
    decode: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = results(twinreel=[10.0] * 5, OpenCV=[8.0] * 5, decord2=[14.0] * 5, **FLOORS)
    decode.report(measured, targets=True)
    assert "below 0.9: MISSED by h264 1280x720 GOP 250 8 clips x 2 (OpenCV 0.80)" in capsys.readouterr().out
    measured["wrong"] = {"224; h264 1280x720 GOP 250; 8 clips x 2": {"OpenCV": 3}}
    decode.report(measured, targets=True)
    text = capsys.readouterr().out
    assert "0.80 (0.80-0.80) WRONG | 1.40 (1.40-1.40) | decord2 | 0.40 | 0.50 | 0.30 |" in text
    assert "below 0.9: all meet it" in text
    assert "1280x720, 8 clips x 2, against the best peer, at least 1.3: mean 1.40 (1.40-1.40), met" in text
    assert "8 clips x 2: OpenCV, 3 in all rounds" in text


@pytest.mark.slow
def test_it_runs_without_any_peer(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "decode.py"), "--quick", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "## To 224 x 224" in done.stdout and "## To full-size frames" in done.stdout
    assert "Wrong frames: none of any method." in done.stdout
    assert not list(tmp_path.glob("*partial*"))
