"""A classifier from the command line: eval with its files, predict with the seconds; output, exit codes, words."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cli.command_line import twinreel
from videos import make_video

LEVELS = {"black": 0, "grey": 110, "white": 230}
SMALL = (
    "model.name=our_actions:brightness", "data.num_workers=0", "data.crop=random", "train.device=cpu",
    "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
    "train.num_steps=60", "train.global_batch_size=6", "train.save_every=30 steps", "eval.every=30 steps",
    "optim.warmup_steps=2", "optim.learning_rate=0.3", "optim.weight_decay=0", "optim.clip_norm=null",
    "task.label_smoothing=0",
)  # fmt: skip
OWN_MODEL = '''
"""A user's own classifier: it sees the mean of a video, and it returns logits always."""

from torch import nn

from twinreel.models.preprocessing import Preprocessing


class Brightness(nn.Module):
    def __init__(self, num_classes, preprocessing):
        super().__init__()
        self.preprocessing = preprocessing
        self.head = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, num_classes))

    def forward(self, video):
        return self.head(4 * video.mean((2, 3, 4)) - 2)


def brightness(*, num_classes: int = 10, preprocessing: Preprocessing | None = None) -> nn.Module:
    return Brightness(num_classes, preprocessing or Preprocessing(num_frames=4, frame_rate=8.0, crop_size=32))
'''


@pytest.fixture(scope="module")
def actions(tmp_path_factory):
    """Videos of three brightnesses, a manifest of them, and a run that has learned to tell them apart."""
    folder = tmp_path_factory.mktemp("actions")
    (folder / "our_actions.py").write_text(OWN_MODEL)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    lines = ["video,label,split"]
    for split, count in (("train", 4), ("val", 2)):
        for label, level in LEVELS.items():
            for i in range(count):
                name = f"{split}_{label}_{i}.mp4"

                def picture(number, size, level=level, i=i):
                    return np.full((size[1], size[0], 3), level + 5 * i, np.uint8)

                make_video(folder / name, num_frames=8, frame_rate=8, size=(48, 40), picture=picture)
                lines.append(f"{name},{label},{split}")
    (folder / "actions.csv").write_text("\n".join(lines))
    recipe = (
        "own_actions_small",
        *SMALL,
        f"data.manifest={folder / 'actions.csv'}",
        "data.split=train",
        "eval.split=val",
    )
    outcome = twinreel("train", *recipe, "--out", folder / "run")
    assert outcome.code == 0, outcome
    yield SimpleNamespace(folder=folder, run=folder / "run", outcome=outcome)
    patch.undo()
    sys.modules.pop("our_actions", None)


def test_eval_prints_scores_beside_chance_classes_and_protocol(actions):
    outcome = twinreel("eval", actions.run)
    assert outcome.code == 0, outcome
    for words in ("top 1", "top 3", "mean class", "chance", "33.3", "largest class", "most often taken for", "black",
                  "evaluated: 6/6 videos", "softmax of the model's logits", "classes: 3, of which 3 occur",
                  "split: val", "checkpoint: run/step_0000"):  # fmt: skip
        assert words in outcome.out, words
    values = json.loads(twinreel("eval", actions.run, "--json").out)
    assert values["metrics"]["top_1_accuracy"] == 1.0 and "predictions" not in values
    assert [entry["name"] for entry in values["classes"]] == sorted(LEVELS)
    more = twinreel("eval", actions.run, "eval.num_clips=2", "eval.num_crops=3", "eval.combine_views=max")
    assert "2 windows (uniform) x 3 crops a video, combined by max of the scores" in more.out


def test_eval_writes_predictions_and_the_confusion_matrix(actions, tmp_path):
    paths = [tmp_path / "predictions.csv", tmp_path / "confusion.csv"]
    outcome = twinreel("eval", actions.run, "--predictions", paths[0], "--confusion", paths[1])
    assert outcome.code == 0, outcome
    lines = list(csv.DictReader(paths[0].read_text().splitlines()))
    assert [line["id"] for line in lines] == [f"val_{label}_{i}.mp4" for label in LEVELS for i in range(2)]
    assert all(line["class_1"] == line["label"] and line["rank"] == "1" for line in lines)
    matrix = list(csv.reader(paths[1].read_text().splitlines()))
    assert matrix[0] == ["right / predicted", *sorted(LEVELS)] and matrix[1] == ["black", "2", "0", "0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["confusion.csv", "predictions.csv"]


def test_files_that_cannot_be_written_are_refused_first(actions, trained, tmp_path):
    twinreel("eval", actions.run, "--predictions", tmp_path / "a.txt").fails("--predictions", "must end in .csv")
    twinreel("eval", actions.run, "--confusion", tmp_path / "no" / "a.csv").fails("there is no folder", "make it first")
    towers = twinreel("eval", trained.run, "--predictions", tmp_path / "a.csv", "--confusion", tmp_path / "b.csv")
    towers.fails("--predictions and --confusion", "a run of two towers; leave it out")


def test_a_label_that_is_no_class_is_refused(actions, tmp_path):
    (tmp_path / "other.csv").write_text(f"video,label\n{actions.folder / 'val_black_0.mp4'},blakc\n")
    outcome = twinreel("eval", actions.run, "--input", tmp_path / "other.csv")
    outcome.fails("1 of 1 have a label that is none of the 3 classes", "did you mean 'black'")


def test_predict_names_what_happens_and_when(actions, tmp_path):
    levels = [0, 230, 230]

    def picture(number, size):
        return np.full((size[1], size[0], 3), levels[number // 4], np.uint8)

    path = make_video(tmp_path / "long.mp4", num_frames=12, frame_rate=8, size=(48, 40), picture=picture)
    outcome = twinreel("predict", actions.run, path, actions.folder / "val_black_0.mp4")
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert lines[0] == f"{path}  (1.50 s, 3 windows)" and lines[1].split()[1] == "white"
    assert [line.split()[:3] for line in lines[4:7]] == [
        ["0.00-0.50", "s", "black"],
        ["0.50-1.00", "s", "white"],
        ["1.00-1.50", "s", "white"],
    ]
    assert lines[7] == f"{actions.folder / 'val_black_0.mp4'}  (1.00 s, 2 windows)"
    [found] = json.loads(twinreel("predict", actions.run, path, "--json", "--top", "1", "--stride-seconds", "0.25").out)
    assert [window["start_seconds"] for window in found["windows"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [item["name"] for item in found["classes"]] == ["white"]


def test_predict_says_what_is_wrong(actions, trained, tmp_path):
    video = actions.folder / "val_black_0.mp4"
    twinreel("predict", actions.run, video, "--sentence", "a man").fails("is a classifier", "leave --sentence")
    twinreel("predict", actions.run, tmp_path / "none.mp4").fails("none.mp4", "no such file")
    twinreel("predict", actions.run, video, "--stride-seconds", "0").fails("stride_seconds=0", "above 0")
    twinreel("predict", trained.run, video).fails("no sentence to choose from")
    twinreel("embed", actions.run, "--input", actions.folder / "actions.csv", "--out", tmp_path / "index").fails(
        "trained with task.name=action_recognition", "twinreel predict RUN VIDEO"
    )
