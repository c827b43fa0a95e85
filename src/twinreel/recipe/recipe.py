"""A whole recipe, and which keys of its sections go together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from twinreel.recipe.sections import (
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    Section,
    TaskSection,
    TrainSection,
)

__all__ = ["Recipe", "cadence_steps"]


class Recipe(Section):
    """One complete experiment."""

    model: ModelSection
    task: TaskSection = Field(default_factory=TaskSection)  # type: ignore[arg-type]
    data: DataSection = Field(default_factory=DataSection)  # type: ignore[arg-type]
    optim: OptimSection = Field(default_factory=OptimSection)  # type: ignore[arg-type]
    train: TrainSection
    eval: EvalSection = Field(default_factory=EvalSection)  # type: ignore[arg-type]

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
        """Keys that this task has no use for must not look as if they did something."""
        contrastive = self.task.name == "contrastive"
        task, data, judged, best = self.task, self.data, self.eval, self.eval.best_metric
        given: dict[str, Any]
        if contrastive:
            other = "action_recognition"
            given = {"task.multi_label": task.multi_label, "model.num_classes": self.model.num_classes}
            given |= {"data.mixup": data.mixup, "data.cutmix": data.cutmix}
            given |= {"eval.crop_size": judged.crop_size, "eval.combine_views": judged.combine_views == "max"}
            given |= {"eval.grad_cam_layer": judged.grad_cam_layer}
        else:
            other = "contrastive"
            given = {"task.num_candidates": task.num_candidates != 1, "task.learn_temperature": task.learn_temperature}
            given |= {"train.cached_negatives": self.train.cached_negatives, "model.vocabulary": self.model.vocabulary}
            given |= {"eval.merge_equal_captions": judged.merge_equal_captions, "task.max_words": task.max_words != 20}
            given |= {"eval.max_words": judged.max_words != 30, "model.fold_case": not self.model.fold_case}
            given |= {"model.min_word_count": self.model.min_word_count != 1}
            given |= {"data.caption_template": data.caption_template, "eval.caption_template": judged.caption_template}
        problems = [f"{name} goes with task.name={other}; leave it out" for name, value in given.items() if value]
        activation = self.model.options.get("head_activation")
        wrong = "softmax" if task.multi_label else "sigmoid"
        if not contrastive and activation == wrong:
            problems.append(
                f"model.head_activation={wrong} does not go with task.multi_label={str(task.multi_label).lower()}"
            )
        if not contrastive and task.multi_label and task.loss == "cross_entropy":
            problems.append(
                "task.loss=cross_entropy is for one class a clip; with task.multi_label=true leave it out or set "
                "task.loss=binary_cross_entropy"
            )
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
        problems += [
            f"{name} does nothing without {needs[name]}; leave it out" for name, value in idle.items() if value
        ]
        if best is not None and ("/" in best) != contrastive:
            problems.append(f"eval.best_metric={best} is none of task.name={task.name}; leave it out")
        elif best is not None and not contrastive and (best == "mean_average_precision") != task.multi_label:
            problems.append(
                f"eval.best_metric={best} does not go with task.multi_label={str(task.multi_label).lower()}"
            )
        return problems

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
        if self.task.name == "contrastive":
            return "text_to_video/recall_at_1"
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
