from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import create_model
from twinreel.models.preprocessing import Preprocessing
from twinreel.text import Vocabulary

WORDS = Vocabulary(("cut", "the", "onion"))
SIZES = {"embedding_size": 6, "word_embedding_size": 5, "text_hidden_size": 7}


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="unknown model 's3gd'; did you mean s3dg"):
        create_model("s3gd")
    with pytest.raises(ConfigError) as caught:
        create_model("s3dg", embeding_size=3, widht=2)
    assert "unknown option embeding_size; did you mean embedding_size?" in str(caught.value)
    assert "unknown option widht" in str(caught.value)


def test_preprocessing_default_overrides_and_whole():
    default = create_model("conv3d_small").preprocessing
    assert default == Preprocessing(num_frames=8, frame_rate=8.0, crop_size=56)
    assert create_model("conv3d_small", preprocessing={"crop_size": 64}).preprocessing == default.replace(crop_size=64)
    whole = Preprocessing(num_frames=4, frame_stride=2, crop_size=32)
    assert create_model("conv3d_small", preprocessing=whole).preprocessing == whole
    assert create_model("s3dg").preprocessing == Preprocessing(num_frames=16, frame_rate=5.0, crop_size=224)
    with pytest.raises(ConfigError, match="unknown key crop; did you mean crop_size"):
        create_model("conv3d_small", preprocessing={"crop": 64})


def test_vocabulary_from_a_file(tmp_path: Path):
    np.save(tmp_path / "dict.npy", np.array(WORDS.words))
    model = create_model("conv3d_small", vocabulary=tmp_path / "dict.npy")
    assert model.vocabulary == WORDS
    assert model.encode_text(["cut"]).shape == (1, 128)


@pytest.mark.parametrize("text_tower", ["word_max", "word_mean"])
def test_sizes_are_read_from_the_weights(tmp_path: Path, text_tower: str):
    model = create_model("conv3d_small", vocabulary=WORDS, text_tower=text_tower, **SIZES)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pth")
    for path in (tmp_path / "model.safetensors", str(tmp_path / "model.pth")):
        again = create_model("conv3d_small", weights=path)
        assert not again.training
        assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())
        assert again.text_tower.word_embd.weight.requires_grad  # twinreel's own: nothing says it was frozen
    assert create_model("conv3d_small", weights=path, vocabulary=WORDS, embedding_size=6).vocabulary is WORDS


def test_options_that_contradict_the_weights():
    state = create_model("conv3d_small", vocabulary=WORDS, **SIZES).state_dict()
    with pytest.raises(ConfigError) as caught:
        create_model("conv3d_small", weights=state, embedding_size=512, text_tower="word_mean")
    for part in (
        "embedding_size is 6 in the weights, but 512 was asked for",
        "text_tower is word_max in the weights, but word_mean was asked for",
        "weights_scope=backbone",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="every word another word's vector"):
        create_model("conv3d_small", weights=state, vocabulary=Vocabulary(("cut",)))


def test_space_to_depth_is_read_from_the_weights():
    state = create_model("s3dg", space_to_depth=True, num_words=3).state_dict()
    assert create_model("s3dg", weights=state).video_tower.space_to_depth is True
    assert create_model("s3dg", weights=state, weights_scope="backbone").video_tower.space_to_depth is True
    with pytest.raises(ConfigError, match="space_to_depth is True in the weights, but False was asked for"):
        create_model("s3dg", weights=state, space_to_depth=False)


def test_the_file_of_word_vectors_is_not_needed_again_but_the_table_stays_frozen():
    state = create_model("conv3d_small", vocabulary=WORDS, **SIZES).state_dict()
    model = create_model("conv3d_small", weights=state, word_vectors="gone.pth")
    assert not model.text_tower.word_embd.weight.requires_grad
    model = create_model("conv3d_small", weights=state, word_vectors="gone.pth", train_word_vectors=True)
    assert model.text_tower.word_embd.weight.requires_grad


