"""SOLVER, BN and the batch as optim and train: what a step is, how long a run is, and the rate at every step."""

from __future__ import annotations

from typing import Any

from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short

__all__ = ["convert_schedule"]

_OPTIMIZERS = {"sgd": "sgd", "adam": "adam", "adamw": "adamw", "mt_adamw": "adamw"}
_POLICIES = {"cosine": "cosine", "steps_with_relative_lrs": "steps"}
_ACCUMULATION = "SOLVER.GRADIENT_ACCUMULATION_STEPS"
_SCALES = "SOLVER.BASE_LR_SCALE_NUM_SHARDS"


def convert_schedule(draft: Draft) -> None:
    """Set the sections optim and train."""
    if not _counts(draft):
        return
    _batch(draft)
    _optimizer(draft)
    _rates(draft)
    _norms(draft)
    _run(draft)


def _counts(draft: Draft) -> bool:
    """Whether the numbers that others are multiplied with are at least 1."""
    keys = ["TRAIN.BATCH_SIZE", "NUM_SHARDS", _ACCUMULATION, "SOLVER.MAX_EPOCH", "AUG.NUM_SAMPLE", "LOG_PERIOD"]
    keys += ["TRAIN.EVAL_PERIOD", "TRAIN.CHECKPOINT_PERIOD"]
    wrong = [key for key in keys if draft.settings[key] < 1]
    for key in wrong:
        draft.refuse(key, f"{key}={draft.settings[key]}: give at least 1")
    gpus, batch = draft.settings["NUM_GPUS"], draft.settings["TRAIN.BATCH_SIZE"]
    if gpus < 0 or (gpus and batch % gpus):
        text = f"TRAIN.BATCH_SIZE={batch} is not a whole number of clips for each of NUM_GPUS={gpus}"
        draft.refuse(("TRAIN.BATCH_SIZE", "NUM_GPUS"), f"{text}; PySlowFast refuses that")
        return False
    return not wrong


def _batch(draft: Draft) -> None:
    settings = draft.settings
    batch, shards, steps = settings["TRAIN.BATCH_SIZE"], settings["NUM_SHARDS"], settings[_ACCUMULATION]
    views = settings["AUG.NUM_SAMPLE"]
    whole = batch * shards * steps * views
    factors = [f"{batch} clips a machine", f"{shards} machine" + "s" * (shards > 1)]
    factors += [f"{steps} accumulated"] * (steps > 1) + [f"{views} views of each"] * (views > 1)
    words = " x ".join(factors)
    draft.put("train.global_batch_size", whole, "TRAIN.BATCH_SIZE", "NUM_SHARDS", because=words)
    draft.notes.insert(
        0,
        f"batch: {words} = train.global_batch_size {whole}: all that one optimizer step sees, on however many GPUs. "
        "(TRAIN.BATCH_SIZE is over all GPUs of one machine.)",
    )
    if views > 1:
        draft.put("train.global_batch_size", whole, "AUG.NUM_SAMPLE", because=words)
    gpus = max(1, settings["NUM_GPUS"])
    own = batch // gpus * views
    if steps > 1:
        draft.put("train.global_batch_size", whole, _ACCUMULATION, because=words)
        draft.put("train.micro_batch_size", own, _ACCUMULATION, because="what one GPU computed at once")
    else:
        draft.put("train.micro_batch_size", None)
        draft.drop(_ACCUMULATION, "1; train.micro_batch_size says what a process computes at once")
        if settings["MODEL.ARCH"] != "mvit" and gpus > 1:  # which has no batch norms
            text = f"each of NUM_GPUS={gpus} computed {own} clips at once, and its batch norms saw those; "
            draft.notes.append(f"{text}train.micro_batch_size={own} does so here on any number of GPUs that divides")
    draft.drop("NUM_GPUS", "a recipe is for any number of GPUs: torchrun --nproc-per-node says how many")
    draft.drop("SHARD_ID", "torchrun --node-rank says it")
    draft.drop("DIST_BACKEND", "nccl on GPUs, gloo on CPUs, by itself")


