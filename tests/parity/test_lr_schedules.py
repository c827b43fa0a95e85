"""Our schedules against learning rates that the founding code returned.

Tolerance: relative 1e-12, some thousand rounding errors of a double. The last points of a cosine are small differences
of large numbers, so there an absolute 1e-16 of the base learning rate is allowed as well.
"""

import json
from pathlib import Path

import pytest

from twinreel.optim import Schedule, build_schedule

GOLDEN = json.loads((Path(__file__).parent / "golden" / "lr_schedules.json").read_text())
YAMLS = {case["yaml"]: case for case in GOLDEN["slowfast"]}
STEPS_PER_EPOCH = 240_000 // 64  # Kinetics-400 in batches of 64


def options(solver):
    """The keys of a founding SOLVER section as ours; surplus LRS, which it never uses, are left out."""
    steps = solver["lr_policy"] == "steps_with_relative_lrs"
    return {
        "learning_rate": solver["base_lr"],
        "warmup_epochs": solver["warmup_epochs"],
        "warmup_start_learning_rate": solver["warmup_start_lr"],
        "warmup_target": "schedule",
        "decay": "steps" if steps else "cosine",
        "cosine_after_warmup": solver["cosine_after_warmup"],
        "final_learning_rate": solver["cosine_end_lr"],
        "decay_epochs": solver["steps"] if steps else (),
        "decay_factors": solver["lrs"][: len(solver["steps"])] if steps else (),
    }


def test_all_seven_files_are_there():
    assert len(YAMLS) == 7 and sum(len(case["lr"]) for case in YAMLS.values()) == 72 and len(GOLDEN["milnce"]) == 3


@pytest.mark.parametrize("name", YAMLS)
def test_every_learning_rate_of_slowfast_in_units_of_epochs(name):
    solver = YAMLS[name]["solver"]
    schedule = build_schedule(total_steps=solver["max_epoch"], steps_per_epoch=1, **options(solver))
    for epoch, wanted in YAMLS[name]["lr"]:
        ours = solver["base_lr"] * schedule.factor(epoch)
        assert ours == pytest.approx(wanted, rel=1e-12, abs=1e-16 * solver["base_lr"]), epoch


@pytest.mark.parametrize("name", YAMLS)
def test_every_learning_rate_of_slowfast_in_steps_of_a_run(name):
    solver = YAMLS[name]["solver"]
    total = solver["max_epoch"] * STEPS_PER_EPOCH
    schedule = build_schedule(total_steps=total, steps_per_epoch=STEPS_PER_EPOCH, **options(solver))
    for epoch, wanted in YAMLS[name]["lr"]:
        step = epoch * STEPS_PER_EPOCH
        ours = solver["base_lr"] * schedule.factor(step)
        assert ours == pytest.approx(wanted, rel=1e-12, abs=1e-16 * solver["base_lr"]), epoch
        if step == int(step):
            assert schedule.factor(int(step)) == schedule.factor(step)


@pytest.mark.parametrize("case", GOLDEN["milnce"], ids=lambda case: f"{case['warmup_steps']}-{case['total_steps']}")
def test_every_factor_of_milnce_past_the_end_too(case):
    schedule = Schedule(
        total_steps=case["total_steps"], warmup_steps=case["warmup_steps"], warmup_start_factor=0.0, decay="cosine"
    )
    for step, wanted in case["factor"]:
        assert schedule.factor(step) == pytest.approx(wanted, rel=1e-12, abs=1e-16), step


def test_the_first_step_of_a_founding_run_with_a_warm_up_of_a_fraction_of_an_epoch():
    # SSv2: 0.19 epochs are 2005.64 steps of 10556; rounding them would move every step of the warm-up
    solver = YAMLS["configs/SSv2/SLOWFAST_16x8_R50.yaml"]["solver"]
    schedule = build_schedule(total_steps=22 * 10556, steps_per_epoch=10556, **options(solver))
    assert schedule.warmup_steps == pytest.approx(2005.64)
    last = 2005 / 10556  # epochs
    wanted = 1e-4 + (0.03 - 1e-4) * last / 0.19
    assert 0.03 * schedule.factor(2005) == pytest.approx(wanted, rel=1e-12)
    assert 0.03 * schedule.factor(2006) == 0.03
