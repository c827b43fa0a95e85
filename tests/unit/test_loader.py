"""Batches are the same however they are read; readers cost what is said, and lack of shared memory is told in time."""

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
import torch
from small_runs import CPU, assert_same_runs, own, recipe, records

from twinreel import training
from twinreel.data import read_ahead
from twinreel.data.clip import Caption, Clip, Sample
from twinreel.data.dataset import ClipDataset, ViewRules
from twinreel.data.device_feed import feed_device, hold_ahead
from twinreel.data.loader import collate, load_batches, readers_watched
from twinreel.data.preparation.pack import pack_collection
from twinreel.data.read_ahead import clip_bytes, plan_ahead
from twinreel.data.shared_rows import SharedRows
from twinreel.data.training_sample import TrainingRules
from twinreel.errors import ConfigError, TrainingError
from twinreel.models.preprocessing import Preprocessing
from twinreel.training import train
from videos import frame_numbers, make_video

PREP = Preprocessing(num_frames=3, frame_rate=5.0, crop_size=48)
RULES = TrainingRules(preprocessing=PREP, seed=1, num_candidates=2)
STARTS = ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 videos of 40 numbered frames at 10 a second, with a key frame every 12 frames and B-frames."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(20):
        make_video(folder / f"{number}.mp4", num_frames=40, size=(64, 48), first_number=40 * number, b_frames=2)
    return folder


@pytest.fixture(scope="module")
def rows(folder, tmp_path_factory):
    page = tmp_path_factory.mktemp("page") / "page.mp4"
    page.write_text("<html>404</html>")
    return [
        Clip(id=file.stem, video=str(file), captions=(Caption(text=f"video {file.stem}"),), labels=("a", 3))
        for file in [*(folder / f"{number}.mp4" for number in range(20)), page]
    ]


def assert_same_batches(ones, others):
    for one, other in zip(ones, others, strict=True):
        for name in ("frames", "pts_seconds", "flip", "valid", "caption_mask"):
            tensor = getattr(other, name)
            assert torch.equal(getattr(one, name), tensor) and getattr(one, name).dtype == tensor.dtype, name
        for name in ("ids", "captions", "labels", "repeated_frames", "faults"):
            assert getattr(one, name) == getattr(other, name), name


def keys_of(epoch, size=5):
    order = np.random.default_rng(epoch).permutation(21).tolist()
    return [[(epoch, index) for index in order[first : first + size]] for first in range(0, 21, size)]


# ---- readers


@pytest.mark.parametrize("start", STARTS)
def test_batches_of_readers_are_those_of_this_process_in_every_field(rows, start):  # B022
    dataset = ClipDataset(rows, RULES)
    alone = [collate([dataset[key] for key in keys]) for keys in keys_of(0)]  # the parent has read: then it forks
    assert sum(len(batch.faults) for batch in alone) == 1
    batches = list(load_batches(dataset, keys_of(0), num_workers=2, worker_start=start))
    assert_same_batches(batches, alone)
    assert_same_batches(load_batches(dataset, keys_of(0), num_workers=0), alone)
    assert batches[0].frames.is_shared() and not batches[0].pts_seconds.is_shared()
    batches[0].flip.fill_(True)  # what came as values may be written to


def test_a_reader_puts_frames_into_shared_memory_at_once(rows, monkeypatch):
    """Later, in the thread that sends them, lack of it would be lost, and the run would wait for ever."""
    samples = [ClipDataset(rows, RULES)[(0, 0)]]
    assert not collate(samples).frames.is_shared()
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())
    assert collate(samples).frames.is_shared()


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_twenty_epochs_left_early_end(rows, start):  # B021
    dataset = ClipDataset(rows, RULES)
    dataset[(0, 0)]
    files = []
    for epoch in range(20):
        with contextlib.closing(load_batches(dataset, keys_of(epoch), num_workers=2, worker_start=start)) as batches:
            for number, batch in enumerate(batches):
                assert_same_batches([batch], [collate([dataset[key] for key in keys_of(epoch)[number]])])
                if number == epoch % 3:
                    break
        del batch
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
    assert not multiprocessing.active_children()
    assert files[-1] < files[0] + 10, files  # some are closed a little later


