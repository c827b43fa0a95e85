"""Accuracies, confusion, average precision and views: by hand, against naive oracles, with ties counted against."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from twinreel.errors import ConfigError, DataError
from twinreel.metrics import (
    aggregate_views,
    confusion_matrix,
    mean_average_precision,
    per_class_accuracy,
    predicted_classes,
    top_k_accuracies,
    top_k_accuracy,
)

NAN, INF = math.nan, math.inf


def random_case(seed: int) -> tuple[Tensor, list[int]]:
    """Scores with many or with few ties, and labels."""
    rng = random.Random(seed)
    num_samples, num_classes, levels = rng.randint(1, 30), rng.randint(1, 12), rng.choice([1, 2, 4, 1000])
    scores = [[rng.randrange(levels) / 4 - 1 for _ in range(num_classes)] for _ in range(num_samples)]
    return torch.tensor(scores), [rng.randrange(num_classes) for _ in range(num_samples)]


# --- accuracy ---


def test_top_k_equals_the_worst_order_of_ties_and_stays_in_order_and_range() -> None:  # B079
    for seed in range(200):
        scores, labels = random_case(seed)
        num_classes = scores.shape[1]
        ranks = []
        for row, label in zip(scores.tolist(), labels, strict=True):
            order = sorted(range(num_classes), key=lambda c: (-row[c], c == label))
            ranks.append(1 + order.index(label))
        accuracies = [top_k_accuracy(scores, labels, k) for k in range(1, num_classes + 1)]
        assert accuracies == [sum(rank <= k for rank in ranks) / len(ranks) for k in range(1, num_classes + 1)], seed
        assert accuracies == sorted(accuracies) and accuracies[-1] == 1.0


def test_all_scores_equal_is_right_nowhere() -> None:  # B079
    scores, labels = torch.zeros(20, 11), [i % 11 for i in range(20)]
    assert top_k_accuracies(scores, labels) == {"top_1_accuracy": 0.0, "top_5_accuracy": 0.0}
    assert per_class_accuracy(scores, labels) == dict.fromkeys(range(11), 0.0)
    assert int(confusion_matrix(scores, labels).diagonal().sum()) == 0


@pytest.mark.parametrize(("num_classes", "names"), [(3, ["top_1_accuracy", "top_3_accuracy"]), (1, ["top_1_accuracy"])])
def test_fewer_than_five_classes_are_named_so(num_classes: int, names: list[str]) -> None:  # B078
    found = top_k_accuracies(torch.eye(num_classes), list(range(num_classes)))
    assert list(found) == names and set(found.values()) == {1.0}


def test_what_is_predicted_right_is_what_top_1_counts() -> None:
    tied = 0
    for seed in range(200):
        scores, labels = random_case(seed)
        num_classes = scores.shape[1]
        predicted = predicted_classes(scores, labels).tolist()
        for row, label, place in zip(scores.tolist(), labels, predicted, strict=True):
            assert row[place] == max(row)
            assert (place == label) == (row[label] > max([*row[:label], *row[label + 1 :]], default=-INF))
            tied += place != label and row[label] == max(row)
        matrix = confusion_matrix(scores, labels)
        expected = torch.zeros(num_classes, num_classes, dtype=torch.long)
        for label, place in zip(labels, predicted, strict=True):
            expected[label, place] += 1
        assert torch.equal(matrix, expected)
        assert int(matrix.diagonal().sum()) / len(labels) == top_k_accuracy(scores, labels, 1)
        per_class = per_class_accuracy(scores, labels)
        assert sorted(per_class) == sorted(set(labels))
        for place, accuracy in per_class.items():
            own = [i for i, label in enumerate(labels) if label == place]
            assert accuracy == top_k_accuracy(scores[own], [place] * len(own), 1)
    assert tied > 100


def test_confusion_and_classes_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.7, 0.2], [0.5, 0.5, 0.0]])
    assert confusion_matrix(scores, [0, 1, 0, 0]).tolist() == [[1, 2, 0], [0, 1, 0], [0, 0, 0]]
    assert per_class_accuracy(scores, [0, 1, 0, 0]) == {0: 1 / 3, 1: 1.0}  # class 2 does not occur


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("metric", [top_k_accuracies, per_class_accuracy, confusion_matrix, predicted_classes])
def test_scores_that_are_not_finite_are_named(metric, value: float) -> None:
    scores = torch.eye(3)
    scores[1, 2] = value
    with pytest.raises(DataError, match=r"1 of 3 samples have scores that are not finite: 'b'\. No accuracy"):
        metric(scores, [0, 1, 2], ids=["a", "b", "c"])


def test_labels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="sample 'b' has label -1; with 2 classes allowed are 0 to 1"):
        confusion_matrix(torch.eye(2), [0, -1], ids=["a", "b"])
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) and 3 labels"):
        per_class_accuracy(torch.eye(2), [0, 1, 1])
    with pytest.raises(ConfigError, match="nothing to judge"):
        top_k_accuracies(torch.zeros(0, 3), [])


# --- mean average precision ---

# By scikit-learn 1.9.1: the mean of average_precision_score(targets[:, c], scores[:, c]) over the classes c that have a
# positive, of `average_precision_case(seed)`. Seeds 1, 3, 6 and 11 have many ties, 11 nothing else. All 7 328 classes
# of seeds 0 to 1 999 agreed within 4.5e-16.
SCIKIT_LEARN = {
    0: 0.8407210641157856,
    1: 0.26349206349206344,
    2: 0.07575757575757576,
    3: 0.125,
    4: 0.1889373775928398,
    5: 0.9197530864197531,
    6: 0.21369949494949494,
    7: 0.5175965952999136,
    8: 0.9425287356321839,
    9: 0.5277530612961421,
    10: 0.14499132476986268,
    11: 0.3333333333333333,
}


def average_precision_case(seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    samples, classes, levels = int(rng.integers(1, 40)), int(rng.integers(1, 8)), int(rng.choice([1, 2, 5, 1000000]))
    scores = (rng.integers(0, levels, (samples, classes)) / levels).astype(np.float32)
    targets = (rng.random((samples, classes)) < rng.choice([0.1, 0.5, 0.9])).astype(np.float32)
    return torch.from_numpy(scores), torch.from_numpy(targets)


@pytest.mark.parametrize("seed", SCIKIT_LEARN)
def test_average_precision_is_that_of_scikit_learn(seed: int) -> None:
    scores, targets = average_precision_case(seed)
    found = mean_average_precision(scores, targets)
    assert found.mean == pytest.approx(SCIKIT_LEARN[seed], rel=1e-12)
    assert found.left_out == tuple(c for c in range(targets.shape[1]) if not targets[:, c].any())


def naive_average_precision(scores: list[float], right: list[bool]) -> float:
    """Lower the threshold from score to score and add up."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [own for score, own in zip(scores, right, strict=True) if score >= threshold]
        total += (sum(chosen) / sum(right) - recall) * sum(chosen) / len(chosen)
        recall = sum(chosen) / sum(right)
    return total


