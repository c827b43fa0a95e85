"""The values of one manifest row -> the fields of a `Clip`: windows, captions, labels, templates."""

from __future__ import annotations

import json
import math
import os
import re
import string
from collections.abc import Mapping
from typing import Any

from twinreel.data.clip import Caption
from twinreel.errors import ConfigError

__all__ = ["check_template", "check_times", "parse_row", "text_value"]


def parse_row(
    values: dict[str, Any],
    *,
    base: str,
    cells: bool,
    template: str | None = None,
    class_names: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """The fields of a `Clip` but for its id.

    Args:
        values: by column; what is not given is absent.
        base: folder that relative paths start from.
        cells: every value is text (CSV).
        template: caption of a row with labels and no caption.
        class_names: names of class numbers; labels become names.

    Raises:
        ValueError: what is wrong with the row.
    """
    video = values.get("video")
    if not isinstance(video, str) or not video.strip():
        raise ValueError(f"video must be text, got {video!r}" if video else "video is empty")
    start, end = check_times(values.get("start_seconds"), values.get("end_seconds"), point_allowed=False)
    if end is not None and start is None:
        start = 0.0
    given = [name for name in ("caption", "captions", "caption_file") if name in values]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given; a row has one of them")
    captions = _captions(values, cells)
    caption_file = text_value(values, "caption_file")
    options, labels = _answers(values, cells)
    if class_names is not None:
        labels = tuple(_class_name(label, class_names) for label in labels)
    if template is not None and not captions and caption_file is None:
        captions = _captions_from_labels(template, labels)
    split = text_value(values, "split")
    return {
        "video": os.path.join(base, video),
        "start_seconds": start,
        "end_seconds": end,
        "captions": captions,
        "caption_file": None if caption_file is None else os.path.join(base, caption_file),
        "labels": labels,
        "options": options,
        "answer_type": text_value(values, "answer_type"),
        "split": None if split is None else split.strip(),
    }


def text_value(values: Mapping[str, Any], name: str) -> str | None:
    """A value as text, None if it is not given; a whole number is text too. Raises ValueError for anything else."""
    value = values.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{name} must be text, got {value!r}")


def check_times(start: Any, end: Any, *, point_allowed: bool) -> tuple[float | None, float | None]:
    """Start and end of a window in seconds, from text or numbers; None where not given.

    Raises:
        ValueError: not a number, not finite, negative, or the end is not after the start. With `point_allowed`
            they may be equal (a caption may be a point in time, a row may not).
    """
    times: list[float | None] = []
    for name, value in (("start_seconds", start), ("end_seconds", end)):
        try:
            seconds = None if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if isinstance(value, bool) or (seconds is not None and not 0 <= seconds < math.inf):
            raise ValueError(f"{name} {value!r} must be a number of seconds, 0 or more")
        times.append(seconds)
    first, last = times
    if last is not None and not (first or 0.0) < last and not (point_allowed and first == last):
        kind = "is a window of no length" if last == (first or 0.0) else "ends before it starts"
        raise ValueError(f"[{first or 0.0:g}, {last:g}) {kind}; end_seconds must be greater than start_seconds")
    return first, last


def _json_list(name: str, value: Any, cells: bool) -> list[Any]:
    if cells:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = str(value)
    if not isinstance(value, list):
        raise ValueError(f'{name} must be a JSON list such as ["one", "two"], got {value!r}')
    return value


def _captions(values: dict[str, Any], cells: bool) -> tuple[Caption, ...]:
    if "caption" in values:
        if not isinstance(values["caption"], str):
            hint = "; a list of sentences goes into 'captions'" if isinstance(values["caption"], list) else ""
            raise ValueError(f"caption must be text, got {values['caption']!r}{hint}")
        return (_caption(values["caption"]),)
    if "captions" not in values:
        return ()
    return tuple(_caption(item) for item in _json_list("captions", values["captions"], cells))


def _caption(item: Any) -> Caption:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, dict):
        raise ValueError(f"a caption must be text or an object, got {item!r}")
    renamed = {"start": "start_seconds", "end": "end_seconds", "caption": "text"}
    fields = {renamed.get(key, key): value for key, value in item.items()}
    if not fields.keys() <= {"text", "start_seconds", "end_seconds"} or len(fields) != len(item):
        raise ValueError(f"a caption has text, start_seconds and end_seconds, each once; got {list(item)}")
    if not isinstance(fields.get("text"), str) or not fields["text"].strip():
        raise ValueError(f"a caption without text: {item!r}")
    start, end = check_times(fields.get("start_seconds"), fields.get("end_seconds"), point_allowed=True)
    return Caption(text=fields["text"], start_seconds=start, end_seconds=end)


