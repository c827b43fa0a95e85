"""The task of matching: which texts and targets a batch has, what logits mean, what is refused."""

import math

import pytest
import torch
from small_runs import DropoutMatcher

from twinreel import losses
from twinreel.data.clip import Batch, Caption, Clip
from twinreel.errors import ConfigError, DataError
from twinreel.tasks import MatchFacts, VideoTextMatching


def batch(captions, *, labels=(), options=(), valid=None):
    count = len(captions)
    return Batch(
        ids=[f"v{i}" for i in range(count)],
        frames=torch.zeros(count, 2, 4, 4, 3, dtype=torch.uint8),
        pts_seconds=torch.zeros(count, 2),
        flip=torch.zeros(count, dtype=torch.bool),
        valid=torch.ones(count, dtype=torch.bool) if valid is None else valid,
        captions=captions,
        caption_mask=torch.ones(count, len(captions[0]), dtype=torch.bool),
        labels=list(labels) or [()] * count,
        options=list(options) or [()] * count,
        repeated_frames=0,
        faults=[],
    )


def retrieval(**options):
    return VideoTextMatching(loss=losses.match_cross_entropy, **options)


def answering(*answers):
    return VideoTextMatching(loss=losses.answer_cross_entropy, goal="question_answering", answers=answers)


def choosing():
    return VideoTextMatching(loss=losses.choice_cross_entropy, goal="multiple_choice")


def test_the_first_text_of_a_retrieval_batch_is_the_right_one():
    tokens, facts = retrieval().inputs(DropoutMatcher(2), batch([["a cat", "a dog"], ["an egg", "a cat"]]))
    assert tokens.shape == (2, 2, 26) and tokens[1, 0].sum() == 5
    assert facts.targets.tolist() == [[1.0, 0.0], [1.0, 0.0]] and facts.usable.all()


def test_a_caption_without_a_word_teaches_nothing():
    _, facts = retrieval().inputs(DropoutMatcher(2), batch([["a cat", "a dog"], ["  ", "a cat"], ["123", "a cat"]]))
    assert facts.known.tolist() == [True, False, False] and facts.num_masked == 2


def test_options_are_asked_together_with_the_question():
    given = batch([["what is it"], [""]], labels=[(1,), (0,)], options=[("a cat", "a dog"), ("an egg", "a pan")])
    task = choosing()
    assert task.texts(given) == [["what is it a cat", "what is it a dog"], ["an egg", "a pan"]]
    _, facts = task.inputs(DropoutMatcher(1), given)
    assert facts.targets.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert task.texts(batch([[], []], options=given.options)) == [["a cat", "a dog"], ["an egg", "a pan"]]
    assert given.options[0] == ("a cat", "a dog")  # ClipBERT defect 13: the rows' own options stay


