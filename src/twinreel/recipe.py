"""The recipe: the typed table of contents of a run.

Sections are immutable. `model`, `task`, `data` and `eval` also take the options of what they name: those are checked
against that function's own signature, which is the schema, written once. Nothing is inherited between files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from twinreel import losses
from twinreel.config import Tree, check_options, import_function, load_tree, nearest, validate
from twinreel.data.augment import RandAugment
from twinreel.data.sources import SOURCES
from twinreel.data.transforms import flip_partners
from twinreel.errors import ConfigError
from twinreel.models import CLASSIFIERS, MODELS, TOWERS
from twinreel.tasks import TASKS

__all__ = [
    "DataSection",
    "EvalSection",
    "ModelSection",
    "OptimSection",
    "Recipe",
    "TaskSection",
    "TrainSection",
    "list_recipes",
    "load_recipe",
    "recipe_header",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
BestMetric = Literal[
    "top_1_accuracy",
    "top_5_accuracy",
    "mean_class_accuracy",
    "mean_average_precision",
    "text_to_video/recall_at_1",
    "text_to_video/recall_at_5",
    "text_to_video/recall_at_10",
    "video_to_text/recall_at_1",
    "video_to_text/recall_at_5",
    "video_to_text/recall_at_10",
]
Split = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value), Field(min_length=1)]
Cadence = Annotated[str, Field(pattern=r"^[1-9][0-9]* (steps?|epochs?)$")]

RESERVED = {
    "model": ("vocabulary", "preprocessing", "num_classes"),
    "task": ("mask", "valid", "text_ids", "own", "negative_seed", "targets"),
    "data": ("manifest", "caption_template"),
    "eval": ("manifest", "caption_template"),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _OpenSection(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    @property
    def options(self) -> dict[str, Any]:
        """The free keys: options of the function that this section names."""
        return dict(self.__pydantic_extra__ or {})


class PreprocessingSection(_Section):
    """What the model wants of a video, where the recipe differs from the model's own default."""

    num_frames: Count | None = Field(None, description="frames a clip")
    frame_rate: Positive | None = Field(None, description="sampled frames a second; or frame_stride")
    frame_stride: Count | None = Field(None, description="step in frames of the file; set frame_rate to null")
    crop_size: Count | None = Field(None, description="side of the square network input, pixels")
    short_side: Count | None = Field(None, description="short side before the center crop; null = crop_size")
    fit: Literal["crop", "pad"] | None = Field(None, description="pad = whole frames in a square, black added")
    value_range: tuple[float, float] | None = Field(None, description="what 0 and 255 become")
    mean: tuple[float, float, float] | None = Field(None, description="subtracted per channel")
    std: tuple[float, float, float] | None = Field(None, description="divided by, per channel")
    channel_order: Literal["rgb", "bgr"] | None = Field(None, description="order of the color channels")


class ModelSection(_OpenSection):
    """Which model, where it starts from, and what of it is trained."""

    name: str = Field(description="a name of `twinreel list`, or package.module:function")
    weights: str | dict[str, str] | None = Field(None, description="starting weights; {video_tower: a, ...} per tower")
    weights_scope: Literal["all", "backbone"] = Field("all", description="backbone: leave the heads out")
    vocabulary: str | None = Field(None, description="word list (.npy, .txt, .json); null = built from the captions")
    min_word_count: Count = Field(1, description="rarer words are left out of a built vocabulary")
    fold_case: bool = Field(True, description="false = the founding behavior: capitals are other words")
    freeze: tuple[str, ...] = Field((), description="module names that do not train, e.g. [text_tower]")
    num_classes: Count | None = Field(None, description="outputs of a classifier; null = found from the labels")
    preprocessing: PreprocessingSection = Field(default_factory=PreprocessingSection)  # type: ignore[arg-type]