def _answers(values: dict[str, Any], cells: bool) -> tuple[tuple[str, ...], tuple[str | int, ...]]:
    """The options of a row, and its labels: the place of the right one or, without options, the answer itself."""
    answer = values.get("answer")
    if "label" in values and answer is not None:
        raise ValueError("answer and label are both given; a row has one of them")
    if "options" not in values:
        if answer is None:
            return (), _labels(values.get("label"), cells)
        return (), ((text_value(values, "answer") or "").strip(),)
    options = _json_list("options", values["options"], cells)
    if len(options) < 2 or not all(isinstance(option, str) and option.strip() for option in options):
        raise ValueError(f"options must be a list of at least two texts, got {options!r}")
    if "label" in values:
        raise ValueError("options have an answer, not a label: its number from 0, or its words")
    return tuple(options), () if answer is None else (_place(answer, options, cells),)


def _place(answer: Any, options: list[str], cells: bool) -> int:
    """The place of the right option by its number, or else by its words."""
    if cells and re.fullmatch("[0-9]+", answer.strip()):
        answer = int(answer)
    if isinstance(answer, str) and options.count(answer) == 1:
        return options.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(options):
        raise ValueError(f"answer {answer!r} must be one of the options, or its number from 0 to {len(options) - 1}")
    return answer


def _labels(value: Any, cells: bool) -> tuple[str | int, ...]:
    if value is None:
        return ()
    if cells:
        value = _label_cell(value.strip())
    items = value if isinstance(value, list) else [value]
    for item in items:
        is_number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_number and not (isinstance(item, str) and item.strip()):
            raise ValueError(f"label {item!r} must be a name or a class number 0, 1, 2, ...")
    if len(set(items)) != len(items):
        raise ValueError(f"label {value!r} names a class twice")
    return tuple(items)


def _label_cell(cell: str) -> Any:
    if cell.startswith("["):
        return _json_list("label", cell, cells=True)
    if re.fullmatch("0|[1-9][0-9]*", cell):
        return int(cell)
    try:
        float(cell)
    except ValueError:
        return cell
    raise ValueError(f"label {cell!r} is no class number (0, 1, 2, ...); if it is a name, write " + f'["{cell}"]')


def _class_name(label: str | int, class_names: Mapping[int, str]) -> str:
    if isinstance(label, str):
        return label
    if label not in class_names:
        raise ValueError(f"label {label} has no class name; the names are of {min(class_names)} to {max(class_names)}")
    return class_names[label]


def check_template(template: str) -> None:
    """Raises:
    ConfigError: the template holds other fields than `{label}`, or none.
    """
    try:
        parts = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(f"caption_template {template!r}: {error}; write such as 'a person is {{label}}'") from None
    if not parts or any(part != ("label", "", None) for part in parts):
        raise ConfigError(f"caption_template {template!r} must hold {{label}} and no other field")


def _captions_from_labels(template: str, labels: tuple[str | int, ...]) -> tuple[Caption, ...]:
    if not labels:
        raise ValueError("neither caption nor label, so caption_template has nothing to say")
    numbers = [label for label in labels if isinstance(label, int)]
    if numbers:
        raise ValueError(
            f"label {numbers[0]} is a number; caption_template needs names: give class_names, a file of them"
        )
    return tuple(Caption(text=template.format(label=str(label).replace("_", " "))) for label in labels)
