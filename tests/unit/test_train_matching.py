"""Cross-modal models on the loop: exact resume, what is said and kept, faults, replay, choices and answers."""

import json

import pytest
import torch
from small_runs import assert_same_runs, be_killed, in_step, matching_recipe, records, worded

from twinreel.assembly import evaluation_rows, load_model, load_run
from twinreel.check import check_recipe
from twinreel.checkpoint import find_checkpoint, read_model_json
from twinreel.data.captions import row_captions
from twinreel.errors import ConfigError, DataError, TrainingError
from twinreel.parts import build_parts, read_batches
from twinreel.replay import replay
from twinreel.training import train

CPU = torch.device("cpu")
SMALL = (
    "model.hidden_size=16", "model.num_heads=2", "model.intermediate_size=32", "model.num_layers=1",
    "model.preprocessing.crop_size=32",
)  # fmt: skip
EVERYTHING = ("train.ema_decay=0.9", "train.micro_batch_size=2", "task.num_negatives=3", "optim.clip_norm=1.0")


def caption(number, row):
    return row_captions(row)[0].text


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    worded(folder, caption=caption)
    return folder


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    worded(
        folder,
        question=lambda number, row: "which one is it",
        options=lambda number, row: [caption(number, row), "nothing at all", "a green fish"],
        answer=lambda number, row: 0,
    )
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    worded(
        folder,
        question=lambda number, row: "what is it",
        answer=lambda number, row: ["round", "square", "seldom"][2 if number == 5 else number % 2],
        answer_type=lambda number, row: ["shape", "other"][number % 2],
    )
    return folder


