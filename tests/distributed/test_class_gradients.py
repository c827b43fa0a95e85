"""Classifiers: W processes x A micro-batches are one process, in loss and gradient, mixup and cutmix included."""

import dataclasses
import math

import pytest
import torch
from processes import run_processes
from test_gradients import FRAMES, SIDE, TOLERANCE, G, assert_equal, piece, whole_batch
from torch import nn

from twinreel import losses
from twinreel.data.classes import ClassTable
from twinreel.data.plan import Plan, Shares
from twinreel.distributed import exchange, world
from twinreel.gradients import global_gradient
from twinreel.models.preprocessing import Preprocessing
from twinreel.optim import Schedule
from twinreel.parts import Parts, _wrapped
from twinreel.recipe import load_recipe
from twinreel.tasks import ActionRecognition, Mixing, WholeModel

CLASSES = 5
CASES = {
    "plain": {},
    "smoothed": {"options": {"label_smoothing": 0.1}},
    "mixup": {"mixing": Mixing(mixup_alpha=0.8)},
    "both": {"mixing": Mixing(mixup_alpha=0.8, cutmix_alpha=1.0, switch_probability=0.5)},
    "multi-label": {"loss": losses.binary_cross_entropy, "multi_label": True},
    "a user's loss": {"loss": "mine"},
}


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=FRAMES, frame_rate=8.0, crop_size=SIDE)
        self.inner = nn.Linear(3 * FRAMES * SIDE * SIDE, 7).to(dtype)
        self.outer = nn.Linear(7, CLASSES).to(dtype)
        self.unused = nn.Linear(2, 2).to(dtype)

    def forward(self, video):
        return self.outer(self.inner(video.flatten(1).to(self.inner.weight.dtype)).tanh())


def plain_mean(logits, targets, *, valid):
    terms = -(targets * logits.log_softmax(1)).sum(1)
    return terms[valid].sum() / valid.sum()


def labelled(batch, multi_label):
    labels = [((i * 7) % CLASSES,) + ((i % CLASSES,) if multi_label else ()) for i in range(G)]
    return dataclasses.replace(batch, labels=labels)


def gradient(case, micro_batch_size, dtype):
    options = CASES[case]
    multi_label = options.get("multi_label", False)
    loss = options.get("loss", losses.cross_entropy)
    shares = Shares.cut(G, world().size, micro_batch_size, clips_together=2)
    torch.manual_seed(3)
    model = Net(dtype)
    task = ActionRecognition(
        loss=plain_mean if loss == "mine" else loss,
        classes=ClassTable(tuple("abcde"), multi_label),
        loss_options=options.get("options"),
        mixing=options.get("mixing"),
    )
    whole = WholeModel(model, task)
    parts = Parts(
        rows=[], rows_digest="", eval_rows=[], missing=[], caption_faults=[],
        plan=Plan(num_rows=G, seed=0, global_batch_size=G), shares=shares, total_steps=1,
        schedule=Schedule(total_steps=1), model=model, task=task, whole=_wrapped(whole), idle=[], norms=[],
        average=None, optimizer=torch.optim.SGD(whole.parameters(), lr=0.1),
        scaler=torch.amp.GradScaler("cpu", enabled=False), device=torch.device("cpu"), description={},
    )  # fmt: skip
    recipe = load_recipe("demo", [f"train.global_batch_size={G}", "train.memory_format=contiguous"])
    batch = labelled(whole_batch(1), multi_label)
    mine = [piece(batch, positions) for positions in shares.of_process(world().rank)]
    result = global_gradient(parts, recipe, mine, 0)
    assert result.rows == G - 2 and result.valid().count(False) == 2
    loss = float(exchange([result.loss])[:, 0].sum()) / result.rows
    module = getattr(parts.whole, "module", parts.whole)
    return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


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
    assert not math.isclose(wanted["plain", torch.float64][0], wanted["mixup", torch.float64][0], rel_tol=1e-3)
    assert not math.isclose(wanted["both", torch.float64][0], wanted["mixup", torch.float64][0], rel_tol=1e-3)
    for case in ("plain", "both", "multi-label"):
        assert_equal(gradient(case, 4, torch.float64), wanted[case, torch.float64], 1e-9)
    for told in run_processes(num_processes, several, layouts):
        for (case, _, dtype), found in told.items():
            assert_equal(found, wanted[case, dtype], TOLERANCE[dtype])
