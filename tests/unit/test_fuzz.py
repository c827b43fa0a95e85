"""Random damage to the payload of coded files: nothing crashes or hangs, and no frame is wrong without a word.

Damage is a turned bit, several turned bits, a zeroed block or a cut. What is read must be, frame by frame,

- of a group of pictures that was not touched: the very frame, or an error or a warning that it is lost;
- of one that was touched: the very frame, or lost with an error or a warning. Decoders do not notice all damage: how
  much of it comes through is counted, and must not grow.

Each file is damaged and read in a process of its own, which has a limited time.
"""

from __future__ import annotations

import bisect
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from twinreel.data.decode import Frames, VideoReader, read_frames
from twinreel.errors import DataError

CLOSED = "log-level=none:keyint=12:min-keyint=12:scenecut=0:pools=1:open-gop=0"
# Name -> options of make_video, and of how many hundred damages at most a wrong frame may come through unreported.
# Measured with PyAV 18.1 (FFmpeg 8.1), and why: entropy-coded data is valid whatever its bits are. The decoders of
# VP9 and HEVC do not check where it ends, so that damage only changes pictures; that of H.264 notices half of it, that
# of MPEG-4 most. Three in four damages are to single pictures, the fourth is a cut. Where the container or the codec
# carries checksums hardly anything comes through.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "h264.mp4": ({"b_frames": 2, "container_options": {"movflags": "faststart"}}, 55),
    "h264.ts": ({"b_frames": 2}, 55),
    "hevc.mp4": (
        {
            "codec": "libx265",
            "codec_options": {"x265-params": CLOSED, "preset": "ultrafast"},
            "container_options": {"movflags": "faststart"},
        },
        80,
    ),
    "vp9.webm": ({"codec": "libvpx-vp9"}, 80),
    "mpeg4.avi": ({"codec": "mpeg4", "b_frames": 2, "codec_options": {"flags": "+cgop"}}, 25),
    "vp9_checksums.mkv": ({"codec": "libvpx-vp9"}, 0),
    "hevc_checksums.mp4": (
        {"codec": "libx265", "codec_options": {"x265-params": f"{CLOSED}:hash=1", "preset": "ultrafast"}},
        5,  # both a picture and its checksum were hit
    ),
}
GOP, NUM_FRAMES, RATE, SIZE = 12, 60, 10, (128, 96)
KINDS = ("flip", "flips", "zeros", "cut")


@dataclass(slots=True)
class Tally:
    """What became of the damages to one file."""

    refused: int = 0  # not one frame is readable
    warned: int = 0  # some are, with a warning
    harmless: int = 0  # every frame is right
    unnoticed: int = 0  # of touched groups: wrong frames without a word, or beside a warning about others
    wrong_frames: int = 0
    faults: list[str] = field(default_factory=list)  # what must not be


@dataclass(slots=True)
class Coded:
    """A sound file: its bytes, where its packets lie in decoding order, and the frames of each group."""

    content: bytes
    places: list[tuple[int, int]]  # position and size
    groups: list[int]  # of each packet
    frames: dict[float, tuple[int, torch.Tensor]]  # by time: group and pixels


def load(path: Path) -> Coded:
    places, groups, starts = [], [], []
    with av.open(str(path)) as container:
        for packet in container.demux(video=0):
            if packet.size:
                starts += [len(places)] if packet.is_keyframe else []
                places.append((packet.pos, packet.size))
                groups.append(len(starts) - 1)
        container.seek(0)
        keys = [frame.key_frame for frame in container.decode(video=0)]
    group_of = [sum(keys[: index + 1]) - 1 for index in range(len(keys))]  # all groups are closed
    whole = read_frames(path)
    assert len(whole.data) == NUM_FRAMES and len(starts) == sum(keys) >= 5
    frames = {
        round(time, 4): (group, picture)
        for time, group, picture in zip(whole.pts_seconds.tolist(), group_of, whole.data, strict=True)
    }
    return Coded(path.read_bytes(), places, groups, frames)


def damage(coded: Coded, kind: str, rng: random.Random, is_stream: bool) -> tuple[bytes, set[int]]:
    """Damaged bytes, and which groups were touched. The first bytes of a packet are its container's and stay."""
    content = bytearray(coded.content)
    index = rng.randrange(len(coded.places))
    position, size = coded.places[index]
    if is_stream:  # a transport stream puts the head of each of its packets between
        size = (coded.places[index + 1][0] if index + 1 < len(coded.places) else len(content)) - position
    low = min(40 if is_stream else 8, size - 1)
    if kind == "cut":
        at = position + rng.randrange(low, size)
        return bytes(content[:at]), set(coded.groups[index:])
    places = [position + rng.randrange(low, size) for _ in range({"flip": 1, "flips": 8, "zeros": 1}[kind])]
    if is_stream:
        places = [place if place % 188 > 40 else place - place % 188 + 41 + rng.randrange(140) for place in places]
    for place in places:
        if kind == "zeros":
            end = min(
                place + rng.randrange(16, 200), position + size, place - place % 188 + 188 if is_stream else 1 << 60
            )
            content[place:end] = bytes(end - place)
        else:
            content[place] ^= 1 << rng.randrange(8)
    starts = [start for start, _ in coded.places]
    return bytes(content), {coded.groups[max(0, bisect.bisect_right(starts, place) - 1)] for place in places}


