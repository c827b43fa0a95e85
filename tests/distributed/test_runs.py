"""Whole runs in several processes: equal to one process, through faults; and faults of the machinery are found."""

import json

import pytest
import torch
from processes import run_processes
from torch import nn

from twinreel import agreement, distributed, gradients, parts, training
from twinreel.checkpoint import find_checkpoint, read_weights
from twinreel.config import Tree
from twinreel.data.plan import Plan
from twinreel.distributed import on_main, share_buffers, together, world
from twinreel.errors import ConfigError, TrainingError
from twinreel.evaluation import evaluate
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import build_recipe, load_recipe
from twinreel.replay import replay
from twinreel.tasks import Contrastive
from twinreel.training import train

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class PlainTowers(nn.Module):
    """A user's own towers without batch norm and dropout, so that processes can be compared with one."""

    def __init__(self, size, poison):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16, short_side=20)
        self.video_tower = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 16 * 16, size))
        self.text_tower = nn.Linear(len(LETTERS), size)
        self.never_used = nn.Linear(2, 2)
        self.poison = poison
        self.calls = 0

    def encode_video(self, video):
        embeddings = self.video_tower(video)
        self.calls += self.training
        if self.poison and self.training and self.calls == 3 and world().rank == world().size - 1:
            embeddings = embeddings * torch.tensor([float("nan")] + [1.0] * (len(embeddings) - 1))[:, None]
        return embeddings

    def encode_text(self, captions):
        return self.text_tower(torch.tensor([[text.count(letter) / 10 for letter in LETTERS] for text in captions]))


def plain_towers(*, size: int = 8, poison: bool = False) -> nn.Module:
    return PlainTowers(size, poison)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    recipe(folder, "data.num_test_videos=8")
    return folder


def recipe(videos, *overrides, own=True, **model):
    """The demo's, shrunk; with the towers above."""
    loaded = load_recipe("demo", [
        f"data.root={videos}", "data.num_videos=16", "data.num_test_videos=8", "data.num_workers=0",
        "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
        "model.embedding_size=16",
        "train.num_steps=6", "train.global_batch_size=8", "optim.warmup_steps=2", "optim.name=sgd", "train.log_every=1",
        "train.save_every=2 steps", "eval.num_clips=2", "eval.split=null", *overrides,
    ])  # fmt: skip
    if not own:
        return loaded
    values = loaded.model_dump(mode="json")
    kept = {key: values["model"][key] for key in ("freeze", "weights")}
    values["model"] = kept | {"name": "test_runs:plain_towers", "preprocessing": {}} | model
    return build_recipe(Tree(values, {"": "test"}))


def losses_of(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def weights_of(run):
    return {name: value.clone() for name, value in read_weights(find_checkpoint(run)[0]).items()}


def quietly(wanted, out, **options):
    result = train(wanted, out, quiet=True, **options)
    return result.steps, torch.random.initial_seed()


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_run_equals_that_of_one_process_with_faults_and_frozen_parts(tmp_path, videos, num_processes):  # B068, B071
    """3 processes share 8 clips as 2, 3, 3; one video is broken; one tower is frozen; a part takes no part."""
    rows = [row for row in parts.training_rows(recipe(videos)) if row.split == "train"]
    lines = [
        json.dumps({"id": row.id, "video": row.video, "captions": [c.text for c in row.captions][:1] or ["a word"]})
        for row in rows
    ]
    (tmp_path / "empty.mp4").write_bytes(b"")
    lines[3] = json.dumps({"id": "broken", "video": str(tmp_path / "empty.mp4"), "captions": ["a broken one"]})
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    base = recipe(videos, "model.freeze=[text_tower]").model_dump(mode="json")
    base["data"] = {"source": "manifest", "manifest": str(tmp_path / "rows.jsonl"), "num_workers": 0, "max_faults": 0.5}
    base["task"]["num_candidates"] = 1
    wanted = build_recipe(Tree(base, {"": "test"}))
    quietly(wanted, tmp_path / "one")
    run_processes(num_processes, quietly, wanted, tmp_path / "several")
    one, several = weights_of(tmp_path / "one"), weights_of(tmp_path / "several")
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=1e-4, atol=1e-6)
    start = parts.build_parts(wanted, torch.device("cpu")).model.state_dict()
    assert torch.equal(several["text_tower.weight"], start["text_tower.weight"])
    assert not torch.equal(several["video_tower.1.weight"], start["video_tower.1.weight"])
    assert losses_of(tmp_path / "several") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    faults = (tmp_path / "one" / "faults.jsonl").read_text()
    assert '"id": "broken"' in faults
    assert (tmp_path / "several" / "faults.jsonl").read_text() == faults


