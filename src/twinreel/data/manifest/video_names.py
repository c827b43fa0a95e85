"""Videos by the names that lists of data sets give them: without a suffix, or with one that the file lost since."""

from __future__ import annotations

import os
from collections.abc import Iterable

from twinreel.data.storage import is_store
from twinreel.data.storage.lmdb_store import IMAGE_SUFFIXES, find_store
from twinreel.data.tables import VIDEO_SUFFIXES

__all__ = ["VideoNames", "stem"]


def stem(name: str) -> str:
    """A video's name without its suffix, if it has a video's; a lone dot at its end goes too."""
    base, suffix = os.path.splitext(name)
    return base if suffix == "." or suffix.lower() in VIDEO_SUFFIXES else name


class VideoNames:
    """Finds the file of a name without suffix in the folder that it leads to; each folder is listed once."""

    def __init__(self) -> None:
        self._listings: dict[str, dict[str, list[str]]] = {}

    def find(self, video: str) -> str:
        """The path of the one video of that name with a suffix; the same path if there is none, or it needs none.

        Raises:
            ValueError: several files could be meant.
        """
        if os.path.splitext(video)[1].lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
            return video
        folder, name = os.path.split(video)
        if folder not in self._listings:
            self._listings[folder] = _by_name(folder)
        return the_one(name, self._listings[folder].get(name, [])) or video


def the_one(name: str, paths: Iterable[str]) -> str | None:
    """The only path of a name; None for none. Raises ValueError for several."""
    paths = sorted(paths)
    if len(paths) > 1:
        raise ValueError(f"{len(paths)} files could be the video {name!r} ({', '.join(paths[:3])}); keep one")
    return paths[0] if paths else None


def _by_name(folder: str) -> dict[str, list[str]]:
    """The paths of a folder's videos by their names without suffix, but for names that are folders themselves."""
    if is_store(folder) or find_store(folder) is not None:
        return {}
    try:
        with os.scandir(folder) as entries:
            listed = [(entry.name, entry.path, entry.is_dir()) for entry in entries]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    folders = {name for name, _, is_folder in listed if is_folder}
    found: dict[str, list[str]] = {}
    for name, path, _ in listed:
        if os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES and not name.startswith("."):
            if stem(name) not in folders:
                found.setdefault(stem(name), []).append(path)
    return found
