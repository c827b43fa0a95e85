"""One suite over all models: shapes, gradients, state dicts, batch invariance."""

from __future__ import annotations

import inspect
import math
import typing

import pytest
import torch
from torch import Tensor, nn

from twinreel.errors import ConfigError
from twinreel.models import TOWERS, TwoTowers, create_model
from twinreel.text import Vocabulary

WORDS = Vocabulary(tuple(f"word{i}" for i in range(20)))
CAPTIONS = ["word1 word2", "word3", "", "nothing known"]
SMALL = {"embedding_size": 24, "word_embedding_size": 12, "text_hidden_size": 16}
TEXT_TOWERS = ("word_max", "word_mean")
# Sums run in another order for other batch sizes and memory formats, and norms that saw four tiny clips amplify that
# about 10 000 times: too much to tell from a mistake in float32, far below one in float64.
DOUBLE = {"atol": 1e-9, "rtol": 1e-9}


def build(name: str, **options: object) -> TwoTowers:
    torch.manual_seed(0)
    model = create_model(name, vocabulary=WORDS, **{**SMALL, **options})
    assert isinstance(model, TwoTowers)
    # Untrained norms let the signal fade until only the last bias is left, which would hide mistakes before it.
    for part in model.modules():
        if isinstance(part, nn.BatchNorm3d):
            part.momentum = 1.0
    with torch.no_grad():
        model.train()(video(4), model.tokenize(CAPTIONS))
    return model.eval()


def video(batch: int = 2, size: int = 32, frames: int = 8) -> Tensor:
    return torch.rand(batch, 3, frames, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TOWERS)
def test_shapes(name: str):
    model = build(name)
    assert not model.training
    with torch.no_grad():
        features = model.forward_features(video())
        embeddings = model.encode_video(video())
        texts = model.encode_text(CAPTIONS)
        both = model(video(), model.tokenize(CAPTIONS))
        assert model.encode_video(video(1, 33, 5)).shape == (1, 24)  # any size goes, odd ones too
    assert features.shape == (2, model.video_tower.feature_size)
    assert embeddings.shape == (2, 24)
    assert texts.shape == (4, 24)
    assert texts.isfinite().all()
    assert torch.equal(embeddings, model.video_tower.fc(features))
    assert torch.equal(both[0], embeddings) and torch.equal(both[1], texts)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(("size", "frames"), [(32, 16), (33, 5)])
def test_segments_are_the_heads_view_of_each_temporal_position(name: str, size: int, frames: int):
    model = build(name).double()
    tower = model.video_tower
    maps: list[Tensor] = []
    last = tower.layers if name == "conv3d_small" else tower.mixed_5c
    last.register_forward_hook(lambda module, inputs, output: maps.append(output))
    clips = video(2, size, frames).double()
    with torch.no_grad():
        segments = model.encode_video(clips, segments=True)
        whole = model.encode_video(clips)
        naive = [tower.fc(maps[0][:, :, position].flatten(2).mean(dim=2)) for position in range(maps[0].shape[2])]
    assert segments.shape == (2, math.ceil(frames / (4 if name == "conv3d_small" else 8)), 24)
    torch.testing.assert_close(segments, torch.stack(naive, dim=1), **DOUBLE)
    torch.testing.assert_close(segments.mean(dim=1), whole, **DOUBLE)
    if segments.shape[1] > 1:
        assert (segments[:, 0] - segments[:, 1]).abs().max() > 1e-2
    with pytest.raises(ConfigError, match="wants a float video"):
        model.encode_video(clips[0], segments=True)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("text_tower", TEXT_TOWERS)
