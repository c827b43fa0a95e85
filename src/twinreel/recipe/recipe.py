"""A whole recipe, and which keys of its sections go together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import Field, model_validator

from twinreel.recipe.sections import (
    BestMetric,
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RerankSection,
    Section,
    TaskSection,
    TrainSection,
)

__all__ = ["Recipe", "cadence_steps"]

_TOWERS, _CLASSES, _MATCHING = "contrastive", "action_recognition", "video_text_matching"
# Keys that not every task has a use for: changed from their default in another one they would look as if they did
# something.
_USED_BY: dict[str, tuple[str, ...]] = {
    "model.num_classes": (_CLASSES, _MATCHING),
    "model.vocabulary": (_TOWERS, _MATCHING),
    "model.fold_case": (_TOWERS, _MATCHING),
    "model.min_word_count": (_TOWERS, _MATCHING),
    "task.num_candidates": (_TOWERS,),
    "task.max_words": (_TOWERS,),
    "task.learn_temperature": (_TOWERS,),
    "task.multi_label": (_CLASSES,),
    "task.goal": (_MATCHING,),
    "task.num_negatives": (_MATCHING,),
    "task.negatives": (_MATCHING,),
    "data.caption_template": (_TOWERS, _MATCHING),
    "data.caption_rows": (_TOWERS, _MATCHING),
    "data.num_clips": (_MATCHING,),
    "data.mixup": (_CLASSES,),
    "data.cutmix": (_CLASSES,),
    "train.cached_negatives": (_TOWERS,),
    "eval.caption_template": (_TOWERS, _MATCHING),
    "eval.caption_rows": (_TOWERS, _MATCHING),
    "eval.crop_size": (_CLASSES, _MATCHING),
    "eval.combine_views": (_CLASSES,),
    "eval.grad_cam_layer": (_CLASSES,),
    "eval.max_words": (_TOWERS,),
    "eval.merge_equal_captions": (_TOWERS, _MATCHING),
}


class Recipe(Section):
    """One complete experiment."""

    model: ModelSection
    task: TaskSection = Field(default_factory=TaskSection)  # type: ignore[arg-type]
    data: DataSection = Field(default_factory=DataSection)  # type: ignore[arg-type]
    optim: OptimSection = Field(default_factory=OptimSection)  # type: ignore[arg-type]
    train: TrainSection
    eval: EvalSection = Field(default_factory=EvalSection)  # type: ignore[arg-type]
    rerank: RerankSection = Field(default_factory=RerankSection)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        self._check_sizes()
        problems = self._idle_keys()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _check_sizes(self) -> None:
        views, together = self.data.repeated_augmentation, self.clips_together
        for name, size in self.train.model_dump(include={"global_batch_size", "micro_batch_size"}).items():
            if size is not None and size % views:
                raise ValueError(f"train.{name}={size} is not a whole number of data.repeated_augmentation={views}")
            if size is not None and size % together:
                raise ValueError(
                    f"train.{name}={size} is not a whole number of pairs: data.mixup and data.cutmix mix neighbors, so "
                    f"{together} clips stay together"
                )

    def _idle_keys(self) -> list[str]:
        """Keys that this task has no use for, or that contradict each other."""
        problems = [
            f"{name} goes with task.name={' or '.join(users)}; leave it out"
            for name, users in _USED_BY.items()
            if self.task.name not in users and self._is_set(name)
        ]
        if self.rerank.run is not None and self.task.name != _TOWERS:
            problems.append(
                f"rerank.run judges the answers of two towers again (task.name={_TOWERS}), and this is "
                f"task.name={self.task.name}; evaluate a run of two towers with it"
            )
        problems += self._class_problems() if self.task.name == _CLASSES else []
        problems += self._matching_problems() if self.task.name == _MATCHING else []
        return problems + self._best_metric_problems() + self._mixing_problems()

    def _is_set(self, name: str) -> bool:
        """Whether a key has another value than its default."""
        section, key = name.split(".")
        values: Section = getattr(self, section)
        return bool(getattr(values, key) != type(values).model_fields[key].default)

    def _class_problems(self) -> list[str]:
        task = self.task
        several, wrong = str(task.multi_label).lower(), "softmax" if task.multi_label else "sigmoid"
        problems = []
        if self.model.options.get("head_activation") == wrong:
            problems.append(f"model.head_activation={wrong} does not go with task.multi_label={several}")
        if task.multi_label and task.loss == "cross_entropy":
            problems.append(
                "task.loss=cross_entropy is for one class a clip; with task.multi_label=true leave it out or set "
                "task.loss=binary_cross_entropy"
            )
        return problems

    def _matching_problems(self) -> list[str]:
        goal, problems = self.task.goal, []
        if goal != "retrieval":
            problems += [
                f"{name} goes with task.goal=retrieval; leave it out"
                for name in ("task.num_negatives", "task.negatives", "eval.merge_equal_captions")
                if self._is_set(name)
            ]
        if goal != "question_answering" and self.model.num_classes is not None:
            problems.append("model.num_classes goes with task.goal=question_answering; leave it out")
        if self.data.repeated_augmentation > 1:
            problems.append(
                "data.repeated_augmentation goes with the other tasks; here set data.num_clips, clips of one video"
            )
        if goal == "question_answering" and self.model.num_classes == 1:
            problems.append("model.num_classes=1: one answer is no choice; give 2 or more, or leave it out")
        same = {"uniform": "one clip that is spread over the window", "start": "which begin all at its start"}
        if self.data.clip_start in same and self.data.num_clips > 1:
            problems.append(
                f"data.num_clips={self.data.num_clips} with data.clip_start={self.data.clip_start}, "
                f"{same[self.data.clip_start]}; set data.clip_start=random (or center: spread evenly)"
            )
        return problems

    def _best_metric_problems(self) -> list[str]:
        """What a run is judged by must be something that its evaluation gives."""
        best = self.eval.best_metric
        if best is None:
            return []
        if best not in self._measures():
            return [f"eval.best_metric={best} is none of task.name={self.task.name}; leave it out"]
        several = self.task.multi_label
        if self.task.name == _CLASSES and (best == "mean_average_precision") != several:
            return [f"eval.best_metric={best} does not go with task.multi_label={str(several).lower()}"]
        return []

    def _measures(self) -> list[str]:
        names: list[str] = list(get_args(BestMetric))
        if self.task.name == _CLASSES:
            return [name for name in names if "/" not in name and name != "accuracy"]
        if self.task.name == _MATCHING and self.task.goal != "retrieval":
            return ["accuracy"]
        return [name for name in names if "/" in name]

    def _mixing_problems(self) -> list[str]:
        data = self.data
        mixes = data.mixup > 0 or data.cutmix > 0
        idle = {
            "data.mix_probability": data.mix_probability != 1 and not mixes,
            "data.mix_switch_probability": data.mix_switch_probability != 0.5 and not (data.mixup and data.cutmix),
            "train.precise_bn_batches": self.train.precise_bn_batches > 0 and self.train.batch_norm == "frozen",
        }
        needs = {
            "data.mix_probability": "data.mixup or data.cutmix",
            "data.mix_switch_probability": "data.mixup and data.cutmix",
            "train.precise_bn_batches": "batch norms that are not frozen",
        }
        return [f"{name} does nothing without {needs[name]}; leave it out" for name, value in idle.items() if value]

    @property
    def clips_together(self) -> int:
        """Clips of a batch that one process computes together: views of a row, twice as many where rows are mixed."""
        mixes = (self.data.mixup > 0 or self.data.cutmix > 0) and self.data.mix_probability > 0
        return self.data.repeated_augmentation * (2 if mixes else 1)

    @property
    def best_metric(self) -> str:
        """By which metric the checkpoint `best` is chosen."""
        if self.eval.best_metric is not None:
            return self.eval.best_metric
        if self.task.name != _CLASSES:
            return "text_to_video/recall_at_1" if self.task.goal == "retrieval" else "accuracy"
        return "mean_average_precision" if self.task.multi_label else "top_1_accuracy"

    def with_absolute_paths(self) -> Recipe:
        """The same, readable from any folder: the paths of data and eval made absolute."""
        changed = {}
        for name in ("data", "eval"):
            section: DataSection | EvalSection = getattr(self, name)
            manifest = section.manifest
            paths = (manifest,) if isinstance(manifest, str) else manifest
            absolute = None if paths is None else tuple(_absolute(path) for path in paths)
            root = None if section.root is None else _absolute(section.root)
            update: dict[str, Any] = {"manifest": absolute, "root": root}
            if isinstance(section.options.get("class_names"), str):
                update["class_names"] = _absolute(section.options["class_names"])
            changed[name] = section.model_copy(update=update)
        return self.model_copy(update=changed)

    def to_yaml(self) -> str:
        """The resolved recipe, loadable again."""
        values = self.model_dump(mode="json")
        values["model"]["preprocessing"] = {
            key: value for key, value in values["model"]["preprocessing"].items() if value is not None
        }
        return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def cadence_steps(cadence: str, steps_per_epoch: float) -> int:
    """`500 steps` or `5 epochs` as a number of steps, at least 1."""
    number, unit = cadence.split()
    return int(number) if unit.startswith("step") else max(1, math.floor(int(number) * steps_per_epoch))