def test_backbone_starts_new_heads_and_says_so(caplog: pytest.LogCaptureFixture):
    old = create_model("conv3d_small", vocabulary=WORDS, **SIZES)
    with caplog.at_level(logging.WARNING, logger="twinreel"):
        new = create_model(
            "conv3d_small",
            weights=old.state_dict(),
            weights_scope="backbone",
            vocabulary=Vocabulary(("a", "b")),
            embedding_size=9,
        )
    assert torch.equal(new.video_tower.layers[4][0].weight, old.video_tower.layers[4][0].weight)
    assert new.video_tower.fc.out_features == 9
    assert "left out of the file: video_tower.fc.weight" in caplog.text
    assert "text_tower.word_embd.weight" in caplog.text


OWN = """
    import torch
    from twinreel.models import Preprocessing

    class Towers(torch.nn.Module):
        def __init__(self, preprocessing=None, *, size, bias=True):
            super().__init__()
            self.preprocessing = preprocessing or Preprocessing(num_frames=1, frame_rate=1.0, crop_size=8)
            self.fc = torch.nn.Linear(3, size, bias=bias)

        def encode_video(self, video):
            return self.fc(video.mean(dim=(2, 3, 4)))

        def encode_text(self, captions):
            return torch.zeros(len(captions), self.fc.out_features)

    def words(*, vocabulary, **options):
        towers = Towers(**options)
        towers.vocabulary = vocabulary
        return towers

    def half(**options):
        return torch.nn.Linear(1, 1)

    def plain():
        class Plain:
            encode_video = encode_text = print
            preprocessing = Preprocessing(num_frames=1, frame_rate=1.0, crop_size=8)
        return Plain()

    class Fixed(Towers):
        def __init__(self):
            torch.nn.Module.__init__(self)

        @property
        def preprocessing(self):
            return Preprocessing(num_frames=1, frame_rate=1.0, crop_size=8)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_towers_for_test.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_towers_for_test", raising=False)
    return "own_towers_for_test"


def test_a_users_own_builder(own: str, caplog: pytest.LogCaptureFixture):
    model = create_model(f"{own}:Towers", size=4, preprocessing={"crop_size": 16}, vocabulary=WORDS)
    assert not model.training
    assert model.preprocessing.crop_size == 16
    assert model.encode_video(torch.zeros(2, 3, 1, 8, 8)).shape == (2, 4)
    assert create_model(f"{own}:words", size=4, vocabulary=WORDS).vocabulary is WORDS
    again = create_model(f"{own}:Towers", size=4, weights=model.state_dict())
    assert torch.equal(again.fc.weight, model.fc.weight)
    assert caplog.text == ""
    create_model(f"{own}:Towers", size=4, vocabulary="words.txt")
    assert "takes no vocabulary: words.txt is not used" in caplog.text


def test_what_is_wrong_with_a_users_own_builder(own: str):
    for name, options, words in (
        (f"{own}:Tower", {}, "has no function Tower; did you mean Towers"),
        ("no_such_module_here:f", {}, "no module named no_such_module_here"),
        (
            f"{own}:Towers",
            {"biass": 1},
            "unknown option biass; did you mean bias.*; size is missing and has no default",
        ),
        (f"{own}:half", {}, "Linear is no pair of towers"),
        (f"{own}:plain", {}, "Plain is no torch.nn.Module"),
        (f"{own}:Fixed", {"preprocessing": {"crop_size": 9}}, "preprocessing cannot be set on Fixed"),
    ):
        with pytest.raises(ConfigError, match=words):
            create_model(name, **options)
    assert create_model(f"{own}:Fixed", preprocessing={}).preprocessing.crop_size == 8
    state = create_model(f"{own}:Towers", size=4).state_dict()
    with pytest.raises(CheckpointError, match=r"mis-shaped \(fc.weight: file \(4, 3\) float32, model \(5, 3\) float32"):
        create_model(f"{own}:Towers", size=5, weights=state)
    with pytest.raises(ConfigError, match="give it an attribute head_prefixes"):
        create_model(f"{own}:Towers", size=5, weights=state, weights_scope="backbone")