def test_average_precision_equals_the_naive_one_whatever_the_order_of_samples() -> None:
    for seed in range(100):
        scores, targets = average_precision_case(seed)
        if not targets.any():
            continue
        found = mean_average_precision(scores, targets)
        for place, value in found.per_class.items():
            expected = naive_average_precision(scores[:, place].tolist(), targets[:, place].bool().tolist())
            assert value == pytest.approx(expected, rel=1e-12)
        order = torch.randperm(len(scores))
        assert mean_average_precision(scores[order], targets[order]) == found


def test_average_precision_by_hand_and_a_class_without_a_positive_is_left_out() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.5, 0.2], [0.7, 0.5, 0.3]])
    targets = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 0, 0]])
    found = mean_average_precision(scores, targets)
    assert found.per_class == {0: pytest.approx((1 / 2 + 2 / 3) / 2), 1: pytest.approx(1 / 3)}
    assert found.left_out == (2,) and found.mean == pytest.approx((7 / 12 + 1 / 3) / 2)


def test_average_precision_refuses_what_it_cannot_judge() -> None:
    scores, targets = torch.rand(3, 2), torch.ones(3, 2)
    with pytest.raises(DataError, match="none of 3 samples has any of the 2 classes"):
        mean_average_precision(scores, torch.zeros(3, 2))
    with pytest.raises(ConfigError, match=r"\(3, 2\) and \(3, 1\)"):
        mean_average_precision(scores, targets[:, :1])
    with pytest.raises(ConfigError, match="targets must be 0 or 1; those of 'c' are not"):
        mean_average_precision(scores, torch.tensor([[1, 0], [0, 1], [0.5, 0.5]]), ids=list("abc"))
    scores[0, 1] = NAN
    with pytest.raises(DataError, match=r"1 of 3 samples have scores that are not finite: 'a'\. No mean average"):
        mean_average_precision(scores, targets, ids=list("abc"))


