"""ClipBERT's batch, optimizer and validation as optim, train and eval: what a step is, and how it is judged."""

from __future__ import annotations

import math
from pathlib import Path

from twinreel.founding_configs.clipbert_paths import PathMap
from twinreel.founding_configs.draft import Draft

__all__ = ["convert_clipbert_judging", "convert_clipbert_schedule"]

_USUAL_GPUS = 4  # of the commands in ClipBERT's README
_ACCUMULATION = "gradient_accumulation_steps"
_PER_GROUP = "max_n_example_per_group"


def convert_clipbert_schedule(draft: Draft, gpus: int | None, goal: str) -> None:
    """Set the sections optim and train, and how often is judged.

    Args:
        draft: with the data section, whose rows are counted where the files are here.
        gpus: whose batch it is; None: what the file says, else the usual number.
        goal: of the task.
    """
    settings = draft.settings
    counts = ("train_batch_size", _ACCUMULATION, _PER_GROUP, "num_train_epochs", "num_valid", "min_valid_steps")
    wrong = [key for key in (*counts, "n_gpu") if settings[key] is not None and settings[key] < 1]
    for key in wrong:
        draft.refuse(key, f"{key}={settings[key]}: give at least 1")
    if wrong:
        return
    _batch(draft, gpus, goal)
    _optimizer(draft)
    _rates(draft)
    _run(draft)
    _cadence(draft)


def _batch(draft: Draft, gpus: int | None, goal: str) -> None:
    settings = draft.settings
    if gpus is None and settings["n_gpu"] is None:
        draft.notes.append(f"--gpus is not given: {_USUAL_GPUS}, as ClipBERT's README starts it (horovodrun -np 4)")
    draft.drop("n_gpu", "--gpus goes before it" if gpus is not None else "a recipe is for any number of GPUs")
    gpus = gpus or settings["n_gpu"] or _USUAL_GPUS
    own, steps = settings["train_batch_size"], settings[_ACCUMULATION]
    group = settings[_PER_GROUP] if goal == "retrieval" or settings["task"] is None else 1
    whole = gpus * own * steps * group
    factors = [f"{own} a GPU", f"{gpus} GPU" + "s" * (gpus > 1)] + [f"{steps} accumulated"] * (steps > 1)
    words = " x ".join(factors + [f"{group} texts of a video"] * (group > 1))
    draft.put("train.global_batch_size", whole, "train_batch_size", because=words)
    draft.put("train.micro_batch_size", own * group, "train_batch_size", because="what one GPU computed at once")
    draft.notes.insert(
        0,
        f"batch: {words} = train.global_batch_size {whole}: all that one optimizer step sees, on however many GPUs. "
        "(train_batch_size is of one GPU.)",
    )
    if steps > 1:
        draft.put("train.global_batch_size", whole, _ACCUMULATION, because=words)
    draft.drop(_ACCUMULATION, "1; train.micro_batch_size says what a process computes at once")
    if group > 1:
        draft.lose(
            _PER_GROUP, "texts of one video shared its pictures there; here each text is a row with its own clips"
        )
    draft.drop(_PER_GROUP, "each text is a row" if settings[_PER_GROUP] == 1 else "1 of questions, whatever this says")


