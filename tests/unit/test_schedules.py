"""Schedules: shapes, landmarks, and what is refused."""

import itertools
import math

import pytest

from twinreel.errors import ConfigError
from twinreel.optim import Schedule, build_schedule


def recipe_schedule(total_steps=100, steps_per_epoch=10, learning_rate=0.1, **options):
    return build_schedule(
        total_steps=total_steps, steps_per_epoch=steps_per_epoch, learning_rate=learning_rate, **options
    )


def test_the_plain_schedule_by_hand():
    schedule = Schedule(total_steps=100, warmup_steps=10)
    assert [schedule.factor(step) for step in (0, 5, 10, 55, 100)] == pytest.approx([0.1, 0.55, 1.0, 0.5, 0.0])


def test_factors_of_earlier_options_are_the_same_bits_as_ever():
    def before(step, total, warmup, start, decay):
        if step < warmup:
            return start + (1 - start) * step / warmup
        if decay == "none":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    for total, warmup, start, decay in itertools.product(
        [1, 7, 100, 997], [0, 3, 10], [0.0, 0.1, 1.0], ["cosine", "none"]
    ):
        if warmup >= total:
            continue
        schedule = recipe_schedule(
            total_steps=total, warmup_steps=warmup or None, warmup_start_factor=start, decay=decay
        )
        for step in range(total):
            want = before(step, total, warmup, start, decay)
            assert schedule.factor(step) == want


def test_a_warm_up_in_epochs_is_one_in_steps():
    epochs, steps = recipe_schedule(warmup_epochs=2), recipe_schedule(warmup_steps=20)
    assert epochs == steps
    assert recipe_schedule(warmup_epochs=0.25).warmup_steps == 2.5


def test_absolute_rates_at_the_first_step_and_at_the_end():
    schedule = recipe_schedule(warmup_steps=10, warmup_start_learning_rate=0.02, final_learning_rate=0.001)
    assert 0.1 * schedule.factor(0) == pytest.approx(0.02)
    assert 0.1 * schedule.factor(10) == 0.1
    assert 0.1 * schedule.factor(55) == pytest.approx((0.1 + 0.001) / 2)
    assert 0.1 * schedule.factor(100) == pytest.approx(0.001)


def test_the_cosine_begins_where_it_is_told_and_the_warm_up_ends_there():
    early = recipe_schedule(warmup_steps=50, cosine_after_warmup=False, warmup_target="schedule")
    assert early.factor(50) == pytest.approx(0.5)
    assert early.factor(25) == pytest.approx((0.1 + 0.5) / 2)
    jump = recipe_schedule(warmup_steps=50, cosine_after_warmup=False)
    assert jump.factor(49) == pytest.approx(0.1 + 0.9 * 0.98) and jump.factor(50) == pytest.approx(0.5)
    late = recipe_schedule(warmup_steps=50, warmup_target="schedule")
    assert late == recipe_schedule(warmup_steps=50, warmup_target="schedule", cosine_after_warmup=True)
    assert late.factor(50) == 1.0 and late.factor(75) == pytest.approx(0.5)


def test_decay_steps_begin_at_their_epoch_and_the_warm_up_meets_them():
    options = {"decay": "steps", "decay_epochs": [0, 3, 7.55], "decay_factors": [1, 0.1, 0.01]}
    schedule = recipe_schedule(**options)
    found = {step: schedule.factor(step) for step in (0, 29, 30, 75, 76, 99)}
    assert found == {0: 1, 29: 1, 30: 0.1, 75: 0.1, 76: 0.01, 99: 0.01}
    long = recipe_schedule(warmup_epochs=4, warmup_start_factor=0.0, warmup_target="schedule", **options)
    assert long.factor(39) == pytest.approx(0.1 * 39 / 40) and long.factor(40) == 0.1
    high = recipe_schedule(warmup_epochs=4, warmup_start_factor=0.0, **options)
    assert high.factor(39) == pytest.approx(39 / 40) and high.factor(40) == 0.1
    at_the_end = recipe_schedule(decay="steps", decay_epochs=[0, 10], decay_factors=[1, 0.1])
    assert at_the_end.factor(99) == 1


