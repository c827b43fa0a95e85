"""A converted configuration: the recipe's values, its text, and the account of every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from twinreel.config import load_tree
from twinreel.errors import ConfigError
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.report import account, account_table
from twinreel.recipe import build_recipe

__all__ = ["SECTIONS", "Conversion", "finish"]

SECTIONS = ("model", "task", "data", "optim", "train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted configuration.

    `values` are the recipe's sections, `yaml` is its text with a header that names the source, `rows` has what became
    of each given key (key, value, place, fate, text), `account` the same in words. `num_gpus` is what PySlowFast would
    ask of the machine; 0 where the file does not say it.
    """

    values: dict[str, Any]
    yaml: str
    rows: list[dict[str, Any]]
    account: str
    num_gpus: int


def finish(draft: Draft, origin: str, *, num_gpus: int = 0) -> Conversion:
    """The conversion of a draft, if nothing is wrong with it and twinreel can read what it becomes.

    Args:
        draft: with every given key accounted for.
        origin: the file and what was laid over it, for the recipe's first line.
        num_gpus: as in `Conversion`.

    Raises:
        ConfigError: there are problems, or the recipe that it becomes is refused.
    """
    settings = draft.settings
    settings.raise_problems()
    header = f"# From {settings.system}'s {origin}".replace("\n", " ") + ", by twinreel import-config.\n"
    text = header + _to_yaml(draft.recipe)
    try:
        build_recipe(load_tree(None, text=text))  # what is written can be read
    except ConfigError as error:
        raise ConfigError(f"{settings.source}: the recipe that it becomes is refused: {error}") from error
    return Conversion(
        values=draft.recipe, yaml=text, rows=account_table(draft), account=account(draft), num_gpus=num_gpus
    )


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
