"""Frames by time: random access against decoding in order, windows, odd containers, broken and damaged files."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from twinreel.data.decode import VideoReader, probe, read_frames
from twinreel.data.decode.filetype import describe_file, missing_bytes
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.data.decode.planned import PlannedReader
from twinreel.errors import ConfigError, DataError
from videos import frame_number, frame_numbers, make_audio, numbered_image

MakeVideo = Callable[..., Path]

VFR = [0.0, 0.1, 0.15, 0.2, 1.2, 1.25, 1.3, 2.5, 2.6, 3.0, 3.5, 3.52, 3.6, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5, 5.6]
AHEAD = {"auto-alt-ref": "1", "lag-in-frames": "12", "deadline": "good", "cpu-used": "5", "b": "300k"}
FIELDS = {"flags": "+ildct+ilme"}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "h264": ("a.mp4", {"num_frames": 40}),
    "h264, B-frames, one long GOP": ("a.mp4", {"num_frames": 60, "b_frames": 3, "gop": 250}),
    "h264, B-frames, short GOPs": ("a.mp4", {"num_frames": 60, "b_frames": 3, "gop": 10}),
    "h264, open GOPs": (
        "a.mp4",
        {"num_frames": 60, "b_frames": 3, "gop": 10, "codec_options": {"x264opts": "open-gop"}},
    ),
    "h264, variable rate": ("a.mp4", {"num_frames": 20, "pts_seconds": VFR, "gop": 5}),
    "h264, variable rate, B-frames": ("a.mp4", {"num_frames": 20, "pts_seconds": VFR, "b_frames": 2, "gop": 8}),
    "h264, fragments": (
        "a.mp4",
        {"num_frames": 40, "b_frames": 2, "container_options": {"movflags": "frag_keyframe+empty_moov"}},
    ),
    "h264, mkv, first time 1.5": ("a.mkv", {"pts_seconds": [1.5 + i / 10 for i in range(40)], "num_frames": 40}),
    "h264, flv": ("a.flv", {"num_frames": 40, "b_frames": 2}),
    "h264, with sound": ("a.mp4", {"num_frames": 40, "audio_seconds": 6.0, "frame_rate": Fraction(30000, 1001)}),
    "hevc": ("a.mp4", {"num_frames": 40, "b_frames": 3, "codec": "libx265"}),
    "mpeg4, avi": ("a.avi", {"num_frames": 40, "codec": "mpeg4"}),
    "mpeg4, avi, B-frames": ("a.avi", {"num_frames": 40, "codec": "mpeg4", "b_frames": 2}),
    "mpeg2, ts": ("a.ts", {"num_frames": 100, "codec": "mpeg2video", "b_frames": 2, "frame_rate": 25}),
    "mpeg2, program stream": ("a.mpg", {"num_frames": 100, "codec": "mpeg2video", "b_frames": 2, "frame_rate": 25}),
    "vp9": ("a.webm", {"num_frames": 40, "codec": "libvpx-vp9"}),
    "ffv1": ("a.mkv", {"num_frames": 20, "codec": "ffv1"}),
    "mjpeg": ("a.avi", {"num_frames": 20, "codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    "gif": ("a.gif", {"num_frames": 20, "codec": "gif", "pix_fmt": "rgb8"}),
    "no times": ("a.h264", {"num_frames": 40, "b_frames": 2}),
    "hevc, open GOPs, ts": ("a.ts", {"num_frames": 100, "codec": "libx265", "gop": 20, "frame_rate": 25}),
    "mpeg4, open GOPs, avi": ("a.avi", {"num_frames": 100, "codec": "mpeg4", "b_frames": 2, "frame_rate": 25}),
    "mpeg4, B-frames, mp4": ("a.mp4", {"num_frames": 40, "codec": "mpeg4", "b_frames": 2}),
    "wmv2, asf": ("a.asf", {"num_frames": 40, "codec": "wmv2", "frame_rate": 25}),
    "mpeg2, mxf": ("a.mxf", {"num_frames": 40, "codec": "mpeg2video", "b_frames": 2, "frame_rate": 25}),
    "h263, 3gp": ("a.3gp", {"num_frames": 40, "codec": "h263", "size": (176, 144), "frame_rate": 25}),
    "flv1, flv": ("a.flv", {"num_frames": 40, "codec": "flv", "frame_rate": 25}),
    "vp8": ("a.webm", {"num_frames": 60, "codec": "libvpx"}),
    "vp9, frames ahead": ("a.webm", {"num_frames": 60, "codec": "libvpx-vp9", "codec_options": AHEAD}),
    "fields": (
        "a.ts",
        {"num_frames": 50, "codec": "mpeg2video", "b_frames": 2, "frame_rate": 25, "codec_options": FIELDS},
    ),
    "mkv, begins before 0": (
        "a.mkv",
        {"num_frames": 40, "b_frames": 2, "pts_seconds": [i / 10 - 1 for i in range(40)]},
    ),
    "ts, clock runs over": (
        "a.ts",
        {"num_frames": 100, "pts_seconds": [2**33 / 90_000 - 3 + i / 25 for i in range(100)], "frame_rate": 25},
    ),
    "rotated": ("a.mp4", {"num_frames": 20, "rotation": 90}),
}


@pytest.fixture(params=list(FILES))
def any_file(request: pytest.FixtureRequest, make_video: MakeVideo) -> tuple[Path, int]:
    """A file of each kind, and the number of its frames."""
    name, options = FILES[request.param]
    codec = options.get("codec", "libx264")
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {codec}")
    return make_video(name, **options), options["num_frames"]


def times_in_order(path: Path) -> list[float] | None:
    """Seconds from the first shown frame by plain decoding in order; None where PyAV gives no such times."""
    with av.open(str(path)) as container:
        frames = [(frame.pts, frame.time_base) for frame in container.decode(video=0)]
    if frames[0][0] is None:
        return None
    return [float((pts - frames[0][0]) * base) for pts, base in frames]


def random_times(rng: random.Random, times: list[float], count: int) -> list[tuple[float, int]]:
    """Times and the index of the frame on show then: where a frame appears, and well within the time it is shown."""
    ends = [*times[1:], 2 * times[-1] - times[-2]]
    chosen = []
    for _ in range(count):
        index = rng.randrange(len(times))
        part = rng.choice([0.0, rng.uniform(0.05, 0.9)])
        chosen.append((times[index] + part * (ends[index] - times[index]), index))
    return chosen


# Which frames


def test_whole_video_has_each_frame_once_at_its_time(any_file: tuple[Path, int]) -> None:
    path, num_frames = any_file
    frames = read_frames(path)
    assert frames.data.dtype == torch.uint8 and frames.data.shape[3] == 3
    assert frame_numbers(frames.data) == list(range(num_frames))
    times = times_in_order(path)
    if times is not None:
        np.testing.assert_allclose(frames.pts_seconds, times, atol=1e-9)
    assert frames.pts_seconds[0] == 0 and frames.num_held == 0


def test_random_access_equals_decoding_in_order(any_file: tuple[Path, int]) -> None:
    path, _ = any_file
    whole = read_frames(path)
    times = whole.pts_seconds.tolist()
    wanted, expected = zip(*random_times(random.Random(0), times, 50), strict=True)
    with VideoReader(path) as reader:
        for seconds, index in zip(wanted, expected, strict=True):  # one by one, to and fro
            frames = reader.frames_at([seconds])
            assert torch.equal(frames.data[0], whole.data[index]), seconds
            assert frames.pts_seconds[0] == times[index]
        frames = reader.frames_at(wanted)  # and together
    assert torch.equal(frames.data, whole.data[list(expected)])
    assert frames.pts_seconds.tolist() == [times[index] for index in expected]


def test_random_windows_equal_decoding_in_order(any_file: tuple[Path, int]) -> None:
    path, _ = any_file
    whole = read_frames(path)
    times = whole.pts_seconds.tolist()
    rng = random.Random(1)
    with VideoReader(path) as reader:
        for _ in range(15):
            (start, first), (end, _) = sorted(random_times(rng, times, 2))
            end += 0.01
            expected = [index for index, time in enumerate(times) if start <= time < end] or [first]
            frames = reader.frames_between(start, end)
            assert torch.equal(frames.data, whole.data[expected]), (start, end)


def test_duration_ends_with_the_last_frame(any_file: tuple[Path, int]) -> None:
    path, num_frames = any_file
    times = read_frames(path).pts_seconds.tolist()
    step = times[-1] - times[-2]
    assert probe(path).duration_seconds == pytest.approx(times[-1] + step, abs=0.6 * step)
    with pytest.raises(DataError, match="lies outside the video"):
        read_frames(path, at=[times[-1] + 2.5 * step])
    assert frame_numbers(read_frames(path, at=[times[-1] + 0.4 * step]).data) == [num_frames - 1]


@pytest.mark.parametrize("frame_rate", [25, Fraction(30000, 1001)])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
@pytest.mark.parametrize("start", [0, 0.02, 1 / 3, 1.98])
def test_a_second_has_as_many_frames_as_the_rate(
    make_video: MakeVideo, name: str, frame_rate: Any, start: float
) -> None:
    rate = round(frame_rate)
    path = make_video(name, num_frames=3 * rate, frame_rate=frame_rate)
    frames = read_frames(path, start_seconds=start, end_seconds=start + 1)
    assert len(frames.data) == rate
    first = next(i for i in range(rate * 3) if i / float(frame_rate) >= start - 1e-9)
    assert frame_numbers(frames.data) == list(range(first, first + rate))


def test_a_sample_is_the_same_in_a_container_that_rounds_times(make_video: MakeVideo) -> None:
    times = [i / 30 for i in range(0, 60, 7)]
    numbers = [
        frame_numbers(read_frames(make_video(name, num_frames=60, frame_rate=30), at=times).data)
        for name in ("a.mp4", "a.mkv", "a.flv")
    ]
    assert numbers[0] == numbers[1] == numbers[2] == list(range(0, 60, 7))


def test_variable_rate_goes_by_time_not_by_index(make_video: MakeVideo) -> None:
    path = make_video(num_frames=20, pts_seconds=[*(i / 10 for i in range(10)), *(3 + i / 10 for i in range(10))])
    still = read_frames(path, start_seconds=1.0, end_seconds=3.0)  # nothing appears: the frame on show since 0.9 s
    assert frame_numbers(still.data) == [9] and still.pts_seconds.tolist() == pytest.approx([0.9])
    assert frame_numbers(read_frames(path, start_seconds=0.85, end_seconds=3.15).data) == [9, 10, 11]
    assert frame_numbers(read_frames(path, at=[2.99, 3.0]).data) == [9, 10]


def test_window_shorter_than_a_frame_gives_the_frame_on_show(make_video: MakeVideo) -> None:
    assert frame_numbers(read_frames(make_video(), start_seconds=0.53, end_seconds=0.54).data) == [5]


def test_times_may_repeat_and_come_in_any_order(make_video: MakeVideo) -> None:
    frames = read_frames(make_video(), at=[2.0, 0.31, 0.35, 2.0, 0.0])
    assert frame_numbers(frames.data) == [20, 3, 3, 20, 0]
    assert frames.pts_seconds.tolist() == pytest.approx([2.0, 0.3, 0.3, 2.0, 0.0])


def test_last_frame_is_held_only_on_request_and_counted(make_video: MakeVideo) -> None:
    with VideoReader(make_video()) as reader:
        with pytest.raises(DataError, match=r"3\.1 s lies outside the video, which has 3\.000 s"):
            reader.frames_at([2.9, 3.1])
        frames = reader.frames_at([3.5, 2.8, 2.9, 3.0, 3.1], hold_last=True)
        assert frame_numbers(frames.data) == [29, 28, 29, 29, 29] and frames.num_held == 3
        assert frames.pts_seconds.tolist() == pytest.approx([2.9, 2.8, 2.9, 2.9, 2.9])
        with pytest.raises(DataError, match="lies outside"):  # a clip that begins after the end is no clip
            reader.frames_at([3.0, 3.1], hold_last=True)


def test_a_header_that_ends_a_little_later_shows_the_last_frame_longer(make_video: MakeVideo) -> None:
    with VideoReader(make_video()) as reader:
        reader._stream.duration_seconds = 3.2
        frames = reader.frames_at([2.95, 3.1, 3.25], hold_last=True)
        assert frame_numbers(frames.data) == [29, 29, 29] and frames.num_held == 1


# Windows and times that are refused


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (3, 4), (100, 103)])
def test_window_outside_is_an_error_that_names_path_window_and_duration(
    make_video: MakeVideo, start: float, end: float
) -> None:
    path = make_video()
    with pytest.raises(DataError) as error:
        read_frames(path, start_seconds=start, end_seconds=end)
    assert str(path) in str(error.value) and f"[{start:g}, {end:g})" in str(error.value)
    assert "3.000 s" in str(error.value)


@pytest.mark.parametrize(("start", "end"), [(1, 1), (2, 1), (float("nan"), 1), (1, float("nan")), (float("inf"), None)])
def test_empty_window_is_an_error(make_video: MakeVideo, start: float, end: float) -> None:
    with pytest.raises(DataError, match="is empty"):
        read_frames(make_video(), start_seconds=start, end_seconds=end)


@pytest.mark.parametrize("times", [[], [float("nan")], [0.0, float("inf")]])
def test_times_must_be_finite(make_video: MakeVideo, times: list[float]) -> None:
    with pytest.raises(DataError, match="at least one time"):
        read_frames(make_video(), at=times)


def test_time_before_the_first_frame_is_an_error(make_video: MakeVideo) -> None:
    with pytest.raises(DataError, match=r"-0\.1 s lies outside"):
        read_frames(make_video(), at=[-0.1, 1.0])


def test_window_partly_outside_gives_what_there_is_and_says_so(make_video: MakeVideo) -> None:
    path = make_video()
    early = read_frames(path, start_seconds=-1, end_seconds=0.2)
    assert frame_numbers(early.data) == [0, 1] and "starts before the video" in early.warnings[0]
    late = read_frames(path, start_seconds=2.8, end_seconds=9)
    assert frame_numbers(late.data) == [28, 29] and "ends after the video, which has 3.000 s" in late.warnings[0]
    assert read_frames(path, start_seconds=2.8, end_seconds=3.0).warnings == ()


def test_window_and_times_together_are_refused(make_video: MakeVideo) -> None:
    with pytest.raises(ConfigError, match="not both"):
        read_frames(make_video(), start_seconds=1.0, at=[1.0])


# Pixels


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotation_is_applied(make_video: MakeVideo, rotation: int) -> None:
    path = make_video(num_frames=5, rotation=rotation)
    info = probe(path)
    assert (info.width, info.height, info.rotation) == (64, 48, rotation)
    frames = read_frames(path)
    assert frames.data.shape == (5, 48, 64, 3) and frame_numbers(frames.data) == list(range(5))


def test_mirroring_is_applied(make_video: MakeVideo) -> None:
    assert frame_numbers(read_frames(make_video(num_frames=3, mirrored=True)).data) == [0, 1, 2]


@pytest.mark.parametrize("size", [(130, 98), (131, 97), (16, 12), (98, 130)])
def test_all_columns_are_right_at_odd_sizes(make_video: MakeVideo, size: tuple[int, int]) -> None:
    path = make_video("a.mkv", num_frames=2, codec="ffv1", pix_fmt="yuv444p", size=size)
    difference = read_frames(path).data[1].numpy().astype(int) - numbered_image(1, size)
    assert np.abs(difference).max() <= 3


@pytest.mark.parametrize("depth", [8, 10])
@pytest.mark.parametrize(("matrix", "red", "blue"), [(1, 0.2126, 0.0722), (5, 0.299, 0.114), (9, 0.2627, 0.0593)])
@pytest.mark.parametrize("full", [False, True])
def test_colors_follow_matrix_range_and_depth(
    tmp_path: Path, depth: int, matrix: int, red: float, blue: float, full: bool
) -> None:
    rgb = np.array([0.8, 0.3, 0.1])
    luma = float(rgb @ [red, 1 - red - blue, blue])
    chroma = [(rgb[2] - luma) / (2 - 2 * blue), (rgb[0] - luma) / (2 - 2 * red)]
    scale = 2 ** (depth - 8)
    levels = [255 * luma if full else 16 + 219 * luma, *(128 + (255 if full else 224) * value for value in chroma)]
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("ffv1", rate=10)
        stream.width, stream.height = 32, 32
        stream.pix_fmt = "yuv420p" if depth == 8 else "yuv420p10le"
        stream.codec_context.color_range, stream.codec_context.colorspace = (2 if full else 1), matrix
        frame = av.VideoFrame(32, 32, stream.pix_fmt)
        frame.color_range, frame.colorspace = stream.codec_context.color_range, matrix
        for plane, level in zip(frame.planes, levels, strict=True):
            samples = np.full(plane.buffer_size // (1 if depth == 8 else 2), round(level * scale))
            plane.update(samples.astype(np.uint8 if depth == 8 else np.uint16).tobytes())
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    decoded = read_frames(path).data[0].numpy().reshape(-1, 3)
    assert np.abs(decoded - 255 * rgb).max() <= 3


def test_gray_gives_three_equal_channels(make_video: MakeVideo) -> None:
    data = read_frames(make_video("a.mkv", num_frames=2, codec="ffv1", pix_fmt="gray")).data
    assert torch.equal(data[..., 0], data[..., 1]) and torch.equal(data[..., 1], data[..., 2])


def test_a_change_of_size_is_scaled_and_said(make_video: MakeVideo, tmp_path: Path) -> None:
    parts = [
        make_video(f"{i}.h264", num_frames=10, first_number=10 * i, size=size)
        for i, size in enumerate([(64, 48), (96, 72)])
    ]
    path = tmp_path / "both.h264"
    path.write_bytes(parts[0].read_bytes() + parts[1].read_bytes())
    frames = read_frames(path)
    assert frames.data.shape == (20, 48, 64, 3) and frame_numbers(frames.data) == list(range(20))
    assert any("size changes" in warning for warning in frames.warnings)


# What the file says of itself


def test_probe_tells_what_is_there(make_video: MakeVideo) -> None:
    path = make_video(num_frames=30, frame_rate=Fraction(30000, 1001), size=(96, 64))
    info = probe(path)
    assert (info.path, info.height, info.width, info.codec, info.rotation) == (str(path), 64, 96, "h264", 0)
    assert info.frame_rate == pytest.approx(29.97, abs=0.01) and info.warnings == ()
    assert info.duration_seconds == pytest.approx(1.001)


def test_duration_counts_the_video_alone(make_video: MakeVideo) -> None:
    for name in ("a.mp4", "a.mkv"):
        info = probe(make_video(name, audio_seconds=5.0))
        assert info.duration_seconds == pytest.approx(3.0)
    assert "the header says 5." in info.warnings[0]  # Matroska knows one duration for all streams


def test_duration_goes_by_the_packets_where_the_header_is_wrong(make_video: MakeVideo) -> None:
    times = [*(index / 10 for index in range(20)), 3.0, 4.0, 5.0, 6.0]
    info = probe(make_video(num_frames=24, pts_seconds=times, b_frames=2))
    assert 6.0 < info.duration_seconds <= 7.0  # MP4 adds up decoding times, which end before the last frame is shown
    assert "the header says 4.300 s" in info.warnings[0]


def test_files_without_times_are_counted_and_said(make_video: MakeVideo) -> None:
    frames = read_frames(make_video("a.h264"))
    assert any("stores no times" in warning for warning in frames.warnings)
    np.testing.assert_allclose(np.diff(frames.pts_seconds), np.diff(frames.pts_seconds)[0])


@pytest.mark.parametrize("name", ["a b.mp4", "a, b.mp4", "視頻 é.mp4", "12:30 cut.mp4", "100%d.mp4", "#1?.mp4"])
def test_any_file_name(make_video: MakeVideo, name: str) -> None:
    assert len(read_frames(make_video(name, num_frames=3)).data) == 3


@pytest.mark.parametrize("name", ["http:1.mp4", "concat:1.mp4", "data:1.mp4", "a:b.mp4"])
def test_a_colon_in_a_name_is_no_protocol(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(make_video(name, num_frames=3).parent)
    assert len(read_frames(name).data) == 3


def test_metadata_in_another_encoding(make_video: MakeVideo) -> None:
    path = make_video(num_frames=3, container_options={"metadata:title": "x"})
    with av.open(str(path)) as source, av.open(str(path.with_name("titled.mp4")), "w") as target:
        target.metadata["title"] = "TITLE"
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    titled = path.with_name("titled.mp4")
    assert b"TITLE" in titled.read_bytes()
    titled.write_bytes(titled.read_bytes().replace(b"TITLE", b"\xff\xfe\xe9\x80\x81"))
    assert len(read_frames(titled).data) == 3


def test_a_cover_picture_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        stream.disposition = 0x400  # attached picture
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuvj420p")))
        container.mux(stream.encode(None))
    with pytest.raises(DataError, match="no video stream"):
        probe(path)


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_a_broadcast_may_begin_anywhere(make_video: MakeVideo, codec: str) -> None:
    path = make_video("a.ts", num_frames=100, codec=codec, b_frames=2, gop=12, frame_rate=25)
    content = path.read_bytes()
    packet = 188 * (len(content) // 188 // 3)
    path.write_bytes(content[packet:])
    frames = read_frames(path)
    numbers = frame_numbers(frames.data)
    assert numbers == list(range(numbers[0], 100)) and 20 < numbers[0] < 50
    assert frames.pts_seconds[0] == 0
    assert frame_numbers(read_frames(path, at=[1.0]).data) == [numbers[0] + 25]


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_an_index_that_calls_every_frame_a_key_frame_is_not_believed(make_video: MakeVideo, codec: str) -> None:
    path = make_video(num_frames=100, gop=50, codec=codec)
    good = read_frames(path).data
    content = path.read_bytes()
    assert content.count(b"stss") == 1
    path.write_bytes(content.replace(b"stss", b"skip"))  # without this table all frames count as key frames
    assert torch.equal(read_frames(path, at=[7.3, 2.2, 9.9]).data, good[[73, 22, 99]])


# Files that are no videos

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "page": (b"<!DOCTYPE html><html>404</html>", "an HTML page"),
    "text": (b"this is not a video\n" * 9, "a text file"),
    "text cut within a letter": (b"a" + "ü".encode() * 4000, "a text file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "zip": (b"PK\x03\x04" + bytes(40), "a ZIP archive"),
    "zeros": (bytes(9000), "zero bytes only"),
    "noise": (random.Random(0).randbytes(9000), "Invalid data found"),
    "playlist": (b"ffconcat version 1.0\nfile 'a.mp4'\n", "a text file"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_what_is_no_video_is_named(make_video: MakeVideo, tmp_path: Path, kind: str) -> None:
    content, words = BROKEN[kind]
    make_video("a.mp4")  # what the playlist names: it must not be opened through it
    path = tmp_path / "video.mp4"
    path.write_bytes(content)
    for read in (probe, read_frames):
        with pytest.raises(DataError, match=words) as error:
            read(path)
        assert str(path) in str(error.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.mp4: .*no such file"):
        probe(tmp_path / "missing.mp4")
    with pytest.raises(DataError, match="a folder"):
        probe(tmp_path)
    (tmp_path / "link.mp4").symlink_to(tmp_path / "gone.mp4")
    with pytest.raises(DataError, match="link whose target does not exist"):
        probe(tmp_path / "link.mp4")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_an_image_is_no_video(tmp_path: Path, suffix: str) -> None:
    from PIL import Image

    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / f"a.{suffix}")
    with pytest.raises(DataError, match="image, not a video"):
        probe(tmp_path / f"a.{suffix}")
    shutil.copy(tmp_path / f"a.{suffix}", tmp_path / "a.mp4")
    with pytest.raises(DataError, match="image, not a video"):
        probe(tmp_path / "a.mp4")


def test_audio_alone_is_no_video(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no video stream \(the file holds: audio\)"):
        probe(make_audio(tmp_path / "a.mp4"))


def test_an_mp4_without_its_index_is_named(make_video: MakeVideo) -> None:
    path = make_video()
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])  # the index comes last
    with pytest.raises(DataError, match="without its index"):
        probe(path)
    assert "cut short" in describe_file(path)


# Damage


def packets_of(path: Path) -> list[tuple[int, int, float, bool]]:
    """Position, size, seconds and key flag of the packets."""
    with av.open(str(path)) as container:
        return [
            (packet.pos, packet.size, float(packet.pts * packet.time_base), packet.is_keyframe)
            for packet in container.demux(video=0)
            if packet.size
        ]


def overwrite(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def test_damage_is_refused_from_the_bad_frame_to_the_next_key_frame(make_video: MakeVideo) -> None:
    path = make_video(num_frames=50, gop=10)
    good = read_frames(path).data
    position, size, _, _ = packets_of(path)[24]
    overwrite(path, position + 4, bytes([0xFF] * (size - 4)))
    with VideoReader(path) as reader:
        for number in (0, 10, 23, 30, 49, 5, 31):
            assert torch.equal(reader.frames_at([number / 10]).data[0], good[number]), number
        for number in range(24, 30):
            with pytest.raises(DataError, match=r"damaged .*readable up to 2\.400 s and again from 3\.000 s"):
                reader.frames_at([number / 10])
        assert torch.equal(reader.frames_between(3.0, 5.0).data, good[30:])
        assert torch.equal(reader.frames_between(0.0, 2.4).data, good[:24])
        with pytest.raises(DataError, match="damaged"):
            reader.frames_between(2.0, 2.5)
        with pytest.raises(DataError, match="damaged"):
            reader.frames_at([2.45, 2.5, 2.6], hold_last=True)
    with pytest.raises(DataError, match="damaged"):
        read_frames(path)


def test_a_damaged_beginning_keeps_the_times_of_the_rest(make_video: MakeVideo) -> None:
    path = make_video(num_frames=30, gop=10)
    good = read_frames(path).data
    position, size, _, _ = packets_of(path)[0]
    overwrite(path, position + 4, bytes([0xFF] * (size - 4)))
    with pytest.raises(DataError, match=r"readable up to 0\.000 s and again from 1\.000 s"):
        read_frames(path)
    frames = read_frames(path, at=[1.0, 2.9])
    assert torch.equal(frames.data, good[[10, 29]]) and frames.pts_seconds.tolist() == pytest.approx([1.0, 2.9])


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
@pytest.mark.parametrize("b_frames", [0, 2])
def test_a_file_that_was_cut_short_gives_its_whole_frames_only(make_video: MakeVideo, name: str, b_frames: int) -> None:
    codec = "mpeg4" if name == "a.avi" else "libx264"
    options = {"container_options": {"movflags": "faststart"}} if name == "a.mp4" else {}
    whole = make_video(name, num_frames=50, b_frames=b_frames, codec=codec, **options)
    good = read_frames(whole).data
    content = whole.read_bytes()
    path = whole.with_name(f"cut{whole.suffix}")
    places = packets_of(whole)
    for cut in range(places[15][0], places[40][0], 97):
        path.write_bytes(content[:cut])
        assert missing_bytes(path) == len(content) - cut
        assert f"cut short: {len(content) - cut} bytes are missing" in probe(path).warnings[-1]
        with pytest.raises(DataError, match=r"damaged .*readable up to"):
            read_frames(path)
        with VideoReader(path) as reader:
            readable = []
            for number in range(50):
                try:
                    frames = reader.frames_at([number / 10])
                except DataError:
                    continue
                assert torch.equal(frames.data[0], good[number]), (cut, number)
                readable.append(number)
        assert len(readable) >= 10


@pytest.mark.parametrize("codec", ["mpeg4", "mjpeg"])
def test_an_avi_that_lost_its_place_is_refused_but_found_again(make_video: MakeVideo, codec: str) -> None:
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = make_video("a.avi", num_frames=50, codec=codec, gop=10, pix_fmt=pix_fmt)
    good = read_frames(path).data
    overwrite(
        path, packets_of(path)[13][0] - 8, bytes(8)
    )  # the head of a chunk: FFmpeg skips it, and counts on wrongly
    with VideoReader(path) as reader:
        assert torch.equal(reader.frames_between(0.0, 1.3).data, good[:13])
        with pytest.raises(DataError, match=r"damaged .*readable up to 1\.300 s"):
            reader.frames_at([1.35, 1.45, 1.55])
        assert torch.equal(reader.frames_at([1.2, 4.0, 4.5]).data, good[[12, 40, 45]])
    with pytest.raises(DataError, match="damaged"):
        read_frames(path)


def test_concealed_frames_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:  # noise, so that a frame is long enough to be damaged in its middle
        options = {"g": "10", "bf": "0", "coder": "0", "sc_threshold": "0", "threads": "1"}
        stream: Any = container.add_stream("libx264", rate=10, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for _ in range(20):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 256, (96, 128, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    good = read_frames(path).data
    position, size, _, _ = packets_of(path)[5]
    overwrite(path, position + size // 2, bytes([0xFF] * (size // 2)))
    with av.open(str(path)) as container:  # the decoder says nothing: it fills the hole and marks the frame
        assert [frame.is_corrupt for frame in container.decode(video=0)].index(True) == 5
    with VideoReader(path) as reader:
        for index in (5, 6, 9):
            with pytest.raises(DataError, match="damaged"):
                reader.frames_at([index / 10])
        assert torch.equal(reader.frames_at([0.4, 1.0, 1.9]).data, good[[4, 10, 19]])


def test_nothing_is_printed_about_damage(make_video: MakeVideo, capfd: pytest.CaptureFixture[str]) -> None:
    path = make_video(num_frames=50, gop=10)
    for position, size, _, _ in packets_of(path)[10:20]:
        overwrite(path, position + 4, bytes([0xFF] * (size - 4)))
    capfd.readouterr()
    with pytest.raises(DataError):
        read_frames(path)
    assert capfd.readouterr() == ("", "")


# Cost


def counted_next(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of the frames that the decoder gives out from now on."""
    seen: list[float] = []
    plain = FrameStream.next

    def counting(self: FrameStream) -> Any:
        shown = plain(self)
        if shown is not None:
            seen.append(shown.pts_seconds)
        return shown

    planned = PlannedReader._pictures

    def counting_planned(self: PlannedReader, *arguments: Any) -> Any:
        for frame in planned(self, *arguments):
            seen.append(self._stream.seconds(frame.pts))
            yield frame

    monkeypatch.setattr(FrameStream, "next", counting)
    monkeypatch.setattr(PlannedReader, "_pictures", counting_planned)
    return seen


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_only_what_is_needed_is_decoded(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    codec = "mpeg4" if name == "a.avi" else "libx264"
    path = make_video(name, num_frames=400, gop=20, codec=codec, size=(16, 12))
    seen = counted_next(monkeypatch)
    with VideoReader(path) as reader:
        reader.frames_at([0.3])
        assert len(seen) <= 4 + 2  # the first as it opens, 0 to 3, and in an AVI the one that ends it
        seen.clear()
        reader.frames_at([35.1, 0.25, 18.15])  # far apart: one key frame each, at most one GOP decoded
        assert len(seen) <= 4 + 4 + 22
        assert not any(2.1 < time < 17.9 or 20.1 < time < 33.9 for time in seen)
        seen.clear()
        reader.frames_at([35.2])  # further on in the same GOP: from here on it is decoded in order,
        seen.clear()
        reader.frames_at([35.25, 35.3, 35.4])  # without a seek
        assert len(seen) <= 4


def test_without_an_index_seeks_find_their_way(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video("a.ts", num_frames=1000, gop=25, codec="mpeg2video", b_frames=2, frame_rate=25, size=(16, 12))
    seen = counted_next(monkeypatch)
    with VideoReader(path) as reader:
        monkeypatch.setattr(FrameStream, "restart", lambda _: pytest.fail("read again from the beginning"))
        seen.clear()
        for seconds in (35.0, 35.2, 8.3, 22.0, 22.9):  # a late landing is tried again from earlier, not from the start
            frames = reader.frames_at([seconds])
            assert frames.pts_seconds[0] == pytest.approx(seconds, abs=0.041)
    assert len(seen) < 5 * 60


def test_a_useless_seek_is_not_made_twice(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video("a.ts", num_frames=1000, gop=1000, codec="mpeg2video", frame_rate=25, size=(16, 12))
    seeks = []
    plain = FrameStream.seek
    monkeypatch.setattr(FrameStream, "seek", lambda *arguments: seeks.append(1) or plain(*arguments))
    with VideoReader(path) as reader:
        times = [float(second) for second in range(0, 40, 4)]
        assert reader.frames_at(times).pts_seconds.tolist() == pytest.approx(times, abs=0.041)
    assert len(seeks) <= 4


def test_no_seek_where_it_saves_nothing(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(num_frames=100, gop=250)
    monkeypatch.setattr(FrameStream, "seek", lambda *_: pytest.fail("a seek back to the only key frame"))
    with VideoReader(path) as reader:
        assert frame_numbers(reader.frames_at([0.5, 3.0, 9.5]).data) == [5, 30, 95]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_files_are_closed_whatever_happens(make_video: MakeVideo, tmp_path: Path) -> None:
    good, text = make_video("a.mkv"), tmp_path / "text.mp4"
    text.write_text("no video")
    audio = make_audio(tmp_path / "audio.mp4")
    gc.collect()
    before = open_files()
    for _ in range(5):
        probe(good)
        with VideoReader(good) as reader:
            reader.frames_at([2.5, 0.1])
            with pytest.raises(DataError):
                reader.frames_at([99.0])
        for path in (text, audio):
            with pytest.raises(DataError):
                probe(path)
    assert open_files() == before


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads the memory use from /proc")
def test_memory_stays_flat_over_many_opens(make_video: MakeVideo) -> None:
    path = make_video(num_frames=10, size=(512, 384))  # one lost frame a time would be 90 MB

    def resident_megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    for index in range(400):
        if index == 100:
            before = resident_megabytes()
        with VideoReader(path) as reader:
            reader.frames_at([0.1, 0.8])
    assert resident_megabytes() - before < 20


def test_frames_outlive_the_reader(make_video: MakeVideo) -> None:
    with VideoReader(make_video()) as reader:
        frames = reader.frames_at([1.0, 2.0])
    gc.collect()
    assert frame_number(frames.data[1]) == 20
