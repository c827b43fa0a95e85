"""Every shipped recipe: it loads, says what it is and how it is run, and takes two steps with a shrunken model."""

import json
import math
import re
import shlex

import pytest
import yaml
from safetensors.torch import load_file

from cli.command_line import twinreel
from twinreel.assembly import load_model
from twinreel.config import import_function
from twinreel.data.plan import Plan
from twinreel.data.sources import generated
from twinreel.recipe import find_recipe, list_recipes, load_recipe, recipe_header

# What makes a model small and quick. A model that is not here stops the test until it is.
SHRUNK = {
    "conv3d_small": ("model.embedding_size=8", "model.text_hidden_size=16", "model.word_embedding_size=8"),
    "s3dg": ("model.embedding_size=8", "model.text_hidden_size=16", "model.word_embedding_size=8"),
    "s3dg_small": ("model.embedding_size=8", "model.text_hidden_size=16", "model.word_embedding_size=8"),
}
TWO_STEPS = (
    "data.source=generated", "data.manifest=null", "data.split=train", "data.num_videos=8", "data.num_test_videos=4",
    "data.num_workers=0", "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
    "train.num_epochs=null", "train.num_steps=2", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.log_every=1", "train.device=cpu", "optim.warmup_epochs=null", "optim.warmup_steps=1", "eval.split=test",
    "eval.num_clips=2",
)  # fmt: skip


