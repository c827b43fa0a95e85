"""Samples are pure functions of (seed, epoch, id); captions, windows and faults are as the design says."""

import collections
import contextlib
import json
import multiprocessing.forkserver
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from twinreel.data import loader, training_sample
from twinreel.data.clip import Caption, Clip, Fault, Sample
from twinreel.data.dataset import ClipDataset, ViewRules, read_clip
from twinreel.data.loader import FaultLog, collate, load_batches, refuse_missing_files
from twinreel.data.plan import Plan, Shares
from twinreel.data.storage import open_video
from twinreel.data.training_sample import TrainingRules, draw_captions, read_training_sample
from twinreel.errors import ConfigError, DataError, TrainingError
from twinreel.models.preprocessing import Preprocessing
from videos import frame_numbers, make_video

PREP = Preprocessing(num_frames=4, frame_rate=5.0, crop_size=48)
START_WORKER = loader._start_worker


def rules(**values):
    return TrainingRules(**({"preprocessing": PREP, "seed": 1, "num_candidates": 2, "flip": 0.0} | values))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """60 numbered frames at 10 a second: 6 s."""
    path = tmp_path_factory.mktemp("video") / "numbered.mp4"
    make_video(path, num_frames=60, frame_rate=10, size=(48, 48))
    return str(path)


def row(video, **values):
    return Clip(**({"id": "a", "video": video, "captions": (Caption(text="one"),)} | values))


def track(*entries):
    return tuple(Caption(text=t, start_seconds=s, end_seconds=e) for t, s, e in entries)


NARRATION = track(("a", 0.0, 1.0), ("b", 1.0, 2.0), ("c", 2.2, 3.0), ("d", 4.0, 5.0), ("e", 5.0, 5.9))


def test_a_sample_is_a_pure_function_of_seed_epoch_and_id(video):
    one = row(video, captions=NARRATION)
    first = read_training_sample(one, 0, rules())
    again = read_training_sample(one, 0, rules())
    assert torch.equal(first.frames, again.frames) and first.captions == again.captions
    others = [read_training_sample(one, epoch, rules()) for epoch in range(1, 9)]
    assert any(not torch.equal(first.pts_seconds, other.pts_seconds) for other in others)
    assert len({tuple(other.captions) for other in others}) > 1
    assert not torch.equal(
        read_training_sample(one, 0, rules(seed=2)).pts_seconds,
        read_training_sample(row(video, captions=NARRATION, id="b"), 0, rules()).pts_seconds,
    )


def test_augmentation_differs_between_samples_and_epochs_and_not_between_workers(video):  # B089
    rows = [row(video, id=f"id{i}") for i in range(8)]
    dataset = ClipDataset(rows, rules(flip=0.5, preprocessing=PREP.replace(crop_size=32)))
    keys = [[(epoch, i) for i in range(8)] for epoch in range(2)]
    found = {}
    for workers in (0, 2):
        batches = list(load_batches(dataset, keys, num_workers=workers))
        found[workers] = (torch.cat([b.frames for b in batches]), torch.cat([b.flip for b in batches]))
    assert torch.equal(found[0][0], found[2][0]) and torch.equal(found[0][1], found[2][1])
    frames, flips = found[0]
    assert len({frame.numpy().tobytes() for frame in frames}) == 16
    assert 0 < int(flips.sum()) < 16


def test_the_parent_may_read_before_the_workers_start(video):
    dataset = ClipDataset([row(video, id=str(i)) for i in range(4)], rules())
    first = dataset[(0, 0)]
    [batch] = load_batches(dataset, [[(0, 0), (0, 1)]], num_workers=2)
    assert torch.equal(batch.frames[0], first.frames)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_start_in_every_way(video, start):
    dataset = ClipDataset([row(video, id=str(i)) for i in range(2)], rules())
    [batch] = load_batches(dataset, [[(0, 0), (0, 1)]], num_workers=1, worker_start=start)
    assert torch.equal(batch.frames[1], dataset[(0, 1)].frames)


def test_frames_come_from_the_caption_window(video):
    for epoch in range(30):
        sample = read_training_sample(row(video, captions=track(("x", 2.0, 4.0))), epoch, rules())
        assert 2.0 - 0.1 <= sample.pts_seconds[0] <= 4.0 - 0.8 + 1e-6
        numbers = frame_numbers(sample.frames)
        assert numbers == [round(float(t) * 10) for t in sample.pts_seconds]
        assert np.diff(numbers).tolist() == [2, 2, 2]


