"""PySlowFast's YAMLs become recipes that say the same, and every key is accounted for."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from founding_yamls import SEED_ARTICLE, SHAPES, mvit_yaml, resnet_yaml, slowfast_yaml
from twinreel.errors import ConfigError
from twinreel.founding_configs import convert_config
from twinreel.founding_configs.clips import rand_augment
from twinreel.founding_configs.keys import FOREIGN, GROUPS, KEYS, OPTIONAL, kind_of
from twinreel.founding_configs.network import NETWORKS
from twinreel.founding_configs.settings import read_settings
from twinreel.founding_configs.values import parse_value
from twinreel.models import CLASSIFIERS
from twinreel.optim import build_schedule
from twinreel.recipe import load_recipe

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
PLAIN = {"zero_init_residual": True}
# What each published shape is in twinreel: the model and the options that differ from its own.
MODELS = {
    "C2D_8x8_R50": ("c2d_8x8_r50", PLAIN),
    "C2D_8x8_R50_IN1K": ("c2d_8x8_r50", PLAIN),
    "C2D_NLN_8x8_R50": ("c2d_8x8_r50", PLAIN | {"non_local": "softmax"}),
    "I3D_8x8_R50": ("i3d_8x8_r50", PLAIN),
    "I3D_8x8_R50_IN1K": ("i3d_8x8_r50", PLAIN),
    "I3D_NLN_8x8_R50": ("i3d_nln_8x8_r50", PLAIN),
    "I3D_NLN_8x8_R50_IN1K": ("i3d_nln_8x8_r50", PLAIN),
    "SLOW_4x16_R50": ("slow_4x16_r50", PLAIN),
    "SLOW_8x8_R50": ("slow_8x8_r50", PLAIN),
    "SLOW_NLN_4x16_R50": ("slow_4x16_r50", PLAIN | {"non_local": "dot_product"}),
    "SLOW_NLN_8x8_R50": ("slow_8x8_r50", PLAIN | {"non_local": "dot_product"}),
    "SLOWFAST_4x16_R50": ("slowfast_4x16_r50", PLAIN),
    "SLOWFAST_8x8_R50": ("slowfast_8x8_r50", PLAIN),
    "SLOWFAST_8x8_R50_stepwise": ("slowfast_8x8_r50", PLAIN),
    "SLOWFAST_8x8_R50_stepwise_multigrid": ("slowfast_8x8_r50", PLAIN),
    "SLOWFAST_NLN_4x16_R50": ("slowfast_4x16_r50", PLAIN | {"non_local": "dot_product"}),
    "SLOWFAST_NLN_8x8_R50": ("slowfast_8x8_r50", PLAIN | {"non_local": "dot_product", "fusion_kernel": 5}),
    "c2/C2D_NOPOOL_8x8_R50": ("c2d_nopool_8x8_r50", PLAIN),
    "c2/SLOWFAST_8x8_R101_101_101": (
        "slowfast_8x8_r101",
        PLAIN | {"slow_temporal_blocks": 23, "fast_temporal_blocks": 23},
    ),
    "c2/SLOWFAST_8x8_R101_50_101": (
        "slowfast_8x8_r101",
        PLAIN | {"slow_temporal_blocks": 6, "fast_temporal_blocks": 23},
    ),
    "c2/SLOWFAST_8x8_R101_50_50": ("slowfast_8x8_r101", PLAIN | {"slow_temporal_blocks": 6, "fast_temporal_blocks": 6}),
    "c2/SLOWFAST_16x8_R101_50_50": (
        "slowfast_16x8_r101",
        PLAIN | {"slow_temporal_blocks": 6, "fast_temporal_blocks": 6},
    ),
    "c2/SLOWFAST_NLN_16x8_R101_50_50": (
        "slowfast_16x8_r101",
        PLAIN | {"slow_temporal_blocks": 6, "fast_temporal_blocks": 6, "non_local": "dot_product"},
    ),
    "X3D_XS": ("x3d_xs", {}),
    "X3D_S": ("x3d_s", {}),
    "X3D_M": ("x3d_m", {}),
    "X3D_L": ("x3d_l", {}),
    "MVITv2_S_16x4": ("mvitv2_s_16x4", {"drop_path": 0.2}),
}


def converted(tmp_path, text, *overrides):
    """The conversion, and the recipe that load_recipe makes of what was written."""
    path = tmp_path / "founding.yaml"
    path.write_text(text, encoding="utf-8")
    result = convert_config(path, overrides)
    (tmp_path / "recipe.yaml").write_text(result.yaml, encoding="utf-8")
    return result, load_recipe(tmp_path / "recipe.yaml")


def refused(tmp_path, text, *overrides):
    """The words of the refusal, a line a problem."""
    path = tmp_path / "founding.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        convert_config(path, overrides)
    return str(error.value)


def fates(result):
    return {row["key"]: (row["fate"], row["text"]) for row in result.rows}


def written_keys(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from written_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_published_shape_becomes_a_recipe(tmp_path, name):
    text = SHAPES[name]
    given = yaml.safe_load(text)
    result, recipe = converted(tmp_path, text)
    common = ("name", "num_classes", "dropout", "head_activation", "preprocessing", "weights")
    options = {key: value for key, value in result.values["model"].items() if key not in common}
    assert (recipe.model.name, options) == MODELS[name]
    assert (recipe.model.num_classes, recipe.model.options["dropout"]) == (400, 0.5)
    data, prep = given["DATA"], recipe.model.preprocessing
    assert (prep.num_frames, prep.frame_stride) == (data["NUM_FRAMES"], None)
    assert prep.frame_rate == 30 / data["SAMPLING_RATE"]
    assert prep.crop_size == data["TRAIN_CROP_SIZE"]
    assert prep.mean == pytest.approx((0.45,) * 3) and prep.std == pytest.approx((0.225,) * 3)
    assert (recipe.task.name, recipe.task.loss, recipe.task.multi_label) == (
        "action_recognition",
        "cross_entropy",
        False,
    )
    assert (recipe.train.num_epochs, recipe.train.seed) == (given["SOLVER"]["MAX_EPOCH"], 0)
    assert recipe.optim.learning_rate == float(given["SOLVER"]["BASE_LR"])
    assert recipe.optim.weight_decay == float(given["SOLVER"]["WEIGHT_DECAY"])
    assert (recipe.eval.crop_size or prep.crop_size) == data["TEST_CROP_SIZE"]
    assert {row["key"] for row in result.rows} == set(written_keys(given))  # nothing goes without a word
    lost = {"TRAIN.CHECKPOINT_INFLATE"} if name.endswith("IN1K") else set()
    lost |= {"MULTIGRID.SHORT_CYCLE", "MULTIGRID.LONG_CYCLE"} if "multigrid" in name else set()
    assert {key for key, (fate, _) in fates(result).items() if fate == "lost"} == lost


def test_slowfast_in_full(tmp_path):
    _, recipe = converted(tmp_path, SHAPES["SLOWFAST_8x8_R50"])
    optim, train, evaluation, data = recipe.optim, recipe.train, recipe.eval, recipe.data
    assert (optim.name, optim.momentum, optim.nesterov, optim.dampening) == ("sgd", 0.9, True, 0.0)
    assert (optim.decay_one_dimensional, optim.norm_weight_decay) == (True, 0.0)
    assert (optim.warmup_epochs, optim.warmup_start_learning_rate, optim.warmup_target) == (34.0, 0.01, "schedule")
    assert (optim.decay, optim.cosine_after_warmup, optim.final_learning_rate) == ("cosine", False, 0.0)
    assert (train.global_batch_size, train.micro_batch_size, train.precise_bn_batches) == (64, None, 200)
    assert (train.precision, train.save_every, train.batch_norm) == ("fp32", "1 epochs", "per_process")
    assert (evaluation.num_clips, evaluation.num_crops, evaluation.windows) == (10, 3, "slowfast")
    assert (evaluation.crop_size, recipe.model.preprocessing.short_side) == (256, 256)
    assert (evaluation.every, evaluation.combine_views, evaluation.batch_size) == ("10 epochs", "mean", 8)
    assert (data.crop, data.short_side, data.flip, data.repeated_augmentation) == ("random", (256, 320), 0.5, 1)
    assert (data.mixup, data.cutmix, data.rand_augment, data.random_erasing) == (0, 0, None, 0)


def test_mvit_in_full(tmp_path):
    result, recipe = converted(tmp_path, mvit_yaml())
    optim, data = recipe.optim, recipe.data
    assert (optim.name, optim.betas, optim.decay_one_dimensional) == ("adamw", (0.9, 0.999), False)
    assert (optim.clip_norm, optim.clip_value, optim.cosine_after_warmup) == (1.0, None, True)
    assert (optim.final_learning_rate, optim.warmup_start_learning_rate) == (1e-6, 1e-6)
    assert (data.crop, data.crop_area, data.crop_aspect) == ("resized", (0.08, 1.0), (0.75, 1.3333))
    assert data.rand_augment == {"num_ops": 4, "magnitude": 7.0, "magnitude_std": 0.5}
    assert (data.random_erasing, data.repeated_augmentation) == (0.25, 2)
    assert (data.mixup, data.cutmix, data.mix_probability, data.mix_switch_probability) == (0.8, 1.0, 1.0, 0.5)
    assert recipe.task.options["label_smoothing"] == 0.1
    assert recipe.train.global_batch_size == 32  # 16 clips, 2 views of each
    assert (recipe.eval.num_clips, recipe.eval.num_crops, recipe.eval.windows) == (5, 1, "slowfast_offset")
    # One crop: the center of the short side that training's jitter begins with.
    assert (recipe.model.preprocessing.short_side, recipe.eval.crop_size) == (256, None)
    assert "SOLVER.COSINE_AFTER_WARMUP stands twice" in result.account
    assert fates(result)["SOLVER.MOMENTUM"] == ("dropped", "adamw has none")


def test_x3d_evaluates_on_its_own_short_side(tmp_path):
    _, recipe = converted(tmp_path, SHAPES["X3D_S"])
    prep = recipe.model.preprocessing
    assert (prep.num_frames, prep.frame_rate, prep.crop_size, prep.short_side) == (13, 5.0, 160, 182)
    assert (recipe.eval.crop_size, recipe.data.short_side) == (182, (182, 228))


GOLDEN_YAMLS = {
    "configs/Kinetics/SLOWFAST_8x8_R50.yaml": "SLOWFAST_8x8_R50",
    "configs/Kinetics/SLOWFAST_8x8_R50_stepwise.yaml": "SLOWFAST_8x8_R50_stepwise",
    "configs/Kinetics/C2D_8x8_R50_IN1K.yaml": "C2D_8x8_R50_IN1K",
    "configs/Kinetics/X3D_S.yaml": "X3D_S",
    "configs/Kinetics/MVITv2_S_16x4.yaml": "MVITv2_S_16x4",
}


@pytest.mark.parametrize("name", GOLDEN_YAMLS)
def test_the_recipe_trains_at_the_rates_that_pyslowfast_has(tmp_path, name):
    [golden] = [
        case for case in json.loads((GOLDEN / "lr_schedules.json").read_text())["slowfast"] if case["yaml"] == name
    ]
    _, recipe = converted(tmp_path, SHAPES[GOLDEN_YAMLS[name]])
    optim, steps = recipe.optim, 1000
    schedule = build_schedule(
        total_steps=steps * recipe.train.num_epochs,
        steps_per_epoch=steps,
        learning_rate=optim.learning_rate,
        warmup_epochs=optim.warmup_epochs,
        warmup_start_learning_rate=optim.warmup_start_learning_rate,
        warmup_target=optim.warmup_target,
        decay=optim.decay,
        cosine_after_warmup=optim.cosine_after_warmup,
        final_learning_rate=optim.final_learning_rate,
        decay_epochs=optim.decay_epochs,
        decay_factors=optim.decay_factors,
    )
    for epoch, rate in golden["lr"]:
        if epoch < recipe.train.num_epochs:
            assert optim.learning_rate * schedule.factor(epoch * steps) == pytest.approx(rate, rel=1e-9), epoch


def test_batch_and_rate_of_several_machines(tmp_path):
    text = SHAPES["X3D_M"]
    result, recipe = converted(tmp_path, text, "NUM_SHARDS", "16", "SOLVER.COSINE_END_LR", "1e-3")
    assert recipe.train.global_batch_size == 16 * 128
    assert recipe.optim.learning_rate == 1.6  # BASE_LR_SCALE_NUM_SHARDS
    assert (recipe.optim.warmup_start_learning_rate, recipe.optim.final_learning_rate) == (0.16, 0.016)
    assert "128 clips a machine x 16 machines = train.global_batch_size 2048" in result.account
    assert "0.1 x 16 machines = optim.learning_rate 1.6" in result.account
    result, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], "NUM_SHARDS", "4")
    assert (recipe.train.global_batch_size, recipe.optim.learning_rate) == (256, 0.1)  # not scaled unless asked


def test_the_seed_article(tmp_path):
    result, recipe = converted(tmp_path, SEED_ARTICLE)
    # PySlowFast's defaults where nothing is said: alpha 8, fusion kernel 5.
    assert (recipe.model.name, recipe.model.options["zero_init_residual"]) == ("slowfast_4x16_r50", False)
    assert recipe.train.global_batch_size == 64  # 16 clips x 4 accumulated
    assert recipe.train.micro_batch_size == 8  # 16 clips on 2 GPUs
    assert recipe.optim.learning_rate == 0.2
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("fp16", True)
    assert recipe.data.manifest == "/data/kinetics/train.csv" and recipe.eval.manifest == "/data/kinetics/val.csv"
    assert "16 clips a machine x 1 machine x 4 accumulated = train.global_batch_size 64" in result.account
    assert "0.05 x 4 accumulated batches = optim.learning_rate 0.2" in result.account
    assert "set optim.learning_rate=0.05" in result.account
    said = fates(result)
    assert said["TENSORBOARD.MODEL_VIS"][0] == said["TENSORBOARD.LOG_DIR"][0] == said["NUM_GPUS"][0] == "dropped"
    assert said["SOLVER.GRADIENT_ACCUMULATION_STEPS"][0] == "mapped"
    assert set(said) == set(written_keys(yaml.safe_load(SEED_ARTICLE)))


def test_unknown_keys_are_named_with_the_nearest_all_at_once(tmp_path):  # B048
    text = "TRAIN:\n  BATCHSIZE: 8\n  BASE_LR: 0.1\nTENSORBORD:\n  ENABLE: True\nNUM_CLASSES: 5\nMODEL: {ARCH: c2d}\n"
    message = refused(tmp_path, text, "solver.max_epoch", "3", "NONSENSE", "1")
    assert message.splitlines() == [
        "founding.yaml:2: unknown key TRAIN.BATCHSIZE; did you mean TRAIN.BATCH_SIZE?",
        "founding.yaml:3: unknown key TRAIN.BASE_LR; did you mean SOLVER.BASE_LR?",
        "founding.yaml:5: unknown key TENSORBORD.ENABLE; did you mean TENSORBOARD.ENABLE?",
        "founding.yaml:6: unknown key NUM_CLASSES; did you mean MODEL.NUM_CLASSES?",
        "command line: unknown key solver.max_epoch; did you mean SOLVER.MAX_EPOCH?",
        "command line: unknown key NONSENSE; sections are " + ", ".join(sorted(g for g in GROUPS if "." not in g)),
    ]


def test_sections_and_values_are_not_mixed_up(tmp_path):
    text = "TRAIN: 5\nDATA:\n  NUM_FRAMES: {a: 1}\nBN:\n  # all commented out\n_BASE_: other.yaml\n"
    lines = refused(tmp_path, text).splitlines()
    assert lines[0] == "founding.yaml:3: DATA.NUM_FRAMES is a value, not a section"
    assert lines[1].startswith("founding.yaml:1: TRAIN is a section, not a key; it has TRAIN.ENABLE, ")
    assert lines[2] == "founding.yaml:6: _BASE_ ('other.yaml'): inheritance is not read; put the keys in one file"
    assert len(lines) == 3


def test_an_override_without_value_is_named(tmp_path):  # B049
    text = SHAPES["X3D_S"]
    message = refused(tmp_path, text, "SOLVER.BASE_LR", "0.1", "NUM_GPUS")
    assert "command line: NUM_GPUS has no value; overrides are keys and values in turn: write NUM_GPUS VALUE" in message
    message = refused(tmp_path, text, "SOLVER.BASE_LR=0.1")
    assert "SOLVER.BASE_LR=0.1 has no value" in message and "write SOLVER.BASE_LR 0.1, with a space" in message


def test_overrides_are_of_the_declared_type(tmp_path):  # B049
    text = SHAPES["C2D_8x8_R50"]
    changes = {
        "SOLVER.BASE_LR": "1e-4",
        "SOLVER.CLIP_GRAD_L2NORM": "null",
        "DATA.TRAIN_JITTER_SCALES": "[128, 160]",
        "DATA.TRAIN_CROP_SIZE": "112",
        "DATA.RANDOM_FLIP": "false",
        "SOLVER.WARMUP_EPOCHS": "5",
        "DATA.PATH_PREFIX": "/videos",
        "DATA.MEAN": "(0.5, 0.5, 0.4)",
    }
    _, recipe = converted(tmp_path, text, *[word for pair in changes.items() for word in pair])
    assert (recipe.optim.learning_rate, recipe.optim.clip_norm, recipe.optim.warmup_epochs) == (1e-4, None, 5.0)
    assert (recipe.data.short_side, recipe.model.preprocessing.crop_size, recipe.data.flip) == ((128, 160), 112, 0.0)
    assert (recipe.data.root, recipe.model.preprocessing.mean) == ("/videos", (0.5, 0.5, 0.4))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("TRAIN.BATCH_SIZE", "8.5", "got '8.5'; it wants a whole number, as its default 64"),
        ("TRAIN.BATCH_SIZE", "null", "got 'null'; it wants a whole number, as its default 64"),
        ("SOLVER.BASE_LR", "fast", "got 'fast'; it wants a number, as its default 0.1"),
        ("SOLVER.CLIP_GRAD_VAL", "x", "got 'x'; it wants a number or null, as its default null"),
        ("SOLVER.NESTEROV", "1", "got '1'; it wants true or false, as its default true"),
        ("SOLVER.STEPS", "4", "got '4'; it wants a list such as [1, 2], as its default []"),
        ("TRAIN.BATCH_SIZE", "True", "got 'True'; it wants a whole number, as its default 64"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path, key, value, words):
    assert refused(tmp_path, SHAPES["X3D_S"], key, value) == f"command line: {key}: {words}"


def test_every_key_is_parsed_as_its_default():
    for key, default in KEYS.items():
        if kind_of(key) is str:
            assert parse_value(key, default) == default
        elif kind_of(key) is not None:
            value = parse_value(key, repr(default))
            assert value == (list(default) if isinstance(default, tuple) else default), key
    assert set(OPTIONAL) <= set(KEYS) and set(FOREIGN) <= GROUPS


@pytest.mark.parametrize("base", ["SLOWFAST_8x8_R50", "C2D_8x8_R50_IN1K", "X3D_L", "MVITv2_S_16x4"])
def test_every_key_there_is_is_accounted_for(tmp_path, base):
    path = tmp_path / "founding.yaml"
    path.write_text(SHAPES[base])
    given = read_settings(path)
    overrides = []
    for key, default in KEYS.items():
        if key not in given and not key.startswith("MVIT."):
            overrides += [key, default if isinstance(default, str) else repr(default)]
    result = convert_config(path, overrides)
    rows = fates(result)
    assert set(rows) == set(given.written) | set(overrides[::2])
    assert all(text for _, text in rows.values())


def test_keys_of_another_network_say_nothing(tmp_path):
    result, _ = converted(tmp_path, SHAPES["SLOW_8x8_R50"], "MVIT.DEPTH", "24", "X3D.DIM_C1", "99")
    for key in ("MVIT.DEPTH", "X3D.DIM_C1"):
        assert fates(result)[key] == ("dropped", "says nothing about slow_8x8_r50")


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("SLOW_8x8_R50", ("MODEL.ARCH", "csn"), ["MODEL.ARCH=csn", "c2d, slow_c2d, i3d, slow, slowfast, x3d, mvit"]),
        ("SLOW_8x8_R50", ("MODEL.MODEL_NAME", "SlowFast"), ["MODEL.MODEL_NAME=SlowFast", "ResNet or PTVResNet"]),
        ("I3D_8x8_R50", ("RESNET.DEPTH", "101"), ["RESNET.DEPTH=101", "i3d_8x8_r50, has 50"]),
        ("SLOWFAST_8x8_R50", ("RESNET.DEPTH", "18"), ["RESNET.DEPTH=18", "have 50 or 101"]),
        ("SLOWFAST_8x8_R50", ("SLOWFAST.BETA_INV", "4"), ["SLOWFAST.BETA_INV=4", "slowfast_8x8_r50, has 8"]),
        ("X3D_M", ("X3D.WIDTH_FACTOR", "1.0"), ["X3D.WIDTH_FACTOR=1", "x3d_m, has 2"]),
        ("X3D_M", ("X3D.DEPTH_FACTOR", "3.0"), ["X3D.DEPTH_FACTOR=3", "2.2 or 5"]),
        ("MVITv2_S_16x4", ("MVIT.DEPTH", "24"), ["MVIT.DEPTH=24", "mvitv2_s_16x4, has 16"]),
        ("MVITv2_S_16x4", ("DATA.TEST_CROP_SIZE", "256"), ["takes one size; make them equal"]),
        ("SLOW_8x8_R50", ("NONLOCAL.LOCATION", "[[[]], [[0]], [[]], [[]]]"), ["NONLOCAL.LOCATION=[[[]], [[0]]"]),
        ("SLOW_NLN_8x8_R50", ("NONLOCAL.GROUP", "[[1], [2], [1], [1]]"), ["NONLOCAL.GROUP", "have 1 everywhere"]),
        ("SLOW_8x8_R50", ("SOLVER.LR_POLICY", "exp"), ["SOLVER.LR_POLICY=exp", "cosine and steps_with_relative_lrs"]),
        ("SLOW_8x8_R50", ("SOLVER.WARMUP_EPOCHS", "200"), ["SOLVER.WARMUP_EPOCHS=200 must be less than", "196"]),
        ("SLOW_8x8_R50", ("SOLVER.COSINE_END_LR", "0.2"), ["SOLVER.COSINE_END_LR=0.2 must be below SOLVER.BASE_LR"]),
        ("SLOW_8x8_R50", ("SOLVER.OPTIMIZING_METHOD", "lamb"), ["sgd, adam, adamw, mt_adamw"]),
        ("C2D_8x8_R50_IN1K", ("SOLVER.LRS", "[1]"), ["SOLVER.LRS=[1]", "4 steps need as many factors"]),
        ("C2D_8x8_R50_IN1K", ("SOLVER.STEPS", "[5, 9]"), ["begin with epoch 0 and rise"]),
        ("SLOW_8x8_R50", ("TRAIN.BATCH_SIZE", "30"), ["TRAIN.BATCH_SIZE=30", "NUM_GPUS=8"]),
        ("SLOW_8x8_R50", ("TEST.NUM_SPATIAL_CROPS", "2"), ["TEST.NUM_SPATIAL_CROPS=2", "1, the center, and 3"]),
        ("SLOW_8x8_R50", ("DATA.TEST_CROP_SIZE", "182"), ["DATA.TEST_CROP_SIZE", "less than the crop of 224"]),
        ("SLOW_8x8_R50", ("MODEL.LOSS_FUNC", "mse"), ["MODEL.LOSS_FUNC=mse", "cross_entropy"]),
        ("SLOW_8x8_R50", ("DETECTION.ENABLE", "True"), ["DETECTION.ENABLE", "classifiers of whole clips"]),
        ("SLOW_8x8_R50", ("DATA.INPUT_CHANNEL_NUM", "[1]"), ["DATA.INPUT_CHANNEL_NUM=[1]", "3 channels"]),
        (
            "SLOW_8x8_R50",
            ("MODEL.DROPOUT_RATE", "1.5"),
            ["founding.yaml: the recipe that it becomes is refused", "drop"],
        ),
    ],
)
def test_what_twinreel_cannot_be_is_refused_in_words(tmp_path, text, overrides, words):
    message = refused(tmp_path, SHAPES[text], *overrides)
    for word in words:
        assert word in message


def test_a_default_that_does_not_fit_is_named_as_one(tmp_path):
    message = refused(tmp_path, "MODEL:\n  ARCH: x3d\n  MODEL_NAME: X3D\n")
    assert "founding.yaml: X3D.WIDTH_FACTOR=1 (its default, as it is not in the file): the nearest model" in message


def test_several_refusals_come_at_once(tmp_path):
    message = refused(tmp_path, SHAPES["SLOW_8x8_R50"], "MODEL.ARCH", "csn", "TEST.NUM_SPATIAL_CROPS", "2")
    assert len(message.splitlines()) == 2


def test_yaml_that_is_none_has_its_line(tmp_path):
    # As in PySlowFast's ImageNet/MVITv2_B.yaml: a key is one column to the left of the others.
    text = mvit_yaml().replace("  DROPPATH_RATE: 0.2", " DROPPATH_RATE: 0.2")
    line = text[: text.index(" DROPPATH_RATE")].count("\n") + 1
    message = refused(tmp_path, text)
    assert message.startswith(f"founding.yaml:{line}: not valid YAML: ") and "look at the indentation" in message
    assert "the file is empty" in refused(tmp_path, "# nothing\n")
    assert "founding.yaml:1: PySlowFast's YAML has sections" in refused(tmp_path, "- a\n")
    with pytest.raises(ConfigError, match=r"no_such\.yaml: cannot read this configuration: No such file"):
        convert_config(tmp_path / "no_such.yaml")


def test_the_last_of_two_equal_keys_counts(tmp_path):
    text = SHAPES["SLOW_8x8_R50"].replace("  MAX_EPOCH: 196\n", "  MAX_EPOCH: 196\n  MAX_EPOCH: 100\n")
    result, recipe = converted(tmp_path, text)
    assert recipe.train.num_epochs == 100
    assert "SOLVER.MAX_EPOCH stands twice" in result.account


def test_weights_to_start_from(tmp_path):
    path = ("TRAIN.CHECKPOINT_FILE_PATH", "r50.pyth")
    _, recipe = converted(tmp_path, SHAPES["I3D_8x8_R50_IN1K"], *path)
    assert (recipe.model.weights, recipe.model.weights_scope) == ("r50.pyth", "backbone")
    result, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], *path)
    assert (recipe.model.weights, recipe.model.weights_scope) == ("r50.pyth", "all")
    assert "epoch and optimizer are not" in result.account
    _, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], *path, "TRAIN.CHECKPOINT_EPOCH_RESET", "True")
    assert recipe.model.weights_scope == "backbone"
    test = ("TEST.CHECKPOINT_FILE_PATH", "c2d.pkl")
    _, recipe = converted(tmp_path, SHAPES["c2/C2D_NOPOOL_8x8_R50"], *test)
    assert (recipe.model.weights, recipe.model.weights_scope) == ("c2d.pkl", "all")
    result, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], *test)
    assert recipe.model.weights is None and fates(result)["TEST.CHECKPOINT_FILE_PATH"][0] == "dropped"


def test_labels_of_several_classes(tmp_path):
    changes = ("DATA.MULTI_LABEL", "True", "DATA.ENSEMBLE_METHOD", "max", "MODEL.HEAD_ACT", "sigmoid")
    changes += ("MODEL.LOSS_FUNC", "bce_logit", "MODEL.NUM_CLASSES", "157", "DATA.INV_UNIFORM_SAMPLE", "True")
    _, recipe = converted(tmp_path, slowfast_yaml(4, 7, 64), *changes)
    assert (recipe.task.loss, recipe.task.multi_label) == ("binary_cross_entropy", True)
    assert (recipe.eval.combine_views, recipe.eval.best_metric) == ("max", "mean_average_precision")
    assert (recipe.model.num_classes, recipe.model.options["head_activation"]) == (157, "sigmoid")
    assert recipe.data.short_side_draw == "inverse"


@pytest.mark.parametrize(
    ("dataset", "reverse", "order", "mean"),
    [
        ("kinetics", "False", "rgb", (0.1, 0.2, 0.3)),
        ("kinetics", "True", "bgr", (0.3, 0.2, 0.1)),
        ("ssv2", "False", "bgr", (0.1, 0.2, 0.3)),
        ("ssv2", "True", "rgb", (0.3, 0.2, 0.1)),
    ],
)
def test_the_order_of_colors(tmp_path, dataset, reverse, order, mean):
    changes = ("TRAIN.DATASET", dataset, "DATA.REVERSE_INPUT_CHANNEL", reverse, "DATA.MEAN", "[0.1, 0.2, 0.3]")
    _, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], *changes)
    assert (recipe.model.preprocessing.channel_order, recipe.model.preprocessing.mean) == (order, mean)


def test_another_target_rate_becomes_a_frame_rate(tmp_path):
    _, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], "DATA.TARGET_FPS", "24")
    assert (recipe.model.preprocessing.frame_rate, recipe.model.preprocessing.frame_stride) == (3.0, None)


@pytest.mark.parametrize(
    ("key", "value", "target"),
    [
        ("BN.NORM_TYPE", "sync_batchnorm", ("train", "batch_norm", "sync")),
        ("MODEL.FROZEN_BN", "True", ("train", "batch_norm", "frozen")),
        ("BN.WEIGHT_DECAY", "1e-4", ("optim", "norm_weight_decay", 1e-4)),
        ("SOLVER.CLIP_GRAD_VAL", "0.5", ("optim", "clip_value", 0.5)),
        ("SOLVER.LAYER_DECAY", "0.75", ("optim", "layer_decay", 0.75)),
        ("SOLVER.DAMPENING", "0.1", ("optim", "dampening", 0.1)),
        ("SOLVER.ZERO_WD_1D_PARAM", "True", ("optim", "decay_one_dimensional", False)),
        ("TRAIN.MIXED_PRECISION", "True", ("train", "precision", "fp16")),
        ("MODEL.ACT_CHECKPOINT", "True", ("train", "activation_checkpointing", True)),
        ("LOG_PERIOD", "7", ("train", "log_every", 7)),
        ("DATA_LOADER.NUM_WORKERS", "3", ("data", "num_workers", 3)),
        ("AUG.NUM_SAMPLE", "2", ("train", "global_batch_size", 128)),
    ],
)
def test_a_key_changes_its_recipe_key(tmp_path, key, value, target):
    changes = (key, value) if key != "SOLVER.DAMPENING" else (key, value, "SOLVER.NESTEROV", "False")
    _, recipe = converted(tmp_path, SHAPES["SLOW_8x8_R50"], *changes)
    section, name, wanted = target
    assert getattr(getattr(recipe, section), name) == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.LARS_ON", "True"),
        ("DATA.TRAIN_JITTER_FPS", "4.0"),
        ("DATA.TRAIN_JITTER_MOTION_SHIFT", "True"),
        ("TEST.NUM_TEMPORAL_CLIPS", "[3, 5]"),
        ("MODEL.DETACH_FINAL_FC", "True"),
        ("MULTIGRID.LONG_CYCLE", "True"),
    ],
)
def test_what_had_an_effect_and_is_left_out_stands_out(tmp_path, key, value):
    result, _ = converted(tmp_path, SHAPES["SLOW_8x8_R50"], key, value)
    assert fates(result)[key][0] == "lost"
    assert "DROPPED ALTHOUGH THEY HAD AN EFFECT (1):" in result.account


def test_drop_connect_had_no_effect_there(tmp_path):
    result, recipe = converted(tmp_path, SHAPES["X3D_S"], "MODEL.DROPCONNECT_RATE", "0.3")
    assert fates(result)["MODEL.DROPCONNECT_RATE"][0] == "dropped"
    assert "drop_path" not in recipe.model.options or recipe.model.options["drop_path"] == 0.0


def test_rand_augment_words():
    options = {"num_ops": 4, "magnitude": 7.0, "magnitude_std": 0.5}
    assert rand_augment("rand-m7-n4-mstd0.5-inc1") == (options, [])
    assert rand_augment("rand-m9-mstd0.5-inc1")[0]["num_ops"] == 2
    assert rand_augment("rand-m9-w0") == (
        {"num_ops": 2, "magnitude": 9.0, "magnitude_std": 0.0},
        ["w0", "without inc1"],
    )
    assert rand_augment("augmix-m3") == ({}, [])


def test_every_network_here_is_a_model_there():
    published = {name for name in CLASSIFIERS if name.startswith(("c2d", "i3d", "slow", "x3d", "mvit"))}
    assert {network.name for network in NETWORKS} == {name for name in published if "small" not in name}
    assert all(set(network.needs) <= set(KEYS) for network in NETWORKS)
    with torch.device("meta"):  # shapes only
        for network in NETWORKS:
            prep = CLASSIFIERS[network.name]().preprocessing
            assert (prep.num_frames, prep.frame_stride) == network.frames, network.name


def test_the_header_names_the_source(tmp_path):
    result, _ = converted(tmp_path, SHAPES["X3D_S"], "NUM_SHARDS", "2")
    assert result.yaml.splitlines()[0] == "# From PySlowFast's founding.yaml NUM_SHARDS 2, by twinreel import-config."


def test_a_yaml_of_another_shape_is_read_the_same(tmp_path):
    """Flow style, tuples, yes and no: what YAML 1.1 and PySlowFast read."""
    text = resnet_yaml("slow", 8, 8)
    flow = yaml.safe_dump(yaml.safe_load(text), default_flow_style=True)
    assert (
        convert_config(_saved(tmp_path / "a.yaml", flow)).values
        == convert_config(_saved(tmp_path / "b.yaml", text)).values
    )
    yes = text.replace("ZERO_INIT_FINAL_BN: True", "ZERO_INIT_FINAL_BN: yes").replace("[256, 320]", "(256, 320)")
    assert convert_config(_saved(tmp_path / "c.yaml", yes)).values == convert_config(tmp_path / "b.yaml").values


def _saved(path, text):
    path.write_text(text)
    return path
