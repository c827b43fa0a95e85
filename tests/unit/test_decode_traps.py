"""Sound files that were once refused or answered with another frame, and seeks that never land."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import av
import pytest

from twinreel.data.decode import VideoReader, read_frames
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.data.storage import open_video
from twinreel.data.transforms import Cut
from twinreel.errors import ConfigError, DataError
from videos import frame_numbers

MakeVideo = Callable[..., Path]


@pytest.mark.parametrize("num_frames", [50, 51, 52, 53, 59, 60, 61, 62])
@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_the_end_of_an_avi_with_b_frames(make_video: MakeVideo, codec: str, num_frames: int) -> None:
    """The decoder is emptied there, and then does not say when its frames are."""
    path = make_video("a.avi", num_frames=num_frames, gop=12, b_frames=2, codec=codec, frame_rate=25)
    with VideoReader(path) as reader:
        times = reader.frames_between().pts_seconds.tolist()
    for number in range(num_frames - 5, num_frames):
        with VideoReader(path) as reader:
            assert frame_numbers(reader.frames_at([times[number]]).data) == [number]
            assert frame_numbers(reader.frames_at([times[12]]).data) == [12]


def test_constant_rate_mpeg2_fills_up_with_zeros(make_video: MakeVideo) -> None:
    rate = {"b": "1000000", "minrate": "1000000", "maxrate": "1000000", "bufsize": "400000"}
    path = make_video("a.ts", num_frames=60, codec="mpeg2video", gop=15, frame_rate=25, codec_options=rate)
    assert path.stat().st_size > 200_000  # it is filled up
    assert frame_numbers(read_frames(path).data) == list(range(60))


def cut_without_decoding(source: Path, target: Path, seconds: float) -> None:
    """As `ffmpeg -ss SECONDS -i source -c copy target`: begins at the key frame before, with an edit list."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        video = old.streams.video[0]
        out = new.add_stream_from_template(video)
        assert video.time_base is not None
        shift = round(seconds / video.time_base)
        old.seek(shift, stream=video)
        for packet in old.demux(video):
            if packet.size and packet.dts is not None and packet.pts is not None:
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = out
                new.mux(packet)


def test_an_open_gop_that_was_cut_without_decoding(make_video: MakeVideo, tmp_path: Path) -> None:
    options = {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0", "preset": "fast"}
    path = make_video("a.mp4", num_frames=100, gop=12, b_frames=3, codec_options=options)
    cut_without_decoding(path, tmp_path / "cut.mp4", 3.35)
    numbers = frame_numbers(read_frames(tmp_path / "cut.mp4").data)
    assert numbers == list(range(numbers[0], 100)) and 30 <= numbers[0] <= 36


def test_seeks_that_never_land_are_given_up(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video that is refreshed bit by bit has no key frames: it is read on, not from its beginning each time."""
    options = {"x264-params": "intra-refresh=1:keyint=20", "preset": "fast"}
    path = make_video("a.mp4", num_frames=200, gop=20, codec_options=options)
    restarts = []
    plain = FrameStream.restart
    monkeypatch.setattr(FrameStream, "restart", lambda self: restarts.append(1) or plain(self))
    with VideoReader(path) as reader:
        numbers = frame_numbers(reader.frames_at([index / 2 for index in range(40)]).data)
    assert numbers == list(range(0, 200, 5)) and len(restarts) <= 4


def test_a_file_that_goes_away_is_an_error_that_names_it(make_video: MakeVideo) -> None:
    path = make_video("a.mkv", num_frames=30)
    stream = FrameStream(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.mkv: can't be read any more"):
        _ = stream.missing_bytes
    stream.close()


@pytest.mark.parametrize("cut", [Cut(0, 0, 60, 60, 8), Cut(-1, 0, 8, 8, 8), Cut(0, 0, 8, 8, 0)])
def test_a_cut_outside_the_picture(make_video: MakeVideo, cut: Cut) -> None:
    with (
        VideoReader(make_video()) as reader,
        pytest.raises(ConfigError, match="does not lie in the picture"),
    ):
        reader.frames_at([0.0], cut=cut)


def test_one_time_is_no_list(make_video: MakeVideo) -> None:
    with pytest.raises(ConfigError, match=r"times are a list of seconds; got 1.0: write \[1.0\]"):
        read_frames(make_video(), at=1.0)  # type: ignore[arg-type]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(DataError, match="not a regular file"):
        open_video(str(tmp_path / "pipe.mp4"))
