"""A classifier judged by several processes equals one that is judged by one, bit for bit: each view once."""

import numpy as np
import pytest
import torch
from processes import run_processes
from torch import nn

from twinreel import losses
from twinreel.data.classes import ClassTable
from twinreel.data.clip import Clip
from twinreel.distributed import world
from twinreel.errors import DataError
from twinreel.evaluation import evaluate_classification
from twinreel.models.classifier import activate, positions_mean
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection
from twinreel.tasks import ActionRecognition
from videos import make_video, textured_image

NAMES = tuple("abcdefg")
PREP = Preprocessing(num_frames=4, frame_rate=5.0, crop_size=24, short_side=32)


class Small(nn.Module):
    """A convolution and a head at every position; one that is poisoned says nonsense of one video."""

    def __init__(self, head_activation, poison=False):
        super().__init__()
        torch.manual_seed(3)
        self.preprocessing = PREP
        self.head_activation = head_activation
        self.convolution = nn.Conv3d(3, 8, 3, 2, 1)
        self.head = nn.Linear(8, len(NAMES))
        self.poison = poison
        self.clips = 0

    def forward(self, video):
        self.clips += len(video)
        features = self.convolution(video).relu().movedim(1, -1)
        scores = positions_mean(activate(self.head(features) * 20, self.head_activation))
        return scores * torch.nan if self.poison and world().rank == world().size - 1 else scores


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    listed = []
    for i in range(11):
        path = folder / f"{i}.mp4"

        def picture(number, size, i=i):
            image = textured_image(number + 40 * i, size)
            return np.clip(image.astype(int) + 12 * i - 60, 0, 255).astype(np.uint8)

        make_video(path, num_frames=14, frame_rate=10, size=(48, 36), picture=picture)
        listed.append(Clip(id=f"v{i}", video=str(path), labels=(NAMES[i % 7],)))
    return listed


def judge(rows, multi_label=False, poison=False, workers=0, **section):
    loss = losses.LOSSES["binary_cross_entropy" if multi_label else "cross_entropy"]
    task = ActionRecognition(loss=loss, classes=ClassTable(NAMES, multi_label))
    model = Small("sigmoid" if multi_label else "softmax", poison)
    values = {"num_clips": 2, "num_crops": 3, "batch_size": 12} | section
    report = evaluate_classification(
        model, task, rows, EvalSection(**values), device=torch.device("cpu"), num_workers=workers
    )
    top = [(row.id, row.rank, row.top) for row in report.classes.predictions]
    return report.to_json(predictions=True), top, model.clips


@pytest.mark.parametrize("options", [{}, {"combine_views": "max", "multi_label": True}], ids=["mean", "max"])
def test_any_number_of_processes_gives_the_same_bits_and_sees_each_view_once(rows, tmp_path, options):
    """12 rows of 6 views in batches of 2, which 3 processes cannot share out evenly; a broken one is not looked at."""
    broken = Clip(id="broken", video=str(tmp_path / "none.mp4"), labels=("a",))
    listed = [*rows[:4], broken, *rows[4:]]
    options = options | {"allow_missing": True}
    one, top, clips = judge(listed, **options)
    assert clips == 11 * 6 and [name for name, *_ in top] == [row.id for row in rows]
    assert one["protocol"]["evaluated"] == "11/12 videos" and [f["id"] for f in one["faults"]] == ["broken"]
    assert len({row["top"][0] for row in one["predictions"]}) > 3  # the model says different things
    for number in (2, 3):
        everyone = run_processes(number, lambda: judge(listed, **options))
        assert sum(own for *_, own in everyone) == clips
        for report, own_top, _ in everyone:
            assert report == one and own_top == top


def test_what_is_wrong_is_said_by_all(rows):
    def refused(listed, **options):
        mine = listed[:-1] if options.pop("cut", False) and world().rank == 1 else listed
        with pytest.raises(DataError) as error:
            judge(mine, **options)
        return str(error.value), error.value.speaker

    missing = [*rows, Clip(id="gone", video="none.mp4", labels=("a",))]
    unknown = [*rows, Clip(id="other", video=rows[0].video, labels=("h",))]
    for listed, options, words in (
        (missing, {}, "1 of 12 videos could not be read"),
        (unknown, {}, "'h' of other"),
        (rows, {"cut": True}, "processes 1 would be judged on other rows than process 0"),
        (rows, {"poison": True}, "samples have scores that are not finite: 'v2', 'v3', 'v6'"),
    ):
        said = run_processes(2, lambda: refused(listed, **options))  # noqa: B023
        assert all(words in text and speaker == "main" for text, speaker in said), said
