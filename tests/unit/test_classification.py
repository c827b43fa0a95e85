"""A classifier judged: each view once, nothing substituted, chance beside every number, results by id."""

import csv
import dataclasses
import json
import sys

import av
import numpy as np
import pytest
import torch
from torch import nn

from twinreel import losses
from twinreel.data.classes import ClassTable
from twinreel.data.clip import Clip
from twinreel.data.dataset import ViewRules
from twinreel.errors import ConfigError, DataError, DependencyError
from twinreel.evaluation import (
    class_measures,
    evaluate_classification,
    evaluate_task,
    view_rules,
)
from twinreel.evaluation.classification import score_videos
from twinreel.evaluation.files import check_result_files, write_confusion, write_predictions
from twinreel.models.classifier import activate, positions_mean
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection
from twinreel.tasks import ActionRecognition

PREP = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=16)
CPU = torch.device("cpu")
NAMES = ("black", "dark", "grey", "bright", "light", "white")


class Brightness(nn.Module):
    """A classifier that sees a video's brightness: class i stands for i / 10; scores at 2 positions (left, right)."""

    def __init__(self, num_classes=6, head_activation="softmax", collapsed=False, preprocessing=PREP):
        super().__init__()
        self.preprocessing = preprocessing
        self.head_activation = head_activation
        self.num_classes = num_classes
        self.scale = nn.Parameter(torch.tensor(0.0 if collapsed else 50.0))
        self.sizes = []

    def forward(self, video):
        self.sizes.append(tuple(video.shape))
        halves = torch.stack([half.mean((1, 2, 3, 4)) for half in video.chunk(2, dim=4)], 1)
        distance = (halves[..., None] - torch.arange(self.num_classes) / 10).abs()
        logits = (-distance * self.scale)[:, :, None, None]
        if self.training:
            return logits.mean((1, 2, 3))
        return positions_mean(activate(logits, self.head_activation))


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    """Videos of even brightness i / 10, and `wide.mp4`, 16 x 48, black to the left, white in the middle."""
    folder = tmp_path_factory.mktemp("grey")

    def write(name, frame):
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream("libx264", rate=10, options={"qp": "0"})
            stream.height, stream.width = frame.shape[:2]
            stream.pix_fmt = "yuv420p"
            for _ in range(10):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))

    for i in range(6):
        write(f"{i}.mp4", np.full((16, 16, 3), round(25.5 * i), np.uint8))
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 51
    write("wide.mp4", wide)
    return folder


def rows(folder, numbers=range(6), labels=None):
    labels = labels or [NAMES[i] for i in numbers]
    return [
        Clip(id=f"v{i}", video=str(folder / f"{i}.mp4"), labels=label if isinstance(label, tuple) else (label,))
        for i, label in zip(numbers, labels, strict=True)
    ]


def task(multi_label=False, names=NAMES):
    loss = losses.LOSSES["binary_cross_entropy" if multi_label else "cross_entropy"]
    return ActionRecognition(loss=loss, classes=ClassTable(names, multi_label))


def judge(model, listed, multi_label=False, **section):
    values = {"num_clips": 2} | section
    return evaluate_classification(model, task(multi_label), listed, EvalSection(**values), device=CPU)


def test_a_perfect_model_is_perfect_with_chance_beside_it(grey):
    report = judge(Brightness(), rows(grey))
    metrics = report.metrics
    assert [metrics[f"{name}_accuracy"] for name in ("top_1", "top_5", "mean_class")] == [1.0, 1.0, 1.0]
    assert metrics["chance/top_1_accuracy"] == pytest.approx(1 / 6)
    assert metrics["chance/top_5_accuracy"] == pytest.approx(5 / 6)
    assert metrics["majority/top_1_accuracy"] == pytest.approx(1 / 6)
    table = report.to_table()
    for words in ("top 1", "top 5", "mean class", "chance", "largest class", "most often taken for", "bright",
                  "2 windows (uniform) x 1 crop a video, combined by mean", "softmax at every pooled position",
                  "2 at 5 a second", "center 16", "count against", "evaluated: 6/6",
                  "classes: 6, of which 6 occur"):  # fmt: skip
        assert words in table, words
    assert report.headline().startswith("top 1 100.0 (chance 16.7, largest class 16.7); top 5 100.0; mean class 100.0;")
    assert report.headline().endswith("6/6 videos") and "loss 0.0" in report.headline()