def test_gradients_reach_every_trainable_parameter(name: str, text_tower: str):
    model = build(name, text_tower=text_tower).train()
    video_embeddings, text_embeddings = model(video(4), model.tokenize([f"word{i}" for i in range(20)]))
    (video_embeddings @ text_embeddings.T).logsumexp(dim=1).sum().backward()
    without = [
        key
        for key, value in model.named_parameters()
        if value.requires_grad and (value.grad is None or not value.grad.any())
    ]
    assert without == []


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("text_tower", TEXT_TOWERS)
def test_state_dict_round_trip(name: str, text_tower: str):
    model = build(name, text_tower=text_tower)
    for buffer in model.buffers():
        buffer.add_(1)
    again = create_model(name, weights=model.state_dict(), vocabulary=WORDS)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(again.encode_video(video()), model.encode_video(video()))
        assert torch.equal(again.encode_text(CAPTIONS), model.encode_text(CAPTIONS))


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("text_tower", TEXT_TOWERS)
def test_in_eval_mode_a_row_does_not_depend_on_its_batch(name: str, text_tower: str):
    model = build(name, text_tower=text_tower).double()
    clips = video(3).double()
    with torch.no_grad():
        together = model.encode_video(clips)
        apart = torch.cat([model.encode_video(clips[i : i + 1]) for i in range(3)])
        texts = model.encode_text(CAPTIONS)
        texts_apart = torch.cat([model.encode_text([caption]) for caption in CAPTIONS])
    torch.testing.assert_close(together, apart, **DOUBLE)
    torch.testing.assert_close(texts, texts_apart, **DOUBLE)


@pytest.mark.parametrize("name", TOWERS)
def test_channels_last_gives_the_same(name: str):
    model = build(name).double()
    clips = video().double()
    with torch.no_grad():
        plain = model.encode_video(clips)
        model.to(memory_format=torch.channels_last_3d)
        last = model.encode_video(clips.to(memory_format=torch.channels_last_3d))
    torch.testing.assert_close(last, plain, **DOUBLE)


@pytest.mark.parametrize("name", TOWERS)
def test_motion_matters(name: str):
    """Time reversed is another video: no model is blind to the order of frames."""
    model = build(name)
    with torch.no_grad():
        forward, backward = model.encode_video(video()), model.encode_video(video().flip(2))
    assert (forward - backward).abs().max() > 1e-2


@pytest.mark.parametrize("name", TOWERS)
def test_the_stated_preprocessing_fits_the_network(name: str):
    model = build(name)
    rules = model.preprocessing
    frames = torch.zeros(1, rules.num_frames, rules.crop_size, rules.crop_size, 3, dtype=torch.uint8)
    with torch.no_grad():
        assert model.encode_video(rules.normalize(frames)).shape == (1, 24)


@pytest.mark.parametrize("name", TOWERS)
def test_the_signature_is_a_schema_of_plain_types(name: str):
    hints = typing.get_type_hints(TOWERS[name])
    for option, parameter in inspect.signature(TOWERS[name]).parameters.items():
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
        if option not in ("vocabulary", "preprocessing"):
            parts = typing.get_args(hints[option]) or (hints[option],)
            assert all(part in (int, float, str, bool, type(None)) or isinstance(part, str) for part in parts), option


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(3, 8, 32, 32), r"wants a float video \(B, 3, T, H, W\); got torch.float32 \(3, 8, 32, 32\)"),
        (torch.zeros(1, 8, 32, 32, 3), "wants a float video"),
        (torch.zeros(1, 3, 8, 32, 32, dtype=torch.uint8), "got torch.uint8"),
        (torch.zeros(1, 3, 0, 32, 32), "at least one frame and one pixel"),
    ],
)
@pytest.mark.parametrize("name", TOWERS)
def test_wrong_videos_are_named(name: str, bad: Tensor, words: str):
    with pytest.raises(ConfigError, match=words):
        build(name).encode_video(bad)


@pytest.mark.parametrize("name", TOWERS)
def test_an_input_too_small_to_train_on_is_refused_and_the_next_larger_one_trains(name: str):
    model = build(name).train()
    with pytest.raises(ConfigError, match="too small to train on: its last layers see one value per channel"):
        model.encode_video(video(1, 16, 4))
    assert model.encode_video(video(2, 16, 4)).shape == (2, 24)
    assert model.encode_video(video(1, 33, 4)).shape == (1, 24)
    assert model.eval().encode_video(video(1, 1, 1)).shape == (1, 24)


