"""A step replayed has the numbers that the run wrote of it, whatever has changed around it since."""

import json
import os
import shutil
import signal

import pytest
from small_runs import in_step, own, recipe, records

from twinreel.assembly import training_rows
from twinreel.config import Tree
from twinreel.recipe import build_recipe
from twinreel.replay import replay
from twinreel.training import train

EVERY_STEP = ("train.save_every=1 steps", "train.keep_last=9")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def changed(videos, tmp_path_factory):
    """A run of towers with dropout and batch norm: 2 steps of 4 clips at once, 2 of 2, 2 of 1."""
    run = tmp_path_factory.mktemp("changed") / "run"
    for micro, stop in ((4, 2), (2, 4), (1, None)):
        with pytest.MonkeyPatch.context() as patch:
            if stop:
                in_step(patch, stop, lambda: os.kill(os.getpid(), signal.SIGTERM))
            wanted = own(videos, *EVERY_STEP, f"train.micro_batch_size={micro}", "eval.split=null")
            assert train(wanted, run, resume=run.exists(), quiet=True).steps == (stop or 6)
    return run


def test_each_step_is_cut_as_it_was_then(changed):
    """Batch norm and dropout tell one cut from another; the recipe in the folder knows the last one only."""
    assert [line["micro_batches"] for line in records(changed, "start")] == [1, 2, 4]
    for line in records(changed):
        again = replay(changed, line["step"])
        assert again.weights_of_step == line["step"] - 1 and len(again.terms) == 4
        assert again.loss == pytest.approx(line["loss"], rel=1e-6), line["step"]
        assert again.gradient_norm == pytest.approx(line["gradient_norm"], rel=1e-5), line["step"]
        assert sum(term.loss for term in again.terms) / 4 == pytest.approx(again.loss, rel=1e-6)


@pytest.mark.parametrize("half", ['{"kind": "train", "st', '{"kind": "start", "step": 5, "processes": 2', "{"])
def test_half_a_last_line_in_the_metrics_does_not_matter(tmp_path, changed, half):
    run = shutil.copytree(changed, tmp_path / "run", symlinks=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert replay(run, 6).loss == pytest.approx(records(changed)[5]["loss"], rel=1e-6)


def test_what_the_run_was_judged_by_may_be_gone(tmp_path, videos):
    rows = {split: tmp_path / f"{split}.jsonl" for split in ("train", "test")}
    for path in rows.values():
        lines = [
            {"id": row.id, "video": row.video, "captions": [f"a {row.id} thing"]}
            for row in training_rows(recipe(videos))
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
    base = own(videos, *EVERY_STEP).model_dump(mode="json")
    base["data"] = {"source": "manifest", "manifest": str(rows["train"]), "num_workers": 0}
    base["eval"] = {"source": "manifest", "manifest": str(rows["test"]), "num_clips": 2}
    base["task"]["num_candidates"] = 1
    run = tmp_path / "run"
    train(build_recipe(Tree(base, {"": "test"})), run, quiet=True)
    rows["test"].unlink()
    assert len(records(run, "eval")) == 1
    for line in records(run):
        assert replay(run, line["step"]).loss == pytest.approx(line["loss"], rel=1e-6)
