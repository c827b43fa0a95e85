"""Choices and answers judged: every row counts, ties count against, nothing of a row is changed, results by id."""

import csv
import math
from dataclasses import replace

import pytest
import torch

from matchers import Brightness, grey_rows, make_grey_videos
from twinreel import losses
from twinreel.data.clip import Caption, Clip
from twinreel.errors import ConfigError, DataError
from twinreel.evaluation import evaluate_task, write_confusion, write_predictions
from twinreel.recipe import EvalSection
from twinreel.tasks import VideoTextMatching

CPU = torch.device("cpu")
ANSWERS = ("black", "dark", "grey", "bright")


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    return make_grey_videos(tmp_path_factory.mktemp("grey"), 7)


def retrieval():
    return VideoTextMatching(loss=losses.LOSSES["match_cross_entropy"])


def choices():
    return VideoTextMatching(loss=losses.LOSSES["choice_cross_entropy"], goal="multiple_choice")


def answers(loss="answer_cross_entropy"):
    return VideoTextMatching(loss=losses.LOSSES[loss], goal="question_answering", answers=ANSWERS)


def judge(model, listed, own, **section):
    return evaluate_task(model, own, listed, EvalSection(**({"num_clips": 2} | section)), device=CPU)


def options(grey, numbers, more=("n8", "n9"), captions=None):
    """A question a video, whose right option is the middle one."""
    rows = grey_rows(grey, numbers, captions or (lambda i: []))
    return [
        replace(row, options=(more[0], f"n{i}", *more[1:]), labels=(1,)) for i, row in zip(numbers, rows, strict=True)
    ]


def test_a_run_of_retrieval_chooses_among_options_without_training(grey):  # MSRVTT-MC
    listed = options(grey, range(5))
    model = Brightness()
    report = judge(model, listed, retrieval())
    assert report.metrics == {"accuracy": 1.0, "chance/accuracy": pytest.approx(1 / 3)}
    assert set(model.texts.values()) == {1} and model.clips == 10
    assert sum(model.pairs.values()) == 2 * 5 * 3  # of a video only its own options
    table = report.to_table()
    for words in ("accuracy", "chance", "100.0", "33.3", "evaluated: 5/5 questions", "3 a question", "15 of 5 videos",
                  "as a caption, by a run trained for retrieval", "count against", "10 clips of 5 videos"):  # fmt: skip
        assert words in table, words
    assert report.headline() == "accuracy 100.0 (chance 33.3); 5/5 questions"


def test_a_trained_choice_reads_question_and_option_and_has_its_loss(grey):
    listed = options(grey, range(4), captions=lambda i: ["how bright"])
    model = Brightness(num_outputs=1, scale=10.0)
    report = judge(model, listed, choices(), num_clips=1)
    assert "how bright n8" in model.texts and "n8" not in model.texts
    distances = [[abs(i - 8), 0.0, abs(i - 9)] for i in range(4)]
    expected = [math.log(sum(math.exp(-distance) for distance in own)) for own in distances]
    assert report.metrics["loss"] == pytest.approx(sum(expected) / 4, rel=2e-2)
    assert report.metrics["accuracy"] == 1.0 and "by a run trained for choices; logits" in report.to_table()


def test_rows_may_be_judged_again_and_keep_their_options(grey):
    # ClipBERT defect 13: the options were deleted from the rows at the first reading
    listed = options(grey, range(5))
    before = list(listed)
    first, second = (judge(Brightness(), listed, retrieval()) for _ in range(2))
    assert first.metrics == second.metrics and listed == before


def test_of_equal_scores_a_wrong_option_is_chosen(grey):
    collapsed = Brightness(lambda off: torch.zeros(*off.shape, 2))
    report = judge(collapsed, options(grey, range(4)), retrieval())
    assert report.metrics["accuracy"] == 0.0
    assert all(row.rank == 3 and row.top[0][0] != row.labels[0] for row in report.answers.predictions)
    twice = options(grey, (2,), more=("N2", "n9"))  # read like the right one
    report = judge(Brightness(), twice, retrieval())
    assert report.metrics["accuracy"] == 0.0 and "in 1 rows the model reads two options alike" in report.to_table()


