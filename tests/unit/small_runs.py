"""Runs of a second on generated videos, and how two of them are compared."""

import json

import torch
import yaml
from torch import nn

from twinreel import training
from twinreel.checkpoint import find_checkpoint, load_training_state, read_task_weights, read_weights
from twinreel.config import Tree
from twinreel.data.sources import generated
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import build_recipe, load_recipe

CPU = torch.device("cpu")


class DropoutTowers(nn.Module):
    """A user's own towers, with dropout and batch norm, so that an inexact resume shows; in float32 or float64."""

    def __init__(self, size):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16, short_side=20)
        self.video_tower = nn.Sequential(
            nn.Sequential(nn.Conv3d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm3d(6), nn.ReLU(), nn.Dropout(0.5)),
            nn.Flatten(), nn.Linear(6 * 2 * 8 * 8, size),
        )  # fmt: skip
        self.text_tower = nn.Linear(26, size)

    def encode_video(self, video):
        return self.video_tower(video.to(self.text_tower.weight.dtype))

    def encode_text(self, captions):
        counts = [[text.count(letter) / 10 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in captions]
        return self.text_tower(torch.tensor(counts, dtype=self.text_tower.weight.dtype))


def dropout_towers(*, size: int = 8) -> nn.Module:
    return DropoutTowers(size)


def recipe(videos, *overrides):
    """Six steps of four clips each with a tiny model."""
    return load_recipe(
        "demo",
        [
            f"data.root={videos}", "data.num_videos=8", "data.num_test_videos=6", "data.num_workers=0",
            "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
            "model.embedding_size=16", "train.num_steps=6", "train.global_batch_size=4", "optim.warmup_steps=2",
            "train.log_every=1", "train.save_every=2 steps", "eval.num_clips=2", *overrides,
        ],
    )  # fmt: skip


def own(videos, *overrides):
    """The same with `dropout_towers`."""
    base = recipe(videos, *overrides).model_dump(mode="json")
    for key in ("embedding_size", "text_hidden_size", "word_embedding_size"):
        base["model"].pop(key)
    for key in [k for k in base["model"] if k not in ("name", "preprocessing", "freeze", "weights")]:
        base["model"].pop(key)
    base["model"] |= {"name": "small_runs:dropout_towers", "size": 8, "preprocessing": {}}
    return build_recipe(Tree(base, {"": "test"}))


def weights_of(run, name=None, **options):
    weights = read_weights(find_checkpoint(run, name)[0], **options)
    return {name: value.clone() for name, value in weights.items()}  # off the file, which some tests break


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def records(run, kind="train"):
    """The lines of metrics.jsonl but for what depends on the clock and the machine."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    noisy = ("clips_per_second", "step_seconds", "data_seconds", "waiting_share", "memory_gb")
    return [
        {key: value for key, value in json.loads(line).items() if key not in noisy}
        for line in lines
        if json.loads(line)["kind"] == kind
    ]


def assert_same_runs(one, other):
    """Weights, averages, what the task learned, optimizer, counters and metrics.jsonl are equal bit for bit."""
    assert_same(weights_of(one), weights_of(other))
    assert_same(weights_of(one, averaged=True), weights_of(other, averaged=True))
    (first, _), (second, _) = find_checkpoint(one), find_checkpoint(other)
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    if (first / "task.safetensors").exists():
        assert_same(read_task_weights(first), read_task_weights(second))
    states = [load_training_state(checkpoint) for checkpoint in (first, second)]
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert_same(a, b)
    counters = [{**state["state"], "seconds": None} for state in states]
    assert counters[0] == counters[1]
    for kind in ("train", "eval"):
        assert records(one, kind) == records(other, kind)


def in_step(monkeypatch, number, act):
    """Call `act()` in the forward pass of a step, from 1."""
    real = training.global_gradient

    def acting(parts, recipe, micro_batches, step):
        if step + 1 == number:
            act()
        return real(parts, recipe, micro_batches, step)

    monkeypatch.setattr(training, "global_gradient", acting)


def be_killed():
    raise KeyboardInterrupt


class DropoutClassifier(nn.Module):
    """A user's own classifier, with dropout and batch norm; it returns logits."""

    def __init__(self, num_classes):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16, short_side=20)
        self.body = nn.Sequential(nn.Conv3d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm3d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6 * 2 * 8 * 8, num_classes)

    def forward(self, video):
        return self.head(self.body(video).flatten(1))


