"""One safetensors file with a model's weights and what is known of the model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from twinreel.errors import CheckpointError
from twinreel.models.weights.layouts import METADATA

__all__ = ["save_weights"]


def save_weights(tensors: Mapping[str, Tensor], path: Path, description: Mapping[str, Any]) -> None:
    """Write tensors and a description (plain values, as JSON in the file's metadata), whole or not at all.

    Raises:
        CheckpointError: the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    texts = {"format": "pt", METADATA: json.dumps(description, ensure_ascii=False)}
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary, texts)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
