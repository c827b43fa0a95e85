"""Real and damaged files of the folder that TWINREEL_TEST_DATA names; `test_bug_clips.py` has rows for odd ones."""

from __future__ import annotations

import csv
from pathlib import Path

import av
import numpy as np
import pytest

from twinreel.data.decode import VideoReader, probe
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.errors import DataError

# What opens but is damaged: how many frames from the beginning are right, and until which second the error says so.
DAMAGED = {
    "d_bitflips_60.mp4": (20, "0.800"),
    "d_truncated_60pct_faststart.mp4": (30, "1.200"),
    "d_webm_truncated.webm": (32, "1.067"),
    "d_zeroed_3kB_middle.mp4": (28, "1.120"),
}
UNDAMAGED = dict.fromkeys(
    ("d_bitflips_60.mp4", "d_truncated_60pct_faststart.mp4", "d_zeroed_3kB_middle.mp4"), "d_base.mp4"
)


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
        num_frames, last = 1, stream.restart()
        while (shown := stream.next()) is not None:
            assert shown.gap is None, row["path"]
            num_frames, last = num_frames + 1, shown
        assert stream.lost_at_end is None and num_frames == int(row["decoded_frames"]), row["path"]
        assert stream.duration_seconds == pytest.approx(last.end_seconds, abs=0.05), row["path"]
        stream.close()