def test_short_windows_are_widened_evenly(video):
    starts = []
    for epoch in range(60):
        sample = read_training_sample(row(video, captions=track(("x", 2.9, 3.1))), epoch, rules(min_window_seconds=2.0))
        starts.append(float(sample.pts_seconds[0]))
    assert min(starts) >= 1.9 and max(starts) <= 3.2 + 1e-6
    assert max(starts) - min(starts) > 0.9


def test_candidates_are_the_nearest_captions_and_repeats_are_masked(video):
    one = row(video, captions=NARRATION)
    seen = collections.Counter()
    for seed in range(200):
        captions, mask, window = draw_captions(one, rules(num_candidates=3), np.random.default_rng(seed))
        assert mask == [True] * 3
        seen["".join(captions)] += 1
        assert window in {(c.start_seconds, c.end_seconds) for c in NARRATION}
    assert set(seen) <= {"abc", "bcd", "cde"} and len(seen) >= 2
    captions, mask, _ = draw_captions(one, rules(num_candidates=8), np.random.default_rng(0))
    assert len(captions) == len(mask) == 8
    assert sorted(text for text, real in zip(captions, mask, strict=True) if real) == list("abcde")


def test_one_candidate_is_the_drawn_caption_itself(video):
    one = row(video, captions=NARRATION)
    for seed in range(20):
        captions, _, window = draw_captions(one, rules(num_candidates=1), np.random.default_rng(seed))
        assert window == next((c.start_seconds, c.end_seconds) for c in NARRATION if c.text == captions[0])


def test_captions_of_the_whole_row_are_drawn_without_repeating(video):
    one = row(video, captions=tuple(Caption(text=t) for t in "xyz"), start_seconds=1.0, end_seconds=3.0)
    captions, mask, window = draw_captions(one, rules(num_candidates=2), np.random.default_rng(0))
    assert len(set(captions)) == 2 and mask == [True, True] and window == (1.0, 3.0)
    captions, mask, _ = draw_captions(one, rules(num_candidates=4), np.random.default_rng(0))
    assert sorted(captions) == ["", "x", "y", "z"] and mask == [True, True, True, False]


def test_a_clip_longer_than_the_video_repeats_its_last_frame_and_is_counted(video):
    prep = PREP.replace(num_frames=40)  # 8 s of a 6 s video
    sample = read_training_sample(row(video), 0, rules(preprocessing=prep))
    numbers = frame_numbers(sample.frames)
    assert numbers[:30] == list(range(0, 60, 2)) and set(numbers[30:]) == {59}
    assert sample.repeated_frames == 10
    assert collate([sample]).repeated_frames == 10


@pytest.mark.parametrize("window", [(6.5, 9.0), (100.0, 103.0)])
def test_a_window_outside_the_video_is_an_excluded_sample(video, window):
    one = row(video, start_seconds=window[0], end_seconds=window[1])
    sample = ClipDataset([one], rules())[(0, 0)]
    assert sample.fault is not None and "numbered.mp4" in sample.fault.reason
    assert f"{window[0]:g}" in sample.fault.reason and "6" in sample.fault.reason
    batch = collate([sample, ClipDataset([row(video)], rules())[(0, 0)]])
    assert batch.valid.tolist() == [False, True] and not batch.caption_mask[0].any()


def test_a_video_that_is_none_is_an_excluded_sample_with_its_reason(tmp_path):
    broken = tmp_path / "page.mp4"
    broken.write_text("<html>404</html>")
    sample = ClipDataset([row(str(broken))], rules())[(0, 0)]
    assert sample.fault is not None and sample.fault.id == "a" and "page.mp4" in sample.fault.reason


def test_a_row_without_caption_is_an_excluded_sample(video):
    sample = ClipDataset([row(video, captions=())], rules())[(0, 0)]
    assert "no caption" in sample.fault.reason


