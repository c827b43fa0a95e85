"""Where rows come from: SOURCES, written out, and how a recipe's `data` section becomes rows.

A source is a function `rows(root, split, *, options) -> list[Clip]`; its signature is the schema of its options. A
user's own is named `package.module:function` and need not be listed here.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twinreel.config import import_function, nearest
from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifests, unused_columns
from twinreel.data.sources import (
    activitynet,
    annotated,
    class_folders,
    didemo,
    generated,
    howto100m,
    kinetics,
    msrvtt,
    msrvtt_mc,
    msrvtt_qa,
    tgif_qa,
)
from twinreel.errors import ConfigError, DataError

__all__ = ["SOURCES", "load_rows", "manifest_rows", "source_notes"]


def manifest_rows(
    root: str | Path | None,
    split: str | None,
    *,
    manifest: str | list[str],
    caption_template: str | None = None,
    class_names: str | None = None,
) -> list[Clip]:
    """Rows of the user's own CSV, JSONL or `path label` files; see `twinreel.data.manifest`.

    Args:
        root: folder that paths in the rows start from; None: each manifest's own folder.
        split: rows of this split; None: all rows.
        manifest: one file or several, from the current folder.
        caption_template: such as `'a person is {label}'`, for rows with labels and no caption.
        class_names: a file with the names of class numbers, from the current folder.
    """
    return read_manifests(
        _listed(manifest), root=root, split=split, caption_template=caption_template, class_names=class_names
    )


SOURCES: dict[str, Callable[..., list[Clip]]] = {
    "activitynet": activitynet.rows,
    "annotated": annotated.rows,
    "class_folders": class_folders.rows,
    "didemo": didemo.rows,
    "generated": generated.rows,
    "howto100m": howto100m.rows,
    "kinetics": kinetics.rows,
    "manifest": manifest_rows,
    "msrvtt": msrvtt.rows,
    "msrvtt_mc": msrvtt_mc.rows,
    "msrvtt_qa": msrvtt_qa.rows,
    "tgif_qa": tgif_qa.rows,
}


def load_rows(source: str, root: str | Path | None, split: str | None, **options: Any) -> list[Clip]:
    """The rows of a source.

    Args:
        source: a name of SOURCES, or a function of the user's as `package.module:function`.
        root: the source's folder.
        split: the split; None: all rows.
        options: the source's own options.

    Raises:
        ConfigError: no such source or option, or one that the source needs is missing.
        DataError: the source's data cannot be used, or a user's function returns no rows with unique ids.
    """
    function = SOURCES.get(source) or _user_source(source)
    _check_options(source, function, options)
    rows = function(root, split, **options)
    if source not in SOURCES:
        _check_rows(source, rows)
    return rows


def source_notes(source: str, **options: Any) -> list[str]:
    """What a source leaves unused, a line each ("items.jsonl: columns not used: category, origin"); mostly none."""
    if source != "manifest":
        return []
    notes = []
    for path in _listed(options["manifest"]):
        columns = unused_columns(path)
        if columns:
            notes.append(f"{os.fspath(path)}: columns not used: {', '.join(columns)}")
    return notes


def _listed(manifest: str | Sequence[str] | None) -> list[str]:
    return [manifest] if isinstance(manifest, str | os.PathLike) else list(manifest or ())


def _user_source(source: str) -> Callable[..., list[Clip]]:
    if ":" not in source:
        raise ConfigError(
            f"unknown source {source!r}{nearest(source, SOURCES)}; or name your own package.module:function"
        )
    return import_function(source, "source")


def _check_options(source: str, function: Callable[..., list[Clip]], options: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    problems = [f"no option {name!r}{nearest(name, known)}" for name in options if name not in known]
    problems += [
        f"needs {name!r}" for name, p in known.items() if p.default is inspect.Parameter.empty and name not in options
    ]
    if problems:
        raise ConfigError(f"source {source!r}: {', and '.join(problems)}")


def _check_rows(source: str, rows: list[Clip]) -> None:
    wrong = next((row for row in rows if not isinstance(row, Clip)), None) if isinstance(rows, list) else rows
    if wrong is not None:
        raise DataError(f"source {source!r} must return a list of twinreel.data.clip.Clip, got {type(wrong).__name__}")
    if not rows:
        raise DataError(f"source {source!r} returned no rows")
    id, count = Counter(row.id for row in rows).most_common(1)[0]
    if count > 1:
        raise DataError(f"source {source!r} returned {count} rows with the id {id!r}; ids must be unique")
