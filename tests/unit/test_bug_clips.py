"""Every clip that bug reports name, and every odd file of the test data, has a row that says what must become of it.

A row is what is read (how many frames, when the last one appears, which warnings) or the words of the error. Random
access gives what decoding in order gives, at 50 random times a file.
"""

from __future__ import annotations

import io
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
import torch

from twinreel.data.decode import VideoReader, probe, read_frames
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.errors import DataError
from videos import frame_numbers, make_audio, make_video, textured_image


class Gives(NamedTuple):
    """What a file gives: its frames, the time of the last one, its size as shown, words of the warnings of `probe`."""

    num_frames: int
    last_seconds: float
    width: int
    height: int
    warnings: tuple[str, ...] = ()


class Damaged(NamedTuple):
    """What can be read of a damaged file: frames, the time of the last one, and the error of reading it all."""

    num_frames: int
    last_seconds: float
    error: str
    warnings: tuple[str, ...] = ()


NO_COUNT = "gives no number of frames"

# ---- the clips of the bug reports

BUG_CLIPS: dict[str, Gives | Damaged | str] = {
    "plain.mp4": Gives(150, 149 / 30, 128, 96),
    "full.mp4": Gives(300, 299 / 30, 128, 96),
    "truncated_nomoov.mp4": "without its index",  # B001
    "corrupt.mp4": Damaged(240, 299 / 30, "readable up to 4.000 s and again from 6.000 s"),  # B003
    "nocount.mkv": Gives(150, 149 / 30, 128, 96, ("150 by the packets",)),  # B005
    "vfr_gap.mp4": Gives(60, 119 / 30, 128, 96),  # B007
    "rot90.mp4": Gives(150, 149 / 30, 96, 128),  # B009
    "audio_only.mp4": "no video stream",  # B011
    "w130.mp4": Gives(30, 29 / 30, 130, 98),  # B013
    "odd131x97.mp4": Gives(30, 29 / 30, 131, 97),  # B013
    "start1p5.mkv": Gives(150, 149 / 30, 128, 96, ("the header says 6.500 s", NO_COUNT)),  # B015
    "longgop.mp4": Gives(300, 299 / 30, 128, 96),  # B017
    "short9.mp4": Gives(9, 8 / 30, 128, 96),  # B025
    "hevc10.mp4": Gives(30, 29 / 30, 128, 96),  # B029
    "a clip, 視頻 é.mp4": Gives(150, 149 / 30, 128, 96),  # B031
    "empty.mp4": "an empty file",  # B028
    "html.mp4": "an HTML page",  # B028
    "lfs.mp4": "git-lfs pointer",  # B028
    "full709.mp4": Gives(30, 29 / 30, 128, 96),  # B030
    "gray.mp4": Gives(30, 29 / 30, 128, 96),  # B030
}
SIZE = (128, 96)


def _vfr_gap(path: Path) -> None:
    times = [(index if index < 30 else index + 60) / 30 for index in range(60)]
    make_video(path, num_frames=60, frame_rate=30, size=SIZE, pts_seconds=times, gop=250)


def _corrupt(path: Path) -> None:
    """Two of ten seconds are damaged, as a broken download is."""
    make_video(path, num_frames=300, frame_rate=30, size=SIZE, gop=30, picture=textured_image)
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    content, rng = bytearray(path.read_bytes()), random.Random(0)
    for position, size in packets[120:180]:
        for at in range(position + 8, position + size - 64, 500):
            content[at : at + 64] = rng.randbytes(64)
    path.write_bytes(content)