def test_views_cover_the_row_from_its_first_moment_to_its_last(video):
    sample = ViewRules(preprocessing=PREP, num_clips=3)(row(video), 0)
    assert sample.frames.shape == (3, 4, 48, 48, 3)
    assert [frame_numbers(clip) for clip in sample.frames] == [
        [0, 2, 4, 6], [26, 28, 30, 32], [52, 54, 56, 58],
    ]  # fmt: skip
    inside = ViewRules(preprocessing=PREP, num_clips=2)(row(video, start_seconds=2.0, end_seconds=4.0), 0)
    assert [frame_numbers(clip)[0] for clip in inside.frames] == [20, 32]


def test_read_clip_is_what_evaluation_sees(video):
    clip = read_clip(video, PREP, start_seconds=3.0)
    assert clip.shape == (3, 4, 48, 48) and clip.dtype == torch.float32
    assert frame_numbers(PREP.to_pixels(clip[None])[0]) == [30, 32, 34, 36]
    assert frame_numbers(PREP.to_pixels(read_clip(video, PREP)[None])[0])[0] == 26
    with pytest.raises(DataError, match=r"numbered\.mp4"):
        read_clip(video, PREP, start_seconds=6.5)


def ten_samples(failed):
    """Flags and faults of 10 samples, the first `failed` of which could not be read."""
    faults = [Fault(id=f"bad{i}", video="v", reason=f"reason {i}") for i in range(failed)]
    return [i >= failed for i in range(10)], faults


def test_faults_are_written_with_reason_and_stop_a_run_that_has_too_many(tmp_path):
    log = FaultLog(tmp_path / "faults.jsonl", 0.05, num_rows=10_000)
    for step in range(50):
        log.record(*ten_samples(1), step)  # 10 %, but fewer than 5 % of 1 000 so far
    with pytest.raises(TrainingError, match=r"51 of the last 510 samples (?s:.*)reason 0"):
        log.record(*ten_samples(1), 50)
    lines = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert len(lines) == log.total == 51
    assert lines[0] == {"step": 0, "id": "bad0", "video": "v", "reason": "reason 0"}


def test_few_faults_do_not_stop_a_run_and_a_small_collection_is_judged_by_its_size(tmp_path):
    log = FaultLog(None, 0.05, num_rows=10_000)
    for step in range(300):
        log.record(*ten_samples(step % 3 == 0), step)  # 3.3 %
    small = FaultLog(None, 0.05, num_rows=20)
    small.record(*ten_samples(1), 0)  # 1 of 20
    with pytest.raises(TrainingError):
        small.record(*ten_samples(1), 1)


def test_missing_files_stop_a_run_before_it_starts_only_above_the_limit(tmp_path):
    good = [row(str(tmp_path / f"{i}.mp4"), id=str(i)) for i in range(19)]
    for one in good:
        (tmp_path / f"{one.id}.mp4").touch()
    missing = [row(str(tmp_path / f"missing{i}.mp4"), id=f"m{i}") for i in range(7)]
    assert refuse_missing_files([*good, missing[0]], 0.05) == [missing[0]]
    with pytest.raises(
        DataError, match=r"7 of 26 listed videos do not exist \(27%; allowed data.max_faults=5%\)"
    ) as caught:
        refuse_missing_files([*good, *missing], 0.05)
    assert len(re.findall(r"missing\d\.mp4", str(caught.value))) == 5 and "data.root" in str(caught.value)


def stuck_reader(row, epoch):
    if row.id == "3":
        time.sleep(60)
    return Sample(id=row.id, frames=torch.zeros(1, 2, 2, 3, dtype=torch.uint8), pts_seconds=torch.zeros(1))


def slow_to_begin(parent, worker):
    time.sleep(1.5)
    START_WORKER(parent, worker)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_signal_to_all_does_not_end_a_reader_that_has_not_begun(video, start, monkeypatch):
    """A service manager signals the whole group; a reader may still be importing."""
    monkeypatch.setattr(loader, "_start_worker", slow_to_begin)
    if start == "forkserver":
        multiprocessing.forkserver._forkserver._stop()  # one that another test has started answers to signals
    others = multiprocessing.active_children()
    sent = []

    def signal_the_readers():
        while len(readers := [r for r in multiprocessing.active_children() if r not in others]) < 2:
            time.sleep(0.01)
        for reader in readers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                os.kill(reader.pid, number)
                sent.append(reader.pid)

    sender = threading.Thread(target=signal_the_readers, daemon=True)
    sender.start()
    dataset = ClipDataset([row(video), row(video, id="b")], rules())
    batches = list(load_batches(dataset, [[(0, 0)], [(0, 1)]], num_workers=2, worker_start=start))
    sender.join(10.0)
    assert [batch.ids for batch in batches] == [["a"], ["b"]] and len(sent) == 8
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