# --- views ---


def test_views_by_hand_the_rule_decides() -> None:  # B080
    scores = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]])
    views = [("a", 0), ("a", 1), ("a", 2)]
    mean = aggregate_views(scores, views, num_views=3)
    assert mean.ids == ["a"] and mean.scores[0].tolist() == pytest.approx([0.4, 0.6]) and mean.missing == {}
    assert aggregate_views(scores, views, num_views=3, how="max").scores[0].tolist() == pytest.approx([0.6, 1.0])


def test_the_highest_of_scores_below_zero_is_one_of_them() -> None:
    found = aggregate_views(torch.tensor([[-5.0], [-3.0]]), [("a", 0), ("a", 1)], num_views=2, how="max")
    assert found.scores.tolist() == [[-3.0]]


def test_a_missing_view_is_divided_out_and_listed() -> None:
    scores = torch.tensor([[0.2], [0.4], [0.9]])
    found = aggregate_views(scores, [("b", 0), ("a", 1), ("b", 2)], num_views=3)
    assert found.ids == ["b", "a"] and found.scores[:, 0].tolist() == pytest.approx([0.55, 0.4])
    assert found.missing == {"b": [1], "a": [0, 2]}


@pytest.mark.parametrize("how", ["mean", "max"])
def test_the_order_of_views_changes_no_bit(how: str) -> None:
    scores = torch.rand(30, 7, dtype=torch.float64)  # sums of float32 are exact in float64, as good as always
    views = [(f"v{i // 6}", i % 6) for i in range(30)]
    whole = aggregate_views(scores, views, num_views=6, how=how)
    for _ in range(5):
        order = torch.randperm(30).tolist()
        other = aggregate_views(scores[order], [views[i] for i in order], num_views=6, how=how)
        back = [other.ids.index(name) for name in whole.ids]
        assert torch.equal(other.scores[back], whole.scores)


def test_views_that_cannot_be_are_refused() -> None:  # a view added twice is what padded samplers do
    scores = torch.rand(2, 3)
    with pytest.raises(DataError, match="view 0 of 'a' is there twice"):
        aggregate_views(scores, [("a", 0), ("a", 0)], num_views=2)
    with pytest.raises(DataError, match="'a' has a view 2; with 2 views allowed are 0 to 1"):
        aggregate_views(scores, [("a", 0), ("a", 2)], num_views=2)
    with pytest.raises(ConfigError, match="'mean' or 'max'"):
        aggregate_views(scores, [("a", 0), ("a", 1)], num_views=2, how="sum")
    with pytest.raises(ConfigError, match=r"\(2, 3\) and 1 views"):
        aggregate_views(scores, [("a", 0)], num_views=2)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_view_that_is_not_finite_makes_its_video_so(how: str) -> None:
    scores = torch.rand(4, 3)
    scores[2, 1] = NAN
    found = aggregate_views(scores, [("a", 0), ("a", 1), ("b", 0), ("b", 1)], num_views=2, how=how)
    assert found.scores.isnan().tolist() == [[False] * 3, [False, True, False]]
    with pytest.raises(DataError, match="not finite: 'b'"):
        top_k_accuracies(found.scores, [0, 0], ids=found.ids)