def test_an_answer_that_is_no_output_teaches_nothing_and_is_counted():  # ClipBERT defect 14
    task = answering("yes", "no")
    _, facts = task.inputs(DropoutMatcher(2), batch([["is it"]] * 3, labels=[("no",), ("maybe",), ("yes",)]))
    assert facts.known.tolist() == [True, False, True] and facts.num_masked == 1
    assert facts.targets.tolist() == [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    logits = torch.randn(3, 2, 1, 2, dtype=torch.float64)
    both = MatchFacts(facts.valid[[0, 2]], facts.known[[0, 2]], facts.targets[[0, 2]])
    assert task.share((logits,), facts) == pytest.approx(float(task.share((logits[[0, 2]],), both)), rel=1e-12)


def test_shares_of_processes_add_up_and_travel_as_one_matrix():
    task = retrieval(num_negatives=2)
    facts = MatchFacts(torch.tensor([True, False, True]), torch.ones(3).bool(), torch.eye(3)[[0, 0, 0]])
    logits = torch.randn(3, 2, 3, 2, dtype=torch.float64)
    back = task.unpack(facts.pack())
    assert all(torch.equal(one, other) for one, other in zip(back, facts, strict=True))
    parts = [task.share((logits,), facts, own=own) for own in torch.tensor([0, 1, 2]).split(2)]
    assert float(sum(parts)) == pytest.approx(float(task.share((logits,), facts)), rel=1e-12)


@pytest.mark.parametrize("pooling", ["lse", "mean", "max"])
def test_scores_are_log_odds_after_pooling_over_the_clips(pooling):
    task = retrieval(loss_options={"pooling": pooling})
    logits = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    pool = {"lse": lambda x: x.logsumexp(1), "mean": lambda x: x.mean(1), "max": lambda x: x.amax(1)}[pooling]
    chances = pool(logits).softmax(-1)
    torch.testing.assert_close(
        task.scores(logits).double(), (chances[..., 1] / chances[..., 0]).log(), atol=1e-5, rtol=0
    )
    # ClipBERT defect 10: far from 0 and 1 a rounded probability would be a tie
    sure = torch.zeros(1, 1, 2, 2)
    sure[0, 0, :, 1] = torch.tensor([20.0, 21.0])
    assert task.scores(sure)[0, 1] > task.scores(sure)[0, 0]


def test_pooling_is_that_of_the_loss():
    assert retrieval().pooling == "lse"
    assert VideoTextMatching(loss=losses.match_hinge).pooling == "mean"
    assert VideoTextMatching(loss=losses.match_hinge, loss_options={"pooling": "max"}).pooling == "max"


def test_the_loss_at_chance_is_known():
    assert retrieval().chance_loss(4) == pytest.approx(math.log(2))
    assert answering(*"abcde").chance_loss(3) == pytest.approx(math.log(5))
    assert choosing().chance_loss(3, num_texts=5) == pytest.approx(math.log(5))
    assert VideoTextMatching(loss=losses.match_hinge).chance_loss(2) == pytest.approx(0.2)


def test_a_tie_is_no_right_answer_in_training_either():
    task = retrieval()
    facts = MatchFacts(torch.ones(2).bool(), torch.ones(2).bool(), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    logits = torch.zeros(2, 1, 2, 2)
    assert task.statistics((logits,), facts) == {"train_accuracy": 0.0}
    logits[0, 0, 0, 1] = 0.1
    assert task.statistics((logits,), facts) == {"train_accuracy": 0.5}


@pytest.mark.parametrize(
    ("task", "row", "words"),
    [
        (retrieval(), {}, "no caption; task.goal=retrieval needs a caption"),
        (answering("a", "b"), {"labels": ("a",)}, "no question"),
        (answering("a", "b"), {"labels": (0,), "options": ("a", "b")}, "it has options, .* set multiple_choice"),
        (answering("a", "b"), {"captions": (Caption(text="what"),)}, "no answer"),
        (answering("a", "b"), {"labels": ("a", "b"), "captions": (Caption(text="what"),)}, "2 answers, and task.loss"),
        (retrieval(), {"labels": (0,), "options": ("a", "b")}, "no caption; task.goal=retrieval needs a caption"),
        (choosing(), {"labels": (0,)}, "no options"),
        (choosing(), {"labels": (2,), "options": ("a", "b")}, "the answer is 2; it must be the place .* from 0 to 1"),
        (choosing(), {"labels": ("a",), "options": ("a", "b")}, "the answer is 'a'"),
        (choosing(), {"options": ("a", "b")}, "the answer is missing"),
        (retrieval(), {"labels": (-1,), "options": ("a", "b"), "captions": (Caption(text="a"),)}, "the answer is -1"),
    ],
)
def test_rows_that_do_not_do_are_named(task, row, words):
    with pytest.raises(DataError, match=rf"^v1 \(training, a\.mp4\): {words}"):
        task.check([Clip(id="v1", video="a.mp4", **row)], "training")


def test_training_rows_have_equally_many_options():
    rows = [Clip(id=str(n), video="a.mp4", labels=(0,), options=("a", "b", "c")[:n]) for n in (2, 3)]
    with pytest.raises(DataError, match="have 2 and 3 options"):
        choosing().check(rows, "training")
    choosing().check(rows, "evaluation")


def test_a_model_with_other_outputs_is_refused_by_name():
    task, given = retrieval(), batch([["a", "b"]])
    tokens, _ = task.inputs(DropoutMatcher(1), given)
    with pytest.raises(ConfigError, match=r"DropoutMatcher returns logits .*take num_outputs"):
        task.outputs(DropoutMatcher(1), torch.zeros(1, 3, 4, 16, 16), tokens)