@pytest.mark.slow
def test_a_reader_that_is_stuck_does_not_hold_the_exit():
    rows = [Clip(id=str(i), video="x") for i in range(8)]
    batches = load_batches(ClipDataset(rows, stuck_reader), [[(0, i)] for i in range(8)], num_workers=2)
    with pytest.raises(ValueError, match="boom"), contextlib.closing(batches):
        next(batches)
        raise ValueError("boom")
    assert not multiprocessing.active_children()


# ---- frames of the file, several crops, several views of one decode

STRIDED = Preprocessing(num_frames=4, frame_stride=6, crop_size=48)


@pytest.mark.parametrize("start", ["random", "center", "start"])
def test_a_strided_clip_has_every_nth_frame_of_the_file(video, start):  # B041
    firsts = set()
    for epoch in range(40):
        sample = read_training_sample(row(video), epoch, rules(preprocessing=STRIDED, clip_start=start))
        numbers = frame_numbers(sample.frames)
        assert np.diff(numbers).tolist() == [6, 6, 6] and sample.repeated_frames == 0
        assert [round(float(t) * 10) for t in sample.pts_seconds] == numbers
        firsts.add(numbers[0])
    last = 59 - 18
    expected = {"start": {0}, "center": {last // 2}}
    assert firsts == expected[start] if start in expected else len(firsts) > 15 and max(firsts) <= last


def test_a_strided_clip_lies_in_its_caption_window(video):
    for epoch in range(30):
        one = row(video, captions=track(("x", 2.0, 5.0)))
        numbers = frame_numbers(read_training_sample(one, epoch, rules(preprocessing=STRIDED)).frames)
        assert 20 <= numbers[0] and numbers[-1] < 50


def test_a_strided_clip_of_a_variable_rate_counts_frames_not_seconds(tmp_path):
    times = [0.0, 0.1, 0.2, 1.7, 1.8, 1.9, 2.5, 2.6, 2.7, 2.8]
    path = make_video(tmp_path / "vfr.mp4", num_frames=10, pts_seconds=times, size=(48, 48))
    sample = ViewRules(preprocessing=STRIDED.replace(frame_stride=2), num_clips=2)(row(str(path)), 0)
    assert [frame_numbers(clip) for clip in sample.frames] == [[0, 2, 4, 6], [3, 5, 7, 9]]
    assert sample.pts_seconds[0].tolist() == pytest.approx([0.0, 0.2, 1.8, 2.5])


@pytest.mark.parametrize(("num_frames", "stride", "shown"), [(16, 4, 3), (32, 2, 5)])
def test_a_strided_clip_longer_than_the_video_holds_its_last_frame_and_is_counted(  # B025
    tmp_path, num_frames, stride, shown
):
    path = str(make_video(tmp_path / "short9.mp4", num_frames=9, frame_rate=30, size=(48, 48)))
    prep = Preprocessing(num_frames=num_frames, frame_stride=stride, crop_size=48)
    for sample in (
        read_training_sample(row(path), 3, rules(preprocessing=prep)),
        ViewRules(preprocessing=prep, num_clips=1)(row(path), 0),
    ):
        numbers = frame_numbers(sample.frames.reshape(num_frames, 48, 48, 3))
        assert numbers[:shown] == list(range(0, 9, stride)) and set(numbers[shown:]) == {8}
        assert sample.repeated_frames == num_frames - shown


def test_strided_views_reach_the_first_frame_and_the_last(video):  # B045
    sample = ViewRules(preprocessing=STRIDED, num_clips=5)(row(video), 0)
    firsts = [frame_numbers(clip)[0] for clip in sample.frames]
    assert firsts[0] == 0 and len(set(firsts)) == 5 and frame_numbers(sample.frames[-1])[-1] == 59
    [one] = ViewRules(preprocessing=STRIDED, num_clips=1)(row(video), 0).frames
    assert frame_numbers(one) == [20, 26, 32, 38]
    inside = ViewRules(preprocessing=STRIDED, num_clips=2)(row(video, start_seconds=1.0, end_seconds=4.0), 0)
    assert [frame_numbers(clip)[0] for clip in inside.frames] == [10, 21]


def test_read_clip_of_a_strided_model(video):
    clip = read_clip(video, STRIDED, start_seconds=3.0)
    assert frame_numbers(STRIDED.to_pixels(clip[None])[0]) == [30, 36, 42, 48]
    assert frame_numbers(STRIDED.to_pixels(read_clip(video, STRIDED)[None])[0]) == [20, 26, 32, 38]


def test_one_random_frame_a_segment_in_training_and_its_middle_in_evaluation(video):
    drawn = [read_training_sample(row(video), epoch, rules(clip_start="segments")) for epoch in range(60)]
    numbers = np.array([frame_numbers(sample.frames) for sample in drawn])
    assert (numbers // 15 == [0, 1, 2, 3]).all() and len({tuple(clip) for clip in numbers.tolist()}) > 50
    [middle] = ViewRules(preprocessing=PREP, num_clips=7, windows="whole")(row(video), 0).frames
    assert frame_numbers(middle) == [7, 22, 37, 52]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """60 numbered frames, 96 x 48: a crop that is not the whole frame shows other pixels."""
    return str(make_video(tmp_path_factory.mktemp("wide") / "wide.mp4", num_frames=60, size=(96, 48)))


def test_three_crops_are_parts_of_the_same_frames(wide):
    one = row(wide)
    sample = ViewRules(preprocessing=PREP, num_clips=2, num_crops=3)(one, 0)
    assert sample.frames.shape == (6, 4, 48, 48, 3) and sample.pts_seconds.shape == (6, 4)
    single = ViewRules(preprocessing=PREP, num_clips=2)(one, 0)
    with open_video(wide) as reader:
        for clip in range(2):
            whole = reader.frames_at(single.pts_seconds[clip].tolist()).data
            for crop, left in enumerate((0, 24, 48)):
                view = 3 * clip + crop
                assert torch.equal(sample.frames[view], whole[:, :, left : left + 48])
                assert torch.equal(sample.pts_seconds[view], single.pts_seconds[clip])
            assert torch.equal(single.frames[clip], sample.frames[3 * clip + 1])


def test_whole_frames_are_padded_in_training_and_evaluation(wide):
    prep = PREP.replace(fit="pad")
    trained = read_training_sample(row(wide), 0, rules(preprocessing=prep, crop="pad", clip_start="start"))
    [judged] = ViewRules(preprocessing=prep, num_clips=1)(row(wide, end_seconds=0.8), 0).frames
    assert torch.equal(trained.frames, judged) and judged.shape == (4, 48, 48, 3)
    assert not judged[:, 24:].any() and frame_numbers(judged[:, :24]) == [0, 2, 4, 6]
    clip = read_clip(wide, prep, start_seconds=0.0)
    assert torch.equal(prep.to_pixels(clip[None])[0], judged)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rules(crop="pad"), "data.crop=pad with model.preprocessing.fit=crop"),
        (lambda: rules(preprocessing=PREP.replace(fit="pad")), "data.crop=random with model.preprocessing.fit=pad"),
        (lambda: ViewRules(preprocessing=PREP.replace(fit="pad"), num_clips=1, num_crops=3), "eval.num_crops=3"),
        (lambda: ViewRules(preprocessing=STRIDED, num_clips=1, windows="clipbert"), "counts in seconds"),
        (lambda: ViewRules(preprocessing=STRIDED, num_clips=1, windows="clipbert_start"), "windows=clipbert_start"),
        (lambda: rules(num_clips=0), "data.num_clips=0: a sample has at least 1 clip"),
        (lambda: rules(num_clips=2, clip_start="uniform"), "every clip would show the same frames"),
    ],
)
def test_rules_that_do_not_go_with_the_model_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def views_rules(number, **values):
    prep = PREP.replace(crop_size=32)
    return rules(**({"preprocessing": prep, "flip": 0.5, "views_per_decode": number} | values))