@pytest.mark.slow
def test_twenty_epochs_by_spawn_left_early_end(rows):  # B021
    dataset = ClipDataset(rows, RULES)
    for epoch in range(20):
        with contextlib.closing(load_batches(dataset, keys_of(epoch), num_workers=2, worker_start="spawn")) as batches:
            assert_same_batches([next(batches)], [collate([dataset[key] for key in keys_of(epoch)[0]])])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("start", STARTS)
def test_a_folder_and_a_store_give_the_same_bytes(folder, rows, tmp_path, start):  # B022
    pack_collection(folder, tmp_path / "all.lmdb", suffixes=[".mp4"])
    packed = [
        Clip(id=row.id, video=str(tmp_path / "all.lmdb" / f"{row.id}.mp4"), captions=row.captions, labels=row.labels)
        for row in rows[:20]
    ]
    keys = [[(1, index) for index in range(first, first + 5)] for first in range(0, 20, 5)]
    store = ClipDataset(packed, RULES)
    store[(0, 0)]  # opened here before the readers start
    in_store = load_batches(store, keys, num_workers=2, worker_start=start)
    assert_same_batches(in_store, load_batches(ClipDataset(rows, RULES), keys, num_workers=0))


def of_nothing(row, epoch):
    return Sample(id=row.id, frames=torch.zeros(1), pts_seconds=torch.zeros(1))


def without_room(row, epoch):
    raise RuntimeError(f"unable to allocate shared memory(shm) for file </torch_1>: {os.strerror(errno.ENOSPC)} (28)")


def test_a_reader_without_shared_memory_ends_the_run_with_words():  # B086
    batches = load_batches(ClipDataset([Clip(id="a", video="x")], without_room), [[(0, 0)]], num_workers=1)
    with pytest.raises(TrainingError) as caught, readers_watched(), contextlib.closing(batches):
        next(batches)
    said = str(caught.value)
    assert "No space left" in said and "--shm-size" in said and "data.num_workers" in said and "Traceback" not in said


# ---- rows held once


def test_shared_rows_are_the_rows(rows):
    rows = [*rows, Clip(id="w", video="v", start_seconds=1.5, end_seconds=2.5, caption_file="c.csv", split="train")]
    shared = SharedRows(rows)
    assert list(shared) == rows and len(shared) == len(rows)
    assert shared[-1] == rows[-1] and shared[3:7] == rows[3:7] and shared[::-5] == rows[::-5]
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match=f"row {outside} of {len(rows)}"):
            shared[outside]
    assert list(pickle.loads(pickle.dumps(shared))) == rows
    assert list(SharedRows([])) == []


def test_readers_do_not_get_a_copy_of_the_rows_each():
    """A million rows are 170 MB: what is passed to a process that is started is a descriptor."""
    shared = SharedRows([Clip(id=str(number), video=f"/data/{number}.mp4") for number in range(2000)])
    assert len(shared._block) < 2000 * 160
    for start in ("forkserver", "spawn"):
        context = multiprocessing.get_context(start)
        mine, theirs = context.Pipe()
        process = context.Process(target=send_last, args=(shared, theirs))
        process.start()
        last, size, file = mine.recv()
        process.join(20.0)
        assert last == shared[-1] and size == len(shared) and process.exitcode == 0
        assert file == os.fstat(shared._descriptor).st_ino  # the same memory


def send_last(rows, pipe):
    pipe.send((rows[-1], len(rows), os.fstat(rows._descriptor).st_ino))


# ---- what is under way


def free(monkeypatch, size):
    monkeypatch.setattr(read_ahead, "free_shared_memory", lambda: size)


BIG = clip_bytes(Preprocessing(num_frames=32, frame_rate=8.0, crop_size=224))
MB = 2**20


