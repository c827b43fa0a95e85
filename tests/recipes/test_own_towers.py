"""A user's own towers, in a file of the current folder: trained, judged, embedded, searched from the command line."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.command_line import twinreel
from twinreel.assembly import load_model
from videos import make_video

MODULE = '''
import torch
from torch import nn

from twinreel.models.preprocessing import Preprocessing

WORDS = "number zero one two three four five six seven eight nine".split()


class Towers(nn.Module):
    """The brightness of 4 x 4 patches, and counted words; parts named as no recipe of twinreel names them."""

    def __init__(self, size, frames):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=frames, frame_rate=4.0, crop_size=16)
        self.eye = nn.Sequential(nn.AvgPool3d((1, 4, 4)), nn.Flatten(), nn.Linear(3 * 16 * frames, 12), nn.ReLU())
        self.look = nn.Linear(12, size)
        self.reader = nn.ModuleDict({"read": nn.Linear(len(WORDS), size), "norm": nn.BatchNorm1d(size)})

    def encode_video(self, video):
        return self.look(self.eye(video))

    def encode_text(self, captions):
        counts = torch.tensor([[float(text.split().count(word)) for word in WORDS] for text in captions])
        return self.reader["norm"](self.reader["read"](counts))


def towers(*, size: int, frames: int = 3) -> nn.Module:
    return Towers(size, frames)


def squared(video, text, *, mask, valid, text_ids, strength: float = 1.0):
    """A loss of one\'s own: captions beside their own video, nothing else."""
    return strength * (video[:, None] - text.view(len(video), -1, video.shape[1]))[valid].pow(2).mean()
