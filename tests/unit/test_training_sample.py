"""Several clips a sample, and the options of a row; one clip a sample is in test_dataset.py."""

import numpy as np
import pytest
import torch

from twinreel.data import training_sample
from twinreel.data.clip import Caption, Clip
from twinreel.data.dataset import ClipDataset, ViewRules
from twinreel.data.loader import load_batches
from twinreel.data.storage import open_video
from twinreel.data.training_sample import TrainingRules, read_training_sample
from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing
from videos import frame_numbers, make_video

PREP = Preprocessing(num_frames=4, frame_rate=5.0, crop_size=48)
STRIDED = Preprocessing(num_frames=4, frame_stride=6, crop_size=48)


def rules(**values):
    return TrainingRules(**({"preprocessing": PREP, "seed": 1, "num_candidates": 2, "flip": 0.0} | values))


def row(video, **values):
    return Clip(**({"id": "a", "video": video, "captions": (Caption(text="one"),)} | values))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """60 numbered frames at 10 a second: 6 s."""
    path = tmp_path_factory.mktemp("video") / "numbered.mp4"
    make_video(path, num_frames=60, frame_rate=10, size=(48, 48))
    return str(path)


def test_several_clips_lie_one_behind_the_other_each_drawn_by_itself(video, monkeypatch):
    opened = []
    monkeypatch.setattr(training_sample, "open_video", lambda path: opened.append(path) or open_video(path))
    one, prep = row(video), PREP.replace(num_frames=2)
    seen = []
    for epoch in range(40):
        [alone, sample] = [
            read_training_sample(one, epoch, rules(preprocessing=prep, num_clips=number)) for number in (1, 4)
        ]
        assert sample.frames.shape == (8, 48, 48, 3) and sample.pts_seconds.shape == (8,)
        assert torch.equal(sample.frames[:2], alone.frames) and sample.captions == alone.captions
        assert torch.equal(sample.pts_seconds[:2], alone.pts_seconds)
        assert frame_numbers(sample.frames) == [round(pts * 10) for pts in sample.pts_seconds.tolist()]
        seen.append(sample.pts_seconds.view(4, 2)[:, 0].tolist())
    assert len(opened) == 80  # one open file for all the clips of a sample
    starts = np.array(seen)
    assert abs(np.corrcoef(starts.T) - np.eye(4)).max() < 0.5  # none follows from another
    assert all(0.0 <= column.min() < 1.0 and 4.0 < column.max() for column in starts.T)
    assert any(list(found) != sorted(found) for found in seen)  # in the order of the draws, not of time


def test_segments_are_drawn_anew_for_every_clip(video):
    drawn = rules(num_clips=3, clip_start="segments")
    clips = read_training_sample(row(video), 0, drawn).pts_seconds.view(3, 4)
    assert len({tuple(clip) for clip in clips.tolist()}) == 3
    strided = read_training_sample(row(video), 0, rules(preprocessing=STRIDED, num_clips=3))
    numbers = np.array(frame_numbers(strided.frames)).reshape(3, -1)
    assert len({*numbers[:, 0]}) > 1 and (np.diff(numbers, axis=1) == STRIDED.frame_stride).all()


@pytest.mark.parametrize("prep", [PREP, PREP.replace(frame_rate=None, frame_stride=2)], ids=["rate", "stride"])
def test_several_clips_that_are_not_drawn_are_those_of_evaluation(video, prep):
    one = row(video)
    sample = read_training_sample(one, 0, rules(preprocessing=prep, crop="center", num_clips=3, clip_start="center"))
    judged = ViewRules(preprocessing=prep, num_clips=3)(one, 0)
    assert torch.equal(sample.frames, judged.frames.flatten(0, 1))


def test_a_row_that_cannot_be_read_is_masked_with_all_its_clips(video, tmp_path):
    rows = [row(video), row(str(tmp_path / "none.mp4"), id="b")]
    [batch] = load_batches(ClipDataset(rows, rules(num_clips=3)), [[(0, 0), (0, 1)]], num_workers=0)
    assert batch.valid.tolist() == [True, False] and batch.frames.shape == (2, 12, 48, 48, 3)
    assert batch.pts_seconds.shape == (2, 12) and [fault.id for fault in batch.faults] == ["b"]


def test_options_travel_with_their_row(video, tmp_path):
    """Read as often as one likes. ClipBERT defect 13: there the first reading takes them out of the row."""
    options = ("walk", "run")
    asked = row(video, options=options, labels=(1,))
    rows = [asked, row(video, id="b"), row(str(tmp_path / "none.mp4"), id="c", options=options)]
    for _ in range(2):
        dataset = ClipDataset(rows, rules())
        [batch] = load_batches(dataset, [[(0, 0), (0, 1), (0, 2)]], num_workers=0)
        assert batch.options == [options, (), options] and batch.labels == [(1,), (), ()]
        assert ViewRules(preprocessing=PREP, num_clips=2)(asked, 0).options == options
    [batch] = load_batches(ClipDataset(rows, rules()), [[(0, 0), (0, 1)]], num_workers=1)
    assert batch.options == [options, ()]


@pytest.mark.parametrize("clip_start", ["uniform", "start"])
def test_several_clips_of_the_same_frames_are_refused(clip_start):
    assert rules(clip_start=clip_start).num_clips == 1
    words = rf"data.num_clips=2 with data.clip_start={clip_start}: every clip would show the same frames; set .*=random"
    with pytest.raises(ConfigError, match=words):
        rules(clip_start=clip_start, num_clips=2)


def test_options_with_and_without_a_question_go_side_by_side(video):
    options = {"options": ("walk", "run"), "labels": (1,)}
    rows = [row(video, **options), row(video, id="b", captions=(), **options), row(video, id="c", captions=())]
    [batch] = load_batches(ClipDataset(rows, rules()), [[(0, 0), (0, 1), (0, 2)]], num_workers=0)
    assert batch.valid.tolist() == [True, True, False]  # neither options nor captions
    assert batch.captions == [["one", ""], ["", ""], ["", ""]]
    assert batch.caption_mask.tolist() == [[True, False], [False, False], [False, False]]
    [fault] = batch.faults
    assert fault.reason == "c: no caption or question; give it a caption, captions, caption_file or question"
    windowed = row(video, captions=(), start_seconds=2.0, end_seconds=4.0, **options)
    assert 2.0 <= read_training_sample(windowed, 0, rules()).pts_seconds.min()


@pytest.mark.parametrize("options", [(), ("walk", "run")])
def test_questions_follow_the_key_that_says_where_clips_start(video, options):
    """ClipBERT defect 28: its question answering draws at random whatever the key says."""
    asked = row(video, options=options, labels=(1,) if options else ("run",))
    for clip_start, number in (("center", 1), ("random", 12)):
        drawn = rules(clip_start=clip_start, num_clips=2)
        samples = [read_training_sample(asked, epoch, drawn) for epoch in range(12)]
        assert len({tuple(sample.pts_seconds.tolist()) for sample in samples}) == number