def test_a_collapsed_model_is_right_nowhere(grey):  # B079
    report = judge(Brightness(collapsed=True), rows(grey))
    assert report.metrics["top_1_accuracy"] == report.metrics["top_5_accuracy"] == 0.0
    assert {row.rank for row in report.classes.predictions} == {6}
    assert all(row.top[0][0] != row.labels[0] for row in report.classes.predictions)
    assert int(report.classes.confusion.diagonal().sum()) == 0
    assert report.metrics["loss"] == pytest.approx(np.log(6), rel=1e-5)


def test_results_are_by_id_class_and_row(grey):
    wrong = rows(grey, range(6), ["black", "black", "grey", "bright", "light", "white"])
    report = judge(Brightness(), wrong)
    assert report.metrics["top_1_accuracy"] == pytest.approx(5 / 6)
    assert report.metrics["mean_class_accuracy"] == pytest.approx((0.5 + 4) / 5)  # nothing is `dark`
    assert report.metrics["majority/top_1_accuracy"] == pytest.approx(2 / 6)
    assert report.classes.per_class == {0: 0.5, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}
    assert report.classes.confusion[0].tolist() == [1, 1, 0, 0, 0, 0]
    assert [row.id for row in report.classes.predictions] == [row.id for row in wrong]
    one = report.classes.predictions[1]
    assert one.labels == ("black",) and one.rank == 2 and one.top[0][0] == "dark" and len(one.top) == 5
    assert "dark (1)" in report.to_table()
    values = report.to_json()
    assert json.loads(json.dumps(values)) == values and "predictions" not in values
    assert values["classes"][0] == {"name": "black", "rows": 2, "accuracy": 0.5}
    assert values["classes"][1] == {"name": "dark", "rows": 0, "accuracy": None}
    assert len(report.to_json(predictions=True)["predictions"]) == 6


def test_the_loss_is_that_of_the_combined_scores(grey):
    model, listed = Brightness(), rows(grey)
    report = judge(model, listed, num_clips=3)
    scores = score_videos(model.eval(), task(), listed, ViewRules(preprocessing=PREP, num_clips=3), device=CPU,
                          batch_size=4).values  # fmt: skip
    expected = -scores[range(6), range(6)].log().mean()
    assert report.metrics["loss"] == pytest.approx(float(expected))


@pytest.mark.parametrize("num_classes", [1, 3, 6])
def test_what_can_be_a_best_metric_is_what_is_measured(grey, num_classes):  # B078
    one = task(names=NAMES[:num_classes])
    listed, section = rows(grey, range(num_classes)), EvalSection(num_clips=1)
    report = evaluate_classification(Brightness(num_classes), one, listed, section, device=CPU)
    assert class_measures(one) == tuple(name for name in report.metrics if "/" not in name and name != "loss")
    several_labels = judge(Brightness(head_activation="sigmoid"), several(grey), multi_label=True)
    assert class_measures(task(True)) == tuple(name for name in list(several_labels.metrics)[:1])


def test_a_head_without_activation_has_no_loss(grey):
    report = judge(Brightness(head_activation="none"), rows(grey))
    assert "loss" not in report.metrics and report.metrics["top_1_accuracy"] == 1.0
    assert "logits, averaged over positions" in report.to_table() and "loss" not in report.headline()


def test_each_view_once_whatever_the_batch_size(grey):
    listed = [*rows(grey), Clip(id="wide", video=str(grey / "wide.mp4"), labels=("grey",))]
    rules = ViewRules(preprocessing=PREP, num_clips=2, num_crops=3)
    model = Brightness().eval()
    results = []
    for size, workers in ((1, 0), (4, 0), (13, 2), (100, 0)):
        model.sizes.clear()
        found = score_videos(model, task(), listed, rules, device=CPU, batch_size=size, num_workers=workers)
        assert found.values.shape == (7, 6) and found.values.dtype == torch.float64
        assert sum(shape[0] for shape in model.sizes) == 7 * 6
        assert max(shape[0] for shape in model.sizes) <= max(size, 1)
        results.append(found.values)
    assert all(torch.equal(result, results[0]) for result in results)