class TaskSection(_OpenSection):
    """What is learned; free keys are options of the loss."""

    name: str = Field("contrastive", description="contrastive or action_recognition")
    loss: str = Field("milnce", description="a loss of twinreel.losses, or package.module:function")
    num_candidates: Count = Field(1, description="contrastive: K captions a clip, nearest in time")
    max_words: Count = Field(20, description="contrastive: words a caption in training; cut or padded")
    learn_temperature: bool = Field(False, description="contrastive: train task.temperature too, within 0.01 to 1")
    multi_label: bool = Field(False, description="action_recognition: a clip may have any number of classes")


class DataSection(_OpenSection):
    """Source, sampling rule and augmentation; free keys are options of the source."""

    source: str = Field("manifest", description="a name of SOURCES, or package.module:function")
    manifest: str | tuple[str, ...] | None = Field(None, description="CSV or JSONL files, for source manifest")
    root: str | None = Field(None, description="folder that paths are relative to; null = the manifest's folder")
    split: Split | None = Field(None, description="rows of this split; all = every row; null = rows have no split")
    caption_template: str | None = Field(None, description="captions from labels: 'a person is {label}'")
    min_window_seconds: NonNegative = Field(0.0, description="shorter caption windows are widened evenly")
    clip_start: Literal["random", "center", "start", "uniform", "segments"] = Field(
        "random",
        description="where in the window a clip begins; uniform = its frames spread over the whole window, the middle "
        "of each segment; segments = likewise, one at random in each",
    )
    crop: Literal["random", "square", "center", "resized", "pad"] = Field(
        "random",
        description="random: crop_size as it lies; square: largest random square, scaled; resized: a random area and "
        "aspect, scaled; pad: all of the frame, for model.preprocessing.fit=pad",
    )
    crop_area: tuple[Share, Share] = Field((0.08, 1.0), description="of crop=resized: least and most of the frame")
    crop_aspect: tuple[Positive, Positive] = Field((0.75, 1.3333), description="of crop=resized: width / height")
    short_side: Count | tuple[Count, Count] | None = Field(
        None, description="scale the short side to this before a random crop; [256, 320] = drawn for each clip"
    )
    short_side_draw: Literal["uniform", "inverse"] = Field(
        "uniform", description="how short_side is drawn from its range; inverse = uniform in 1 / pixels"
    )
    flip: Fraction = Field(0.5, description="probability of a mirror image")
    flip_labels: dict[str, str | None] = Field(
        {}, description="labels that a mirror image turns into each other, {turn left: turn right}; null = never mirror"
    )
    repeated_augmentation: Count = Field(
        1, description="views of one decoded clip in a batch, cropped and mirrored anew; the batch size counts views"
    )
    mixup: NonNegative = Field(0.0, description="alpha of mixup between neighbors of the batch, e.g. 0.8; 0 = none")
    cutmix: NonNegative = Field(0.0, description="alpha of cutmix likewise, e.g. 1.0; 0 = none")
    mix_probability: Fraction = Field(1.0, description="share of pairs that are mixed")
    mix_switch_probability: Fraction = Field(0.5, description="share of cutmix where both are on")
    rand_augment: dict[str, Any] | None = Field(
        None,
        description="{num_ops: 4, magnitude: 7}: random changes, the same in all frames of a clip; extra `augment`",
    )
    transform: Annotated[str, Field(pattern=":")] | None = Field(
        None, description="your own package.module:function of the frames of a training batch, see docs/own-actions.md"
    )
    random_erasing: Fraction = Field(0.0, description="probability of a box filled with noise, the same in all frames")
    num_workers: Annotated[int, Field(ge=0)] = Field(2, description="reader processes")
    worker_start: Literal["auto", "fork", "spawn", "forkserver"] = Field(
        "auto", description="how readers are started; auto = fork, forkserver where several processes train"
    )
    max_faults: Fraction = Field(0.05, description="share of missing or failed samples that stops the run")

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        ranges = {"crop_area": self.crop_area, "crop_aspect": self.crop_aspect, "short_side": self.short_side}
        for name, ends in ranges.items():
            if isinstance(ends, tuple) and ends[0] > ends[1]:
                raise ValueError(f"data.{name}: [{ends[0]:g}, {ends[1]:g}]; give the least first, then the most")
        if self.short_side is not None and self.crop != "random":
            raise ValueError(f"data.short_side goes with data.crop=random, not with {self.crop}; leave it out")
        if self.short_side_draw == "inverse" and not isinstance(self.short_side, tuple):
            raise ValueError("data.short_side_draw=inverse needs a range to draw from: data.short_side=[256, 320]")
        try:
            flip_partners(self.flip_labels)
            if self.rand_augment is not None:
                RandAugment.of(self.rand_augment)
        except ConfigError as error:
            raise ValueError(f"data.{str(error).removeprefix('data.')}") from error
        return self


