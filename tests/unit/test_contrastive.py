"""The contrastive task: what is masked, what is normalized, and over how many rows the loss is the mean."""

import pytest
import torch
from torch import nn

from twinreel import losses
from twinreel.data.clip import Batch
from twinreel.models import create_model
from twinreel.tasks import Contrastive
from twinreel.text import Vocabulary


def batch(captions, mask, valid):
    size = len(captions)
    return Batch(
        ids=[str(i) for i in range(size)], frames=torch.zeros(size, 1), pts_seconds=torch.zeros(size, 1),
        flip=torch.zeros(size).bool(), valid=torch.tensor(valid), captions=captions, caption_mask=torch.tensor(mask),
        labels=[()] * size, repeated_frames=0, faults=[],
    )  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create_model("conv3d_small", vocabulary=Vocabulary.build(["red ball", "blue cat"]), embedding_size=8)


def test_views_are_averaged_and_brought_back_to_unit_length_if_the_loss_normalizes():
    views = nn.functional.normalize(torch.randn(3, 4, 8), dim=-1)
    plain = Contrastive(loss=losses.milnce)
    unit = Contrastive(loss=losses.milnce, loss_options={"normalize": True})
    assert torch.allclose(plain.combine_views(views), views.mean(1))
    assert torch.allclose(unit.combine_views(views).norm(dim=-1), torch.ones(3))
    assert torch.allclose(unit.combine_views(views), nn.functional.normalize(views.mean(1), dim=-1))


def test_embeddings_are_compared_as_the_loss_compares_them(model):
    unit = Contrastive(loss=losses.milnce, loss_options={"normalize": True})
    plain = Contrastive(loss=losses.milnce)
    with torch.no_grad():
        raw = model.encode_text(["red ball", "cat"], 30)
        assert torch.allclose(plain.encode_text(model, ["red ball", "cat"], 30), raw)
        assert torch.allclose(unit.encode_text(model, ["red ball", "cat"], 30), nn.functional.normalize(raw, dim=-1))


def test_captions_without_a_known_word_and_unreadable_rows_take_no_part(model):
    captions = [["red ball", "zzz"], ["blue cat", "red"], ["qqq", ""], ["ball", "cat"]]
    given = batch(captions, [[True, True], [True, True], [True, False], [True, False]], [True, True, True, False])
    video = torch.rand(4, 3, 8, 56, 56)
    model.eval()
    loss, count = Contrastive(loss=losses.milnce, num_candidates=2).compute_loss(model, video, given)
    assert count == 2  # the third row says nothing that is known, the fourth cannot be read
    tokens = model.tokenize([text for row in captions for text in row], 20)
    known = torch.tensor([[True, False], [True, True], [False, False], [True, False]])
    expected = losses.milnce(
        model.encode_video(video), model.encode_text(tokens), mask=known, valid=given.valid,
        same_text=losses.equal_texts(captions, known),
    )  # fmt: skip
    assert torch.allclose(loss, expected)


def test_the_loss_is_float32_under_autocast(model):
    given = batch([["red ball"], ["cat"]], [[True], [True]], [True, True])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = Contrastive(loss=losses.milnce).compute_loss(model.train(), torch.rand(2, 3, 8, 56, 56), given)
    assert loss.dtype == torch.float32
