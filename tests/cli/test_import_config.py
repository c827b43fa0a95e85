"""`twinreel import-config` through the real entry point."""

import json
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_line import twinreel

from founding_yamls import SEED_ARTICLE, SHAPES
from twinreel.recipe import load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "import-config.md"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a published YAML and one of an article."""
    (tmp_path / "SLOWFAST_8x8_R50.yaml").write_text(SHAPES["SLOWFAST_8x8_R50"], encoding="utf-8")
    (tmp_path / "article.yaml").write_text(SEED_ARTICLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_goes_to_stdout_and_the_account_to_stderr(home):
    outcome = twinreel("import-config", "SLOWFAST_8x8_R50.yaml", "SOLVER.BASE_LR", "0.05", "NUM_SHARDS", "2")
    assert outcome.code == 0
    header = "# From PySlowFast's SLOWFAST_8x8_R50.yaml SOLVER.BASE_LR 0.05 NUM_SHARDS 2, by twinreel import-config."
    assert outcome.out.splitlines()[0] == header
    (home / "recipe.yaml").write_text(outcome.out)
    recipe = load_recipe("recipe.yaml")
    assert (recipe.model.name, recipe.optim.learning_rate) == ("slowfast_8x8_r50", 0.05)
    assert recipe.train.global_batch_size == 128
    assert "  SOLVER.BASE_LR: 0.05 -> optim.learning_rate: 0.05\n" in outcome.err
    assert "  TRAIN.AUTO_RESUME: true -> twinreel train ... --resume, never by itself\n" in outcome.err
    assert "64 clips a machine x 2 machines = train.global_batch_size 128" in outcome.err


def test_the_recipe_goes_to_a_file(home):
    outcome = twinreel("import-config", "article.yaml", "--out", "mine.yaml")
    assert (outcome.code, outcome.out) == (0, "mine.yaml\n")
    assert load_recipe("mine.yaml").train.activation_checkpointing
    assert twinreel("show", "mine.yaml").code == 0
    assert "TENSORBOARD.LOG_DIR: './logs' -> the folder tensorboard/ of the run" in outcome.err
    before = (home / "mine.yaml").read_bytes()
    twinreel("import-config", "SLOWFAST_8x8_R50.yaml", "--out", "mine.yaml").fails(
        "mine.yaml is there already", "--out"
    )
    assert (home / "mine.yaml").read_bytes() == before
    twinreel("import-config", "article.yaml", "--out", "no/such/folder.yaml").fails("folder.yaml", "there is no folder")


def test_json_for_programs(home):
    outcome = twinreel("import-config", "article.yaml", "--json")
    result = json.loads(outcome.out)
    assert result["recipe"]["optim"]["learning_rate"] == 0.2
    [row] = [row for row in result["keys"] if row["key"] == "SOLVER.USE_AMP"]
    assert row == {
        "key": "SOLVER.USE_AMP",
        "value": "true",
        "place": "article.yaml:20",
        "fate": "mapped",
        "text": "train.precision: fp16 (as there; bf16 needs no loss scaling)",
    }


def test_more_gpus_than_there_are_is_a_line_and_no_more(home):  # B049
    line = "twinreel: NUM_GPUS=8: this machine has 1; the recipe is the same on any number\n"
    with mock.patch.object(torch.cuda, "device_count", return_value=1):
        outcome = twinreel("import-config", "SLOWFAST_8x8_R50.yaml")
    assert outcome.code == 0 and outcome.err.count("this machine has") == 1 and outcome.err.startswith(line)
    with mock.patch.object(torch.cuda, "device_count", return_value=8):
        same = twinreel("import-config", "SLOWFAST_8x8_R50.yaml")
    assert "this machine has" not in same.err and same.out == outcome.out


def test_mistakes_are_named_before_anything_is_written(home):  # B048, B049
    words = ("SOLVER.BASE_RATE", "1", "TRAIN.BATCH_SIZE", "many", "NUM_GPUS")
    twinreel("import-config", "article.yaml", *words, "--out", "new.yaml").fails(
        "command line: unknown key SOLVER.BASE_RATE; did you mean SOLVER.BASE_LR?",
        "command line: TRAIN.BATCH_SIZE: got 'many'; it wants a whole number",
        "command line: NUM_GPUS has no value",
    )
    twinreel("import-config", "nothing.yaml").fails("nothing.yaml: cannot read this configuration")
    assert not (home / "new.yaml").exists() and not list(home.glob(".*"))


def test_a_negative_value_is_a_value(home):
    outcome = twinreel("import-config", "article.yaml", "DEMO.WEBCAM", "-1")
    assert outcome.code == 0 and "DEMO.WEBCAM: -1 -> twinreel predict RUN VIDEO has options of its own" in outcome.err


def test_the_page_shows_what_the_command_says(home):
    """The commands of the page are run; every line that it shows of their output is a line of it."""
    text = PAGE.read_text(encoding="utf-8")
    (home / "my_slowfast.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[1])
    (home / "my_didemo.json").write_text(re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)[1])
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("twinreel import-config")]
    shown = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert [command[2] for command in commands] == ["my_slowfast.yaml", "my_didemo.json"]
    for command, block in zip(commands, shown, strict=True):
        outcome = twinreel(*command[1:])
        assert outcome.code == 0, outcome.err
        for line in block.splitlines():
            assert line in outcome.err.splitlines(), line
    assert load_recipe("my_didemo_recipe.yaml").optim.clip_norm == 1.25
    recipe = load_recipe("my_slowfast_recipe.yaml")
    shown = re.findall(r"^\| `[A-Z_.0-9]+`.*?\| `([a-z_.]+)=(.+?)` \|$", text, flags=re.MULTILINE)
    assert len(shown) >= 3
    for key, value in shown:
        section, _, name = key.partition(".")
        assert str(getattr(getattr(recipe, section), name)) == value, key
