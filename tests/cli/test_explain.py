"""`twinreel explain`: from a trained classifier to an mp4 and pictures, through the real entry point."""

import json

import av
import pytest

from cli.command_line import twinreel


@pytest.fixture(scope="module")
def classifier(collection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    labels = [["high", "low"][i % 2] for i in range(8)]
    manifest = collection.manifest(folder / "rows.csv", collection.names[:8], label=labels)
    outcome = twinreel(
        "train", "own_actions_small", f"data.manifest={manifest}", "data.split=null", "eval.manifest=null",
        "eval.split=null", "model.name=x3d_small", "model.preprocessing={num_frames: 4, crop_size: 32, short_side: 32}",
        "data.short_side=null", "data.num_workers=0", "train.device=cpu", "train.num_epochs=null", "train.num_steps=2",
        "train.global_batch_size=4", "optim.warmup_epochs=null", "optim.warmup_steps=0", "--out", folder / "run",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    return folder / "run"


def test_an_mp4_and_a_picture_a_frame(classifier, collection, tmp_path):
    video = collection.folder / "3.mp4"
    outcome = twinreel("explain", classifier, video, "--layer", "s4", "--out", tmp_path, "--class", "low", "--json")
    assert outcome.code == 0, outcome
    told = json.loads(outcome.out)
    assert told["class_name"] == "low" and told["top_class"] in ("high", "low") and 0 <= told["score"] <= 1
    assert sorted(told["files"]) == sorted(str(path) for path in tmp_path.iterdir())
    with av.open(told["files"][0]) as container:
        shown = [frame.to_ndarray(format="rgb24").shape for frame in container.decode(video=0)]
    assert shown == [(32, 64, 3)] * 4 and len(told["files"]) == 5
    table = twinreel("explain", classifier, video, "--layer", "s4", "--out", tmp_path)
    assert "top class: " in table.out and "written: 4 pictures beside" in table.out


def test_what_is_wrong_is_said(classifier, collection, trained, tmp_path):
    video = collection.folder / "3.mp4"
    out = ("--out", tmp_path / "out")
    twinreel("explain", classifier, video, "--layer", "s44", *out).fails("X3D has no layer 's44'", "did you mean s4")
    twinreel("explain", classifier, video, "--layer", "s4", *out, "--class", "lo").fails("did you mean low?")
    twinreel("explain", classifier, tmp_path / "no.mp4", "--layer", "s4", *out).fails("no.mp4")
    twinreel("explain", trained.run, video, "--layer", "video_tower", *out).fails("this run has none")
    assert not (tmp_path / "out").exists()
