from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import TwoTowers, VideoTextModel, check_towers, create_model
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.text_towers import WordMaxTower, WordMeanTower
from twinreel.text import Vocabulary

WORDS = Vocabulary(("cut", "the", "onion"))


def test_word_max_by_hand():
    tower = WordMaxTower(4, 2, word_embedding_size=3, hidden_size=5)
    tokens = torch.tensor([[1, 2, 0], [0, 0, 0]])
    hidden = [torch.relu(tower.fc1(tower.word_embd.weight[i])) for i in range(4)]
    first = tower.fc2(torch.stack([hidden[1], hidden[2], hidden[0]]).max(dim=0).values)
    torch.testing.assert_close(tower(tokens), torch.stack([first, tower.fc2(hidden[0])]))


def test_padding_is_a_floor_under_the_maximum_but_its_amount_does_not_matter():
    tower = WordMaxTower(4, 2, word_embedding_size=3, hidden_size=5)
    with torch.no_grad():
        tower.word_embd.weight[0] = 10  # whatever row 0 holds, it takes part
    short, padded, longer = (tower(torch.tensor([row])) for row in ([1, 2], [1, 2, 0], [1, 2, 0, 0, 0]))
    assert not torch.allclose(short, padded)
    torch.testing.assert_close(padded, longer)


def test_word_mean_by_hand_ignores_padding():
    tower = WordMeanTower(4, 2, word_embedding_size=3)
    with torch.no_grad():
        tower.word_embd.weight[0] = 10
    tokens = torch.tensor([[1, 3, 0, 0], [0, 0, 0, 0]])
    table = tower.word_embd.weight
    expected = torch.stack([tower.fc((table[1] + table[3]) / 2), tower.fc.bias])
    torch.testing.assert_close(tower(tokens), expected)


@pytest.mark.parametrize("tower_class", [WordMaxTower, WordMeanTower])
def test_who_trains_the_word_table(tower_class: type[WordMaxTower | WordMeanTower]):
    vectors = torch.randn(4, 3)
    for given, asked, trained in (
        (None, None, True),
        (None, False, False),
        (vectors, None, False),
        (vectors, True, True),
    ):
        tower = tower_class(4, 2, 3, word_vectors=given, train_word_vectors=asked)
        tower(torch.tensor([[1, 2]])).sum().backward()
        assert (tower.word_embd.weight.grad is not None) == trained
        assert tower.word_embd.weight.requires_grad == trained
        if given is not None:
            assert torch.equal(tower.word_embd.weight, given)
        else:
            assert not tower.word_embd.weight[0].any()


@pytest.mark.parametrize("text_tower", ["word_max", "word_mean"])
def test_captions_without_a_word_are_finite_and_equal(text_tower: str):
    model = create_model("conv3d_small", vocabulary=WORDS, text_tower=text_tower)
    texts = model.encode_text(["", "zzz", "..."])
    assert texts.isfinite().all()
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert model.encode_text([]).shape == (0, 128)


def test_sentences_and_their_tokens_are_the_same():
    model = create_model("conv3d_small", vocabulary=WORDS)
    tokens = model.tokenize(["cut the onion", "THE"], 5)
    assert tokens.tolist() == [[1, 2, 3, 0, 0], [2, 0, 0, 0, 0]]
    torch.testing.assert_close(model.encode_text(tokens), model.encode_text(["cut the onion", "THE"]))
    assert model.tokenize(["cut"]).shape == (1, 30)
    cut = model.encode_text(["cut the onion"], max_words=1)
    torch.testing.assert_close(cut, model.encode_text(torch.tensor([[1]])))


def test_without_words_the_error_comes_when_text_is_read():
    bare = create_model("conv3d_small")
    with pytest.raises(ConfigError, match=r"no text tower.*create it with vocabulary="):
        bare.encode_text(["cut"])
    rows = create_model("conv3d_small", num_words=4)
    assert rows.encode_text(torch.tensor([[1, 3]])).shape == (1, 128)
    with pytest.raises(ConfigError, match=r"no vocabulary, so it cannot read sentences.*or pass word ids"):
        rows.encode_text(["cut"])
    with pytest.raises(ConfigError, match="single str 'cut': put it in a list"):
        create_model("conv3d_small", vocabulary=WORDS).encode_text("cut")