def test_too_little_shared_memory_is_said_before_it_is_used_up(monkeypatch):  # B086
    free(monkeypatch, 64 * MB)
    plan = plan_ahead(BIG, 3, num_workers=4, held=1)
    assert plan.batches == 1 and plan.bytes_under_way == 5 * 3 * BIG
    said = plan.warning()
    for words in ("69 MB under way", "4 readers + 1 in use", "batches of 14 MB", "/dev/shm has 64 MB free"):
        assert words in said, said
    for key in ("data.num_workers (now 4; ", "train.micro_batch_size", "eval.batch_size", "num_frames", "crop_size"):
        assert key in said
    fit = int(said.partition("(now 4; ")[2].split()[0])
    assert plan_ahead(BIG, 3, num_workers=fit, held=1).warning() is None
    assert plan_ahead(BIG, 3, num_workers=fit + 1, held=1).warning() is not None
    with pytest.raises(ConfigError, match=r"a batch of 16 clips is 74 MB.*64 MB free: lower train.micro_batch_size"):
        plan_ahead(BIG, 16, num_workers=4, held=1)
    assert plan_ahead(BIG, 16, num_workers=0, held=1).warning() is None  # reads here: nothing is handed over


def test_readers_run_ahead_as_far_as_is_of_use_and_fits(monkeypatch):
    def batches(size, clips, workers, processes=1):
        free(monkeypatch, size)
        return plan_ahead(BIG, clips, num_workers=workers, held=1, processes=processes).batches

    assert batches(None, 1, 2) == batches(2**40, 1, 2) == 4
    assert batches(2**40, 64, 16) == 2  # 300 MB each: 2 for each of 16 readers are enough
    assert [batches(size * BIG, 1, 2) for size in (4, 7, 9, 12)] == [1, 2, 3, 4]
    assert batches(12 * BIG, 1, 2, processes=2) == 1


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    free(monkeypatch, 2**33)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    plan = plan_ahead(BIG, 16, num_workers=4, held=2)
    assert plan.bytes_under_way == 8 * (4 * plan.batches + 2) * 16 * BIG
    assert "4 readers in each of 8 processes run up to" in plan.line()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: 2)
    assert plan_ahead(BIG, 1, num_workers=2, held=2).line() is None  # little: not worth a line
    assert "more readers than the 2 cores" in plan_ahead(BIG, 1, num_workers=3).line()
    assert plan_ahead(BIG, 1, num_workers=0).line() is None
    rows = [Clip(id="a", video="x")]
    assert len(list(load_batches(ClipDataset(rows, of_nothing), [[(0, 0)]], num_workers=3))) == 1  # torch warns not


def test_a_run_says_what_is_short_and_refuses_what_cannot_fit(monkeypatch, tmp_path):  # B086
    wanted = recipe(tmp_path / "videos", "data.num_workers=1", "train.num_steps=2", "optim.warmup_steps=0",
                    "eval.batch_size=2")  # fmt: skip
    one_batch = 4 * 4 * 32 * 32 * 3
    free(monkeypatch, one_batch - 1)
    with pytest.raises(ConfigError, match="a batch of 4 clips"):
        train(wanted, tmp_path / "refused", quiet=True)
    assert not list((tmp_path / "refused").glob("*.yaml"))
    judged = recipe(tmp_path / "videos", "data.num_workers=1", "eval.batch_size=64")
    free(monkeypatch, 2 * one_batch)
    with pytest.raises(ConfigError, match="a batch of 64 clips"):  # of the evaluation at its end
        train(judged, tmp_path / "refused", quiet=True)
    assert not list((tmp_path / "refused").glob("*.yaml"))
    train(wanted, tmp_path / "short", quiet=True)
    assert "warning: readers may run out of shared memory" in (tmp_path / "short" / "log.txt").read_text()


# ---- the feed of the device


class NotingMover:
    """A device that notes what is done for it."""

    def __init__(self):
        self.done = []

    def begin(self, frames):
        self.done.append(("begin", int(frames[0, 0])))
        return frames

    def finish(self, moving):
        self.done.append(("finish", int(moving[0, 0])))
        return moving + 100


def numbered(count, seconds=0.0, closed=None):
    try:
        for number in range(count):
            time.sleep(seconds)
            sample = Sample(id=str(number), frames=torch.tensor([number]), pts_seconds=torch.zeros(1))
            yield collate([sample])
    finally:
        if closed is not None:
            closed.append(True)


