"""W processes x A micro-batches = one process: loss and gradient of every loss, with padding, faults and dropout.

One process with the whole batch is the oracle; it uses neither gathers nor `own` nor caches.
"""

import itertools
import math

import pytest
import torch
from processes import run_processes
from torch import nn

from twinreel import losses
from twinreel.data.clip import Batch
from twinreel.data.plan import Plan, Shares, keyed_seed
from twinreel.distributed import exchange, world
from twinreel.gradients import global_gradient
from twinreel.models.preprocessing import Preprocessing
from twinreel.optim import Schedule
from twinreel.parts import Parts, _wrapped
from twinreel.recipe import load_recipe
from twinreel.tasks import Contrastive, WholeModel

G, D, FRAMES, SIDE = 16, 6, 4, 8
WORDS = "abcdefgh"
TASKS = {
    "milnce": (losses.milnce, 3, {}),
    "milnce at a temperature": (losses.milnce, 3, {"normalize": True, "temperature": 0.1, "positives_twice": True}),
    "info_nce": (losses.info_nce, 1, {}),
    "clip_bag max": (losses.clip_bag, 1, {"pooling": "max"}),
    "clip_bag attention": (losses.clip_bag, 1, {"pooling": "attention"}),
    "clip_bag logsumexp": (losses.clip_bag, 1, {"pooling": "logsumexp"}),
    "binary_nce": (losses.binary_nce, 1, {"num_negatives": 4}),
}


class Towers(nn.Module):
    """In float64 or float32, with dropout, and a part that takes no part."""

    def __init__(self, dtype, dropout):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=FRAMES, frame_rate=4.0, crop_size=SIDE)
        self.video_tower = nn.Linear(3 * SIDE * SIDE, 24, dtype=dtype)
        self.head = nn.Linear(24, D, dtype=dtype)
        self.text_tower = nn.Linear(len(WORDS), D, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    def encode_video(self, video, segments=False):
        frames = video.to(self.head.weight.dtype).transpose(1, 2).flatten(2)
        hidden = self.dropout(torch.tanh(self.video_tower(frames)))
        return self.head(hidden if segments else hidden.mean(1))

    def encode_text(self, captions):
        counts = torch.tensor([[text.count(letter) for letter in WORDS] for text in captions])
        return self.text_tower(self.dropout(counts.to(self.text_tower.weight.dtype)))


def parts_of(case, shares, *, dtype=torch.float64, dropout=0.0, learn_temperature=False, process=0):
    loss, candidates, options = TASKS[case]
    torch.manual_seed(3)
    model = Towers(dtype, dropout)
    options = {"temperature": 0.07} | options if learn_temperature else options
    task = Contrastive(loss=loss, num_candidates=candidates, loss_options=options, learn_temperature=learn_temperature)
    if task.log_scale is not None:
        task.log_scale.data = task.log_scale.data.to(dtype)
    whole = WholeModel(model, task)
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1)
    return Parts(
        rows=[], rows_digest="", eval_rows=[], missing=[], caption_faults=[],
        plan=Plan(num_rows=G, seed=0, global_batch_size=G),
        shares=shares, total_steps=1, schedule=Schedule(total_steps=1), model=model, task=task, whole=_wrapped(whole),
        idle=[], norms=[], average=None, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False),
        device=torch.device("cpu"), description={},
    )  # fmt: skip


def recipe_of(case, *, cached):
    return load_recipe("demo", [
        f"task.num_candidates={TASKS[case][1]}", f"train.global_batch_size={G}", "train.memory_format=contiguous",
        f"train.cached_negatives={str(cached).lower()}",
    ])  # fmt: skip


