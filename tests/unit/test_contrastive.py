"""The contrastive task: what is masked, what is normalized, and over how many rows the loss is the mean."""

import math

import pytest
import torch
from torch import nn

from twinreel import losses
from twinreel.data.clip import Batch
from twinreel.errors import ConfigError
from twinreel.models import create_model
from twinreel.tasks import Contrastive, PairFacts
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
        text_ids=losses.text_ids(captions),
    )  # fmt: skip
    assert torch.allclose(loss, expected)


def test_equal_captions_of_two_clips_are_no_negatives(model):
    def loss(*captions):
        model.eval()
        given = batch([[text] for text in captions], [[True]] * 3, [True] * 3)
        return Contrastive(loss=losses.milnce).compute_loss(model, video, given)[0]

    video = torch.rand(3, 3, 8, 56, 56)
    scores = model.encode_video(video) @ model.encode_text(["red ball", "cat", "red ball"]).T
    scores[0, 2] = scores[2, 0] = -torch.inf
    expected = ((torch.cat([scores, scores.T.masked_fill(torch.eye(3).bool(), -torch.inf)], 1)).logsumexp(1)
                - scores.diag()).mean()  # fmt: skip
    assert torch.allclose(loss("red ball", "cat", "Red  ball "), expected)


def test_a_loss_gets_what_it_takes_and_shares_add_up_either_way():
    facts = PairFacts(torch.tensor([True, True, False]), torch.ones(3, 2).bool(), torch.arange(6).view(3, 2))
    video, text = torch.randn(3, 4), torch.randn(6, 4)

    def knows_own(video, text, *, mask, valid, own=None, text_ids=None, negative_seed=0):
        told.append((own, text_ids, negative_seed))
        terms = video.sum(1) * valid
        return (terms if own is None else terms[own]).sum() / valid.sum()

    def knows_nothing(video, text, *, mask, valid):
        return (video.sum(1) * valid).sum() / valid.sum()

    told = []
    pieces = [torch.tensor([0, 2]), torch.tensor([1])]
    for loss in (knows_own, knows_nothing):
        task = Contrastive(loss=loss, num_candidates=2)
        whole = task.share((video, text), facts, negative_seed=7)
        shares = [task.share((video, text), facts, own=own, negative_seed=7, num_processes=2) for own in pieces]
        assert torch.allclose(sum(shares), whole) and torch.allclose(whole, video[:2].sum() / 2)
    assert torch.equal(shares[0], shares[1])  # who knows no `own` computes the whole, and each process half of it
    assert [own if own is None else own.tolist() for own, _, _ in told] == [None, [0, 2], [1]]
    assert all(ids.tolist() == list(range(6)) and seed == 7 for _, ids, seed in told)


def test_a_caption_of_nothing_is_masked_for_towers_that_read_sentences():
    given = batch(
        [["a dog", "  "], ["", "."], ["cat", "\t\n"]], [[True, True], [True, True], [False, True]], [True] * 3
    )
    text, facts = Contrastive(loss=losses.milnce, num_candidates=2).inputs(nn.Module(), given)
    assert text == ["a dog", "  ", "", ".", "cat", "\t\n"]  # every one keeps its place
    assert facts.mask.tolist() == [[True, False], [False, True], [False, False]]
    assert facts.usable.tolist() == [True, True, False]


@pytest.mark.parametrize(("planted", "wanted"), [(9.0, 0.01), (-9.0, 1.0), (2.0, math.exp(-2)), (math.inf, 0.01)])
def test_a_learned_temperature_is_kept_between_a_hundredth_and_one(planted, wanted):
    task = Contrastive(loss=losses.info_nce, loss_options={"temperature": 0.05}, learn_temperature=True)
    assert task.temperature == pytest.approx(0.05) and [name for name, _ in task.named_parameters()] == ["log_scale"]
    task.log_scale.data.fill_(planted)
    task.after_step()
    assert task.temperature == pytest.approx(wanted)


