"""A matching model judged by several processes equals one that is judged by one, bit for bit: each pair once."""

import dataclasses

import pytest
import torch
from processes import run_processes

from matchers import Brightness, grey_rows, make_grey_videos
from twinreel import losses
from twinreel.data.clip import Caption, Clip
from twinreel.data.dataset import ViewRules
from twinreel.distributed import world
from twinreel.errors import DataError
from twinreel.evaluation import evaluate_matching, pairs, score_pairs
from twinreel.models.clipbert import clipbert_small
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection
from twinreel.tasks import VideoTextMatching
from twinreel.wordpiece import WordPiece
from videos import make_video, textured_image

CPU = torch.device("cpu")
ANSWERS = ("black", "dark", "grey", "bright")
LONG = "word " * 300  # ClipBERT defect 27: what processes sent to each other had to fit into 4096 bytes


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Seven videos, two captions each, and one that cannot be read."""
    folder = make_grey_videos(tmp_path_factory.mktemp("grey"), 7)
    listed = grey_rows(folder, range(7), lambda i: [f"n{i}", f"also n{i}.{i % 3}"])
    return [*listed[:3], Clip(id="broken " + LONG, video=LONG, captions=(Caption(text="n9"),)), *listed[3:]]


def judge(rows, task, model, workers=0, **section):
    seen = []
    values = EvalSection(**({"num_clips": 2, "batch_size": 5, "allow_missing": True} | section))
    report = evaluate_matching(
        model, task, rows, values, device=CPU, num_workers=workers, report=lambda *numbers: seen.append(numbers)
    )
    said = report.to_json(predictions=True)
    seconds = said["protocol"].pop("seconds")
    assert "pairs a second" in seconds and [done == total for done, total in seen] == [False] * (len(seen) - 1) + [True]
    return said, model.clips, sum(model.pairs.values())


def retrieval(rows, **options):
    return judge(rows, VideoTextMatching(loss=losses.LOSSES["match_cross_entropy"]), Brightness(), **options)


def choices(rows, **options):
    listed = [
        dataclasses.replace(row, captions=(), options=("n8", f"n{i}", f"n{i - 1}.2"), labels=(1,))
        for i, row in enumerate(rows)
    ]
    task = VideoTextMatching(loss=losses.LOSSES["match_cross_entropy"])
    return judge([*listed, dataclasses.replace(listed[0], id="again")], task, Brightness(), **options)


def answers(rows, **options):
    def answer(off):
        return -(off[..., None] - torch.arange(4.0)).abs()

    task = VideoTextMatching(loss=losses.LOSSES["answer_cross_entropy"], goal="question_answering", answers=ANSWERS)
    listed = [
        dataclasses.replace(row, captions=(Caption(text="far from n0"),), labels=((*ANSWERS, "white")[i % 5],),
                            answer_type="ab"[i % 2])
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return judge(listed, task, Brightness(answer, 4, scale=10.0), **options)


@pytest.mark.parametrize("what", [retrieval, choices, answers])
def test_any_number_of_processes_gives_the_same_bits_and_compares_each_pair_once(rows, what, monkeypatch):
    """8 rows of 2 clips in blocks of 2 rows, which 3 processes cannot share out evenly; one cannot be read."""
    monkeypatch.setattr(pairs, "SHARED_NUMBERS", 20)
    one, clips, compared = what(rows)
    assert clips == 7 * 2 and [fault["id"] for fault in one["faults"]] == ["broken " + LONG]
    for number in (2, 3):
        everyone = run_processes(number, lambda: what(rows))
        assert sum(own for _, own, _ in everyone) == clips and sum(own for *_, own in everyone) == compared
        assert all(report == one for report, *_ in everyone)


def test_real_scores_are_the_same_bits_with_all_pairs_and_with_some(tmp_path):
    texts = ["a red dog runs", "two blue birds sing", "the old tree", "a green hill", "a red hill"]
    listed = []
    for i in range(5):
        make_video(tmp_path / f"{i}.mp4", num_frames=12, frame_rate=10, size=(72, 48),
                   picture=lambda n, size, i=i: textured_image(3 * n + 50 * i, size))  # fmt: skip
        listed.append(Clip(id=f"v{i}", video=str(tmp_path / f"{i}.mp4")))
    prep = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=64, fit="pad")
    model = clipbert_small(vocabulary=WordPiece.build(texts, size=60), preprocessing=prep).eval()
    task = VideoTextMatching(loss=losses.LOSSES["match_cross_entropy"])
    rules = ViewRules(preprocessing=prep, num_clips=2)

    def scores(wanted):
        found = score_pairs(model, task, listed, texts, rules, wanted=wanted, device=CPU, batch_size=6)
        return torch.cat(found.scores).numpy().tobytes(), found.num_pairs, found.num_clips

    some = {"v0": [4, 1], "v3": [0], "v4": [2, 0, 1, 3]}
    for wanted, pairs_, clips in ((None, 25, 10), (some, 7, 6)):
        one = scores(wanted)
        assert one[1:] == (pairs_, clips)
        for number in (2, 3):
            assert run_processes(number, lambda: scores(wanted)) == [one] * number  # noqa: B023


def test_no_process_is_left_without_work(rows):
    """A batch that would take all videos at once is cut, because their pairs are what costs."""
    listed = [row for row in rows if row.video != LONG] + [
        dataclasses.replace(row, id=f"{row.id} {start}", start_seconds=start)
        for start in (0.2, 0.4) for row in rows if row.video != LONG
    ]  # fmt: skip
    everyone = run_processes(3, lambda: retrieval(listed, batch_size=500, num_clips=1))
    assert sorted(own for *_, own in everyone) == [5 * 14, 8 * 14, 8 * 14]


def test_what_is_wrong_is_said_by_all(rows):
    def poisoned(off):
        bad = world().rank == world().size - 1
        return torch.stack([off, off * torch.nan if bad else -off], 2)

    def refused(what, **options):
        with pytest.raises(DataError) as error:
            if what == "poison":
                task = VideoTextMatching(loss=losses.LOSSES["match_cross_entropy"])
                judge(rows, task, Brightness(poisoned))
            elif what == "other":
                retrieval(rows[:-1] if world().rank == 1 else rows)
            else:
                retrieval(rows, allow_missing=False)
        return str(error.value), error.value.speaker

    for what, words in (
        ("poison", "scores are not finite (all scores of candidate 'v2', 'v5'"),
        ("other", "processes 1 would be judged on other rows than process 0"),
        ("missing", "1 of 8 videos could not be read"),
    ):
        said = run_processes(2, lambda: refused(what))  # noqa: B023
        assert all(words in text and speaker == "main" for text, speaker in said), said
