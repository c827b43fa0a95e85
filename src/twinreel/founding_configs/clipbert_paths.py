"""Paths of ClipBERT's container as paths of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinreel.errors import ConfigError
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short

__all__ = ["PathMap"]

_CONTAINER = ("/txt", "/img", "/pretrain", "/storage", "/clipbert")  # what its launch script mounts


@dataclass(slots=True)
class PathMap:
    """Which folders are where. `find` translates a path; `check` says what was of no use, and what is missing.

    Args:
        pairs: (folder of the file, folder of this machine), longest first.
        used: folders of the file that some path began with.
        kept: key and path of those that began with none and are in the container's own folders.
        seen: all paths that were asked for.
    """

    pairs: list[tuple[str, str]]
    used: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, maps: Sequence[str]) -> PathMap:
        """Of `/img=/data/lmdb` texts.

        Raises:
            ConfigError: a text is not two paths, or a folder stands twice.
        """
        pairs = []
        for text in maps:
            old, equals, new = text.partition("=")
            if not (equals and old.strip() and new.strip()):
                raise ConfigError(f"--map {text}: write FOLDER_IN_THE_FILE=FOLDER_HERE, such as --map /img=/data/lmdb")
            pairs.append((old.strip().rstrip("/") or "/", new.strip().rstrip("/") or "/"))
        names = [old for old, _ in pairs]
        twice = sorted({old for old in names if names.count(old) > 1})
        if twice:
            raise ConfigError(f"--map {twice[0]}=... is given twice; give it once")
        return cls(sorted(pairs, key=lambda pair: -len(pair[0])))

    def find(self, key: str, path: str) -> str:
        """The path with its folder here, or as it is."""
        self.seen.append(path)
        fitting = [(old, new) for old, new in self.pairs if f"{path}/".startswith(old.rstrip("/") + "/")]
        self.used |= {old for old, _ in fitting}
        if fitting:
            old, new = fitting[0]
            rest = path.removeprefix(old).lstrip("/")
            return f"{new.rstrip('/')}/{rest}" if rest else new
        if any(path == folder or path.startswith(f"{folder}/") for folder in _CONTAINER):
            self.kept.setdefault(path, key)
        return path

    def lists(self, draft: Draft, key: str) -> str | list[str] | None:
        """The annotation files of the first data set; of several tasks those of `task`."""
        first = _first(draft, key)
        if first is None:
            return None
        text, task = first["txt"], draft.settings["task"]
        if isinstance(text, dict):
            if task not in text:
                names = ", ".join(sorted(text))
                draft.refuse((key, "task"), f"{key}: txt has {names}, but task is {short(task)}; give one of them")
                return None
            text = text[task]
        if isinstance(text, list) and len(text) == 1:
            [text] = text
        return self.find(key, text) if isinstance(text, str) else [self.find(key, path) for path in text]

    def images(self, draft: Draft, key: str) -> str | None:
        """The LMDB of the first data set."""
        first = _first(draft, key)
        return None if first is None else self.find(key, first["img"])

    def check(self, draft: Draft) -> None:
        """Refuse pairs that no path began with; name the container's folders that are left."""
        for old, _ in self.pairs:
            if old not in self.used:
                paths = ", ".join(dict.fromkeys(self.seen)) or "none"
                draft.settings.problems.append(f"--map {old}=...: no path begins with {old}; the paths are: {paths}")
        if self.kept:
            folders = sorted({"/" + path.split("/")[1] for path in self.kept})
            maps = " ".join(f"--map {folder}=FOLDER" for folder in folders)
            draft.notes.append(f"{', '.join(folders)} are folders of ClipBERT's container: {maps} says where they are")


def _first(draft: Draft, key: str) -> dict[str, Any] | None:
    """The data set that counts: there only the first did, outside pretraining."""
    items = draft.settings[key]
    if not items:
        if key == "train_datasets":
            draft.refuse(key, f'{key}: it is missing; give [{{"name": NAME, "txt": FILE.jsonl, "img": LMDB}}]')
        return None
    if len(items) > 1:
        draft.lose(key, f"the first of {len(items)} counts, as there; data.manifest takes a list of files")
    first: dict[str, Any] = items[0]
    return first
