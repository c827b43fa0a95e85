"""Two stages: ranks as if written down by hand, the pairs counted, the second stage exact where it sees everything."""

from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from torch import nn

from matchers import Made
from twinreel import losses, metrics
from twinreel.data.clip import Caption, Clip
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.evaluation import evaluate_retrieval
from twinreel.evaluation.gallery import Gallery
from twinreel.evaluation.rerank import SecondStage, first_stage, load_second_stage
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection
from twinreel.recipe.sections import RerankSection
from twinreel.tasks import Contrastive, VideoTextMatching

PREP = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=16)
CPU = torch.device("cpu")
N = 12


# ---- pure ranks


def naive_rank(first, second, positives, k):
    """All candidates in the worst order that the scores allow, the first k in the worst of the second stage's."""

    def worst(candidates, scores):
        return sorted(candidates, key=lambda c: (-scores[c], c in positives))

    order = worst(range(len(first)), first)
    order = worst(order[:k], second) + order[k:]
    return 1 + next(place for place, candidate in enumerate(order) if candidate in positives)


@pytest.mark.parametrize("levels", [2, 4, 1000])  # few levels: nearly everything ties
@pytest.mark.parametrize("k", [1, 3, 9, 50])
def test_ranks_are_those_of_the_worst_order_written_out(levels, k):
    generator = torch.Generator().manual_seed(levels + k)
    first = torch.randint(levels, (40, 9), generator=generator).float()
    second = torch.randint(levels, (40, 9), generator=generator).float()
    counts = torch.randint(1, 4, (40,), generator=generator).tolist()
    positives = [torch.randperm(9, generator=generator)[:count].tolist() for count in counts]
    stage = metrics.first_candidates(first, positives, k)
    assert stage.candidates.shape == (40, min(k, 9))
    found = metrics.reranked_ranks(stage, second.gather(1, stage.candidates), positives)
    expected = [naive_rank(*three, k) for three in zip(first.tolist(), second.tolist(), positives, strict=True)]
    assert found.tolist() == expected
    assert torch.equal(stage.ranks, metrics.retrieval_ranks(first, positives))
    for query, own in enumerate(positives):
        assert bool(set(own) & set(stage.candidates[query].tolist())) == bool(stage.ranks[query] <= k)


@pytest.mark.parametrize("k", [9, 10, 1000])
def test_with_all_candidates_the_ranks_are_those_of_the_second_stage_alone(k):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 30, 9, generator=generator)
    second = (second * 2).round()
    positives = [[int(place)] for place in torch.randint(9, (30,), generator=generator)]
    stage = metrics.first_candidates(first, positives, k)
    found = metrics.reranked_ranks(stage, second.gather(1, stage.candidates), positives)
    assert torch.equal(found, metrics.retrieval_ranks(second, positives))


def test_a_collapsed_first_stage_never_has_the_right_one_among_the_first():
    positives = [[place] for place in range(6)]
    perfect = torch.eye(6)
    stage = metrics.first_candidates(torch.zeros(6, 6), positives, 5)
    assert stage.ranks.tolist() == [6.0] * 6
    assert metrics.reranked_ranks(stage, perfect.gather(1, stage.candidates), positives).tolist() == [6.0] * 6
    whole = metrics.first_candidates(torch.zeros(6, 6), positives, 6)
    assert metrics.reranked_ranks(whole, perfect.gather(1, whole.candidates), positives).tolist() == [1.0] * 6
    tied = metrics.reranked_ranks(whole, torch.zeros(6, 6), positives)
    assert tied.tolist() == [6.0] * 6


def test_scores_in_doubt_tie_against_the_model():
    scores = torch.tensor([[1.0, 1.0 + 1e-9, 0.0]], dtype=torch.float64)
    assert metrics.first_candidates(scores, [[1]], 1).candidates.tolist() == [[1]]
    stage = metrics.first_candidates(scores, [[1]], 1, errors=torch.full((1, 3), 1e-9, dtype=torch.float64))
    assert stage.candidates.tolist() == [[0]] and stage.ranks.tolist() == [2.0]


