"""Grad-CAM against its formula by hand, on layers of our own models; the model is as it was afterwards."""

import copy

import av
import pytest
import torch
from PIL import Image
from torch import nn

from twinreel.errors import ConfigError, DataError
from twinreel.grad_cam import find_layer, grad_cam, overlay, write_images, write_video
from twinreel.models import create_model
from twinreel.models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=32)


class Tiny(nn.Module):
    """One convolution, ReLU in place, the mean, classes: its Grad-CAM can be written down."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv3d(3, 5, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(5)
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Conv3d(3, 2, 1)
        self.head = nn.Linear(5, 4)
        self.preprocessing = PREPROCESSING

    def forward(self, video):
        self.unused(video)
        return self.head(self.relu(self.norm(self.features(video))).mean(dim=(2, 3, 4)))


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return Tiny().train()


def videos(number=2, frames=4, size=32):
    return torch.randn(number, 3, frames, size, size, generator=torch.Generator().manual_seed(1))


def test_heat_is_what_the_formula_says(tiny):
    video = videos(size=16)
    tiny.norm.running_mean.normal_()
    [heat] = grad_cam(tiny, video, "norm", [2, 0])
    tiny.eval()
    features = tiny.norm(tiny.features(video)).detach()
    for clip, place in enumerate((2, 0)):
        above = (features[clip] > 0).float()
        gradient = above * tiny.head.weight[place].view(-1, 1, 1, 1) / above[0].numel()
        weights = gradient.mean(dim=(1, 2, 3), keepdim=True)
        wished = (weights * features[clip]).sum(0).relu()
        wished = nn.functional.interpolate(wished[None, None], (4, 16, 16), mode="trilinear")[0, 0]
        assert torch.allclose(heat[clip], wished / wished.max(), atol=1e-5)
    assert heat.shape == (2, 4, 16, 16) and heat.min() >= 0 and heat.amax(dim=(1, 2, 3)).tolist() == [1, 1]


def test_the_model_is_as_it_was(tiny):
    tiny.unused.eval()
    before, modes = copy.deepcopy(tiny.state_dict()), [part.training for part in tiny.modules()]
    grad_cam(tiny, videos(), "features")
    with pytest.raises(ConfigError):
        grad_cam(tiny, videos(), "features", [7, 0])
    assert [part.training for part in tiny.modules()] == modes
    assert all(not part._forward_hooks for part in tiny.modules())
    assert all(parameter.grad is None for parameter in tiny.parameters())
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())


def test_the_top_class_is_the_default_and_no_gradient_mode_stands_in_the_way(tiny):
    with torch.no_grad():
        top = tiny.eval()(videos()).argmax(1)
        [one] = grad_cam(tiny, videos(), "features")
    for parameter in tiny.parameters():
        parameter.requires_grad_(False)  # frozen weights
    [other] = grad_cam(tiny, videos(), "features", top)
    assert torch.equal(one, other)


def test_a_layer_that_is_not_there_is_refused_with_the_nearest_names(tiny):
    with pytest.raises(ConfigError, match=r"Tiny has no layer 'feature'; did you mean features\?"):
        find_layer(tiny, "feature")
    with pytest.raises(ConfigError, match="the outermost are features, norm, relu, unused, head"):
        grad_cam(tiny, videos(), "zzzzzz")
    with pytest.raises(ConfigError, match="has no layer ''"):
        grad_cam(tiny, videos(), "")


def test_layers_and_classes_that_do_not_do_are_refused(tiny):
    with pytest.raises(ConfigError, match="scores do not depend on what layer 'unused' gives"):
        grad_cam(tiny, videos(), "unused")
    with pytest.raises(ConfigError, match=r"layer 'head' gives \(2, 4\), no features"):
        grad_cam(tiny, videos(), "head")
    with pytest.raises(ConfigError, match="one class from 0 to 3 for each of 2 clips"):
        grad_cam(tiny, videos(), "features", [1])
    with pytest.raises(ConfigError, match="needs a classifier"):
        grad_cam(nn.Sequential(nn.Conv3d(3, 2, 1)), videos(), "0")


@pytest.mark.parametrize(
    ("name", "layer", "maps", "options"),
    [
        ("slowfast_small", "s5", 2, {}),
        ("slowfast_small", "s4.pathway1_res0", 1, {}),
        ("x3d_small", "s5", 1, {}),
        ("s3dg_small", "video_tower.mixed_5b", 1, {}),
    ],
)
def test_layers_of_our_models(name, layer, maps, options):
    torch.manual_seed(0)
    model = create_model(name, num_classes=5, **options)
    prep = model.preprocessing
    video = videos(2, prep.num_frames, prep.crop_size)
    scores = model(video)
    heat = grad_cam(model, video, layer)
    assert [each.shape for each in heat] == [video[:, 0].shape] * maps
    assert all(bool(torch.isfinite(each).all()) and 0 <= each.min() and each.max() <= 1 for each in heat)
    assert any(bool(each.any()) for each in heat)
    assert torch.equal(model(video), scores)  # softmax is back
    alone = grad_cam(model, video[:1], layer)
    assert all(torch.allclose(a, b[:1], atol=1e-3) for a, b in zip(alone, heat, strict=True))


def test_a_sure_model_has_heat_too():
    """The softmax of a model that is sure is flat; the logit is not."""
    model = create_model("x3d_small", num_classes=3)
    with torch.no_grad():
        model.head.projection.weight.mul_(1e5)
    video = videos(1, model.preprocessing.num_frames, model.preprocessing.crop_size)
    assert float(model(video).detach().max()) == 1.0
    assert any(bool(grad_cam(model, video, "s4", [place])[0].any()) for place in range(3))


def test_tokens_of_a_grid_are_features_too():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv3d(3, 6, 2, stride=2)
            self.block = nn.Linear(6, 6)
            self.block.q_grid = (2, 4, 4)
            self.head = nn.Linear(6, 3)

        def forward(self, video):
            tokens = self.embed(video).flatten(2).transpose(1, 2)
            tokens = self.block(torch.cat([tokens[:, :1] * 0, tokens], dim=1))
            return self.head(tokens.relu().mean(1))

    torch.manual_seed(0)
    model, video = Tokens(), videos(1, 4, 8)
    [heat] = grad_cam(model, video, "block", [1])
    tokens = model.embed(video).flatten(2).transpose(1, 2)
    tokens = model.block(torch.cat([tokens[:, :1] * 0, tokens], dim=1)).detach()
    gradient = (tokens > 0) * model.head.weight[1].detach() / tokens.shape[1]
    weights = gradient[:, 1:].mean(dim=1, keepdim=True)
    wished = (weights * tokens[:, 1:]).sum(-1).relu().view(1, 1, 2, 4, 4)
    wished = nn.functional.interpolate(wished, (4, 8, 8), mode="trilinear")[:, 0]
    assert wished.max() > 0 and torch.allclose(heat, wished / wished.max(), atol=1e-5)
    del model.block.q_grid
    with pytest.raises(ConfigError, match="no features"):
        grad_cam(model, video, "block", [1])


def test_overlay_leaves_cold_places_alone_and_reddens_hot_ones():
    frames = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    heat = torch.zeros(2, 4, 4)
    heat[1, 2, 2] = 1.0
    shown = overlay(frames, heat)
    assert shown.dtype == torch.uint8 and torch.equal(shown[0], frames[0])
    red, green, blue = shown[1, 2, 2].tolist()
    assert red > 160 and green < 50 and blue < 50
    assert int((shown != frames).any(-1).sum()) == 1


def test_written_files_hold_the_frames(tmp_path):
    frames = torch.zeros(5, 33, 48, 3, dtype=torch.uint8)
    frames[..., 0] = torch.arange(5).view(5, 1, 1) * 50
    write_video(tmp_path / "a.mp4", frames, 2.5)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(stream.average_rate) == 2.5 and shown[0].shape == (32, 48, 3) and len(shown) == 5
        assert all(abs(float(picture[..., 0].mean()) - 50 * i) < 12 for i, picture in enumerate(shown))
    [path] = write_images(tmp_path, {"b": frames[3]})
    assert torch.equal(torch.frombuffer(bytearray(Image.open(path).tobytes()), dtype=torch.uint8), frames[3].flatten())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.mp4", "b.png"]
    with pytest.raises(DataError, match="cannot be written"):
        write_video(tmp_path / "none" / "a.mp4", frames, 2.5)
    with pytest.raises(ConfigError, match="make no video"):
        write_video(tmp_path / "c.mp4", frames[:0], 2.5)
