"""Sampling rules as tables, and their properties on random cases."""

from __future__ import annotations

import numpy as np
import pytest

from twinreel.data.sampling import (
    center_start,
    clip_times,
    intersect_window,
    milnce_evaluation_starts,
    milnce_hmdb_starts,
    milnce_start,
    milnce_window,
    nearest_candidates,
    random_start,
    uniform_starts,
    uniform_times,
    widen_window,
)
from twinreel.errors import ConfigError, DataError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("start", "num_frames", "frame_rate", "times"),
    [
        (0.0, 1, 5.0, [0.0]),
        (2.0, 4, 5.0, [2.0, 2.2, 2.4, 2.6]),
        (0.5, 3, 29.97, [0.5, 0.5 + 1 / 29.97, 0.5 + 2 / 29.97]),
    ],
)
def test_clip_times(start: float, num_frames: int, frame_rate: float, times: list[float]) -> None:
    assert clip_times(start, num_frames, frame_rate) == pytest.approx(times, abs=1e-12)


def test_clip_times_do_not_drift() -> None:
    assert clip_times(0.0, 100_001, 30.0)[-1] == 100_000 / 30


@pytest.mark.parametrize(("num_frames", "frame_rate"), [(0, 5.0), (4, 0.0), (4, -1.0), (4, NAN), (4, INF)])
def test_clip_times_refuses_what_is_no_clip(num_frames: int, frame_rate: float) -> None:
    with pytest.raises(ConfigError, match="got"):
        clip_times(0.0, num_frames, frame_rate)


@pytest.mark.parametrize(
    ("window", "duration", "part"),
    [
        ((1.0, 3.0), 5.0, (1.0, 3.0)),
        ((-1.0, 3.0), 5.0, (0.0, 3.0)),
        ((4.0, 9.0), 5.0, (4.0, 5.0)),
        ((-1.0, 9.0), 5.0, (0.0, 5.0)),
        ((4.999, INF), 5.0, (4.999, 5.0)),
    ],
)
def test_intersect_window(window: tuple[float, float], duration: float, part: tuple[float, float]) -> None:
    assert intersect_window(*window, duration) == part


@pytest.mark.parametrize("window", [(1.0, 1.0), (2.0, 1.0), (NAN, 1.0), (1.0, NAN), (INF, INF)])
def test_empty_windows_are_refused(window: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="is empty"):
        intersect_window(*window, 5.0)


@pytest.mark.parametrize("window", [(-1.0, 0.0), (5.0, 6.0), (100.0, 103.0), (-3.0, -2.0)])
def test_windows_outside_are_refused_naming_window_and_duration(window: tuple[float, float]) -> None:
    with pytest.raises(DataError, match=rf"\[{window[0]:g}, {window[1]:g}\) s lies outside .* 5\.000 s"):
        intersect_window(*window, 5.0)


@pytest.mark.parametrize("duration", [0.0, NAN])
def test_a_video_without_duration_has_no_window(duration: float) -> None:
    with pytest.raises(DataError, match="outside"):
        intersect_window(0.0, 1.0, duration)


@pytest.mark.parametrize(
    ("window", "min_seconds", "widened"),
    [
        ((10.0, 12.0), 5.0, (8.5, 13.5)),
        ((10.0, 15.0), 5.0, (10.0, 15.0)),
        ((3.0, 20.0), 4.0, (3.0, 20.0)),
        ((1.0, 2.0), 5.0, (0.0, 5.0)),
        ((0.0, 0.5), 5.0, (0.0, 5.0)),
        ((2.25, 2.25), 4.0, (0.25, 4.25)),
    ],
)
def test_widen_window(window: tuple[float, float], min_seconds: float, widened: tuple[float, float]) -> None:
    assert widen_window(*window, min_seconds) == pytest.approx(widened)


def test_random_starts_fill_the_window_and_never_leave_it() -> None:
    rng = np.random.default_rng(0)
    starts = [random_start(rng, 2.0, 10.0, 3.2) for _ in range(2000)]
    assert 2.0 <= min(starts) < 2.05 and 6.75 < max(starts) <= 6.8
    assert np.mean(starts) == pytest.approx(4.4, abs=0.1)
    assert random_start(rng, 2.0, 10.0, 8.0) == random_start(rng, 2.0, 3.0, 8.0) == 2.0


def test_random_start_is_a_function_of_its_generator() -> None:
    draws = [random_start(np.random.default_rng(7), 0.0, 60.0, 3.2) for _ in range(2)]
    assert draws[0] == draws[1] != random_start(np.random.default_rng(8), 0.0, 60.0, 3.2)


@pytest.mark.parametrize(
    ("window", "clip_seconds", "start"), [((2.0, 10.0), 4.0, 4.0), ((2.0, 6.0), 4.0, 2.0), ((2.0, 3.0), 4.0, 2.0)]
)
def test_center_start(window: tuple[float, float], clip_seconds: float, start: float) -> None:
    assert center_start(*window, clip_seconds) == pytest.approx(start)


