"""Everything twinreel raises on purpose.

TwinreelError                the user can mend it: the command line prints it without a traceback, exit 2
 |- ConfigError              a recipe, an override or an argument is wrong (also a ValueError)
 |- DataError                a video, caption file, manifest or sample is wrong
 |- CheckpointError          weights or a run folder do not fit what was asked of them
 |- DependencyError          an optional package is missing; the text names the install line
 `- TrainingError            a run cannot go on: non-finite loss, out of memory, too many faults

A message says what is wrong, where, what was got, what is allowed, and what to do next.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DependencyError",
    "TrainingError",
    "TwinreelError",
]


class TwinreelError(Exception):
    """Base of all errors that a user can mend.

    `speaker` is who prints it where torchrun started several processes: one of each machine, the main one (all raise
    the same), or the process that has it.
    """

    speaker: Literal["machine", "main", "process"] = "machine"


class ConfigError(TwinreelError, ValueError):
    """A recipe, an override or an argument is wrong."""


class DataError(TwinreelError):
    """A video, a caption file, a manifest or a sample is wrong."""


class CheckpointError(TwinreelError):
    """Weights or a run folder do not fit what was asked of them."""


class DependencyError(TwinreelError):
    """An optional package is missing."""


class TrainingError(TwinreelError):
    """A run cannot go on."""