class OptimSection(_Section):
    """Optimizer and learning rate, a pure function of the step."""

    name: Literal["adam", "adamw", "sgd"] = Field("adam", description="sgd is with momentum")
    learning_rate: Positive = Field(1e-3, description="of the global batch; nothing is scaled implicitly")
    learning_rates: dict[str, Positive] = Field({}, description="per module name, e.g. {text_tower: 0.0001}")
    weight_decay: NonNegative = Field(1e-4, description="not on biases and norms")
    norm_weight_decay: NonNegative = Field(0.0, description="on scale and shift of norms")
    decay_one_dimensional: bool = Field(
        False, description="true = weight_decay on biases too, as the SlowFast code has"
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="each layer's rate is this times that of the layer after it, e.g. 0.75"
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="adam, adamw")
    eps: Positive = Field(1e-8, description="adam, adamw")
    momentum: Fraction = Field(0.9, description="sgd")
    dampening: Fraction = Field(0.0, description="sgd")
    nesterov: bool = Field(False, description="sgd")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="linear warm-up")
    warmup_epochs: NonNegative | None = Field(None, description="or in epochs")
    warmup_start_factor: Fraction = Field(0.1, description="first factor; 0 = the schedule of MIL-NCE")
    warmup_start_learning_rate: NonNegative | None = Field(None, description="or the first rate itself")
    warmup_target: Literal["highest", "schedule"] = Field(
        "highest", description="where warm-up ends; schedule = at what the schedule then has, as the SlowFast code does"
    )
    decay: Literal["cosine", "steps", "none"] = Field("cosine", description="after the warm-up, to the last step")
    cosine_after_warmup: bool = Field(True, description="false = the cosine begins at step 0, as in the SlowFast code")
    final_learning_rate: NonNegative = Field(0.0, description="where the cosine ends")
    decay_epochs: tuple[NonNegative, ...] = Field((), description="of decay=steps: where each factor begins; first 0")
    decay_factors: tuple[NonNegative, ...] = Field(
        (), description="of decay=steps: what the rate is multiplied by there"
    )
    clip_norm: Positive | None = Field(None, description="largest norm of the whole gradient")
    clip_value: Positive | None = Field(None, description="or largest size of each number of it")

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("give optim.warmup_steps or optim.warmup_epochs, not both; set the other to null")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("give optim.clip_norm or optim.clip_value, not both")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"optim.final_learning_rate={self.final_learning_rate:g} is above optim.learning_rate="
                f"{self.learning_rate:g}; the cosine falls"
            )
        self._check_steps()
        return self

    def _check_steps(self) -> None:
        epochs, factors = self.decay_epochs, self.decay_factors
        if self.decay != "steps":
            if epochs or factors:
                raise ValueError(f"optim.decay_epochs and decay_factors go with optim.decay=steps, not {self.decay}")
            return
        rising = all(first < second for first, second in pairwise(epochs))
        if not epochs or epochs[0] != 0 or len(epochs) != len(factors) or not rising:
            raise ValueError(
                f"optim.decay=steps needs as many decay_factors as decay_epochs, which rise from 0: got {list(epochs)} "
                f"and {list(factors)}; e.g. decay_epochs=[0, 30, 60] decay_factors=[1, 0.1, 0.01]"
            )


