"""Recipes: every problem at once, with its place and the nearest key."""

import pytest
import yaml

from twinreel.assembly import training_rows
from twinreel.config import load_tree
from twinreel.errors import ConfigError
from twinreel.recipe import Recipe, list_recipes, load_recipe

GOOD = """\
model: {name: conv3d_small}
task:
  num_candidates: 2
data: {manifest: videos.csv}
train:
  num_steps: 10
"""


def write(tmp_path, text=GOOD):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


def test_a_good_recipe_loads_and_its_resolved_form_loads_to_the_same(tmp_path):
    recipe = load_recipe(write(tmp_path), ["train.seed=7"])
    assert recipe.train.seed == 7 and recipe.task.num_candidates == 2
    assert recipe.model.options["embedding_size"] > 0  # defaults of the builder's signature
    assert recipe.task.options["temperature"] == 1.0
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe


def test_the_resolved_recipe_has_the_whole_preprocessing(tmp_path):
    recipe = load_recipe(write(tmp_path), ["model.preprocessing.crop_size=48"])
    section = recipe.model.preprocessing
    assert section.crop_size == 48 and section.num_frames is not None and section.mean is not None


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optim.leraning_rate", "optim.learning_rate"),
        ("modle.name", "model"),
        ("task.num_candidate", "task.num_candidates"),
        ("task.temprature", "task.temperature"),
        ("data.filp", "data.flip"),
        ("train.batch_size", "train.global_batch_size"),
        ("optim.lr", "optim.learning_rate"),
        ("lr", "optim.learning_rate"),
        ("train.epochs", "train.num_epochs"),
        ("eval.num_clip", "eval.num_clips"),
        ("model.embeding_size", "model.embedding_size"),
        ("model.preprocessing.crop_siz", "model.preprocessing.crop_size"),
        ("learning_rate", "optim.learning_rate"),
    ],
)
def test_a_typo_in_every_section_names_the_place_and_the_nearest_key(tmp_path, key, nearest):
    [line] = problems(write(tmp_path), f"{key}=1")
    assert line.startswith("command line: unknown key") and key.split("=")[0].split(".")[0] in line
    assert f"did you mean {nearest}?" in line


def test_a_typo_in_a_file_names_file_and_line(tmp_path):
    path = write(tmp_path, GOOD + "optim:\n  name: adam\n  leraning_rate: 1e-4\n")
    assert problems(path) == [
        "recipe.yaml:9: unknown key optim.leraning_rate; did you mean optim.learning_rate?",
    ]


def test_all_problems_come_together(tmp_path):  # B048, B049: an override without a value is named
    path = write(tmp_path, GOOD + "  micro_batch_size: zwei\nopttim: {}\n")
    found = problems(path, "data.flip=2", "train.seed=-1", "model.nme=s3dg", "nonsense")
    assert len(found) == 6
    for words in ("micro_batch_size", "opttim", "data.flip", "train.seed", "model.nme", "'nonsense' is not key=value"):
        assert any(words in line for line in found), words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.num_steps=ten", 'train.num_steps: got "ten"; input should be a valid integer'),
        ("train.num_steps=true", "train.num_steps: got true"),
        ("train.num_steps=1.5", "train.num_steps: got 1.5"),
        ("data.flip=yes", 'data.flip: got "yes"'),
        ("optim.learning_rate=0", "optim.learning_rate: got 0; input should be greater than 0"),
        ("train.save_every=5", "train.save_every: got 5"),
        ("train.save_every=five epochs", "train.save_every"),
        ("train.precision=fp8", "input should be 'auto', 'fp32', 'bf16' or 'fp16'"),
        ("model.embedding_size=big", 'model.embedding_size: got "big"'),
        ("task.normalize=1", "task.normalize: got 1"),
        ("data.manifest=7", "data.manifest: got 7"),
        ("train.global_batch_size=0", "greater than or equal to 1"),
    ],
)
def test_wrong_types_and_ranges(tmp_path, override, words):
    found = problems(write(tmp_path), override)
    assert any(words in line for line in found), found


def test_values_of_the_command_line_get_their_declared_type(tmp_path):  # B049
    recipe = load_recipe(
        write(tmp_path),
        [
            "optim.learning_rate=1e-4",
            "eval.split=null",
            "data.manifest=[a.csv, b.jsonl]",
            "optim.learning_rates={text_tower: 1e-5}",
            "data.caption_template='a person is {label}'",
            "model.freeze=[text_tower]",
        ],
    )
    assert recipe.optim.learning_rate == 1e-4 and recipe.eval.split is None
    assert recipe.data.manifest == ("a.csv", "b.jsonl")
    assert recipe.optim.learning_rates == {"text_tower": 1e-5}
    assert recipe.data.caption_template == "a person is {label}"


