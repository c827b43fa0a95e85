"""Where the bytes of a video live: in a file, in an LMDB, or as a folder of images."""

from twinreel.data.storage.places import (
    Reader,
    collection_members,
    content_digest,
    is_store,
    missing_paths,
    open_video,
    video_state,
)

__all__ = [
    "Reader",
    "collection_members",
    "content_digest",
    "is_store",
    "missing_paths",
    "open_video",
    "video_state",
]
