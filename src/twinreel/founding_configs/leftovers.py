"""Keys that have no recipe key of their own, and what stands in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.keys import foreign_reason
from twinreel.founding_configs.values import short

__all__ = ["account_for_the_rest"]

_TENSORBOARD = "a run always writes its folder tensorboard/: curves, and what `twinreel eval` draws"
_MULTIGRID = (
    "batches of changing frames, sizes and numbers; twinreel trains at one shape, so a step sees whole clips and "
    "epochs are PySlowFast's before MULTIGRID.EPOCH_FACTOR"
)

# Without an effect on results, or done by itself.
_DROPPED = {
    "TRAIN.AUTO_RESUME": "twinreel train ... --resume, never by itself",
    "TEST.DATASET": "twinreel eval RUN --input MANIFEST judges on another list; eval.manifest is that of training",
    "TEST.CHECKPOINT_TYPE": "the kind of a file of weights is recognized",
    "TEST.SAVE_RESULTS_PATH": "predictions are in the run folder, keyed by id",
    "DATA.DECODING_BACKEND": "there is one decoder",
    "DATA.DECODING_SHORT_SIZE": "frames are decoded in their own size",
    "DATA.PATH_TO_PRELOAD_IMDB": "of picture data sets",
    "DATA.TRAIN_PCA_EIGVAL": "of picture data sets and detection",
    "DATA.TRAIN_PCA_EIGVEC": "of picture data sets and detection",
    "DATA.IN22K_TRAINVAL": "of picture data sets",
    "DATA.IN22k_VAL_IN1K": "of picture data sets",
    "DATA.IN_VAL_CROP_RATIO": "of picture data sets",
    "DATA.LOADER_CHUNK_SIZE": "lists are read whole",
    "DATA.LOADER_CHUNK_OVERALL_SIZE": "lists are read whole",
    "DATA.SSL_COLOR_BRI_CON_SAT": "of DATA.SSL_COLOR_JITTER",
    "DATA.SSL_COLOR_HUE": "of DATA.SSL_COLOR_JITTER",
    "DATA.SSL_MOCOV2_AUG": "of DATA.SSL_COLOR_JITTER",
    "DATA.SSL_BLUR_SIGMA_MIN": "of DATA.SSL_COLOR_JITTER",
    "DATA.SSL_BLUR_SIGMA_MAX": "of DATA.SSL_COLOR_JITTER",
    "DATA.COLOR_RND_GRAYSCALE": "of DATA.SSL_COLOR_JITTER",
    "DATA_LOADER.PIN_MEMORY": "always, where there is a GPU",
    "DATA_LOADER.ENABLE_MULTI_THREAD_DECODE": "reader processes decode at the same time, each on one thread",
    "MODEL.SINGLE_PATHWAY_ARCH": "pathways are taken inside the model",
    "MODEL.MULTI_PATHWAY_ARCH": "pathways are taken inside the model",
    "MODEL.DROPCONNECT_RATE": "it had no effect there: it was never switched on in training",
    "PREFETCH.NUM_LOADERS": "PySlowFast has no such key either",
    "OUTPUT_DIR": "twinreel train ... --out DIR says where",
    "LOG_MODEL_INFO": "the start of a run says what it is",
    "TASK": "a name for files of checkpoints",
}

# Where another value than this had an effect that twinreel does not have.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "TRAIN.KILL_LOSS_EXPLOSION_FACTOR": (0.0, "a run stops at a loss that is not finite, not at a large one"),
    "DATA.TRAIN_JITTER_MOTION_SHIFT": (False, "a crop that moves during a clip; twinreel's stays"),
    "DATA.TRAIN_JITTER_FPS": (0.0, "a random rate for each clip; twinreel's is fixed"),
    "DATA.TRAIN_CROP_NUM_TEMPORAL": (1, "several clips of a video in a batch; twinreel takes one"),
    "DATA.TRAIN_CROP_NUM_SPATIAL": (1, "several crops of a clip: data.repeated_augmentation does so"),
    "DATA.TIME_DIFF_PROB": (0.0, "differences of frames instead of frames; twinreel has none"),
    "DATA.SSL_COLOR_JITTER": (False, "color changes of self-supervised training; twinreel has none"),
    "DATA.SKIP_ROWS": (0, "lists are read whole"),
    "DATA.DUMMY_LOAD": (False, "data.source=generated makes videos for a trial"),
    "MODEL.FC_INIT_STD": (0.01, "the last layer always starts with a standard deviation of 0.01"),
    "MODEL.DETACH_FINAL_FC": (False, "model.freeze=[...] names the parts that do not train"),
    "MODEL.FP16_ALLREDUCE": (False, "gradients are exchanged as they are"),
}


def account_for_the_rest(draft: Draft) -> None:
    """Say of every key that is left what became of it."""
    for key, written in draft.settings.written.items():
        if key not in draft.outcomes:
            _account(draft, key, written.value)


def _account(draft: Draft, key: str, value: Any) -> None:
    foreign = foreign_reason(key)
    group = key.partition(".")[0]
    if key in _DROPPED:
        draft.drop(key, _DROPPED[key])
        if key == "TASK" and value == "ssl":
            draft.refuse(key, "TASK=ssl: self-supervised training; twinreel trains classifiers from such a file")
    elif key in _NEUTRAL:
        neutral, text = _NEUTRAL[key]
        draft.drop(key, "as it is here") if value == neutral else draft.lose(key, text)
    elif foreign is not None:
        draft.drop(key, foreign)
        if key.endswith(".ENABLE") and group in ("DETECTION", "MASK", "MVIT") and value is True:
            draft.refuse(key, f"{key}={short(value)}: {foreign}")
    elif group == "TENSORBOARD":
        draft.drop(key, _tensorboard(key, draft.settings.written))
    elif group == "MULTIGRID":
        on = draft.settings["MULTIGRID.LONG_CYCLE"] or draft.settings["MULTIGRID.SHORT_CYCLE"]
        draft.lose(key, _MULTIGRID) if on else draft.drop(key, "multigrid training is off")
    elif key in ("TRAIN.ENABLE", "TEST.ENABLE"):
        verb = "train" if key == "TRAIN.ENABLE" else "eval"
        draft.drop(key, f"`twinreel {verb}` does it when it is called")


def _tensorboard(key: str, written: Mapping[str, Any]) -> str:
    if key == "TENSORBOARD.LOG_DIR":
        return "the folder tensorboard/ of the run"
    if key.startswith("TENSORBOARD.MODEL_VIS"):
        return "twinreel explain RUN VIDEO --layer NAME draws what a layer looks at (Grad-CAM)"
    return _TENSORBOARD