class TrainSection(_Section):
    """How long, how large, how exact, what is kept."""

    num_epochs: Count | None = Field(None, description="an epoch = one clip a row")
    num_steps: Count | None = Field(None, description="or in optimizer steps")
    global_batch_size: Count = Field(32, description="clips a step, over all processes and micro-batches")
    micro_batch_size: Count | None = Field(
        None, description="clips a process computes at once; null = its even share of the global batch"
    )
    cached_negatives: bool = Field(
        False, description="contrastive negatives of the global batch, not of the micro-batch: two passes, exact"
    )
    batch_norm: Literal["per_process", "frozen", "sync"] = Field(
        "per_process", description="whose clips normalize; frozen = the running statistics, which then stay"
    )
    activation_checkpointing: bool = Field(False, description="recompute in backward: less memory, a third slower")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="average the weights, e.g. 0.9999; the average is judged and loaded"
    )
    precise_bn_batches: Annotated[int, Field(ge=0)] = Field(
        0, description="before a checkpoint or a judgment, batch norms take their statistics from so many batches anew"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "fp32", description="losses are in fp32 whatever this says; auto = what was faster for this model"
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = Field(
        "auto",
        description="layout of convolutions, the same numbers to rounding; auto = what was faster for this model",
    )
    seed: Annotated[int, Field(ge=0)] = Field(1, description="of weights, order, sampling, augmentation, dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda where there is one")
    deterministic: bool = Field(False, description="exact resume on a GPU too, slower")
    histograms_every: Cadence | None = Field(None, description="weights and gradients for TensorBoard; null = never")
    log_every: Count = Field(10, description="steps between lines of metrics.jsonl")
    save_every: Cadence = Field("1 epochs", description="`500 steps` or `5 epochs`")
    keep_last: Count = Field(3, description="checkpoints kept, beside the best")

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError("give exactly one of train.num_epochs and train.num_steps; set the other to null")
        micro = self.micro_batch_size or self.global_batch_size
        if micro > self.global_batch_size or self.global_batch_size % micro:
            raise ValueError(
                f"train.global_batch_size={self.global_batch_size} is not a whole number of "
                f"train.micro_batch_size={micro}; choose a divisor"
            )
        return self


class EvalSection(_OpenSection):
    """What a run is judged by; free keys are options of the source."""

    source: str | None = Field(None, description="null = that of data")
    manifest: str | tuple[str, ...] | None = Field(None, description="null = that of data")
    root: str | None = Field(None, description="null = that of data")
    split: Split | None = Field(
        None, description="null with no eval.source or eval.manifest = no evaluation in training"
    )
    caption_template: str | None = Field(None, description="null = that of data")
    every: Cadence | None = Field(None, description="`500 steps` or `5 epochs`; null = at the end")
    num_clips: Count = Field(4, description="windows a video, their embeddings averaged, their scores combined")
    windows: Literal["uniform", "whole", "milnce", "slowfast", "slowfast_offset", "clipbert"] = Field(
        "uniform",
        description="whole = one clip, its frames over the whole row; others = the founding choice of that system",
    )
    num_crops: Literal[1, 3] = Field(1, description="3 = start, center and end of the longer side, too, of each window")
    crop_size: Count | None = Field(
        None, description="pixels, where a classifier is judged on larger ones; null = its own"
    )
    combine_views: Literal["mean", "max"] = Field("mean", description="a classifier's scores of the views of a video")
    batch_size: Count = Field(16, description="clips at once")
    max_words: Count = Field(30, description="words a query; cut or padded")
    merge_equal_captions: bool = Field(False, description="equal captions are one query with several right videos")
    allow_missing: bool = Field(False, description="report scores over the videos that could be read")
    grad_cam_layer: str | None = Field(
        None, description="action_recognition: TensorBoard shows where this layer looks, of four rows, e.g. s5"
    )
    best_metric: BestMetric | None = Field(
        None, description="largest value = the checkpoint `best`; null = text_to_video/recall_at_1, or of classes top 1"
    )


class Recipe(_Section):
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
            "data.crop_area": data.crop_area != (0.08, 1.0) and data.crop != "resized",
            "train.precise_bn_batches": self.train.precise_bn_batches > 0 and self.train.batch_norm == "frozen",
        }
        needs = {
            "data.mix_probability": "data.mixup or data.cutmix", "data.mix_switch_probability": "data.mixup and cutmix",
            "data.crop_area": "data.crop=resized", "train.precise_bn_batches": "batch norms that are not frozen",
        }  # fmt: skip
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


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file, with `section.key=value` overrides.

    Raises:
        ConfigError: no such recipe, or anything in it is wrong; all problems at once.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of key=value; got the string {overrides!r}: write [{overrides!r}]")
    return build_recipe(load_tree(_find(str(name)), overrides))