'''
DIGITS = "zero one two three four five six seven eight nine".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: the module, ten videos, and their manifest."""
    (tmp_path / "mytowers.py").write_text(MODULE)
    lines = ["video,caption,split"]
    for i, word in enumerate(DIGITS):
        make_video(tmp_path / f"{i}.mp4", num_frames=8, frame_rate=8, size=(32, 32), first_number=100 * i)
        lines.append(f"{i}.mp4,number {word},{'train' if i < 8 else 'val'}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mytowers", None)


RECIPE = (
    "s3dg_small_own_videos", "data.manifest=rows.csv", "data.split=train", "data.num_workers=0", "eval.split=val",
    "train.global_batch_size=4", "train.num_epochs=3", "train.log_every=1", "train.save_every=2 steps",
    "train.device=cpu", "eval.num_clips=2",
)  # fmt: skip


def model(**values):
    return f"model={json.dumps({'name': 'mytowers:towers', 'size': 6, **values})}"


def weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step:07d}" / "weights.safetensors")


def test_from_a_file_of_ones_own_to_seconds(folder):
    outcome = twinreel("train", *RECIPE, model(frames=2), "--out", "run")
    assert outcome.code == 0, outcome
    assert "a clip is 2 frames at 4 a second = 0.5 s, 16 x 16 pixels" in outcome.err
    again = twinreel("train", *RECIPE, model(frames=2), "--out", "run", "--resume", "step_4")
    assert again.code == 0 and again.out == outcome.out

    judged = twinreel("eval", "run")
    assert judged.code == 0, judged
    assert "frames: 2 at 4 a second (0.5 s)" in judged.out and "evaluated: 2/2 videos" in judged.out
    embedded = twinreel("embed", "run", "--input", "rows.csv", "--out", "index", "--json")
    assert embedded.code == 0, embedded
    assert json.loads(embedded.out)["written"] == 10
    found = json.loads(twinreel("search", "index", "number three", "--json").out)
    assert len(found) == 5 and all(item["end_seconds"] == item["start_seconds"] + 0.5 for item in found)
    ranked = twinreel("predict", "run", "3.mp4", "--sentence", "number three", "--sentence", "number nine", "--json")
    assert {item["sentence"] for item in json.loads(ranked.out)[0]} == {"number three", "number nine"}
    twinreel("search", "index", "   ").fails("'   '")

    shown = twinreel("show", "run/recipe.yaml")
    assert shown.code == 0 and "name: mytowers:towers" in shown.out and "frames: 2" in shown.out
    assert type(load_model("run")).__name__ == "Towers" and load_model("run").preprocessing.num_frames == 2


def test_each_tower_has_its_own_learning_rate(folder):
    """With plain SGD and no decay a step is rate x gradient, so a hundredth of the rate is a hundredth of the way."""
    common = (*RECIPE, model(), "optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "optim.decay=none",
              "optim.warmup_epochs=null", "optim.learning_rate=0.1", "optim.clip_norm=null", "train.num_epochs=null",
              "train.num_steps=1", "train.save_every=1 steps")  # fmt: skip
    assert twinreel("train", *common, "--out", "even").code == 0
    assert twinreel("train", *common, "optim.learning_rates={reader.read: 0.001, look: 0.2}", "--out", "own").code == 0
    start = twinreel("train", *common, "optim.learning_rate=1e-30", "--out", "start")
    assert start.code == 0
    ways = {"reader.read.weight": 0.01, "look.weight": 2.0, "eye.2.weight": 1.0, "reader.norm.weight": 1.0}
    begin, even, own = (weights(folder / name, 1) for name in ("start", "even", "own"))
    for name, ratio in ways.items():
        assert torch.allclose(own[name] - begin[name], ratio * (even[name] - begin[name]), rtol=1e-3, atol=1e-7), name
        assert not torch.equal(even[name], begin[name]), name


def test_frozen_parts_stay_as_they_started_with_their_statistics(folder):
    save_file({"read.weight": torch.full((6, 11), 0.5), "read.bias": torch.zeros(6), "norm.weight": torch.ones(6),
               "norm.bias": torch.zeros(6), "norm.running_mean": torch.full((6,), 0.25),
               "norm.running_var": torch.ones(6)}, folder / "text.safetensors")  # fmt: skip
    chosen = model(freeze=["reader", "eye"], weights={"reader": "text.safetensors"})
    outcome = twinreel("train", *RECIPE, chosen, "--out", "run")
    assert outcome.code == 0, outcome
    trained = 12 * 6 + 6
    assert f"parameters {trained:,} trained, " in outcome.err
    first, last = weights(folder / "run", 2), weights(folder / "run", 6)
    assert torch.equal(last["reader.read.weight"], torch.full((6, 11), 0.5))
    assert torch.equal(last["reader.norm.running_mean"], torch.full((6,), 0.25))
    assert torch.equal(last["eye.2.weight"], first["eye.2.weight"])
    assert not torch.equal(last["look.weight"], first["look.weight"])
    assert twinreel("eval", "run").code == 0


def test_a_run_starts_from_the_weights_of_another(folder):
    assert twinreel("train", *RECIPE, model(), "--out", "one").code == 0
    path = "one/checkpoints/last/weights.safetensors"
    tiny = ("train.num_epochs=null", "train.num_steps=1", "optim.learning_rate=1e-30", "optim.warmup_epochs=null")
    assert twinreel("train", *RECIPE, model(weights=path), *tiny, "--out", "two").code == 0
    one, two = weights(folder / "one", 6), weights(folder / "two", 1)
    for name in one:
        assert ("norm.running" in name or "num_batches" in name) or torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("part", ["text_module", "module"])
def test_parts_may_have_any_name(folder, part):
    text = MODULE.replace("reader", part)
    if part == "module":  # everything in one part, as a wrapper has it
        text = text.replace("self.eye", "self.module.eye").replace("self.look", "self.module.look")
        text = text.replace("super().__init__()", "super().__init__()\n        self.module = nn.Module()")
        text = text.replace("self.module =", "self.module.reader =", 2).replace(
            "self.module.reader =", "self.module =", 1
        )
        text = text.replace("self.module[", "self.module.reader[")
    (folder / "mytowers.py").write_text(text)
    trained = twinreel("train", *RECIPE, model(), "--out", "run")
    assert trained.code == 0, trained
    assert all(name.startswith("module.") for name in weights(folder / "run", 6)) == (part == "module")
    judged = twinreel("eval", "run", "--checkpoint", "last")
    assert judged.code == 0, judged
    assert judged.out.splitlines()[:4] == trained.out.splitlines()[:4]
    assert twinreel("train", *RECIPE, model(), "--out", "run", "--resume", "step_2").code == 0


def test_towers_that_sample_by_stride(folder):
    (folder / "mytowers.py").write_text(MODULE.replace("frame_rate=4.0", "frame_stride=2"))
    checked = twinreel("check", *RECIPE, model(), "--out", "sheet.png")
    assert checked.code == 0 and "frames, 1 of every 2 of the file's" in checked.out
    trained = twinreel("train", *RECIPE, model(), "--out", "run")
    assert trained.code == 0 and "evaluated: 2/2 videos" in trained.out, trained
    judged = twinreel("eval", "run", "--checkpoint", "last")
    assert judged.code == 0 and judged.out.splitlines()[:4] == trained.out.splitlines()[:4]


def test_a_loss_of_ones_own(folder):
    for strength, out in ((2.0, "two"), (1.0, "one")):
        task = f"task={{loss: 'mytowers:squared', strength: {strength}}}"
        assert twinreel("train", *RECIPE, model(), task, "eval.split=null", "--out", out).code == 0
    lines = [map(json.loads, (folder / out / "metrics.jsonl").read_text().splitlines()) for out in ("two", "one")]
    first = [next(line["loss"] for line in run if line["kind"] == "train") for run in lines]
    assert first[0] == pytest.approx(2 * first[1], rel=1e-5)
    twinreel("show", *RECIPE, model(), "task={loss: 'mytowers:squared', strenght: 2.0}").fails("task.strength?")