def test_resumed_on_another_number_of_processes_the_run_goes_the_same_way(tmp_path, videos):
    wanted = recipe(videos)
    quietly(wanted, tmp_path / "one")
    half = recipe(videos, "train.num_steps=6", "train.save_every=2 steps")
    run_processes(2, stopped_after, half, tmp_path / "several", 2)
    run_processes(3, stopped_after, half, tmp_path / "several", 4)
    quietly(half, tmp_path / "several", resume=True)
    assert losses_of(tmp_path / "several") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    starts = [json.loads(line) for line in (tmp_path / "several" / "metrics.jsonl").read_text().splitlines()]
    assert [line["processes"] for line in starts if line["kind"] == "start"] == [2, 3, 1]
    log = (tmp_path / "several" / "log.txt").read_text()
    assert "processes: 2 in the run, 3 now: the order of the samples stays, the bits do not" in log


def stopped_after(wanted, out, step):
    """Train until a step is done, then stop as SIGTERM would."""
    real = training._step

    def ask(run, everything, rules, result, state, log):
        asked.stop = "SIGTERM" if state.step + 1 == step else None
        return real(run, everything, rules, result, state, log)

    watched = training.watched_signals
    with watched() as asked:
        training._step, training.watched_signals = ask, lambda: nothing(asked)
        try:
            result = train(wanted, out, resume=out.exists(), quiet=True)
        finally:
            training._step, training.watched_signals = real, watched
    assert (result.steps, result.stopped_by) == (step, "SIGTERM")


class nothing:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("loss", ["milnce", "clip_bag"])
def test_evaluation_is_the_same_on_1_2_and_3_processes(tmp_path, videos, loss):  # B066
    base = load_recipe("demo", [f"data.root={videos}", "data.num_videos=16", "data.num_test_videos=8"])
    tree = base.model_dump(mode="json")
    if loss == "clip_bag":
        tree["task"] = {"name": "contrastive", "loss": "clip_bag", "num_candidates": 1}
    tree["model"] |= {"preprocessing": {"num_frames": 4, "frame_rate": 8.0, "crop_size": 32, "short_side": 40}}
    tree["model"]["embedding_size"] = 16
    tree["train"] |= {"num_steps": 2, "global_batch_size": 8}
    tree["optim"] |= {"warmup_steps": 0}
    tree["data"]["num_workers"] = 0
    tree["eval"] = {"num_clips": 2, "batch_size": 4, "split": None}
    wanted = build_recipe(Tree(tree, {"": "test"}))
    assert wanted.task.loss == loss
    quietly(wanted, tmp_path / "run")
    for size in (5, 7, 8):
        rows = parts.training_rows(wanted)[:size]
        manifest = tmp_path / f"{size}.jsonl"
        manifest.write_text("\n".join(
            json.dumps({"id": row.id, "video": row.video, "captions": [f"the {row.id} thing"]}) for row in rows
        ))  # fmt: skip
        one = evaluate(tmp_path / "run", manifest=str(manifest)).to_json()
        assert one["protocol"]["evaluated"] == f"{size}/{size} videos"
        for num_processes in (2, 3):
            for told in run_processes(num_processes, evaluated, tmp_path / "run", str(manifest)):
                assert told == one


def evaluated(run, manifest):
    return evaluate(run, manifest=manifest).to_json()