def test_the_next_batch_is_on_its_way_when_one_is_handed_out():
    mover = NotingMover()
    for batch in hold_ahead(numbered(3), mover):
        mover.done.append(("computed", batch.ids[0], int(batch.frames)))
    assert mover.done == [
        ("begin", 0), ("begin", 1), ("finish", 0), ("computed", "0", 100), ("begin", 2), ("finish", 1),
        ("computed", "1", 101), ("finish", 2), ("computed", "2", 102),
    ]  # fmt: skip
    assert list(hold_ahead(numbered(0), NotingMover())) == []


def test_of_the_micro_batches_of_a_step_the_first_is_moved_ahead():
    mover = NotingMover()
    frames = [int(batch.frames) for batch in hold_ahead(numbered(7), mover, every=3)]
    assert frames == [100, 1, 2, 103, 4, 5, 106]  # the others are moved when it is their turn
    assert [number for what, number in mover.done if what == "begin"] == [0, 3, 6]


def test_waiting_is_what_the_one_who_asks_has_waited():
    waited = [batch.wait_seconds for batch in hold_ahead(numbered(4, seconds=0.05), NotingMover())]
    assert waited[0] >= 0.1 and min(waited[1:3]) >= 0.045 and waited[3] < 0.04
    computing = []
    for batch in hold_ahead(numbered(4), NotingMover()):
        time.sleep(0.05)  # is not waiting
        computing.append(batch.wait_seconds)
    assert max(computing) < 0.04


def test_a_feed_that_is_left_early_closes_the_loader():
    closed = []
    loader = numbered(9, closed=closed)
    with contextlib.closing(hold_ahead(loader, NotingMover())) as batches:
        next(batches)
    assert closed == [True]


def test_on_a_cpu_nothing_is_put_in_between():
    batches = numbered(2)
    assert feed_device(batches, CPU) is batches


class Copying:
    def begin(self, frames):
        return frames.clone()

    def finish(self, moving):
        return moving


@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_a_run_that_is_fed_ahead_is_the_same_bit_for_bit(tmp_path, monkeypatch, micro_batch_size):
    wanted = own(
        tmp_path / "videos", "data.num_workers=1", f"train.micro_batch_size={micro_batch_size}", "train.num_steps=3",
        "optim.warmup_steps=0",
    )  # fmt: skip
    train(wanted, tmp_path / "plain", quiet=True)
    asked = []

    def feed(batches, device, every):
        asked.append(every)
        return hold_ahead(batches, Copying(), every)

    monkeypatch.setattr(training, "feed_device", feed)
    train(wanted, tmp_path / "fed", quiet=True)
    assert asked == [4 // micro_batch_size]
    assert_same_runs(tmp_path / "plain", tmp_path / "fed")


# ---- waiting is seen


class Sleeping:
    """A collection on slow storage."""

    def __init__(self, rules):
        self.rules = rules

    def __call__(self, row, epoch):
        time.sleep(0.5)
        return self.rules(row, epoch)


def test_a_loader_that_sleeps_is_seen_in_every_line_and_warned_of(tmp_path, monkeypatch):  # B088
    wanted = recipe(tmp_path / "videos", "train.num_steps=3", "train.global_batch_size=2", "optim.warmup_steps=0")
    real = training.training_rules
    monkeypatch.setattr(training, "training_rules", lambda *said: Sleeping(real(*said)))
    train(wanted, tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"]
    assert len(lines) == 3 == len(records(tmp_path / "run"))
    for line in lines:
        assert 1.0 <= line["data_seconds"] < line["step_seconds"] and line["waiting_share"] > 0.3
    assert "data.num_workers" in (tmp_path / "run" / "log.txt").read_text()


def test_views_of_a_row_are_read_alike_by_readers(rows):
    dataset = ClipDataset(rows[:4], ViewRules(preprocessing=PREP, num_clips=2))
    [batch] = load_batches(dataset, [[(0, index) for index in range(4)]], num_workers=1)
    assert batch.frames.shape == (4, 2, 3, 48, 48, 3)
    assert frame_numbers(batch.frames[2, 0])[0] == 80
