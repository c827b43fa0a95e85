"""A recipe in the making, with an account of every key that was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from twinreel.founding_configs.settings import Settings

__all__ = ["Draft", "Fate", "Outcome"]

Fate: TypeAlias = Literal["mapped", "dropped", "lost"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a key: `mapped` to recipe keys, `dropped` without loss, or `lost` although it had an effect."""

    fate: Fate
    text: str


@dataclass(slots=True)
class Draft:
    """The recipe's sections as far as they are known, and the account.

    Args:
        settings: what was given.
        recipe: sections of keys.
        outcomes: of given keys.
        defaults: keys that nobody wrote, whose default there is a value of the recipe here.
        notes: what else the user should know.
    """

    settings: Settings
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, target: str, value: Any, *keys: str, because: str = "") -> None:
        """Set a recipe key, and say that it came from these founding keys.

        Args:
            target: `section.key` or `model.preprocessing.key`.
            value: plain YAML.
            keys: founding keys; those that nobody wrote count with their default.
            because: added to the account, in brackets.
        """
        *parents, last = target.split(".")
        level = self.recipe
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
        shown = {None: "null", True: "true", False: "false"}.get(value, value) if _is_word(value) else value
        for key in keys:
            self._note(key, Outcome("mapped", f"{target}: {shown}" + (f" ({because})" if because else "")))
            if key not in self.settings and key not in self.defaults:
                self.defaults.append(key)

    def say(self, key: str, text: str) -> None:
        """Account for a key that is part of something that other words describe."""
        self._note(key, Outcome("mapped", text))

    def drop(self, key: str, reason: str) -> None:
        """Leave a key out that changes no result, unless something was said of it already."""
        if key not in self.outcomes:
            self._note(key, Outcome("dropped", reason))

    def lose(self, key: str, reason: str) -> None:
        """Leave a key out although it had an effect there."""
        self._note(key, Outcome("lost", reason))

    def refuse(self, keys: str | Sequence[str], text: str) -> None:
        """Note a problem; the place is that of the first key that was written."""
        keys = [keys] if isinstance(keys, str) else list(keys)
        written = [key for key in keys if key in self.settings]
        place = self.settings.written[written[0]].place if written else self.settings.source
        self.settings.problems.append(f"{place}: {text}")

    def _note(self, key: str, outcome: Outcome) -> None:
        if key in self.settings:
            self.outcomes.setdefault(key, []).append(outcome)


def _is_word(value: object) -> bool:
    return value is None or isinstance(value, bool)