def _cut(path: Path) -> None:
    make_video(path, num_frames=150, frame_rate=30, size=SIZE, gop=30)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _full_range(path: Path) -> None:
    """BT.709 with all 256 levels, marked as such."""
    options = {"preset": "veryfast", "crf": "10", "x264-params": "colormatrix=bt709:fullrange=on"}
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuvj420p"
        stream.codec_context.color_range, stream.codec_context.colorspace = 2, 1
        for index in range(30):
            frame = av.VideoFrame.from_ndarray(textured_image(index, SIZE), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuvj420p", dst_colorspace=1, dst_color_range=2)))
        container.mux(stream.encode(None))


def _plain(**options: Any) -> Callable[[Path], object]:
    settings = {"num_frames": 150, "frame_rate": 30, "size": SIZE, "gop": 30, **options}
    return lambda path: make_video(path, **settings)


MAKERS: dict[str, Callable[[Path], object]] = {
    "plain.mp4": _plain(),
    "full.mp4": _plain(num_frames=300, container_options={"movflags": "faststart"}),
    "truncated_nomoov.mp4": _cut,
    "corrupt.mp4": _corrupt,
    "nocount.mkv": _plain(),
    "vfr_gap.mp4": _vfr_gap,
    "rot90.mp4": _plain(size=SIZE[::-1], rotation=90),
    "audio_only.mp4": lambda path: make_audio(path, 2.0),
    "w130.mp4": _plain(num_frames=30, size=(130, 98)),
    "odd131x97.mp4": _plain(num_frames=30, size=(131, 97), pix_fmt="yuv444p"),
    "start1p5.mkv": _plain(pts_seconds=[1.5 + index / 30 for index in range(150)]),
    "longgop.mp4": _plain(num_frames=300, gop=250, b_frames=3),
    "short9.mp4": _plain(num_frames=9),
    "hevc10.mp4": _plain(num_frames=30, codec="libx265", pix_fmt="yuv420p10le", picture=textured_image),
    "a clip, 視頻 é.mp4": _plain(),
    "empty.mp4": lambda path: path.write_bytes(b""),
    "html.mp4": lambda path: path.write_text("<html>404</html>"),
    "lfs.mp4": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "full709.mp4": _full_range,
    "gray.mp4": _plain(num_frames=30, pix_fmt="gray", picture=textured_image),
}


@pytest.fixture(scope="module")
def bug_clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bug_clips")
    for name, make in MAKERS.items():
        make(folder / name)
    return folder


def check_row(path: Path, row: Gives | Damaged | str) -> None:
    """A file becomes what its row says, read as a path, as bytes and as a file object."""
    if isinstance(row, str):
        for source in (path, path.read_bytes(), io.BytesIO(path.read_bytes())):
            with pytest.raises(DataError, match=row) as error:
                probe(source)
            assert str(error.value).startswith(f"{path}:" if source is path else "<"), error.value
        return
    info = probe(path)
    for words in row.warnings:
        assert any(words in warning for warning in info.warnings), (words, info.warnings)
    assert len(info.warnings) == len(row.warnings), info.warnings
    if isinstance(row, Damaged):
        with pytest.raises(DataError, match="damaged") as error:
            read_frames(path)
        assert row.error in str(error.value), error.value
        frames = read_frames(path, allow_partial=True)
        assert "the video is damaged" in frames.warnings[-1]
        times = frames.pts_seconds.tolist()
    else:
        assert (info.width, info.height) == (row.width, row.height)
        times = shown_times(path)
        with VideoReader(path) as reader:
            assert reader.frame_times() == times
        assert info.num_frames in (None, row.num_frames)
        assert times[-1] < info.duration_seconds
    assert len(times) == row.num_frames
    assert times == sorted(set(times)) and times[0] == 0
    assert times[-1] == pytest.approx(row.last_seconds, abs=2e-3)
    with VideoReader(io.BytesIO(path.read_bytes())) as reader:  # other doors, the same frames
        assert reader.info.height == info.height
        assert torch.equal(reader.frames_at(times[:1]).data, read_frames(path, at=times[:1]).data)


def shown_times(path: Path) -> list[float]:
    return [shown.pts_seconds for shown in in_order(path)]


def in_order(path: Path) -> Iterator[Any]:
    stream = FrameStream(path)
    shown = stream.restart()
    while shown is not None:
        assert shown.gap is None
        yield shown
        shown = stream.next()
    assert stream.lost_at_end is None
    stream.close()


def pictures_in_order(path: Path, chosen: set[int]) -> dict[int, np.ndarray]:
    """Some frames by plain decoding in order, as shown."""
    pictures = {}
    with av.open(f"file:{path}", metadata_errors="replace") as container:
        streams = container.streams.video
        default = [stream for stream in streams if stream.disposition.value & 1]
        for index, frame in enumerate(container.decode((default or streams)[0])):
            if index in chosen:
                picture = frame.to_ndarray(format="rgb24", interpolation="POINT", threads=1)
                pictures[index] = np.rot90(picture, frame.rotation // 90)
    return pictures


def check_random_access(path: Path, count: int) -> None:
    """Frames on show at random times, wherever the reader stood before, are those of decoding in order."""
    times = shown_times(path)
    rng = random.Random(0)
    ends = [*times[1:], times[-1] + 1e-3]
    asked = [(rng.uniform(0.0, 0.9), rng.randrange(len(times))) for _ in range(count)]
    pictures = pictures_in_order(path, {index for _, index in asked})
    with VideoReader(path) as reader:
        for part, index in asked:
            frames = reader.frames_at([times[index] + part * (ends[index] - times[index])])
            assert frames.pts_seconds[0] == times[index]
            np.testing.assert_array_equal(frames.data[0], pictures[index], err_msg=f"{path.name}, frame {index}")


def test_each_bug_clip_has_a_row_and_a_maker() -> None:
    assert BUG_CLIPS.keys() == MAKERS.keys()


@pytest.mark.parametrize("name", list(BUG_CLIPS))
def test_bug_clips_become_what_their_rows_say(bug_clips: Path, name: str) -> None:
    check_row(bug_clips / name, BUG_CLIPS[name])


@pytest.mark.parametrize("name", [name for name, row in BUG_CLIPS.items() if isinstance(row, Gives)])
def test_random_access_to_bug_clips(bug_clips: Path, name: str) -> None:
    check_random_access(bug_clips / name, 50)


def test_a_count_that_is_missing_changes_nothing(bug_clips: Path) -> None:  # B005
    times = [index * 5 / 8 for index in range(8)]
    plain, counted = (frame_numbers(read_frames(bug_clips / n, at=times).data) for n in ("plain.mp4", "nocount.mkv"))
    assert plain == counted == [int(time * 30 + 1e-9) for time in times]


def test_what_is_given_of_a_broken_download_is_right(bug_clips: Path, tmp_path: Path) -> None:  # B003
    frames = read_frames(bug_clips / "corrupt.mp4", allow_partial=True)
    whole = make_video(tmp_path / "a.mp4", num_frames=300, frame_rate=30, size=SIZE, gop=30, picture=textured_image)
    assert torch.equal(frames.data, read_frames(whole).data[[*range(120), *range(180, 300)]])
    assert frames.num_missing == 60 and "lost from 4.000 s to 6.000 s; about 60" in frames.warnings[-1]


def test_a_window_of_a_gap_goes_by_time(bug_clips: Path) -> None:  # B007
    frames = read_frames(bug_clips / "vfr_gap.mp4", start_seconds=1.0, end_seconds=3.0)
    assert frame_numbers(frames.data) == [29] and frames.pts_seconds.tolist() == pytest.approx([29 / 30])
    assert frame_numbers(read_frames(bug_clips / "vfr_gap.mp4", at=[3.0]).data) == [30]


def test_a_first_time_that_is_not_0_is_0(bug_clips: Path) -> None:  # B015
    late, plain = (read_frames(bug_clips / n, start_seconds=0, end_seconds=1) for n in ("start1p5.mkv", "plain.mp4"))
    assert len(late.data) == 30 and torch.equal(late.data, plain.data)


@pytest.mark.parametrize("window", [(-1, 0), (5, 6), (100, 103)])
def test_a_window_outside_names_path_window_and_duration(bug_clips: Path, window: tuple[float, float]) -> None:
    path = bug_clips / "plain.mp4"  # B026
    with pytest.raises(DataError) as error:
        read_frames(path, start_seconds=window[0], end_seconds=window[1])
    for words in (str(path), f"[{window[0]}, {window[1]})", "5.000 s"):
        assert words in str(error.value)


def test_gray_has_three_equal_channels(bug_clips: Path) -> None:  # B030
    data = read_frames(bug_clips / "gray.mp4").data
    assert torch.equal(data[..., 0], data[..., 1]) and torch.equal(data[..., 1], data[..., 2])


@pytest.mark.parametrize("name", ["hevc10.mp4", "full709.mp4", "gray.mp4", "w130.mp4", "odd131x97.mp4", "rot90.mp4"])
def test_colors_are_those_of_ffmpeg(bug_clips: Path, name: str) -> None:  # B013 B029 B030
    check_colors(bug_clips / name)


def check_colors(path: Path) -> None:
    """Within 3 levels, on average, of what the ffmpeg program gives."""
    if not shutil.which("ffmpeg"):
        pytest.skip("the ffmpeg program is not on PATH")
    frames = read_frames(path, end_seconds=1.0).data.numpy()
    command = ["ffmpeg", "-v", "error", "-i", f"file:{path}", "-frames:v", str(len(frames)), "-fps_mode", "passthrough"]
    raw = subprocess.run([*command, "-pix_fmt", "rgb24", "-f", "rawvideo", "-"], capture_output=True, check=True)
    theirs = np.frombuffer(raw.stdout, np.uint8).reshape(frames.shape)
    assert np.abs(frames.astype(int) - theirs).mean() < 3


# ---- odd files of the test data

SQUARE = "not square"
ODD_FILES: dict[str, Gives | Damaged | str] = {
    "d_audio_only.m4a": r"no video stream \(the file holds: audio\)",
    "d_empty_0bytes.mp4": "an empty file",
    "d_jpeg_named.mp4": "a JPEG image",
    "d_text_named.mp4": "a text file",
    "d_truncated_no_moov.mp4": "without its index",
    "mp4parse_encrypted_cenc.mp4": "encrypted",
    "mp4parse_init_segment_only.mp4": "no frame of its video can be decoded",
    "mp4parse_opus_audio.mp4": "no video stream",
    "torchcodec_audio_only.mp3": "no video stream",
    "torchcodec_audio_only.wav": "no video stream",
    "d name with spaces & ünïcode 视频.mp4": Gives(50, 1.96, 160, 68),
    "d_1fps.mp4": Gives(2, 1, 160, 68),
    "d_base.mp4": Gives(50, 1.96, 160, 68),
    "d_bitflips_60.mp4": Damaged(20, 0.76, "readable up to 0.800 s"),
    "d_ffv1.mkv": Gives(30, 0.968, 96, 54, ("the header says 4.260 s, the packets of the video 1.001 s", NO_COUNT)),
    "d_flv1.flv": Gives(60, 1.969, 160, 90, (NO_COUNT,)),
    "d_gap_2s.mp4": Gives(60, 3.97063, 160, 90),
    "d_h263.3gp": Gives(60, 1.96863, 176, 144, (SQUARE,)),
    "d_h264_gray.mkv": Gives(50, 1.96, 160, 68, (NO_COUNT,)),
    "d_h264_yuv444.mp4": Gives(50, 1.96, 160, 68),
    "d_mjpeg.avi": Gives(60, 1.96863, 160, 90),
    "d_moov_at_end.mp4": Gives(50, 1.96, 160, 68),
    "d_mpeg2_interlaced.ts": Gives(
        50, 1.96, 352, 288, ("the video is interlaced: both fields are woven into one frame", SQUARE, NO_COUNT)
    ),
    "d_odd_161x91_444.mp4": Gives(25, 0.96, 161, 91, (SQUARE,)),
    "d_one_frame.mp4": Gives(1, 0, 160, 68),
    "d_prores.mov": Gives(30, 0.967633, 160, 90),
    "d_raw_annexb.h264": Gives(
        50,
        1.96,
        160,
        68,
        (
            "the file stores no times: frames are counted at its 25 Hz",
            "the header gives no duration: 2.000 s by the times of the packets",
        ),
    ),
    "d_rawvideo.avi": Gives(30, 0.967633, 96, 54),
    "d_rotate180.mp4": Gives(50, 1.96, 160, 68),
    "d_rotate90.mp4": Gives(50, 1.96, 68, 160),
    "d_single_keyframe_longgop.mp4": Gives(250, 9.96, 160, 68),
    "d_testsrc.mp4": Gives(13, 0.48, 64, 64),
    "d_tiny_16x2.avi": Gives(25, 0.96, 16, 2, (SQUARE,)),
    "d_truncated_60pct_faststart.mp4": Damaged(
        30, 1.16, "readable up to 1.200 s", ("the file is cut short: 5696 bytes are missing",)
    ),
    "d_two_frames.mp4": Gives(2, 0.04, 160, 68),
    "d_vfr.mp4": Gives(
        46,
        3.9039,
        160,
        90,
        (
            "the header says 3.403 s, the packets of the video 4.204 s",
            "the header says 13.5159 Hz, by the times of the packets it is 11.5269 Hz on average",
        ),
    ),
    "d_vp8_vorbis.webm": Gives(
        60, 1.969, 160, 90, ("the header says 4.292 s, the packets of the video 2.002 s", NO_COUNT)
    ),
    "d_vp9_10bit.webm": Gives(50, 1.96, 160, 90, (SQUARE, NO_COUNT)),
    "d_vp9_opus.webm": Gives(
        60, 1.969, 160, 90, ("the header says 4.267 s, the packets of the video 2.002 s", NO_COUNT)
    ),
    "d_webm_named.mp4": Gives(
        60, 1.969, 160, 90, ("the header says 4.267 s, the packets of the video 2.002 s", NO_COUNT)
    ),
    "d_webm_truncated.webm": Damaged(
        32,
        1.034,
        "readable up to 1.067 s",
        ("the header says 4.292 s, the packets of the video 1.067 s", "the file is cut short: 8552 bytes are missing"),
    ),
    "d_wmv2.wmv": Gives(60, 1.969, 160, 90, (NO_COUNT,)),
    "d_xvid_mp3.avi": Gives(
        60,
        2.13547,
        160,
        90,
        (
            "the header counts 65 frames, the packets 60",
            "the header says 29.97 Hz, by the times of the packets it is 27.6286 Hz on average",
        ),
    ),
    "d_zeroed_3kB_middle.mp4": Damaged(28, 1.08, "readable up to 1.120 s"),
    "decord_flipping_a_pancake.mkv": Gives(310, 10.3, 426, 240, (NO_COUNT,)),
    "decord_rot0.mov": Gives(3, 0.0666667, 568, 320),
    "decord_rot270.mov": Gives(3, 0.0666667, 320, 568),
    "decord_rot90.mov": Gives(3, 0.0666667, 320, 568),
    "energon_sync_test.mp4": Gives(1891, 63, 192, 108),
    "fight_fi057_hd.mp4": Gives(60, 1.96667, 1280, 720),
    "imageio_cockatoo.mp4": Gives(280, 13.95, 1280, 720),
    "imageio_newtonscradle.gif": Gives(
        36, 0.8, 200, 150, ("the header says 50 Hz, by the times of the packets it is 43.75 Hz on average",)
    ),
    "imageio_realshort.mp4": Gives(36, 1.16589, 320, 240),
    "mmaction2_test.avi": Gives(164, 6.52, 320, 240),
    "mp4parse_av1_encrypted.mp4": Gives(24, 0.958318, 160, 90, (NO_COUNT,)),
    "mp4parse_h264_1frame_sar_16_9.mp4": Gives(1, 0, 640, 480, (SQUARE,)),
    "mp4parse_hdr10.mp4": Gives(3, 0.08, 2, 2, ("the video has a high dynamic range: not tone-mapped",)),
    "mp4parse_hevc_1frame.mp4": Gives(1, 0, 640, 480),
    "mp4parse_minimal.mp4": Gives(1, 0, 320, 240),
    "mp4parse_mpeg4_1frame.mp4": Gives(1, 0, 176, 144, (SQUARE,)),
    "mp4parse_rotation_90.mp4": Gives(1, 0, 60, 100),
    "mp4parse_tiny_av1.mp4": Gives(1, 0, 64, 64),
    "opencv_Megamind_bugy.avi": Gives(270, 8.96667, 720, 528),
    "tgifqa_action_1.gif": Gives(33, 4.48, 180, 150),
    "torchcodec_av1_video.mkv": Gives(125, 4.96, 640, 360, (NO_COUNT,)),
    "torchcodec_h265_10bits.mp4": Gives(30, 0.966667, 200, 200),
    "torchcodec_h265_video.mp4": Gives(10, 0.9, 128, 128),
    "torchcodec_nasa_13013.mp4": Gives(
        325, 12.96, 320, 180, ("other video streams are left out (1): number 0 is read",)
    ),
}
# The same pictures as another file has: what is given of a damaged one is compared with them.
WHOLE = dict.fromkeys(
    ("d_bitflips_60.mp4", "d_truncated_60pct_faststart.mp4", "d_zeroed_3kB_middle.mp4"), "d_base.mp4"
) | {"d_webm_truncated.webm": "d_vp8_vorbis.webm"}


def odd_file(test_data: Path, name: str) -> Path:
    path = test_data / "torture" / name
    if not path.is_file():
        pytest.fail(f"{path} is missing")
    return path


def test_each_odd_file_has_a_row(test_data: Path) -> None:
    assert {path.name for path in (test_data / "torture").iterdir()} == ODD_FILES.keys()


@pytest.mark.parametrize("name", list(ODD_FILES))
def test_odd_files_become_what_their_rows_say(test_data: Path, name: str) -> None:
    check_row(odd_file(test_data, name), ODD_FILES[name])


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name, row in ODD_FILES.items() if isinstance(row, Gives)])
def test_random_access_to_odd_files(test_data: Path, name: str, count: int) -> None:
    check_random_access(odd_file(test_data, name), count)


@pytest.mark.parametrize("name", list(WHOLE))
def test_what_is_given_of_damaged_files_is_right(test_data: Path, name: str) -> None:
    frames = read_frames(odd_file(test_data, name), allow_partial=True)
    whole = read_frames(odd_file(test_data, WHOLE[name]))
    place = {round(time, 3): index for index, time in enumerate(whole.pts_seconds.tolist())}
    assert torch.equal(frames.data, whole.data[[place[round(time, 3)] for time in frames.pts_seconds.tolist()]])


@pytest.mark.parametrize(
    "name", ["torchcodec_h265_10bits.mp4", "d_vp9_10bit.webm", "d_h264_yuv444.mp4", "d_prores.mov", "decord_rot90.mov"]
)
def test_colors_of_odd_files_are_those_of_ffmpeg(test_data: Path, name: str) -> None:
    check_colors(odd_file(test_data, name))
