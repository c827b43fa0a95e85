"""Embed window by window, resumable; the sentence finds the right seconds."""

import json

import pytest
import torch

from twinreel.data.clip import Clip
from twinreel.data.windows import cover_starts
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.prediction import predict
from twinreel.recipe import load_recipe
from twinreel.search import embed_collection, search_collection
from twinreel.training import train
from videos import make_video


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    recipe = load_recipe(
        "demo",
        [
            f"data.root={root / 'videos'}", "data.num_videos=8", "data.num_test_videos=6", "data.num_workers=0",
            "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
            "model.embedding_size=16", "train.num_steps=2", "train.global_batch_size=4", "optim.warmup_steps=0",
        ],
    )  # fmt: skip
    train(recipe, root / "run", quiet=True)
    return root / "run"


@pytest.fixture
def rows(tmp_path):
    listed = []
    for i, frames in enumerate((20, 33, 3)):
        path = tmp_path / f"{i}.mp4"
        make_video(path, num_frames=frames, frame_rate=10, size=(48, 48))
        listed.append(Clip(id=f"v{i}", video=str(path)))
    return listed


def index_of(folder):
    return [
        (window["row"], window["start_seconds"])
        for part in sorted((folder / "parts").glob("*.json"))
        for window in json.loads(part.read_text())
    ]


@pytest.mark.parametrize(
    ("start", "end", "clip", "stride", "expected"),
    [
        (0.0, 2.0, 0.5, 0.5, [0.0, 0.5, 1.0, 1.5]),
        (0.0, 2.1, 0.5, 0.5, [0.0, 0.5, 1.0, 1.5, 1.6]),
        (1.0, 2.0, 0.5, 0.25, [1.0, 1.25, 1.5]),
        (0.0, 0.3, 0.5, 0.25, [0.0]),
        (0.0, 0.5, 0.5, 0.25, [0.0]),
        (0.0, 10.0, 1.0, 4.0, [0.0, 4.0, 8.0, 9.0]),
    ],
)
def test_windows_cover_the_video_to_its_end(start, end, clip, stride, expected):
    assert cover_starts(start, end, clip, stride) == pytest.approx(expected)


def test_every_listed_video_is_written_or_failed_even_very_short_ones(run, rows, tmp_path):  # B037
    broken = Clip(id="bad", video=str(tmp_path / "none.mp4"))
    result = embed_collection(run, [*rows, broken], tmp_path / "index")
    assert (result.listed, result.written, len(result.faults)) == (4, 3, 1)
    found = index_of(tmp_path / "index")
    assert {row for row, _ in found} == {"v0", "v1", "v2"} and len(found) == result.windows
    assert [start for row, start in found if row == "v0"] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5])
    assert [start for row, start in found if row == "v2"] == [0.0]
    assert "none.mp4" in (tmp_path / "index" / "faults.jsonl").read_text()