def test_the_views_of_a_row_are_one_decode_cropped_and_mirrored_anew(wide, monkeypatch):
    opened = []
    monkeypatch.setattr(training_sample, "open_video", lambda path: opened.append(path) or open_video(path))
    dataset = ClipDataset([row(wide, id=str(i), captions=NARRATION) for i in range(6)], views_rules(4))
    for index in range(6):
        views = dataset[(2, index)]
        assert len(views) == 4 and len(opened) == index + 1
        assert len({view.frames.numpy().tobytes() for view in views}) > 1
        for view in views[1:]:
            assert view.id == str(index) and torch.equal(view.pts_seconds, views[0].pts_seconds)
            assert view.captions == views[0].captions and view.caption_mask == views[0].caption_mask
    flips = [view.flip for index in range(6) for view in dataset[(2, index)]]
    assert 0 < sum(flips) < 24


def test_the_first_view_is_what_one_alone_would_be_and_more_change_none(wide):
    one = row(wide, captions=NARRATION)
    alone, two, four = (ClipDataset([one], views_rules(number))[(5, 0)] for number in (1, 2, 4))
    for view, same in zip([alone, *four[:2]], [two[0], *two], strict=True):
        assert torch.equal(view.frames, same.frames) and view.flip == same.flip and view.captions == same.captions