def test_questions_may_have_different_numbers_of_options_and_kinds_of_answers(grey):
    listed = options(grey, range(4))
    listed[0] = replace(listed[0], options=("n0", "n9"), labels=(1,), answer_type="count")  # a wrong key
    listed[1] = replace(listed[1], answer_type="count")
    listed[2:] = [replace(row, answer_type="color") for row in listed[2:]]
    report = judge(Brightness(), listed, retrieval())
    metrics = report.metrics
    assert (metrics["accuracy"], metrics["accuracy/count"], metrics["accuracy/color"]) == (0.75, 0.5, 1.0)
    assert metrics["chance/accuracy/count"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert metrics["chance/accuracy"] == pytest.approx((1 / 2 + 3 / 3) / 4)
    table = report.to_table().splitlines()
    assert [line.split() for line in table if line.startswith("  co")] == [
        ["color", "100.0", "33.3", "50.0"], ["count", "50.0", "41.7", "50.0"],
    ]  # fmt: skip
    assert "2 or 3 a question" in report.to_table()
    one_kind = judge(Brightness(), [replace(row, answer_type="all") for row in listed], retrieval())
    assert "accuracy/all" not in one_kind.metrics


def test_several_questions_about_a_video_take_one_look_at_it(grey):
    listed = options(grey, range(3)) + [
        replace(row, id=f"{row.id}#2") for row in options(grey, range(3), ("n0.4", "n7"))
    ]
    model = Brightness()
    report = judge(model, listed, retrieval(), num_clips=1)
    assert model.clips == 3 and set(model.pairs.values()) == {1} and len(model.pairs) == 3 * 5
    assert [row.id for row in report.answers.predictions] == ["v0", "v1", "v2", "v0#2", "v1#2", "v2#2"]


@pytest.mark.parametrize("what", ["choices", "answers"])
def test_a_question_whose_video_cannot_be_read_is_not_answered(grey, tmp_path, what):  # ClipBERT defect 7
    own, model = (retrieval(), Brightness()) if what == "choices" else (answers(), answering())
    listed = options(grey, range(3)) if what == "choices" else asked(grey, range(3))
    listed.insert(1, replace(listed[0], id="broken", video=str(tmp_path / "none.mp4")))
    with pytest.raises(DataError, match="1 of 4 videos could not be read"):
        judge(model, listed, own)
    report = judge(model, listed, own, allow_missing=True)
    assert report.protocol["evaluated"] == "3/4 questions" and [fault.id for fault in report.faults] == ["broken"]
    assert [row.id for row in report.answers.predictions] == ["v0", "v1", "v2"] and report.metrics["accuracy"] == 1.0


def test_predictions_are_written_by_id(grey, tmp_path):
    report = judge(Brightness(), options(grey, range(2)), retrieval())
    write_predictions(report, tmp_path / "choices.csv")
    lines = list(csv.DictReader((tmp_path / "choices.csv").read_text().splitlines()))
    assert [(line["id"], line["answer"], line["rank"]) for line in lines] == [("v0", "n0", "1"), ("v1", "n1", "1")]
    assert [lines[1][f"answer_{place}"] for place in (1, 2, 3)] == ["n1", "n8", "n9"]
    assert float(lines[1]["score_1"]) > float(lines[1]["score_2"]) > float(lines[1]["score_3"])
    assert report.to_json(predictions=True)["predictions"][0]["id"] == "v0" and "predictions" not in report.to_json()
    with pytest.raises(ConfigError, match="these are scores of retrieval"):
        write_predictions(judge(Brightness(), grey_rows(grey, range(2)), retrieval()), tmp_path / "no.csv")
    with pytest.raises(ConfigError, match="a confusion matrix can be written of classes"):
        write_confusion(report, tmp_path / "no.csv")


def test_a_right_answer_that_is_no_option_is_refused(grey):
    row = options(grey, (1,))[0]
    for labels in ((3,), (-1,), ("n1",), (), (0, 1)):
        with pytest.raises(DataError, match=r"v1 \(evaluation, .*1\.mp4\): the answer is .* from 0 to 2"):
            judge(Brightness(), [replace(row, labels=labels)], retrieval())
    with pytest.raises(DataError, match=r"v1 \(evaluation, .*1\.mp4\): no options"):
        judge(Brightness(num_outputs=1), grey_rows(grey, (1,)), choices())
    with pytest.raises(DataError, match=r"v1 has options to choose from, and this run answers out of its own table"):
        judge(answering(), [row], answers())


def test_a_choice_by_a_score_that_is_not_finite_is_refused_by_name(grey):
    poisoned = Brightness(lambda off: torch.stack([off, torch.where(off > 60, torch.nan, -off)], 2))
    with pytest.raises(DataError, match=r"1 of \d questions have scores that are not finite: 'v1'"):
        judge(poisoned, options(grey, (1, 5), more=("n7.4", "n4")), retrieval())


def answering(**options):
    """Answers the question `... n1` about a video of brightness 0.1: with the name of the distance, 0 = black, ..."""

    def answer(off):
        return -(off[..., None] - torch.arange(4.0)).abs() * options.get("sharpness", 1.0)

    return Brightness(answer, num_outputs=4, scale=10.0)


def asked(grey, numbers, labels=("black", "dark", "grey", "bright", "white", "white", "white"), kinds=None):
    """What is the distance from 0: of video i it is i."""
    rows = grey_rows(grey, numbers, lambda i: ["how far from n0"])
    return [
        replace(row, labels=(labels[i],), answer_type=None if kinds is None else kinds[i])
        for i, row in zip(numbers, rows, strict=True)
    ]


def test_answers_out_of_a_table(grey):
    # ClipBERT defect 14: an output without an answer was a KeyError; an answer outside the table, too
    kinds = ["what", "what", "who", "who", "what", "who"]
    listed = asked(grey, range(6), kinds=kinds)
    model = answering()
    report = judge(model, listed, answers())
    metrics = report.metrics
    assert metrics["accuracy"] == pytest.approx(4 / 6) and metrics["unanswerable_share"] == pytest.approx(2 / 6)
    assert metrics["accuracy/what"] == pytest.approx(2 / 3) == metrics["accuracy/who"]
    assert metrics["chance/accuracy"] == pytest.approx(4 / 6 / 4)
    assert metrics["majority/accuracy"] == pytest.approx(1 / 6)
    assert model.clips == 12 and set(model.texts.values()) == {1}
    predictions = {row.id: row for row in report.answers.predictions}
    assert predictions["v2"].rank == 1 and predictions["v2"].top[0][0] == "grey"
    assert predictions["v5"].rank is None and predictions["v5"].top[0][0] == "bright"
    table = report.to_table()
    for words in ("most frequent answer", "answer not in table", "33.3", "4 in the table", "what", "who",
                  "2 of 6 rows have another answer and are wrong whatever the model says"):  # fmt: skip
        assert words in table, words
    assert report.headline().startswith("accuracy 66.7 (chance 16.7, most frequent answer 16.7); loss ")


def test_the_loss_of_answers_is_over_those_in_the_table(grey):
    report = judge(answering(), asked(grey, (1, 6)), answers(), num_clips=3)
    expected = math.log(sum(math.exp(-abs(place - 1)) for place in range(4)))  # of v1; v6 has no answer
    assert report.metrics["loss"] == pytest.approx(expected, rel=2e-2)
    assert "loss" not in judge(answering(), asked(grey, (5, 6)), answers()).metrics


def test_answers_tie_against_the_model_and_any_of_several_right_ones_is_right(grey):
    collapsed = Brightness(lambda off: torch.zeros(*off.shape, 4), num_outputs=4)
    report = judge(collapsed, asked(grey, range(3)), answers())
    assert report.metrics["accuracy"] == 0.0 and {row.rank for row in report.answers.predictions} == {4}
    several = [replace(row, labels=("white", "bright", row.labels[0])) for row in asked(grey, range(3))]
    report = judge(answering(), several, answers("answer_binary_cross_entropy"))
    assert report.metrics["accuracy"] == 1.0 and report.metrics["unanswerable_share"] == 0.0
    assert report.metrics["loss"] > 0 and "loss" not in judge(answering(), several, answers()).metrics


def test_several_questions_about_a_video_are_one_look_and_a_row_each(grey):
    rows = asked(grey, (2,)) + [
        Clip(id=f"q{i}", video=str(grey / "2.mp4"), captions=(Caption(text=text),), labels=(label,))
        for i, (text, label) in enumerate(
            (("and from n3", "dark"), ("and from n2", "black"), ("how far from n0", "grey"))
        )
    ]
    model = answering()
    report = judge(model, rows, answers(), num_clips=1)
    assert model.clips == 1 and len(model.pairs) == 3 and report.metrics["accuracy"] == 1.0
    assert [row.top[0][0] for row in report.answers.predictions] == ["grey", "dark", "black", "grey"]


def test_rows_in_pieces_give_the_same(grey, monkeypatch):
    listed = asked(grey, range(6), kinds=list("ababab"))
    whole = judge(answering(), listed, answers()).metrics
    monkeypatch.setattr("twinreel.evaluation.answers.ROWS_AT_ONCE", 2)
    assert judge(answering(), listed, answers()).metrics == pytest.approx(whole)
