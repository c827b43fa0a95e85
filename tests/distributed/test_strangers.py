"""What users bring to several processes: machines that differ, losses that fall silent, towers with a memory."""

import json
import shutil
import socket
from pathlib import Path

import processes
import pytest
import torch
from processes import run_processes
from torch import nn

from twinreel import agreement
from twinreel.checkpoint import find_checkpoint, read_weights
from twinreel.data.plan import Plan
from twinreel.distributed import share_buffers, world
from twinreel.errors import ConfigError, DataError, TrainingError
from twinreel.losses import info_nce
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import load_recipe
from twinreel.training import train
from videos import make_video

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPTIONS = ("a red dog", "two blue cats", "one green bird", "some yellow fish")
SEED = 1
MADE = []  # the towers of this process, the newest last


class Towers(nn.Module):
    """Without dropout and batch norm, so that several processes can be compared with one.

    `center` subtracts a running mean from the videos, which training moves; `poison` spoils the second process's.
    With `first` an embedding is the first of a sequence, as transformers give it: a view, not contiguous.
    """

    def __init__(self, center, poison, first):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=2, frame_rate=4.0, crop_size=8)
        self.video_tower = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 8 * 8, 6))
        self.text_tower = nn.Linear(len(LETTERS), 6)
        self.moves, self.poison, self.first = center, poison, first
        if center:
            self.register_buffer("center", torch.zeros(6))
            self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def encode_video(self, video):
        embeddings = self.video_tower(video)
        if self.poison and world().rank == 1:
            embeddings = embeddings * float("nan")
        if not self.moves:
            return self.shown(embeddings)
        if self.training:
            self.center = torch.lerp(self.center, embeddings.detach().mean(0), 0.3)  # another tensor under the name
            self.updates += 1  # in place
        return embeddings - self.center

    def encode_text(self, captions):
        counts = torch.tensor([[text.count(letter) / 4 for letter in LETTERS] for text in captions])
        return self.shown(self.text_tower(counts))

    def shown(self, embeddings):
        return torch.stack([embeddings, -embeddings], 1)[:, 0] if self.first else embeddings


def towers(*, center: bool = False, poison: bool = False, first: bool = False) -> nn.Module:
    MADE.append(Towers(center, poison, first))
    return MADE[-1]


def whole_or_nothing(video_embeddings, text_embeddings, *, mask, valid, text_ids):
    """A loss that every process computes whole; a constant where no clip is usable."""
    if not (valid & mask.any(1)).any():
        return torch.tensor(0.0)
    return info_nce(video_embeddings, text_embeddings, mask=mask, valid=valid, text_ids=text_ids)


def share_or_nothing(video_embeddings, text_embeddings, *, mask, valid, text_ids, own=None):
    """A loss that computes this process's share; a constant where none of its clips is usable."""
    usable = valid & mask.any(1)
    if not (usable if own is None else usable[own]).any():
        return torch.tensor(0.0)
    return info_nce(video_embeddings, text_embeddings, mask=mask, valid=valid, text_ids=text_ids, own=own)


def make_rows(folder, captions=CAPTIONS, broken=()):
    """A manifest with its videos beside it, some of which cannot be read; its path."""
    folder.mkdir(parents=True)
    for i in range(len(captions)):
        if i in broken:
            (folder / f"{i}.mp4").write_text("no video")
        else:
            make_video(folder / f"{i}.mp4", num_frames=6, frame_rate=4, size=(16, 12), first_number=40 * i)
    lines = [
        json.dumps({"id": f"row {i}", "video": f"{i}.mp4", "captions": [c, f"{c} again"]})
        for i, c in enumerate(captions)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return make_rows(tmp_path_factory.mktemp("rows") / "here")


@pytest.fixture(autouse=True)
def no_long_wait(monkeypatch):
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 60)  # somebody who waits for the others for good has failed


def recipe(rows, *overrides, loss="milnce", **model):
    """Three steps of all four rows."""
    options = "".join(f", {name}: {str(value).lower()}" for name, value in model.items())
    return load_recipe("s3dg_small_own_videos", [
        f"data.manifest={rows}", f"model={{name: 'test_strangers:towers'{options}}}", "data.num_workers=0",
        f"task={{loss: '{loss}', num_candidates: 1}}", "data.max_faults=1.0", "train.num_epochs=null",
        "train.num_steps=3", f"train.seed={SEED}", "train.global_batch_size=4", "train.log_every=1",
        "train.save_every=2 steps", "optim.warmup_epochs=0", "optim.name=sgd", "optim.learning_rate=0.1", *overrides,
    ])  # fmt: skip


def weights():
    return {name: value.clone() for name, value in MADE[-1].state_dict().items()}