def build_recipe(tree: Tree) -> Recipe:
    """Check a tree of values and turn it into a recipe."""
    sections: dict[str, type[BaseModel]] = {
        "model": ModelSection,
        "task": TaskSection,
        "data": DataSection,
        "optim": OptimSection,
        "train": TrainSection,
        "eval": EvalSection,
        "model.preprocessing": PreprocessingSection,
    }
    known = {"": list(Recipe.model_fields)} | {name: list(cls.model_fields) for name, cls in sections.items()}
    _fill_class_keys(tree)
    for section, key, choices in _named(tree.values):
        chosen = _choose(tree, section, key, choices)
        if chosen is not None:
            values = tree.values[section]
            free = {name: value for name, value in values.items() if name not in known[section]}
            checked = check_options(tree, section, chosen, free, reserved=RESERVED[section], fields=known[section])
            # What is left out here is not the signature's default: eval inherits from data, sizes come with weights.
            open_ended = section == "eval" and values.get("source") is None
            open_ended |= section == "model" and isinstance(values.get("weights"), str)
            values.update({name: checked[name] for name in free if name in checked} if open_ended else checked)
    _check_manifest(tree)
    _check_transform(tree)
    recipe = validate(tree, Recipe, known)
    return _with_whole_preprocessing(recipe)


def _with_whole_preprocessing(recipe: Recipe) -> Recipe:
    """The model's own preprocessing filled in, so that a resolved recipe says everything.

    A user's own model states it itself when it is built, and so may weights that were imported; only what the recipe
    changes is known here.
    """
    section = recipe.model
    if ":" in section.name or isinstance(section.weights, str):
        return recipe  # stated by the user's model, or perhaps by the weights
    options = {name: value for name, value in section.options.items() if name != "word_vectors"}
    with torch.device("meta"):  # shapes only: nothing is drawn or held
        table: Mapping[str, Callable[..., Any]] = TOWERS if recipe.task.name == "contrastive" else CLASSIFIERS
        own = table[section.name](**options).preprocessing
    whole = own.replace(**section.preprocessing.model_dump(exclude_none=True)).to_dict()
    named = {name: whole[name] for name in PreprocessingSection.model_fields}
    filled = section.model_copy(update={"preprocessing": PreprocessingSection.model_validate(named)})
    return recipe.model_copy(update={"model": filled})


def _task_name(values: Mapping[str, Any]) -> Any:
    task = values.get("task")
    return task.get("name", "contrastive") if isinstance(task, dict) else "contrastive"