def _optimizer(draft: Draft) -> None:
    settings = draft.settings
    kind = settings["SOLVER.OPTIMIZING_METHOD"]
    if kind not in _OPTIMIZERS:
        text = f"SOLVER.OPTIMIZING_METHOD={kind}: there are {', '.join(_OPTIMIZERS)}"
        draft.refuse("SOLVER.OPTIMIZING_METHOD", text)
        return
    name = _OPTIMIZERS[kind]
    draft.put("optim.name", name, "SOLVER.OPTIMIZING_METHOD")
    for key in ("MOMENTUM", "NESTEROV", "DAMPENING"):
        if name == "sgd":
            draft.put(f"optim.{key.lower()}", settings[f"SOLVER.{key}"], f"SOLVER.{key}")
        else:
            draft.drop(f"SOLVER.{key}", f"{name} has none")
    if name == "sgd":
        draft.drop("SOLVER.BETAS", "sgd has none")
    else:
        draft.put("optim.betas", settings["SOLVER.BETAS"], "SOLVER.BETAS")
    draft.put("optim.weight_decay", settings["SOLVER.WEIGHT_DECAY"], "SOLVER.WEIGHT_DECAY")
    spared = settings["SOLVER.ZERO_WD_1D_PARAM"]
    draft.put("optim.decay_one_dimensional", not spared, "SOLVER.ZERO_WD_1D_PARAM")
    draft.put("optim.norm_weight_decay", settings["BN.WEIGHT_DECAY"], "BN.WEIGHT_DECAY")
    if settings["SOLVER.LAYER_DECAY"] != 1.0 or "SOLVER.LAYER_DECAY" in settings:
        draft.put("optim.layer_decay", settings["SOLVER.LAYER_DECAY"], "SOLVER.LAYER_DECAY")
    value, norm = settings["SOLVER.CLIP_GRAD_VAL"], settings["SOLVER.CLIP_GRAD_L2NORM"]
    if value:
        draft.put("optim.clip_value", value, "SOLVER.CLIP_GRAD_VAL")
        draft.drop("SOLVER.CLIP_GRAD_L2NORM", "SOLVER.CLIP_GRAD_VAL goes before it there")
    else:
        draft.put("optim.clip_norm", norm or None, "SOLVER.CLIP_GRAD_L2NORM")
        draft.drop("SOLVER.CLIP_GRAD_VAL", "none")
    if settings["SOLVER.LARS_ON"]:
        draft.lose("SOLVER.LARS_ON", "twinreel has no LARS")
    draft.drop("SOLVER.LARS_ON", "off")


def _rates(draft: Draft) -> None:
    settings = draft.settings
    epochs, warmup = settings["SOLVER.MAX_EPOCH"], settings["SOLVER.WARMUP_EPOCHS"]
    shards = settings["NUM_SHARDS"] if settings[_SCALES] else 1
    factor = shards * settings[_ACCUMULATION]
    base = _times(settings["SOLVER.BASE_LR"], factor)
    if base <= 0:
        draft.refuse("SOLVER.BASE_LR", f"SOLVER.BASE_LR={settings['SOLVER.BASE_LR']:g}: it must be above 0")
        return
    _explain_rate(draft, base, shards)
    draft.put("train.num_epochs", epochs, "SOLVER.MAX_EPOCH")
    draft.put("optim.warmup_epochs", warmup, "SOLVER.WARMUP_EPOCHS")
    if warmup < 0 or warmup >= epochs:
        text = f"SOLVER.WARMUP_EPOCHS={warmup:g} must be less than SOLVER.MAX_EPOCH={epochs}, and not below 0"
        draft.refuse(("SOLVER.WARMUP_EPOCHS", "SOLVER.MAX_EPOCH"), text)
    elif warmup:
        start = _times(settings["SOLVER.WARMUP_START_LR"], factor)
        draft.put("optim.warmup_start_learning_rate", start, "SOLVER.WARMUP_START_LR", because=_scaled(factor))
        draft.put("optim.warmup_target", "schedule", "SOLVER.WARMUP_EPOCHS")
    else:
        draft.drop("SOLVER.WARMUP_START_LR", "there is no warm-up")
    for key in ("SOLVER.WARMUP_FACTOR", "SOLVER.GAMMA", "SOLVER.STEP_SIZE"):
        draft.drop(key, "no policy of PySlowFast reads it")
    policy = settings["SOLVER.LR_POLICY"]
    if policy not in _POLICIES:
        text = f"SOLVER.LR_POLICY={policy}: there are {' and '.join(_POLICIES)}"
        draft.refuse("SOLVER.LR_POLICY", text)
        return
    draft.put("optim.decay", _POLICIES[policy], "SOLVER.LR_POLICY")
    _cosine(draft, base, factor) if policy == "cosine" else _steps(draft, epochs)