def test_views_are_combined_as_the_section_says(grey):  # B080
    """Three crops of a video that is black, then 51 of 255, then black: two crops say black, one says grey."""
    listed = [Clip(id="wide", video=str(grey / "wide.mp4"), labels=("grey",))]
    mean = judge(Brightness(), listed, num_clips=1, num_crops=3)
    assert mean.classes.predictions[0].top[0][0] == "black"
    highest = judge(Brightness(), listed, num_clips=1, num_crops=3, combine_views="max")
    assert dict(highest.classes.predictions[0].top)["grey"] > 0.9
    assert judge(Brightness(), listed, num_clips=1).classes.predictions[0].top[0][0] == "grey"
    assert "combined by max" in highest.to_table() and "1 window (uniform) x 3 crops" in highest.to_table()


def test_a_larger_crop_is_judged_on_request(grey):
    model = Brightness()
    judge(model, rows(grey), crop_size=24)
    assert {shape[3:] for shape in model.sizes} == {(24, 24)}
    assert view_rules(PREP, EvalSection(crop_size=24)).preprocessing.short_side == 24
    published = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=224, short_side=256)
    rules = view_rules(published, EvalSection(crop_size=256))
    assert (rules.preprocessing.crop_size, rules.preprocessing.short_side) == (256, 256)
    assert view_rules(published, EvalSection(crop_size=160)).preprocessing.short_side == 256
    padded = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=16, fit="pad")
    assert view_rules(padded, EvalSection(crop_size=24)).preprocessing.crop_size == 24


def test_an_unreadable_video_is_not_substituted(grey, tmp_path):
    listed = [Clip(id="broken", video=str(tmp_path / "none.mp4"), labels=("dark",)), *rows(grey)]
    with pytest.raises(DataError, match=r"1 of 7 videos could not be read; scores would be over 6(?s:.)*none.mp4"):
        judge(Brightness(), listed)
    report = judge(Brightness(), listed, allow_missing=True)
    assert report.protocol["evaluated"] == "6/7 videos" and [fault.id for fault in report.faults] == ["broken"]
    assert report.metrics["top_1_accuracy"] == 1.0 and len(report.classes.predictions) == 6
    with pytest.raises(DataError):
        judge(Brightness(), listed[:1], allow_missing=True)
    with pytest.raises(DataError, match=r"no row to evaluate on; look at eval\.split"):
        judge(Brightness(), [])


def test_scores_that_are_not_finite_are_refused_by_name(grey):
    model = Brightness()
    model.scale.data.fill_(float("nan"))
    with pytest.raises(DataError, match="3 of 3 samples have scores that are not finite: 'v0', 'v1', 'v2'"):
        judge(model, rows(grey, range(3)))


def test_labels_that_are_no_classes_are_found_before_anything_is_read(grey, tmp_path):
    with pytest.raises(DataError, match=r"1 of 2 have a label .* 'drak' of v1; did you mean 'dark'"):
        judge(Brightness(), rows(tmp_path, range(2), ["black", "drak"]))
    with pytest.raises(DataError, match="exactly one class"):
        judge(Brightness(), rows(tmp_path, range(1), [("black", "dark")]))


def test_evaluation_leaves_the_model_in_its_mode(grey):
    model = Brightness().train()
    judge(model, rows(grey, range(2)))
    assert model.training
    report = evaluate_task(model.eval(), task(), rows(grey, range(2)), EvalSection(num_clips=1), device=CPU)
    assert not model.training and report.metrics["top_1_accuracy"] == 1.0


def test_a_users_model_that_returns_logits_is_given_an_activation(grey):
    model = Brightness(head_activation="none")
    del model.head_activation
    model.forward = lambda video: -(video.mean((1, 2, 3, 4))[:, None] - torch.arange(6) / 10).abs() * 50
    report = judge(model, rows(grey))
    assert report.metrics["top_1_accuracy"] == 1.0 and report.metrics["loss"] < 0.1
    assert "softmax of the model's logits" in report.to_table()


