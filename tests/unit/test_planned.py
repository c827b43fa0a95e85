"""A planned read gives what decoding in order gives, decodes less, and hands over what it can't be sure of."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinreel.data.decode import VideoReader
from twinreel.data.decode.planned import NotPlain, PlannedReader
from twinreel.data.transforms import Cut, cut_frames
from videos import frame_numbers

MakeVideo = Callable[..., Path]

FILES: dict[str, dict[str, Any]] = {
    "b-frames": {"name": "a.mp4", "b_frames": 3, "gop": 25},
    "one key frame": {"name": "a.mp4", "b_frames": 2, "gop": 1000},
    "open GOP": {"name": "a.mp4", "b_frames": 3, "gop": 12, "codec_options": {"x264-params": "open-gop=1"}},
    "open GOP in Matroska": {
        "name": "a.mkv", "b_frames": 3, "gop": 12, "codec_options": {"x264-params": "open-gop=1"},
    },
    "B-frames as references": {
        "name": "a.mp4", "b_frames": 5, "gop": 30, "codec_options": {"x264-params": "b-pyramid=2"},
    },
    "slices": {"name": "a.mp4", "b_frames": 2, "gop": 20, "codec_options": {"x264-params": "slices=3"}},
    "HEVC": {"name": "a.mp4", "codec": "libx265", "gop": 20, "size": (96, 64)},
    "HEVC with temporal layers": {
        "name": "a.mp4", "codec": "libx265", "size": (96, 64),
        "codec_options": {
            "preset": "fast", "x265-params": "log-level=none:keyint=20:bframes=4:temporal-layers=1:pools=1",
        },
    },
    "HEVC, open GOP": {
        "name": "a.mkv", "codec": "libx265", "size": (96, 64),
        "codec_options": {"preset": "fast", "x265-params": "log-level=none:keyint=20:open-gop=1:bframes=4:pools=1"},
    },
    "VP9": {"name": "a.webm", "codec": "libvpx-vp9", "gop": 20},
    "VP8 with hidden frames": {
        "name": "a.webm", "codec": "libvpx", "gop": 40,
        "codec_options": {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "b": "200k", "crf": "10"},
    },
    "MPEG-4": {"name": "a.mp4", "codec": "mpeg4", "b_frames": 2, "gop": 15},
    "variable rate": {
        "name": "a.mp4", "b_frames": 2, "gop": 16,
        "pts_seconds": [(index + (index > 40) * 30 + index % 3 * 0.2) / 10 for index in range(120)],
    },
    "a fragmented file": {
        "name": "a.mp4", "b_frames": 2, "gop": 16, "container_options": {"movflags": "frag_keyframe+empty_moov"},
    },
}  # fmt: skip


def made(make_video: MakeVideo, kind: str) -> Path:
    options = dict(FILES[kind])
    return make_video(options.pop("name"), **({"num_frames": 120, "size": (64, 48)} | options))


@pytest.mark.parametrize("kind", FILES)
def test_a_planned_read_equals_decoding_in_order(make_video: MakeVideo, kind: str) -> None:
    path = made(make_video, kind)
    with VideoReader(path) as reader:
        whole = reader.frames_between()
        tolerance = reader.tolerance
    pts = whole.pts_seconds.tolist()
    draw = random.Random(kind)
    for _ in range(40):
        start = draw.uniform(0, pts[-1])
        spread = draw.choice([0.0, 0.05, 0.1, 0.31, 2.0])
        times = sorted(min(start + step * spread, pts[-1]) for step in range(draw.choice([1, 2, 7])))
        expected = [bisect.bisect_right(pts, time + tolerance) - 1 for time in times]
        with VideoReader(path) as reader:
            frames = reader.frames_at(times)
            assert torch.equal(frames.data, whole.data[expected])
            assert frames.pts_seconds.tolist() == [pts[index] for index in expected]
            answers = list(PlannedReader(reader._stream).frames_at(times))
        answered = {position: answer.pts_seconds for answer in answers for position in answer.positions}
        assert [answered[position] for position in range(len(times))] == [pts[index] for index in expected]


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times (ticks) of the packets that are decoded by planned reads from now on."""
    seen: list[int] = []
    plain = PlannedReader._needed

    def counting(self: PlannedReader, *arguments: Any) -> Any:
        for packet, comes in plain(self, *arguments):
            seen.append(packet.pts)
            yield packet, comes

    monkeypatch.setattr(PlannedReader, "_needed", counting)
    return seen


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_frames_that_nobody_needs_are_not_decoded(
    make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    options = {"x264-params": "b-adapt=0:b-pyramid=0", "preset": "veryfast"}
    if codec == "libx265":
        options = {"x265-params": "log-level=none:keyint=100:b-adapt=0:bframes=3:b-pyramid=0:pools=1"}
    path = make_video("a.mp4", num_frames=100, gop=100, b_frames=3, codec=codec, size=(96, 64), codec_options=options)
    seen = decoded(monkeypatch)
    with VideoReader(path) as reader:
        frames = reader.frames_at([8.05])
    assert frame_numbers(frames.data) == [80]
    assert 20 <= len(seen) <= 24  # every fourth frame up to 80, and not the three between


def test_a_read_that_goes_on_in_a_group_does_not_begin_it_again(
    make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_video("a.mp4", num_frames=300, gop=300)
    seen = decoded(monkeypatch)
    with VideoReader(path) as reader:
        numbers = [frame_numbers(reader.frames_at([index / 10]).data)[0] for index in range(0, 300, 3)]
    assert numbers == list(range(0, 300, 3))
    assert len(seen) < 20


def test_the_last_frame_is_held_as_in_the_careful_way(make_video: MakeVideo) -> None:
    path = make_video("a.mp4", num_frames=20, gop=8, b_frames=2)
    with VideoReader(path) as reader:
        frames = reader.frames_at([1.5, 1.95, 2.0, 2.7], hold_last=True)
        assert frame_numbers(frames.data) == [15, 19, 19, 19] and frames.num_held == 2
        with pytest.raises(NotPlain):
            list(PlannedReader(reader._stream).frames_at([2.0], hold_last=True))
        with pytest.raises(NotPlain):
            list(PlannedReader(reader._stream).frames_at([1.0, 2.0]))


def damage(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    begin = data.index(b"mdat") + 4
    at = begin + int((len(data) - begin) * share)
    data[at : at + 60] = bytes(60)
    path.write_bytes(data)


def test_damage_is_left_to_the_careful_way_and_frames_before_it_are_right(make_video: MakeVideo) -> None:
    path = make_video("a.mp4", num_frames=100, gop=25, b_frames=2, size=(96, 64))
    with VideoReader(path) as reader:
        whole = reader.frames_between()
    damage(path, 0.35)
    with VideoReader(path) as reader:
        given = []
        with pytest.raises(NotPlain):
            for answer in PlannedReader(reader._stream).frames_at([index / 10 for index in range(100)]):
                given.append(answer.positions)
                assert torch.equal(
                    torch.from_numpy(reader._pictures.rgb(answer.frame).copy()), whole.data[answer.positions[0]]
                )
    assert [[index] for index in range(len(given))] == given and 5 <= len(given) < 50


@pytest.mark.parametrize("name", ["a.avi", "a.ts", "a.flv"])
def test_files_whose_packets_do_not_tell_enough_are_not_planned(make_video: MakeVideo, name: str) -> None:
    path = make_video(name, codec="flv" if name == "a.flv" else "mpeg4" if name == "a.avi" else "mpeg2video")
    with VideoReader(path) as reader:
        assert not PlannedReader.can_read(reader._stream)


def test_a_cut_is_what_cutting_the_whole_frames_gives(make_video: MakeVideo) -> None:
    path = make_video("a.mp4", num_frames=20, size=(64, 48))
    times = [0.1, 0.9, 0.5, 0.5]
    for cut in (Cut(3, 5, 33, 33, 20), Cut(0, 10, 48, 30, 24), Cut(8, 8, 32, 32, 32)):
        with VideoReader(path) as reader:
            whole = reader.frames_at(times)
            part = reader.frames_at(times, cut=cut)
        assert torch.equal(part.data, cut_frames(whole.data, cut))
        assert torch.equal(part.pts_seconds, whole.pts_seconds)