def _times(rate: float, factor: int) -> float:
    """The product to 12 digits: 0.1 x 3 is 0.3, not 0.30000000000000004."""
    return float(f"{rate * factor:.12g}")


def _scaled(factor: int) -> str:
    return f"x {factor}" if factor > 1 else ""


def _explain_rate(draft: Draft, base: float, shards: int) -> None:
    settings = draft.settings
    steps, batch = settings[_ACCUMULATION], draft.recipe["train"]["global_batch_size"]
    factors = [f"{settings['SOLVER.BASE_LR']:g}"] + [f"{shards} machines"] * (shards > 1)
    factors += [f"{steps} accumulated batches"] * (steps > 1)
    words = " x ".join(factors)
    draft.put("optim.learning_rate", base, "SOLVER.BASE_LR", because=words if len(factors) > 1 else "")
    if settings[_SCALES]:
        draft.put("optim.learning_rate", base, _SCALES, because=words if shards > 1 else "NUM_SHARDS is 1")
    else:
        draft.drop(_SCALES, "off")
    equals = f"{words} = optim.learning_rate {base:g}" if len(factors) > 1 else f"optim.learning_rate {base:g}"
    text = f"learning rate: {equals}, which belongs to the global batch of {batch} and is never scaled here"
    if steps > 1:
        draft.put("optim.learning_rate", base, _ACCUMULATION, because=words)
        text += (
            ". The rule for accumulation, base x accumulation, is multiplied out; if SOLVER.BASE_LR is already that "
            f"of the accumulated batch, set optim.learning_rate={settings['SOLVER.BASE_LR'] * shards:g}"
        )
    draft.notes.insert(1, text)


def _cosine(draft: Draft, base: float, factor: int) -> None:
    settings = draft.settings
    end = _times(settings["SOLVER.COSINE_END_LR"], factor)
    if not 0 <= end < base:
        text = f"SOLVER.COSINE_END_LR={settings['SOLVER.COSINE_END_LR']:g} must be below SOLVER.BASE_LR, not below 0"
        draft.refuse(("SOLVER.COSINE_END_LR", "SOLVER.BASE_LR"), text)
        return
    draft.put("optim.final_learning_rate", end, "SOLVER.COSINE_END_LR", because=_scaled(factor))
    after = settings["SOLVER.COSINE_AFTER_WARMUP"]
    draft.put("optim.cosine_after_warmup", after, "SOLVER.COSINE_AFTER_WARMUP")
    for key in ("SOLVER.STEPS", "SOLVER.LRS"):
        draft.drop(key, "of LR_POLICY steps_with_relative_lrs")


def _steps(draft: Draft, epochs: int) -> None:
    settings = draft.settings
    steps, factors = settings["SOLVER.STEPS"], settings["SOLVER.LRS"]
    problem = _steps_problem(steps, factors)
    if problem:
        keys = ("SOLVER.STEPS", "SOLVER.LRS")
        draft.refuse(keys, f"SOLVER.STEPS={short(steps)}, SOLVER.LRS={short(factors)}: {problem}")
        return
    reached = [float(step) for step in steps if step < epochs]
    late = f"from epoch {epochs} on there is no training" if len(reached) < len(steps) else ""
    draft.put("optim.decay_epochs", reached, "SOLVER.STEPS", because=late)
    surplus = "the others have no step" if len(factors) > len(reached) else ""
    draft.put("optim.decay_factors", [float(f) for f in factors[: len(reached)]], "SOLVER.LRS", because=surplus)
    for key in ("SOLVER.COSINE_END_LR", "SOLVER.COSINE_AFTER_WARMUP"):
        draft.drop(key, "of LR_POLICY cosine")


