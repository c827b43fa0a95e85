"""A miniature HowTo100M made on the spot: H.264 videos of moving, textured shapes with noisy timed captions.

A scene shows one of six shapes in one of six colors with one of six motions, which repeats in a loop. Place and size
start anywhere in their range and the loop runs through the range of one of them, so at every instant they have the
same distribution whatever the motion is: a single frame says nothing about the motion.

`train`: videos of two scenes with seven captions. Three describe a scene (two of one, one of the other), spoken early
or late, across the cut too; four are about nothing on screen: two name combinations that are not there, two are talk.
`test`: one scene and one clean caption a video, all different. None of its combinations of shape, color and motion
occurs in `train`, on screen or in words, while each of its attributes and pairs of attributes does.

    root/train/videos/*.mp4, captions/*.csv, howto100m_videos.csv, manifest.csv, stamp.json
    root/test/videos/*.mp4, manifest.csv, stamp.json

Both manifests read as those of the user's own videos do, and `root/train` reads as HowTo100M.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import write_manifest
from twinreel.errors import ConfigError, DataError

__all__ = ["COLORS", "MOTIONS", "SHAPES", "SPLITS", "oracle_recall_at_1", "rows"]

_Floats = NDArray[np.float32]

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.95, 0.10, 0.10),
    "green": (0.10, 0.85, 0.15),
    "blue": (0.15, 0.25, 1.00),
    "yellow": (0.95, 0.90, 0.10),
    "purple": (0.80, 0.10, 0.90),
    "white": (0.95, 0.95, 0.95),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "hourglass")
MOTIONS: dict[str, str] = {
    "left": "moves left",
    "right": "moves right",
    "up": "moves up",
    "down": "moves down",
    "grows": "grows",
    "shrinks": "shrinks",
}
SPLITS = ("train", "test")

_VERSION = 1  # to be raised whenever the same arguments give other files
_FRAME_RATE = 8  # Hz, the rate that the demo samples at: no frame is decoded in vain
_FRAME_SIZE = 64  # pixels
_CENTERS = (16.0, 48.0)  # pixels, across and down: the whole shape stays in view
_HALF_WIDTHS = (9.0, 16.0)  # pixels, of a shape
_PERIOD_SECONDS = (1.2, 1.8)  # of the loop of a motion
_TRAIN_SCENE_FRAMES = (24, 32)
_TEST_SCENE_FRAMES = (20, 28)
_MOVES = {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1), "grows": (2, 1), "shrinks": (2, -1)}
_NUM_ABSENT = 2  # captions a video about combinations that are not there; as many are talk
_LATEST_SECONDS = 1.2  # that a caption is spoken before or after what it describes
_TEMPLATES = (
    "a {color} {shape} {motion}",
    "here the {color} {shape} {motion}",
    "look how the {color} {shape} {motion}",
)
_TALK = (
    "welcome back to my channel",
    "so let us get started",
    "thank you all for watching",
    "do not forget to subscribe",
    "as i said before",
    "you can do this at home",
    "i bought it last week",
    "my sister told me about it",
    "this is my favorite part",
    "take your time with it",
    "leave me a comment below",
    "and that is really it",
    "now we wait a little",
    "okay what comes next",
    "it is easy once you know how",
    "i did not expect that",
)


@dataclass(frozen=True, slots=True)
class _Combination:
    """What a scene shows, by name."""

    shape: str
    color: str
    motion: str

    def caption(self, template: str = _TEMPLATES[0]) -> str:
        """A sentence about it; the first template is that of the test."""
        return template.format(color=self.color, shape=self.shape, motion=MOTIONS[self.motion])


@dataclass(frozen=True, slots=True)
class _Video:
    """A video before it is drawn: its scenes with their length in frames, and its captions."""

    id: str
    scenes: tuple[tuple[_Combination, int], ...]
    captions: tuple[Caption, ...]
    split: str
    key: tuple[int, ...]  # of its random numbers

    def row(self, folder: Path) -> Clip:
        """The row of the video in the split's folder."""
        video = str(folder / "videos" / f"{self.id}.mp4")
        if self.split == "train":
            captions = str(folder / "captions" / f"{self.id}.csv")
            return Clip(id=self.id, video=video, caption_file=captions, split=self.split)
        shown = self.scenes[0][0]
        labels = (shown.shape, shown.color, shown.motion)
        return Clip(id=self.id, video=video, captions=self.captions, labels=labels, split=self.split)


