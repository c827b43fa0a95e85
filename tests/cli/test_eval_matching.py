"""A matching model from the command line: retrieval, choices of a run of retrieval and a trained one, and answers."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cli.command_line import twinreel
from videos import make_video

LEVELS = {"black": 0, "grey": 110, "white": 230}
OWN_MODEL = '''
"""A user's own matching model: it sees the mean of a clip, and it reads first letters."""

import torch
from torch import nn

from twinreel.models.preprocessing import Preprocessing

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Matcher(nn.Module):
    def __init__(self, num_outputs, preprocessing):
        super().__init__()
        self.preprocessing = preprocessing
        self.video = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16))
        self.text = nn.Embedding(32, 16)
        self.head = nn.Linear(16, num_outputs)

    def encode_grid(self, video):
        return self.video(4 * video.mean((2, 3, 4)) - 2)

    def tokenize(self, captions, max_tokens=None):
        ids = [[1 + LETTERS.find(word[0]) for word in (text.lower().split() + ["."] * 4)[:4]] for text in captions]
        return torch.tensor(ids)

    def match(self, grid, tokens):
        return self.head(grid[:, None] * self.text(tokens).sum(2))


def matcher(*, num_outputs: int = 2, preprocessing: Preprocessing | None = None) -> nn.Module:
    return Matcher(num_outputs, preprocessing or Preprocessing(num_frames=2, frame_rate=8.0, crop_size=32))
