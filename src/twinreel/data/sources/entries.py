"""The entries of a published JSON list, checked: what is asked for comes out, or it is said what is there instead."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from twinreel.data.tables import bad_rows, read_text
from twinreel.errors import DataError

__all__ = ["read_json", "sentence", "short", "value_of", "wrong_entries"]

T = TypeVar("T")
_NOUNS: dict[type, str] = {dict: "an object {...}", list: "a list [...]", str: "text"}


def read_json(path: Path, kinds: type | tuple[type, ...], expected: str) -> Any:
    """What a JSON list holds, at least one entry.

    Args:
        path: the file.
        kinds: dict, list or both.
        expected: how a right file looks, for the error.

    Raises:
        DataError: it is missing, no JSON, of another kind or empty, or an object has a key twice.
    """
    text = read_text(path, "list")
    try:
        content = json.loads(text, object_pairs_hook=_no_key_twice) if text.strip() else []
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}; expected {expected}") from error
    except ValueError as error:  # a key twice, or a number of thousands of digits
        raise DataError(f"{path}: {error}; expected {expected}") from error
    if content in ([], {}):
        raise DataError(f"{path}: no entry in it; expected {expected}")
    if not isinstance(content, kinds):
        raise DataError(f"{path}: got {short(content)}; expected {expected}")
    return content


def value_of(entry: Any, key: str, kind: type[T]) -> T:
    """The value of a key of an entry.

    Raises:
        ValueError: the entry is no object, has no such key, or the value is of another kind (dict, list, str) or is
            text without a word.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{short(entry)} is no object with {key!r}")
    if key not in entry:
        raise ValueError(f"no {key!r} in it; there is {', '.join(map(repr, entry)) or 'nothing'}")
    value = entry[key]
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be {_NOUNS[kind]}, got {short(value)}")
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{key} is empty")
    return value


def sentence(value: Any) -> str:
    """A sentence as it is.

    Raises:
        ValueError: it is no text, or has no words.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"a sentence must be text with words, got {short(value)}")
    return value


def wrong_entries(path: Path, problems: Sequence[str], total: int, expected: str) -> DataError:
    """The error about all wrong entries of a file: how many of how many, the first ten, and how right ones look."""
    return DataError(f"{bad_rows(path, problems, total, 'entries')}\n  expected {expected}")


def short(value: Any) -> str:
    """A value as JSON has it, cut after 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {key!r} appears twice in one object")
    return found