def _optimizer(draft: Draft) -> None:
    settings = draft.settings
    name, steps, norm = settings["optim"], settings[_ACCUMULATION], settings["grad_norm"]
    if name == "adamax":
        draft.refuse("optim", "optim=adamax: there are adamw and adam")
    draft.put("optim.name", name, "optim")
    draft.put("optim.betas", [float(beta) for beta in settings["betas"]], "betas")
    draft.put("optim.eps", 1e-6 if name == "adamw" else 1e-8)
    if name == "adamw":
        draft.put("optim.eps_before_correction", True)  # its own AdamW is BERT's
    draft.put("optim.weight_decay", settings["weight_decay"], "weight_decay")
    if settings["cnn_weight_decay"] != settings["weight_decay"]:
        draft.lose("cnn_weight_decay", "optim.weight_decay is of the whole model")
    draft.drop("cnn_weight_decay", "the same as weight_decay, which is of the whole model")
    if norm == -1:
        draft.put("optim.clip_norm", None, "grad_norm", because="-1 was no clipping")
    elif norm <= 0:
        draft.refuse("grad_norm", f"grad_norm={norm:g}: it must be above 0, or -1 for no clipping")
    else:
        words = f"{norm:g} of the sum of {steps} batches" if steps > 1 else ""
        draft.put("optim.clip_norm", float(f"{norm / steps:.12g}"), "grad_norm", because=words)
    if steps > 1 and norm > 0:
        draft.put("optim.clip_norm", float(f"{norm / steps:.12g}"), _ACCUMULATION, because=f"{norm:g} / {steps}")
    if steps > 1:
        draft.notes.insert(1, _about_sums(steps, norm, draft.recipe["optim"].get("eps")))


def _about_sums(steps: int, norm: float, eps: float | None) -> str:
    clipped = f", so its clipping at {norm:g} is optim.clip_norm {norm / steps:g} here" if norm > 0 else ""
    rest = f" (to its eps: optim.eps={eps / steps:g} repeats that, too)" if eps else ""
    return (
        f"accumulation: ClipBERT adds up {steps} batches and does not divide, so its gradient is {steps} times the "
        f"mean that twinreel takes{clipped}. The learning rate stays: Adam's step is the same for a gradient "
        f"{steps} times as large{rest}"
    )


def _rates(draft: Draft) -> None:
    settings = draft.settings
    rate, cnn = settings["learning_rate"], settings["cnn_learning_rate"]
    for key in ("learning_rate", "cnn_learning_rate", "transformer_lr_mul", "cnn_lr_mul"):
        if settings[key] <= 0:
            draft.refuse(key, f"{key}={settings[key]:g}: it must be above 0; freeze_cnn 1 and model.freeze stop parts")
    draft.put("optim.learning_rate", rate, "learning_rate")
    own = {"cnn": cnn}
    draft.put("optim.learning_rates", own, "cnn_learning_rate")
    for part, base in (("transformer", rate), ("cnn", cnn)):
        factor, prefix = f"{part}_lr_mul", f"{part}_lr_mul_prefix"
        if settings[factor] != 1 and settings[prefix]:
            own[f"{part}.{settings[prefix]}"] = float(f"{base * settings[factor]:.12g}")
            draft.put("optim.learning_rates", own, factor, prefix, because=f"{base:g} x {settings[factor]:g}")
        draft.drop(factor, "1" if settings[factor] == 1 else f"{prefix} is empty, so nothing had it there")
        draft.drop(prefix, f"{factor} is 1" if settings[factor] == 1 else "empty")
    if settings["decay"] != "linear":
        draft.refuse("decay", f"decay={settings['decay']}: of ClipBERT's there is linear")
    draft.put("optim.decay", "linear", "decay")
    if settings["cnn_lr_decay"] != settings["decay"]:
        draft.lose("cnn_lr_decay", "optim.decay is of the whole model")
    draft.drop("cnn_lr_decay", "the same as decay, which is of the whole model")
    for key in ("step_decay_epochs", "cnn_step_decay_epochs"):
        draft.drop(key, "of decay multi_step, which is not here")
    if not 0 <= settings["warmup_ratio"] < 1:
        draft.refuse("warmup_ratio", f"warmup_ratio={settings['warmup_ratio']:g}: give 0 to below 1")
    draft.put("optim.warmup_fraction", settings["warmup_ratio"], "warmup_ratio")


def _run(draft: Draft) -> None:
    settings = draft.settings
    draft.put("train.num_epochs", settings["num_train_epochs"], "num_train_epochs")
    because = "apex O2 there; bf16 needs no loss scaling" if settings["fp16"] else ""
    draft.put("train.precision", "fp16" if settings["fp16"] else "fp32", "fp16", because=because)
    draft.put("train.seed", settings["seed"], "seed")
    if settings["seed"] < 0:
        draft.refuse("seed", f"seed={settings['seed']}: give at least 0")


