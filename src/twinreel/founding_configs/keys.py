"""The keys of PySlowFast's configuration, what each is where a file does not say it, and which type that makes it.

Names and defaults are those of its slowfast/config/defaults.py. Beside these there are keys that others have added.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FOREIGN", "GROUPS", "KEYS", "OPTIONAL", "foreign_reason", "kind_of"]

# Groups that a classifier is made of: the default says the type, too.
_OWN: dict[str, dict[str, Any]] = {
    "AUG": {
        "ENABLE": False,
        "NUM_SAMPLE": 1,
        "COLOR_JITTER": 0.4,
        "AA_TYPE": "rand-m9-mstd0.5-inc1",
        "INTERPOLATION": "bicubic",
        "RE_PROB": 0.25,
        "RE_MODE": "pixel",
        "RE_COUNT": 1,
        "RE_SPLIT": False,
        "GEN_MASK_LOADER": False,
        "MASK_TUBE": False,
        "MASK_FRAMES": False,
        "MASK_WINDOW_SIZE": [8, 7, 7],
        "MASK_RATIO": 0.0,
        "MAX_MASK_PATCHES_PER_BLOCK": None,
    },
    "BN": {
        "USE_PRECISE_STATS": False,
        "NUM_BATCHES_PRECISE": 200,
        "WEIGHT_DECAY": 0.0,
        "NORM_TYPE": "batchnorm",
        "NUM_SPLITS": 1,
        "NUM_SYNC_DEVICES": 1,
        "GLOBAL_SYNC": False,
    },
    "DATA": {
        "PATH_TO_DATA_DIR": "",
        "PATH_LABEL_SEPARATOR": " ",
        "PATH_PREFIX": "",
        "NUM_FRAMES": 8,
        "SAMPLING_RATE": 8,
        "TRAIN_PCA_EIGVAL": [0.225, 0.224, 0.229],
        "TRAIN_PCA_EIGVEC": [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.814], [-0.5836, -0.6948, 0.4203]],
        "PATH_TO_PRELOAD_IMDB": "",
        "MEAN": [0.45, 0.45, 0.45],
        "INPUT_CHANNEL_NUM": [3, 3],
        "STD": [0.225, 0.225, 0.225],
        "TRAIN_JITTER_SCALES": [256, 320],
        "TRAIN_JITTER_SCALES_RELATIVE": [],
        "TRAIN_JITTER_ASPECT_RELATIVE": [],
        "USE_OFFSET_SAMPLING": False,
        "TRAIN_JITTER_MOTION_SHIFT": False,
        "TRAIN_CROP_SIZE": 224,
        "TEST_CROP_SIZE": 256,
        "TARGET_FPS": 30,
        "TRAIN_JITTER_FPS": 0.0,
        "DECODING_BACKEND": "torchvision",
        "DECODING_SHORT_SIZE": 256,
        "INV_UNIFORM_SAMPLE": False,
        "RANDOM_FLIP": True,
        "MULTI_LABEL": False,
        "ENSEMBLE_METHOD": "sum",
        "REVERSE_INPUT_CHANNEL": False,
        "TRAIN_CROP_NUM_TEMPORAL": 1,
        "TRAIN_CROP_NUM_SPATIAL": 1,
        "COLOR_RND_GRAYSCALE": 0.0,
        "LOADER_CHUNK_SIZE": 0,
        "LOADER_CHUNK_OVERALL_SIZE": 0,
        "SKIP_ROWS": 0,
        "TIME_DIFF_PROB": 0.0,
        "SSL_COLOR_JITTER": False,
        "SSL_COLOR_BRI_CON_SAT": [0.4, 0.4, 0.4],
        "SSL_COLOR_HUE": 0.1,
        "SSL_MOCOV2_AUG": False,
        "SSL_BLUR_SIGMA_MIN": [0.0, 0.1],
        "SSL_BLUR_SIGMA_MAX": [0.0, 2.0],
        "IN22K_TRAINVAL": False,
        "IN22k_VAL_IN1K": "",
        "IN_VAL_CROP_RATIO": 0.875,
        "DUMMY_LOAD": False,
    },
    "DATA_LOADER": {"NUM_WORKERS": 8, "PIN_MEMORY": True, "ENABLE_MULTI_THREAD_DECODE": False},
    "MIXUP": {
        "ENABLE": False,
        "ALPHA": 0.8,
        "CUTMIX_ALPHA": 1.0,
        "PROB": 1.0,
        "SWITCH_PROB": 0.5,
        "LABEL_SMOOTH_VALUE": 0.1,
    },
    "MODEL": {
        "ARCH": "slowfast",
        "MODEL_NAME": "SlowFast",
        "NUM_CLASSES": 400,
        "LOSS_FUNC": "cross_entropy",
        "SINGLE_PATHWAY_ARCH": ["2d", "c2d", "i3d", "slow", "x3d", "mvit", "maskmvit"],
        "MULTI_PATHWAY_ARCH": ["slowfast"],
        "DROPOUT_RATE": 0.5,
        "DROPCONNECT_RATE": 0.0,
        "FC_INIT_STD": 0.01,
        "HEAD_ACT": "softmax",
        "ACT_CHECKPOINT": False,
        "DETACH_FINAL_FC": False,
        "FROZEN_BN": False,
        "FP16_ALLREDUCE": False,
    },
    "MULTIGRID": {
        "EPOCH_FACTOR": 1.5,
        "SHORT_CYCLE": False,
        "SHORT_CYCLE_FACTORS": [0.5, 0.7071067811865476],
        "LONG_CYCLE": False,
        "LONG_CYCLE_FACTORS": [[0.25, 0.7071067811865476], [0.5, 0.7071067811865476], [0.5, 1], [1, 1]],
        "BN_BASE_SIZE": 8,
        "EVAL_FREQ": 3,
        "LONG_CYCLE_SAMPLING_RATE": 0,
        "DEFAULT_B": 0,
        "DEFAULT_T": 0,
        "DEFAULT_S": 0,
    },
    "MVIT": {
        "MODE": "conv",
        "POOL_FIRST": False,
        "CLS_EMBED_ON": True,
        "PATCH_KERNEL": [3, 7, 7],
        "PATCH_STRIDE": [2, 4, 4],
        "PATCH_PADDING": [2, 4, 4],
        "PATCH_2D": False,
        "EMBED_DIM": 96,
        "NUM_HEADS": 1,
        "MLP_RATIO": 4.0,
        "QKV_BIAS": True,
        "DROPPATH_RATE": 0.1,
        "LAYER_SCALE_INIT_VALUE": 0.0,
        "DEPTH": 16,
        "NORM": "layernorm",
        "DIM_MUL": [],
        "HEAD_MUL": [],
        "POOL_KV_STRIDE": [],
        "POOL_KV_STRIDE_ADAPTIVE": None,
        "POOL_Q_STRIDE": [],
        "POOL_KVQ_KERNEL": None,
        "ZERO_DECAY_POS_CLS": True,
        "NORM_STEM": False,
        "SEP_POS_EMBED": False,
        "DROPOUT_RATE": 0.0,
        "USE_ABS_POS": True,
        "REL_POS_SPATIAL": False,
        "REL_POS_TEMPORAL": False,
        "REL_POS_ZERO_INIT": False,
        "RESIDUAL_POOLING": False,
        "DIM_MUL_IN_ATT": False,
        "SEPARATE_QKV": False,
        "HEAD_INIT_SCALE": 1.0,
        "USE_MEAN_POOLING": False,
        "USE_FIXED_SINCOS_POS": False,
    },
    "NONLOCAL": {
        "LOCATION": [[[]], [[]], [[]], [[]]],
        "GROUP": [[1], [1], [1], [1]],
        "INSTANTIATION": "dot_product",
        "POOL": [[[1, 2, 2], [1, 2, 2]], [[1, 2, 2], [1, 2, 2]], [[1, 2, 2], [1, 2, 2]], [[1, 2, 2], [1, 2, 2]]],
    },
    "RESNET": {
        "TRANS_FUNC": "bottleneck_transform",
        "NUM_GROUPS": 1,
        "WIDTH_PER_GROUP": 64,
        "INPLACE_RELU": True,
        "STRIDE_1X1": False,
        "ZERO_INIT_FINAL_BN": False,
        "ZERO_INIT_FINAL_CONV": False,
        "DEPTH": 50,
        "NUM_BLOCK_TEMP_KERNEL": [[3], [4], [6], [3]],
        "SPATIAL_STRIDES": [[1], [2], [2], [2]],
        "SPATIAL_DILATIONS": [[1], [1], [1], [1]],
    },
    "SLOWFAST": {"BETA_INV": 8, "ALPHA": 8, "FUSION_CONV_CHANNEL_RATIO": 2, "FUSION_KERNEL_SZ": 5},
    "SOLVER": {
        "BASE_LR": 0.1,
        "LR_POLICY": "cosine",
        "COSINE_END_LR": 0.0,
        "GAMMA": 0.1,
        "STEP_SIZE": 1,
        "STEPS": [],
        "LRS": [],
        "MAX_EPOCH": 300,
        "MOMENTUM": 0.9,
        "DAMPENING": 0.0,
        "NESTEROV": True,
        "WEIGHT_DECAY": 0.0001,
        "WARMUP_FACTOR": 0.1,
        "WARMUP_EPOCHS": 0.0,
        "WARMUP_START_LR": 0.01,
        "OPTIMIZING_METHOD": "sgd",
        "BASE_LR_SCALE_NUM_SHARDS": False,
        "COSINE_AFTER_WARMUP": False,
        "ZERO_WD_1D_PARAM": False,
        "CLIP_GRAD_VAL": None,
        "CLIP_GRAD_L2NORM": None,
        "LARS_ON": False,
        "LAYER_DECAY": 1.0,
        "BETAS": (0.9, 0.999),
    },
    "TENSORBOARD": {
        "ENABLE": False,
        "PREDICTIONS_PATH": "",
        "LOG_DIR": "",
        "CLASS_NAMES_PATH": "",
        "CATEGORIES_PATH": "",
    },
    "TENSORBOARD.CONFUSION_MATRIX": {"ENABLE": False, "FIGSIZE": [8, 8], "SUBSET_PATH": ""},
    "TENSORBOARD.HISTOGRAM": {"ENABLE": False, "SUBSET_PATH": "", "TOPK": 10, "FIGSIZE": [8, 8]},
    "TENSORBOARD.MODEL_VIS": {
        "ENABLE": False,
        "MODEL_WEIGHTS": False,
        "ACTIVATIONS": False,
        "INPUT_VIDEO": False,
        "LAYER_LIST": [],
        "TOPK_PREDS": 1,
        "COLORMAP": "Pastel2",
    },
    "TENSORBOARD.MODEL_VIS.GRAD_CAM": {
        "ENABLE": True,
        "LAYER_LIST": [],
        "USE_TRUE_LABEL": False,
        "COLORMAP": "viridis",
    },
    "TENSORBOARD.WRONG_PRED_VIS": {"ENABLE": False, "TAG": "Incorrectly classified videos.", "SUBSET_PATH": ""},
    "TEST": {
        "ENABLE": True,
        "DATASET": "kinetics",
        "BATCH_SIZE": 8,
        "CHECKPOINT_FILE_PATH": "",
        "NUM_ENSEMBLE_VIEWS": 10,
        "NUM_SPATIAL_CROPS": 3,
        "CHECKPOINT_TYPE": "pytorch",
        "SAVE_RESULTS_PATH": "",
        "NUM_TEMPORAL_CLIPS": [],
    },
    "TRAIN": {
        "ENABLE": True,
        "KILL_LOSS_EXPLOSION_FACTOR": 0.0,
        "DATASET": "kinetics",
        "BATCH_SIZE": 64,
        "EVAL_PERIOD": 10,
        "CHECKPOINT_PERIOD": 10,
        "AUTO_RESUME": True,
        "CHECKPOINT_FILE_PATH": "",
        "CHECKPOINT_TYPE": "pytorch",
        "CHECKPOINT_INFLATE": False,
        "CHECKPOINT_EPOCH_RESET": False,
        "CHECKPOINT_CLEAR_NAME_PATTERN": (),
        "MIXED_PRECISION": False,
        "CHECKPOINT_IN_INIT": False,
    },
    "X3D": {
        "WIDTH_FACTOR": 1.0,
        "DEPTH_FACTOR": 1.0,
        "BOTTLENECK_FACTOR": 1.0,
        "DIM_C5": 2048,
        "DIM_C1": 12,
        "SCALE_RES2": False,
        "BN_LIN5": False,
        "CHANNELWISE_3x3x3": True,
    },
    "": {
        "TASK": "",
        "NUM_GPUS": 1,
        "NUM_SHARDS": 1,
        "SHARD_ID": 0,
        "OUTPUT_DIR": ".",
        "RNG_SEED": 1,
        "LOG_PERIOD": 10,
        "LOG_MODEL_INFO": True,
        "DIST_BACKEND": "nccl",
    },
}

# Groups that no recipe has a place for: why, and their keys, of any type.
FOREIGN: dict[str, tuple[str, str]] = {
    "CONTRASTIVE": (
        "self-supervised training; twinreel trains classifiers from such a file",
        "T DIM LENGTH QUEUE_LEN MOMENTUM MOMENTUM_ANNEALING TYPE INTERP_MEMORY MEM_TYPE "
        "NUM_CLASSES_DOWNSTREAM NUM_MLP_LAYERS MLP_DIM BN_MLP BN_SYNC_MLP LOCAL_SHUFFLE_BN "
        "MOCO_MULTI_VIEW_QUEUE DELTA_CLIPS_MIN DELTA_CLIPS_MAX PREDICTOR_DEPTHS SEQUENTIAL SIMCLR_DIST_ON "
        "SWAV_QEUE_LEN KNN_ON",
    ),
    "VIS_MASK": (
        "masked pretraining; twinreel trains classifiers from such a file",
        "ENABLE",
    ),
    "MASK": (
        "masked pretraining; twinreel trains classifiers from such a file",
        "ENABLE MAE_ON MAE_RND_MASK PER_FRAME_MASKING TIME_STRIDE_LOSS NORM_PRED_PIXEL SCALE_INIT_BY_DEPTH "
        "DECODER_EMBED_DIM DECODER_SEP_POS_EMBED DEC_KV_KERNEL DEC_KV_STRIDE PRETRAIN_DEPTH HEAD_TYPE "
        "DECODER_DEPTH PRED_HOG",
    ),
    "MVIT.REV": (
        "reversible transformers; twinreel has none",
        "ENABLE RESPATH_FUSE BUFFER_LAYERS RES_PATH PRE_Q_FUSION",
    ),
    "BENCHMARK": (
        "twinreel bench loader RECIPE has options of its own",
        "NUM_EPOCHS LOG_PERIOD SHUFFLE",
    ),
    "DETECTION": (
        "detection of actions in boxes; twinreel trains classifiers of whole clips",
        "ENABLE ALIGNED SPATIAL_SCALE_FACTOR ROI_XFORM_RESOLUTION",
    ),
    "AVA": (
        "detection of actions in boxes; twinreel trains classifiers of whole clips",
        "FRAME_DIR FRAME_LIST_DIR ANNOTATION_DIR TRAIN_LISTS TEST_LISTS TRAIN_GT_BOX_LISTS "
        "TRAIN_PREDICT_BOX_LISTS TEST_PREDICT_BOX_LISTS DETECTION_SCORE_THRESH BGR "
        "TRAIN_USE_COLOR_AUGMENTATION TRAIN_PCA_JITTER_ONLY TEST_FORCE_FLIP FULL_TEST_ON_VAL LABEL_MAP_FILE "
        "EXCLUSION_FILE GROUNDTRUTH_FILE IMG_PROC_BACKEND",
    ),
    "DEMO": (
        "twinreel predict RUN VIDEO has options of its own",
        "ENABLE LABEL_FILE_PATH WEBCAM INPUT_VIDEO DISPLAY_WIDTH DISPLAY_HEIGHT DETECTRON2_CFG "
        "DETECTRON2_WEIGHTS DETECTRON2_THRESH BUFFER_SIZE OUTPUT_FILE OUTPUT_FPS INPUT_FORMAT CLIP_VIS_SIZE "
        "NUM_VIS_INSTANCES PREDS_BOXES THREAD_ENABLE NUM_CLIPS_SKIP GT_BOXES STARTING_SECOND FPS VIS_MODE "
        "COMMON_CLASS_THRES UNCOMMON_CLASS_THRES COMMON_CLASS_NAMES SLOWMO",
    ),
}

# Keys of files in circulation that are none of PySlowFast's own.
_EXTRA: dict[str, Any] = {
    "MODEL.ACTIVATION_CHECKPOINTING": False,
    "PREFETCH.NUM_LOADERS": 0,
    "SOLVER.GRADIENT_ACCUMULATION_STEPS": 1,
    "SOLVER.USE_AMP": False,
    "TENSORBOARD.MODEL_VIS": False,
}

# Keys that may be null, and the type that they have otherwise.
OPTIONAL: dict[str, type] = {
    "AUG.MAX_MASK_PATCHES_PER_BLOCK": int,
    "BN.NUM_SYNC_DEVICES": int,
    "MVIT.POOL_KVQ_KERNEL": list,
    "MVIT.POOL_KV_STRIDE_ADAPTIVE": list,
    "SOLVER.CLIP_GRAD_L2NORM": float,
    "SOLVER.CLIP_GRAD_VAL": float,
}


def _dotted() -> dict[str, Any]:
    keys = {f"{group}.{name}" if group else name: value for group, own in _OWN.items() for name, value in own.items()}
    foreign = {f"{group}.{name}": None for group, (_, names) in FOREIGN.items() for name in names.split()}
    return keys | foreign | _EXTRA


KEYS: dict[str, Any] = _dotted()
"""Every key by its dotted name, with its default; of a FOREIGN one None."""

GROUPS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for parts in (key.split(".") for key in KEYS) for depth in range(1, len(parts))
)
"""Every dotted name that is a section."""


def foreign_reason(key: str) -> str | None:
    """Why a key has no place in a recipe, if it is of a FOREIGN group."""
    group = key.rpartition(".")[0]
    return FOREIGN[group][0] if group in FOREIGN else None


def kind_of(key: str) -> type | None:
    """The type of a key's values: bool, int, float, str or list; None: any."""
    if foreign_reason(key) is not None:
        return None
    return OPTIONAL.get(key) or (list if isinstance(KEYS[key], tuple) else type(KEYS[key]))
