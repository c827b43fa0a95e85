"""What happens in a video, and when: the best classes over all windows and in each."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from twinreel import losses
from twinreel.assembly import Run
from twinreel.data.classes import ClassTable
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import load_recipe
from twinreel.recognition import recognize
from twinreel.tasks import ActionRecognition, Contrastive
from videos import make_video

SECONDS = Preprocessing(num_frames=4, frame_rate=5.0, crop_size=16)
FRAMES = Preprocessing(num_frames=4, frame_stride=2, crop_size=16)
NAMES = ("black", "dark", "grey", "bright")


class Brightness(nn.Module):
    """Class i stands for a brightness of i / 4."""

    def __init__(self, preprocessing, sharpness=40.0):
        super().__init__()
        self.preprocessing = preprocessing
        self.head_activation = "softmax"
        self.sharpness = sharpness

    def forward(self, video):
        distance = (video.mean((1, 2, 3, 4))[:, None] - torch.arange(len(NAMES)) / 4).abs()
        return (-distance * self.sharpness).softmax(1)


def loaded(preprocessing, *overrides, model=None, task=None):
    recipe = load_recipe("own_actions_small", ["data.manifest=none.csv", "data.num_workers=0", *overrides])
    own = ActionRecognition(loss=losses.LOSSES["cross_entropy"], classes=ClassTable(NAMES))
    model = (model or Brightness(preprocessing)).eval()
    return Run(folder="a run", checkpoint="none", recipe=recipe, model=model, task=task or own)


def stairs(path, levels, frames_each=8):
    """A video at 10 frames a second whose brightness is `levels[i] / 4` for 8 frames each."""

    def picture(number, size):
        return np.full((size[1], size[0], 3), round(levels[number // frames_each] * 255 / 4), np.uint8)

    return make_video(path, num_frames=len(levels) * frames_each, frame_rate=10, size=(48, 48), picture=picture)


@pytest.mark.parametrize("preprocessing", [SECONDS, FRAMES])
def test_each_window_is_named_with_its_seconds(tmp_path, preprocessing):
    path = stairs(tmp_path / "a.mp4", [0, 3, 3, 1])
    [found] = recognize(loaded(preprocessing), [path])
    assert found.video == str(path) and found.repeated_frames == 0
    assert [window.classes[0].name for window in found.windows] == ["black", "bright", "bright", "dark"]
    spans = [(window.start_seconds, window.end_seconds) for window in found.windows]
    assert spans == [pytest.approx(pair) for pair in [(0, 0.8), (0.8, 1.6), (1.6, 2.4), (2.4, 3.2)]]
    assert found.classes[0].name == "bright" and len(found.classes) == 4
    for item in found.classes:  # the mean of the windows
        own = [next(other.score for other in w.classes if other.name == item.name) for w in found.windows]
        assert item.score == pytest.approx(sum(own) / 4)
    assert sum(item.score for item in found.classes) == pytest.approx(1)


def test_windows_are_combined_as_the_run_says(tmp_path):
    path = stairs(tmp_path / "a.mp4", [0, 0, 3])
    [mean] = recognize(loaded(SECONDS), [path])
    [highest] = recognize(loaded(SECONDS, "eval.combine_views=max"), [path])
    assert dict((item.name, item.score) for item in mean.classes)["bright"] == pytest.approx(1 / 3, abs=0.01)
    assert dict((item.name, item.score) for item in highest.classes)["bright"] > 0.9


@pytest.mark.parametrize("preprocessing", [SECONDS, FRAMES])
def test_stride_top_and_several_videos(tmp_path, preprocessing):
    paths = [stairs(tmp_path / "a.mp4", [0, 3, 3, 1]), stairs(tmp_path / "b.mp4", [2, 2])]
    said = []
    found = recognize(
        loaded(preprocessing, "eval.batch_size=3"), paths, top=2, stride_seconds=0.4,
        report=lambda done, total: said.append((done, total)),
    )  # fmt: skip
    assert [len(item.windows) for item in found] == [7, 3] and said == [(1, 2), (2, 2)]
    assert [window.start_seconds for window in found[0].windows] == pytest.approx([0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4])
    assert all(len(window.classes) == 2 for item in found for window in item.windows)
    assert found[1].classes[0].name == "grey" and len(found[1].classes) == 2


@pytest.mark.parametrize("preprocessing", [SECONDS, FRAMES])
def test_a_video_shorter_than_a_window_has_one(tmp_path, preprocessing):
    path = stairs(tmp_path / "a.mp4", [2], frames_each=3)
    [found] = recognize(loaded(preprocessing), [path])
    assert len(found.windows) == 1 and found.windows[0].end_seconds == pytest.approx(0.3)
    assert found.classes[0].name == "grey" and found.repeated_frames == 2
    assert "1 window, 2 frames repeat the last one" in found.to_table()


def test_the_table_and_json(tmp_path):
    [found] = recognize(loaded(SECONDS), [stairs(tmp_path / "a.mp4", [0, 3])])
    lines = found.to_table().splitlines()
    assert lines[0].endswith("a.mp4  (1.60 s, 2 windows)") and len(lines) == 1 + 4 + 2
    assert lines[-1].split()[:4] == ["0.80-1.60", "s", "bright", f"{found.windows[1].classes[0].score:.3f},"]
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert found.to_json()["windows"][0]["classes"][0]["name"] == "black"


def test_what_cannot_be_named_is_said(tmp_path):
    path = stairs(tmp_path / "a.mp4", [0, 3])
    run = loaded(SECONDS)
    with pytest.raises(DataError, match=r"none\.mp4"):
        recognize(run, [path, tmp_path / "none.mp4"])
    with pytest.raises(ConfigError, match="takes a list"):
        recognize(run, str(path))
    with pytest.raises(ConfigError, match=r"stride_seconds=0: must be"):
        recognize(run, [path], stride_seconds=0)
    with pytest.raises(ConfigError, match=r"top=0"):
        recognize(run, [path], top=0)
    towers = loaded(SECONDS, task=Contrastive(loss=losses.milnce))
    with pytest.raises(ConfigError, match=r"task\.name=contrastive, it has no classes; .*--sentence TEXT"):
        recognize(towers, [path])
    broken = loaded(SECONDS, model=Brightness(SECONDS, float("nan")))
    with pytest.raises(
        DataError, match=r"a\.mp4: 2 of 2 windows have scores that are not finite \(first: 0\.00-0\.80 s"
    ):
        recognize(broken, [path])