def _cadence(draft: Draft) -> None:
    """How often is judged and saved: in steps where the length of the run is known, as ClipBERT counts them."""
    settings = draft.settings
    epochs, times, least = settings["num_train_epochs"], settings["num_valid"], settings["min_valid_steps"]
    share, steps = settings["save_steps_ratio"], settings["num_train_steps"] or _count_steps(draft)
    if not 0 < share <= 1:
        draft.refuse("save_steps_ratio", f"save_steps_ratio={share:g}: give above 0 to 1")
    if steps is not None and steps >= 1:
        every = f"{settings['valid_steps'] or math.ceil(steps / times / least) * least} steps"
        save = f"{max(1, int(share * steps))} steps"
        why = f"of {steps} steps"
    else:
        every, save = f"{max(1, epochs // times)} epochs", "1 epochs"
        rule = f"ceil(steps / {times} / {least}) x {least} steps there"
        why = f"{rule}: known where the list of training is here, or with num_train_steps N, which a run's log says"
    draft.put("eval.every", every, "num_valid", "min_valid_steps", because=why)
    draft.put("train.save_every", save, "save_steps_ratio", because="to go on after a kill, as there")
    draft.drop("num_train_steps", "it follows from rows, epochs and batch")
    draft.drop("valid_steps", f"eval.every: {every}")


def _count_steps(draft: Draft) -> int | None:
    """Steps of the run by the rows of its lists; None where they are not here or texts of a video go together."""
    lists, settings = draft.recipe["data"].get("manifest"), draft.settings
    files = [Path(path) for path in ([lists] if isinstance(lists, str) else lists or [])]
    alone = settings["max_n_example_per_group"] == 1 or settings["task"] is not None
    if not files or not alone or not all(file.is_file() for file in files):
        return None
    try:
        rows = sum(1 for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        draft.refuse("train_datasets", f"train_datasets: {lists}: cannot be read: {error}")
        return None
    epochs, batch = int(settings["num_train_epochs"]), int(draft.recipe["train"]["global_batch_size"])
    return math.ceil(epochs * rows / batch)


def convert_clipbert_judging(draft: Draft, paths: PathMap, goal: str) -> None:
    """Set the section eval."""
    settings = draft.settings
    lists, images = settings["inference_txt_db"], settings["inference_img_db"]
    if lists:
        draft.put("eval.manifest", paths.find("inference_txt_db", lists), "inference_txt_db")
        draft.drop("val_datasets", "inference_txt_db goes before it")
    else:
        draft.put("eval.manifest", paths.lists(draft, "val_datasets"), "val_datasets")
    if images:
        draft.put("eval.root", paths.find("inference_img_db", images), "inference_img_db")
    else:
        draft.put("eval.root", paths.images(draft, "val_datasets"), "val_datasets")
    for key in ("inference_txt_db", "inference_img_db"):
        draft.drop(key, "null: val_datasets is judged")
    clips = settings["inference_n_clips"]
    for key in ("inference_n_clips", "inference_batch_size"):
        if settings[key] < 1:
            draft.refuse(key, f"{key}={settings[key]}: give at least 1")
    draft.put("eval.num_clips", clips, "inference_n_clips", because="twinreel eval RUN eval.num_clips=16 for others")
    windows = "clipbert_start" if goal != "retrieval" and clips == 1 else "clipbert"
    where = {"clipbert_start": "the start of the video, as there", "clipbert": "where ClipBERT looks"}[windows]
    draft.put("eval.windows", windows, "inference_n_clips", because=where)
    draft.put("eval.batch_size", settings["inference_batch_size"], "inference_batch_size")
    draft.drop(
        "eval_retrieval_batch_size", "of judgments in training, no effect on results; eval.batch_size is of both"
    )
    reason = "of its validation loss, noise by its random negatives; ranks are judged here"
    draft.drop("val_batch_size", reason if goal == "retrieval" else "eval.batch_size, with the same results")
