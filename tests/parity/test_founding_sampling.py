"""Which frames are looked at, against tables that PySlowFast and ClipBERT returned.

Exact: indices are whole numbers. ClipBERT's frames are also read, from the very videos its own decoder was given: frame
i shows i in binary, in eight bars of 16 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinreel.data.choosing import evaluation_times
from twinreel.data.founding_sampling import (
    clipbert_clip,
    clipbert_frames,
    clipbert_range,
    slowfast_clip_size,
    slowfast_frames,
    slowfast_segments,
    slowfast_slow_indices,
    slowfast_start,
    slowfast_test_start,
)
from twinreel.data.storage import open_video
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from videos import frame_numbers

FOLDER = Path(__file__).parent / "golden"
SLOWFAST: dict[str, Any] = json.loads((FOLDER / "slowfast_data.json").read_text())
CLIPBERT: dict[str, Any] = json.loads((FOLDER / "clipbert_decode.json").read_text())


def test_the_tables_are_whole() -> None:
    assert len(SLOWFAST["temporal"]["table"]) == 48 and len(CLIPBERT["cases"]) == 315 and len(CLIPBERT["videos"]) == 7
    assert {case["use_offset"] for case in SLOWFAST["temporal"]["table"]} == {False, True}


@pytest.mark.parametrize("case", SLOWFAST["temporal"]["table"])
def test_slowfast_test_clips(case: dict[str, Any]) -> None:
    size = slowfast_clip_size(case["num_frames"], case["sampling_rate"], case["video_fps"], case["target_fps"])
    assert size == pytest.approx(case["clip_size"], abs=1e-12)
    for clip, (start, end, golden) in enumerate(case["clips"]):
        ours = slowfast_test_start(case["video_size"], size, clip, case["num_clips"], use_offset=case["use_offset"])
        assert (ours, ours + size - 1) == pytest.approx((start, end), abs=1e-9)
        assert slowfast_frames(case["video_size"], ours, size, case["num_frames"]) == golden


def test_slowfast_frames_round_as_float32_does_there() -> None:
    """The rule is torch.linspace in float32: an oracle beyond the table."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        frames, start, size = int(rng.integers(1, 500)), float(rng.uniform(0, 400)), float(rng.uniform(1, 200))
        number = int(rng.integers(1, 65))
        line = torch.linspace(start, start + size - 1, number).clamp(0, frames - 1)
        assert slowfast_frames(frames, start, size, number) == line.long().tolist()


def test_slowfast_training_starts_lie_where_the_clip_fits() -> None:
    rng = np.random.default_rng(0)
    starts = [slowfast_start(rng, 300, 64.0) for _ in range(2000)]
    assert 0 <= min(starts) < 1 and 235 < max(starts) <= 236 and np.mean(starts) == pytest.approx(118, abs=5)
    assert slowfast_start(rng, 40, 64.0) == 0


@pytest.mark.parametrize("case", SLOWFAST["pathways"]["table"], ids=lambda case: f"{case['T']}-{case['alpha']}")
def test_slowfast_slow_pathway(case: dict[str, Any]) -> None:
    assert slowfast_slow_indices(case["T"], case["alpha"]) == case["slow"]


