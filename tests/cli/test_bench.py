"""`twinreel bench loader`: real clips through the real entry point."""

import json
from pathlib import Path

import pytest
import torch

from cli.command_line import SMALL, twinreel
from twinreel.data import reading_costs
from twinreel.data.clip import Caption, Clip
from twinreel.data.decode import VideoReader
from twinreel.data.reading_costs import decode_floor
from twinreel.data.training_sample import TrainingRules
from twinreel.errors import DataError
from twinreel.models.preprocessing import Preprocessing
from videos import make_video

STAGES = ["open", "seek", "decode", "convert", "captions", "storage", "collate"]
DEVICE_STAGES = ["transfer", "device_transform", "compute"]


def bench(trained, *arguments):
    return twinreel("bench", "loader", *trained.recipe, "--clips", 8, *arguments)


def test_it_says_stages_floor_waiting_and_what_to_turn(trained):
    outcome = bench(trained, "data.num_workers=1")
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    names = [line.split("  ")[0].replace(" ", "_") for line in lines]
    for name in [*STAGES, "one_reader", *DEVICE_STAGES]:
        assert name in names
    assert "libavcodec alone: " in outcome.out and "1 readers (data.num_workers) on" in outcome.out
    assert "of its computing time" in outcome.out and "one that computes N clips/s needs N / " in outcome.out
    assert any(line.startswith("turn: ") for line in lines)


def test_json_holds_the_same_numbers(trained):
    outcome = bench(trained, "--json")
    assert outcome.code == 0, outcome
    told = json.loads(outcome.out)
    assert list(told["milliseconds"]) == [*STAGES, *DEVICE_STAGES]
    rates, milliseconds = told["clips_per_second"], told["milliseconds"]
    reading = sum(milliseconds[name] for name in STAGES)
    assert rates["one_reader"] == pytest.approx(1e3 / reading)
    assert rates["compute"] == pytest.approx(1e3 / sum(milliseconds[name] for name in DEVICE_STAGES))
    assert told["waiting_share"] == pytest.approx(rates["compute"] / rates["readers"])  # 0 readers: one after another
    assert told["floor"]["frames_per_kept"] >= 1 and told["turn"]


def test_rows_that_cannot_be_read_are_left_out_and_named(collection, tmp_path):
    page = tmp_path / "page.mp4"
    page.write_text("<html>404</html>")
    manifest = collection.manifest(tmp_path / "rows.csv", [*collection.names[:3], page])
    recipe = ("s3dg_small_own_videos", f"data.manifest={manifest}", "train.global_batch_size=4", *own_size())
    outcome = twinreel("bench", "loader", *recipe, "--clips", 4)
    assert outcome.code == 0, outcome
    assert "3 rows read stage by stage" in outcome.out and "note: left out, cannot be read: " in outcome.out
    assert "page.mp4" in outcome.out
    only = collection.manifest(tmp_path / "only.csv", [page] * 4)
    recipe = ("s3dg_small_own_videos", f"data.manifest={only}", "train.global_batch_size=4", *own_size())
    twinreel("bench", "loader", *recipe).fails("none of the 64 rows looked at can be read", "page.mp4")


def own_size():
    return (
        "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}",
        "train.num_epochs=null", "train.num_steps=6", "optim.warmup_epochs=0", "data.num_workers=0",
    )  # fmt: skip


def test_a_recipe_that_training_would_refuse_is_refused(trained, tmp_path):
    twinreel("bench", "loader", "demo", *SMALL, f"data.root={tmp_path}", "train.global_batch_size=99").fails(
        "99 is more than"
    )
    twinreel("bench", "loader", "nothing").fails("unknown recipe 'nothing'")


# ---- the costs of a row


def costs_of(video, size=112, **rules):
    prep = Preprocessing(num_frames=8, frame_rate=10.0, crop_size=size)
    read = TrainingRules(preprocessing=prep, seed=1, num_candidates=1, crop="square", **rules)
    row = Clip(id="a", video=str(video), captions=(Caption(text="x"),))
    return reading_costs.reading_costs(row, lambda row: read(row, 0))


def test_stages_grow_with_what_they_do(tmp_path):
    small = make_video(tmp_path / "small.mp4", num_frames=60, size=(64, 48), gop=60)
    large = make_video(tmp_path / "large.mp4", num_frames=60, size=(1280, 960), gop=60)
    one, other = costs_of(small), costs_of(large)
    assert other.decode > 3 * one.decode and other.floor.decode > 3 * one.floor.decode
    assert other.convert > one.convert
    assert (other.height, other.width, other.num_kept, other.num_views) == (960, 1280, 8, 1)
    parts = (other.open, other.seek, other.decode, other.convert, other.captions, other.storage)
    assert min(parts) >= 0 and other.total == pytest.approx(sum(parts))
    assert costs_of(small, views_per_decode=3).num_views == 3
    (tmp_path / "page.mp4").write_text("<html>")
    with pytest.raises(DataError, match=r"page\.mp4"):
        costs_of(tmp_path / "page.mp4")


def test_the_floor_decodes_from_the_key_frame_to_the_wanted_frame(tmp_path):
    video = str(make_video(tmp_path / "a.mp4", num_frames=60, gop=10))
    assert decode_floor(video, [0.0]).num_frames == 1
    assert decode_floor(video, [2.5]).num_frames == 6  # frames 20 to 25
    assert decode_floor(video, [0.0, 2.5, 2.6, 5.9]).num_frames == 1 + 7 + 10
    late = str(make_video(tmp_path / "b.mp4", num_frames=60, gop=10, pts_seconds=[3 + n / 10 for n in range(60)]))
    assert decode_floor(late, [2.5]).num_frames == 6
    b_frames = decode_floor(str(make_video(tmp_path / "c.mp4", num_frames=60, gop=10, b_frames=2)), [2.5])
    assert 6 <= b_frames.num_frames <= 10
    assert decode_floor(str(tmp_path / "nothing.mp4"), [0.0]) is None


def test_waiting_for_bytes_is_told_from_computing(tmp_path, monkeypatch):
    video = make_video(tmp_path / "a.mp4", num_frames=20)
    assert costs_of(video).storage < 0.05
    real, seconds = VideoReader.frames_at, [0.3]

    def slow(self, *arguments, **options):
        import time

        time.sleep(seconds.pop() if seconds else 0.0)  # the first reading waits
        return real(self, *arguments, **options)

    monkeypatch.setattr(VideoReader, "frames_at", slow)
    assert 0.25 < costs_of(video).storage < 1.0


def test_nothing_is_left_changed(trained):
    before, threads = sorted(Path(trained.root).rglob("*")), torch.get_num_threads()
    bench(trained)
    assert sorted(Path(trained.root).rglob("*")) == before and torch.get_num_threads() == threads