def test_contradicting_rows_of_the_word_table():
    with pytest.raises(ConfigError, match=r"stated differently \(num_words=9: 9, the vocabulary .*: 4\)"):
        create_model("conv3d_small", vocabulary=WORDS, num_words=9)
    assert create_model("conv3d_small", vocabulary=WORDS, num_words=4).vocabulary is WORDS
    with pytest.raises(ConfigError, match="text_tower must be word_max or word_mean; got 'bert'"):
        create_model("conv3d_small", vocabulary=WORDS, text_tower="bert")
    with pytest.raises(ConfigError, match="at least 2 rows"):
        create_model("conv3d_small", num_words=1)


def test_word_vectors_from_a_file(tmp_path: Path):
    vectors = torch.randn(4, 6)
    path = str(tmp_path / "word2vec.pth")
    torch.save(vectors, path)
    model = create_model("conv3d_small", vocabulary=WORDS, word_vectors=path, word_embedding_size=6)
    table = model.text_tower.word_embd.weight
    assert torch.equal(table, vectors) and not table.requires_grad
    with pytest.raises(ConfigError, match="set word_embedding_size=6"):
        create_model("conv3d_small", vocabulary=WORDS, word_vectors=path)
    with pytest.raises(ConfigError, match="stated differently"):
        create_model("conv3d_small", vocabulary=Vocabulary(("a",)), word_vectors=path, word_embedding_size=6)
    torch.save({"a": vectors}, path)
    with pytest.raises(CheckpointError, match=r"expected one float tensor \(words, size\).*; got dict"):
        create_model("conv3d_small", vocabulary=WORDS, word_vectors=path)


def test_towers_must_meet_in_one_space():
    rules = Preprocessing(num_frames=8, frame_rate=8.0, crop_size=32)
    with pytest.raises(ConfigError, match="different spaces: video 2, text 3"):
        TwoTowers(video_tower=WordMeanTower(4, 2), text_tower=WordMeanTower(4, 3), preprocessing=rules)
    with pytest.raises(ConfigError, match="max_words must be at least 1"):
        TwoTowers(video_tower=WordMeanTower(4, 2), text_tower=None, preprocessing=rules, max_words=0)


class MeanColor(nn.Module):
    def forward(self, video: Tensor) -> Tensor:
        return video.mean(dim=(2, 3, 4))


def test_a_video_tower_without_segments_says_so():
    rules = Preprocessing(num_frames=8, frame_rate=8.0, crop_size=32)
    model = TwoTowers(video_tower=MeanColor(), text_tower=None, preprocessing=rules)
    video = torch.rand(2, 3, 8, 4, 4)
    assert torch.equal(model.encode_video(video), video.mean(dim=(2, 3, 4)))
    with pytest.raises(ConfigError) as caught:
        model.encode_video(video, segments=True)
    assert str(caught.value) == (
        "MeanColor: this video tower gives no segments; the loss clip_bag needs them; give it a method "
        "forward_segments(video) -> (B, S, D), or choose another loss"
    )


class OwnTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=1, frame_rate=1.0, crop_size=8)
        self.projection = nn.Linear(3, 2)

    def encode_video(self, video: Tensor) -> Tensor:
        return self.projection(video.mean(dim=(2, 3, 4)))

    def encode_text(self, captions: list[str]) -> Tensor:
        return torch.zeros(len(captions), 2)


def test_check_towers():
    own = OwnTowers()
    assert check_towers(own, "mine:towers") is own
    assert isinstance(own, VideoTextModel)
    assert isinstance(create_model("conv3d_small"), VideoTextModel)
    with pytest.raises(ConfigError) as caught:
        check_towers(nn.Linear(1, 1), "mine:towers")
    assert "mine:towers: Linear is no pair of towers" in str(caught.value)
    for part in ("encode_video(video) -> (B, D)", "encode_text(captions) -> (N, D)", "attribute preprocessing"):
        assert part in str(caught.value)
    own.preprocessing = {"num_frames": 1}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="it lacks an attribute preprocessing that is a"):
        check_towers(own, "mine:towers")