def test_slowfast_slow_pathway_of_every_length() -> None:
    for length in range(1, 129):
        for alpha in (1, 2, 4, 8, 16):
            if length >= alpha:
                golden = torch.linspace(0, length - 1, length // alpha).long().tolist()
                assert slowfast_slow_indices(length, alpha) == golden


@pytest.mark.parametrize("case", SLOWFAST["ssv2_segments"]["table"])
def test_slowfast_segments(case: dict[str, Any]) -> None:
    length, number, golden = case["video_length"], case["num_frames"], case["test_indices"]
    assert slowfast_segments(length, number) == golden
    rng = np.random.default_rng(0)
    draws = np.array([slowfast_segments(length, number, rng) for _ in range(300)])
    segment = (length - 1) / number
    low = [round(segment * index) for index in range(number)]
    high = [round(segment * (index + 1)) for index in range(number)]
    assert draws.min(0).tolist() == low and draws.max(0).tolist() == high  # both ends of each segment occur


def test_a_count_of_none_is_refused() -> None:
    for refused in (lambda: slowfast_clip_size(0, 2, 30.0), lambda: slowfast_segments(10, 0)):
        with pytest.raises(ConfigError, match="num_frames: got 0"):
            refused()


@pytest.mark.parametrize("case", CLIPBERT["start_end"], ids=str)
def test_clipbert_ranges(case: dict[str, Any]) -> None:
    size, clip, number = case["clip_size"], case["clip_idx"], case["num_clips"]
    assert clipbert_range(case["video_size"], size, clip, number) == tuple(case["out"])


@pytest.mark.parametrize("case", CLIPBERT["temporal_sampling"], ids=str)
def test_clipbert_picks(case: dict[str, Any]) -> None:
    """Of a decoded list: what a file without a declared duration goes by."""
    assert clipbert_frames(range(case["n"]), None, case["start"], case["end"], 0, case["k"]) == case["out"]


def clipbert_clips(case: dict[str, Any]) -> Iterator[tuple[tuple[float, float, float], list[int]]]:
    """((first, last, clip size), golden frames) of each clip of a case."""
    video = CLIPBERT["videos"][case["video"]]
    number = video["n_frames"]
    size = case["num_frm"] / case["fps"] * float(Fraction(video["average_rate"]))
    if "n_clips" in case:
        for clip, golden in enumerate(case["frames"]):
            yield (*clipbert_range(number, size, clip, case["n_clips"]), size), golden
    elif case["strategy"] == "rand":
        for draw in case["draws"]:
            [start] = draw["start_idx"]
            yield (start, start + size - 1, size), draw["frames"]
    else:
        yield clipbert_clip(number, size, case["strategy"]), case["frames"]


def written_pts(video: dict[str, Any]) -> list[int]:
    """Presentation times of a file of a constant rate, ticks."""
    step = 1 / (Fraction(video["average_rate"]) * Fraction(video["time_base"]))
    return [round(index * step) for index in range(video["n_frames"])]


@pytest.mark.parametrize("name", CLIPBERT["videos"])
def test_clipbert_frames(name: str) -> None:
    video = CLIPBERT["videos"][name]
    pts = written_pts(video)
    clips = 0
    for case in CLIPBERT["cases"]:
        if case["video"] != name:
            continue
        for (first, last, size), golden in clipbert_clips(case):
            assert clipbert_frames(pts, video["stream_duration"], first, last, size, case["num_frm"]) == golden, case
            clips += 1
    assert clips == 5 * (4 + 3 + 1 + 2 + 4 + 16)


def barred_numbers(frames: Tensor) -> list[int]:
    """What the bars of each frame say: bar b is bright where bit b of its number is set."""
    bars = frames.float().mean((1, 3)).unflatten(1, (8, 16))[:, :, 4:12].mean(2)
    assert bool(((bars < 60) | (bars > 190)).all()), bars
    return [sum(2**bit for bit in range(8) if frame[bit] > 128) for frame in bars.tolist()]


@pytest.mark.parametrize("name", CLIPBERT["videos"])
def test_clipbert_frames_are_read_from_its_own_videos(name: str) -> None:
    """By the times of the file; the declared numbers of the table are not needed for that."""
    video = CLIPBERT["videos"][name]
    with open_video(str(FOLDER / "clipbert_videos" / name)) as reader:
        times = reader.frame_times()
        assert len(times) == video["n_frames"]
        wanted: list[int] = []
        for case in CLIPBERT["cases"]:
            if case["video"] == name and (case["fps"], case["num_frm"]) in ((2, 2), (3, 3)):
                wanted += [frame for _, golden in clipbert_clips(case) for frame in golden]
        frames = reader.frames_at([times[index] for index in wanted])
    assert barred_numbers(frames.data) == wanted and frames.num_held == 0


def clipbert_evaluations(name: str) -> Iterator[tuple[int, Any, dict[str, Any], list[list[int]]]]:
    """(number of clips, our rule, case, golden frames) of what the founding systems judge a video by."""
    for case in CLIPBERT["cases"]:
        if case["video"] != name:
            continue
        if "n_clips" in case:  # question answering's one clip is clip 0 of 1; of several both go by the same rule
            yield case["n_clips"], "clipbert_start" if case["n_clips"] == 1 else "clipbert", case, case["frames"]
        elif case["strategy"] == "middle":  # retrieval's one clip
            yield 1, "clipbert", case, [case["frames"]]


@pytest.mark.parametrize("name", CLIPBERT["videos"])
def test_evaluation_by_clipbert_windows_sees_the_frames_of_the_table(name: str) -> None:
    """ClipBERT defects 7 and 9: frames are counted, and "middle" at a third is a mode of its own.

    Matroska declares no duration, and an AVI's ticks are whole frames: both pick other frames there.
    """
    cases = 0
    for num_clips, windows, case, golden in clipbert_evaluations(name):
        preprocessing = Preprocessing(num_frames=case["num_frm"], frame_rate=float(case["fps"]), crop_size=32)
        with open_video(str(FOLDER / "clipbert_videos" / name)) as reader:
            seconds = reader.info.duration_seconds
            chosen = evaluation_times(reader, 0.0, seconds, preprocessing, num_clips, windows)
            frames = reader.frames_at([time for clip in chosen.clips for time in clip])
        assert np.reshape(barred_numbers(frames.data), (num_clips, -1)).tolist() == golden, case
        if windows == "clipbert" and num_clips > 1:
            with open_video(str(FOLDER / "clipbert_videos" / name)) as reader:
                assert evaluation_times(reader, 0.0, seconds, preprocessing, num_clips, "clipbert_start") == chosen
        cases += 1
    assert cases == 5 * 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}),  # ClipBERT defect 7: no frame count
        ("a.ts", {"codec": "mpeg2video"}),  # ClipBERT defects 7, 8: nor there, and the first time is not 0
        ("late.mp4", {"pts_seconds": [1.4 + index / 25 for index in range(100)]}),  # ClipBERT defect 8
    ],
)
def test_clipbert_windows_of_files_that_its_code_cannot_read(
    make_video: Callable[..., Path], name: str, options: dict[str, Any]
) -> None:
    """They are read as the same frames in a plain file are; there a random video takes their place."""
    preprocessing = Preprocessing(num_frames=2, frame_rate=2.0, crop_size=32)
    rules: list[tuple[int, Any]] = [(1, "clipbert"), (1, "clipbert_start"), (4, "clipbert")]
    for num_clips, windows in rules:
        seen = []
        for path in (make_video("plain.mp4", num_frames=100, frame_rate=25),
                     make_video(name, num_frames=100, frame_rate=25, **options)):  # fmt: skip
            with open_video(str(path)) as reader:
                seconds = reader.info.duration_seconds
                chosen = evaluation_times(reader, 0.0, seconds, preprocessing, num_clips, windows)
                seen.append(frame_numbers(reader.frames_at([time for clip in chosen.clips for time in clip]).data))
        assert seen[0] == seen[1]
        assert seen[0][0] == (25 if (num_clips, windows) == (1, "clipbert") else 0)