@pytest.mark.parametrize(
    ("window", "clip_seconds", "num_clips", "starts"),
    [
        ((0.0, 10.0), 2.0, 5, [0.0, 2.0, 4.0, 6.0, 8.0]),
        ((0.0, 10.0), 2.0, 2, [0.0, 8.0]),
        ((0.0, 10.0), 2.0, 1, [4.0]),
        ((5.0, 8.0), 2.0, 3, [5.0, 5.5, 6.0]),
        ((5.0, 6.0), 2.0, 3, [5.0, 5.0, 5.0]),
        ((5.0, 6.0), 2.0, 1, [5.0]),
    ],
)
def test_uniform_starts(window: tuple[float, float], clip_seconds: float, num_clips: int, starts: list[float]) -> None:
    assert uniform_starts(*window, clip_seconds, num_clips) == pytest.approx(starts)


def test_uniform_starts_begin_and_end_with_the_window_exactly() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        start, length, clip = rng.uniform(0, 100), rng.uniform(4, 50), rng.uniform(0.1, 3.9)
        starts = uniform_starts(start, start + length, clip, int(rng.integers(2, 12)))
        assert starts[0] == start and starts[-1] == start + length - clip
        assert np.diff(starts) == pytest.approx((starts[-1] - starts[0]) / (len(starts) - 1))
        assert len(set(starts)) == len(starts)


@pytest.mark.parametrize(
    ("window", "num_frames", "times"),
    [((0.0, 8.0), 4, [1.0, 3.0, 5.0, 7.0]), ((2.0, 3.0), 1, [2.5]), ((1.0, 2.0), 2, [1.25, 1.75])],
)
def test_uniform_times_are_the_middles_of_equal_segments(
    window: tuple[float, float], num_frames: int, times: list[float]
) -> None:
    assert uniform_times(*window, num_frames) == pytest.approx(times)


@pytest.mark.parametrize("function", [uniform_starts, milnce_evaluation_starts])
def test_no_clips_are_refused(function: object) -> None:
    arguments = (0.0, 10.0, 2.0, 0) if function is uniform_starts else (0.0, 10.0, 16, 5.0, 0)
    with pytest.raises(ConfigError, match="num_clips: got 0"):
        function(*arguments)  # type: ignore[operator]


# Captions in time


def test_nearest_candidates_by_hand() -> None:
    starts, ends = [0.0, 10.0, 12.0, 20.0], [1.0, 11.0, 13.0, 21.0]
    assert nearest_candidates(starts, ends, 1, 1) == [1]
    assert nearest_candidates(starts, ends, 1, 2) == [1, 2]  # 10 to 13 is shorter than 0 to 11
    assert nearest_candidates(starts, ends, 2, 2) == [1, 2]
    assert nearest_candidates(starts, ends, 2, 3) == [1, 2, 3]  # 10 to 21 is shorter than 0 to 13
    assert nearest_candidates(starts, ends, 0, 2) == [0, 1]  # it touches the first
    assert nearest_candidates(starts, ends, 3, 3) == [1, 2, 3]  # and the last


def test_nearest_candidates_of_a_short_track_repeat_its_ends() -> None:
    assert nearest_candidates([0.0], [1.0], 0, 3) == [0, 0, 0]
    assert nearest_candidates([0.0, 5.0], [1.0, 6.0], 0, 4) == [0, 1, 1, 1]
    assert nearest_candidates([0.0, 5.0], [1.0, 6.0], 1, 4) == [0, 0, 0, 1]


def test_nearest_candidates_are_a_run_that_holds_the_caption() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 12))
        starts = np.sort(rng.uniform(0, 100, count))
        ends = starts + rng.uniform(0.1, 8, count)
        index, wanted = int(rng.integers(count)), int(rng.integers(1, 9))
        chosen = nearest_candidates(starts.tolist(), ends.tolist(), index, wanted)
        assert len(chosen) == wanted and index in chosen and chosen == sorted(chosen)
        assert len(set(chosen)) == min(count, wanted) and max(chosen) - min(chosen) + 1 == min(count, wanted)


@pytest.mark.parametrize(("index", "num_candidates"), [(-1, 2), (3, 2), (0, 0)])
def test_nearest_candidates_refuses_what_is_not_there(index: int, num_candidates: int) -> None:
    with pytest.raises(ConfigError):
        nearest_candidates([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], index, num_candidates)


# The founding rules: their golden tables are in tests/parity


def test_milnce_start_is_a_whole_second_at_which_the_clip_fits() -> None:
    rng = np.random.default_rng(0)
    starts = {milnce_start(rng, 8, 13, 16, 5.0) for _ in range(200)}
    assert starts == {8, 9}  # 13 - 3.2 = 9.8
    assert {milnce_start(rng, 8, 10, 16, 5.0) for _ in range(20)} == {8}


def test_milnce_windows_are_whole_seconds() -> None:
    assert milnce_window(10.2, 12.9, 5.0) == (9, 14)


def test_milnce_starts_of_short_videos() -> None:
    assert milnce_evaluation_starts(5.0, 6.0, 16, 5.0, 3) == [5.0, 5.0, 5.0]
    assert milnce_hmdb_starts(3, 16, 2) == [0, 0]
