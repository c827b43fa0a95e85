"""Two stages from the command line: re-ranking in eval and search; predict by matching, choosing and answering."""

import json
from types import SimpleNamespace

import pytest
import yaml

from cli.command_line import twinreel
from cli.launched import launch
from cli.test_verbs import cells

SENTENCE = "a red circle moves left"
MODEL = {
    "name": "clipbert_small", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32,
    "cnn_width": 8, "preprocessing": {"num_frames": 2, "frame_rate": 4.0, "crop_size": 32},
}  # fmt: skip


def matching_recipe(folder, name, task, data, **sections):
    """A recipe of a cross-modal model, two steps, in a file."""
    recipe = {
        "model": MODEL,
        "task": {"name": "video_text_matching", **task},
        "data": {"num_workers": 0, "num_clips": 2, "crop": "pad", "flip": 0.0, **data},
        "optim": {"name": "adamw", "learning_rate": 0.01},
        "train": {"num_steps": 2, "global_batch_size": 4, "device": "cpu"},
        "eval": {"num_clips": 2, "batch_size": 8} | sections.get("eval", {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="session")
def stages(trained, collection, tmp_path_factory):
    """Runs `.towers`, `.matching` on the same videos, `.choosing`, `.answering`; `.index` of the test videos."""
    folder = tmp_path_factory.mktemp("stages")
    data = {"source": "generated", "root": str(trained.root), "split": "train", "num_videos": 8, "num_test_videos": 6}
    names = collection.names[:8]
    asked = {"question": ["what number is it"] * 8, "answer": [f"n{i % 3}" for i in range(8)]}
    answers = collection.manifest(folder / "answers.csv", names, **asked)
    choices = folder / "choices.jsonl"
    lines = [
        {"video": str(collection.folder / name), "question": "which", "options": ["low", "high"], "answer": i % 2}
        for i, name in enumerate(names)
    ]
    choices.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipes = {
        "matching": matching_recipe(
            folder, "matching", {"loss": "match_cross_entropy"}, data, eval={"split": "test", "batch_size": 8}
        ),
        "answering": matching_recipe(
            folder, "answering", {"goal": "question_answering", "loss": "answer_cross_entropy"},
            {"manifest": str(answers)},
        ),
        "choosing": matching_recipe(
            folder, "choosing", {"goal": "multiple_choice", "loss": "choice_cross_entropy"}, {"manifest": str(choices)}
        ),
    }  # fmt: skip
    for name, recipe in recipes.items():
        outcome = twinreel("train", recipe, "--out", folder / name)
        assert outcome.code == 0, outcome
    videos = trained.root / "test" / "videos"
    assert twinreel("embed", trained.run, "--input", videos, "--out", folder / "index").code == 0
    return SimpleNamespace(
        towers=trained.run, videos=videos, folder=folder, index=folder / "index", **{n: folder / n for n in recipes}
    )


# ---- eval


def test_eval_shows_both_rows_and_both_protocols(stages):
    outcome = twinreel("eval", stages.towers, f"rerank.run={stages.matching}", "rerank.k=3", "rerank.num_clips=1")
    assert outcome.code == 0
    assert "6/6 videos" in outcome.err and "18/18 pairs" in outcome.err
    assert len(cells(outcome.out, "text to video")) == len(cells(outcome.out, "first stage, text to video")) == 4
    for words in ("second stage: the first 3 again by matching/", "second stage pairs: 18 of 36",
                  "second stage windows: 1 a video, uniform, logits pooled by lse",
                  "second stage frames: 2 at 4 a second",
                  "windows: 2 a video, uniform, embeddings averaged"):  # fmt: skip
        assert words in outcome.out, words
    alone = json.loads(twinreel("eval", stages.towers, "--json").out)["metrics"]
    values = json.loads(twinreel("eval", stages.towers, f"rerank.run={stages.matching}", "rerank.k=3", "--json").out)
    for name, value in alone.items():
        assert values["metrics"][name if name.startswith("chance/") else f"first_stage/{name}"] == value


def test_re_ranking_everything_is_the_matching_run_itself(stages):
    full = json.loads(twinreel("eval", stages.matching, "--json").out)["metrics"]
    arguments = (f"rerank.run={stages.matching}", "rerank.k=99", "rerank.direction=both")
    both = json.loads(twinreel("eval", stages.towers, *arguments, "--json").out)["metrics"]
    names = [name for name in full if name.startswith(("text_to_video/", "video_to_text/"))]
    assert len(names) == 8 and {name: both[name] for name in names} == {name: full[name] for name in names}


@pytest.mark.slow
def test_two_processes_re_rank_as_one(stages):
    arguments = ("eval", stages.towers, f"rerank.run={stages.matching}", "rerank.k=3", "rerank.direction=both")
    two = launch(*arguments, "--json")
    assert two.code == 0 and two.err.count("judging 6/6 videos") == 1, two
    found, alone = json.loads(two.out), json.loads(twinreel(*arguments, "--json").out)
    assert found["metrics"] == alone["metrics"]
    for report in (found, alone):
        del report["protocol"]["second_stage_seconds"]
    assert found["protocol"] == alone["protocol"]


def test_eval_refuses_what_cannot_re_rank(stages, tmp_path):
    def judge(*overrides, run=stages.towers):
        return twinreel("eval", run, *overrides)

    judge(f"rerank.run={stages.towers}").fails("rerank.run", "task.name=contrastive, two towers")
    judge(f"rerank.run={stages.answering}").fails("task.goal=question_answering", "task.goal=retrieval")
    judge(f"rerank.run={stages.choosing}").fails("task.goal=multiple_choice", "task.goal=retrieval")
    judge(f"rerank.run={tmp_path / 'gone'}").fails("gone: no such folder", "video_text_matching")
    judge(f"rerank.run={tmp_path}").fails("not a run folder")
    judge(f"rerank.run={stages.matching}", "rerank.k=0").fails("rerank.k: got 0")
    judge(f"rerank.run={stages.matching}", "rerank.checkpoint=step_77").fails("77")
    judge("rerank.k=5").fails("rerank.k: nothing is re-ranked", "rerank.run=FOLDER")
    judge("rerank.runn=x").fails("rerank.runn", "rerank.run")
    judge(f"rerank.run={stages.matching}", run=stages.matching).fails(
        "rerank.run judges the answers of two towers again"
    )


def test_a_classifier_is_not_re_ranked(stages, collection, tmp_path):
    manifest = collection.manifest(tmp_path / "m.csv", collection.names[:8], label=[i % 2 for i in range(8)])
    recipe = {
        "model": {"name": "slow_tiny", "preprocessing": {"num_frames": 2, "frame_rate": 8.0, "crop_size": 32}},
        "task": {"name": "action_recognition", "loss": "cross_entropy"},
        "data": {"manifest": str(manifest), "num_workers": 0},
        "train": {"num_steps": 1, "global_batch_size": 4, "device": "cpu"},
        "rerank": {"run": str(stages.matching)},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(recipe))
    twinreel("train", tmp_path / "c.yaml", "--out", tmp_path / "c").fails(
        "rerank.run judges the answers of two towers again"
    )


# ---- search


def test_search_looks_again_at_the_first_windows_and_shows_both_scores(stages):
    arguments = ("search", stages.index, SENTENCE, "--top", "9")
    plain = json.loads(twinreel(*arguments, "--json").out)
    assert all(answer["rerank_score"] is None for answer in plain)
    again = twinreel(*arguments, f"rerank.run={stages.matching}", "rerank.k=4", "--json")
    assert again.code == 0 and "looking again at 4/4 windows" in again.err
    found = json.loads(again.out)
    scores = [answer["rerank_score"] for answer in found]
    first = [score for score in scores if score is not None]
    assert 1 <= len(first) <= 4 and first == sorted(first, reverse=True)
    assert scores[len(first) :] == [None] * (len(scores) - len(first))
    behind = [answer["score"] for answer in found[len(first) :]]
    assert behind == sorted(behind, reverse=True)
    table = twinreel(*arguments, f"rerank.run={stages.matching}", "rerank.k=4").out.splitlines()
    assert table[0].split() == ["matching", "towers"] and len(table) == 1 + len(found)
    assert table[1].split()[:2] == [f"{first[0]:.3f}", f"{found[0]['score']:.3f}"]
    assert table[-1].split()[0] == "-"
    assert twinreel(*arguments).out.splitlines()[0].split()[0] == f"{plain[0]['score']:.3f}"


def test_search_refuses_what_does_nothing(stages):
    def search(*overrides):
        return twinreel("search", stages.index, SENTENCE, *overrides)

    search("eval.num_clips=3").fails("eval.num_clips=3: does nothing in a search", "rerank.k")
    search(f"rerank.run={stages.matching}", "rerank.direction=both").fails("rerank.direction=both: does nothing")
    search("rerank.k=3").fails("rerank.k: nothing is re-ranked")
    search(f"rerank.run={stages.answering}").fails("task.goal=question_answering")
    search("rerank.k=none").fails("rerank.k")


# ---- predict


def test_predict_ranks_sentences_by_a_matching_run(stages):
    videos = [stages.videos / f"test_000{i}.mp4" for i in range(2)]
    arguments = ("predict", stages.matching, *videos, "--sentence", SENTENCE, "--sentence", "a blue ring grows")
    outcome = twinreel(*arguments)
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [str(video) for video in videos]
    found = json.loads(twinreel(*arguments, "--json").out)
    for own in found:
        assert {item["sentence"] for item in own} == {SENTENCE, "a blue ring grows"}
        assert own[0]["score"] >= own[1]["score"] and own[0]["end_seconds"] == own[0]["start_seconds"] + 0.5
    assert len(json.loads(twinreel(*arguments, "--top", "1", "--json").out)[0]) == 1


def test_predict_answers_a_question(stages, collection):
    video = collection.folder / "3.mp4"
    arguments = ("predict", stages.answering, video, "--question", "what number is it")
    outcome = twinreel(*arguments)
    assert outcome.code == 0 and {line.split()[-1] for line in outcome.out.splitlines()[1:]} == {"n0", "n1", "n2"}
    [own] = json.loads(twinreel(*arguments, "--json").out)
    assert sum(item["score"] for item in own) == pytest.approx(1.0, abs=1e-5)
    assert [item["score"] for item in own] == sorted((item["score"] for item in own), reverse=True)
    assert own[0]["question"] == "what number is it" and own[0]["end_seconds"] == own[0]["start_seconds"] + 0.5


def test_predict_chooses_among_options(stages, collection):
    video = collection.folder / "3.mp4"
    options = ("--sentence", "low", "--sentence", "high")
    [own] = json.loads(twinreel("predict", stages.choosing, video, "--question", "which", *options, "--json").out)
    assert {item["sentence"] for item in own} == {"low", "high"}
    [bare] = json.loads(twinreel("predict", stages.choosing, video, *options, "--json").out)
    assert {item["score"] for item in bare} != {item["score"] for item in own}


def test_predict_says_what_does_not_go_together(stages, collection):
    video, question, sentence = collection.folder / "3.mp4", ("--question", "what"), ("--sentence", SENTENCE)
    twinreel("predict", stages.matching, video, *question).fails("has no answers of its own")
    twinreel("predict", stages.matching, video, *question, *sentence).fails("answers no question", "leave --question")
    twinreel("predict", stages.towers, video, *question, *sentence).fails("answers no question", "leave --question")
    twinreel("predict", stages.choosing, video, *question).fails("chooses among options", "--sentence")
    twinreel("predict", stages.answering, video, *sentence).fails("answers of its own", "--question TEXT")
    twinreel("predict", stages.answering, video, *question, *sentence).fails("answers of its own", "--question TEXT")
    twinreel("predict", stages.matching, video).fails("no sentence to choose from")
    twinreel("predict", stages.matching, video, "--sentence", " ").fails("' '", "vocabulary")
    twinreel("predict", stages.matching, "gone.mp4", *sentence).fails("gone.mp4")