def test_an_interrupted_index_goes_on_and_equals_an_undisturbed_one(run, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("twinreel.search.VIDEOS_A_PART", 1)
    embed_collection(run, rows, tmp_path / "whole")
    embed_collection(run, rows[:2], tmp_path / "parts")
    first = (tmp_path / "parts" / "parts" / "000000.safetensors").stat().st_mtime_ns
    result = embed_collection(run, rows, tmp_path / "parts")
    assert (result.written, result.already_there) == (1, 2)
    assert (tmp_path / "parts" / "parts" / "000000.safetensors").stat().st_mtime_ns == first
    assert index_of(tmp_path / "whole") == index_of(tmp_path / "parts")
    found = [search_collection(tmp_path / name, "a red circle moves left") for name in ("whole", "parts")]
    assert found[0] == found[1]


def test_long_videos_are_read_in_pieces_with_the_same_result(run, rows, tmp_path, monkeypatch):
    embed_collection(run, rows, tmp_path / "whole")
    monkeypatch.setattr("twinreel.search.WINDOWS_AT_ONCE", 2)
    embed_collection(run, rows, tmp_path / "pieces")
    one, other = (search_collection(tmp_path / name, "a red circle moves left", top=9) for name in ("whole", "pieces"))
    assert [(a.id, a.start_seconds) for a in one] == [(b.id, b.start_seconds) for b in other]
    assert [a.score for a in one] == pytest.approx([b.score for b in other], abs=1e-5)


def test_answers_are_sorted_do_not_overlap_and_name_file_and_seconds(run, rows, tmp_path):
    embed_collection(run, rows, tmp_path / "index")
    answers = search_collection(tmp_path / "index", "a red circle moves left", top=20)
    assert [a.score for a in answers] == sorted((a.score for a in answers), reverse=True)
    for a in answers:
        length = 0.3 if a.id == "v2" else 0.5  # what is shorter than a clip ends where it ends
        assert a.end_seconds == pytest.approx(a.start_seconds + length) and a.video.endswith(".mp4")
        for b in answers:
            assert a is b or a.video != b.video or a.end_seconds <= b.start_seconds or b.end_seconds <= a.start_seconds
    assert len(search_collection(tmp_path / "index", "a red circle moves left", top=1)) == 1


def test_what_cannot_be_searched_is_said(run, rows, tmp_path):
    with pytest.raises(CheckpointError, match="not an index"):
        search_collection(tmp_path, "red")
    embed_collection(run, rows, tmp_path / "index")
    with pytest.raises(ConfigError, match="no word of it is in the model's vocabulary"):
        search_collection(tmp_path / "index", "zzz qqq")
    with pytest.raises(ConfigError, match="made otherwise"):
        embed_collection(run, rows, tmp_path / "index", stride_seconds=0.1)
    with pytest.raises(ConfigError, match="stride_seconds"):
        embed_collection(run, rows, tmp_path / "other", stride_seconds=0)


def test_predict_ranks_the_sentences_of_each_video(run, rows):
    sentences = ["a red circle moves left", "a blue ring grows", "a white cross shrinks"]
    ranked = predict(run, [row.video for row in rows[:2]], sentences)
    assert len(ranked) == 2
    for one, row in zip(ranked, rows, strict=False):
        assert sorted(p.sentence for p in one) == sorted(sentences)
        assert [p.score for p in one] == sorted((p.score for p in one), reverse=True)
        assert all(p.video == row.video and p.end_seconds == p.start_seconds + 0.5 for p in one)
    with pytest.raises(ConfigError, match="no sentence"):
        predict(run, [rows[0].video], [])
    with pytest.raises(DataError, match=r"none\.mp4"):
        predict(run, ["none.mp4"], sentences)


def test_embeddings_are_those_of_the_model_on_that_window(run, rows, tmp_path):
    from safetensors.torch import load_file

    from twinreel.assembly import load_run
    from twinreel.data.dataset import read_clip

    embed_collection(run, rows, tmp_path / "index")
    loaded = load_run(run)
    stored = load_file(tmp_path / "index" / "parts" / "000000.safetensors")["embeddings"]
    for (row, start), embedding in list(zip(index_of(tmp_path / "index"), stored, strict=True))[::3]:
        video = next(r.video for r in rows if r.id == row)
        clip = read_clip(video, loaded.model.preprocessing, start_seconds=start)
        with torch.no_grad():
            expected = loaded.task.encode_video(loaded.model, clip[None])[0]
        assert torch.allclose(embedding, expected, atol=1e-5)


def test_another_file_under_a_known_id_is_refused_and_not_skipped(run, rows, tmp_path):
    embed_collection(run, rows, tmp_path / "index")
    again = embed_collection(run, rows, tmp_path / "index")
    assert (again.written, again.already_there, again.listed) == (0, 3, 3)
    make_video(tmp_path / "other.mp4", num_frames=12, frame_rate=10, size=(48, 48))
    for changed in (
        Clip(id="v0", video=str(tmp_path / "other.mp4")),
        Clip(id="v0", video=rows[0].video, start_seconds=0.5),
    ):
        with pytest.raises(ConfigError, match="v0 is there already"):
            embed_collection(run, [changed, *rows[1:]], tmp_path / "index")
    make_video(rows[0].video, num_frames=12, frame_rate=10, size=(48, 48))  # the same path, another content
    with pytest.raises(ConfigError, match="has changed since"):
        embed_collection(run, rows, tmp_path / "index")


def test_a_video_shorter_than_a_clip_is_answered_with_its_own_end_and_its_repeats_are_counted(run, rows, tmp_path):
    result = embed_collection(run, rows[2:], tmp_path / "index")
    assert result.repeated_frames == 1  # 3 frames at 10 a second: the clip's last, at 0.375 s, is past the end
    [answer] = search_collection(tmp_path / "index", "a red circle moves left")
    assert (answer.start_seconds, answer.end_seconds) == (0.0, pytest.approx(0.3))
    [[prediction]] = predict(run, [rows[2].video], ["a red circle moves left"])
    assert prediction.end_seconds == pytest.approx(0.3)


def test_towers_that_sample_by_frame_stride_are_searched_too(run, rows, tmp_path):
    """At 10 frames a second, every 2nd frame is 5 a second: the same windows, the same embeddings."""
    from dataclasses import replace

    from twinreel.assembly import load_run

    loaded = load_run(run)
    models = {"seconds": {"frame_rate": 5.0}, "frames": {"frame_stride": 2}}
    found = {}
    for name, rate in models.items():
        model = load_run(run).model
        model.preprocessing = model.preprocessing.replace(**rate)
        own = replace(loaded, model=model)
        embed_collection(own, rows, tmp_path / name)
        answers = search_collection(tmp_path / name, "a red circle moves left", top=20, run=own)
        ranked = predict(own, [rows[0].video], ["a red circle moves left", "a blue ring grows"], stride_seconds=0.5)
        found[name] = (index_of(tmp_path / name), answers, ranked)
    for (row, start), (other_row, other_start) in zip(found["seconds"][0], found["frames"][0], strict=True):
        assert row == other_row and start == pytest.approx(other_start)
    for one, other in zip(found["seconds"][1], found["frames"][1], strict=True):
        assert one.id == other.id and one.score == pytest.approx(other.score, abs=1e-6)
        assert (one.start_seconds, one.end_seconds) == pytest.approx((other.start_seconds, other.end_seconds))
    for one, other in zip(found["seconds"][2][0], found["frames"][2][0], strict=True):
        assert one.sentence == other.sentence and one.score == pytest.approx(other.score, abs=1e-6)
    with pytest.raises(ConfigError, match=r"made otherwise \(.*clip_seconds"):
        embed_collection(replace(loaded, model=model), rows, tmp_path / "seconds")
