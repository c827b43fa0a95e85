"""What `twinreel check --steps` compares: two processes with one, and a trial of a few steps with what learning is."""

import math
import re
from functools import lru_cache

import pytest
import torch
from small_runs import own, recipe

from twinreel import agreement
from twinreel.agreement import find_disagreement, observe
from twinreel.errors import ConfigError
from twinreel.trial import LEAST_STEPS, judge, try_steps

OF_A_CLIP = ("samples", "embeddings", "terms", "embedding_gradients")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


# ---- two processes and one


@pytest.fixture
def alone(videos, monkeypatch):
    """What one process observes of four clips; `find_disagreement` is given it."""
    seen = {name: value.clone() for name, value in observed(videos).items()}
    monkeypatch.setattr(agreement, "observe", lambda small: seen)
    return seen


@lru_cache
def observed(videos):
    return observe(agreement._small(recipe(videos)))


def halves(alone):
    """What two processes see that agree with one."""
    clips = len(alone["mine"])
    return [
        {name: value[mine].clone() if name in OF_A_CLIP else value.clone() for name, value in alone.items()}
        | {"mine": mine, "share": alone["share"] / 2}
        for mine in torch.arange(clips).split(clips // 2)
    ]


def test_halves_of_one_process_agree_with_it_and_two_clips_are_enough(videos):
    for size, clips in ((2, 2), (3, 2), (4, 4)):
        wanted = recipe(videos, f"train.global_batch_size={size}")
        assert find_disagreement(wanted, launch=lambda small: halves(observe(small))) == (clips, None)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("stage", [name for name in agreement.STAGES if name != "samples"])
def test_a_number_that_differs_in_either_process_is_found(videos, alone, stage, process, value):
    both = halves(alone)
    spoiled = both[process][stage].view(-1)
    spoiled[-1] = spoiled[-1] + 1 if value is None else value
    clips, found = find_disagreement(recipe(videos), launch=lambda small: both)
    assert clips == 4 and found.startswith(agreement.STAGES[stage])


def test_a_stage_that_only_one_process_came_to_is_no_difference(videos, alone):
    both = halves(alone)
    for seen in both:
        del seen["accumulated"]
    assert find_disagreement(recipe(videos), launch=lambda small: both) == (4, None)


def test_what_is_no_number_agrees_with_nothing(videos, alone):
    alone["gradients"][0] = math.nan
    _, found = find_disagreement(recipe(videos), launch=lambda small: halves(alone))
    assert found.startswith(agreement.STAGES["gradients"])


# ---- a trial


def curve(*values, repeat=5):
    return [value for value in values for _ in range(repeat)]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        pytest.param([3 * 0.95**step for step in range(50)], None, id="falls smoothly"),
        pytest.param([3 * 0.95**step + 0.2 * (-1) ** step for step in range(50)], None, id="falls and trembles"),
        pytest.param(curve(3.0, 3.1, 2.5, 2.0, 1.0, 0.5), None, id="rises a little first"),
        pytest.param(curve(3.0, 2.69), None, id="falls by a tenth"),
        pytest.param(curve(3.0, 2.71), r"does not fall \(3\.000 -> 2\.710\)", id="falls by less"),
        pytest.param([3.0] * 50, r"does not fall \(3\.000 -> 3\.000\)", id="stands still"),
        pytest.param([1 + 0.1 * step for step in range(50)], r"does not fall \(1\.200 -> 5\.700\)", id="rises"),
        pytest.param(curve(3.0, 1.0, 2.0, 1.0), r"falls \(3\.000 -> 1\.000\) but jumps up by 1\.000", id="jumps"),
        pytest.param(curve(3.0, 4.0, 1.0), r"falls \(3\.000 -> 1\.000\) but jumps up by 1\.000", id="jumps at first"),
        pytest.param([3.0] * 10 + [math.nan], "the loss is nan at step 11: lower optim.learning_rate", id="nan"),
        pytest.param([math.nan], "the loss is nan at step 1:", id="nan at once"),
        pytest.param([3.0, 2.0, math.inf], "the loss is inf at step 3:", id="infinite"),
    ],
)
def test_what_is_said_of_a_curve(losses, words):
    problem = judge(losses)
    assert problem is None if words is None else re.search(words, str(problem)), problem


def test_too_few_steps_are_refused_before_anything_is_built(videos):
    for steps in (1, LEAST_STEPS - 1):
        with pytest.raises(ConfigError) as told:
            try_steps(recipe(videos / "nothing is here"), steps)
        assert str(told.value) == (
            f"--steps {steps}: {LEAST_STEPS} or more are needed to see whether the loss falls; 50 is usual"
        )
    assert not (videos / "nothing is here").exists()
    trial = try_steps(own(videos, "train.micro_batch_size=2"), LEAST_STEPS)
    assert len(trial.losses) == LEAST_STEPS and trial.num_clips == 8 and "over 20 steps" in trial.fact()