'''
SMALL = (
    "model={name: our_matcher:matcher, preprocessing: {num_frames: 2, frame_rate: 8.0, crop_size: 32}}",
    "data.num_workers=0", "data.crop=square", "data.flip=0", "train.device=cpu", "train.num_epochs=null",
    "train.num_steps=50", "train.global_batch_size=6", "train.save_every=50 steps", "eval.every=50 steps",
    "optim.learning_rate=0.1", "optim.weight_decay=0", "task.num_negatives=1", "train.log_every=50",
)  # fmt: skip


@pytest.fixture(scope="module")
def matching(tmp_path_factory):
    """Videos of three brightnesses, manifests of them by goal, and a run of each goal; `.train` makes another."""
    folder = tmp_path_factory.mktemp("matching")
    (folder / "our_matcher.py").write_text(OWN_MODEL)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    tables = {"retrieval": [], "choices": [], "answers": []}
    for split, count in (("train", 4), ("val", 1)):
        for i, (label, level) in enumerate(LEVELS.items()):
            for number in range(count):
                name = f"{split}_{label}_{number}.mp4"

                def picture(_, size, level=level, number=number):
                    return np.full((size[1], size[0], 3), level + 5 * number, np.uint8)

                make_video(folder / name, num_frames=8, frame_rate=8, size=(48, 40), picture=picture)
                row = {"video": name, "split": split}
                tables["retrieval"].append(row | {"caption": label})
                kind = {"answer_type": "dark" if label == "black" else "light"}
                tables["choices"].append(row | {"options": list(LEVELS), "answer": i} | kind)
                answer = "pink" if name == "val_white_0.mp4" else label
                tables["answers"].append(row | {"question": "which", "answer": answer} | kind)
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def train(name, *options):
        manifest = f"data.manifest={folder / (name + '.jsonl')}"
        run = folder / f"run_{name}"
        outcome = twinreel("train", "clipbert_small", *SMALL, manifest, "data.split=train", "eval.split=val", *options,
                           "--out", run)  # fmt: skip
        assert outcome.code == 0, outcome
        return SimpleNamespace(run=run, outcome=outcome)

    yield SimpleNamespace(
        folder=folder,
        retrieval=train("retrieval"),
        choices=train("choices", "task.goal=multiple_choice", "task.loss=choice_cross_entropy", *IDLE),
        answers=train("answers", "task.goal=question_answering", "task.loss=answer_cross_entropy", *IDLE),
    )
    patch.undo()
    sys.modules.pop("our_matcher", None)


IDLE = ("task.num_negatives=1", "task.negatives=random", "data.caption_rows=video")


def test_retrieval_is_reported_with_cost_and_protocol(matching):
    outcome = twinreel("eval", matching.retrieval.run, "eval.num_clips=3", "eval.batch_size=2")
    assert outcome.code == 0, outcome
    for words in ("text to video", "video to text", "chance", "pairs: 9 = 3 videos x 3 texts, each once",
                  "cnn: 9 clips of 3 videos, each once", "seconds: ", "3 a video, uniform, logits pooled by lse",
                  "evaluated: 3/3 videos", "split: val"):  # fmt: skip
        assert words in outcome.out, words
    assert outcome.err.count("judging 9/9 pairs") == 1
    values = json.loads(twinreel("eval", matching.retrieval.run, "--json").out)
    assert values["metrics"]["text_to_video/recall_at_1"] == values["metrics"]["video_to_text/recall_at_1"] == 1.0
    assert "text to video R@1" in matching.retrieval.outcome.err  # judged in training, too


def test_a_run_of_retrieval_takes_multiple_choice_without_training(matching, tmp_path):
    path = tmp_path / "choices.csv"
    manifest = matching.folder / "choices.jsonl"
    outcome = twinreel("eval", matching.retrieval.run, "--input", manifest, "--split", "val", "--predictions", path)
    assert outcome.code == 0, outcome
    for words in ("accuracy", "33.3", "3 a question", "by a run trained for retrieval", "9 of 3 videos"):
        assert words in outcome.out, words
    assert [line.split() for line in outcome.out.splitlines() if line.startswith(("all", "  dark", "  light"))] == [
        ["all", "100.0", "33.3", "100.0"], ["dark", "100.0", "33.3", "33.3"], ["light", "100.0", "33.3", "66.7"],
    ]  # fmt: skip
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert {line["id"]: line["answer_1"] for line in lines} == {f"val_{name}_0.mp4": name for name in LEVELS}


def test_a_trained_choice(matching):
    outcome = twinreel("eval", matching.choices.run, "--json")
    values = json.loads(outcome.out)
    assert values["metrics"]["accuracy"] == 1.0 and values["metrics"]["loss"] < 0.5
    assert "by a run trained for choices" in values["protocol"]["scores"]


def test_answers_by_kind_with_the_share_that_cannot_be_given(matching, tmp_path):
    path = tmp_path / "answers.csv"
    outcome = twinreel("eval", matching.answers.run, "--predictions", path)
    assert outcome.code == 0, outcome
    for words in ("answer not in table", "33.3", "3 in the table", "1 of 3 rows have another answer"):
        assert words in outcome.out, words
    values = json.loads(twinreel("eval", matching.answers.run, "--json").out)["metrics"]
    assert values["accuracy"] == pytest.approx(2 / 3) and values["unanswerable_share"] == pytest.approx(1 / 3)
    assert (values["accuracy/dark"], values["accuracy/light"]) == (1.0, 0.5)
    lines = {line["id"]: line for line in csv.DictReader(path.read_text().splitlines())}
    assert lines["val_white_0.mp4"]["answer"] == "pink" and lines["val_white_0.mp4"]["rank"] == ""
    assert lines["val_black_0.mp4"]["answer_1"] == "black" and lines["val_black_0.mp4"]["rank"] == "1"


def test_files_and_rows_that_do_not_go_with_the_run_are_refused(matching, tmp_path):
    run, path = matching.retrieval.run, tmp_path / "a.csv"
    twinreel("eval", run, "--predictions", path).fails("--predictions", "captions and no options", "leave it out")
    twinreel("eval", run, "--confusion", path).fails("--confusion", "matches videos and texts; leave it out")
    manifest = matching.folder / "choices.jsonl"
    twinreel("eval", matching.answers.run, "--input", manifest, "--split", "val").fails("options")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"video": "none.mp4", "caption": "black"}))
    twinreel("eval", run, "--input", broken).fails("1 of 1 videos could not be read", "eval.allow_missing=true")
    assert not path.exists()
