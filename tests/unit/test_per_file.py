"""A file that ends or hangs its process costs nothing but itself."""

from __future__ import annotations

import multiprocessing

import pytest
from file_work import work

from twinreel.data.preparation.per_file import Died, each_file


@pytest.mark.parametrize("num_workers", [1, 2, 9])
def test_every_item_has_one_answer(num_workers: int) -> None:
    items = ["a", "abort", "b", "kill", "raise", "c", "exit", "d"]
    results = dict(each_file(work, items, num_workers=num_workers, most_seconds=50))
    assert sorted(results) == list(range(len(items)))
    died = {items[i]: result.reason for i, result in results.items() if isinstance(result, Died)}
    assert died == {
        "abort": "reading it ended the process (SIGABRT)",
        "kill": "reading it ended the process (SIGKILL, perhaps for lack of memory)",
        "raise": "unexpected RuntimeError: no such luck (please report this as a bug in twinreel)",
        "exit": "reading it ended the process (exit code 3)",
    }
    answers = [result for result in results.values() if not isinstance(result, Died)]
    assert sorted(text for text, _ in answers) == ["A", "B", "C", "D"]
    assert multiprocessing.active_children() == []


def test_what_takes_too_long_is_given_up() -> None:
    results = dict(each_file(work, ["hang", "a", "b"], num_workers=2, most_seconds=5))
    assert results[0] == Died("no answer in 5 s; reading it was given up")
    assert [results[i][0] for i in (1, 2)] == ["A", "B"]
    assert multiprocessing.active_children() == []


def test_a_process_does_many_items_and_ends_with_the_loop() -> None:
    items = [str(i) for i in range(20)]
    results = dict(each_file(work, items, num_workers=2, most_seconds=50))
    assert [results[i][0] for i in range(20)] == items and len({process for _, process in results.values()}) <= 2
    for _ in each_file(work, items, num_workers=2, most_seconds=50):
        break
    assert multiprocessing.active_children() == []
    assert list(each_file(work, [], num_workers=2, most_seconds=50)) == []
