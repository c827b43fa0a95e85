"""Train, evaluate and use models that understand video and connect it with language.

The public names, sorted, are imported when they are first used: `import twinreel` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinreel import errors, losses, metrics
    from twinreel.assembly import load_model
    from twinreel.data.dataset import read_clip
    from twinreel.data.decode import probe, read_frames
    from twinreel.errors import TwinreelError
    from twinreel.evaluation import evaluate
    from twinreel.models import create_model
    from twinreel.prediction import predict
    from twinreel.recipe import load_recipe
    from twinreel.recognition import recognize
    from twinreel.search import embed_collection, search_collection
    from twinreel.training import train

__version__ = "0.1.0"

__all__ = [
    "TwinreelError",
    "create_model",
    "embed_collection",
    "errors",
    "evaluate",
    "load_model",
    "load_recipe",
    "losses",
    "metrics",
    "predict",
    "probe",
    "read_clip",
    "read_frames",
    "recognize",
    "search_collection",
    "train",
]

_HOME = {
    "TwinreelError": "errors",
    "create_model": "models",
    "embed_collection": "search",
    "evaluate": "evaluation",
    "load_model": "assembly",
    "load_recipe": "recipe",
    "predict": "prediction",
    "probe": "data.decode",
    "read_clip": "data.dataset",
    "recognize": "recognition",
    "read_frames": "data.decode",
    "search_collection": "search",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"twinreel.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"twinreel.{name}")
    raise AttributeError(f"module 'twinreel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