@pytest.mark.parametrize(
    "options",
    [(), EVERYTHING, ("task.negatives=in_batch", "task.num_negatives=3"), ("task.loss=match_hinge",)],
    ids=["plain", "everything", "of the batch", "hinge"],
)
def test_a_killed_run_goes_on_bit_for_bit(videos, tmp_path, monkeypatch, options):
    wanted = matching_recipe(videos, *options)
    train(wanted, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        in_step(patch, 4, be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, tmp_path / "killed", quiet=True)
    train(wanted, tmp_path / "killed", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize(
    "options",
    [
        ["train.activation_checkpointing=true"],
        ["train.precision=bf16"],
        ["train.activation_checkpointing=true", "train.precision=bf16"],
    ],
)
def test_clipbert_itself_goes_on_bit_for_bit(videos, tmp_path, monkeypatch, options):
    wanted = matching_recipe(videos, *SMALL, *options, name="clipbert_small")
    train(wanted, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        in_step(patch, 4, be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(wanted, tmp_path / "killed", quiet=True)
    train(wanted, tmp_path / "killed", resume=True, quiet=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")
    one, two = load_model(tmp_path / "whole"), load_model(tmp_path / "killed")
    assert one.vocabulary == two.vocabulary and one.vocabulary.encode("a red square")
    tokens = one.tokenize(["a red square"])[:, None]
    assert torch.equal(one(torch.ones(1, 3, 4, 32, 32), tokens), two(torch.ones(1, 3, 4, 32, 32), tokens))


def test_what_a_run_says_and_keeps(videos, tmp_path, capsys):
    result = train(matching_recipe(videos, "task.num_negatives=3"), tmp_path / "run")
    said = capsys.readouterr().err
    assert "3 wrong captions a video (of any other video), clips pooled by lse" in said
    assert "2 clips a video" in said and "negative captions" not in said
    lines = records(tmp_path / "run")
    assert len(lines) == 6 and all(0 <= line["train_accuracy"] <= 1 for line in lines)
    assert set(result.report.metrics) >= {"text_to_video/recall_at_1", "chance/video_to_text/recall_at_1"}
    described = read_model_json(find_checkpoint(tmp_path / "run")[0])
    assert described["num_outputs"] == 2 and described["answers"] == []
    assert load_run(tmp_path / "run").task.pooling == "lse"
    with pytest.raises(ConfigError, match="no embeddings of sentences"):
        _ = load_run(tmp_path / "run").towers


def test_several_clips_a_video_are_drawn_anew_each_epoch(videos):
    parts = build_parts(matching_recipe(videos), CPU)
    recipe = matching_recipe(videos)
    first, later = (read_batches(recipe, parts, step)[0] for step in (0, 3))
    assert first.frames.shape == (4, 4, 16, 16, 3) and first.pts_seconds.shape == (4, 4)
    assert len({tuple(times.tolist()) for times in first.pts_seconds.view(8, 2)}) > 4
    same = {id: place for place, id in enumerate(first.ids)}
    pairs = [(same[id], place) for place, id in enumerate(later.ids) if id in same]
    assert pairs and all(not torch.equal(first.pts_seconds[a], later.pts_seconds[b]) for a, b in pairs)


def test_samples_that_fail_are_masked_named_and_never_replaced(tmp_path):  # ClipBERT defect 7
    videos = tmp_path / "videos"
    videos.mkdir()
    worded(videos, caption=caption)
    victim = json.loads((videos / "train.jsonl").read_text().splitlines()[2])["video"]
    with open(victim, "r+b") as file:
        file.truncate(100)
    train(matching_recipe(videos, "data.max_faults=0.2"), tmp_path / "run", quiet=True)
    faults = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    assert faults and {fault["video"] for fault in faults} == {victim}
    with pytest.raises(TrainingError, match="samples could not be read"):
        train(matching_recipe(videos, "data.max_faults=0.0"), tmp_path / "strict", quiet=True)


def test_replay_takes_a_step_apart(videos, tmp_path):
    train(matching_recipe(videos, "train.micro_batch_size=2"), tmp_path / "run", quiet=True)
    found = replay(tmp_path / "run", 5)
    assert found.loss == pytest.approx(records(tmp_path / "run")[4]["loss"], rel=1e-6)
    assert sum(term.loss for term in found.terms) / 4 == pytest.approx(found.loss, rel=1e-5)


def test_choices_are_learned_and_judged(choices, tmp_path):
    wanted = matching_recipe(choices, "task.goal=multiple_choice", "train.num_steps=40", "optim.learning_rate=0.03")
    result = train(wanted, tmp_path / "run", quiet=True)
    lines = records(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert 0 <= result.report.metrics["accuracy"] <= 1
    assert result.report.metrics["chance/accuracy"] == pytest.approx(1 / 3)


def test_answers_are_learned_and_judged(answers, tmp_path):
    result = train(matching_recipe(answers, "task.goal=question_answering"), tmp_path / "run", quiet=True)
    assert load_run(tmp_path / "run").task.answers == ("round", "square", "seldom")
    assert 0 <= result.report.metrics["accuracy"] <= 1


def test_answers_beyond_the_outputs_are_counted(answers, tmp_path, capsys):
    wanted = matching_recipe(answers, "task.goal=question_answering", "model.num_classes=2")
    train(wanted, tmp_path / "run")
    assert "1 of 12 training rows have an answer that is none of the 2 outputs" in capsys.readouterr().err
    assert load_run(tmp_path / "run").task.answers == ("round", "square")


def test_check_says_what_will_be_compared(videos, tmp_path):
    found = check_recipe(matching_recipe(videos), tmp_path / "sheet.png", steps=0)
    assert found.facts["evaluation"].endswith("queries, 6 videos") and found.facts["network_input"] == "4x3x4x16x16"
    assert not found.problems and (tmp_path / "sheet.png").exists()


def test_processes_are_tried_in_a_check(videos, tmp_path):
    recipe = matching_recipe(videos, *SMALL, "optim.learning_rate=0.003", name="clipbert_small")
    found = check_recipe(recipe, tmp_path / "sheet.png", steps=20)
    assert found.facts["processes"].startswith("2 processes agree with one")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.loss=milnce", r"unknown name 'milnce' \(it goes with another task.name or task.goal\)"),
        ("task.loss=answer_cross_entropy", r"it goes with another task.name or task.goal"),
        ("model.name=s3dg_small", "unknown name 's3dg_small'"),
        ("task.goal=guessing", "task.goal"),
        ("task.num_candidates=2", "task.num_candidates goes with task.name=contrastive"),
        ("data.mixup=0.8", "data.mixup goes with task.name=action_recognition"),
        ("data.repeated_augmentation=2", "set data.num_clips"),
        ("data.clip_start=uniform", "data.num_clips=2 with data.clip_start=uniform"),
        ("model.num_classes=5", "model.num_classes goes with task.goal=question_answering"),
        ("eval.best_metric=accuracy", "eval.best_metric=accuracy is none of"),
        ("rerank.run=x", "rerank.run judges the answers of two towers again"),
        ("rerank.k=10", "rerank.k: nothing is re-ranked without a second run"),
        ("data.clip_start=start", "data.num_clips=2 with data.clip_start=start"),
        ("task.poolin=max", "pooling"),
    ],
)
def test_what_does_not_go_together_is_refused(videos, override, words):
    with pytest.raises(ConfigError, match=words):
        matching_recipe(videos, override)


def test_keys_of_matching_are_refused_elsewhere(tmp_path):
    from twinreel.recipe import load_recipe

    for key in ("task.num_negatives=2", "task.negatives=in_batch", "task.goal=multiple_choice", "data.num_clips=2"):
        with pytest.raises(ConfigError, match=f"{key.split('=')[0]} goes with task.name=video_text_matching"):
            load_recipe("demo", [key])


def test_rows_that_do_not_do_stop_the_run_before_its_first_step(videos, choices, tmp_path):
    with pytest.raises(DataError, match=r"no options; task.goal=multiple_choice needs"):
        train(matching_recipe(videos, "task.goal=multiple_choice"), tmp_path / "a", quiet=True)
    with pytest.raises(DataError, match="0 different answers"):
        train(matching_recipe(videos, "task.goal=question_answering"), tmp_path / "b", quiet=True)
    with pytest.raises(DataError, match=r"task.num_negatives=12 wrong captions a video come from other videos"):
        train(matching_recipe(videos, "task.num_negatives=12"), tmp_path / "c", quiet=True)
    assert not any((tmp_path / name).exists() for name in "abc")


def test_a_softmax_over_the_captions_of_the_batch_is_a_loss_of_retrieval(videos, tmp_path):
    options = ("task.loss=choice_cross_entropy", "task.negatives=in_batch", "task.num_negatives=3")
    recipe = matching_recipe(videos, *options)
    result = train(recipe, tmp_path / "run", quiet=True)
    assert "text_to_video/recall_at_1" in result.report.metrics
    assert read_model_json(find_checkpoint(tmp_path / "run")[0])["num_outputs"] == 1


def test_published_networks_without_weights_say_what_stays_random(videos, caplog):
    small = (*SMALL, "model.freeze_stages=2", "model.cnn_norm=frozen")
    build_parts(matching_recipe(videos, *small, name="clipbert_small"), CPU)
    assert "tensors of the CNN are frozen by design and random" in caplog.text
    caplog.clear()
    build_parts(matching_recipe(videos, *SMALL, name="clipbert_small"), CPU)
    assert "random" not in caplog.text


def test_captions_with_seconds_are_judged_in_them_where_rows_are_captions(tmp_path):
    folder = tmp_path / "videos"
    folder.mkdir()
    worded(
        folder,
        captions=lambda number, row: [
            {"text": "first", "start": 0.0, "end": 0.5},
            {"text": f"then {number}", "start": 0.5, "end": 1.0},
        ],
    )
    spans = {
        form: [(row.start_seconds, row.end_seconds) for row in evaluation_rows(matching_recipe(folder, form))][:2]
        for form in ("data.caption_rows=caption", "data.caption_rows=video")
    }
    assert spans["data.caption_rows=caption"] == [(0.0, 0.5), (0.5, 1.0)]
    assert spans["data.caption_rows=video"] == [(None, None), (None, None)]


def test_another_source_to_judge_by_brings_its_own_options(videos, tmp_path):
    from twinreel.recipe import load_recipe

    path = tmp_path / "recipe.yaml"
    kept = matching_recipe(videos, "eval.source=generated", "eval.manifest=null", "eval.num_test_videos=6")
    path.write_text(kept.to_yaml())
    judged = load_recipe(path, ["eval.annotations=lists", "eval.num_clips=3"], eval_source="msrvtt").eval
    assert (judged.source, judged.manifest, judged.num_clips) == ("msrvtt", None, 3)
    assert judged.options["annotations"] == "lists" and "num_test_videos" not in judged.options
    with pytest.raises(ConfigError, match=r"eval\.annotation"):
        load_recipe(path, ["eval.annotation=lists"], eval_source="msrvtt")
    assert load_recipe(path, eval_source="generated").eval.options["num_test_videos"] == 6