def whole_batch(candidates):
    """16 clips: equal captions, captions of nothing, one clip without a real caption, two that could not be read."""
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(0, 256, (G, FRAMES, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    picks = torch.randint(0, len(WORDS), (G, candidates, 3), generator=generator).tolist()
    captions = [["".join(WORDS[i] for i in one) for one in clip] for clip in picks]
    captions[3][0] = captions[9][0] = "same words"
    captions[14] = [""] * candidates
    mask = torch.rand(G, candidates, generator=generator) > 0.2
    mask[:, 0] = True
    valid = torch.ones(G, dtype=torch.bool)
    valid[[5, 12]] = False
    return Batch(
        ids=[f"v{i}" for i in range(G)], frames=frames, pts_seconds=torch.zeros(G, FRAMES),
        flip=torch.zeros(G, dtype=torch.bool), valid=valid, captions=captions, caption_mask=mask,
        labels=[()] * G, repeated_frames=0, faults=[],
    )  # fmt: skip


def piece(batch, positions):
    some = slice(positions.start, positions.stop)
    return Batch(
        ids=batch.ids[some], frames=batch.frames[some], pts_seconds=batch.pts_seconds[some], flip=batch.flip[some],
        valid=batch.valid[some], captions=batch.captions[some], caption_mask=batch.caption_mask[some],
        labels=batch.labels[some], repeated_frames=0, faults=[],
    )  # fmt: skip


def gradient(case, micro_batch_size, cached, **options):
    """(loss, gradients by name) as this process has them after one step's forward and backward."""
    shares = Shares.cut(G, world().size, micro_batch_size)
    parts = parts_of(case, shares, **options)
    batch = whole_batch(TASKS[case][1])
    mine = [piece(batch, positions) for positions in shares.of_process(world().rank)]
    result = global_gradient(parts, recipe_of(case, cached=cached), mine, 0)
    loss = float(exchange([result.loss])[:, 0].sum()) / result.rows
    module = getattr(parts.whole, "module", parts.whole)
    return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def several(cases):
    """All of `cases` (name -> arguments of `gradient`) in one launch."""
    return {name: gradient(*args, **options) for name, (args, options) in cases.items()}


def assert_equal(one, other, tolerance):
    """As the design measures it: relative norm of the difference, of the whole vector and of the worst parameter."""
    (loss, grads), (other_loss, others) = one, other
    assert math.isclose(loss, other_loss, rel_tol=tolerance)
    assert grads.keys() == others.keys()
    whole = torch.cat([grads[name].flatten() - others[name].flatten() for name in grads])
    assert whole.norm() <= tolerance * torch.cat([value.flatten() for value in others.values()]).norm()
    for name, value in grads.items():
        assert (value - others[name]).norm() <= tolerance * others[name].norm().clamp(min=1e-12), name


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_and_cached_micro_batches_equal_one_process(num_processes):
    """1 x 16 = 4 micro-batches x 4 = 2 processes x 2 x 4 = 3 processes (6, 5, 5)."""
    layouts = {2: [(None, False), (None, True), (4, True)], 3: [(None, False), (None, True)]}[num_processes]
    cases, wanted = {}, {}
    for case, dtype, learned in itertools.product(TASKS, TOLERANCE, (False, True)):
        if learned and case == "milnce":
            continue  # without a temperature
        options = {"dtype": dtype, "learn_temperature": learned}
        one = gradient(case, None, False, **options)
        assert any(name.startswith("task") for name in one[1]) == learned
        assert not any("unused" in name for name in one[1])
        assert_equal(gradient(case, 4, True, **options), one, TOLERANCE[dtype])
        for layout in layouts:
            key = (case, dtype, learned, layout)
            cases[key], wanted[key] = ((case, *layout), options), one
    for told in run_processes(num_processes, several, cases):
        assert told.keys() == cases.keys()
        for key, found in told.items():
            assert_equal(found, wanted[key], TOLERANCE[key[1]])


def chunked_by_hand(case, **options):
    """Dropout on: every chunk embedded under its own seed, one graph, one loss of the whole batch."""
    shares = Shares.cut(G, 1, 4)
    parts = parts_of(case, shares, **options)
    batch, recipe = whole_batch(TASKS[case][1]), recipe_of(case, cached=False)
    videos, texts = [], []
    for index, positions in enumerate(shares.of_process(0)):
        some = piece(batch, positions)
        torch.manual_seed(keyed_seed(recipe.train.seed, 0, index, "dropout"))
        video, text, *_ = parts.whole(
            parts.model.preprocessing.normalize(some.frames), [t for clip in some.captions for t in clip]
        )
        videos.append(video)
        texts.append(text)
    _, facts = parts.task.inputs(parts.model, batch)
    seed = keyed_seed(recipe.train.seed, 0, 0, "negatives")
    loss = parts.task.share((torch.cat(videos), torch.cat(texts)), facts, negative_seed=seed)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in parts.whole.named_parameters() if p.grad is not None}


def test_cached_negatives_equal_one_big_batch_with_dropout_on():
    options = {"dropout": 0.5}
    wanted = {case: chunked_by_hand(case, **options) for case in TASKS}
    plain = gradient("milnce", 4, True)
    assert not math.isclose(plain[0], wanted["milnce"][0], rel_tol=1e-3)  # dropout does something
    for case in TASKS:
        assert_equal(gradient(case, 4, True, **options), wanted[case], 1e-9)
    cases = {case: ((case, 4, True), options) for case in TASKS}
    for told in run_processes(2, several, cases):
        for case, found in told.items():
            assert_equal(found, wanted[case], 1e-9)


def test_without_the_cache_the_negatives_are_those_of_the_micro_batch_of_all_processes():
    """2 processes x 2 x 4 = 1 process x 2 x 8, and not the global batch."""
    cases = {case: ((case, 4, False), {}) for case in TASKS if case != "binary_nce"}
    one = {case: gradient(case, 8, False) for case in cases}
    assert not math.isclose(one["milnce"][0], gradient("milnce", None, False)[0], rel_tol=1e-3)
    for told in run_processes(2, several, cases):
        for case, found in told.items():
            assert_equal(found, one[case], 1e-9)
