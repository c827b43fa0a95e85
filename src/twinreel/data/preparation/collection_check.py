"""What is in a collection and what of it can be used: `twinreel data check`.

A row is excluded if its video cannot be read, its window cannot be read or lies outside the video, its caption file
cannot be used, or its label is outside the classes. What is only odd (warnings of files, the same video twice or in two
splits, unknown words, unequal classes) is said and excludes nothing.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinreel.data.captions import collection_captions
from twinreel.data.clip import Clip, Fault
from twinreel.data.manifest import read_folder, read_manifest, read_manifests
from twinreel.data.preparation.inspection import VideoReport, inspect_videos, same_content
from twinreel.data.sources import annotated
from twinreel.errors import ConfigError
from twinreel.text import Vocabulary
from twinreel.wordpiece import WordPiece

__all__ = ["CollectionCheck", "check_collection", "read_collection"]

_MOST_COMMON = 5
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionCheck:
    """What was found: facts by name, things to look at, bad videos, and rows that cannot be used.

    `faults` has every bad video once (`id` is that of its first row); `excluded` has every row that is excluded, by id.
    """

    rows: tuple[Clip, ...]
    facts: dict[str, Any]
    notes: list[str]
    faults: list[Fault]
    excluded: dict[str, Fault]
    wrong_labels: str | None
    max_faults: float

    @property
    def usable(self) -> list[Clip]:
        """The rows that can be used, in their order."""
        return [row for row in self.rows if row.id not in self.excluded]

    @property
    def passed(self) -> bool:
        """Whether no more rows are excluded than the limit allows, and no label is outside the classes."""
        return self.wrong_labels is None and len(self.excluded) <= self.max_faults * len(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "facts": self.facts,
            "notes": self.notes,
            "faults": [{"video": fault.video, "reason": fault.reason} for fault in self.faults],
            "excluded": [{"id": fault.id, "reason": fault.reason} for fault in self.excluded.values()],
            "wrong_labels": self.wrong_labels,
            "num_rows": len(self.rows),
            "max_faults": self.max_faults,
            "passed": self.passed,
        }

    def to_table(self) -> str:
        """A line a fact, a note, a bad video and a bad row of a good video; then the sum."""
        lines = [f"{name.replace('_', ' '):14} {_as_text(value)}" for name, value in self.facts.items()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"bad video: {fault.video}: {fault.reason}" for fault in self.faults]
        bad = {fault.video for fault in self.faults}
        lines += [f"bad row: {row.id}: {row.reason}" for row in self.excluded.values() if row.video not in bad]
        if self.wrong_labels is not None:
            lines.append(f"wrong labels: {self.wrong_labels}")
        share = len(self.excluded) / len(self.rows)
        lines.append(
            f"{len(self.excluded)} of {len(self.rows)} rows ({share:.1%}) are excluded, with {len(self.faults)} bad "
            f"videos; the limit is {self.max_faults:.1%}"
        )
        return "\n".join(lines)


def read_collection(
    sources: Sequence[str | Path],
    *,
    root: str | Path | None = None,
    split: str | None = None,
    class_names: str | Path | None = None,
) -> tuple[list[Clip], list[str]]:
    """The rows of manifests, or of one folder or store, and for each row what it belongs to: its split or manifest.

    A folder with `videos` and `annotations` has the rows of source annotated; another folder has a row a video.

    Raises:
        DataError, ConfigError: as reading them does, or a folder with other things.
    """
    folders = [Path(source) for source in sources if Path(source).expanduser().is_dir()]
    if folders:
        rows = _folder_rows(folders, sources, root, split, class_names)
        return rows, [row.split or "" for row in rows]
    rows = read_manifests(sources, root=root, split=split, class_names=class_names)
    groups = [row.split or "" for row in rows]
    if len(sources) > 1 and not any(groups):
        groups = [Path(path).stem for path in sources for _ in read_manifest(path, root=root)]
    return rows, groups


def _folder_rows(
    folders: Sequence[Path],
    sources: Sequence[str | Path],
    root: str | Path | None,
    split: str | None,
    class_names: str | Path | None,
) -> list[Clip]:
    folder = folders[0].expanduser()
    if len(sources) > 1 or root is not None:
        raise ConfigError(f"{folder} is a folder: check it alone and without --root; name manifests to check several")
    if annotated.is_annotated(folder):
        return annotated.rows(folder, split, class_names=None if class_names is None else str(class_names))
    if split is not None or class_names is not None:
        raise ConfigError(f"{folder} is a folder of videos: it has neither splits nor labels; leave them out")
    return read_folder(folder)


def check_collection(
    rows: Sequence[Clip],
    groups: Sequence[str],
    *,
    num_workers: int,
    max_faults: float = 0.05,
    deep: bool = False,
    num_classes: int | None = None,
    vocabulary: Vocabulary | WordPiece | None = None,
    most_seconds: float | None = None,
    progress: Progress | None = None,
) -> CollectionCheck:
    """Open every video of the rows and say what is there.

    Args:
        rows: the collection.
        groups: for each row its split, manifest or "".
        num_workers: processes.
        max_faults: share of excluded rows up to which the check passes.
        deep: decode every frame.
        num_classes: labels must be numbers below it, or names of at most as many classes.
        vocabulary: to find unknown words.
        most_seconds: that a video may take.
        progress: is told (what, done, all).

    Raises:
        ConfigError, DataError: as `inspect_videos`.
    """

    def told(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    reports = inspect_videos(
        rows, num_workers=num_workers, deep=deep, most_seconds=most_seconds, progress=told("opening")
    )
    same = same_content(reports, num_workers=num_workers, progress=told("comparing"))
    excluded = {row.id: fault for row in rows if (fault := _video_fault(row, reports[row.video])) is not None}
    caption_facts = _caption_facts(rows, vocabulary, excluded)
    label_facts, wrong_labels = _label_facts(rows, groups, num_classes, excluded)
    first = {row.video: row.id for row in reversed(rows)}
    counts = Counter(groups)
    facts: dict[str, Any] = {"rows": len(rows)}
    facts |= {"splits": dict(sorted(counts.items()))} if any(counts) else {}
    facts |= {**_video_facts(list(reports.values()), deep), **label_facts, **caption_facts}
    return CollectionCheck(
        rows=tuple(rows),
        facts=facts,
        notes=[*_warnings(reports.values()), *_copies(rows, groups, same)],
        faults=[Fault(id=first[v], video=v, reason=r.fault) for v, r in reports.items() if r.fault is not None],
        excluded={row.id: excluded[row.id] for row in rows if row.id in excluded},
        wrong_labels=wrong_labels,
        max_faults=max_faults,
    )


def _video_fault(row: Clip, report: VideoReport) -> Fault | None:
    window = (row.start_seconds, row.end_seconds)
    reason = report.bad_windows.get(window) if report.opened else report.fault
    return None if reason is None else Fault(id=row.id, video=row.video, reason=reason)


# ---- facts


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_as_text(item)}" for name, item in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _video_facts(reports: Sequence[VideoReport], deep: bool) -> dict[str, Any]:
    opened = [report for report in reports if report.opened]
    faults = sum(report.fault is not None for report in reports)
    facts: dict[str, Any] = {"videos": len(reports), "bad_videos": faults}
    if not opened:
        return facts
    seconds = [report.duration_seconds for report in opened]
    facts["seconds"] = {"total": sum(seconds), **_spread(seconds)}
    facts["frames"] = {
        "total": sum(report.num_frames for report in opened),
        "decoded": "all" if deep else "two a video",
    }
    facts["megabytes"] = sum(report.num_bytes for report in opened) / 1e6
    facts["sizes"] = _most(f"{report.width}x{report.height}" for report in opened)
    facts["frame_rates"] = _most(f"{report.frame_rate:.5g} Hz" for report in opened)
    facts["codecs"] = _most(report.codec for report in opened)
    return facts


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _most(values: Iterable[str]) -> dict[str, Any]:
    """How often each value occurs, the most common first, ties in their order; the rare ones as one number."""
    counts = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    most = {f"{name} x": count for name, count in counts[:_MOST_COMMON]}
    rest = counts[_MOST_COMMON:]
    return most | ({f"{len(rest)} others x": sum(count for _, count in rest)} if rest else {})


def _warnings(reports: Iterable[VideoReport]) -> list[str]:
    """A line for each kind of warning: those that differ in numbers only are one kind."""
    kinds: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for report in reports:
        for warning in report.warnings:
            kinds[re.sub(r"[0-9]+(\.[0-9]+)?", "N", warning)].append((report.video, warning))
        if report.late_windows:
            text = f"{report.late_windows} windows end after the video"
            kinds["windows end after the video"].append((report.video, text))
    return [
        f"{len(found)} {'videos' if len(found) > 1 else 'video'}: {found[0][1]} "
        f"({found[0][0]}{', ...' if len(found) > 1 else ''})"
        for _, found in sorted(kinds.items())
    ]


def _copies(rows: Sequence[Clip], groups: Sequence[str], same: Sequence[Sequence[str]]) -> list[str]:
    """Videos in several splits, then the same content under several names."""
    splits: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row, group in zip(rows, groups, strict=True):
        splits[row.video][group] = None
    notes = [f"in several splits ({', '.join(found)}): {video}" for video, found in splits.items() if len(found) > 1]
    for videos in same:
        between = list(dict.fromkeys(group for video in videos for group in splits[video]))
        where = f", in several splits ({', '.join(between)})" if len(between) > 1 else ""
        notes.append(f"the same bytes{where}: {' = '.join(videos)}")
    return notes


# ---- labels and captions


def _label_facts(
    rows: Sequence[Clip], groups: Sequence[str], num_classes: int | None, excluded: dict[str, Fault]
) -> tuple[dict[str, Any], str | None]:
    """Facts about labels, and what is wrong with them for `num_classes`; rows outside it are excluded."""
    counts = Counter(label for row in rows for label in row.labels)
    if not counts:
        return {}, None if num_classes is None else f"no row has a label, but {num_classes} classes are asked for"
    numbers = [label for label in counts if isinstance(label, int)]
    facts: dict[str, Any] = {"classes": len(counts), "rows_a_class": _spread(list(counts.values()))}
    if numbers:
        facts["lowest_label"], facts["highest_label"] = min(numbers), max(numbers)
    if len(numbers) < len(counts) and numbers:
        facts["label_kinds"] = f"{len(numbers)} numbers and {len(counts) - len(numbers)} names"
    without = sum(not row.labels for row in rows)
    facts |= {"rows_without": without} if without else {}
    facts |= _only_elsewhere(rows, groups)
    if num_classes is None:
        return facts, None
    bad = [row for row in rows if any(isinstance(label, int) and label >= num_classes for label in row.labels)]
    for row in bad:
        reason = f"label {max(label for label in row.labels if isinstance(label, int))}, but {num_classes} classes"
        excluded.setdefault(row.id, Fault(id=row.id, video=row.video, reason=reason))
    if bad:
        hint = "; labels seem to count from 1: subtract 1" if min(numbers) == 1 and max(numbers) == num_classes else ""
        return facts, (
            f"{len(bad)} rows have labels outside 0 to {num_classes - 1} (found: {min(numbers)} to {max(numbers)}, "
            f"{num_classes} classes){hint}"
        )
    names = len(counts) - len(numbers)
    return facts, f"{names} class names, but {num_classes} classes" if names > num_classes else None


def _only_elsewhere(rows: Sequence[Clip], groups: Sequence[str]) -> dict[str, Any]:
    """Classes that other splits have and the training split does not."""
    of_group: defaultdict[str, set[str | int]] = defaultdict(set)
    for row, group in zip(rows, groups, strict=True):
        of_group[group].update(row.labels)
    trained = of_group.pop("train", None)
    if not trained:
        return {}
    unseen = {group: len(labels - trained) for group, labels in sorted(of_group.items()) if labels - trained}
    return {"classes_not_in_train": unseen} if unseen else {}


def _caption_facts(
    rows: Sequence[Clip], vocabulary: Vocabulary | WordPiece | None, excluded: dict[str, Fault]
) -> dict[str, Any]:
    """Facts about captions; rows whose caption file cannot be used are excluded."""
    faults: list[Fault] = []
    unknown: Counter[str] = Counter()
    total = silent = 0
    for text in collection_captions(rows, faults):
        total += 1
        if vocabulary is not None:
            unknown.update(vocabulary.unknown_words([text]))
            silent += not vocabulary.encode(text)
    files = {row.id: row.caption_file for row in rows}
    reasons = {files[fault.id]: fault.reason for fault in faults}
    for row in rows:
        if row.caption_file in reasons:
            excluded.setdefault(row.id, Fault(id=row.id, video=row.video, reason=reasons[row.caption_file]))
    facts: dict[str, Any] = {"captions": total} if total or vocabulary is not None else {}
    if vocabulary is not None:
        most = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))[:_MOST_COMMON]
        facts["unknown_words"] = len(unknown)
        facts |= {"most_unknown": dict(most)} if most else {}
        facts["silent_captions"] = silent
    return facts