def test_an_override_into_a_value_is_refused(tmp_path):
    [line] = problems(write(tmp_path), "train.num_steps.x=1")
    assert "train.num_steps is the value 10, not a section" in line


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path, GOOD + "  num_steps: 11\n")
    assert problems(path) == ["recipe.yaml:7: key train.num_steps stands twice (first at recipe.yaml:6); keep one"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.num_epochs=3"], "give exactly one of train.num_epochs and train.num_steps"),
        (["train.global_batch_size=32", "train.micro_batch_size=5"], "is not a whole number of"),
        (["train.global_batch_size=4", "train.micro_batch_size=8"], "choose a divisor"),
        (["optim.warmup_steps=3", "optim.warmup_epochs=1"], "not both"),
        (
            ["optim.warmup_fraction=0.1", "optim.warmup_steps=3"],
            "optim.warmup_fraction or optim.warmup_steps, not both",
        ),
        (["optim.warmup_fraction=0.1", "optim.warmup_epochs=1"], "optim.warmup_fraction or optim.warmup_epochs"),
        (
            ["optim.warmup_fraction=0.1", "optim.warmup_start_factor=0"],
            "warmup_start_factor has no effect with optim.wa",
        ),
        (["optim.warmup_fraction=0.1", "optim.warmup_target=schedule"], "warmup_target has no effect"),
        (["optim.warmup_fraction=1"], "less than 1"),
        (
            ["optim.warmup_fraction=0.1", "optim.decay=steps", "optim.decay_epochs=[0]", "optim.decay_factors=[1]"],
            "does not go with optim.decay=steps; give optim.warmup_epochs",
        ),
        (["optim.decay=linear", "optim.final_learning_rate=1"], "the line falls"),
        (["optim.eps_before_correction=true"], "goes with optim.name=adamw, not adam"),
        (["data.source=howto100m"], "data.manifest goes with data.source: manifest"),
        (["model.name=s3dgg"], "unknown name 's3dgg'; did you mean s3dg?"),
        (["task.loss=milnec"], "did you mean milnce?"),
        (["task.name=contrastiv"], "unknown task 'contrastiv'; did you mean contrastive?"),
        (["data.source=howto100", "data.manifest=null"], "did you mean howto100m?"),
        (["model.name=nowhere.at:all"], "no module named nowhere"),
        (["model.name=json:dump_all"], "json has no function dump_all"),
    ],
)
def test_choices_that_do_not_fit(tmp_path, overrides, words):
    found = problems(write(tmp_path), *overrides)
    assert any(words in line for line in found), found


def test_a_manifest_is_asked_for(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD.replace("data: {manifest: videos.csv}\n", "")))  # it can be shown
    with pytest.raises(ConfigError, match=r"data\.manifest is missing: name your CSV or JSONL"):
        training_rows(recipe)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "recipe.yaml:1: not valid YAML"),
        ("- a\n- b\n", "a recipe is a mapping of sections"),
        ("model: 5\n", "model: got 5"),
        ("", "model is missing"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, words):
    assert any(words in line for line in problems(write(tmp_path, text))), words


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown recipe 'dmeo'; did you mean demo"):
        load_recipe("dmeo")
    with pytest.raises(ConfigError, match="no such recipe file"):
        load_recipe("missing.yaml")


def test_scalars_are_read_as_people_mean_them():
    tree = load_tree(None, text="a: 1e-4\nb: no\nc: 2026-11-30\nd: true\ne: 5e3\nf: 0.5\ng: null\nh: 12\n")
    expected = {"a": 1e-4, "b": "no", "c": "2026-11-30", "d": True, "e": 5000.0, "f": 0.5, "g": None, "h": 12}
    assert tree.values == expected


def test_sections_are_immutable_and_described(tmp_path):
    recipe = load_recipe(write(tmp_path))
    with pytest.raises(Exception, match="frozen"):
        recipe.train.seed = 3
    schema = Recipe.model_json_schema()
    for name, section in schema["$defs"].items():
        for key, field in section["properties"].items():
            assert "description" in field or "$ref" in field or "allOf" in field or key == "preprocessing", (name, key)


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_loads_once_the_user_says_where_data_lie(name):
    overrides = ["data.root=/data"] if "manifest" not in (load_tree_of(name)["data"].get("source") or "") else []
    if load_tree_of(name)["data"]["source"] == "manifest":
        overrides = ["data.manifest=mine.csv"]
    recipe = load_recipe(name, overrides)
    assert yaml.safe_load(recipe.to_yaml())["model"]["name"] == recipe.model.name


def load_tree_of(name):
    from twinreel.recipe import find_recipe

    return load_tree(find_recipe(name)).values


@pytest.mark.parametrize("override", ["data.root=&x [*x]", "data.root=!!int abc", "train.num_steps=!!timestamp 2001"])
def test_overrides_that_are_no_value_are_refused(tmp_path, override):
    assert any(line.startswith("command line: ") for line in problems(write(tmp_path), override))


def test_numbers_of_folds_stay_as_they_are_written(tmp_path):
    for written, read in (("1", "1"), ("01", "01"), ("010", "010"), ("1:30", "1:30")):
        assert load_recipe(write(tmp_path), [f"data.split={written}"]).data.split == read
    assert any("data.split" in line for line in problems(write(tmp_path), "data.split="))


def test_an_anchor_that_holds_itself_is_refused(tmp_path):
    assert problems(write(tmp_path, "model: &x {name: *x}\n")) == [
        "recipe.yaml: an anchor holds itself (&x ... *x); write the values out"
    ]
