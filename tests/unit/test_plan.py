"""The order of a run is a pure function of (seed, epoch, position)."""

import numpy as np
import pytest

from twinreel.data.plan import Plan, Shares, keyed_rng, keyed_seed
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
    shares = Shares.cut(6, micro_batch_size=2)
    cut = list(plan.micro_batches(0, 9, shares))
    assert [key for micro in cut for key in micro] == whole and {len(micro) for micro in cut} == {2}
    assert list(plan.micro_batches(4, 9, shares)) == cut[4 * 3 :]


@pytest.mark.parametrize(("processes", "micro"), [(1, None), (1, 3), (2, None), (2, 3), (5, None), (12, 1)])
def test_the_processes_together_read_the_global_batch_in_its_order_whatever_their_number(processes, micro):
    plan, shares = Plan(num_rows=30, seed=4, global_batch_size=12), Shares.cut(12, processes, micro)
    readers = [list(plan.micro_batches(3, 6, shares, process)) for process in range(processes)]
    assert {len(reader) for reader in readers} == {3 * shares.num_micro_batches}
    pieces = [piece for at_once in zip(*readers, strict=True) for piece in at_once]
    assert [key for piece in pieces for key in piece] == [key for step in range(3, 6) for key in plan.batch(step)]


def pieces(shares):
    """In the order of the global batch."""
    return [list(piece) for everyone in shares.positions for piece in everyone]


def test_a_batch_without_micro_batches_is_cut_as_evenly_as_can_be():
    for size in range(1, 40):
        for processes in range(1, size + 1):
            shares = Shares.cut(size, processes)
            assert (shares.num_processes, shares.num_micro_batches) == (processes, 1)
            lengths = [len(piece) for piece in pieces(shares)]
            assert max(lengths) - min(lengths) <= 1 and shares.largest == max(lengths)
            assert [at for piece in pieces(shares) for at in piece] == list(range(size))
            assert [shares.of_process(process) for process in range(processes)] == [[p] for p in shares.positions[0]]


def test_chunks_and_their_order_depend_on_the_chunk_size_alone():
    whole, two, four = Shares.cut(16), Shares.cut(16, 2, 4), Shares.cut(16, 4, 4)
    chunks = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert pieces(whole) == [[*range(16)]] == [[at for chunk in chunks for at in chunk]]
    assert pieces(Shares.cut(16, 1, 4)) == pieces(two) == pieces(four) == pieces(Shares.cut(16, 4)) == chunks
    assert [(shares.num_processes, shares.num_micro_batches) for shares in (whole, two, four)] == [
        (1, 1), (2, 2), (4, 1)
    ]  # fmt: skip
    assert two.of_process(1) == [range(4, 8), range(12, 16)] and two.largest == four.largest == 4


def test_a_process_without_a_clip_is_refused_with_the_numbers():  # B052
    with pytest.raises(ConfigError) as told:
        Shares.cut(4, 8)
    assert str(told.value) == (
        "train.global_batch_size=4 on 8 processes leaves 4 of them without a clip; raise it to 8 or more, or start "
        "fewer processes"
    )
    with pytest.raises(ConfigError, match="leaves 4 of them without a clip"):
        Shares.cut(4, 8, 1)


@pytest.mark.parametrize(
    ("processes", "micro", "fitting"),
    [
        (1, 5, "micro-batches that fit: 1, 2, 3, 4, 6, 12; "),  # 12 clips are not a whole number of 5
        (1, 24, "micro-batches that fit: 1, 2, 3, 4, 6, 12; "),  # more than there are
        (2, 4, "micro-batches that fit: 1, 2, 3, 6; "),  # 3 chunks for 2 processes
        (3, 12, "micro-batches that fit: 1, 2, 4; "),  # one chunk for 3
        (5, 2, ""),  # nothing fits: 12 clips on 5 processes
    ],
)
def test_a_remainder_is_refused_with_what_fits(processes, micro, fitting):
    with pytest.raises(ConfigError) as told:
        Shares.cut(12, processes, micro)
    assert str(told.value) == (
        f"train.global_batch_size=12 is not a whole number of {processes} processes x train.micro_batch_size={micro}; "
        f"{fitting}or leave train.micro_batch_size out: the batch is then cut as evenly as can be"
    )
    for size in fitting.removeprefix("micro-batches that fit: ").removesuffix("; ").split(", ") if fitting else []:
        assert Shares.cut(12, processes, int(size)).largest == int(size)


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


@pytest.mark.parametrize(("processes", "micro"), [(1, None), (1, 3), (2, None), (2, 6), (4, 3), (3, None)])
def test_the_views_of_a_row_lie_side_by_side_and_are_read_once_whatever_the_processes(processes, micro):
    plan = Plan(num_rows=11, seed=4, global_batch_size=12, views_per_row=3)
    assert (plan.rows_per_batch, plan.steps_per_epoch) == (4, 2)
    shares = Shares.cut(12, processes, micro, clips_together=3)
    assert [at for piece in pieces(shares) for at in piece] == list(range(12))
    assert all(len(piece) % 3 == 0 for piece in pieces(shares))  # no row is torn
    for step in range(5):
        batch = plan.batch(step)
        rows = batch[::3]
        assert batch == [key for key in rows for _ in range(3)] and len(set(rows)) == 4
        readers = [list(plan.micro_batches(step, step + 1, shares, process)) for process in range(processes)]
        in_turn = [key for at_once in zip(*readers, strict=True) for keys in at_once for key in keys]
        assert in_turn == rows


def test_views_do_not_change_the_order_of_the_rows():
    one, three = (Plan(num_rows=11, seed=4, global_batch_size=4 * k, views_per_row=k) for k in (1, 3))
    assert [three.batch(step)[::3] for step in range(6)] == [one.batch(step) for step in range(6)]


def test_a_row_whose_views_would_be_torn_is_refused():
    with pytest.raises(ConfigError, match=r"global_batch_size=8 is not .*3 clips that stay together .*; 9 is"):
        Plan(num_rows=30, seed=0, global_batch_size=8, views_per_row=3)
    with pytest.raises(ConfigError, match=r"global_batch_size=8 is not a whole number of 3 clips"):
        Shares.cut(8, clips_together=3)
    with pytest.raises(ConfigError, match=r"micro_batch_size=4 is not a whole number of 3 clips .* 3 is"):
        Shares.cut(12, 1, 4, clips_together=3)
    with pytest.raises(ConfigError, match=r"on 5 processes leaves 1 of them without a clip; raise it to 15"):
        Shares.cut(12, 5, clips_together=3)
    with pytest.raises(ConfigError, match=r"more than the 3 rows x 3 views of each .*global_batch_size to 9 or less"):
        Plan(num_rows=3, seed=0, global_batch_size=12, views_per_row=3)