def dropout_classifier(*, num_classes: int) -> nn.Module:
    return DropoutClassifier(num_classes)


def labelled(videos):
    """Manifests of 12 videos to train on and 6 to judge by, with one of two labels each."""
    for split, count in (("train", 12), ("test", 6)):
        rows = generated.rows(videos, split, num_videos=12, num_test_videos=6)
        lines = [f"{row.video},{'ab'[i % 2]}" for i, row in enumerate(rows[:count])]
        (videos / f"{split}.csv").write_text("\n".join(["path,label", *lines]) + "\n")


def class_recipe(videos, *overrides):
    """Six steps of four clips each with `dropout_classifier` on what `labelled` wrote."""
    base = {
        "model": {"name": "small_runs:dropout_classifier"},
        "task": {"name": "action_recognition"},
        "data": {"manifest": str(videos / "train.csv"), "num_workers": 0},
        "optim": {"warmup_steps": 2, "learning_rate": 0.01},
        "train": {"num_steps": 6, "global_batch_size": 4, "log_every": 1, "save_every": "2 steps", "device": "cpu"},
        "eval": {"manifest": str(videos / "test.csv"), "num_clips": 2},
    }
    path = videos / "classes.yaml"
    path.write_text(yaml.safe_dump(base))
    return load_recipe(path, list(overrides))


def darkened(frames, *, seeds):
    """A user's transform: each clip darker by a share of its own."""
    shares = [torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return (frames * torch.stack(shares).view(-1, 1, 1, 1, 1)).to(torch.uint8)


def halved(frames, *, seeds):
    """A transform that returns what it must not."""
    return frames[:, ::2]


class DropoutMatcher(nn.Module):
    """A user's own cross-modal model with dropout: it counts letters, and multiplies them with the mean picture."""

    def __init__(self, num_outputs):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=2, frame_rate=8.0, crop_size=16, fit="pad")
        self.eye = nn.Sequential(nn.Conv3d(3, 6, (1, 4, 4), (1, 4, 4), bias=False), nn.Dropout(0.5))
        self.reader = nn.Linear(26, 6)
        self.head = nn.Linear(6, num_outputs)

    def encode_grid(self, video):
        return self.eye(video).mean((2, 3, 4))

    def tokenize(self, captions, max_tokens=None):
        letters = "abcdefghijklmnopqrstuvwxyz"
        return torch.tensor([[text.count(letter) for letter in letters] for text in captions])

    def match(self, grid, tokens):
        read = self.reader(tokens.to(self.reader.weight.dtype) / 10)
        return self.head((grid[:, None] * read).tanh())


def dropout_matcher(*, num_outputs: int) -> nn.Module:
    return DropoutMatcher(num_outputs)


def worded(videos, **columns):
    """Manifests (JSONL) of 12 videos to train on and 6 to judge by; each column is a function of the row's number."""
    for split, count in (("train", 12), ("test", 6)):
        rows = generated.rows(videos, split, num_videos=12, num_test_videos=6)[:count]
        lines = [
            {"video": row.video, **{name: value(number, row) for name, value in columns.items()}}
            for number, row in enumerate(rows)
        ]
        (videos / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def matching_recipe(videos, *overrides, name="small_runs:dropout_matcher"):
    """Six steps of four videos, two clips each, on what `worded` wrote."""
    base = {
        "model": {"name": name},
        "task": {"name": "video_text_matching"},
        "data": {"manifest": str(videos / "train.jsonl"), "num_workers": 0, "num_clips": 2, "crop": "pad", "flip": 0.0},
        "optim": {"warmup_steps": 2, "learning_rate": 0.01},
        "train": {"num_steps": 6, "global_batch_size": 4, "log_every": 1, "save_every": "2 steps", "device": "cpu"},
        "eval": {"manifest": str(videos / "test.jsonl"), "num_clips": 2},
    }
    path = videos / "matching.yaml"
    path.write_text(yaml.safe_dump(base))
    return load_recipe(path, list(overrides))