# --- several labels a row ---


def several(grey):
    return rows(grey, range(6), [("black", "dark"), ("dark",), ("grey",), (), ("light",), ("light", "black")])


@pytest.mark.parametrize("how", ["mean", "max"])
def test_several_labels_are_judged_by_average_precision(grey, how):
    report = judge(Brightness(head_activation="sigmoid"), several(grey), multi_label=True, combine_views=how)
    metrics = report.metrics
    assert 0 < metrics["mean_average_precision"] < 1 and metrics["loss"] > 0
    assert metrics["chance/mean_average_precision"] == pytest.approx((2 + 2 + 1 + 2) / 4 / 6)
    assert set(report.classes.per_class) == {0, 1, 2, 4} and report.classes.confusion is None
    assert "6, of which 4 occur; the 2 without a positive are left out of the mean" in report.to_table()
    assert report.headline().startswith("mAP ") and "AP" in report.to_table() and "top 1" not in report.to_table()
    assert report.classes.predictions[3].rank is None and report.classes.predictions[3].labels == ()
    assert report.classes.predictions[0].rank == 1
    assert report.to_json()["classes"][3] == {"name": "bright", "rows": 0, "average_precision": None}


def test_equal_scores_of_several_labels_are_at_chance(grey):
    report = judge(Brightness(head_activation="sigmoid", collapsed=True), several(grey), multi_label=True)
    chance = report.metrics["chance/mean_average_precision"]
    assert report.metrics["mean_average_precision"] == pytest.approx(chance, rel=1e-12)


# --- files ---


def test_predictions_are_written_by_id(grey, tmp_path):
    path = tmp_path / "predictions.csv"
    write_predictions(judge(Brightness(), rows(grey, range(3))), path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [line["id"] for line in lines] == ["v0", "v1", "v2"]
    assert lines[1]["label"] == lines[1]["class_1"] == "dark" and lines[1]["rank"] == "1"
    assert float(lines[1]["score_1"]) > float(lines[1]["score_2"]) and lines[1]["video"].endswith("1.mp4")
    write_predictions(judge(Brightness(head_activation="sigmoid"), several(grey), multi_label=True), path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert lines[0]["label"] == "black|dark" and lines[3]["label"] == lines[3]["rank"] == ""


def test_the_confusion_matrix_is_written_as_csv(grey, tmp_path):
    report = judge(Brightness(), rows(grey, range(6), ["black", "black", "grey", "bright", "light", "white"]))
    write_confusion(report, tmp_path / "confusion.csv")
    lines = list(csv.reader((tmp_path / "confusion.csv").read_text().splitlines()))
    assert lines[0] == ["right / predicted", *NAMES] and lines[1] == ["black", "1", "1", "0", "0", "0", "0"]
    several_labels = judge(Brightness(head_activation="sigmoid"), several(grey), multi_label=True)
    with pytest.raises(ConfigError, match="one label a row"):
        write_confusion(several_labels, tmp_path / "no.csv")
    with pytest.raises(ConfigError, match="these are scores of retrieval"):
        write_predictions(dataclasses.replace(report, classes=None), tmp_path / "no.csv")


def test_the_confusion_matrix_is_drawn_with_the_extra(grey, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    write_confusion(judge(Brightness(), rows(grey)), tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.png"]


def test_names_of_files_are_looked_at_before_anything_is_computed(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--predictions .*: the name must end in \.csv"):
        check_result_files(tmp_path / "a.json", None)
    with pytest.raises(ConfigError, match=r"--confusion .*: the name must end in \.csv or \.png"):
        check_result_files(None, tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match=r"there is no folder .*none; make it first"):
        check_result_files(tmp_path / "none" / "a.csv", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"pip install 'twinreel\[plots\]', or name a \.csv"):
        check_result_files(None, tmp_path / "a.png")
    check_result_files(tmp_path / "a.csv", tmp_path / "b.csv")
