"""Labels -> places in a model's output: which classes there are, and which labels are refused, with which words."""

import pytest
import torch

from twinreel.data.classes import ClassTable
from twinreel.data.clip import Clip
from twinreel.errors import ConfigError, DataError


def rows(*labels):
    return [
        Clip(id=f"v{i}", video=f"v{i}.mp4", labels=own if isinstance(own, tuple) else (own,))
        for i, own in enumerate(labels)
    ]


def test_names_are_sorted_and_numbers_are_places():
    table = ClassTable.from_rows(rows("walk", "run", "walk", "jump"))
    assert table.names == ("jump", "run", "walk") and len(table) == 3
    assert table.targets([("run",), ("walk",)]).tolist() == [[0, 1, 0], [0, 0, 1]]
    numbers = ClassTable.from_rows(rows(0, 3, 1))
    assert numbers.names == ("0", "1", "2", "3") and numbers.places((3,)) == [3]
    assert len(ClassTable.from_rows(rows(0, 3), num_classes=400)) == 400


def test_several_labels_are_a_multi_hot_row_each_once():
    table = ClassTable.from_rows(rows(("a", "b"), ("b",), ()), multi_label=True)
    targets = table.targets([("b", "a", "b"), (), ("b",)])
    assert targets.dtype == torch.float32 and targets.tolist() == [[1, 1], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("labels", "options", "words"),
    [
        ([(), ()], {}, "no row has a label: .* a column label"),
        (["a", 1], {}, r"names \('a'\) and numbers \(1\) in one collection"),
        (["a", "b"], {"num_classes": 3}, "num_classes=3, but the training rows name 2 classes"),
        ([1, 2, 5, 3], {"num_classes": 5}, r"1 of 4 have a label outside 0 to 4 \(first: 5 of v2; labels go from 1 to "
                                           r"5, classes are 5\) \(do they count from 1\?\)"),  # B035
        ([1, -1], {}, r"1 of 2 have a label outside 0 to 1 \(first: -1 of v1"),
        (["a", "a"], {}, "there is one class, 'a', nothing to tell it from"),
        (["a", ("a", "b"), ()], {}, r"of 3 rows 1 have none \(first: v2\) and 1 several \(first: v1\).*multi_label"),
    ],
)  # fmt: skip
def test_labels_that_are_refused(labels, options, words):
    with pytest.raises((DataError, ConfigError), match=words):
        table = ClassTable.from_rows(rows(*labels), **options)
        table.check(rows(*labels), "training")


def test_an_evaluation_label_that_no_training_row_has_is_named_with_the_nearest():
    table = ClassTable.from_rows(rows("hand_shaking", "kicking"))
    with pytest.raises(DataError, match=r"1 of 2 .*none of the 2 classes \(first: 'hand_shakin' of v1; did you"):
        table.check(rows("kicking", "hand_shakin"), "evaluation")


def test_names_must_differ():
    with pytest.raises(ConfigError, match="'a' is named twice"):
        ClassTable(("a", "b", "a"))
    with pytest.raises(ConfigError, match="there are none"):
        ClassTable(())
