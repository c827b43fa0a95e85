"""Sampling rules as tables, and their properties on random cases."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from twinreel.data.clip import Clip
from twinreel.data.founding_sampling import (
    milnce_evaluation_starts,
    milnce_hmdb_starts,
    milnce_start,
    milnce_window,
)
from twinreel.data.sampling import (
    center_start,
    clip_times,
    consecutive_windows,
    cut_rows,
    intersect_window,
    last_strided_start,
    nearest_candidates,
    random_start,
    random_times,
    sparse_starts,
    strided_starts,
    strided_times,
    uniform_starts,
    uniform_times,
    widen_window,
    window_indices,
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


# ---- frames of the file


@pytest.mark.parametrize(("rate", "frames"), [(25.0, 25), (30000 / 1001, 30)])
@pytest.mark.parametrize("start", [0.0, 0.02, 1 / 3, 1.98])
def test_a_window_of_a_second_has_the_frames_of_a_second(rate: float, frames: int, start: float) -> None:  # B044
    times = [index / rate for index in range(round(5 * rate))]
    window = window_indices(times, start, start + 1.0)
    assert len(window) == frames
    assert all(start - 1e-6 <= times[index] < start + 1.0 for index in window)
    following = window_indices(times, start + 1.0, start + 2.0)
    assert following.start == window.stop  # half open: no frame is in both, none in neither


@pytest.mark.parametrize(
    ("window", "indices"),
    [
        ((0.0, 1.0), range(0, 3)),
        ((0.0, 1.1), range(0, 4)),
        ((0.1, 0.4), range(0, 1)),  # none appears in it: the one on show
        ((0.5, 0.5000001), range(1, 2)),
        ((0.6, 0.7), range(1, 2)),
        ((1.2, INF), range(4, 5)),
        ((9.0, INF), range(4, 5)),
        ((0.0, 1e-9), range(0, 1)),
    ],
)
def test_window_indices(window: tuple[float, float], indices: range) -> None:
    assert window_indices([0.0, 0.5, 0.9, 1.0, 1.2], *window) == indices


def test_a_video_without_frames_has_no_window() -> None:
    with pytest.raises(DataError, match="no frames"):
        window_indices([], 0.0, 1.0)


@pytest.mark.parametrize(("num_frames", "stride"), [(4, 6), (16, 4), (8, 8), (32, 2)])
def test_indices_differ_by_exactly_the_stride(num_frames: int, stride: int) -> None:  # B041
    times = [index * 0.04 for index in range(300)]
    for first in (0, 1, 17, last_strided_start(range(300), num_frames, stride)):
        chosen, held = strided_times(times, first, num_frames, stride)
        indices = [times.index(time) for time in chosen]
        assert indices[0] == first and set(np.diff(indices)) == {stride} and held == 0
    assert indices[-1] == 299  # the last start that fits ends with the last frame


@pytest.mark.parametrize(("num_frames", "stride", "shown"), [(16, 4, 3), (32, 2, 5)])
def test_a_short_video_holds_its_last_frame_and_says_how_often(num_frames: int, stride: int, shown: int) -> None:
    times = [index / 30 for index in range(9)]  # B025
    assert last_strided_start(range(9), num_frames, stride) == 0
    chosen, held = strided_times(times, 0, num_frames, stride)
    assert chosen[:shown] == times[::stride] and set(chosen[shown:]) == {times[-1]}
    assert len(chosen) == num_frames and held == num_frames - shown


def test_five_views_are_five_and_one_is_the_center() -> None:  # B045
    starts = strided_starts(range(300), 8, 4, 5)
    assert starts[0] == 0 and starts[-1] + 7 * 4 == 299 and len(set(starts)) == 5
    assert max(np.diff(starts)) - min(np.diff(starts)) <= 1
    [one] = strided_starts(range(300), 8, 4, 1)
    assert abs((one + one + 28) / 2 - 149.5) <= 0.5
    assert strided_starts(range(100, 110), 8, 4, 3) == [100, 100, 100]
    assert strided_starts(range(100, 129), 8, 4, 2) == [100, 100]
    assert strided_starts(range(100, 130), 8, 4, 2) == [100, 101]


@pytest.mark.parametrize(("num_frames", "stride"), [(0, 1), (1, 0)])
def test_a_strided_clip_of_nothing_is_refused(num_frames: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="got 0; give at least 1"):
        last_strided_start(range(10), num_frames, stride)


# ---- spread over a window, cut into windows


def test_one_random_time_a_segment() -> None:
    rng = np.random.default_rng(0)
    draws = np.array([random_times(rng, 2.0, 10.0, 4) for _ in range(500)])
    for index in range(4):
        assert 2 + 2 * index <= draws[:, index].min() < 2.1 + 2 * index
        assert 3.9 + 2 * index < draws[:, index].max() < 4 + 2 * index
    assert uniform_times(2.0, 10.0, 4) == [3.0, 5.0, 7.0, 9.0]
    with pytest.raises(ConfigError, match="num_frames: got 0"):
        random_times(rng, 0.0, 1.0, 0)


def test_sparse_clips_have_each_its_own_part_of_the_window() -> None:
    assert sparse_starts(0.0, 10.0, 2.0, 4) == [1.0, 3.0, 5.0, 7.0]
    assert sparse_starts(5.0, 6.0, 2.0, 3) == [5.0, 5.0, 5.0]  # too short: all begin with it
    rng = np.random.default_rng(0)
    draws = np.array([sparse_starts(0.0, 10.0, 2.0, 4, rng) for _ in range(500)])
    assert ((draws // 2).astype(int) == [0, 1, 2, 3]).all() and draws.max() > 7.95 and draws.min() < 0.05
    with pytest.raises(ConfigError, match="num_clips: got 0"):
        sparse_starts(0.0, 1.0, 0.5, 0)


@pytest.mark.parametrize(
    ("span", "seconds", "windows"),
    [
        ((0.0, 2.0), 1.0, [(0.0, 1.0), (1.0, 2.0)]),
        ((0.0, 2.002), 1.0, [(0.0, 1.0), (1.0, 2.002)]),  # what a header adds is no window of its own
        ((0.0, 2.5), 1.0, [(0.0, 1.0), (1.0, 2.0), (2.0, 2.5)]),
        ((0.0, 2.4999), 1.0, [(0.0, 1.0), (1.0, 2.4999)]),
        ((3.0, 3.2), 1.0, [(3.0, 3.2)]),
        ((0.5, 1.5), 0.5, [(0.5, 1.0), (1.0, 1.5)]),
        ((0.0, 1.0), 0.1, [(index * 0.1, (index + 1) * 0.1) for index in range(10)]),
    ],
)
def test_consecutive_windows(span: tuple[float, float], seconds: float, windows: list[tuple[float, float]]) -> None:
    got = consecutive_windows(*span, seconds)
    assert np.allclose(got, windows, rtol=0, atol=1e-12)
    assert got[0][0] == span[0] and got[-1][1] == span[1]
    assert all(one[1] == other[0] for one, other in pairwise(got))


@pytest.mark.parametrize(("end", "seconds", "error"), [(0.0, 1.0, DataError), (INF, 1.0, DataError)])
def test_what_cannot_be_cut(end: float, seconds: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="can't be cut"):
        consecutive_windows(0.0, end, seconds)
    with pytest.raises(ConfigError, match="window_seconds: got 0"):
        consecutive_windows(0.0, 1.0, 0.0)


def test_videos_of_2_5_and_10_seconds_are_17_clips_each_once() -> None:  # B047
    rows = [Clip(id=f"v{length}", video=f"{length}.mp4", labels=("a",)) for length in (2, 5, 10)]
    cut = cut_rows(rows, {"2.mp4": 2.0, "5.mp4": 5.0, "10.mp4": 10.0}, 1.0)
    assert len(cut) == 17 == len({row.id for row in cut})
    assert [row.id for row in cut[:3]] == ["v2@0.000", "v2@1.000", "v5@0.000"]
    assert all(row.labels == ("a",) and row.end_seconds - row.start_seconds == 1.0 for row in cut)  # type: ignore[operator]
    inside = Clip(id="w", video="10.mp4", start_seconds=7.0, end_seconds=99.0)
    assert [(row.start_seconds, row.end_seconds) for row in cut_rows([inside], {"10.mp4": 10.0}, 2.0)] == [
        (7.0, 9.0),
        (9.0, 10.0),
    ]
    with pytest.raises(DataError, match=r"v2@0\.000: two windows would have this id"):
        cut_rows([rows[0], rows[0]], {"2.mp4": 2.0}, 1.0)
    with pytest.raises(DataError, match="outside the video"):
        cut_rows([inside], {"10.mp4": 5.0}, 1.0)


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
