from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from twinreel.data.captions import read_caption_file
from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifest
from twinreel.data.sources import generated, howto100m
from twinreel.data.sources.generated import COLORS, MOTIONS, SHAPES, oracle_recall_at_1, rows
from twinreel.errors import ConfigError, DataError

NAMES = ("shape", "color", "motion")
COLUMN = {"left": 0, "right": 0, "up": 1, "down": 1, "grows": 2, "shrinks": 2}  # of `measure`
PURE = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "purple": (1, 0, 1),
    "white": (1, 1, 1),
}
SIGN = {"left": -1, "right": 1, "up": -1, "down": 1, "grows": 1, "shrinks": -1}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    rows(folder, "train", num_videos=12)
    rows(folder, "test")
    return folder


def decode(video: str) -> np.ndarray[Any, Any]:
    with av.open(video) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def measure(frames: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Center across, center down and mean width of the bright thing on each frame: (T, 3)."""
    bright = frames.max(axis=-1) > 120
    area = bright.sum(axis=(1, 2))
    assert area.min() > 30, "no shape on a frame"
    places = np.arange(frames.shape[1])
    across, down = (bright * places).sum(axis=(1, 2)) / area, (bright * places[:, None]).sum(axis=(1, 2)) / area
    return np.stack([across, down, np.sqrt(area)], axis=1)


def named(text: str) -> tuple[str, ...] | None:
    """The combination that a sentence names, or None."""
    words = text.split()
    found = [[name for name in names if name in words] for names in (SHAPES, COLORS, MOTIONS)]
    assert sorted(map(len, found)) in ([0, 0, 0], [1, 1, 1]), text
    return tuple(names[0] for names in found) if found[0] else None


def plans(num_videos: int = 200, seed: int = 0) -> list[Any]:
    return generated._plan_train(generated._held_out(64, seed), num_videos, seed)


def scenes(video: Any) -> list[tuple[str, ...]]:
    return [(shown.shape, shown.color, shown.motion) for shown, _ in video.scenes]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_are_real_videos(root: Path) -> None:
    train = rows(root, "train", num_videos=12)
    assert len(train) == 12 and len({row.id for row in train}) == 12
    for row in (train[0], rows(root, "test")[0]):
        with av.open(row.video) as container:
            stream = container.streams.video[0]
            assert stream.codec_context.name == "h264"
            assert (stream.width, stream.height, stream.average_rate) == (64, 64, 8)
            times = [frame.time for frame in container.decode(video=0)]
        np.testing.assert_allclose(times, np.arange(len(times)) / 8, atol=1e-6)


def test_test_videos_show_what_their_labels_say(root: Path) -> None:
    test = rows(root, "test")
    assert len(test) == 64
    for row in test:
        shape, color, motion = row.labels
        assert [caption.text for caption in row.captions] == [f"a {color} {shape} {MOTIONS[str(motion)]}"]
        frames = decode(row.video)
        steps = np.median(np.diff(measure(frames), axis=0), axis=0)
        moving = COLUMN[str(motion)]
        assert steps[moving] * SIGN[str(motion)] > 0.3, (row.id, row.labels, steps)
        assert np.abs(np.delete(steps, moving)).max() < 0.3, (row.id, row.labels, steps)
        inside = frames[frames.max(axis=-1) > 150].mean(axis=0) / 255
        distances = {name: np.abs(inside / inside.max() - rgb).sum() for name, rgb in PURE.items()}
        assert min(distances, key=lambda name: distances[name]) == color


def test_one_frame_does_not_tell_the_motion() -> None:
    """Place and size on an arbitrary frame are uniform whatever the motion (Kolmogorov-Smirnov, 0.1 %)."""
    count, frame = 100, 9
    side = 2 * 0.85  # of a square, in half widths
    ranges = np.array([generated._CENTERS, generated._CENTERS, np.multiply(generated._HALF_WIDTHS, side)])
    expected = (np.arange(count) + 0.5) / count
    for motion in MOTIONS:
        shown = generated._Combination("square", "white", motion)
        drawn = [generated._draw_scene(shown, frame + 1, np.random.default_rng([7, i]))[frame] for i in range(count)]
        found = measure(np.stack(drawn)) + np.array([0.5, 0.5, 0.0])  # pixels have their centers at halves
        shares = np.sort((found - ranges[:, 0]) / (ranges[:, 1] - ranges[:, 0]), axis=0)
        assert np.abs(shares - expected[:, None]).max() < 1.95 / np.sqrt(count), motion


def test_held_out_combinations_are_never_trained_but_their_pairs_are() -> None:
    for seed in range(3):
        held_out = {(c.shape, c.color, c.motion) for c in generated._held_out(64, seed)}
        assert len(held_out) == 64
        videos = plans(seed=seed)
        seen = Counter(scene for video in videos for scene in scenes(video))
        said = {named(caption.text) for video in videos for caption in video.captions} - {None}
        assert set(seen) | said == {(s, c, m) for s in SHAPES for c in COLORS for m in MOTIONS} - held_out
        assert max(seen.values()) - min(seen.values()) <= 1
        for i, j in combinations(range(3), 2):
            assert {(x[i], x[j]) for x in held_out} <= {(x[i], x[j]) for x in seen}
    assert generated._held_out(64, 0) != generated._held_out(64, 1)


def test_narration_is_noisy_as_promised() -> None:
    early_or_late = 0
    videos = plans()
    for video in videos:
        shown = scenes(video)
        cut, end = np.cumsum([length for _, length in video.scenes]) / 8
        right = [caption for caption in video.captions if named(caption.text) in shown]
        assert len(video.captions) == 7 and len(right) == 3
        assert {named(caption.text) for caption in right} == set(shown)
        assert sum(named(caption.text) is None for caption in video.captions) == 2
        assert [c.start_seconds for c in video.captions] == sorted(c.start_seconds for c in video.captions)
        for caption in video.captions:
            center = (caption.start_seconds + caption.end_seconds) / 2
            assert 0.99 <= center <= end - 0.99  # a window of 2 seconds around it stays inside the video
        centers = [((c.start_seconds + c.end_seconds) / 2 > cut, shown.index(named(c.text))) for c in right]
        early_or_late += sum(second != bool(scene) for second, scene in centers)
    assert 0.03 < early_or_late / (3 * len(videos)) < 0.25  # right captions spoken over the other scene


def test_captions_on_disk_and_lengths_are_the_planned_ones(root: Path) -> None:
    for row, video in zip(rows(root, "train", num_videos=12), plans(12), strict=True):
        assert row.caption_file is not None and row.captions == ()
        assert read_caption_file(row.caption_file) == video.captions
        assert len(decode(row.video)) == sum(length for _, length in video.scenes)


def test_the_folder_is_a_data_set(root: Path) -> None:
    train = rows(root, "train", num_videos=12)
    assert read_manifest(root / "train" / "manifest.csv") == train
    assert read_manifest(root / "test" / "manifest.csv", split="test") == rows(root, "test")
    assert howto100m.rows(root / "train", "train") == train


def test_equal_arguments_make_equal_bytes(root: Path, tmp_path: Path) -> None:
    rows(tmp_path / "again", "train", num_videos=12)
    assert contents(tmp_path / "again" / "train") == contents(root / "train")
    rows(tmp_path / "other", "train", num_videos=12, seed=1)
    same, other = contents(root / "train"), contents(tmp_path / "other" / "train")
    assert same.keys() == other.keys()
    assert not [name for name in same if same[name] == other[name] and name.startswith(("videos", "captions"))]
    times = [{caption.start_seconds for video in plans(12, seed) for caption in video.captions} for seed in (0, 1)]
    assert len(times[0] & times[1]) < len(times[0]) / 2


def test_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_make", lambda *_: pytest.fail("made again"))
    assert rows(str(root), "train", num_videos=12) == rows(root, "train", num_videos=12)
    assert rows(root, "test", num_videos=5) == rows(root, "test")  # the test does not depend on the training videos


def test_other_arguments_are_refused(root: Path, tmp_path: Path) -> None:
    before = contents(root)
    with pytest.raises(DataError, match=r"train: made with other arguments: seed 0, wanted 4; num_videos 12, wanted 9"):
        rows(root, "train", num_videos=9, seed=4)
    with pytest.raises(DataError, match="num_test_videos 64, wanted 40; give another root, or remove the folder"):
        rows(root, "test", num_test_videos=40)
    assert contents(root) == before
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"no readable stamp\.json"):
        rows(tmp_path, "train")
    (tmp_path / "train" / "stamp.json").write_text("[]")
    with pytest.raises(DataError, match=r"stamp\.json: a JSON object is expected"):
        rows(tmp_path, "train")
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["mine.txt", "stamp.json"]


def test_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generated._make_video

    def fail_at_third(folder: Path, video: Any) -> None:
        if video.id.endswith("2"):
            raise OSError("disk full")
        real(folder, video)

    monkeypatch.setattr(generated, "_make_video", fail_at_third)
    with pytest.raises(OSError, match="disk full"):
        rows(tmp_path, "train", num_videos=4)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert len(rows(tmp_path, "train", num_videos=4)) == 4


def test_two_processes_may_make_the_folder_at_once(tmp_path: Path) -> None:
    rows(tmp_path, "test", num_test_videos=2)
    before = contents(tmp_path)
    generated._make(tmp_path / "test", generated._plan_test(generated._held_out(2, 0), 0), {"seed": "the slower one's"})
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["test"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"root": None}, r"needs data\.root"),
        ({"split": "validation"}, r"no split 'validation'; allowed are train and test"),
        ({"split": None}, r"no split None"),
        ({"num_videos": 0}, r"num_videos is 0; allowed is 1 or more"),
        ({"num_test_videos": 109}, r"num_test_videos is 109; allowed is 1 to 108"),
        ({"seed": -1}, r"seed is -1; allowed is 0 or more"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rows(**({"root": tmp_path, "split": "train"} | arguments))
    assert list(tmp_path.iterdir()) == []


def test_oracle_equals_a_simulated_one(root: Path) -> None:
    test = rows(root, "test")
    rng = np.random.default_rng(0)
    guesses = rng.uniform(0.0, 0.5, size=(400, len(test), len(test)))
    for known in [(), ("color",), *combinations(NAMES, 2), NAMES]:
        seen = [[row.labels[NAMES.index(name)] for name in known] for row in test]
        alike = np.array([[a == b for b in seen] for a in seen])
        simulated = ((alike + guesses).argmax(axis=2) == np.arange(len(test))).mean()
        assert oracle_recall_at_1(test, known) == pytest.approx(simulated, abs=0.02)
    assert {oracle_recall_at_1(test, pair) for pair in combinations(NAMES, 2)} == {36 / 64}
    assert oracle_recall_at_1(test) == 1.0


@pytest.mark.parametrize("count", [36, 64, 108])
def test_every_pair_is_tested_from_36_videos_on(count: int) -> None:
    held_out = generated._held_out(count, 5)
    test = [Clip(id=str(i), video="", labels=(c.shape, c.color, c.motion)) for i, c in enumerate(held_out)]
    for pair in combinations(NAMES, 2):
        assert oracle_recall_at_1(test, pair) == 36 / count


def test_oracle_refuses_other_rows() -> None:
    with pytest.raises(ConfigError, match="unknown attribute 'size'; allowed are shape, color, motion"):
        oracle_recall_at_1([Clip(id="a", video="a.mp4", labels=("ring", "red", "up"))], ["size"])
    for wrong in ([], [Clip(id="a", video="a.mp4")]):
        with pytest.raises(DataError, match="three labels"):
            oracle_recall_at_1(wrong)
