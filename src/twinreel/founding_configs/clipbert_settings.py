"""A ClipBERT JSON and its `KEY VALUE` overrides as typed values, each with its place; all problems at once."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from twinreel.errors import ConfigError
from twinreel.founding_configs.clipbert_keys import CHOICES, DEFAULTS, LENGTHS, Kind, kind_of
from twinreel.founding_configs.settings import COMMAND_LINE, Settings, Written, read_configuration
from twinreel.founding_configs.values import short

__all__ = ["json_entries", "read_clipbert"]

_NOUNS: dict[Kind, str] = {
    "flag": "0 or 1",
    "int": "a whole number",
    "float": "a number",
    "text": "a text",
    "path": "a path or null",
    "numbers": "a list of numbers such as [0.9, 0.98]",
    "datasets": 'a list such as [{"name": "msrvtt", "txt": "/txt/train.jsonl", "img": "/img/msrvtt"}]',
}
_MAY_BE_NULL = ("img_pixel_mean", "img_pixel_std", "step_decay_epochs", "cnn_step_decay_epochs", "task", "num_labels")
# What recipes call it, or what is a slip that no likeness of letters finds.
_ALIASES = {
    "lr": "learning_rate",
    "batch_size": "train_batch_size",
    "epochs": "num_train_epochs",
    "num_clips": "train_n_clips",
    "num_frames": "num_frm",
    "frame_rate": "fps",
    "crop_size": "max_img_size",
    "gpus": "n_gpu",
    "clip_norm": "grad_norm",
}


def read_clipbert(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The values of a JSON file, with `KEY VALUE ...` laid over it, as ClipBERT's command line goes before its file.

    Args:
        path: the JSON, or the `log/args.json` of a run.
        overrides: keys and values in turn; `--key value` and `--key=value` as ClipBERT's scripts take them, too. A key
            with several values (`betas 0.9 0.98`) takes as many words.

    Raises:
        ConfigError: the file cannot be read or is not JSON; or unknown keys (with the nearest one), values of another
            kind, a key without a value: all of these in one message.
    """
    path = Path(path)
    settings = Settings(path.name, defaults=DEFAULTS, system="ClipBERT")
    lines: dict[str, int] = {}
    for key, value, line in json_entries(path, read_configuration(path, "ClipBERT's JSON")):
        if key in lines:
            where = f"in lines {lines[key]} and {line}"
            settings.notes.append(f"{key} stands twice, {where}: the last one counts, as in ClipBERT")
        lines[key] = line
        _take(settings, key, value, f"{path.name}:{line}")
    _lay_over(settings, overrides)
    settings.raise_problems()
    return settings


def json_entries(path: Path, text: str) -> Iterator[tuple[str, Any, int]]:
    """(key, value, line) of a JSON object."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    decoder = json.JSONDecoder(parse_constant=refuse)
    try:
        whole = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path.name}:{error.lineno}: not valid JSON: {error.msg}{_hint(text, error.pos)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"{path.name}:1: ClipBERT's JSON is an object {{...}} of keys; this is {short(whole)}")
    gap = re.compile(r"[\s,:]*")
    at = gap.match(text, text.index("{") + 1).end()  # type: ignore[union-attr]
    while text[at] != "}":
        line = text.count("\n", 0, at) + 1
        key, at = decoder.raw_decode(text, at)
        value, at = decoder.raw_decode(text, gap.match(text, at).end())  # type: ignore[union-attr]
        yield key, value, line
        at = gap.match(text, at).end()  # type: ignore[union-attr]


def _hint(text: str, at: int) -> str:
    before = text[:at].rstrip()
    if before.endswith(","):
        return "; no comma before a closing bracket, and no comments"
    if text[at : at + 1] in ("/", "#"):
        return "; JSON has no comments: take the line out"
    return "" if text.strip() else "; the file is empty: give ClipBERT's JSON"


def _lay_over(settings: Settings, overrides: Sequence[str]) -> None:
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if equals:
            _take(settings, key, _word(key, [value]), COMMAND_LINE)
            continue
        if not words:
            settings.problems.append(f"{COMMAND_LINE}: {word} has no value; overrides are keys and values in turn")
            return
        number = _words_of(key, words)
        values, words = words[:number], words[number:]
        _take(settings, key, _word(key, values), COMMAND_LINE)


def _words_of(key: str, words: Sequence[str]) -> int:
    """How many of the next words are values of this key: of a list as many as it has, unless it is written as one."""
    if key not in LENGTHS or words[0].lstrip().startswith("["):
        return 1
    numbers = next((i for i, word in enumerate(words) if not _is_number(word)), len(words))
    return max(1, min(LENGTHS[key] or numbers, numbers))


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _word(key: str, words: Sequence[str]) -> Any:
    """Words of the command line as JSON has them."""
    if len(words) > 1:
        return [json.loads(word) if word.lstrip("-").isdigit() else float(word) for word in words]
    [word] = words
    if key in DEFAULTS and kind_of(key) in ("text", "path"):
        return None if word in ("null", "None") else word
    try:
        return json.loads(word)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(word, word)


def _take(settings: Settings, key: str, value: object, place: str) -> None:
    if key not in DEFAULTS:
        settings.problems.append(f"{place}: unknown key {key}{_nearest(key)}")
        return
    try:
        settings.written[key] = Written(_typed(key, value), place)
    except ValueError as error:
        settings.problems.append(f"{place}: {key}: {error}")


def _nearest(key: str) -> str:
    name = key.lower()
    if name in _ALIASES:
        return f"; did you mean {_ALIASES[name]}?"
    for like in difflib.get_close_matches(name, sorted(DEFAULTS), n=1, cutoff=0.6):
        return f"; did you mean {like}?"
    return f"; there are: {', '.join(sorted(DEFAULTS))}"


def _typed(key: str, value: object) -> Any:
    """The value as its kind, floats for whole numbers where the kind is float.

    Raises:
        ValueError: it is of another kind; the message says what was got and what is wanted.
    """
    kind = kind_of(key)
    if value is None and (kind in ("path", "datasets") or key in _MAY_BE_NULL):
        return None
    if _fits(kind, value):
        value = _CONVERT.get(kind, lambda same: same)(value)
    else:
        raise ValueError(f"got {short(value)}; it wants {_NOUNS[kind]}")
    length = LENGTHS.get(key)
    if length is not None and isinstance(value, list) and len(value) != length:
        raise ValueError(f"got {short(value)}; it wants {length} numbers")
    if key in CHOICES and value not in CHOICES[key]:
        raise ValueError(f"got {short(value)}; there are {', '.join(CHOICES[key])}")
    return value


_CONVERT: dict[Kind, Callable[[Any], Any]] = {
    "flag": bool,
    "float": float,
    "numbers": lambda values: [float(value) if isinstance(value, str) else value for value in values],
}


def _fits(kind: Kind, value: object) -> bool:
    if kind == "flag":
        return value in (0, 1) and isinstance(value, bool | int)
    if kind == "int":
        return type(value) is int
    if kind == "float":
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if kind == "numbers":
        # The founding command line leaves betas as texts: "0.9" in a log/args.json.
        return isinstance(value, list) and all(
            type(item) in (int, float, str) and _is_number(str(item)) for item in value
        )
    if kind == "datasets":
        return isinstance(value, list) and bool(value) and all(_is_dataset(item) for item in value)
    return isinstance(value, str)


def _is_dataset(item: object) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("img"), str):
        return False
    text = item.get("txt")
    paths = list(text.values()) if isinstance(text, dict) else text if isinstance(text, list) else [text]
    return bool(paths) and all(isinstance(path, str) for path in paths)