def judge(coded: Coded, frames: Frames, touched: set[int], tally: Tally, what: str) -> None:
    """Compare what was read with what it must be."""
    warned = any("damaged" in words or "cut short" in words for words in frames.warnings)
    given = [round(time, 4) for time in frames.pts_seconds.tolist()]
    wrong = []
    for time, picture in zip(given, frames.data, strict=True):
        group, right = coded.frames.get(time, (None, None))
        if right is None or not torch.equal(picture, right):
            wrong.append(time)
            if group not in touched:
                tally.faults.append(f"{what}: the frame at {time} s of an untouched group is not the right one")
    lost = sorted(coded.frames.keys() - set(given))
    if lost and not warned and any(coded.frames[time][0] not in touched for time in lost):
        tally.faults.append(f"{what}: frames of untouched groups are gone without a warning: {lost[:5]}")
    tally.warned += warned and not wrong
    tally.unnoticed += bool(wrong) or (bool(lost) and not warned)
    tally.harmless += not (wrong or lost or warned)
    tally.wrong_frames += len(wrong)


def try_damage(coded: Coded, path: Path, kind: str, seed: int, tally: Tally) -> None:
    """Damage the file once, read it in each way, and note what became of it."""
    rng = random.Random(f"{path.name}:{kind}:{seed}")
    content, touched = damage(coded, kind, rng, path.suffix == ".ts")
    what = f"{path.name}, {kind} {seed}, groups {sorted(touched)}"
    path.write_bytes(content)
    try:
        frames = read_frames(path, allow_partial=True)
    except DataError:
        tally.refused += 1
        return
    judge(coded, frames, touched, tally, what)
    try:
        read_frames(path)
        refused = False
    except DataError:
        refused = True
    if refused != any("the video is damaged" in words for words in frames.warnings):
        tally.faults.append(f"{what}: what allow_partial warns of and what is refused without it differ")
    times = rng.sample(sorted(coded.frames), 4)
    with VideoReader(content if seed % 2 else path) as reader:
        for time in times:  # to and fro
            try:
                frame = reader.frames_at([time])
            except DataError:
                continue
            group, right = coded.frames[time]
            if group not in touched and not torch.equal(frame.data[0], right):
                tally.faults.append(f"{what}: the frame on show at {time} s of an untouched group is not the right one")


def main(original: Path, count: int) -> None:
    """Damage a copy of the file `count` times; print the tally."""
    coded, tally = load(original), Tally()
    path = original.with_name(f"damaged_{original.name}")
    for number in range(count):
        try_damage(coded, path, KINDS[number % len(KINDS)], number, tally)
    print(json.dumps(asdict(tally)))


def fuzz(make_video: Any, name: str, count: int, seconds: float) -> Tally:
    from videos import textured_image

    options, _ = FILES[name]
    codec = options.get("codec", "libx264")
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {codec}")
    path = make_video(
        name, num_frames=NUM_FRAMES, frame_rate=RATE, gop=GOP, size=SIZE, picture=textured_image, **options
    )
    command = [sys.executable, __file__, str(path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)  # a hang ends with TimeoutExpired
    assert done.returncode == 0, f"{name}: the process ended with {done.returncode}\n{done.stderr[-2000:]}"
    assert done.stderr == "", done.stderr[:2000]
    return Tally(**json.loads(done.stdout))


def check(name: str, tally: Tally, count: int) -> None:
    print(name, tally)
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.refused + tally.warned + tally.harmless + tally.unnoticed == count
    _, per_hundred = FILES[name]
    assert count < 60 or tally.unnoticed * 100 <= per_hundred * count, tally
    assert tally.refused + tally.warned >= count // 8  # the cuts are noticed, whatever the codec


@pytest.mark.parametrize("name", ["h264.mp4", "vp9_checksums.mkv"])
def test_a_little_damage(make_video: Any, name: str) -> None:
    check(name, fuzz(make_video, name, 8, 120), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FILES))
def test_three_hundred_damages(make_video: Any, name: str) -> None:  # 60 to each of five files, and two with checksums
    check(name, fuzz(make_video, name, 60, 600), 60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
