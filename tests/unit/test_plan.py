"""The order of a run is a pure function of (seed, epoch, position)."""

import numpy as np
import pytest

from twinreel.data.plan import Plan, keyed_rng, keyed_seed
from twinreel.errors import ConfigError


def test_every_epoch_holds_each_row_at_most_once_and_leaves_out_others_each_time():
    plan = Plan(num_rows=10, seed=3, global_batch_size=4)
    assert plan.steps_per_epoch == 2
    left_out = set()
    for epoch in range(20):
        keys = [key for step in range(2 * epoch, 2 * epoch + 2) for key in plan.batch(step)]
        assert {e for e, _ in keys} == {epoch}
        rows = [row for _, row in keys]
        assert len(set(rows)) == len(rows) == 8
        left_out |= set(range(10)) - set(rows)
    assert left_out == set(range(10))


def test_order_differs_between_epochs_and_seeds_and_is_equal_for_equal_seeds():
    plan = Plan(num_rows=50, seed=3, global_batch_size=50)
    first = [row for _, row in plan.batch(0)]
    assert first == [row for _, row in Plan(num_rows=50, seed=3, global_batch_size=50).batch(0)]
    assert first != [row for _, row in plan.batch(1)]
    assert first != [row for _, row in Plan(num_rows=50, seed=4, global_batch_size=50).batch(0)]
    assert sorted(first) == list(range(50))


def test_micro_batches_are_the_global_batches_cut_up_from_any_step():
    plan = Plan(num_rows=23, seed=0, global_batch_size=6)
    whole = [key for step in range(9) for key in plan.batch(step)]
    cut = list(plan.micro_batches(0, 9, 2))
    assert [key for micro in cut for key in micro] == whole and {len(micro) for micro in cut} == {2}
    assert list(plan.micro_batches(4, 9, 2)) == cut[4 * 3 :]


def test_the_step_sequence_is_the_same_for_any_way_of_asking():
    plan = Plan(num_rows=23, seed=0, global_batch_size=6)
    forwards = [plan.batch(step) for step in range(12)]
    assert [plan.batch(step) for step in reversed(range(12))] == forwards[::-1]


def test_a_batch_larger_than_the_collection_is_refused_with_the_numbers():  # B052
    with pytest.raises(ConfigError, match=r"global_batch_size=8 is more than the 5 rows .*global_batch_size to 5"):
        Plan(num_rows=5, seed=0, global_batch_size=8)


def test_keys_are_not_confused_with_one_another():
    seeds = [keyed_seed(1, "23"), keyed_seed(12, "3"), keyed_seed("1", 23), keyed_seed(1, 23), keyed_seed("1\x1f23")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keyed_draws_look_uniform_and_independent():
    draws = np.array([keyed_rng(1, epoch, f"id{i}", "crop").random() for epoch in range(4) for i in range(500)])
    assert abs(draws.mean() - 0.5) < 0.03 and abs(draws.std() - 12**-0.5) < 0.02
    again = np.array([keyed_rng(1, epoch, f"id{i}", "flip").random() for epoch in range(4) for i in range(500)])
    assert abs(np.corrcoef(draws, again)[0, 1]) < 0.08
    assert keyed_rng(1, 0, "a", "crop").random() == keyed_rng(1, 0, "a", "crop").random()