def test_a_line_falls_from_the_warm_up_to_the_final_rate():
    schedule = recipe_schedule(warmup_steps=20, decay="linear", final_learning_rate=0.01)
    found = [schedule.factor(step) for step in (0, 10, 20, 60, 99, 100, 120)]
    assert found == pytest.approx([0.1, 0.55, 1.0, 0.55, 1 - 0.9 * 79 / 80, 0.1, 0.1])
    flat = recipe_schedule(decay="linear")
    assert [flat.factor(step) for step in (0, 25, 100)] == [1.0, 0.75, 0.0]
    # A key of the cosine says nothing of a line.
    assert recipe_schedule(warmup_steps=20, decay="linear", cosine_after_warmup=False).factor(60) == pytest.approx(0.5)


@pytest.mark.parametrize("decay", ["linear", "cosine", "none"])
@pytest.mark.parametrize("total", [1, 7, 10, 11, 100, 997])
def test_a_share_of_all_steps_warms_up_from_its_first_part_to_the_whole_rate(total, decay):
    schedule = recipe_schedule(total_steps=total, warmup_fraction=0.1, decay=decay)
    warmup, factors = total // 10, [schedule.factor(step) for step in range(total)]
    assert factors[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    if decay != "none":
        assert factors[-1] == pytest.approx(0, abs=1e-15) and factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert schedule.highest == pytest.approx(max(factors)) and set(schedule.landmarks()) <= set(range(total))


def test_no_share_still_counts_steps_from_one():
    schedule = recipe_schedule(warmup_fraction=0.0, decay="linear", final_learning_rate=0.01)
    assert [schedule.factor(step) for step in (0, 49, 99)] == pytest.approx([0.99 + 0.001, 0.55, 0.1])


def test_landmarks_tell_the_curve_and_the_highest_is_the_highest():
    assert Schedule(total_steps=101, warmup_steps=20.5).landmarks() == [0, 21, 41, 61, 80, 100]
    steps = recipe_schedule(decay="steps", decay_epochs=[0, 3, 10], decay_factors=[1, 0.1, 0.01])
    assert steps.landmarks() == [0, 29, 30, 99]
    assert Schedule(total_steps=1).landmarks() == [0]
    for schedule in (
        steps,
        recipe_schedule(warmup_steps=50, cosine_after_warmup=False, warmup_target="schedule"),
        recipe_schedule(warmup_epochs=2.5, decay="none"),
        recipe_schedule(warmup_steps=30),
        recipe_schedule(warmup_steps=30, decay="linear"),
        recipe_schedule(warmup_fraction=0.25, decay="linear"),
    ):
        assert schedule.highest == max(schedule.factor(step) for step in range(100))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 100}, "a warm-up of 100 steps is not shorter than the run of 100 steps; shorten it"),
        ({"warmup_epochs": 12.55}, "a warm-up of 125.5 steps is not shorter than the run of 100 steps"),
        ({"warmup_fraction": 1.0}, "a warm-up of 100 steps is not shorter than the run of 100 steps; shorten it"),
        ({"warmup_steps": 5, "warmup_start_learning_rate": 0.2},
         r"warmup_start_learning_rate=0.2 is above optim.learning_rate=0.1: a warm-up rises"),
        ({"decay": "steps"}, r"optim.decay=steps: \[\] with factors \[\]"),
        ({"decay": "steps", "decay_epochs": [0, 5], "decay_factors": [1]}, r"\[0, 50\] with factors \[1\].* as many"),
        ({"decay": "steps", "decay_epochs": [1, 5], "decay_factors": [1, 0.1]}, "times must rise from 0"),
        ({"decay": "steps", "decay_epochs": [0, 5, 5], "decay_factors": [1, 0.1, 0.01]}, "times must rise from 0"),
        ({"decay": "steps", "decay_epochs": [0, 5, 11], "decay_factors": [1, 0.1, 0.01]},
         r"\[110\] of \[0, 50, 110\] \(in steps\) would come after the end of the run of 100 steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_numbers(options, words):
    with pytest.raises(ConfigError, match=words):
        recipe_schedule(**options)


def test_a_start_rate_without_a_warm_up_says_nothing():
    assert recipe_schedule(warmup_start_learning_rate=0.2).factor(0) == 1.0
