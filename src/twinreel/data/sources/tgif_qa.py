"""TGIF-QA (Jang et al., CVPR 2017): questions about animated GIFs, with five options or open.

    Train_action_question.csv, Test_..., and the same with transition, frameqa     as published, separated by tabs
    tgif_qa_action_train.jsonl, ...                                                ClipBERT's, the same in JSONL

`twinreel.data.sources.listed` says where lists and videos are looked for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from twinreel.data.clip import Caption, Clip
from twinreel.data.sources.entries import value_of
from twinreel.data.sources.listed import check_split, find_list, find_videos, question_rows, source_root
from twinreel.data.tables import Table, bad_rows, parse_table, read_text
from twinreel.errors import DataError

__all__ = ["rows"]

_TYPES = ("object", "number", "color", "location")  # of a frameqa answer, by its number in the CSV
_OPTIONS = ("a1", "a2", "a3", "a4", "a5")
_COLUMNS = ("gif_name", "question", "answer", "vid_id")


def rows(
    root: str | Path | None,
    split: str | None,
    *,
    task: Literal["action", "transition", "frameqa"] = "action",
    annotations: str | None = None,
) -> list[Clip]:
    """A row for each question of a split, in its order; `id` is the published `vid_id`, such as `ACTION4`.

    Args:
        root: folder or LMDB of the GIFs.
        split: train or test.
        task: action and transition have five options, frameqa an open answer.
        annotations: folder of the lists, from the current folder.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or rows that cannot be used.
    """
    base = source_root(root, "tgif_qa")
    split = check_split(split, ("train", "test"), "tgif_qa")
    name = split.capitalize()
    names = (f"{name}_{task}_question.csv", f"tgifqa_{name}_{task}.csv", f"tgif_qa_{task}_{split}.jsonl")
    path = find_list(base, annotations, names, "tgif_qa")
    if path.suffix.lower() == ".jsonl":
        return question_rows(base, path, split, "tgif_qa", options=task != "frameqa")
    return _published(base, parse_table(path, read_text(path, "list")), split, task)


def _published(base: Path, table: Table, split: str, task: str) -> list[Clip]:
    needed = dict.fromkeys((*_COLUMNS, *(("type",) if task == "frameqa" else _OPTIONS)), f"a list of {task} has it")
    _check_columns(table, needed)
    problems = list(table.problems)
    clips = []
    lines: dict[str, int] = {}
    for line, record in table.records:
        try:
            clip = _clip({name: value_of(record, name, str) for name in needed}, split, task)
            if lines.setdefault(clip.id, line) != line:
                raise ValueError(f"vid_id {clip.id!r} is that of line {lines[clip.id]}")
            clips.append(clip)
        except ValueError as error:
            problems.append(f"{table.path}:{line}: not a question of {task}: {error}")
    if problems:
        raise bad_rows(table.path, problems, len(table.records) + len(table.problems))
    videos = find_videos(base, (clip.video for clip in clips), "tgif_qa")
    return [replace(clip, video=videos[clip.video]) for clip in clips]


def _check_columns(table: Table, needed: dict[str, str]) -> None:
    missing = [name for name in needed if name not in table.columns]
    if missing and table.columns:
        why, found = needed[missing[0]], ", ".join(table.columns)
        raise DataError(f"{table.path}: no column {missing[0]!r}, but {why}; columns found: {found}")
    if not table.records and not table.problems:
        raise DataError(f"{table.path}: no question in it; expected a first line with {', '.join(needed)}, and rows")


def _number(record: dict[str, str], name: str, count: int) -> int:
    text = record[name].strip()
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= count:
        raise ValueError(f"{name} {text!r} must be a number from 0 to {count - 1}")
    return int(text)


def _clip(record: dict[str, str], split: str, task: str) -> Clip:
    options = () if task == "frameqa" else tuple(record[name] for name in _OPTIONS)
    answer: str | int = _number(record, "answer", len(options)) if options else record["answer"].strip()
    return Clip(
        id=record["vid_id"].strip(),
        video=record["gif_name"].strip(),
        captions=(Caption(text=record["question"]),),
        labels=(answer,),
        options=options,
        answer_type=None if options else _TYPES[_number(record, "type", len(_TYPES))],
        split=split,
    )