def test_views_are_in_the_batch_side_by_side_whatever_the_readers(wide):
    dataset = ClipDataset([row(wide, id=str(i)) for i in range(6)], views_rules(2, crop="resized"))
    plan = Plan(num_rows=6, seed=0, global_batch_size=4, views_per_row=2)
    shares = Shares.cut(4, 2, 2, clips_together=2)
    whole = list(load_batches(dataset, plan.micro_batches(0, 3, Shares.cut(4, clips_together=2)), num_workers=0))
    assert [batch.ids for batch in whole] == [[dataset.rows[at].id for _, at in plan.batch(step)] for step in range(3)]
    readers = [list(load_batches(dataset, plan.micro_batches(0, 3, shares, p), num_workers=2 * p)) for p in range(2)]
    for step in range(3):
        pieces = [readers[process][step] for process in range(2)]
        assert torch.equal(whole[step].frames, torch.cat([piece.frames for piece in pieces]))
        assert torch.equal(whole[step].flip, torch.cat([piece.flip for piece in pieces]))
        assert [batch_id for piece in pieces for batch_id in piece.ids] == whole[step].ids


def test_a_row_that_cannot_be_read_is_masked_in_all_its_views(wide, tmp_path):
    rows = [row(wide), row(str(tmp_path / "none.mp4"), id="b")]
    [batch] = load_batches(ClipDataset(rows, views_rules(3)), [[(0, 0), (0, 1)]], num_workers=0)
    assert batch.valid.tolist() == [True] * 3 + [False] * 3 and batch.frames.shape == (6, 4, 32, 32, 3)
    assert [fault.id for fault in batch.faults] == ["b"] * 3 and not batch.caption_mask[3:].any()


def test_a_mirrored_clip_gets_the_label_of_its_mirror_image(video):
    pairs = {"left": "right", "wave": None}
    seen = set()
    for label in ("left", "right", "wave", "run"):
        for epoch in range(12):
            drawn = rules(num_candidates=0, flip=0.5, flip_labels=pairs)
            sample = read_training_sample(row(video, labels=(label,), captions=()), epoch, drawn)
            seen.add((label, sample.flip, *sample.labels))
            assert sample.captions == [] and sample.caption_mask == []
    assert seen == {
        ("left", False, "left"), ("left", True, "right"), ("right", False, "right"), ("right", True, "left"),
        ("wave", False, "wave"), ("run", False, "run"), ("run", True, "run"),
    }  # fmt: skip
    flips = [
        read_training_sample(row(video, labels=("left",)), epoch, rules(flip=1.0, flip_labels=pairs)).flip
        for epoch in range(5)
    ]
    assert not any(flips)  # its caption would go on saying left


def test_samples_without_captions_make_a_batch(video):
    dataset = ClipDataset([row(video, captions=()), row(video, id="b", captions=())], rules(num_candidates=0))
    [batch] = load_batches(dataset, [[(0, 0), (0, 1)]], num_workers=0)
    assert batch.valid.tolist() == [True, True] and batch.caption_mask.shape == (2, 0)