def test_a_fixed_temperature_is_nothing_to_train_or_to_clamp():
    task = Contrastive(loss=losses.info_nce, loss_options={"temperature": 0.003})
    task.after_step()
    assert task.temperature == 0.003 and not list(task.parameters()) and not task.state_dict()
    assert Contrastive(loss=losses.info_nce).temperature == 0.07  # the default of the loss
    assert Contrastive(loss=lambda video, text, *, mask, valid: video.sum()).temperature is None


@pytest.mark.parametrize(
    ("loss", "options"), [(losses.milnce, {}), (lambda v, t, *, mask, valid, normalize: v, {"normalize": True})]
)
def test_a_temperature_is_learned_only_where_there_is_one(loss, options):
    with pytest.raises(
        ConfigError, match="learn_temperature needs a loss on normalized embeddings that has a temperature"
    ):
        Contrastive(loss=loss, loss_options=options, learn_temperature=True)


@pytest.mark.parametrize("num_clips", [2, 7, 32])
@pytest.mark.parametrize(
    ("loss", "candidates", "options", "chance"),
    [
        (losses.info_nce, 1, {}, lambda clips: math.log(clips)),
        (losses.info_nce, 1, {"temperature": 0.5}, lambda clips: math.log(clips)),
        (losses.clip_bag, 1, {"pooling": "max"}, lambda clips: math.log(clips)),
        (losses.clip_bag, 1, {"pooling": "attention"}, lambda clips: math.log(clips)),
        (losses.clip_bag, 1, {"pooling": "logsumexp"}, lambda clips: math.log(clips)),
        (losses.milnce, 1, {}, lambda clips: math.log(2 * clips - 1)),
        (losses.milnce, 1, {"normalize": True, "temperature": 0.1}, lambda clips: math.log(2 * clips - 1)),
        (losses.milnce, 1, {"positives_twice": True}, lambda clips: math.log(2 * clips)),
        (losses.milnce, 3, {}, lambda clips: math.log(2 * clips - 1)),
        (losses.binary_nce, 1, {}, lambda clips: 2 * math.log(2)),
        (losses.binary_nce, 1, {"num_negatives": 1}, lambda clips: 2 * math.log(2)),
    ],
)
def test_chance_is_what_a_model_scores_that_knows_nothing(loss, candidates, options, chance, num_clips):
    """Whether one clip's share is taken `num_clips` times, or the loss of all at once."""
    task = Contrastive(loss=loss, num_candidates=candidates, loss_options=options)
    assert task.chance_loss(num_clips) == pytest.approx(chance(num_clips), rel=1e-5)
    task.takes -= {"own"}
    assert task.chance_loss(num_clips) == pytest.approx(chance(num_clips), rel=1e-5)


def test_chance_does_not_depend_on_a_learned_temperature():
    for temperature in (0.05, 1.0):
        task = Contrastive(loss=losses.info_nce, loss_options={"temperature": temperature}, learn_temperature=True)
        assert task.chance_loss(8) == pytest.approx(math.log(8), rel=1e-5)


def test_facts_travel_as_numbers():
    valid, mask = torch.tensor([True, False]), torch.tensor([[True, False, False], [False, True, True]])
    facts = PairFacts(valid, mask, losses.text_ids([["a", "b", "c"], ["d", "e", "f"]]).view(2, 3))
    packed = facts.pack()
    assert packed.dtype == torch.int64 and packed.shape == (2, 7)
    for one, other in zip(PairFacts.unpack(torch.cat([packed, packed])), facts, strict=True):
        assert torch.equal(one, torch.cat([other, other])) and one.dtype == other.dtype
    assert facts._replace(mask=mask & False).usable.tolist() == [False, False]
    assert facts._replace(valid=~valid).usable.tolist() == [False, True]


def test_the_loss_is_float32_under_autocast(model):
    given = batch([["red ball"], ["cat"]], [[True], [True]], [True, True])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = Contrastive(loss=losses.milnce).compute_loss(model.train(), torch.rand(2, 3, 8, 56, 56), given)
    assert loss.dtype == torch.float32
