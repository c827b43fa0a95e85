"""A matching model looks again at the very windows of an index; and what it says of a whole video."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_rerank import second_stage
from torch import nn

from twinreel import losses
from twinreel.data.clip import Clip
from twinreel.data.dataset import ViewRules
from twinreel.errors import ConfigError, DataError
from twinreel.evaluation.views import view_rows
from twinreel.models.preprocessing import Preprocessing
from twinreel.prediction import answer, predict
from twinreel.recipe import EvalSection, load_recipe
from twinreel.search import embed_collection, search_collection
from twinreel.tasks import VideoTextMatching
from twinreel.training import train
from videos import make_video

SENTENCE = "a red circle moves left"
CPU = torch.device("cpu")


class Reader(nn.Module):
    """Logits are a fixed projection of the pixels and of the text: any other frame gives another score."""

    def __init__(self, num_outputs=2, sign=1.0):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=2, frame_rate=10.0, crop_size=32, short_side=40)
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("eye", sign * torch.randn(3 * 2 * 32 * 32, num_outputs, generator=generator))
        self.anchor = nn.Parameter(torch.zeros(1))
        self.seen = 0

    def encode_grid(self, video):
        self.seen += len(video)
        return video.flatten(1) @ self.eye / 10

    def match(self, grid, tokens):
        return grid[:, None] * (1 + tokens.float().mean(-1, keepdim=True) / 100) + self.anchor

    def tokenize(self, captions, max_tokens=None):
        return torch.tensor([[len(text), text.count("e")] for text in captions])


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
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
def index(towers, tmp_path):
    for i, frames in enumerate((20, 33, 3)):
        make_video(tmp_path / f"{i}.mp4", num_frames=frames, frame_rate=10, size=(48, 48), first_number=50 * i)
    rows = [Clip(id=f"v{i}", video=str(tmp_path / f"{i}.mp4")) for i in range(3)]
    embed_collection(towers, rows, tmp_path / "index")
    return tmp_path / "index"


def again(monkeypatch, model, k, num_clips=1):
    stage = second_stage(model, k, num_clips=num_clips)
    monkeypatch.setattr("twinreel.search.load_second_stage", lambda *_: stage)
    return stage


def one_sentence(model):
    return lambda video: model.match(model.encode_grid(video), model.tokenize([SENTENCE])[None])


@pytest.mark.parametrize("num_clips", [1, 2])
def test_the_very_windows_are_looked_at_and_put_in_the_new_order(index, monkeypatch, num_clips):
    plain = search_collection(index, SENTENCE, top=99)
    model = Reader()
    stage = again(monkeypatch, model, 1000, num_clips)
    reports = []
    found = search_collection(index, SENTENCE, top=99, report=lambda *counts: reports.append(counts))
    assert [answer.rerank_score for answer in found] == sorted((a.rerank_score for a in found), reverse=True)
    assert reports[-1][0] == reports[-1][1] == model.seen // num_clips >= len(found)
    by_window = {(a.id, a.start_seconds): a.score for a in plain}
    task = stage.task
    for one in found:
        row = Clip(id="x", video=one.video, start_seconds=one.start_seconds, end_seconds=one.end_seconds)
        rules = ViewRules(preprocessing=model.preprocessing, num_clips=num_clips)
        logits = view_rows([row], rules, one_sentence(model), lambda x: x, device=CPU, batch_size=4).values
        assert one.rerank_score == pytest.approx(float(task.scores(logits)[0, 0]), abs=1e-4)
        if (one.id, one.start_seconds) in by_window:
            assert one.score == by_window[one.id, one.start_seconds]


def test_only_the_first_k_are_looked_at_and_the_others_follow(index, monkeypatch):
    plain = search_collection(index, SENTENCE, top=99)
    model = Reader()
    again(monkeypatch, model, 1)
    found = search_collection(index, SENTENCE, top=99)
    assert model.seen == 1 and found[0].rerank_score is not None
    assert [(a.id, a.start_seconds, a.score) for a in found] == [(a.id, a.start_seconds, a.score) for a in plain]
    assert all(a.rerank_score is None for a in found[1:])
    orders = []
    for sign in (1.0, -1.0):
        again(monkeypatch, Reader(sign=sign), 1000)
        orders.append([a.rerank_score for a in search_collection(index, SENTENCE, top=1)])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("what", ["gone", "changed"])
def test_a_video_that_is_gone_or_changed_is_named(index, monkeypatch, what):
    again(monkeypatch, Reader(), 1000)
    path = index.parent / "1.mp4"
    if what == "gone":
        os.unlink(path)
    else:
        make_video(path, num_frames=33, frame_rate=10, size=(48, 48), first_number=7)
    with pytest.raises(DataError, match=rf"1\.mp4: .*{what} since it was embedded, and cannot be looked at again"):
        search_collection(index, SENTENCE)
    monkeypatch.undo()
    assert search_collection(index, SENTENCE)  # the index alone needs no files


def test_relative_paths_are_found_from_another_folder(towers, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    make_video(tmp_path / "a" / "0.mp4", num_frames=20, frame_rate=10, size=(48, 48))
    monkeypatch.chdir(tmp_path / "a")
    embed_collection(towers, [Clip(id="v0", video="0.mp4")], tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    again(monkeypatch, Reader(), 3)
    assert search_collection(tmp_path / "index", SENTENCE)[0].rerank_score is not None


def test_a_score_that_is_no_number_is_refused(index, monkeypatch):
    again(monkeypatch, Reader(sign=float("nan")), 3)
    with pytest.raises(DataError, match=r"\.mp4: matching/best scores nan; look at its weights"):
        search_collection(index, SENTENCE)


# ---- predict


def matching_run(model, **task):
    options = {"loss": losses.match_cross_entropy} | task
    recipe = SimpleNamespace(
        eval=EvalSection(batch_size=3), data=SimpleNamespace(num_workers=0, worker_start="auto"),
        train=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    return _run(model=model, task=VideoTextMatching(**options), recipe=recipe)


def _run(**values):
    from twinreel.assembly import Run

    return Run(folder=Path("clipbert"), checkpoint=Path("best"), **values)


@pytest.fixture
def video(tmp_path):
    make_video(tmp_path / "v.mp4", num_frames=10, frame_rate=10, size=(48, 48))
    return str(tmp_path / "v.mp4")


def all_logits(model, video, texts):
    """Logits (windows, texts, outputs) and starts of windows that follow each other."""
    from twinreel.data.dataset import read_clip

    starts = [0.0, 0.2, 0.4, 0.6, 0.8]
    clips = torch.stack([read_clip(video, model.preprocessing, start_seconds=start) for start in starts])
    with torch.no_grad():
        return model.match(model.encode_grid(clips), model.tokenize(texts).expand(5, -1, -1)), starts


@pytest.mark.parametrize("pooling", ["lse", "mean", "max"])
def test_sentences_are_ranked_by_all_windows_and_placed_by_the_best(video, pooling):
    model, texts = Reader(), ["he sleeps", "she eats", "they meet each week", "up"]
    run = matching_run(model, loss_options={"pooling": pooling})
    [ranked] = predict(run, [video], texts)
    logits, starts = all_logits(Reader(), video, texts)
    whole, single = run.task.scores(logits), logits[..., 1] - logits[..., 0]
    assert model.seen == 5  # each window once, whatever the number of sentences
    assert [p.sentence for p in ranked] == [texts[i] for i in whole.argsort(descending=True).tolist()]
    for one in ranked:
        place = texts.index(one.sentence)
        assert one.score == pytest.approx(float(whole[place]), abs=1e-4)
        best = starts[int(single[:, place].argmax())]
        assert (one.start_seconds, one.end_seconds) == (pytest.approx(best), pytest.approx(best + 0.2))


def test_a_question_is_answered_with_probabilities(video):
    names = ("yes", "no", "red")
    for loss in (losses.answer_cross_entropy, losses.answer_binary_cross_entropy):
        run = matching_run(Reader(3), loss=loss, goal="question_answering", answers=names)
        [found] = answer(run, [video], "what is there")
        pooled = run.task.answer_scores(all_logits(Reader(3), video, ["what is there"])[0])
        sure = pooled.softmax(0) if loss is losses.answer_cross_entropy else pooled.sigmoid()
        assert [one.score for one in found] == pytest.approx(sorted(sure.tolist(), reverse=True), abs=1e-4)
        assert [one.answer for one in found] == [names[i] for i in pooled.argsort(descending=True).tolist()]
    assert len(answer(run, [video], "what", top=1)[0]) == 1


def test_what_cannot_be_predicted_is_said(video):
    run = matching_run(Reader(sign=float("nan")))
    with pytest.raises(DataError, match=r"v\.mp4: scores that are not finite"):
        predict(run, [video], ["a"])
    run = matching_run(Reader())
    with pytest.raises(ConfigError, match="has no answers of its own"):
        answer(run, [video], "what")
    with pytest.raises(ConfigError, match="answer takes a list"):
        answer(run, video, "what")
    with pytest.raises(ConfigError, match="stride_seconds=0"):
        predict(run, [video], ["a"], stride_seconds=0)
    with pytest.raises(ConfigError, match="ranks sentences and answers no question"):
        predict(run, [video], ["a"], question="what")
    with pytest.raises(DataError, match=r"none\.mp4"):
        predict(run, ["none.mp4"], ["a"])


def test_classes_are_not_sentences(video):
    classifier = _run(model=Reader(), task=SimpleNamespace(name="action_recognition"), recipe=matching_run(None).recipe)
    with pytest.raises(ConfigError, match=r"task.name=action_recognition, it has no embeddings of sentences"):
        predict(classifier, [video], ["a"])


@pytest.mark.parametrize("k", [1, 3, 4])
def test_k_answers_are_judged_again_and_no_window_in_vain(index, monkeypatch, k):
    plain = search_collection(index, SENTENCE, top=99)
    model = Reader()
    again(monkeypatch, model, k)
    found = search_collection(index, SENTENCE, top=99)
    assert [answer.rerank_score is not None for answer in found] == [place < k for place in range(len(plain))]
    assert model.seen == k
    assert {(one.video, one.start_seconds) for one in found} == {(one.video, one.start_seconds) for one in plain}
    assert len(search_collection(index, SENTENCE, top=2)) == 2
