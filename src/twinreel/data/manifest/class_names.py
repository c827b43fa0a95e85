"""Names of class numbers, read from the files that data sets publish beside their lists."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from twinreel.data.tables import read_text
from twinreel.errors import DataError

__all__ = ["read_class_names"]

_FORMS = 'a name a line (the first is class 0), lines such as `1 Archery`, or JSON {"Archery": 1} or ["Archery", ...]'


def read_class_names(path: str | Path) -> dict[int, str]:
    """The name of each class number.

    Read are: a name a line, the first being class 0 (Kinetics' label maps); a number and a name a line (UCF101's
    `classInd.txt`); JSON with an object from names to numbers (PySlowFast, Something-Something) or a list of names.

    Raises:
        DataError: the file cannot be read or is of no such form, or a number or a name is given twice.
    """
    path = Path(path).expanduser()
    text = read_text(path, "file of class names")
    pairs = _json_pairs(path, text) if path.suffix.lower() == ".json" else _line_pairs(text)
    if not pairs:
        raise DataError(f"{path}: no class name in it; write {_FORMS}")
    names = dict(pairs)
    if len(names) < len(pairs) or len(set(names.values())) < len(pairs):
        counts = Counter(item for pair in pairs for item in pair)
        raise DataError(f"{path}: {counts.most_common(1)[0][0]!r} is there twice; a class has one number and one name")
    return names


def _line_pairs(text: str) -> list[tuple[int, str]]:
    lines = [line.strip() for line in re.split(r"\r\n|\n|\r", text) if line.strip()]
    numbered = [re.fullmatch(r"([0-9]+)[ \t,]+(\S.*)", line) for line in lines]
    if all(numbered):
        return [(int(match[1]), match[2]) for match in numbered if match]
    return list(enumerate(lines))


def _json_pairs(path: Path, text: str) -> list[tuple[int, str]]:
    try:
        content: Any = json.loads(text)
        if isinstance(content, list) and all(isinstance(name, str) for name in content):
            return list(enumerate(content))
        return [(int(number), name.strip('"')) for name, number in content.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: no class names can be read from it ({error}); write {_FORMS}") from error