def _steps_problem(steps: list[Any], factors: list[Any]) -> str:
    if not all(type(number) in (int, float) and number >= 0 for number in [*steps, *factors]):
        return "give numbers that are not below 0"
    if not steps or steps[0] != 0 or sorted(set(steps)) != steps:
        return "steps begin with epoch 0 and rise, such as [0, 44, 88]"
    if len(factors) < len(steps):
        return f"{len(steps)} steps need as many factors"
    return ""


def _norms(draft: Draft) -> None:
    settings = draft.settings
    kind, frozen, devices = settings["BN.NORM_TYPE"], settings["MODEL.FROZEN_BN"], settings["BN.NUM_SYNC_DEVICES"]
    kinds = {"batchnorm": "per_process", "sync_batchnorm": "sync", "sub_batchnorm": "per_process"}
    if kind not in kinds:
        draft.refuse("BN.NORM_TYPE", f"BN.NORM_TYPE={kind}: there are {', '.join(kinds)}")
        return
    mode = "frozen" if frozen else kinds[kind]
    draft.put("train.batch_norm", mode, "BN.NORM_TYPE", "MODEL.FROZEN_BN")
    if kind == "sub_batchnorm" and not frozen and settings["BN.NUM_SPLITS"] > 1:
        parts = f"{settings['BN.NUM_SPLITS']} parts of a GPU's batch"
        draft.lose("BN.NUM_SPLITS", f"statistics of {parts}; here of a micro-batch: train.micro_batch_size sets it")
    draft.drop("BN.NUM_SPLITS", "one part")
    if mode == "sync" and not settings["BN.GLOBAL_SYNC"]:
        draft.lose("BN.NUM_SYNC_DEVICES", f"groups of {devices} GPUs there; here all processes share their statistics")
    for key in ("BN.NUM_SYNC_DEVICES", "BN.GLOBAL_SYNC"):
        if key not in draft.outcomes:
            draft.drop(key, "all processes share their statistics" if mode == "sync" else "nothing is synchronized")
    precise, batches = settings["BN.USE_PRECISE_STATS"], settings["BN.NUM_BATCHES_PRECISE"]
    if precise and not frozen:
        draft.put("train.precise_bn_batches", batches, "BN.USE_PRECISE_STATS", "BN.NUM_BATCHES_PRECISE")
    else:
        draft.put("train.precise_bn_batches", 0, "BN.USE_PRECISE_STATS")
        draft.drop("BN.NUM_BATCHES_PRECISE", "BN.USE_PRECISE_STATS is false, or batch norms are frozen")


def _run(draft: Draft) -> None:
    settings = draft.settings
    amp = [key for key in ("TRAIN.MIXED_PRECISION", "SOLVER.USE_AMP") if settings[key]]
    keys = amp or [key for key in ("TRAIN.MIXED_PRECISION", "SOLVER.USE_AMP") if key in settings]
    because = "as there; bf16 needs no loss scaling" if amp else ""
    draft.put("train.precision", "fp16" if amp else "fp32", *(keys or ["TRAIN.MIXED_PRECISION"]), because=because)
    both = ("MODEL.ACT_CHECKPOINT", "MODEL.ACTIVATION_CHECKPOINTING")
    recomputes = any(settings[key] for key in both)
    draft.put("train.activation_checkpointing", recomputes, *([key for key in both if key in settings] or both[:1]))
    draft.put("train.seed", settings["RNG_SEED"], "RNG_SEED")
    draft.put("train.log_every", settings["LOG_PERIOD"], "LOG_PERIOD")
    draft.put("train.save_every", f"{settings['TRAIN.CHECKPOINT_PERIOD']} epochs", "TRAIN.CHECKPOINT_PERIOD")
    draft.put("data.num_workers", settings["DATA_LOADER.NUM_WORKERS"], "DATA_LOADER.NUM_WORKERS")
    if settings["MVIT.ZERO_DECAY_POS_CLS"] and "MVIT.ZERO_DECAY_POS_CLS" in settings:
        draft.lose("MVIT.ZERO_DECAY_POS_CLS", "the class token is decayed like all weights")
    draft.say("MVIT.ZERO_DECAY_POS_CLS", "optim.weight_decay: on the class token too")
