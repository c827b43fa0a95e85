"""Learning rates, parameter groups, frozen parts."""

import pytest
import torch
from torch import nn

from twinreel.errors import ConfigError
from twinreel.optim import build_optimizer, freeze, learning_rate_factor, parameter_groups


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
