"""One suite over all classifiers: logits and scores, gradients, heads, state dicts, batch invariance."""

import inspect

import pytest
import torch

from twinreel.errors import ConfigError
from twinreel.models import CLASSIFIERS, Preprocessing, create_model
from twinreel.models.weights import load_weights

HEAVY = ("slowfast_16x8_r101", "slowfast_8x8_r101", "x3d_l", "i3d_nln_8x8_r50", "mvitv2_s_16x4", "c2d_nopool_8x8_r50")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ()) for name in CLASSIFIERS]
FRAMES = {"slowfast_16x8_r101": 16, "mvitv2_s_16x4": 4}


def small(name):
    """The model's own preprocessing at the smallest size that it takes."""
    return Preprocessing(num_frames=FRAMES.get(name, 8), frame_stride=2, crop_size=64)


def build(name, **options):
    torch.manual_seed(0)
    return create_model(name, num_classes=5, preprocessing=small(name), **options)


def clips(name, batch=2):
    frames = small(name).num_frames
    return torch.rand(batch, 3, frames, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_a_classifier(name):
    model = build(name, dropout=0.0)
    video = clips(name)
    assert not model.training and model.num_classes == 5 and model.preprocessing == small(name)
    with torch.no_grad():
        scores, features = model(video), model.forward_features(video)
        one = model(video[:1])
    assert scores.shape == (2, 5) and features.shape[0] == 2 and features.ndim == 2
    assert torch.allclose(scores.sum(1), torch.ones(2)) and bool((scores > 0).all())
    assert torch.allclose(one, scores[:1], atol=1e-5)

    logits = model.train()(video)
    assert logits.shape == (2, 5)
    (logits * torch.randn(2, 5)).sum().backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []

    other = build(name)
    with torch.no_grad():
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.eval()(video), model.eval()(video))

    head = {key for key in model.state_dict() if key.startswith(model.head_prefixes)}
    assert head
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.reset_head(7)
    with torch.no_grad():
        assert model.num_classes == 7 and model(video).shape == (2, 7)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before.keys() - head)
    report = load_weights(model, before, scope="backbone")  # B055
    assert set(report.kept) == head and set(report.dropped) == head


@pytest.mark.parametrize("name", ["slowfast_small", "x3d_small", "s3dg_small"])
def test_head_activations(name):
    video = clips(name)
    with torch.no_grad():
        outputs = {kind: build(name, head_activation=kind)(video) for kind in ("softmax", "sigmoid", "none")}
    assert torch.allclose(outputs["softmax"], outputs["none"].softmax(1), atol=1e-5)
    assert torch.allclose(outputs["sigmoid"], outputs["none"].sigmoid(), atol=1e-5)
    with pytest.raises(ConfigError, match="softmax, sigmoid or none"):
        build(name, head_activation="tanh")


def test_the_number_of_classes_is_read_from_the_weights():
    weights = build("x3d_small").state_dict()
    model = create_model("x3d_small", weights=weights, preprocessing=small("x3d_small"))
    assert model.num_classes == 5
    with pytest.raises(ConfigError, match="num_classes is 5 in the weights, but 3 was asked for"):
        create_model("x3d_small", weights=weights, num_classes=3)
    assert create_model("x3d_small", weights=weights, weights_scope="backbone", num_classes=3).num_classes == 3


def test_every_option_of_a_builder_is_typed_and_keyword_only():
    for name, builder in CLASSIFIERS.items():
        for key, parameter in inspect.signature(builder).parameters.items():
            assert parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is not parameter.empty, (name, key)
            assert parameter.default is not parameter.empty, (name, key)