def test_what_cannot_be_ranked_is_refused():
    scores = torch.rand(2, 3)
    with pytest.raises(ConfigError, match="k=0: must be at least 1"):
        metrics.first_candidates(scores, [[0], [1]], 0)
    with pytest.raises(ConfigError, match=r"errors has shape \(2, 2\)"):
        metrics.first_candidates(scores, [[0], [1]], 1, errors=torch.zeros(2, 2))
    stage = metrics.first_candidates(scores, [[0], [1]], 2)
    with pytest.raises(ConfigError, match=r"scores has shape \(2, 3\)"):
        metrics.reranked_ranks(stage, scores, [[0], [1]])
    bad = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
    name = "abc"[int(stage.candidates[1, 0])]
    with pytest.raises(DataError, match=f"1 of 4 scores of the second stage .*'two' with candidate '{name}': nan"):
        metrics.reranked_ranks(stage, bad, [[0], [1]], query_ids=["one", "two"], candidate_ids=["a", "b", "c"])


# ---- two models on videos of even brightness


def number(text):
    return float(text.strip("n"))


class Towers(nn.Module):
    """They see brightness as an angle, and read `n3` as that of brightness 3, `shift` too high: a near miss."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.preprocessing, self.shift = PREP, shift

    def encode_video(self, video):
        return self._at(video.mean((1, 2, 3, 4)) * 1.5)

    def encode_text(self, captions):
        return self._at(torch.tensor([(number(text) + self.shift) / N * 1.5 for text in captions]))

    def _at(self, angle):
        return torch.stack([angle.cos(), angle.sin()], 1)


class Matcher(nn.Module):
    """Log-odds fall with the distance of brightness and number; counts what it is asked."""

    def __init__(self, spoiled=False, num_outputs=2):
        super().__init__()
        self.preprocessing = PREP.replace(num_frames=1)
        self.num_outputs = num_outputs
        self.weight = nn.Parameter(torch.zeros(1))
        self.spoiled, self.clips, self.pairs = spoiled, 0, 0

    def encode_grid(self, video):
        self.clips += len(video)
        return video.mean((1, 2, 3, 4))[:, None]

    def match(self, grid, tokens):
        self.pairs += tokens.shape[0] * tokens.shape[1]
        fit = -10 * (grid - tokens[..., 0] / 100 / N).abs()
        logits = torch.stack([-fit, fit * float("nan") if self.spoiled else fit], -1) + self.weight
        return logits[..., -self.num_outputs :]

    def tokenize(self, captions, max_tokens=None):
        return torch.tensor([[round(100 * number(text))] for text in captions])


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grey")
    for i in range(N):
        with av.open(str(folder / f"{i}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=10)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for _ in range(10):
                frame = np.full((16, 16, 3), round(255 * i / N), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
    return folder


def rows(folder, captions=1):
    own = [[f"n{i}", f"n{i}.2", f"n{i - 0.1:.1f}"][:captions] for i in range(N)]
    return [
        Clip(id=f"v{i}", video=str(folder / f"{i}.mp4"), captions=tuple(Caption(text=text) for text in own[i]))
        for i in range(N)
    ]


def towers_task():
    return Contrastive(loss=losses.milnce, loss_options={"normalize": True, "temperature": 0.1})


def second_stage(matcher, k, directions=("text_to_video",), num_clips=2, batch_size=8, loss="match_cross_entropy"):
    task = VideoTextMatching(loss=losses.LOSSES[loss])
    recipe = SimpleNamespace(eval=EvalSection(num_clips=num_clips, batch_size=batch_size))
    run = SimpleNamespace(folder=Path("matching"), checkpoint=Path("best"), model=matcher, task=task, recipe=recipe)
    return SecondStage(run=run, k=k, directions=directions, section=recipe.eval)


def judge(listed, second, shift=1.6):
    section = EvalSection(num_clips=2, batch_size=4)
    return evaluate_retrieval(Towers(shift).eval(), towers_task(), listed, section, device=CPU, second=second)


def test_both_rows_are_reported_and_the_first_is_that_of_the_towers_alone(grey):
    alone = judge(rows(grey), None)
    report = judge(rows(grey), second_stage(Matcher(), 4))
    assert report.metrics["text_to_video/recall_at_1"] == 1.0 > alone.metrics["text_to_video/recall_at_1"]
    first = {name.removeprefix("first_stage/"): value for name, value in report.metrics.items() if "first_st" in name}
    chance = {name: value for name, value in report.metrics.items() if name.startswith("chance/")}
    assert first | chance == alone.metrics
    assert not any(name.startswith("video_to_text") for name in report.metrics)
    table = report.to_table()
    for words in ("text to video ", "first stage, text to video ", "first stage, video to text ", "chance, ",
                  "second stage: the first 4 again by matching/best, log-odds of a match; the others",
                  "among the first 4 for 100.0 % of the queries", f"second stage pairs: {4 * N} of {N * N}\n",
                  "second stage windows: 2 a video, uniform, logits pooled by lse", "second stage frames: 1 at 5",
                  "windows: 2 a video, uniform, embeddings averaged", "ties: count against"):  # fmt: skip
        assert words in table, words
    assert "\nvideo to text" not in table
    assert all(line.split() for line in table.splitlines()[:6])


# ClipBERT defect 11: with several captions a video only the last one was right.
@pytest.mark.parametrize("directions", [("text_to_video",), ("text_to_video", "video_to_text")])
def test_all_candidates_are_the_full_cross_exactly(grey, directions):
    listed = rows(grey, captions=3)
    matcher = Matcher()
    report = judge(listed, second_stage(matcher, 1000, directions))
    every = second_stage(Matcher(), 1).score(listed, [c.text for row in listed for c in row.captions], device=CPU)
    scores = torch.stack(every.scores)
    sides = {"text_to_video": (scores.T, [[q // 3] for q in range(3 * N)]),
             "video_to_text": (scores, [[3 * v, 3 * v + 1, 3 * v + 2] for v in range(N)])}  # fmt: skip
    for name in directions:
        ranks = metrics.retrieval_ranks(*sides[name])
        expected = metrics.retrieval_metrics(ranks, num_candidates=sides[name][0].shape[1])
        assert {key: report.metrics[f"{name}/{key}"] for key in expected} == expected
    assert matcher.pairs == 2 * 3 * N * N and matcher.clips == 2 * N  # two clips a video, each once


# ClipBERT defect 12: one pass a caption, each with a copy of all captions.
def test_pairs_grow_with_k_and_not_with_the_collection_and_each_video_is_seen_once(grey):
    listed = rows(grey, captions=3)
    for k in (1, 2, 5):
        matcher = Matcher()
        report = judge(listed, second_stage(matcher, k, num_clips=3))
        assert matcher.pairs == 3 * 3 * N * k
        assert matcher.clips <= 3 * N and matcher.clips % 3 == 0
        seen = matcher.clips // 3
        assert f"{matcher.clips} clips of {seen} of {N} videos" in report.protocol["second_stage_cnn"]
    few = Matcher()
    judge([*rows(grey)[:3], *rows(grey)[-2:]], second_stage(few, 1), shift=-5.0)
    assert few.clips // 2 < 5  # a video that is among nobody's first is not looked at


def test_what_is_not_among_the_first_keeps_its_place(grey):
    shift = 2.6  # the right one is third or so
    alone = judge(rows(grey), None, shift)
    report = judge(rows(grey), second_stage(Matcher(), 1), shift)
    for name in ("recall_at_1", "recall_at_5", "mean_rank", "median_rank"):
        assert report.metrics[f"text_to_video/{name}"] == alone.metrics[f"text_to_video/{name}"]
    both = judge(rows(grey), second_stage(Matcher(), 2, ("text_to_video", "video_to_text")), shift)
    within = both.protocol["second_stage_within_reach"]
    share = 100 * both.metrics["text_to_video/recall_at_1"]  # a perfect second stage finds what is within reach
    assert f"text to video among the first 2 for {share:.1f} % of the queries; video to text" in within


# ClipBERT defect 10: scores were rounded before they were ranked, and equal ones stood in the order of the list.
def test_differences_below_any_rounding_count():
    first = torch.zeros(1, 3, dtype=torch.float64)
    stage = metrics.first_candidates(first, [[1]], 3)
    near = torch.tensor([[20.0, 20.000002, 20.0]])  # log-odds; all three are a probability of 1.0000
    places = near.gather(1, stage.candidates)
    assert metrics.reranked_ranks(stage, places, [[1]]).tolist() == [1.0]


def test_memory_holds_the_pairs_that_are_judged_and_no_matrix(grey, monkeypatch):  # ClipBERT defect 12
    monkeypatch.setattr("twinreel.evaluation.rerank.QUERIES_AT_ONCE", 4)
    texts = [f"n{i / 100}" for i in range(2000)]
    gallery = Gallery(candidates=rows(grey), queries=texts, positives=[[i % N] for i in range(2000)])
    model, directions = Towers(1.6), ("text_to_video", "video_to_text")
    texts, videos = model.encode_text(texts), model._at(torch.arange(N) / N * 1.5)
    matcher = Matcher()
    second = second_stage(matcher, 2, directions, num_clips=1)
    with Made() as made:
        second.rerank(towers_task(), gallery, texts, videos, device=CPU)
    assert 2 * 2000 <= matcher.pairs <= 2 * (2000 + N)
    assert made.largest <= 4 * 2000 < N * 2000


def test_nothing_is_compared_in_vain(grey, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    listed = rows(grey)
    listed.insert(2, Clip(id="broken", video=str(tmp_path / "broken.mp4")))
    for wanted, before in ((None, 2 * 3), ({row.id: [2, 0] for row in listed}, 2 * 2)):
        matcher = Matcher()
        with pytest.raises(DataError, match=r"1 of 13 videos cannot be read by the second stage.*broken\.mp4"):
            second_stage(matcher, 1, num_clips=1, batch_size=1).score(listed, ["n0", "n1", "n2"], wanted, device=CPU)
        assert matcher.pairs == before  # of the two rows before it


def test_the_protocol_says_how_many_there_are_and_what_their_scores_mean(grey):
    both = ("text_to_video", "video_to_text")
    said = judge(rows(grey, captions=3), second_stage(Matcher(), 20, both)).protocol
    assert "the first 12 (text to video) and 20 (video to text) again by matching/best" in said["second_stage"]
    assert "second_stage_trained" not in said
    for loss in ("match_hinge", "choice_cross_entropy"):
        said = judge(rows(grey), second_stage(Matcher(num_outputs=1), 50, both, loss=loss)).protocol
        words = "the first 12 again by matching/best, logit of a match; the others stay behind them in their order"
        assert said["second_stage"] == words
    assert said["second_stage_trained"].startswith("to compare texts of one video: scores of different videos have no")


def test_equal_captions_tie_in_both_stages(grey):
    listed = rows(grey)
    listed[5] = Clip(id="v5", video=listed[5].video, captions=listed[4].captions)
    report = judge(listed, second_stage(Matcher(), N, ("text_to_video", "video_to_text")), shift=0.0)
    assert report.metrics["text_to_video/recall_at_1"] == pytest.approx(11 / 12)
    assert report.metrics["video_to_text/recall_at_1"] == pytest.approx(10 / 12)


def test_broken_scores_and_videos_are_named(grey, tmp_path):
    with pytest.raises(DataError, match=r"scores of the second stage are not finite .*query 'n0' with candidate 'v"):
        judge(rows(grey), second_stage(Matcher(spoiled=True), 2))
    stage = second_stage(Matcher(), 2)
    gone = Clip(id="gone", video=str(tmp_path / "gone.mp4"))
    with pytest.raises(DataError, match=r"1 of 2 videos cannot be read by the second stage, matching/best.*gone\.mp4"):
        stage.score([rows(grey)[0], gone], ["n0"], device=CPU)


def test_what_the_towers_could_not_read_is_in_neither_stage(grey, tmp_path):
    gone = Clip(id="gone", video=str(tmp_path / "gone.mp4"), captions=(Caption(text="n3"),))
    listed = [*rows(grey)[:5], gone, *rows(grey)[5:]]
    with pytest.raises(DataError, match="1 of 13 videos could not be read"):
        judge(listed, second_stage(Matcher(), N))
    section = EvalSection(num_clips=2, batch_size=4, allow_missing=True)
    matcher = Matcher()
    report = evaluate_retrieval(
        Towers(1.6).eval(), towers_task(), listed, section, device=CPU, second=second_stage(matcher, N)
    )
    assert report.metrics == judge(rows(grey), second_stage(Matcher(), N)).metrics
    assert matcher.pairs == 2 * N * N and [fault.id for fault in report.faults] == ["gone"]


@pytest.mark.parametrize("direction", ["text_to_video", "video_to_text"])
def test_towers_of_segments_have_a_first_stage_too(direction):
    generator = torch.Generator().manual_seed(2)
    texts, videos = torch.randn(30, 8, generator=generator), torch.randn(30, 3, 8, generator=generator)
    towers = Contrastive(loss=losses.clip_bag)
    scores = towers.similarity(videos.double(), texts.double())
    names = [str(i) for i in range(30)]
    side = SimpleNamespace(positives=[[i] for i in range(30)], query_ids=names, candidate_ids=names)
    stage = first_stage(towers, direction, side, texts, videos, 4)
    expected = metrics.first_candidates(scores.T if direction == "text_to_video" else scores, side.positives, 4)
    assert torch.equal(stage.ranks, expected.ranks) and torch.equal(stage.candidates, expected.candidates)


def test_the_first_stage_of_embeddings_is_that_of_its_ranks():
    generator = torch.Generator().manual_seed(1)
    texts, videos = torch.randn(300, 8, generator=generator), torch.randn(40, 8, generator=generator)
    videos[7] = videos[3]  # equal embeddings tie
    positives = [[query % 40] for query in range(300)]
    side = SimpleNamespace(positives=positives, query_ids=[str(i) for i in range(300)], candidate_ids=list("v" * 40))
    stage = first_stage(towers_task(), "text_to_video", side, texts, videos, 5)
    assert torch.equal(stage.ranks, metrics.embedding_ranks(texts, videos, positives))
    inside = (stage.candidates == torch.tensor(positives)).any(1)
    assert torch.equal(inside, stage.ranks <= 5)


# ---- which runs can be a second stage


def test_without_a_second_run_or_without_towers_there_is_no_second_stage():
    run = SimpleNamespace(task=towers_task(), folder=Path("towers"))
    assert load_second_stage(RerankSection(), run) is None
    with pytest.raises(ValueError, match=r"rerank.k and rerank.num_clips: nothing is re-ranked without a second run"):
        RerankSection(k=3, num_clips=2)
    with pytest.raises(CheckpointError, match=r"rerank.run=nowhere: no such folder"):
        load_second_stage(RerankSection(run="nowhere"), run)
    matching = SimpleNamespace(task=VideoTextMatching(loss=losses.match_cross_entropy), folder=Path("clipbert"))
    with pytest.raises(ConfigError, match=r"clipbert was trained with task.name=video_text_matching; what is re-ran"):
        load_second_stage(RerankSection(run="nowhere"), matching)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (towers_task(), "task.name=contrastive, two towers; the second stage is a run of task.name=video_text_match"),
        (SimpleNamespace(name="action_recognition"), "task.name=action_recognition, a classifier; the second stage"),
        (
            VideoTextMatching(
                loss=losses.answer_cross_entropy, goal="question_answering", answers=("a", "b")
            ),
            "task.goal=question_answering: its scores compare answers to a question",
        ),
        (VideoTextMatching(loss=losses.choice_cross_entropy, goal="multiple_choice"), "task.goal=multiple_choice"),
    ],
)  # fmt: skip
def test_only_a_run_that_matches_captions_re_ranks(task, words, tmp_path, monkeypatch):
    monkeypatch.setattr("twinreel.evaluation.rerank.load_run", lambda *_: SimpleNamespace(task=task))
    run = SimpleNamespace(task=towers_task(), folder=Path("towers"))
    with pytest.raises(ConfigError, match=words):
        load_second_stage(RerankSection(run=str(tmp_path)), run)


def test_the_runs_own_windows_are_kept_unless_others_are_asked_for(tmp_path, monkeypatch):
    own = EvalSection(num_clips=16, windows="clipbert", batch_size=3)
    task = VideoTextMatching(loss=losses.match_cross_entropy)
    found = SimpleNamespace(task=task, model=Matcher(), recipe=SimpleNamespace(eval=own))
    monkeypatch.setattr("twinreel.evaluation.rerank.load_run", lambda *_: found)
    run = SimpleNamespace(task=towers_task(), folder=Path("towers"))
    stage = load_second_stage(RerankSection(run=str(tmp_path)), run)
    assert (stage.rules.num_clips, stage.rules.windows, stage.section.batch_size) == (16, "clipbert", 3)
    stage = load_second_stage(RerankSection(run=str(tmp_path), num_clips=2, direction="both", k=7), run)
    assert (stage.rules.num_clips, stage.rules.windows, stage.k) == (2, "clipbert", 7)
    assert stage.directions == ("text_to_video", "video_to_text")
