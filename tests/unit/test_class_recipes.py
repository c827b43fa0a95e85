"""Recipes of classifiers whose keys go together badly, or whose weights say how videos are read."""

import pytest
import torch
from small_runs import class_recipe, labelled, weights_of

from twinreel.assembly import build_model, build_task, load_run, training_rows
from twinreel.check import check_recipe
from twinreel.checkpoint import find_checkpoint
from twinreel.data.transforms import network_input
from twinreel.errors import ConfigError, DataError
from twinreel.evaluation import evaluate
from twinreel.models import create_model
from twinreel.models.importing import import_weights, inspect_weights
from twinreel.optim import layers_by_depth, parameter_groups
from twinreel.parts import build_parts, read_batches
from twinreel.training import train
from twinreel.trial import try_steps

CPU = torch.device("cpu")
CONFIG = """
MODEL: {ARCH: x3d, MODEL_NAME: X3D, NUM_CLASSES: 2}
DATA: {NUM_FRAMES: 8, SAMPLING_RATE: 4, TRAIN_CROP_SIZE: 64, TEST_CROP_SIZE: 64, MEAN: [0.5, 0.5, 0.5],
  STD: [0.2, 0.2, 0.2], TRAIN_JITTER_SCALES: [80, 96], USE_OFFSET_SAMPLING: true}
TEST: {NUM_ENSEMBLE_VIEWS: 2, NUM_SPATIAL_CROPS: 1}
TRAIN: {DATASET: kinetics}
"""


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    labelled(folder)
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An X3D file whose configuration says how it reads videos, as PySlowFast saves it and imported."""
    folder = tmp_path_factory.mktemp("imported")
    torch.manual_seed(0)
    state = create_model("x3d_s", num_classes=2).state_dict()
    torch.save({"epoch": 1, "model_state": state, "cfg": CONFIG}, folder / "X3D_S.pyth")
    return folder / "X3D_S.pyth", import_weights(folder / "X3D_S.pyth", model="x3d_s").out


@pytest.mark.parametrize("which", [0, 1], ids=["pyth", "imported"])
def test_weights_say_how_videos_are_read_where_the_recipe_does_not(videos, imported, which):
    model = f"model={{name: x3d_s, weights: '{imported[which]}', weights_scope: backbone}}"
    for more, frames in (((), 8), (("model.preprocessing.num_frames=13",), 13)):
        recipe = class_recipe(videos, model, *more)
        network = build_model(recipe, build_task(recipe, rows=training_rows(recipe)), ())
        prep = network.preprocessing
        assert (prep.num_frames, prep.frame_stride, prep.crop_size, prep.short_side) == (frames, 4, 64, 80)
        assert prep.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.multi_label=true", "task.loss=cross_entropy"], "is for one class a clip; .*binary_cross_entropy"),
        (["data.mix_probability=0.5"], r"data\.mix_probability does nothing without data\.mixup or data\.cutmix"),
        (
            ["train.precise_bn_batches=2", "train.batch_norm=frozen"],
            "does nothing without batch norms that are",
        ),
        (["task.max_words=10"], r"task\.max_words goes with task\.name=contrastive"),
    ],
)
def test_keys_that_would_do_nothing_or_harm(videos, overrides, words):
    with pytest.raises(ConfigError, match=words):
        class_recipe(videos, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.weights_scope=backbone"], r"weights_scope=backbone, but there are no weights"),
        (["train.batch_norm=frozen"], "frozen with random weights"),
        (["model={name: slowfast_small, preprocessing: {num_frames: 8, crop_size: 64, short_side: 64}}",
          "eval.crop_size=32"], "fewer than the"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_step(videos, tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        train(class_recipe(videos, *overrides), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_trial_of_a_recipe_that_decays_in_steps(videos):
    recipe = class_recipe(
        videos, "optim.decay=steps", "optim.decay_epochs=[0, 90]", "optim.decay_factors=[1, 0.1]",
        "train.num_steps=null", "train.num_epochs=100",
    )  # fmt: skip
    assert len(try_steps(recipe, 20).losses) == 20


def test_precise_statistics_are_of_clips_that_can_be_read_and_of_the_averaged_weights(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    labelled(videos)
    victim = (videos / "train.csv").read_text().splitlines()[4].split(",")[0]
    with open(victim, "r+b") as file:
        file.truncate(100)
    recipe = class_recipe(
        videos, "train.num_steps=2", "optim.warmup_steps=1", "train.precise_bn_batches=3", "train.ema_decay=0.5",
        "data.max_faults=0.5",
    )  # fmt: skip
    train(recipe, tmp_path / "run", quiet=True)
    checkpoint = find_checkpoint(tmp_path / "run")[0]
    found = weights_of(tmp_path / "run", averaged=True)
    parts = build_parts(recipe, CPU, checkpoint)
    parts.model.load_state_dict(found)
    means = []
    unreadable = 0
    for step in (2, 3, 4):
        (batch,) = read_batches(recipe, parts, step)
        unreadable += int((~batch.valid).sum())
        video = network_input(batch, parts.model.preprocessing, CPU)[batch.valid]
        means.append(parts.model.body[0](video).mean((0, 2, 3, 4)))
    assert unreadable > 0
    assert torch.allclose(found["body.1.running_mean"], torch.stack(means).mean(0), atol=1e-5)


@pytest.mark.parametrize(("name", "least"), [("s3dg_small", 12), ("slowfast_small", 5), ("x3d_small", 5)])
def test_layer_decay_reaches_every_layer(name, least):
    model = create_model(name, num_classes=3)
    assert len(layers_by_depth(model)) >= least
    groups = parameter_groups(model, learning_rate=1.0, learning_rates={}, weight_decay=0.1, layer_decay=0.5)
    rates = sorted({group["lr"] for group in groups})
    assert rates[-1] == 1.0 and len(rates) >= least
    head = {id(p) for key, p in model.named_parameters() if key.startswith(model.head_prefixes)}
    assert all(group["lr"] == 1.0 for group in groups for p in group["params"] if id(p) in head)


def test_names_of_numbers_that_begin_at_1(videos, tmp_path):
    (tmp_path / "names.txt").write_text("1 ApplyEyeMakeup\n2 Archery\n3 Basketball\n")
    lines = [
        line.replace(",a", " 1").replace(",b", " 3") for line in (videos / "train.csv").read_text().splitlines()[1:]
    ]
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    recipe = class_recipe(
        videos, f"data.manifest={tmp_path / 'list.txt'}", f"data.class_names={tmp_path / 'names.txt'}",
        f"eval.manifest={tmp_path / 'list.txt'}", f"eval.class_names={tmp_path / 'names.txt'}",
    )  # fmt: skip
    train(recipe, tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run")
    assert run.task.classes.names == ("ApplyEyeMakeup", "Archery", "Basketball")


def test_numbers_are_places_among_named_classes_and_that_is_said(videos, tmp_path):
    train(class_recipe(videos), tmp_path / "run", quiet=True)
    path = (videos / "test.csv").read_text().splitlines()[1].split(",")[0]
    (tmp_path / "places.csv").write_text(f"path,label\n{path},0\n")
    report = evaluate(tmp_path / "run", manifest=str(tmp_path / "places.csv"))
    assert "the labels are numbers: places among the classes, 0 = a" in report.protocol["classes"]


@pytest.mark.slow
def test_two_networks_of_resnet_101_have_the_same_shapes(tmp_path):
    state = create_model("slowfast_16x8_r101", num_classes=5).state_dict()
    torch.save(state, tmp_path / "net.pth")
    found = inspect_weights(tmp_path / "net.pth")
    assert found.model is None and set(found.fits) == {"slowfast_16x8_r101", "slowfast_8x8_r101"}
    torch.save(state, tmp_path / "SLOWFAST_8x8_R101.pyth")
    assert inspect_weights(tmp_path / "SLOWFAST_8x8_R101.pyth").model == "slowfast_8x8_r101"
    model = create_model("slowfast_8x8_r101", weights=state)
    assert model.num_classes == 5


def test_what_is_odd_about_the_rows_is_said_before_training(videos, tmp_path, capsys):
    lines = (videos / "train.csv").read_text().splitlines()
    numbered = [lines[0], *(line.replace(",a", ",1").replace(",b", ",2") for line in lines[1:])]
    (tmp_path / "one.csv").write_text("\n".join(numbered) + "\n")
    recipe = class_recipe(videos, f"data.manifest={tmp_path / 'one.csv'}", f"eval.manifest={tmp_path / 'one.csv'}")
    warnings = check_recipe(recipe, tmp_path / "sheet.png").warnings
    assert "1 of 3 classes have no training row (0); do the labels begin at 1?" in warnings
    assert "12 of the 12 rows to judge by are training rows too: scores will flatter" in warnings
    train(recipe, tmp_path / "run")
    said = capsys.readouterr().err
    assert "do the labels begin at 1?" in said and "scores will flatter" in said and "cross_entropy" in said
    assert evaluate(tmp_path / "run").protocol["trained_on"] == "12 of these 12 rows"
    assert "trained_on" not in evaluate(tmp_path / "run", manifest=str(numbered_tests(videos, tmp_path))).protocol


def numbered_tests(videos, folder):
    lines = (videos / "test.csv").read_text().splitlines()
    (folder / "test.csv").write_text("\n".join([lines[0], *(line[:-1] + "1" for line in lines[1:])]) + "\n")
    return folder / "test.csv"


@pytest.mark.parametrize(("label", "words"), [("", "1 have none"), ('"[""a"", ""b""]"', "1 several")])
def test_a_training_row_without_one_class_is_named_before_training(videos, tmp_path, label, words):
    lines = (videos / "train.csv").read_text().splitlines()
    lines[5] = f"{lines[5].split(',')[0]},{label}"
    (tmp_path / "odd.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"a clip has exactly one class, but of 12 rows {words} \(first: "):
        train(class_recipe(videos, f"data.manifest={tmp_path / 'odd.csv'}"), tmp_path / "run", quiet=True)


def test_a_misspelt_column_is_named(videos, tmp_path):
    text = (videos / "train.csv").read_text().replace("label", "lable", 1)
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(DataError, match=r"no row has a label; .*columns not used: lable"):
        train(class_recipe(videos, f"data.manifest={tmp_path / 'odd.csv'}"), tmp_path / "run", quiet=True)


def test_unreadable_rows_to_judge_by_are_found_by_check(videos, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    (tmp_path / "test.csv").write_text(f"path,label\n{tmp_path / 'broken.mp4'},a\n")
    result = check_recipe(class_recipe(videos, f"eval.manifest={tmp_path / 'test.csv'}"), tmp_path / "sheet.png")
    assert any(text.startswith("to judge by: ") and "broken.mp4" in text for text in result.warnings)
