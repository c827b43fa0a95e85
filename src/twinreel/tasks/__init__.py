"""Tasks: the glue of batch -> model -> loss. Written out, so that a name can be found by searching for it.

The loop asks the same of each: `inputs` (what the model and the loss need of a batch), `outputs` (forward), `share`
(one process's part of the loss), `after_step`, `chance_loss`.
"""

from __future__ import annotations

from typing import TypeAlias

from twinreel.tasks.action_recognition import ActionRecognition, ClassFacts, Mixing
from twinreel.tasks.contrastive import Contrastive, PairFacts
from twinreel.tasks.video_text_matching import MatchFacts, VideoTextMatching
from twinreel.tasks.whole import WholeModel, at_least_float32

__all__ = [
    "TASKS",
    "ActionRecognition",
    "ClassFacts",
    "Contrastive",
    "Facts",
    "MatchFacts",
    "Mixing",
    "PairFacts",
    "Task",
    "VideoTextMatching",
    "WholeModel",
    "at_least_float32",
]

TASKS = {
    "contrastive": Contrastive,
    "action_recognition": ActionRecognition,
    "video_text_matching": VideoTextMatching,
}
Task: TypeAlias = Contrastive | ActionRecognition | VideoTextMatching
Facts: TypeAlias = PairFacts | ClassFacts | MatchFacts