def rows(
    root: str | Path | None, split: str | None, *, num_videos: int = 200, num_test_videos: int = 64, seed: int = 0
) -> list[Clip]:
    """The rows of a split of the generated collection; its videos are made under `root` if they are not there.

    `root/<split>` appears complete or not at all, and equal arguments make equal bytes (with the same numpy and
    encoder). A training row is a video with its caption file, a test row a video with its caption and the labels
    shape, color, motion.

    Args:
        root: folder of the collection, made if missing.
        split: `train` or `test`.
        num_videos: training videos, 1 or more.
        num_test_videos: test videos, 1 to 108: half of the 216 combinations, so that every pair of attributes stays
            in the training videos.
        seed: decides everything: which combinations are held out, pictures, captions. 0 or more.

    Raises:
        ConfigError: no root, another split, or a number out of its range.
        DataError: the folder is there but was made with other arguments, or by something else.
    """
    _check_arguments(root, split, num_videos, num_test_videos, seed)
    folder = Path(str(root)).expanduser().absolute() / str(split)
    held_out = _held_out(num_test_videos, seed)
    stamp = {"generator": "twinreel generated", "version": _VERSION, "num_test_videos": num_test_videos, "seed": seed}
    if split == "train":
        videos = _plan_train(held_out, num_videos, seed)
        stamp["num_videos"] = num_videos
    else:
        videos = _plan_test(held_out, seed)
    if not folder.exists():
        _make(folder, videos, stamp)
    _check_stamp(folder, stamp)
    return [video.row(folder) for video in videos]


def oracle_recall_at_1(test_rows: Sequence[Clip], known: Iterable[str] = ("shape", "color", "motion")) -> float:
    """Recall at 1 of an oracle that sees only the `known` attributes of the test rows, a fraction in 0..1.

    The oracle cannot tell rows apart that agree in what it knows and guesses among them, so a row of a group of n
    is found with probability 1 / n: the expectation is the number of groups over the number of rows, in both
    directions. From 36 test videos on any two attributes form all their 36 groups: with 64 videos 36 / 64 = 0.5625.

    Args:
        test_rows: the rows of the test split.
        known: some of `shape`, `color` and `motion`; all three: 1.0, because no two test rows agree in all.

    Raises:
        ConfigError: `known` names another attribute.
        DataError: no rows, or not those of the generated test split.
    """
    known = tuple(known)
    names = ("shape", "color", "motion")
    if unknown := [name for name in known if name not in names]:
        raise ConfigError(f"oracle_recall_at_1: unknown attribute {unknown[0]!r}; allowed are {', '.join(names)}")
    if not test_rows or any(len(row.labels) != len(names) for row in test_rows):
        raise DataError("oracle_recall_at_1: needs rows(root, 'test') of the generated source, with three labels each")
    groups = {tuple(row.labels[names.index(name)] for name in known) for row in test_rows}
    return len(groups) / len(test_rows)


def _check_arguments(
    root: str | Path | None, split: str | None, num_videos: int, num_test_videos: int, seed: int
) -> None:
    if root is None:
        raise ConfigError("source generated needs data.root: the folder that its videos are made in")
    if split not in SPLITS:
        raise ConfigError(f"source generated has no split {split!r}; allowed are {' and '.join(SPLITS)}")
    largest = 3 * len(SHAPES) ** 2
    for name, value, fits, allowed in (
        ("num_videos", num_videos, num_videos >= 1, "1 or more"),
        ("num_test_videos", num_test_videos, 1 <= num_test_videos <= largest, f"1 to {largest}"),
        ("seed", seed, seed >= 0, "0 or more"),
    ):
        if not fits:
            raise ConfigError(f"source generated: {name} is {value}; allowed is {allowed}")


def _combinations() -> list[_Combination]:
    return [_Combination(shape, color, motion) for shape in SHAPES for color in COLORS for motion in MOTIONS]


def _held_out(count: int, seed: int) -> list[_Combination]:
    """The test's combinations: one Latin square after the other, so each pair of attributes is used evenly."""
    rng = np.random.default_rng([seed, 0])
    shapes, colors, motions = (rng.permutation(list(names)) for names in (SHAPES, COLORS, MOTIONS))
    order = len(SHAPES)
    cells = [
        _Combination(str(shapes[i]), str(colors[j]), str(motions[(i + j + square) % order]))
        for square in range(order)
        for i, j in rng.permutation([(i, j) for i in range(order) for j in range(order)])
    ]
    return cells[:count]