def trained(cases, folder, **options):
    """The weights that this process holds after each run: of recipes, or of one recipe a process."""
    ended = {}
    for name, wanted in cases.items():
        mine = wanted[world().rank] if isinstance(wanted, list) else wanted
        assert train(mine, folder / name, quiet=True, **options).steps == mine.train.num_steps
        ended[name] = weights()
    return ended


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---- machines that differ


def refused(cases, folder):
    """What each run of one recipe a process is refused with in this process: kind, who says it, words."""
    said = {}
    for name, wanted in cases.items():
        with pytest.raises((ConfigError, DataError)) as caught:
            train(wanted[world().rank], folder / name, quiet=True)
        said[name] = type(caught.value), caught.value.speaker, str(caught.value)
    return said


def test_processes_that_would_do_different_things_are_refused_by_all(tmp_path, rows):
    other_rows = make_rows(tmp_path / "other", (*CAPTIONS[:-1], "another fish"))
    changes = {
        "seed": ["train.seed=5"], "flip": ["data.flip=0.25"], "log": ["train.log_every=2"], "rows": [],
        "some": ["optim.learning_rate=0.3", "train.keep_last=7"],
    }  # fmt: skip
    cases = {
        name: [recipe(rows), recipe(other_rows if name == "rows" else rows, *more)] for name, more in changes.items()
    }
    first, second = run_processes(2, refused, cases, tmp_path)
    assert first == second
    host = socket.gethostname()
    for name, differs in (
        ("seed", "train.seed: 5, not 1"), ("flip", "data.flip: 0.25, not 0.5"), ("log", "train.log_every: 2, not 1"),
        ("some", "optim.learning_rate: 0.3, not 0.1; train.keep_last: 7, not 3"),
    ):  # fmt: skip
        assert first[name] == (
            ConfigError, "main", f"process 1 on {host} does not do what process 0 does: {differs}. Start every machine "
            "with the same line, recipe and versions",
        )  # fmt: skip
    kind, speaker, words = first["rows"]
    assert (kind, speaker) == (DataError, "main") and words.count("4 rows, ") == 2
    assert words.startswith(f"process 1 on {host} has other training rows than process 0 (4 rows, ")
    assert words.endswith("): give every machine the same manifest and captions")
    assert [item.name for item in tmp_path.iterdir()] == ["other"]  # no run folder is left


def test_where_the_files_lie_and_who_reads_them_may_differ_from_machine_to_machine(tmp_path, rows):
    shutil.copytree(rows.parent, tmp_path / "there")
    there = recipe(
        tmp_path / "there" / "rows.jsonl", f"data.root={tmp_path / 'there'}", "data.num_workers=1",
        "data.worker_start=fork",
    )  # fmt: skip
    first, second = run_processes(2, trained, {"run": [recipe(rows, f"data.root={rows.parent}"), there]}, tmp_path)
    assert_same(first["run"], second["run"])
    assert_same(first["run"], read_weights(find_checkpoint(tmp_path / "run")[0]))


# ---- a loss that falls silent


