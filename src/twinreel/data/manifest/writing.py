"""Rows -> a manifest that `read_manifest` reads back."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest.row_fields import parse_row
from twinreel.data.tables import COLUMNS, is_table, write_whole
from twinreel.errors import DataError

__all__ = ["check_target", "write_manifest"]


def write_manifest(path: str | Path, rows: Sequence[Clip]) -> None:
    """Writes rows so that `read_manifest` returns them again; CSV or JSONL by suffix, whole or not at all.

    Paths are written as they are in the rows. Only columns that some row uses are written.

    Raises:
        DataError: no rows, an id twice, a row that would not be read back, another suffix, or a failing disk.
    """
    target = Path(path)
    as_table = check_target(target)
    if not rows:
        raise DataError(f"{target}: no rows to write; a manifest has at least one")
    repeated = [id for id, count in Counter(row.id for row in rows).items() if count > 1 or not id.strip()]
    if repeated:
        raise DataError(f"{target}: {len(repeated)} ids are empty or used twice (first: {repeated[0]!r})")
    records = [_record(row) for row in rows]
    for record in records:
        try:
            parse_row(record, base="", cells=False)
        except ValueError as error:
            raise DataError(f"{target}: row {record['id']!r} cannot be written: {error}") from None
    text = _csv_text(records) if as_table else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    write_whole(target, text)


def check_target(path: Path) -> bool:
    """Whether a manifest written at `path` is a CSV, else a JSONL.

    Raises:
        DataError: it cannot be written there: another suffix, or no such folder.
    """
    if not path.parent.is_dir():
        raise DataError(f"{path}: cannot be written: there is no folder '{path.parent}'")
    return is_table(path, "manifest")


def _record(row: Clip) -> dict[str, Any]:
    """A row as a JSONL object, without what is not given."""
    record: dict[str, Any] = {"id": row.id, "video": row.video}
    record |= {"start_seconds": row.start_seconds, "end_seconds": row.end_seconds}
    if len(row.captions) == 1 and row.captions[0].start_seconds is None and row.captions[0].end_seconds is None:
        record["caption"] = row.captions[0].text
    elif row.captions:
        record["captions"] = [_caption_value(caption) for caption in row.captions]
    record["caption_file"] = row.caption_file or None
    answered = row.options or (row.answer_type is not None and all(isinstance(label, str) for label in row.labels))
    record["options"] = list(row.options) or None
    record["answer_type"] = row.answer_type or None
    record["answer" if answered else "label"] = row.labels[0] if len(row.labels) == 1 else list(row.labels) or None
    record["split"] = row.split or None
    return {name: value for name, value in record.items() if value is not None}


def _caption_value(caption: Caption) -> Any:
    times = {"start_seconds": caption.start_seconds, "end_seconds": caption.end_seconds}
    given = {name: value for name, value in times.items() if value is not None}
    return {"text": caption.text, **given} if given else caption.text


def _csv_text(records: Sequence[dict[str, Any]]) -> str:
    columns = [name for name in COLUMNS if any(name in record for record in records)]
    text = io.StringIO(newline="")
    # every text is quoted: spaces at its start would be dropped in reading
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    csv.writer(text, lineterminator="\n").writerow(columns)
    writer.writerows([[_cell(name, record.get(name, "")) for name in columns] for record in records])
    return text.getvalue()


def _cell(name: str, value: Any) -> Any:
    if name == "label" and isinstance(value, str) and value:
        if value != value.strip() or value.startswith("[") or _is_number(value):
            value = [value]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
