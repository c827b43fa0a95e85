"""Learning rates, parameter groups, optimizers, clipping, frozen parts, averaged weights."""

import math

import pytest
import torch
from torch import nn

from twinreel.errors import ConfigError
from twinreel.optim import (
    Schedule,
    WeightAverage,
    build_optimizer,
    clip_gradients,
    freeze,
    layers_by_depth,
    parameter_groups,
)


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
            ours = Schedule(total_steps=total, warmup_steps=warmup, warmup_start_factor=0.0).factor(step)
            assert ours == pytest.approx(factor, rel=1e-6, abs=1e-12)


def test_warm_up_starts_at_its_factor_and_the_end_is_zero():
    schedule = Schedule(total_steps=100, warmup_steps=10)
    assert [schedule.factor(step) for step in (0, 10, 100)] == pytest.approx([0.1, 1.0, 0.0])
    assert Schedule(total_steps=100, warmup_steps=10, decay="none").factor(70) == 1.0


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


def by_name(model, **options):
    """(learning rate, weight decay) of every trained parameter."""
    options = {"learning_rate": 1.0, "learning_rates": {}, "weight_decay": 0.1} | options
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, **options)
    assert all(group["lr"] == group["base_learning_rate"] for group in groups)
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


class Transformer(nn.Module):
    """The parts that a video transformer has: a patch embedding, blocks, a class token, position tables, a head."""

    no_decay = ("cls_token", "blocks.0.rel_pos_h")

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patch_embed = nn.Conv3d(3, 4, 1)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    @staticmethod
    def block():
        block = nn.Module()
        block.qkv = nn.Linear(4, 4)
        block.rel_pos_h = nn.Parameter(torch.zeros(3, 4))
        return block


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm3d(4), nn.SyncBatchNorm(4), nn.InstanceNorm3d(4, affine=True), nn.GroupNorm(2, 4), nn.RMSNorm(4),
     nn.LayerNorm(4), nn.LayerNorm((2, 4))],
)  # fmt: skip
def test_a_norm_is_known_by_its_type(norm):
    model = nn.Sequential(nn.Conv3d(3, 4, 1), norm)
    found = by_name(model, decay_one_dimensional=True, norm_weight_decay=0.02)
    assert found.pop("0.weight") == found.pop("0.bias") == (1.0, 0.1)
    assert found and set(found.values()) == {(1.0, 0.02)}
    found = by_name(model)
    assert found.pop("0.weight") == (1.0, 0.1) and set(found.values()) == {(1.0, 0.0)}


def test_a_name_alone_spares_nothing_from_decay():
    # The founding code skips by substring: a part named after what is spared lost its decay as well.
    model = nn.Module()
    model.no_decay = ("pos",)
    model.pos = nn.Parameter(torch.zeros(3, 4))
    model.pos_projection = nn.Linear(4, 4)
    model.batch_norm_free = nn.Linear(4, 4)
    assert by_name(model) == {
        "pos": (1.0, 0.0),
        "pos_projection.weight": (1.0, 0.1),
        "pos_projection.bias": (1.0, 0.0),
        "batch_norm_free.weight": (1.0, 0.1),
        "batch_norm_free.bias": (1.0, 0.0),
    }


def test_what_a_model_names_has_no_decay_as_seen_from_where_it_is_named():
    tower = nn.Module()
    tower.inner = Transformer()
    found = by_name(tower, decay_one_dimensional=True, norm_weight_decay=0.3)
    spared = {name for name, (_, decay) in found.items() if decay == 0.0}
    assert spared == {"inner.cls_token", "inner.blocks.0.rel_pos_h"}
    assert {name for name, (_, decay) in found.items() if decay == 0.3} == {"inner.norm.weight", "inner.norm.bias"}


def test_a_name_to_spare_that_does_not_exist_is_refused():
    model = Transformer()
    model.no_decay = ("cls_tokn",)
    with pytest.raises(ConfigError, match=r"Transformer.no_decay: the model has no part 'cls_tokn'; .* cls_token"):
        by_name(model)
    model.no_decay = "cls_token"
    with pytest.raises(ConfigError, match=r"Transformer.no_decay is the string 'cls_token'; make it a tuple"):
        by_name(model)


