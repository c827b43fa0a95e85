"""What was written for a key, as a value of the key's declared type."""

from __future__ import annotations

import ast
from typing import Any

from twinreel.founding_configs.keys import KEYS, OPTIONAL, kind_of

__all__ = ["parse_value", "short"]

_WORDS = {"null": None, "none": None, "~": None, "true": True, "false": False}
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list such as [1, 2]"}


def parse_value(key: str, written: object) -> Any:
    """The value of a known key, of its declared type; lists all the way down, whole numbers as floats where declared.

    Texts are read as PySlowFast reads them, as Python literals: `1e-4`, `(3, 7, 7)`, `[0, 44]`; and `null`, `true`.

    Args:
        key: dotted.
        written: a scalar or a list of the YAML, or a word of the command line.

    Raises:
        ValueError: it does not fit the type; the message says what was got and what is wanted.
    """
    kind = kind_of(key)
    if kind is None:
        return _literal(written)
    if kind is str:
        return _text(written)
    value = _literal(written)
    if value is None and key in OPTIONAL:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        null = " or null" if key in OPTIONAL else ""
        raise ValueError(f"got {short(written)}; it wants {_NOUNS[kind]}{null}, as its default {short(KEYS[key])}")
    return value


def _text(written: object) -> str:
    if written is None:
        return ""
    if not isinstance(written, str):
        raise ValueError(f"got {short(written)}; it wants {_NOUNS[str]}; put it in quotes")
    return written


def _literal(written: object) -> Any:
    """Texts as what they spell, tuples as lists."""
    if isinstance(written, str):
        text = written.strip()
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        try:
            written = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
        return _literal(written) if isinstance(written, list | tuple) else written
    if isinstance(written, list | tuple):
        return [_literal(item) for item in written]
    return written


def short(value: object) -> str:
    """A value as it is written, on one line, cut after 60 characters."""
    if isinstance(value, tuple):
        value = list(value)
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or (repr(value) if not isinstance(value, float) else f"{value:g}")
    return text if len(text) <= 60 else text[:57] + "..."
