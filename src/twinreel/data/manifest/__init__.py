"""Manifests: a CSV or JSONL file of rows about videos, read into `Clip` rows, checked and written."""

from twinreel.data.manifest.rows import (
    VIDEO_SUFFIXES,
    missing_videos,
    read_folder,
    read_manifest,
    read_manifests,
    unused_columns,
    walk_files,
)
from twinreel.data.manifest.writing import check_target, write_manifest

__all__ = [
    "VIDEO_SUFFIXES",
    "check_target",
    "missing_videos",
    "read_folder",
    "read_manifest",
    "read_manifests",
    "unused_columns",
    "walk_files",
    "write_manifest",
]
