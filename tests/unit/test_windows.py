"""Windows over whole videos: nothing left out, in exact seconds or in frames of the file."""

import pytest
import torch

from twinreel.data.clip import Clip
from twinreel.data.dataset import read_views
from twinreel.data.storage import open_video
from twinreel.data.windows import check_stride, cover_frames, cover_row, see_windows
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from videos import frame_numbers, make_video

SECONDS = Preprocessing(num_frames=4, frame_rate=5.0, crop_size=48)
FRAMES = Preprocessing(num_frames=4, frame_stride=2, crop_size=48)
CPU = torch.device("cpu")


def row(path, **window):
    return Clip(id=str(path), video=str(path), **window)


@pytest.mark.parametrize("num_frames", [4, 5, 8, 9, 16, 30, 41])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("window", [{}, {"start_seconds": 0.3}, {"start_seconds": 0.1, "end_seconds": 1.7}])
def test_frames_and_seconds_are_the_same_windows_of_a_steady_video(tmp_path, num_frames, share, window):
    """At 10 frames a second every 2nd frame is 5 a second."""
    make_video(tmp_path / "a.mp4", num_frames=num_frames, frame_rate=10, size=(48, 48))
    listed = row(tmp_path / "a.mp4", **window)
    by_seconds = cover_row(listed, SECONDS, clip_share=share)
    by_frames = cover_row(listed, FRAMES, clip_share=share)
    assert [w[:2] for w in by_frames] == [pytest.approx(w[:2]) for w in by_seconds]
    last = (num_frames - 1) / 10
    for one, other in zip(by_frames, by_seconds, strict=True):
        assert one.times == pytest.approx([min(time, last) for time in other.times])
        assert one.num_held == sum(time > last + 1e-6 for time in other.times)


def test_windows_begin_and_end_where_frames_appear(tmp_path):  # B007
    """A variable frame rate: 12 frames in the first 1.2 s, then one a second."""
    times = [i / 10 for i in range(12)] + [1.2 + i for i in range(6)]
    make_video(tmp_path / "vfr.mp4", num_frames=18, pts_seconds=times, size=(48, 48))
    with open_video(str(tmp_path / "vfr.mp4")) as reader:
        end = reader.info.duration_seconds
        assert reader.frame_times() == pytest.approx(times, abs=1e-4)
    windows = cover_row(row(tmp_path / "vfr.mp4"), FRAMES)
    assert [w[:2] for w in windows] == [pytest.approx(pair, abs=1e-4) for pair in [(0, 0.8), (0.8, 5.2), (1.0, end)]]
    assert windows[1].times == pytest.approx([0.8, 1.0, 1.2, 3.2], abs=1e-4)
    every_two_seconds = cover_row(row(tmp_path / "vfr.mp4"), FRAMES, 2.0)
    assert [w.start_seconds for w in every_two_seconds] == pytest.approx([0.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_no_frame_is_left_out_unless_the_step_is_longer(size, step):
    times = [i / 10 for i in range(40)]
    for shown in (range(0, 40), range(7, 30), range(5, 6), range(2, 9)):
        starts = cover_frames(times, shown, size, step, None)
        covered = {frame for first in starts for frame in range(first, first + size)}
        assert starts[0] == shown.start and starts == sorted(set(starts))
        assert max(covered) == max(shown.stop - 1, shown.start + size - 1)
        if step <= size:
            assert set(shown) <= covered
        assert cover_frames(times, shown, size, 99, step / 10) == starts


@pytest.mark.parametrize("preprocessing", [SECONDS, FRAMES])
@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_the_model_sees_the_frames_of_each_window(tmp_path, preprocessing, at_once):
    paths = [
        make_video(tmp_path / f"{i}.mp4", num_frames=n, frame_rate=10, size=(48, 48)) for i, n in enumerate((21, 5))
    ]
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    listed = [row(paths[0]), row(tmp_path / "broken.mp4"), row(paths[1])]
    faults, seen = [], []

    def look(video):
        seen.extend(preprocessing.to_pixels(video))
        return torch.arange(len(seen) - len(video), len(seen))[:, None]

    results = list(see_windows(listed, preprocessing, look, faults, device=CPU, at_once=at_once))
    assert [fault.id for fault in faults] == [listed[1].id]
    assert [result.row for result in results] == [listed[0], listed[2]]
    expected = {paths[0]: [[0, 2, 4, 6], [8, 10, 12, 14], [13, 15, 17, 19]], paths[1]: [[0, 2, 4, 4]]}
    for result, path in zip(results, paths, strict=True):
        assert [frame_numbers(seen[int(place)]) for place in result.values] == expected[path]
        assert len(result.windows) == len(result.values)
    assert [result.repeated_frames for result in results] == [0, 1]
    assert results[1].windows[0][:2] == (0.0, pytest.approx(0.5))


def test_a_row_whose_last_windows_fail_is_a_fault_and_gives_nothing(tmp_path, monkeypatch):
    paths = [make_video(tmp_path / f"{i}.mp4", num_frames=33, frame_rate=10, size=(48, 48)) for i in range(2)]
    listed, faults = [row(path) for path in paths], []

    def failing(piece, preprocessing, times):
        if piece.video == listed[0].video and times(0, 9)[0][0] > 1:
            raise DataError(f"{piece.video}: damaged at the end")
        return read_views(piece, preprocessing, times)

    monkeypatch.setattr("twinreel.data.windows.read_views", failing)
    results = list(see_windows(listed, SECONDS, lambda video: video[:, 0, 0, 0, 0], faults, device=CPU, at_once=2))
    assert [result.row for result in results] == listed[1:] and len(results[0].values) == 5
    assert [(fault.id, fault.reason) for fault in faults] == [(listed[0].id, f"{paths[0]}: damaged at the end")]


def test_a_step_shorter_than_a_frame_begins_a_window_at_each():
    assert cover_frames([0.0, 0.1, 0.2, 0.3], range(4), 2, 2, 1e-12) == [0, 1, 2]


def test_what_cannot_be_covered_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"stride_seconds=nan: must be a number of seconds above 0"):
        check_stride(float("nan"))
    path = make_video(tmp_path / "a.mp4", num_frames=10, frame_rate=10, size=(48, 48))
    for preprocessing in (SECONDS, FRAMES):
        with pytest.raises(DataError, match="lies outside the video"):
            cover_row(row(path, start_seconds=3.0), preprocessing)