def test_a_planted_nan_stops_all_processes_before_anyone_steps_and_can_be_replayed(tmp_path, videos):
    wanted = recipe(videos, poison=True)
    said = run_processes(2, failing, wanted, tmp_path / "run")
    assert said[0] == said[1]
    for word in (
        "step 3: the loss is nan; no weight was changed",
        "embeddings that are not finite: ",
        "twinreel replay",
    ):
        assert word in said[0], said[0]
    written = json.loads((tmp_path / "run" / "non_finite" / "step_0000003.json").read_text())
    bad = [row for row in written["batch"] if not row["video_finite"]]
    assert [row["position"] for row in bad] == [4]  # the first clip of the second process
    assert f"not finite: {bad[0]['id']}." in said[0]
    again = replay(tmp_path / "run", 3)
    assert again.weights_of_step == 2 and len(again.terms) == 8
    assert [term.id for term in again.terms] == [row["id"] for row in written["batch"]]
    assert find_checkpoint(tmp_path / "run")[0].name == "step_0000002"


def failing(wanted, out):
    with pytest.raises(TrainingError) as caught:
        train(wanted, out, quiet=True)
    return str(caught.value)


def label_offset(monkeypatch):
    real = Contrastive.share

    def at_the_start(self, *args, own=None, **options):
        return real(self, *args, own=own if own is None else own - own.min(), **options)

    monkeypatch.setattr(Contrastive, "share", at_the_start)


def gather_of_the_local_slice(monkeypatch):
    def local(ctx, gradient):
        first = sum(ctx.sizes[: world().rank])
        return gradient[first : first + ctx.sizes[world().rank]], None

    monkeypatch.setattr(distributed._GatherRows, "backward", staticmethod(local))


def no_exchange(monkeypatch):
    monkeypatch.setattr(parts, "_wrapped", lambda embedder: embedder)


def everyone_reads_the_first_share(monkeypatch):
    real = Plan.micro_batches
    monkeypatch.setattr(
        Plan, "micro_batches", lambda self, first, last, shares, process=0: real(self, first, last, shares)
    )


def second_pass_of_the_first_gradient(monkeypatch):
    real = gradients.GradientStep.embed_again

    def twice_the_first(self, inputs, leaves):
        for leaf in leaves:
            half = len(leaf) // 2
            leaf.grad[half:] = leaf.grad[:half].clone()
        real(self, inputs, leaves)

    monkeypatch.setattr(gradients.GradientStep, "embed_again", twice_the_first)


PLANTS = {
    "label offset": label_offset,
    "gather": gather_of_the_local_slice,
    "gradient exchange": no_exchange,
    "data": everyone_reads_the_first_share,
    "accumulation": second_pass_of_the_first_gradient,
}


def observed_with(plant, small):
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            PLANTS[plant](patch)
        return agreement.observe(small)


@pytest.mark.parametrize("plant", [None, *PLANTS])
def test_check_says_which_part_of_two_processes_differs(videos, plant):
    clips, found = agreement.find_disagreement(
        recipe(videos), launch=lambda small: run_processes(2, observed_with, plant, small)
    )
    assert clips == 8
    assert (found is None) == (plant is None), found
    assert plant is None or found.startswith(f"{plant}: ")


def stopped_with(plant, wanted, out):
    with pytest.MonkeyPatch.context() as patch:
        PLANTS[plant](patch)
        return failing(wanted, out)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("label offset", "the 2 processes' shares of the loss add up to"),
        ("gradient exchange", "step 1: the processes hold different weights"),
    ],
)
def test_a_run_finds_planted_faults_of_the_machinery_at_once(tmp_path, videos, plant, words):
    said = run_processes(2, stopped_with, plant, recipe(videos), tmp_path / "run")
    assert said[0] == said[1]
    assert words in said[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


def raises_in_one(kind):
    with pytest.raises(ConfigError) as caught, together():
        if world().rank == 1:
            raise ConfigError("no such file")
    main = None
    with pytest.raises(ConfigError) as from_main:
        main = on_main(lambda: (_ for _ in ()).throw(ConfigError("disk")))
    assert main is None
    return str(caught.value), caught.value.speaker, str(from_main.value), on_main(lambda: world().rank)


def averaged():
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(world().rank)
    norm.running_var.fill_(world().rank + 1)
    share_buffers(norm, [norm, nn.BatchNorm1d(2, track_running_stats=False)])
    return norm.running_mean.tolist(), norm.running_var.tolist()


def test_processes_go_on_together_or_not_at_all_and_share_their_statistics():
    for told in run_processes(3, raises_in_one, None):
        assert told == ("process 1: no such file", "main", "disk", 0)
    assert run_processes(3, averaged) == [([1.0, 1.0], [2.0, 2.0])] * 3