@pytest.mark.parametrize("num_rows", [pytest.param(4, id="half a batch"), pytest.param(8, id="a whole batch")])
def test_a_loss_that_is_a_constant_where_nothing_is_usable_neither_hangs_nor_changes_the_gradient(tmp_path, num_rows):
    """In the first step the second half of the clips, or all, cannot be read: a micro-batch, or a process's share."""
    order = [row for _, row in Plan(num_rows=num_rows, seed=SEED, global_batch_size=4).batch(0)]
    rows = make_rows(tmp_path / "rows", CAPTIONS * (num_rows // 4), broken=order[2:] if num_rows == 4 else order)
    once, twice, cached = "train.micro_batch_size=2", "train.micro_batch_size=1", "train.cached_negatives=true"
    cases = {
        f"{loss} {layout}": recipe(rows, *options, loss=f"test_strangers:{loss}")
        for loss in ("whole_or_nothing", "share_or_nothing")
        for layout, options in {
            "once": [once], "twice": [twice], "once, cached": [once, cached], "twice, cached": [twice, cached],
        }.items()
    }  # fmt: skip
    never_silent = {"twice": recipe(rows, once, loss="info_nce"), "whole": recipe(rows, loss="info_nce")}
    alone = trained(never_silent, tmp_path / "one")
    first, second = run_processes(2, trained, cases, tmp_path / "two")
    for name, mine in first.items():
        assert_same(mine, second[name])
        for parameter, value in alone["twice" if name.endswith("twice") else "whole"].items():
            torch.testing.assert_close(mine[parameter], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")


# ---- towers with a memory of their own


def remembered(folder, cases):
    """Of each recipe, run whole and resumed after step 2: the weights that this process holds."""
    whole = trained(cases, folder / "whole")
    if world().is_main:
        shutil.copytree(folder / "whole", folder / "resumed", symlinks=True)
    return whole, trained(cases, folder / "resumed", resume="step_2")


def train_lines(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    noisy = {"clips_per_second", "step_seconds", "data_seconds", "waiting_share", "memory_gb"}
    return [{key: line[key] for key in line.keys() - noisy} for line in lines if line["kind"] == "train"]


def test_what_towers_remember_beside_weights_is_the_same_in_all_processes_and_resumed_bit_for_bit(tmp_path, rows):
    """With cached negatives every clip is embedded twice a step, but remembered once."""
    options = ["train.num_steps=4", "train.micro_batch_size=1", "train.keep_last=9"]
    cases = {
        "plain": recipe(rows, *options, center=True),
        "cached": recipe(rows, *options, "train.cached_negatives=true", center=True),
    }
    (whole, resumed), (others, others_resumed) = run_processes(2, remembered, tmp_path, cases)
    for name in cases:
        run, again = (tmp_path / way / name for way in ("whole", "resumed"))
        saved = read_weights(find_checkpoint(run)[0])
        for held in (whole, others, resumed, others_resumed):
            assert_same(held[name], saved)
        assert saved["updates"] == 4 * 2 and saved["center"].abs().min() > 0  # 4 steps of 2 micro-batches
        assert find_checkpoint(again)[0].name == "step_0000004"
        assert_same(read_weights(find_checkpoint(again)[0]), saved)
        assert train_lines(run) == train_lines(again) and len(train_lines(run)) == 4


# ---- towers that return a view


def test_embeddings_that_are_views_train_as_others_do(tmp_path, rows):
    candidates, micro = "task.num_candidates=2", "train.micro_batch_size=1"
    cases = {
        f"{name} {first}": recipe(rows, candidates, *options, first=first)
        for name, options in {"whole": [], "micro": [micro], "cached": [micro, "train.cached_negatives=true"]}.items()
        for first in (True, False)
    }
    for ended in (trained(cases, tmp_path / "one"), *run_processes(2, trained, cases, tmp_path / "two")):
        for name in ("whole", "micro", "cached"):
            assert_same(ended[f"{name} True"], ended[f"{name} False"])
    viewed = recipe(rows, candidates, first=True)
    assert agreement.find_disagreement(viewed, launch=lambda small: run_processes(2, observed, small)) == (4, None)


# ---- buffers


class Counting(nn.Module):
    """A batch norm, and buffers that are none of its statistics."""

    def __init__(self, rank):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(rank)
        self.norm.running_var.fill_(rank + 1)
        for name, value in (
            ("center", torch.tensor([0.5 + rank, -rank])), ("wide", torch.tensor(1 / 3 + rank, dtype=torch.float64)),
            ("count", torch.tensor(7 + rank)), ("seen", torch.tensor([[rank == 0, False]])),
            ("step", torch.tensor(2**60 + 1 + rank)),
        ):  # fmt: skip
            self.register_buffer(name, value)


def shared():
    model = Counting(world().rank)
    share_buffers(model, [model.norm])
    return dict(model.named_buffers())


def test_running_statistics_are_averaged_and_other_buffers_are_those_of_the_main_process():
    main = dict(Counting(0).named_buffers())
    wanted = main | {"norm.running_mean": torch.full((2,), 1.0), "norm.running_var": torch.full((2,), 2.0)}
    for told in run_processes(3, shared):
        assert all(told[name].dtype == value.dtype for name, value in main.items())
        assert_same(told, wanted)


# ---- what `twinreel check --steps` compares, and what is said of a NaN


def test_two_clips_are_enough_to_compare_two_processes_with_one(rows):
    for model, begins in ({}, None), ({"poison": True}, "model: a clip's output depends on"):
        clips, found = agreement.find_disagreement(
            recipe(rows, "train.global_batch_size=2", **model), launch=lambda small: run_processes(2, observed, small)
        )
        assert clips == 2
        assert found is None if begins is None else found.startswith(begins), found


def observed(small):
    return agreement.observe(small)


def unwritten(wanted, run, file):
    """Who says what of a NaN if the disk is full when this file is written."""
    write = Path.write_text

    def full(path, *args, **options):
        if path.name == file:
            raise OSError(28, "No space left on device")
        return write(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(TrainingError) as caught:
            train(wanted, run, quiet=True)
    return caught.value.speaker, str(caught.value)


@pytest.mark.parametrize("file", ["model.json", "step_0000001.json"])  # of the weights, and the record after them
def test_a_nan_is_reported_by_all_though_its_record_cannot_be_written(tmp_path, rows, file):
    first, second = run_processes(2, unwritten, recipe(rows, poison=True), tmp_path / "run", file)
    assert first == second
    speaker, words = first
    assert speaker == "main" and words.startswith("step 1: the loss is nan; no weight was changed. Samples: row ")
    assert f"They could not be written to {tmp_path}" in words and "No space left on device" in words
    assert all(f"row {i}" in words for i in range(4))
