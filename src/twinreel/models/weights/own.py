"""A checkpoint of our own: what `model.json` beside its weights states of a cross-modal model and no shape shows.

Attention heads, the pooling of the grid and the frames that a model reads are in no tensor: another number of them
loads as well and gives other scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinreel.errors import CheckpointError

__all__ = ["described_beside"]

_FILES = ("weights.safetensors", "averaged.safetensors")  # as a checkpoint calls them
_DESCRIPTION = "model.json"


def described_beside(path: Path) -> dict[str, Any]:
    """What `Weights` takes of the description of a checkpoint: model, options, preprocessing, architecture; or nothing.

    Args:
        path: the file of weights.

    Raises:
        CheckpointError: the description is damaged.
    """
    place = path.with_name(_DESCRIPTION)
    if path.name not in _FILES or not place.is_file():
        return {}
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
        found: dict[str, Any] = {
            "model": str(values["name"]),
            "options": dict(values["options"]),
            "preprocessing": dict(values["preprocessing"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place}: the description of the weights beside it is damaged: {error!r}; take another checkpoint of the "
            "run, or copy the weights without it and set the options yourself"
        ) from error
    heads = found["options"].get("num_heads")
    if type(heads) is int:
        found["architecture"] = {"num_heads": heads}
    return found
