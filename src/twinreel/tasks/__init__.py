"""Tasks: the glue of batch -> model -> loss. Written out, so that a name can be found by searching for it."""

from __future__ import annotations

from twinreel.tasks.contrastive import Contrastive, Embedder, PairFacts, at_least_float32

__all__ = ["TASKS", "Contrastive", "Embedder", "PairFacts", "at_least_float32"]

TASKS = {"contrastive": Contrastive}
