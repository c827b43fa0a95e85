"""Videos and texts together: W processes x A micro-batches are one process, in loss and gradient."""

import dataclasses
import math

import pytest
import torch
from processes import run_processes
from test_gradients import FRAMES, SIDE, TOLERANCE, WORDS, G, assert_equal, piece, whole_batch
from torch import nn

from twinreel import losses
from twinreel.data.clip import Caption, Clip
from twinreel.data.negatives import NegativeCaptions
from twinreel.data.plan import Plan, Shares
from twinreel.data.training_sample import TrainingRules
from twinreel.distributed import exchange, world
from twinreel.gradients import global_gradient
from twinreel.models.preprocessing import Preprocessing
from twinreel.optim import Schedule
from twinreel.parts import Parts, _wrapped
from twinreel.recipe import load_recipe
from twinreel.tasks import VideoTextMatching, WholeModel

ANSWERS = ("a", "b", "c")
CASES = {
    "retrieval": {"loss": losses.match_cross_entropy, "num_negatives": 3},
    "of the batch": {"loss": losses.match_cross_entropy, "num_negatives": 3, "in_batch": True},
    "max": {"loss": losses.match_cross_entropy, "loss_options": {"pooling": "max"}},
    "hinge": {"loss": losses.match_hinge, "loss_options": {"margin": 0.5}},
    "choices": {"loss": losses.choice_cross_entropy, "goal": "multiple_choice"},
    "answers": {"loss": losses.answer_cross_entropy, "goal": "question_answering", "answers": ANSWERS},
    "soft answers": {"loss": losses.answer_binary_cross_entropy, "goal": "question_answering", "answers": ANSWERS},
    "a user's loss": {"loss": "mine"},
}


class Net(nn.Module):
    """Two clips of two frames each, and a part that takes no part."""

    def __init__(self, dtype, num_outputs):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=FRAMES // 2, frame_rate=4.0, crop_size=SIDE)
        self.eye = nn.Linear(3 * FRAMES // 2 * SIDE * SIDE, 6).to(dtype)
        self.reader = nn.Linear(len(WORDS), 6).to(dtype)
        self.head = nn.Linear(6, num_outputs, bias=False).to(dtype)  # a softmax over texts does not see a bias
        self.unused = nn.Linear(2, 2).to(dtype)

    def encode_grid(self, video):
        return self.eye(video.flatten(1).to(self.eye.weight.dtype)).tanh()

    def tokenize(self, captions, max_tokens=None):
        return torch.tensor([[text.count(letter) for letter in WORDS] for text in captions])

    def match(self, grid, tokens):
        return self.head((grid[:, None] * self.reader(tokens.to(self.reader.weight.dtype))).tanh())


def plain_mean(logits, targets, *, valid):
    scores = logits.mean(1).squeeze(2)
    return (scores.sigmoid() - targets).square().mean(1)[valid].sum() / valid.sum()


def answered(batch):
    labels = [(i % 2,) if i % 3 else ("z" if i == 6 else "abc"[i % 3],) for i in range(G)]
    return dataclasses.replace(batch, labels=labels, options=[("a b", "c", "h")] * G)


def task_of(case):
    options = {name: value for name, value in CASES[case].items() if name != "in_batch"}
    loss = options.pop("loss")
    return VideoTextMatching(loss=plain_mean if loss == "mine" else loss, **options)


def gradient(case, micro_batch_size, dtype):
    shares = Shares.cut(G, world().size, micro_batch_size)
    batch, task = whole_batch(1), task_of(case)
    if task.goal != "retrieval":
        batch = answered(batch)
    if task.goal == "multiple_choice":
        batch.labels[:] = [(i % 3,) for i in range(G)]
    torch.manual_seed(3)
    model = Net(dtype, task.num_outputs)
    whole, plan = WholeModel(model, task), Plan(num_rows=G, seed=0, global_batch_size=G)
    rows = [
        Clip(id=id, video=id, captions=(Caption(text=texts[0] or "a"),))
        for id, texts in zip(batch.ids, batch.captions, strict=True)
    ]
    negatives = None
    if task.goal == "retrieval":
        rules = TrainingRules(preprocessing=model.preprocessing, seed=1, num_candidates=1)
        negatives = NegativeCaptions(
            rows, plan, rules, num_negatives=task.num_negatives, in_batch=CASES[case].get("in_batch", False)
        )
    parts = Parts(
        rows=rows, rows_digest="", eval_rows=[], missing=[], caption_faults=[], plan=plan, shares=shares, total_steps=1,
        schedule=Schedule(total_steps=1), model=model, task=task, whole=_wrapped(whole), idle=[], norms=[],
        negatives=negatives, average=None, optimizer=torch.optim.SGD(whole.parameters(), lr=0.1),
        scaler=torch.amp.GradScaler("cpu", enabled=False), device=torch.device("cpu"), description={},
    )  # fmt: skip
    recipe = load_recipe("demo", [f"train.global_batch_size={G}", "train.memory_format=contiguous"])
    mine = [cut(batch, positions) for positions in shares.of_process(world().rank)]
    result = global_gradient(parts, recipe, mine, 0)
    assert result.valid().count(False) == 2 and result.rows <= G - 2
    loss = float(exchange([result.loss])[:, 0].sum()) / result.rows
    module = getattr(parts.whole, "module", parts.whole)
    return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def cut(batch, positions):
    return dataclasses.replace(
        piece(batch, positions), options=batch.options[positions.start : positions.stop] or [()] * len(positions)
    )


def several(layouts):
    return {
        (case, layout, dtype): gradient(case, layout, dtype)
        for case in CASES
        for layout in layouts
        for dtype in TOLERANCE
        if case != "a user's loss" or layout is None  # its mean is over what it sees
    }


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_and_micro_batches_equal_one_process(num_processes):
    layouts = [None, 4] if num_processes == 2 else [None]
    wanted = {(case, dtype): gradient(case, None, dtype) for case in CASES for dtype in TOLERANCE}
    found = {case: wanted[case, torch.float64][0] for case in CASES}
    assert not math.isclose(found["retrieval"], found["of the batch"], rel_tol=1e-6)
    assert not math.isclose(found["answers"], found["soft answers"], rel_tol=1e-3)
    for case in CASES:
        if case != "a user's loss":
            assert_equal(gradient(case, 4, torch.float64), wanted[case, torch.float64], 1e-9)
    for told in run_processes(num_processes, several, layouts):
        for (case, _, dtype), seen in told.items():
            assert_equal(seen, wanted[case, dtype], TOLERANCE[dtype])