def test_layers_are_the_children_in_their_order():
    assert layers_by_depth(Transformer()) == [
        ["cls_token", "patch_embed"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["norm"], ["head"],
    ]  # fmt: skip
    assert layers_by_depth(Pair()) == [["video_tower"], ["text_tower"]]
    assert layers_by_depth(nn.Linear(2, 3)) == [["weight", "bias"]]
    assert layers_by_depth(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == [["0"], ["2"]]


def test_layer_decay_follows_the_depth_and_leaves_the_weight_decay():
    found = by_name(Transformer(), layer_decay=0.5, learning_rate=0.8, learning_rates={"head": 8.0, "blocks.2": 4.0})
    rates = {name: rate for name, (rate, _) in found.items()}
    assert rates["cls_token"] == rates["patch_embed.weight"] == rates["patch_embed.bias"] == 0.8 / 32
    assert [rates[f"blocks.{i}.qkv.weight"] for i in range(3)] == [0.8 / 16, 0.8 / 8, 4.0 / 4]  # both apply
    assert (rates["norm.weight"], rates["head.weight"]) == (0.8 / 2, 8.0)
    plain = by_name(Transformer())
    assert {name: decay for name, (_, decay) in found.items()} == {name: decay for name, (_, decay) in plain.items()}


def test_a_model_states_its_own_layers():
    model = Transformer()
    model.layer_groups = lambda: [["cls_token", "patch_embed"], ["blocks"], ["blocks.2", "norm", "head"]]
    rates = {name: rate for name, (rate, _) in by_name(model, layer_decay=0.5).items()}
    assert rates["cls_token"] == 0.25 and rates["blocks.1.qkv.bias"] == 0.5  # the longest name decides
    assert rates["blocks.2.qkv.bias"] == rates["head.weight"] == 1.0
    model.layer_groups = lambda: [["patch_embed"], ["blocks"], ["norm", "head"]]
    with pytest.raises(ConfigError, match=r"optim.layer_decay: cls_token is in none of the layers that Transformer"):
        by_name(model, layer_decay=0.5)
    model.cls_token.requires_grad_(False)
    assert "cls_token" not in by_name(model, layer_decay=0.5)
    model.layer_groups = lambda: [["patch"]]
    with pytest.raises(ConfigError, match=r"optim.layer_decay: layer_groups\(\): the model has no part 'patch'"):
        by_name(model, layer_decay=0.5)
    assert by_name(model)  # unused, unread


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


def test_eps_before_the_correction_is_of_adamw_and_a_resumed_one_goes_on():
    with pytest.raises(ConfigError, match=r"eps_before_correction=true goes with optim.name=adamw, not adam"):
        build_optimizer("adam", [{"params": [nn.Parameter(torch.ones(3))]}], eps_before_correction=True)

    def run(weight, optimizer, gradients):
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()

    def fresh(values):
        weight = nn.Parameter(values.clone())
        group = {"params": [weight], "lr": 0.1, "weight_decay": 0.01}
        return weight, build_optimizer("adamw", [group], eps=1e-2, eps_before_correction=True)

    gradients = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) * 1e-2
    whole, optimizer = fresh(torch.ones(3))
    run(whole, optimizer, gradients)
    first, optimizer = fresh(torch.ones(3))
    run(first, optimizer, gradients[:2])
    again, resumed = fresh(first.detach())
    resumed.load_state_dict(optimizer.state_dict())
    run(again, resumed, gradients[2:])
    assert torch.equal(whole, again)


def test_momentum_dampening_and_nesterov_by_hand():
    def weights(gradients, **options):
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        [group] = [{"params": [weight], "lr": 0.1, "base_learning_rate": 0.1, "weight_decay": 0.0}]
        optimizer = build_optimizer("sgd", [group], **options)
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            yield weight.item()

    # v1 = g1; v2 = m v1 + (1 - dampening) g2; the step is v, or with Nesterov g + m v
    assert list(weights([1.0, 2.0], momentum=0.9)) == pytest.approx([-0.1, -0.1 - 0.1 * 2.9])
    assert list(weights([1.0, 2.0], momentum=0.9, dampening=0.5)) == pytest.approx([-0.1, -0.1 - 0.1 * 1.9])
    wanted = [-0.19, -0.19 - 0.1 * (2 + 0.9 * 2.9)]
    assert list(weights([1.0, 2.0], momentum=0.9, nesterov=True)) == pytest.approx(wanted)


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.1)])
def test_nesterov_needs_momentum_and_no_dampening(momentum, dampening):
    groups = parameter_groups(Pair(), learning_rate=0.1, learning_rates={}, weight_decay=0.0)
    words = f"got optim.momentum={momentum:g}, optim.dampening={dampening:g}. Set optim.dampening=0"
    with pytest.raises(ConfigError, match=words):
        build_optimizer("sgd", groups, momentum=momentum, dampening=dampening, nesterov=True)


def test_a_gradient_is_clipped_as_a_whole_or_number_by_number():
    def fresh():
        return [torch.tensor([3.0, 0.0]), torch.tensor([[-4.0]])]

    gradients = fresh()
    assert clip_gradients(gradients) == 5.0
    assert [g.tolist() for g in gradients] == [[3.0, 0.0], [[-4.0]]]
    assert clip_gradients(gradients, clip_norm=6.0) == 5.0 and gradients[1].item() == -4.0
    assert clip_gradients(gradients, clip_norm=1.0) == 5.0
    torch.testing.assert_close(gradients[0], torch.tensor([0.6, 0.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients[1], torch.tensor([[-0.8]]), rtol=1e-6, atol=0)
    gradients = fresh()
    assert clip_gradients(gradients, clip_value=3.5) == 5.0
    assert [g.tolist() for g in gradients] == [[3.0, 0.0], [[-3.5]]]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in fresh()]
    for parameter, gradient in zip(parameters, fresh(), strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, 0.7)
    gradients = fresh()
    clip_gradients(gradients, clip_norm=0.7)
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, parameters, strict=True))
    assert clip_gradients([], clip_norm=1.0) == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"clip_value": 1.0}])
def test_clipping_hides_nothing_that_is_not_finite(bad, options):
    gradients = [torch.tensor([bad, 5.0])]
    norm = clip_gradients(gradients, **options)
    assert not math.isfinite(norm)
    assert not torch.isfinite(gradients[0][0]) and gradients[0][1] == 5.0


def test_both_kinds_of_clipping_at_once_are_refused():
    with pytest.raises(ConfigError, match=r"optim.clip_norm=1 and optim.clip_value=2: give one of them"):
        clip_gradients([torch.ones(2)], clip_norm=1.0, clip_value=2.0)


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