def _plan_test(held_out: Sequence[_Combination], seed: int) -> list[_Video]:
    videos = []
    for index, combination in enumerate(held_out):
        key = (seed, 2, index)
        length = int(np.random.default_rng(key).integers(*_TEST_SCENE_FRAMES, endpoint=True))
        captions = (Caption(text=combination.caption()),)
        videos.append(_Video(f"test_{index:04d}", ((combination, length),), captions, "test", key))
    return videos


def _plan_train(held_out: Sequence[_Combination], count: int, seed: int) -> list[_Video]:
    """Videos of two scenes; every combination that is not held out is on screen about equally often."""
    seen = [combination for combination in _combinations() if combination not in set(held_out)]
    rng = np.random.default_rng([seed, 1])
    rounds = -(-2 * count // len(seen))
    shown = [seen[i] for _ in range(rounds) for i in rng.permutation(len(seen))]
    videos = []
    for index in range(count):
        key = (seed, 3, index)
        own_rng = np.random.default_rng(key)
        lengths = own_rng.integers(*_TRAIN_SCENE_FRAMES, endpoint=True, size=2)
        scenes = ((shown[2 * index], int(lengths[0])), (shown[2 * index + 1], int(lengths[1])))
        videos.append(_Video(f"train_{index:04d}", scenes, _narrate(scenes, seen, own_rng), "train", key))
    return videos


def _narrate(
    scenes: Sequence[tuple[_Combination, int]], seen: Sequence[_Combination], rng: np.random.Generator
) -> tuple[Caption, ...]:
    """Seven captions by start: three about the two scenes, early or late, and four about nothing on screen."""
    ends = np.cumsum([0] + [length for _, length in scenes]) / _FRAME_RATE
    absent = [combination for combination in seen if all(combination != shown for shown, _ in scenes)]
    twice = int(rng.integers(len(scenes)))
    spoken: list[tuple[str, float]] = []
    for scene in (0, 1, twice):
        text = scenes[scene][0].caption(_TEMPLATES[rng.integers(len(_TEMPLATES))])
        off = rng.uniform(0.0, _LATEST_SECONDS) * rng.choice((-1.0, 1.0))
        spoken.append((text, rng.uniform(ends[scene] + 0.5, ends[scene + 1] - 0.5) + off))
    for number in range(2 * _NUM_ABSENT):
        text = _TALK[rng.integers(len(_TALK))]
        if number < _NUM_ABSENT:
            text = absent[rng.integers(len(absent))].caption(_TEMPLATES[rng.integers(len(_TEMPLATES))])
        spoken.append((text, rng.uniform(0.0, ends[-1])))
    captions = []
    for text, center in spoken:
        half = rng.uniform(0.3, 0.8)
        center = min(max(center, 1.0), float(ends[-1]) - 1.0)  # a window of two seconds stays inside the video
        captions.append(Caption(text=text, start_seconds=round(center - half, 2), end_seconds=round(center + half, 2)))
    return tuple(sorted(captions, key=lambda caption: (caption.start_seconds, caption.end_seconds)))


def _draw_scene(combination: _Combination, length: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Frames (length, 64, 64, 3) of a scene."""
    period = rng.uniform(*_PERIOD_SECONDS)
    phases = rng.uniform(size=3).repeat(length).reshape(3, length)
    axis, sign = _MOVES[combination.motion]
    phases[axis] = (phases[axis] + sign * np.arange(length) / (period * _FRAME_RATE)) % 1.0
    x, y, half = (
        (low + (high - low) * phase).astype(np.float32)[:, None, None]
        for phase, (low, high) in zip(phases, (_CENTERS, _CENTERS, _HALF_WIDTHS), strict=True)
    )
    pixels = np.arange(_FRAME_SIZE, dtype=np.float32) + np.float32(0.5)
    across, along = (pixels[None, None, :] - x) / half, (pixels[None, :, None] - y) / half
    cover = np.clip(_inside(combination.shape, across, along) * half + 0.5, 0.0, 1.0)
    waves, offsets = rng.uniform(2.0, 5.0, size=2).tolist(), rng.uniform(0.0, 2.0 * np.pi, size=2).tolist()
    texture = np.sin(waves[0] * across + offsets[0]) * np.sin(waves[1] * along + offsets[1])
    surface = 0.85 + 0.15 * texture
    frames = np.empty((length, _FRAME_SIZE, _FRAME_SIZE, 3), np.uint8)
    for channel, (value, behind) in enumerate(zip(COLORS[combination.color], _background(rng), strict=True)):
        picture = (surface * value - behind) * cover + behind
        frames[..., channel] = np.clip(picture * 255.0 + 0.5, 0.0, 255.0)
    return frames


def _inside(shape: str, across: _Floats, along: _Floats) -> _Floats:
    """How far each point (T, H, W) lies inside the outline of the shape, in half widths; negative outside."""
    x, y = np.abs(across), np.abs(along)
    if shape == "square":
        inside = 0.85 - np.maximum(x, y)
    elif shape == "triangle":
        inside = np.minimum(((along + 1.0) / 1.8 - x) * 0.87, 0.8 - along)
    elif shape == "cross":
        inside = np.maximum(np.minimum(0.3 - x, 1.0 - y), np.minimum(1.0 - x, 0.3 - y))
    elif shape == "hourglass":
        inside = np.minimum((y + 0.1 - x) * 0.71, 0.95 - y)
    else:
        radius = np.sqrt(x * x + y * y)
        inside = 0.95 - radius if shape == "circle" else 0.22 - np.abs(radius - 0.78)
    return np.asarray(inside, dtype=np.float32)


def _background(rng: np.random.Generator) -> _Floats:
    """A dim texture (3, 64, 64): soft patches with a tint, and a fine grain."""
    coarse = rng.uniform(0.05, 0.35, size=(3, 9, 9))
    steps = np.linspace(0.0, 7.999, _FRAME_SIZE)
    low, share = steps.astype(int), steps % 1.0
    tall = coarse[:, low] * (1.0 - share[:, None]) + coarse[:, low + 1] * share[:, None]
    wide = tall[:, :, low] * (1.0 - share) + tall[:, :, low + 1] * share
    grain = rng.uniform(-0.04, 0.04, size=(_FRAME_SIZE, _FRAME_SIZE))
    return np.asarray(wide + grain, dtype=np.float32)


def _encode(path: Path, frames: NDArray[np.uint8]) -> None:
    """Writes frames (T, H, W, 3) as H.264, with one thread and a constant quantizer: equal frames, equal bytes."""
    options = {"preset": "ultrafast", "qp": "20", "g": str(_FRAME_RATE), "bf": "0", "threads": "1"}
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream("libx264", rate=_FRAME_RATE, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p", threads=1)
            frame.pts, frame.time_base = index, Fraction(1, _FRAME_RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _make_video(folder: Path, video: _Video) -> None:
    rng = np.random.default_rng((*video.key, 1))
    frames = np.concatenate([_draw_scene(combination, length, rng) for combination, length in video.scenes])
    _encode(Path(video.row(folder).video), frames)


def _make(folder: Path, videos: Sequence[_Video], stamp: dict[str, Any]) -> None:
    """Makes the folder under a temporary name, then renames it: other processes may do the same meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        making.chmod(0o755)  # a temporary folder is private to its owner, a collection is not
        (making / "videos").mkdir()
        write_manifest(making / "manifest.csv", [video.row(Path()) for video in videos])
        if folder.name == "train":
            _write_narrations(making, videos)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(lambda video: _make_video(making, video), videos):
                pass  # the errors of the threads are raised here
        (making / "stamp.json").write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker, and the caller compares its stamp
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _write_narrations(folder: Path, videos: Sequence[_Video]) -> None:
    """HowTo100M's list of videos and its caption files."""
    listed = [video.row(Path()) for video in videos]
    _write_csv(folder / "howto100m_videos.csv", [("video_path",), *((row.video,) for row in listed)])
    (folder / "captions").mkdir()
    for video in videos:
        lines = [(caption.start_seconds, caption.end_seconds, caption.text) for caption in video.captions]
        _write_csv(Path(str(video.row(folder).caption_file)), [("start", "end", "text"), *lines])


def _write_csv(path: Path, lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def _check_stamp(folder: Path, wanted: dict[str, Any]) -> None:
    path = folder / "stamp.json"
    mend = "give another root, or remove the folder to have it made anew"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not a folder of generated videos: no readable stamp.json in it; {mend}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: a JSON object is expected; {mend}")
    differing = [
        f"{name} {found.get(name)!r}, wanted {value!r}" for name, value in wanted.items() if found.get(name) != value
    ]
    if differing:
        raise DataError(f"{folder}: made with other arguments: {'; '.join(differing)}; {mend}")