@pytest.mark.parametrize("windows", ["slowfast", "slowfast_offset"])
@pytest.mark.parametrize(("num_clips", "num_frames", "rate"), [(10, 8, 8), (1, 4, 16), (3, 16, 4)])
def test_evaluation_by_slowfast_windows_sees_the_frames_of_the_rule(
    windows: Any, num_clips: int, num_frames: int, rate: int
) -> None:
    preprocessing = Preprocessing(num_frames=num_frames, frame_stride=rate, crop_size=32)
    size = slowfast_clip_size(num_frames, rate, 25.0)
    golden = [
        slowfast_frames(
            200,
            slowfast_test_start(200, size, clip, num_clips, use_offset=windows == "slowfast_offset"),
            size,
            num_frames,
        )
        for clip in range(num_clips)
    ]
    with open_video(str(FOLDER / "clipbert_videos" / "v25fps_200f_bf2.mp4")) as reader:
        chosen = evaluation_times(reader, 0.0, reader.info.duration_seconds, preprocessing, num_clips, windows)
        frames = reader.frames_at([time for clip in chosen.clips for time in clip])
    assert np.reshape(barred_numbers(frames.data), (num_clips, num_frames)).tolist() == golden
    seconds = preprocessing.replace(frame_rate=30 / rate)  # the same said in seconds
    with open_video(str(FOLDER / "clipbert_videos" / "v25fps_200f_bf2.mp4")) as reader:
        assert evaluation_times(reader, 0.0, reader.info.duration_seconds, seconds, num_clips, windows) == chosen


@pytest.mark.parametrize(("windows", "frames"), [("slowfast", [0, 2, 2, 2]), ("clipbert", [0, 2, 2, 2])])
def test_what_a_founding_rule_repeats_of_a_short_video_is_counted(windows: Any, frames: list[int]) -> None:
    preprocessing = Preprocessing(num_frames=4, frame_rate=4.0, crop_size=32)
    with open_video(str(FOLDER / "clipbert_videos" / "v8fps_3f.mp4")) as reader:
        chosen = evaluation_times(reader, 0.0, reader.info.duration_seconds, preprocessing, 2, windows)
        read = reader.frames_at([time for clip in chosen.clips for time in clip])
    assert barred_numbers(read.data) == frames * 2 and chosen.num_held == 2 * 2


def test_a_clip_behind_the_last_frame_is_refused() -> None:
    with pytest.raises(DataError, match=r"no frame appears in the ticks \[500, 600\]"):
        clipbert_frames([0, 10, 20], 30, 50.0, 60.0, 11, 2)
