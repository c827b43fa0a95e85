"""MSR-VTT (Xu et al., CVPR 2016): videos `video0` ... `video9999` of 10 to 30 s with 20 captions each, in its splits.

    split         videos                                     list                              captions
    train_7k      7010, for the test on 1k-A                 MSRVTT_train.7k.csv               of the captions file
    train_9k      9000, likewise                             MSRVTT_train.9k.csv               of the captions file
    test_1k_a     1000 (JSFusion's, Yu et al., ECCV 2018)    MSRVTT_JSFUSION_test.csv          one each, of the list
    train         6513                                       the captions file says            of it
    val           497                                        the captions file says            of it
    test_full     2990                                       the captions file says            of it

The captions file is `MSRVTT_data.json` or `train_val_videodatainfo.json`, as published; a JSON list of
`{"video": ..., "caption": [...]}`; or JSONL such as ClipBERT's, with `clip_name` and `caption`.
`twinreel.data.sources.listed` says where lists and videos are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest.video_names import stem
from twinreel.data.sources.entries import read_json, sentence, short, value_of, wrong_entries
from twinreel.data.sources.listed import check_split, find_list, find_videos, source_root
from twinreel.data.tables import bad_rows, column_names, read_table
from twinreel.errors import DataError

__all__ = ["rows"]

_LISTS = {
    "train_7k": ("MSRVTT_train.7k.csv", "msrvtt_train7k.csv", "msrvtt_train_7k.csv"),
    "train_9k": ("MSRVTT_train.9k.csv", "msrvtt_train9k.csv", "msrvtt_train_9k.csv"),
    "test_1k_a": ("MSRVTT_JSFUSION_test.csv", "msrvtt_jsfusion_test1k.csv", "msrvtt_test_1k_a.csv"),
}
_OFFICIAL = {"train": "train", "val": "validate", "test_full": "test"}
_CAPTIONS = ("MSRVTT_data.json", "train_val_videodatainfo.json", "msrvtt_captions.json", "msrvtt_captions.jsonl")
_EXPECTED = (
    'MSR-VTT\'s {"videos": [{"video_id": "...", "split": "..."}, ...], "sentences": [{"video_id": "...", "caption": '
    '"..."}, ...]}, or [{"video": "...", "caption": ["...", ...]}, ...]'
)
_FULL_TEST = ("msrvtt_full_test2990_captions.json", "test_videodatainfo.json")


def rows(
    root: str | Path | None, split: str | None, *, annotations: str | None = None, captions: str | None = None
) -> list[Clip]:
    """A row for each video of a split, with all its captions, in the order of the list; `id` is `video0`, ...

    Args:
        root: folder or LMDB of the videos.
        split: train_7k, train_9k, test_1k_a, train, val or test_full.
        annotations: folder of the lists, from the current folder.
        captions: name of the captions file in there.

    Raises:
        ConfigError: no root.
        DataError: no such split or list, or a listed video without captions.
    """
    base = source_root(root, "msrvtt")
    split = check_split(split, (*_LISTS, *_OFFICIAL), "msrvtt")
    found: dict[str, list[str]]
    if split == "test_1k_a":
        found = _sentences(find_list(base, annotations, _LISTS[split], "msrvtt"))
        names: Iterable[str] = found
    else:
        # before the captions, of which there are more places to look for
        listed = find_list(base, annotations, _LISTS[split], "msrvtt") if split in _LISTS else None
        full = _FULL_TEST if split == "test_full" else ()
        file = find_list(base, annotations, (captions,) if captions else (*full, *_CAPTIONS), "msrvtt")
        found, splits = _captions(file)
        names = _names(listed) if listed else _of_split(file, found, splits, _OFFICIAL[split])
        _refuse_without(names, found, file)
    names = list(names)
    videos = find_videos(base, names, "msrvtt")
    return [
        Clip(id=name, video=videos[name], captions=tuple(Caption(text=text) for text in found[name]), split=split)
        for name in names
    ]


def _names(path: Path) -> list[str]:
    """The videos of a list, each once."""
    return list(dict.fromkeys(stem(video) for [video] in _texts(path, ("video",), "list of videos")))


def _sentences(path: Path) -> dict[str, list[str]]:
    """The captions of each video of a table with a caption a line."""
    found: dict[str, list[str]] = {}
    for video, text in _texts(path, ("video", "caption"), "list of captions"):
        found.setdefault(stem(video), []).append(text)
    return found


def _texts(path: Path, wanted: Sequence[str], what: str) -> list[list[str]]:
    """The values of the wanted columns of each row of a table; each is text with words, or all wrong rows are named."""
    table = read_table(path, what)
    columns = column_names(table, dict.fromkeys(wanted, "every row needs it"), what)
    rows, problems = [], list(table.problems)
    for line, record in table.records:
        try:
            rows.append([value_of(record, columns[name], str) for name in wanted])
        except ValueError as error:
            problems.append(f"{path}:{line}: {error}")
    if problems:
        raise bad_rows(path, problems, len(table.records) + len(table.problems))
    return rows


def _captions(path: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The captions of each video, and its split where the file says it."""
    if path.suffix.lower() != ".json":
        return _sentences(path), {}
    content = read_json(path, (dict, list), _EXPECTED)
    found: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    if isinstance(content, list):
        _each(path, "entry", content, lambda entry: _add_captions(found, entry))
        return found, {}
    try:
        sentences, videos = (value_of(content, name, list) for name in ("sentences", "videos"))
    except ValueError as error:
        raise DataError(f"{path}: {error}; expected {_EXPECTED}") from error
    _each(path, "sentence", sentences, lambda entry: _add_sentence(found, entry))
    _each(path, "video", videos, lambda entry: _add_split(splits, entry))
    return found, splits


def _each(path: Path, noun: str, entries: list[Any], add: Callable[[Any], None]) -> None:
    problems = []
    for number, entry in enumerate(entries, start=1):
        try:
            add(entry)
        except ValueError as error:
            problems.append(f"{noun} {number}: {error}")
    if problems:
        raise wrong_entries(path, problems, len(entries), _EXPECTED)


def _add_captions(found: dict[str, list[str]], entry: Any) -> None:
    video = stem(value_of(entry, "video", str))
    given = value_of(entry, "caption", object)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"caption must be a sentence or a list of them, got {short(given)}")
    found.setdefault(video, []).extend([sentence(text) for text in texts])


def _add_sentence(found: dict[str, list[str]], entry: Any) -> None:
    found.setdefault(value_of(entry, "video_id", str), []).append(value_of(entry, "caption", str))


def _add_split(splits: dict[str, str], entry: Any) -> None:
    video, split = value_of(entry, "video_id", str), value_of(entry, "split", str)
    if splits.setdefault(video, split) != split:
        raise ValueError(f"{video} is in the split {splits[video]!r} already, here it is in {split!r}")


def _of_split(file: Path, found: dict[str, list[str]], splits: dict[str, str], wanted: str) -> list[str]:
    whole = wanted == "test" and file.name.lower() in _FULL_TEST
    names = list(found) if whole else [name for name in found if splits.get(name) == wanted]
    if not names:
        raise DataError(f"{file}: does not say which videos are of the split {wanted!r}; name the file that does")
    return names


def _refuse_without(names: Iterable[str], found: dict[str, list[str]], file: Path) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(
            f"{file}: no caption of {len(missing)} listed videos (first: {', '.join(missing[:5])}); "
            "name the file that has them: data.captions=FILE"
        )
