"""The sections of a recipe: every key, its type, its default and what it is for."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from twinreel.data.augment import RandAugment
from twinreel.data.transforms import flip_partners
from twinreel.errors import ConfigError

__all__ = [
    "DataSection",
    "EvalSection",
    "ModelSection",
    "OpenSection",
    "OptimSection",
    "PreprocessingSection",
    "RerankSection",
    "Section",
    "TaskSection",
    "TrainSection",
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
    "accuracy",
    "text_to_video/recall_at_1",
    "text_to_video/recall_at_5",
    "text_to_video/recall_at_10",
    "video_to_text/recall_at_1",
    "video_to_text/recall_at_5",
    "video_to_text/recall_at_10",
]
Split = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value), Field(min_length=1)]
Cadence = Annotated[str, Field(pattern=r"^[1-9][0-9]* (steps?|epochs?)$")]


class Section(BaseModel):
    """A section that has no other keys than these."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class OpenSection(BaseModel):
    """A section that also takes the options of the function that it names."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    @property
    def options(self) -> dict[str, Any]:
        """The free keys: options of the function that this section names."""
        return dict(self.__pydantic_extra__ or {})


class PreprocessingSection(Section):
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


class ModelSection(OpenSection):
    """Which model, where it starts from, and what of it is trained."""

    name: str = Field(description="a name of `twinreel list`, or package.module:function")
    weights: str | dict[str, str] | None = Field(None, description="starting weights; {video_tower: a, ...} per tower")
    weights_scope: Literal["all", "backbone"] = Field("all", description="backbone: leave the heads out")
    vocabulary: str | None = Field(
        None, description="word list (.npy, .txt, .json; vocab.txt of BERT); null = built from the captions"
    )
    min_word_count: Count = Field(1, description="rarer words are left out of a built vocabulary")
    fold_case: bool = Field(True, description="false = the founding behavior: capitals are other words")
    freeze: tuple[str, ...] = Field((), description="module names that do not train, e.g. [text_tower]")
    num_classes: Count | None = Field(None, description="outputs of a classifier; null = found from the labels")
    preprocessing: PreprocessingSection = Field(default_factory=PreprocessingSection)  # type: ignore[arg-type]


class TaskSection(OpenSection):
    """What is learned; free keys are options of the loss."""

    name: str = Field("contrastive", description="contrastive, action_recognition or video_text_matching")
    loss: str = Field("milnce", description="a loss of twinreel.losses, or package.module:function")
    num_candidates: Count = Field(1, description="contrastive: K captions a clip, nearest in time")
    max_words: Count = Field(20, description="contrastive: words a caption in training; cut or padded")
    learn_temperature: bool = Field(False, description="contrastive: train task.temperature too, within 0.01 to 1")
    multi_label: bool = Field(False, description="action_recognition: a clip may have any number of classes")
    goal: Literal["retrieval", "multiple_choice", "question_answering"] = Field(
        "retrieval", description="video_text_matching: does a caption fit, which option does, which answer"
    )
    num_negatives: Count = Field(1, description="retrieval: wrong captions that each video is compared with")
    negatives: Literal["random", "in_batch"] = Field(
        "random", description="where they come from: any other video, all alike, or those of the global batch"
    )


class DataSection(OpenSection):
    """Source, sampling rule and augmentation; free keys are options of the source."""

    source: str = Field("manifest", description="a name of SOURCES, or package.module:function")
    manifest: str | tuple[str, ...] | None = Field(None, description="CSV or JSONL files, for source manifest")
    root: str | None = Field(None, description="folder that paths are relative to; null = the manifest's folder")
    split: Split | None = Field(None, description="rows of this split; all = every row; null = rows have no split")
    caption_template: str | None = Field(None, description="captions from labels: 'a person is {label}'")
    caption_rows: Literal["video", "caption", "paragraph"] = Field(
        "video",
        description="a row has its captions, one drawn each epoch; or each caption is a row; or the captions of a row "
        "are joined to one, in order of time",
    )
    num_clips: Count = Field(1, description="video_text_matching: clips of a video in training, each drawn anew")
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


class OptimSection(Section):
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
    eps_before_correction: bool = Field(
        False, description="adamw: true = eps counts for more in the first steps, as in the code of BERT and ClipBERT"
    )
    momentum: Fraction = Field(0.9, description="sgd")
    dampening: Fraction = Field(0.0, description="sgd")
    nesterov: bool = Field(False, description="sgd")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="linear warm-up")
    warmup_epochs: NonNegative | None = Field(None, description="or in epochs")
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="or of all steps: ClipBERT's rule, first 1 / warm-up steps of the rate, decay to the last step",
    )
    warmup_start_factor: Fraction = Field(0.1, description="first factor; 0 = the schedule of MIL-NCE")
    warmup_start_learning_rate: NonNegative | None = Field(None, description="or the first rate itself")
    warmup_target: Literal["highest", "schedule"] = Field(
        "highest", description="where warm-up ends; schedule = at what the schedule then has, as the SlowFast code does"
    )
    decay: Literal["cosine", "linear", "steps", "none"] = Field(
        "cosine", description="after the warm-up, to the last step"
    )
    cosine_after_warmup: bool = Field(True, description="false = the cosine begins at step 0, as in the SlowFast code")
    final_learning_rate: NonNegative = Field(0.0, description="where the cosine or the line ends")
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
        if self.warmup_fraction is not None:
            self._check_warmup_fraction()
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("give optim.clip_norm or optim.clip_value, not both")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"optim.final_learning_rate={self.final_learning_rate:g} is above optim.learning_rate="
                f"{self.learning_rate:g}; the {'line' if self.decay == 'linear' else 'cosine'} falls"
            )
        if self.eps_before_correction and self.name != "adamw":
            raise ValueError(f"optim.eps_before_correction=true goes with optim.name=adamw, not {self.name}")
        self._check_steps()
        return self

    def _check_warmup_fraction(self) -> None:
        """It says how the warm-up begins and ends, so no other key may."""
        for name in ("warmup_steps", "warmup_epochs", "warmup_start_learning_rate"):
            if getattr(self, name) is not None:
                raise ValueError(f"give optim.warmup_fraction or optim.{name}, not both; set the other to null")
        for name in ("warmup_start_factor", "warmup_target", "cosine_after_warmup"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"optim.{name} has no effect with optim.warmup_fraction; leave it out")
        if self.decay == "steps":
            raise ValueError("optim.warmup_fraction does not go with optim.decay=steps; give optim.warmup_epochs")

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


class TrainSection(Section):
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


class EvalSection(OpenSection):
    """What a run is judged by; free keys are options of the source."""

    source: str | None = Field(None, description="null = that of data")
    manifest: str | tuple[str, ...] | None = Field(None, description="null = that of data")
    root: str | None = Field(None, description="null = that of data")
    split: Split | None = Field(
        None, description="null with no eval.source or eval.manifest = no evaluation in training"
    )
    caption_template: str | None = Field(None, description="null = that of data")
    caption_rows: Literal["video", "caption", "paragraph"] | None = Field(None, description="null = that of data")
    every: Cadence | None = Field(None, description="`500 steps` or `5 epochs`; null = at the end")
    num_clips: Count = Field(4, description="windows a video, their embeddings averaged, their scores combined")
    windows: Literal["uniform", "whole", "milnce", "slowfast", "slowfast_offset", "clipbert", "clipbert_start"] = Field(
        "uniform",
        description="whole = one clip, its frames over the whole row; others = the founding choice of that system",
    )
    num_crops: Literal[1, 3] = Field(1, description="3 = start, center and end of the longer side, too, of each window")
    crop_size: Count | None = Field(
        None, description="pixels, where a classifier is judged on larger ones; null = its own"
    )
    combine_views: Literal["mean", "max"] = Field("mean", description="a classifier's scores of the views of a video")
    batch_size: Count = Field(16, description="clips at once; of video_text_matching also pairs at once")
    max_words: Count = Field(30, description="words a query; cut or padded")
    merge_equal_captions: bool = Field(False, description="equal captions are one query with several right videos")
    allow_missing: bool = Field(False, description="report scores over the videos that could be read")
    grad_cam_layer: str | None = Field(
        None, description="action_recognition: TensorBoard shows where this layer looks, of four rows, e.g. s5"
    )
    best_metric: BestMetric | None = Field(
        None, description="largest value = the checkpoint `best`; null = text_to_video/recall_at_1, or of classes top 1"
    )


class RerankSection(Section):
    """Two towers: whose first answers are judged again, by which run of video_text_matching."""

    run: str | None = Field(None, description="folder of that run; null = no re-ranking")
    checkpoint: str | None = Field(None, description="of it: last, best, step_N; null = best, else last")
    k: Count = Field(50, description="how many of the first answers; the others keep their places behind them")
    direction: Literal["text_to_video", "both"] = Field(
        "text_to_video", description="both = the captions of a video too, which costs as much again"
    )
    num_clips: Count | None = Field(None, description="windows a video; null = eval.num_clips of that run")

    @model_validator(mode="after")
    def _check(self) -> RerankSection:
        idle = [
            f"rerank.{name}"
            for name, field in type(self).model_fields.items()
            if self.run is None and getattr(self, name) != field.default
        ]
        if idle:
            raise ValueError(f"{' and '.join(idle)}: nothing is re-ranked without a second run; add rerank.run=FOLDER")
        return self
