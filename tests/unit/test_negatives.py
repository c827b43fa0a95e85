"""Wrong captions: whose, how often, and that neither processes nor a restart change them."""

from collections import Counter

import pytest
import torch
from test_video_text_matching import batch

from twinreel.data.clip import Caption, Clip
from twinreel.data.negatives import NegativeCaptions
from twinreel.data.plan import Plan, keyed_rng
from twinreel.data.training_sample import TrainingRules, draw_captions
from twinreel.errors import DataError
from twinreel.models.preprocessing import Preprocessing

RULES = TrainingRules(preprocessing=Preprocessing(num_frames=2, frame_rate=2.0, crop_size=16), seed=3, num_candidates=1)


def row(id, *texts, video=None):
    return Clip(id=id, video=video or f"{id}.mp4", captions=tuple(Caption(text=text) for text in texts))


def negatives(rows, size=4, **options):
    plan = Plan(num_rows=len(rows), seed=3, global_batch_size=size)
    return NegativeCaptions(rows, plan, RULES, **({"num_negatives": 1} | options))


MANY = [row(f"v{i}", *(f"video {i} caption {k}" for k in range(1 + i % 3))) for i in range(12)]


def test_wrong_captions_come_from_other_videos_all_videos_alike():
    rows = [row("much", *(f"much {k}" for k in range(50))), row("one", "one"), row("two", "two"), row("own", "own")]
    found = negatives(rows)
    counts = Counter(found.of("own", step)[0].split()[0] for step in range(3000))  # a step an epoch
    assert set(counts) == {"much", "one", "two"}
    assert all(abs(count - 1000) < 120 for count in counts.values())  # 4.6 standard deviations


def test_a_video_in_several_rows_is_not_its_own_negative():
    rows = [row("a#1", "first", video="a.mp4"), row("a#2", "second", video="a.mp4"), row("b", "other")]
    found = negatives(rows, size=3)
    assert {found.of(id, step)[0] for id in ("a#1", "a#2") for step in range(50)} == {"other"}
    assert {found.of("b", step)[0] for step in range(50)} == {"first", "second"}


def test_a_caption_that_the_video_has_too_is_passed_over():
    rows = [row("a", "a man", "a dog"), row("b", "a man"), row("c", "a cat")]
    assert {negatives(rows, size=3).of("a", step)[0] for step in range(50)} == {"a cat"}
    assert negatives(rows, size=3, num_negatives=2).of("a", 0) == ["a cat", "a cat"]  # there is no other
    with pytest.raises(DataError, match=r"^a\.mp4: no other video has a caption that this one has not"):
        negatives([row("a", "a man", "a cat"), row("b", "a man"), row("c", "a cat")], size=3)


def test_what_the_model_reads_alike_is_alike():
    rows = [
        row("a", "a dog runs"),
        row("b", "A Dog runs"),
        row("c", "a dog runs far"),
        row("d", "a cat"),
        row("e", "?"),
    ]

    def reads(text):
        return "" if text == "?" else " ".join(text.lower().split()[:3])

    found = negatives(rows, size=3, reads=reads)
    assert {found.of("a", step)[0] for step in range(60)} == {"a cat"}
    same = [row("a", "a dog runs"), row("b", "a dog runs fast")]
    with pytest.raises(DataError, match="a: no other video has a caption that the model can tell from this one's"):
        negatives(same, size=2, reads=reads).of("a", 0)


def test_no_wrong_caption_comes_twice_while_there_are_others():
    rows = [row("own", "own"), *(row(f"v{i}", "the same" if i < 6 else f"other {i}") for i in range(9))]
    found = negatives(rows, num_negatives=4)
    for step in range(30):
        assert sorted(found.of("own", step)) == ["other 6", "other 7", "other 8", "the same"]


@pytest.mark.parametrize("in_batch", [False, True])
def test_captions_that_cannot_be_read_are_a_fault_of_their_own_sample(tmp_path, in_batch):
    rows = []
    for i in range(4):
        path = tmp_path / f"{i}.csv"
        path.write_text("start,end,text\n" + ("0,1\n" if i == 2 else f"0,1,said {i}\n"))
        rows.append(Clip(id=f"v{i}", video=f"v{i}.mp4", caption_file=str(path)))
    found = negatives(rows, in_batch=in_batch)
    assert {found.of(f"v{i}", step)[0] for i in (0, 1, 3) for step in range(20)} == {"said 0", "said 1", "said 3"}
    given = batch([["said 0"], [""]], valid=torch.tensor([True, False]))
    given.ids[:] = ["v0", "v2"]
    more = found.add(given, 0)
    assert more.captions[1] == ["", ""] and more.caption_mask.tolist() == [[True, True], [True, False]]


def test_one_video_alone_is_refused_at_once():  # ClipBERT defect 16: the founding code looked for ever
    with pytest.raises(DataError, match="come from other videos, and there are only 1 in all"):
        negatives([row("a", "one"), row("a2", "two", video="a.mp4")], size=2)


def test_they_depend_on_seed_epoch_and_row_alone():
    one, two = negatives(MANY, num_negatives=3), negatives(MANY, num_negatives=3)
    two.of("v5", 8)
    assert one.of("v7", 4) == two.of("v7", 4) == one.of("v7", 3)  # steps 3 to 5 are one epoch
    assert one.of("v7", 4) != one.of("v7", 6)
    assert len(set(one.of("v7", 4))) == 3


def test_negatives_of_the_batch_are_what_its_other_videos_say_there():
    found = negatives(MANY, num_negatives=3, in_batch=True)
    for step in range(3):
        keys = found.plan.batch(step)
        said = {
            MANY[place].id: draw_captions(MANY[place], RULES, keyed_rng(3, epoch, MANY[place].id, "caption"))[0][0]
            for epoch, place in keys
        }
        for id in said:
            assert sorted(found.of(id, step)) == sorted(text for other, text in said.items() if other != id)


def test_a_batch_with_too_few_others_is_filled_up_from_all_videos():
    found = negatives(MANY, size=2, num_negatives=3, in_batch=True)
    (_, first), (_, second) = found.plan.batch(0)
    wrong = found.of(MANY[first].id, 0)
    assert wrong[0] in {caption.text for caption in MANY[second].captions} and len(wrong) == 3


def test_a_batch_keeps_its_own_captions_first():
    given = batch([["mine"], ["yours"]])
    given.ids[:] = ["v1", "v2"]
    given.caption_mask[1] = False
    found = negatives(MANY, num_negatives=2).add(given, 0)
    assert [own[0] for own in found.captions] == ["mine", "yours"] and [len(own) for own in found.captions] == [3, 3]
    assert torch.equal(found.caption_mask, torch.tensor([[True, True, True], [False, True, True]]))
    assert given.captions == [["mine"], ["yours"]]
