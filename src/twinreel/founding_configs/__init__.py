"""PySlowFast's YAMLs as twinreel's recipes: every key becomes a recipe key, or is named with the reason why not.

`keys` are the founding keys with defaults and types, `settings` reads a file and its overrides, `network`, `clips`,
`schedule`, `judging` and `leftovers` say what becomes of which key, `report` puts it into words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from twinreel.config import load_tree
from twinreel.errors import ConfigError
from twinreel.founding_configs.clips import convert_clips
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.judging import convert_head, convert_judging, convert_start
from twinreel.founding_configs.leftovers import account_for_the_rest
from twinreel.founding_configs.network import choose_network
from twinreel.founding_configs.report import account, account_table
from twinreel.founding_configs.schedule import convert_schedule
from twinreel.founding_configs.settings import read_settings
from twinreel.recipe import build_recipe

__all__ = ["Conversion", "convert_config"]

_SECTIONS = ("model", "task", "data", "optim", "train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted configuration.

    `values` are the recipe's sections, `yaml` is its text with a header that names the source, `rows` has what became
    of each given key (key, value, place, fate, text), `account` the same in words. `num_gpus` is what PySlowFast would
    ask of the machine.
    """

    values: dict[str, Any]
    yaml: str
    rows: list[dict[str, Any]]
    account: str
    num_gpus: int


def convert_config(path: str | Path, overrides: Sequence[str] = ()) -> Conversion:
    """The recipe of a PySlowFast YAML, with `KEY VALUE ...` laid over it as PySlowFast's `--opts` does.

    Raises:
        ConfigError: the file cannot be read; keys are unknown or have values of another type; or no model or option of
            twinreel is what it asks for. All problems of a kind in one message, each with its place.
    """
    settings = read_settings(path, overrides)
    draft = Draft(settings, {section: {} for section in _SECTIONS})
    name = choose_network(draft)
    convert_head(draft, name)
    convert_clips(draft)
    convert_schedule(draft)
    convert_judging(draft)
    convert_start(draft)
    account_for_the_rest(draft)
    settings.raise_problems()
    text = _header(path, overrides) + _to_yaml(draft.recipe)
    try:
        build_recipe(load_tree(None, text=text))  # what is written can be read
    except ConfigError as error:
        raise ConfigError(f"{settings.source}: the recipe that it becomes is refused: {error}") from error
    rows, words = account_table(draft), account(draft)
    return Conversion(values=draft.recipe, yaml=text, rows=rows, account=words, num_gpus=settings["NUM_GPUS"])


def _header(path: str | Path, overrides: Sequence[str]) -> str:
    words = "".join(f" {key} {value}" for key, value in zip(overrides[::2], overrides[1::2], strict=True))
    return f"# From PySlowFast's {Path(path).name}{words}".replace("\n", " ") + ", by twinreel import-config.\n"


def _to_yaml(recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """A key a line, lists and preprocessing on one."""
    lines = []
    for section, values in recipe.items():
        lines.append(f"{section}:")
        for key, value in values.items():
            text = yaml.safe_dump(
                [value], default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
            ).strip()
            lines.append(f"  {key}: {text[1:-1]}")
    return "\n".join(lines) + "\n"
