"""`twinreel data pack` and `extract` from the command line, and runs that read what they made."""

import json
import re
import shlex
from pathlib import Path

import lmdb
import pytest
import torch
from PIL import Image

from cli.command_line import twinreel
from twinreel.data.dataset import ViewRules
from twinreel.data.manifest import read_manifest
from twinreel.data.storage import open_video
from twinreel.models.preprocessing import Preprocessing

TWO_STEPS = (
    "data.split=all", "data.num_workers=0", "model.embedding_size=8", "model.text_hidden_size=16",
    "model.word_embedding_size=8", "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}",
    "train.num_epochs=null", "train.num_steps=2", "train.global_batch_size=8", "train.log_every=1", "train.device=cpu",
    "optim.warmup_epochs=null", "optim.warmup_steps=1", "eval.num_clips=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def stored(collection, tmp_path_factory):
    """The collection as a manifest with captions, as an LMDB and as folders of images: a folder that holds all."""
    top = tmp_path_factory.mktemp("stored")
    rows = [{"video": name, "caption": f"the number {i} of the videos"} for i, name in enumerate(collection.names)]
    (top / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for verb, out in (("pack", "all.lmdb"), ("extract", "images")):
        outcome = twinreel("data", verb, top / "rows.jsonl", "--root", collection.folder, "--out", top / out)
        assert outcome.code == 0, outcome
        assert outcome.out.startswith("40 ") and "0 failed" in outcome.out
        assert (
            f"data.manifest={top / out / 'manifest.jsonl'}" in outcome.out and f"data.root={top / out}" in outcome.out
        )
    return top


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def train(stored, root, out, *more):
    recipe = ("s3dg_small_own_videos", f"data.manifest={stored / 'rows.jsonl'}", f"data.root={root}", *TWO_STEPS)
    outcome = twinreel("train", *recipe, *more, "--out", out)
    assert outcome.code == 0, outcome
    found = losses(out)
    assert len(found) == 2
    return found


def test_training_from_the_store_is_training_from_the_folder(stored, collection, tmp_path):
    expected = train(stored, collection.folder, tmp_path / "folder")
    assert train(stored, stored / "all.lmdb", tmp_path / "lmdb") == expected
    own = (f"data.manifest={stored / 'all.lmdb/manifest.jsonl'}", "data.root=null")  # what `pack` printed
    assert train(stored, collection.folder, tmp_path / "own", *own) == expected
    # JPEG changes pixels a little, and batch norm over eight like clips makes much of it: the samples are compared
    rows = [read_manifest(stored / "rows.jsonl", root=root) for root in (collection.folder, stored / "images")]
    look = ViewRules(preprocessing=Preprocessing(num_frames=4, frame_rate=8.0, crop_size=32), num_clips=2)
    for one, other in zip(*rows, strict=True):
        ours, images = look(one, 0), look(other, 0)
        assert ours.fault is None and images.fault is None and torch.equal(ours.pts_seconds, images.pts_seconds)
        assert (ours.frames.float() - images.frames.float()).abs().mean() < 8  # hard edges of colors at 32 pixels
    assert len(train(stored, stored / "images", tmp_path / "images")) == 2


@pytest.mark.slow
def test_every_start_method_trains_alike_from_every_place(stored, collection, tmp_path):  # B038
    for place in (collection.folder, stored / "all.lmdb", stored / "images"):
        alone = train(stored, place, tmp_path / f"{place.name}_0")
        for start in ("fork", "spawn", "forkserver"):
            workers = ("data.num_workers=2", f"data.worker_start={start}")
            assert train(stored, place, tmp_path / f"{place.name}_{start}", *workers) == alone


def test_a_store_is_embedded_searched_and_judged(stored, collection, tmp_path):
    train(stored, stored / "all.lmdb", tmp_path / "run")
    for source in (stored / "all.lmdb", stored / "images"):
        index = tmp_path / f"index_{source.name}"
        outcome = twinreel("embed", tmp_path / "run", "--input", source, "--out", index)
        assert outcome.code == 0 and outcome.out.startswith("40 videos listed: 40 written"), outcome
        assert str(source) in twinreel("search", index, "the number").out
    tables = []
    for root in (collection.folder, stored / "all.lmdb"):
        outcome = twinreel(
            "eval", tmp_path / "run", "--input", stored / "rows.jsonl", "--split", "all", "--root", root, "--json"
        )
        assert outcome.code == 0, outcome
        report = json.loads(outcome.out)
        tables.append({key: value for key, value in report.items() if "protocol" not in key and "second" not in key})
    assert tables[0] == tables[1]


def test_a_missing_key_stops_a_run_before_its_first_step_or_is_named_in_its_faults(stored, tmp_path):
    lines = (stored / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"video": "none.mp4", "caption": "none"}']))
    recipe = ("s3dg_small_own_videos", f"data.manifest={tmp_path / 'rows.jsonl'}", f"data.root={stored / 'all.lmdb'}")
    twinreel("train", *recipe, *TWO_STEPS, "data.max_faults=0.01", "--out", tmp_path / "run").fails(
        "1 of 41 listed videos do not exist", str(stored / "all.lmdb/none.mp4")
    )
    outcome = twinreel("train", *recipe, *TWO_STEPS, "train.num_steps=6", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome
    [fault] = {
        (fault["id"], fault["reason"])
        for fault in map(json.loads, (tmp_path / "run/faults.jsonl").read_text().splitlines())
    }
    assert fault[0] == "none.mp4" and "no key for 'none.mp4'" in fault[1] and str(stored / "all.lmdb") in fault[1]


@pytest.mark.parametrize("ext", [["--ext", "mp4", "avi"], ["--ext", ".MP4,avi"], ["--ext", "mp4", "--ext", "avi"]])
@pytest.mark.parametrize("first", [True, False])
def test_several_endings_are_given_as_to_clipberts_script(
    tmp_path, make_video, monkeypatch, ext, first
):  # ClipBERT defect 1
    make_video("in/a.mp4", num_frames=2)
    make_video("in/b.avi", num_frames=2, codec="mpeg4")
    make_video("in/c.mkv", num_frames=2)
    monkeypatch.chdir(tmp_path)
    words = (*ext, "in") if first else ("in", *ext)
    outcome = twinreel("data", "pack", *words, "--out", "x.lmdb", "--json")
    assert outcome.code == 0, outcome
    result = json.loads(outcome.out)
    assert (result["listed"], result["packed"], result["left_out"]) == (2, 2, {".mkv": 1})
    with lmdb.open("x.lmdb", readonly=True, create=False) as environment:
        assert environment.stat()["entries"] == 2


def test_what_fails_is_named_and_the_exit_code_is_2(tmp_path, make_video):
    make_video("in/a.mp4", num_frames=2)
    (tmp_path / "in/b.mp4").write_bytes(b"<html>")
    for verb, said, out in (("pack", "not packed", "x.lmdb"), ("extract", "not extracted", "images")):
        outcome = twinreel("data", verb, tmp_path / "in", "--out", tmp_path / out)
        assert outcome.code == 2 and "1 failed" in outcome.out, outcome
        assert f"{said}: {tmp_path / 'in/b.mp4'}" in outcome.err and "an HTML page" in outcome.err
        assert str(tmp_path / out / "faults.jsonl") in outcome.err


def test_what_makes_no_sense_is_said_in_one_line(tmp_path, make_video):
    make_video("in/x/a.mp4", num_frames=2)
    make_video("in/y/a.mp4", num_frames=2)
    pack = ("data", "pack", tmp_path / "in", "--out", tmp_path / "x.lmdb")
    twinreel(*pack).fails("x/a.mp4 and", "y/a.mp4", "--keys path")
    twinreel(*pack, "--ext", "mkv").fails("no video in this folder: no file ends in .mkv; there are 2 .mp4")
    twinreel(*pack, "--ext", "mp").fails("no file ends in .mp;")
    twinreel(*pack, "--type", "image").fails("no image in this folder")
    twinreel(*pack, "--ext", ",").fails("--ext", "mp4 avi")
    twinreel("data", "pack", tmp_path / "none", "--out", tmp_path / "x.lmdb").fails("none")
    assert twinreel(*pack, "--keys", "path").code == 0
    twinreel("data", "pack", tmp_path / "x.lmdb", "--out", tmp_path / "y").fails("x.lmdb is an LMDB already")
    (tmp_path / "file").write_bytes(b"")
    twinreel("data", "extract", tmp_path / "in", "--out", tmp_path / "file").fails("is a file, not a folder")
    twinreel("data", "pack", tmp_path / "in/x", "--out", tmp_path / "file").fails("is a file, not an LMDB")
    assert twinreel("data", "extract", tmp_path / "in", "--out", tmp_path / "i", "--quality", "0").code == 2


def test_training_is_advised_on_what_can_be_trained_on_alone(tmp_path, make_video):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/a.png")
    outcome = twinreel("data", "pack", tmp_path / "pictures", "--type", "image", "--out", tmp_path / "x.lmdb")
    assert outcome.code == 0 and "MB of images" in outcome.out and "train from it" not in outcome.out, outcome
    video = make_video("in/a.mp4", num_frames=4, frame_rate=10)
    extract = ("data", "extract", tmp_path / "in", "--out", tmp_path / "images", "--rate", "20")
    outcome = twinreel(*extract)
    assert outcome.code == 0 and "train from it" in outcome.out, outcome
    assert f"--rate 20 is above the rate of 1 videos, whose images repeat frames (first: {video})" in outcome.err
    video.rename(tmp_path / "in/b.mp4").write_bytes(b"<html>")
    outcome = twinreel(*extract)
    assert outcome.code == 2 and "train from it" not in outcome.out, outcome
    assert "1 folders are of videos that are not listed now" in outcome.out and "(first: a)" in outcome.out


def test_the_commands_of_the_storage_page_run(tmp_path, make_video, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/storage.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL) for line in block.splitlines()]
    rows = []
    for i in range(9):
        make_video(f"clips/sub/{i}.mp4", num_frames=8, frame_rate=8, size=(32, 32), first_number=i)
        rows.append(f"sub/{i}.mp4,the number {i} of the videos")
    make_video("clips/other.avi", num_frames=8, codec="mpeg4")
    (tmp_path / "clips.csv").write_text("\n".join(["video,caption", *rows]))
    monkeypatch.chdir(tmp_path)
    assert len(lines) == 7
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        outcome = twinreel(*words, *(TWO_STEPS if words[0] == "train" else ()))
        assert outcome.code == 0, (line, outcome)
    for said in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL):
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        for number in range(3):
            Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        (folder / "frames.json").write_text(said)
        with open_video(str(folder)) as reader:
            assert len(reader.frame_times()) == 3