def _fill_class_keys(tree: Tree) -> None:
    """A classifier's own loss and activation where none is named, so that a resolved recipe says them."""
    task = tree.values.get("task")
    if _task_name(tree.values) != "action_recognition" or not isinstance(task, dict):
        return
    several, model = bool(task.get("multi_label")), tree.values.get("model")
    if task.get("loss") is None:
        task["loss"] = "binary_cross_entropy" if several else "cross_entropy"
    if several and isinstance(model, dict) and ":" not in str(model.get("name")):
        model.setdefault("head_activation", "sigmoid")


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Callable[..., Any]]]]:
    """The sections that name a function: (section, key, table)."""
    classifies = _task_name(values) == "action_recognition"
    yield "model", "name", CLASSIFIERS if classifies else TOWERS
    chosen = {name: loss for name, loss in losses.LOSSES.items() if (loss in losses.CLASS_LOSSES) == classifies}
    yield "task", "loss", chosen
    yield "data", "source", SOURCES
    if isinstance(values.get("eval"), dict):
        yield "eval", "source", SOURCES


def _choose(tree: Tree, section: str, key: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    values = tree.values.setdefault(section, {}) if section != "model" else tree.values.get(section)
    if not isinstance(values, dict):
        return None  # reported by the typed validation
    defaults: dict[str, type[BaseModel]] = {"task": TaskSection, "data": DataSection}
    name = values.get(key, defaults[section].model_fields[key].default if section in defaults else None)
    inherits = section == "eval" and name is None
    if inherits:
        name = "manifest" if values.get("manifest") is not None else _section_value(tree, "data", "source")
    if section == "task" and values.get("name", "contrastive") not in TASKS:
        tree.problem("task.name", f"unknown task {values['name']!r}{nearest(str(values['name']), TASKS)}")
    if not isinstance(name, str) or (inherits and ":" not in name and name not in table):
        return None  # of another type, or said of data.source already
    if ":" in name:
        try:
            return import_function(name, f"{section}.{key}")
        except ConfigError as error:
            tree.problem(f"{section}.{key}", str(error))
            return None
    if name not in table:
        other = " (it goes with another task.name)" if name in MODELS or name in losses.LOSSES else ""
        tree.problem(f"{section}.{key}", f"{section}.{key}: unknown name {name!r}{other or nearest(name, table)}")
        return None
    return table[name]


def _section_value(tree: Tree, section: str, key: str) -> Any:
    values = tree.values.get(section)
    return values.get(key, DataSection.model_fields[key].default) if isinstance(values, dict) else None


def _check_manifest(tree: Tree) -> None:
    for section in ("data", "eval"):
        values = tree.values.get(section)
        if not isinstance(values, dict):
            continue
        source = values.get("source", "manifest" if section == "data" else None)
        if values.get("manifest") is not None and source not in (None, "manifest"):
            tree.problem(
                f"{section}.manifest",
                f"{section}.manifest goes with {section}.source: manifest, not with {source!r}; leave one out",
            )


def _check_transform(tree: Tree) -> None:
    name = _section_value(tree, "data", "transform")
    if isinstance(name, str) and ":" in name:
        try:
            import_function(name, "data.transform")
        except ConfigError as error:
            tree.problem("data.transform", str(error))


def list_recipes() -> list[str]:
    """The names of the shipped recipes, sorted."""
    folder = resources.files("twinreel") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def recipe_header(name: str) -> str:
    """The first comment line of a shipped recipe, or of a file."""
    first = _find(name).read_text(encoding="utf-8").splitlines()[:1]
    return first[0].removeprefix("#").strip() if first else ""


def _find(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"{name}: no such recipe file; shipped recipes: {', '.join(list_recipes())}")
        return path
    shipped = list_recipes()
    if name not in shipped:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, shipped)} (or the path of a .yaml file)")
    return Path(str(resources.files("twinreel") / "recipes" / f"{name}.yaml"))


def cadence_steps(cadence: str, steps_per_epoch: float) -> int:
    """`500 steps` or `5 epochs` as a number of steps, at least 1."""
    number, unit = cadence.split()
    return int(number) if unit.startswith("step") else max(1, math.floor(int(number) * steps_per_epoch))