def test_sizes_in_the_docstrings():
    counts = {name: sum(p.numel() for p in create_model(name).video_tower.parameters()) for name in TOWERS}
    for name, count in counts.items():
        assert f"{count / 1e6:.1f} million parameters" in str(TOWERS[name].__doc__), (name, count)


def test_space_to_depth_needs_even_sizes():
    model = build("s3dg", space_to_depth=True)
    with torch.no_grad():
        assert model.encode_video(video(1, 32, 2)).shape == (1, 24)
        assert model.encode_video(video(1, 32, 16), segments=True).shape == (1, 2, 24)
    with pytest.raises(ConfigError, match=r"even num_frames, height and width; got \(T, H, W\) = \(5, 32, 32\)"):
        model.encode_video(video(1, 32, 5))


def test_space_to_depth_order_of_channels():
    from twinreel.models.s3dg import space_to_depth

    pixels = torch.arange(2 * 3 * 4 * 6 * 8).view(2, 3, 4, 6, 8)
    blocks = space_to_depth(pixels)
    assert blocks.shape == (2, 24, 2, 3, 4)
    for dt, dh, dw, color in ((0, 0, 0, 0), (1, 0, 1, 2), (0, 1, 0, 1), (1, 1, 1, 2)):
        channel = ((dt * 2 + dh) * 2 + dw) * 3 + color
        assert torch.equal(blocks[:, channel], pixels[:, color, dt::2, dh::2, dw::2])


def test_weight_init():
    from twinreel.models.s3dg import S3DG

    torch.manual_seed(0)
    he = S3DG(8, width=0.5, weight_init="kaiming_normal")
    kernel = he.mixed_4d.conv_b1_b.conv1.weight
    assert abs(kernel.std().item() / math.sqrt(2 / kernel[0].numel()) - 1) < 0.05
    with pytest.raises(ConfigError, match="weight_init must be uniform or kaiming_normal; got 'he'"):
        S3DG(8, weight_init="he")  # type: ignore[arg-type]


def test_s3dg_refuses_arguments_out_of_range():
    from twinreel.models.s3dg import S3DG

    with pytest.raises(ConfigError, match=r"must be above 0; got 0 and 1\.0"):
        S3DG(0)
    with pytest.raises(ConfigError, match=r"must be above 0; got 8 and -1"):
        S3DG(8, width=-1)


def naive_pool(features: Tensor, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> Tensor:
    """TensorFlow's rule as the authors wrote it, position by position."""
    outputs = []
    starts = []
    for size, k, s in zip(features.shape[2:], kernel, stride, strict=True):
        front = max(k - s, 0) // 2
        starts.append([position - front for position in range(0, s * math.ceil(size / s), s)])
    for t in starts[0]:
        for h in starts[1]:
            for w in starts[2]:
                corner = [slice(max(a, 0), a + k) for a, k in zip((t, h, w), kernel, strict=True)]
                outputs.append(features[:, :, corner[0], corner[1], corner[2]].amax(dim=(2, 3, 4)))
    return torch.stack(outputs, dim=2).view(*features.shape[:2], *map(len, starts))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    ("kernel", "stride"),
    [((1, 3, 3), (1, 2, 2)), ((3, 3, 3), (2, 2, 2)), ((2, 2, 2), (2, 2, 2)), ((1, 3, 3), (1, 1, 1))],
)
def test_same_pool_equals_its_definition(size: int, kernel: tuple[int, int, int], stride: tuple[int, int, int]):
    from twinreel.models.s3dg import SamePool

    features = torch.rand(2, 3, 4, size, size + 1)
    assert torch.equal(SamePool(kernel, stride)(features), naive_pool(features, kernel, stride))
