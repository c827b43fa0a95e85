"""`twinreel import --run`: published weights judged and used without training, with the names of the classes."""

import json

import pytest
import torch

from cli.command_line import twinreel
from twinreel.assembly import load_run
from twinreel.models import create_model
from videos import make_video


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """X3D_S.pyth with three classes, their names, two videos and a list of them."""
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(3)
    model = create_model("x3d_s", num_classes=3)
    torch.save({"epoch": 7, "model_state": model.state_dict()}, folder / "X3D_S.pyth")
    (folder / "names.txt").write_text("cut\nstir\npour\n")
    for i in range(2):
        make_video(folder / f"{i}.mp4", num_frames=40, frame_rate=10, size=(96, 72))
    (folder / "val.csv").write_text("0.mp4 1\n1.mp4 2\n")
    return folder


@pytest.fixture(scope="module")
def run(place):
    line = ("import", place / "X3D_S.pyth", "--run", place / "run", "--class-names", place / "names.txt", "--json")
    outcome = twinreel(*line)
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["model"] == "x3d_s"
    return place / "run"


def test_it_is_judged_and_used_as_a_run_is(place, run):
    loaded = load_run(run)
    assert loaded.task.classes.names == ("cut", "stir", "pour")
    assert (loaded.recipe.eval.num_clips, loaded.recipe.eval.num_crops, loaded.recipe.eval.crop_size) == (10, 3, 182)
    given = torch.load(place / "X3D_S.pyth", weights_only=True)["model_state"]
    assert all(torch.equal(value, given[key]) for key, value in loaded.model.state_dict().items())
    few = ("eval.num_clips=1", "eval.num_crops=1", "eval.crop_size=160", "data.num_workers=0")
    judged = twinreel("eval", run, "--input", place / "val.csv", *few, "--json")
    assert judged.code == 0, judged
    assert json.loads(judged.out)["protocol"]["evaluated"] == "2/2 videos"
    named = twinreel("predict", run, place / "0.mp4")
    assert named.code == 0 and "pour" in named.out, named


def test_what_is_asked_for_goes_before_what_was_published(place):
    words = ("model.dropout=0.25", "model.preprocessing.frame_stride=3", "eval.num_clips=2", "eval.combine_views=max")
    outcome = twinreel("import", place / "X3D_S.pyth", *words, "--run", place / "asked")
    assert outcome.code == 0, outcome
    assert "from command line: model.dropout=0.25, model.preprocessing.frame_stride=3, eval.num_clips=2" in outcome.out
    assert f"twinreel predict {place / 'asked'} VIDEO\n" in outcome.out
    loaded = load_run(place / "asked")
    assert (loaded.recipe.eval.num_clips, loaded.recipe.eval.combine_views) == (2, "max")
    assert (loaded.model.preprocessing.frame_stride, loaded.model.preprocessing.frame_rate) == (3, None)
    assert loaded.recipe.model.preprocessing.frame_stride == 3
    assert [part.p for part in loaded.model.modules() if isinstance(part, torch.nn.Dropout)] == [0.25]


def test_what_is_refused(place, run):
    file = place / "X3D_S.pyth"
    twinreel("import", file, "--run", run).fails("is not an empty folder")
    twinreel("import", file, "--run", place / "b", "--inspect").fails("--run goes with neither --out nor --inspect")
    twinreel("import", file, "eval.num_clips=3").fails("eval.num_clips=3 goes with --run")
    for words, said in (
        ("train.seed=3", "nothing is trained here; what can be set begins with model., task., data., eval."),
        ("model.name=x3d_m", "model.name is not set here: --model says it"),
        ("eval.num_clipz=3", "unknown key eval.num_clipz"),
        ("model.num_blocks=3", "unknown key model.num_blocks"),
    ):
        twinreel("import", file, words, "--run", place / "c").fails(said)
    twinreel("import", file, "--class-names", place / "names.txt").fails("--class-names goes with --run")
    (place / "two.txt").write_text("cut\nstir\n")
    twinreel("import", file, "--run", place / "c", "--class-names", place / "two.txt").fails(
        "names 2 classes, but the weights have 3"
    )
    (place / "many.csv").write_text("0.mp4 1\n" * 32)
    many = f"data.manifest={place / 'many.csv'}"
    twinreel("train", run / "recipe.yaml", many, "eval.crop_size=160", "--out", run, "--resume").fails(
        "imported weights, no training to go on with"
    )
