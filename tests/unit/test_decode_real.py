"""Real and odd files from the folder that TWINREEL_TEST_DATA names: each gives its right frames or a named error."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import av
import numpy as np
import pytest

from twinreel.data.decode import VideoReader, probe
from twinreel.data.frame_stream import FrameStream
from twinreel.errors import DataError

# What can't be opened, and the words that say why.
REFUSED = {
    "d_audio_only.m4a": "no video stream",
    "d_empty_0bytes.mp4": "an empty file",
    "d_jpeg_named.mp4": "a JPEG image",
    "d_text_named.mp4": "a text file",
    "d_truncated_no_moov.mp4": "without its index",
    "mp4parse_encrypted_cenc.mp4": "encrypted",
    "mp4parse_init_segment_only.mp4": "no frame of its video can be decoded",
    "mp4parse_opus_audio.mp4": "no video stream",
    "torchcodec_audio_only.mp3": "no video stream",
    "torchcodec_audio_only.wav": "no video stream",
}
# What opens but is damaged: how many frames from the beginning are right, and until which second the error says so.
DAMAGED = {
    "d_bitflips_60.mp4": (21, "0.840"),
    "d_truncated_60pct_faststart.mp4": (30, "1.200"),
    "d_webm_truncated.webm": (32, "1.067"),
    "d_zeroed_3kB_middle.mp4": (29, "1.160"),
}
UNDAMAGED = dict.fromkeys(
    ("d_bitflips_60.mp4", "d_truncated_60pct_faststart.mp4", "d_zeroed_3kB_middle.mp4"), "d_base.mp4"
)
SHOWN_SIZES = {"decord_rot90.mov": (320, 568), "decord_rot270.mov": (320, 568), "d_rotate90.mp4": (68, 160)}


def rows(test_data: Path, prefix: str) -> list[dict[str, str]]:
    with (test_data / "SOURCES.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["path"].startswith(prefix)]


def pictures_in_order(path: Path, chosen: set[int]) -> dict[int, np.ndarray]:
    """Some frames by plain decoding in order, as shown."""
    pictures = {}
    with av.open(str(path), metadata_errors="ignore") as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index in chosen:
                picture = frame.to_ndarray(format="rgb24", interpolation="POINT", threads=1)
                pictures[index] = np.rot90(picture, frame.rotation // 90)
    return pictures


def check_random_access(path: Path, num_frames: int) -> None:
    stream = FrameStream(str(path))
    times = [stream.first.pts_seconds]
    while (shown := stream.next()) is not None:
        times.append(shown.pts_seconds)
    stream.close()
    assert len(times) == num_frames and times == sorted(set(times))
    chosen = random.Random(0).choices(range(num_frames), k=5)
    pictures = pictures_in_order(path, {*chosen, num_frames - 1})
    with VideoReader(path) as reader:
        for index in [*chosen, num_frames - 1]:
            frames = reader.frames_at([times[index]])
            assert frames.pts_seconds[0] == times[index]
            np.testing.assert_array_equal(frames.data[0], pictures[index])
        assert times[-1] < reader.info.duration_seconds <= times[-1] + 1.0


def test_odd_files_give_right_frames_or_named_errors(test_data: Path) -> None:
    checked = 0
    for row in rows(test_data, "torture/"):
        path = test_data / row["path"]
        if path.name in REFUSED:
            with pytest.raises(DataError, match=REFUSED[path.name]) as error:
                probe(path)
            assert str(path) in str(error.value)
        elif path.name not in DAMAGED:
            assert row["pyav_result"] == "ok", f"{path.name}: say in this file what must become of it"
            check_random_access(path, int(row["decoded_frames"]))
            if path.name in SHOWN_SIZES:
                info = probe(path)
                assert (info.width, info.height) == SHOWN_SIZES[path.name]
        checked += 1
    assert checked >= len(REFUSED) + len(DAMAGED)


@pytest.mark.parametrize("name", list(DAMAGED))
def test_damaged_files_give_their_right_frames_alone(test_data: Path, name: str) -> None:
    path = test_data / "torture" / name
    num_right, until = DAMAGED[name]
    right = (
        pictures_in_order(test_data / "torture" / UNDAMAGED[name], set(range(num_right))) if name in UNDAMAGED else {}
    )
    with VideoReader(path) as reader:
        with pytest.raises(DataError, match=rf"damaged .*readable up to {until} s"):
            reader.frames_between()
        frames = reader.frames_between(0, float(until))
        assert len(frames.data) == num_right
        for index, picture in right.items():
            np.testing.assert_array_equal(frames.data[index], picture)
        with pytest.raises(DataError, match="damaged"):
            reader.frames_at([float(until) + 0.1], hold_last=True)


def test_warnings_name_what_is_odd(test_data: Path) -> None:
    for name, words in {
        "d_mpeg2_interlaced.ts": "interlaced",
        "mp4parse_hdr10.mp4": "high dynamic range",
        "d_raw_annexb.h264": "stores no times",
        "mp4parse_h264_1frame_sar_16_9.mp4": "not square",
        "torchcodec_nasa_13013.mp4": "other video streams",
        "d_webm_truncated.webm": "cut short",
    }.items():
        assert any(words in warning for warning in probe(test_data / "torture" / name).warnings), name


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["action/", "caption/"])
def test_ordinary_clips_are_whole(test_data: Path, prefix: str) -> None:
    for row in rows(test_data, prefix):
        if not row["codec"]:
            continue
        stream = FrameStream(str(test_data / row["path"]))
        num_frames, last = 1, stream.first
        while (shown := stream.next()) is not None:
            assert shown.gap is None, row["path"]
            num_frames, last = num_frames + 1, shown
        assert stream.lost_at_end is None and num_frames == int(row["decoded_frames"]), row["path"]
        assert stream.duration_seconds == pytest.approx(last.end_seconds, abs=0.05), row["path"]
        stream.close()
