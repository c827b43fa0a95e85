"""Accuracy of answers: by hand, against naive oracles, with ties counted against and answers outside the table."""

import math
import random

import pytest
import torch

from twinreel.errors import ConfigError, DataError
from twinreel.metrics import accuracy_by_type, answered_right, answers_metrics, chosen_right, soft_accuracy


def random_case(seed):
    """Scores with many or with few ties, and answers of which some are not in the table."""
    rng = random.Random(seed)
    questions, answers, levels = rng.randint(1, 30), rng.randint(2, 12), rng.choice([1, 2, 4, 1000])
    scores = [[rng.randrange(levels) / 4 - 1 for _ in range(answers)] for _ in range(questions)]
    return torch.tensor(scores), [rng.choice([None, *range(answers)]) for _ in range(questions)]


def test_a_question_is_right_if_its_answer_beats_all_others():  # ClipBERT defect 14: answers outside the table
    for seed in range(100):
        scores, answers = random_case(seed)
        want = [
            answer is not None and all(row[answer] > other for place, other in enumerate(row) if place != answer)
            for row, answer in zip(scores.tolist(), answers, strict=True)
        ]
        assert answered_right(scores, answers).tolist() == want


def test_a_collapsed_model_is_right_nowhere():
    assert answers_metrics(torch.zeros(6, 3), [0, 1, 2, 0, 1, 2]) == {"accuracy": 0.0, "unanswerable_share": 0.0}
    assert chosen_right([torch.zeros(5)] * 4, [0, 1, 2, 3]).tolist() == [False] * 4
    assert soft_accuracy(torch.zeros(2, 3), torch.tensor([[1.0, 0.3, 0.0], [0.5, 0.5, 0.5]])) == pytest.approx(0.25)


def test_options_of_different_number_are_judged_like_those_of_one_number():
    rng = random.Random(0)
    scores = [torch.rand(rng.choice([2, 3, 5]), generator=torch.Generator().manual_seed(i)) for i in range(40)]
    answers = [rng.randrange(len(row)) for row in scores]
    want = [bool(answered_right(row[None], [answer])[0]) for row, answer in zip(scores, answers, strict=True)]
    assert chosen_right(scores, answers).tolist() == want and 0 < sum(want) < 40


def test_types_are_counted_apart_and_an_empty_one_has_no_number():
    right = torch.tensor([True, False, True, True, False])
    found = accuracy_by_type(right, ["what", "what", "who", None, "what"])
    assert found == pytest.approx(
        {"accuracy": 0.6, "accuracy/what": 1 / 3, "share/what": 0.6, "accuracy/who": 1.0, "share/who": 0.2}
    )


def test_answers_outside_the_table_count_as_wrong_and_are_counted():  # ClipBERT defect 14
    scores = torch.eye(4)[:, :3]
    found = answers_metrics(scores, [0, None, 2, None], types=["a", "a", "b", "b"])
    assert found == {
        "accuracy": 0.5, "accuracy/a": 0.5, "share/a": 0.5, "accuracy/b": 0.5, "share/b": 0.5, "unanswerable_share": 0.5
    }  # fmt: skip
    assert answers_metrics(scores, [None] * 4)["accuracy"] == 0.0


def test_soft_accuracy_is_the_mean_of_what_the_best_answers_are_worth():
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.rand(50, 7, generator=generator), torch.rand(50, 7, generator=generator)
    want = targets.double()[torch.arange(50), scores.argmax(1)].mean()
    assert soft_accuracy(scores, targets) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused_by_name(bad):
    scores = torch.eye(3)
    scores[1, 2] = bad
    ids, words = ["a", "b", "c"], "1 of 3 questions have scores that are not finite: 'b'"
    for judge in (
        lambda: answered_right(scores, [0, 1, None], ids=ids),
        lambda: answers_metrics(scores, [0, None, 2], ids=ids),  # of an unanswerable one, too
        lambda: soft_accuracy(scores, torch.eye(3), ids=ids),
    ):
        with pytest.raises(DataError, match=words):
            judge()
    with pytest.raises(DataError, match="not finite: 'b'"):
        chosen_right([torch.zeros(2), scores[1], torch.zeros(4)], [0, 1, 2], ids=ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: answered_right(torch.zeros(3), [0]), r"scores must be \(questions, answers\)"),
        (lambda: answered_right(torch.zeros(2, 3), [0]), r"got shape \(2, 3\) and 1 answers"),
        (lambda: answered_right(torch.zeros(2, 1), [0, 0]), "one answer would be right whatever the scores"),
        (lambda: answered_right(torch.zeros(0, 3), []), "there must be a question"),
        (lambda: answered_right(torch.zeros(2, 3), [0, 3]), "question at position 1 has answer 3; .* 0 to 2, and None"),
        (lambda: answered_right(torch.zeros(2, 3), [0, -1], ids=["x", "y"]), "question 'y' has answer -1"),
        (lambda: answered_right(torch.zeros(2, 3), [0, 1], ids=["x"]), "ids has 1 names for 2 rows"),
        (lambda: chosen_right([], []), "0 rows of scores and 0 right options"),
        (lambda: chosen_right([torch.zeros(2, 2)], [0]), r"question at position 0 must be \(options,\)"),
        (lambda: chosen_right([torch.zeros(1)], [0]), "one answer would be right"),
        (lambda: accuracy_by_type(torch.ones(2).bool(), ["a"]), r"one question or more, got \(2,\), 1 types"),
        (lambda: accuracy_by_type(torch.ones(0).bool(), []), r"got \(0,\), 0 types"),
        (lambda: soft_accuracy(torch.zeros(2, 3), torch.zeros(2, 2)), r"got \(2, 3\) and \(2, 2\)"),
        (lambda: soft_accuracy(torch.zeros(2, 3), torch.full((2, 3), 1.5)), "targets must be 0 to 1; those of at pos"),
        (lambda: soft_accuracy(torch.zeros(2, 3), torch.full((2, 3), math.nan)), "targets must be 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
