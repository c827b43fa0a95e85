"""Learning rates, parameter groups, frozen parts, averaged weights."""

import pytest
import torch
from torch import nn

from twinreel.errors import ConfigError
from twinreel.optim import WeightAverage, build_optimizer, freeze, learning_rate_factor, parameter_groups


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.video_tower = nn.Sequential(nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4))
        self.text_tower = nn.Linear(3, 4)


def test_the_founding_schedule_at_named_steps():
    # facts: factor s / W in the warm-up, then half a cosine; values of the founding code at these steps
    for warmup, total, table in [
        (
            10,
            100,
            {0: 0.0, 1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 11: 0.9996954135095479, 55: 0.5, 99: 0.00030458649045211894},
        ),
        (5000, 20000, {0: 0.0, 1: 0.0002, 4999: 0.9998, 5000: 1.0, 5001: 0.999999989033773, 19999: 1.0966227e-08}),
        (0, 50, {0: 1.0, 1: 0.9990133642141358, 25: 0.5, 49: 0.0009866357858642205}),
    ]:
        for step, factor in table.items():
            ours = learning_rate_factor(step, total, warmup_steps=warmup, warmup_start_factor=0.0)
            assert ours == pytest.approx(factor, rel=1e-6, abs=1e-12)


def test_warm_up_starts_at_its_factor_and_the_end_is_zero():
    assert learning_rate_factor(0, 100, warmup_steps=10) == pytest.approx(0.1)
    assert learning_rate_factor(10, 100, warmup_steps=10) == 1.0
    assert learning_rate_factor(100, 100, warmup_steps=10) == pytest.approx(0.0)
    assert learning_rate_factor(70, 100, warmup_steps=10, decay="none") == 1.0


def test_groups_decay_weights_only_and_follow_the_longest_name():
    model = Pair()
    groups = parameter_groups(
        model, learning_rate=1.0, learning_rates={"video_tower": 0.5, "video_tower.1": 0.25}, weight_decay=0.1
    )
    found = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            found[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    assert found == {
        "video_tower.0.weight": (0.5, 0.1),
        "video_tower.0.bias": (0.5, 0.0),
        "video_tower.1.weight": (0.25, 0.0),
        "video_tower.1.bias": (0.25, 0.0),
        "text_tower.weight": (1.0, 0.1),
        "text_tower.bias": (1.0, 0.0),
    }


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_extra_parameters_learn_at_the_base_rate_and_never_decay(shape):
    temperature = nn.Parameter(torch.ones(shape))
    groups = parameter_groups(
        Pair(), learning_rate=1.0, learning_rates={"text_tower": 0.5}, weight_decay=0.1, extra=[temperature]
    )
    [group] = [group for group in groups if any(p is temperature for p in group["params"])]
    assert (group["lr"], group["base_learning_rate"], group["weight_decay"]) == (1.0, 1.0, 0.0)
    assert sum(len(group["params"]) for group in groups) == 7
    optimizer = build_optimizer("adamw", groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(temperature, torch.ones(shape))


def test_a_temperature_is_not_enough_to_train():
    model = Pair()
    freeze(model, ["video_tower", "text_tower"])
    with pytest.raises(ConfigError, match="nothing to train"):
        parameter_groups(
            model, learning_rate=1.0, learning_rates={}, weight_decay=0.0, extra=[nn.Parameter(torch.ones(()))]
        )


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="no part 'text_towr'; did you mean text_tower"):
        parameter_groups(Pair(), learning_rate=1.0, learning_rates={"text_towr": 1.0}, weight_decay=0.0)
    with pytest.raises(ConfigError, match=r"model\.freeze: the model has no part 'video'"):
        freeze(Pair(), ["video"])


def test_frozen_parts_stay_and_freezing_everything_is_refused():
    model = Pair()
    modules = freeze(model, ["video_tower"])
    assert modules == [model.video_tower]
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2
    freeze(model, ["text_tower"])
    with pytest.raises(ConfigError, match="nothing to train"):
        parameter_groups(model, learning_rate=1.0, learning_rates={}, weight_decay=0.0)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_every_optimizer_steps(name):
    model = Pair()
    groups = parameter_groups(model, learning_rate=0.1, learning_rates={}, weight_decay=1e-4)
    optimizer = build_optimizer(name, groups, momentum=0.8)
    before = model.text_tower.weight.clone()
    model.text_tower(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.text_tower.weight)
    if name == "sgd":
        assert all(group["momentum"] == 0.8 for group in optimizer.param_groups)


def moved(model, *values):
    """Set every weight to each value in turn, and yield the step."""
    for step, value in enumerate(values, start=1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)
        yield step


@pytest.mark.parametrize(
    ("decay", "first", "second"),
    [
        (0.9999, 9 / 11 * 10.0, 3 / 12 * (9 / 11 * 10.0) + 9 / 12 * 20.0),  # early: (1 + step) / (10 + step) stays
        (0.1, 0.9 * 10.0, 0.1 * 9.0 + 0.9 * 20.0),
    ],
)
def test_the_average_of_two_steps_by_hand(decay, first, second):
    model = Pair()
    steps = moved(model, 0.0, 10.0, 20.0)
    next(steps)
    average = WeightAverage(model, decay)
    for step, wanted in ((1, first), (2, second)):
        next(steps)
        average.update(model, step)
        assert average.weights.keys() == dict(model.named_parameters()).keys()
        for weight in average.weights.values():
            assert not weight.requires_grad
            torch.testing.assert_close(weight, torch.full_like(weight, wanted), rtol=1e-6, atol=0)
    assert all(torch.all(weight == 20.0) for weight in model.parameters())  # its own weights are not touched


def test_the_average_is_late_by_its_decay_and_arrives():
    model = Pair()
    average = WeightAverage(model, 0.9)
    for step in moved(model, *[3.0] * 300):
        average.update(model, step)
    assert all(torch.allclose(weight, torch.tensor(3.0)) for weight in average.weights.values())


def test_frozen_weights_are_their_own_average():
    torch.manual_seed(0)
    model = Pair()
    freeze(model, ["video_tower"])
    average = WeightAverage(model, 0.999)
    for step in range(1, 20):
        average.update(model, step)
    for name, weight in model.named_parameters():
        assert torch.equal(average.weights[name], weight)


def test_averages_are_swapped_in_and_the_weights_come_back_bit_for_bit():
    torch.manual_seed(0)
    model = Pair()
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    model.video_tower[1].running_mean.fill_(7.0)
    average.update(model, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = {name: id(weight) for name, weight in model.named_parameters()}
    with pytest.raises(RuntimeError, match="judging failed"), average.swapped_in(model):
        for name, weight in model.named_parameters():
            assert torch.equal(weight, average.weights[name]) and not torch.equal(weight, before[name])
        assert torch.all(model.video_tower[1].running_mean == 7.0)  # statistics are the model's own
        raise RuntimeError("judging failed")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert held == {name: id(weight) for name, weight in model.named_parameters()}  # what the optimizer holds


def test_a_loaded_average_goes_on_where_the_saved_one_was():
    model, other = Pair(), Pair()
    average = WeightAverage(model, 0.9)
    steps = moved(model, 1.0, 5.0)
    average.update(model, next(steps))
    loaded = WeightAverage(other, 0.9)
    loaded.load({**model.state_dict(), **average.weights})  # as a checkpoint has them: with buffers
    step = next(steps)
    average.update(model, step)
    loaded.update(model, step)
    for name, weight in average.weights.items():
        assert torch.equal(weight, loaded.weights[name])
        assert loaded.weights[name] is not weight