# Classifiers are not shrunk but run on small clips; those with tens of millions of parameters are heavy.
CLASSIFIED = {
    "mvitv2_s_16x4": 4, "slow_8x8_r50": 4, "slowfast_4x16_r50": 8, "slowfast_8x8_r50": 8, "slowfast_small": 8,
    "i3d_8x8_r50": 4, "x3d_m": 4, "x3d_s": 4,
}  # fmt: skip
LIGHT = ("slowfast_small", "x3d_s")


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Videos, and a manifest of two classes for each split."""
    folder = tmp_path_factory.mktemp("labeled")
    for split in ("train", "test"):
        rows = generated.rows(folder, split, num_videos=8, num_test_videos=4)
        lines = [f"{row.video},{'ab'[i % 2]}" for i, row in enumerate(rows)]
        (folder / f"{split}.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return folder


def task_of(name):
    return yaml.safe_load(source(name)).get("task", {}).get("name", "contrastive")


TWO_TOWERS = [name for name in list_recipes() if "contrastive" in find_recipe(name).read_text(encoding="utf-8")]
MATCHING = [name for name in list_recipes() if "video_text_matching" in find_recipe(name).read_text(encoding="utf-8")]
CLASSIFYING = [name for name in list_recipes() if name not in (*TWO_TOWERS, *MATCHING)]


def source(name):
    return find_recipe(name).read_text(encoding="utf-8")


def commands(name):
    """The arguments of the `twinreel train` commands in the header of a recipe."""
    return [words for words in header_lines(name) if words[0] == "train"]


def header_lines(name):
    header = re.match(r"(#.*\n)+", source(name)).group()
    lines = [line.removeprefix("#").strip() for line in header.splitlines()]
    return [
        shlex.split(line.split("twinreel ", 1)[1]) for line in lines if re.match(r"(torchrun .*-m )?twinreel ", line)
    ]


@pytest.mark.parametrize("name", list_recipes())
def test_the_header_says_what_it_is_and_its_command_runs(name):
    assert source(name).startswith("# ") and source(name).isascii()
    assert len(recipe_header(name)) > 40
    assert commands(name), f"{name}: no command in its header"
    for verb, recipe, *arguments in commands(name):
        assert (verb, recipe) == ("train", name)
        at = arguments.index("--out")
        assert len(arguments) == at + 2
        load_recipe(recipe, arguments[:at])  # every key is right and nothing is missing
    for verb, run, *arguments in header_lines(name):
        if verb == "eval":
            assert run in " ".join(commands(name)[0])
            load_recipe(name, [word for word in arguments if "=" in word])


def test_the_steps_that_clipbert_msrvtt_says_are_those_it_takes():
    words = (
        r"Of (.*) captions an epoch makes (.*) whole batches of (.*), so (.*) epochs are (.*) steps; .* counts (.*)\."
    )
    found = re.search(words, source("clipbert_msrvtt"))
    captions, batches, size, epochs, steps, theirs = (int(number.replace(" ", "")) for number in found.groups())
    train = load_recipe("clipbert_msrvtt", commands("clipbert_msrvtt")[0][2:-2]).train
    plan = Plan(num_rows=captions, seed=train.seed, global_batch_size=train.global_batch_size)
    assert (size, epochs, batches) == (train.global_batch_size, train.num_epochs, plan.steps_per_epoch)
    assert steps == epochs * plan.steps_per_epoch and theirs == math.ceil(epochs * captions / size)


@pytest.mark.parametrize("name", list_recipes())
def test_it_says_where_its_score_was_published_or_that_it_was_not(name):
    header = recipe_header(name).lower()
    assert any(word in header for word in ("published", "see readme")), header
    assert any(word in header for word in ("cpu", "gpu")), header


@pytest.mark.parametrize("name", list_recipes())
def test_what_show_prints_loads_again_to_the_same_recipe(name, tmp_path):
    overrides = [item for item in commands(name)[0] if "=" in item]
    shown = twinreel("show", name, *overrides)
    assert shown.code == 0
    (tmp_path / "mine.yaml").write_text(shown.out)
    recipe = load_recipe(name, overrides)
    assert load_recipe(tmp_path / "mine.yaml") == recipe
    assert twinreel("show", tmp_path / "mine.yaml").out == shown.out
    written = yaml.safe_load(source(name))
    for section, values in written.items():  # nothing that the file states was lost on the way
        for key, value in values.items():
            if key != "preprocessing" and not any(item.startswith(f"{section}.{key}=") for item in overrides):
                assert recipe.model_dump(mode="json")[section][key] == value, f"{section}.{key}"
    stated = written["model"].get("preprocessing", {})
    assert recipe.model.preprocessing.model_dump().items() >= stated.items()


def test_a_recipe_can_be_copied_before_there_is_a_manifest():
    for name in list_recipes():
        assert twinreel("show", name).code == 0, name


def is_heavy(name):
    return yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))["model"]["name"] not in LIGHT


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if is_heavy(name) else ()) for name in CLASSIFYING]
)
def test_two_steps_of_a_classifier(name, labeled, tmp_path):
    assert task_of(name) == "action_recognition"
    model = yaml.safe_load(source(name))["model"]["name"]
    assert model in CLASSIFIED, f"{model}: say in CLASSIFIED how many frames it takes at least"
    small = f"{{num_frames: {CLASSIFIED[model]}, frame_rate: 8.0, crop_size: 64, short_side: 64}}"
    short_side = [] if load_recipe(name).data.short_side is None else ["data.short_side=[64, 72]"]
    outcome = twinreel(
        "train", name, "data.source=manifest", f"data.manifest={labeled / 'train.csv'}", "data.split=null",
        "data.num_workers=0", f"model.preprocessing={small}", "model.weights=null", "model.weights_scope=all",
        "train.batch_norm=per_process",
        "data.rand_augment=null", *short_side, "train.num_epochs=null", "train.num_steps=2",
        "train.global_batch_size=4", "train.micro_batch_size=4", "train.precise_bn_batches=0", "train.log_every=1",
        "train.device=cpu", "optim.warmup_epochs=null", "optim.warmup_steps=1",
        f"eval.manifest={labeled / 'test.csv'}", "eval.split=null", "eval.num_clips=1", "--out", tmp_path / "run",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert "done: 2 steps" in outcome.err and "evaluated: 4/4 videos" in outcome.out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
    weights = load_file(tmp_path / "run" / "checkpoints" / "last" / "weights.safetensors")
    assert weights.keys() == load_model(tmp_path / "run").state_dict().keys()


@pytest.mark.parametrize("name", TWO_TOWERS)
def test_two_steps_with_a_shrunken_model(name, videos, tmp_path):
    model = load_recipe(name, [item for item in commands(name)[0] if "=" in item]).model.name
    assert model in SHRUNK, f"{model}: say in SHRUNK how it becomes small"
    before = load_recipe(name, [*TWO_STEPS, *SHRUNK[model], f"data.root={videos}"])
    outcome = twinreel("train", name, *TWO_STEPS, *SHRUNK[model], f"data.root={videos}", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome
    assert "done: 2 steps" in outcome.err and "evaluated: 4/4 videos" in outcome.out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 50 for loss in losses)
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == before
    weights = load_file(tmp_path / "run" / "checkpoints" / "last" / "weights.safetensors")
    assert weights.keys() == load_model(tmp_path / "run").state_dict().keys()
    assert sum(value.numel() for value in weights.values()) < 12e6


@pytest.mark.slow
@pytest.mark.parametrize("frames", [4, 8])
def test_two_runs_in_bf16_are_equal(videos, tmp_path, frames):
    """On a CPU, where oneDNN's weight gradient over fewer frames than the kernel has holds what lay in memory."""

    def run(out):
        outcome = twinreel("train", "milnce_s3dg_howto100m", *TWO_STEPS, *SHRUNK["s3dg"], f"data.root={videos}",
                           f"model.preprocessing.num_frames={frames}", "train.precision=bf16", "eval.split=null",
                           "--out", tmp_path / out)  # fmt: skip
        assert outcome.code == 0, outcome
        lines = map(json.loads, (tmp_path / out / "metrics.jsonl").read_text().splitlines())
        norms = [line["gradient_norm"] for line in lines if line["kind"] == "train"]
        assert len(norms) == 2
        return norms

    assert run("one") == run("two") == run("three")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "clipbert_small" else pytest.mark.slow) for name in MATCHING]
)
def test_two_steps_of_matching(name, videos, tmp_path):
    """With the recipe's clips, pooling and optimizer; a small BERT on small pictures."""
    assert task_of(name) == "video_text_matching"
    sizes = ("hidden_size=32", "num_layers=1", "num_heads=2", "intermediate_size=32", "max_text_tokens=20")
    outcome = twinreel(
        "train", name, "data.source=generated", "data.manifest=null", f"data.root={videos}", "data.split=train",
        "data.num_videos=8", "data.num_test_videos=4", "data.num_workers=0", *(f"model.{size}" for size in sizes),
        "model.preprocessing.crop_size=64", "train.num_epochs=null", "train.num_steps=2", "train.global_batch_size=4",
        "train.micro_batch_size=2", "train.log_every=1", "train.device=cpu", "train.precision=fp32",
        "optim.warmup_fraction=0", "eval.split=test", "eval.every=null", "--out", tmp_path / "run",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert "done: 2 steps" in outcome.err and "evaluated: 4/4 videos" in outcome.out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    weights = load_file(tmp_path / "run" / "checkpoints" / "last" / "weights.safetensors")
    assert weights.keys() == load_model(tmp_path / "run").state_dict().keys()


def test_the_names_of_a_recipe_exist():
    """A recipe of the user's own towers needs no model of ours, but every name must lead somewhere."""
    for name in list_recipes():
        for value in yaml.safe_load(source(name)).values():
            for key in ("name", "loss", "source"):
                if ":" in str(value.get(key, "")):
                    import_function(value[key], name)
