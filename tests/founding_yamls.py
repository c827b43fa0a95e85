"""PySlowFast YAMLs of Kinetics, written for tests: the keys and values of the published ones, shape by shape."""

from __future__ import annotations

__all__ = ["SEED_ARTICLE", "SHAPES", "mvit_yaml", "resnet_yaml", "slowfast_yaml"]

COSINE = """  BASE_LR: 0.1
  LR_POLICY: cosine
  MAX_EPOCH: 196
  MOMENTUM: 0.9
  WEIGHT_DECAY: 1e-4
  WARMUP_EPOCHS: 34.0
  WARMUP_START_LR: 0.01
  OPTIMIZING_METHOD: sgd
"""
STEPWISE = """  BASE_LR: 0.1
  LR_POLICY: steps_with_relative_lrs
  LRS: [1, 0.1, 0.01, 0.001, 0.0001, 0.00001]
  STEPS: [0, 94, 154, 196]
  MAX_EPOCH: 239
  MOMENTUM: 0.9
  WEIGHT_DECAY: 1e-4
  WARMUP_EPOCHS: 34.0
  WARMUP_START_LR: 0.01
  OPTIMIZING_METHOD: sgd
"""
FROM_PICTURES = """  BASE_LR: 0.01
  LR_POLICY: steps_with_relative_lrs
  STEPS: [0, 44, 88, 118]
  LRS: [1, 0.1, 0.01, 0.001]
  MAX_EPOCH: 118
  MOMENTUM: 0.9
  WEIGHT_DECAY: 1e-4
  OPTIMIZING_METHOD: sgd
"""
INFLATE = "  # CHECKPOINT_FILE_PATH: /path/to/your/directory/imagenet50_pretrain.pyth\n  CHECKPOINT_INFLATE: True\n"
NLN = ("[]", "[1, 3]", "[1, 3, 5]", "[]")
NONE = ("[]", "[]", "[]", "[]")


def resnet_yaml(
    arch: str,
    frames: int,
    rate: int,
    *,
    model_name: str = "ResNet",
    enable: bool = True,
    train: str = "",
    alpha: int | None = None,
    kernel: int = 5,
    depth: int = 50,
    temporal: str | None = None,
    location: tuple[str, ...] = NONE,
    instantiation: str = "dot_product",
    solver: str = COSINE,
    test_crop: int = 256,
    before: str = "",
) -> str:
    """C2D, I3D, Slow, and with `alpha` SlowFast."""
    two = alpha is not None

    def each(one: str) -> str:
        return f"[{one}, {one}]" if two else f"[{one}]"

    blocks = [f"[{stage}, []]" if two else f"[{stage}]" for stage in location]
    slowfast = (
        f"SLOWFAST:\n  ALPHA: {alpha}\n  BETA_INV: 8\n  FUSION_CONV_CHANNEL_RATIO: 2\n  FUSION_KERNEL_SZ: {kernel}\n"
    )
    strides = (
        "  SPATIAL_STRIDES: [[1, 1], [2, 2], [2, 2], [2, 2]]\n  SPATIAL_DILATIONS: [[1, 1], [1, 1], [1, 1], [1, 1]]\n"
    )
    kernels = temporal or f"[{each('3')}, {each('4')}, {each('6')}, {each('3')}]"
    return f"""{before}TRAIN:
  ENABLE: {enable}
  DATASET: kinetics
  BATCH_SIZE: 64
  EVAL_PERIOD: 10
  CHECKPOINT_PERIOD: 1
  AUTO_RESUME: True
{train}DATA:
  NUM_FRAMES: {frames}
  SAMPLING_RATE: {rate}
  TRAIN_JITTER_SCALES: [256, 320]
  TRAIN_CROP_SIZE: 224
  TEST_CROP_SIZE: {test_crop}
  INPUT_CHANNEL_NUM: {"[3, 3]" if two else "[3]"}
{slowfast if two else ""}RESNET:
  ZERO_INIT_FINAL_BN: True
  WIDTH_PER_GROUP: 64
  NUM_GROUPS: 1
  DEPTH: {depth}
  TRANS_FUNC: bottleneck_transform
  STRIDE_1X1: False
  NUM_BLOCK_TEMP_KERNEL: {kernels}
{strides if two else ""}NONLOCAL:
  LOCATION: [{", ".join(blocks)}]
  GROUP: [{each("1")}, {each("1")}, {each("1")}, {each("1")}]
  INSTANTIATION: {instantiation}
BN:
  USE_PRECISE_STATS: True
  NUM_BATCHES_PRECISE: 200
SOLVER:
{solver}MODEL:
  NUM_CLASSES: 400
  ARCH: {arch}
  MODEL_NAME: {model_name}
  LOSS_FUNC: cross_entropy
  DROPOUT_RATE: 0.5
TEST:
  ENABLE: True
  DATASET: kinetics
  BATCH_SIZE: 64
DATA_LOADER:
  NUM_WORKERS: 8
  PIN_MEMORY: True
NUM_GPUS: 8
NUM_SHARDS: 1
RNG_SEED: 0
OUTPUT_DIR: .
"""


def slowfast_yaml(alpha: int, kernel: int, frames: int = 32, **changes: object) -> str:
    """SlowFast with the stride 2 of all published ones."""
    return resnet_yaml("slowfast", frames, 2, model_name="SlowFast", alpha=alpha, kernel=kernel, **changes)  # type: ignore[arg-type]


def x3d_yaml(
    frames: int,
    rate: int,
    scales: tuple[int, int],
    crop: int,
    *,
    depth: float = 2.2,
    batch: int = 128,
    test_batch: int = 64,
    rate_of_machine: float = 0.1,
    epochs: int = 300,
) -> str:
    """X3D; it is tested with crops as large as the short side."""
    return f"""TRAIN:
  # ENABLE: False # default True
  DATASET: kinetics
  BATCH_SIZE: {batch}
  EVAL_PERIOD: 10
  CHECKPOINT_PERIOD: 10
  AUTO_RESUME: True
X3D:
  WIDTH_FACTOR: 2.0
  DEPTH_FACTOR: {depth}
  BOTTLENECK_FACTOR: 2.25
  DIM_C5: 2048
  DIM_C1: 12
TEST:
  ENABLE: True
  DATASET: kinetics
  BATCH_SIZE: {test_batch}
  NUM_SPATIAL_CROPS: 3
DATA:
  NUM_FRAMES: {frames}
  SAMPLING_RATE: {rate}
  TRAIN_JITTER_SCALES: [{scales[0]}, {scales[1]}]
  TRAIN_CROP_SIZE: {crop}
  TEST_CROP_SIZE: {scales[0]} # use if TEST.NUM_SPATIAL_CROPS: 3
  INPUT_CHANNEL_NUM: [3]
  DECODING_BACKEND: torchvision
RESNET:
  ZERO_INIT_FINAL_BN: True
  TRANS_FUNC: x3d_transform
  STRIDE_1X1: False
BN:
  USE_PRECISE_STATS: True
  NUM_BATCHES_PRECISE: 200
  WEIGHT_DECAY: 0.0
SOLVER:
  BASE_LR: {rate_of_machine} # 1 machine
  BASE_LR_SCALE_NUM_SHARDS: True
  LR_POLICY: cosine
  MAX_EPOCH: {epochs}
  WEIGHT_DECAY: 5e-5
  WARMUP_EPOCHS: 35.0
  WARMUP_START_LR: 0.01
  OPTIMIZING_METHOD: sgd
MODEL:
  NUM_CLASSES: 400
  ARCH: x3d
  MODEL_NAME: X3D
  LOSS_FUNC: cross_entropy
  DROPOUT_RATE: 0.5
DATA_LOADER:
  NUM_WORKERS: 8
  PIN_MEMORY: True
NUM_GPUS: 8
RNG_SEED: 0
OUTPUT_DIR: .
"""


def mvit_yaml() -> str:
    """MViTv2-S 16x4; one key stands twice, as published."""
    strides = ", ".join(
        f"[{block}, 1, {2 if block in (1, 3, 14) else 1}, {2 if block in (1, 3, 14) else 1}]" for block in range(16)
    )
    return f"""TRAIN:
  ENABLE: True
  DATASET: kinetics
  BATCH_SIZE: 16
  EVAL_PERIOD: 10
  CHECKPOINT_PERIOD: 10
  AUTO_RESUME: True
DATA:
  USE_OFFSET_SAMPLING: True
  DECODING_BACKEND: torchvision
  NUM_FRAMES: 16
  SAMPLING_RATE: 4
  TRAIN_JITTER_SCALES: [256, 320]
  TRAIN_CROP_SIZE: 224
  TEST_CROP_SIZE: 224
  INPUT_CHANNEL_NUM: [3]
  # PATH_TO_DATA_DIR: path-to-k400-dir
  TRAIN_JITTER_SCALES_RELATIVE: [0.08, 1.0]
  TRAIN_JITTER_ASPECT_RELATIVE: [0.75, 1.3333]
MVIT:
  ZERO_DECAY_POS_CLS: False
  USE_ABS_POS: False
  REL_POS_SPATIAL: True
  REL_POS_TEMPORAL: True
  DEPTH: 16
  NUM_HEADS: 1
  EMBED_DIM: 96
  PATCH_KERNEL: (3, 7, 7)
  PATCH_STRIDE: (2, 4, 4)
  PATCH_PADDING: (1, 3, 3)
  MLP_RATIO: 4.0
  QKV_BIAS: True
  DROPPATH_RATE: 0.2
  NORM: "layernorm"
  MODE: "conv"
  CLS_EMBED_ON: True
  DIM_MUL: [[1, 2.0], [3, 2.0], [14, 2.0]]
  HEAD_MUL: [[1, 2.0], [3, 2.0], [14, 2.0]]
  POOL_KVQ_KERNEL: [3, 3, 3]
  POOL_KV_STRIDE_ADAPTIVE: [1, 8, 8]
  POOL_Q_STRIDE: [{strides}]
  DROPOUT_RATE: 0.0
  DIM_MUL_IN_ATT: True
  RESIDUAL_POOLING: True
AUG:
  NUM_SAMPLE: 2
  ENABLE: True
  COLOR_JITTER: 0.4
  AA_TYPE: rand-m7-n4-mstd0.5-inc1
  INTERPOLATION: bicubic
  RE_PROB: 0.25
  RE_MODE: pixel
  RE_COUNT: 1
  RE_SPLIT: False
MIXUP:
  ENABLE: True
  ALPHA: 0.8
  CUTMIX_ALPHA: 1.0
  PROB: 1.0
  SWITCH_PROB: 0.5
  LABEL_SMOOTH_VALUE: 0.1
SOLVER:
  ZERO_WD_1D_PARAM: True
  BASE_LR_SCALE_NUM_SHARDS: True
  CLIP_GRAD_L2NORM: 1.0
  BASE_LR: 0.0001
  COSINE_AFTER_WARMUP: True
  COSINE_END_LR: 1e-6
  WARMUP_START_LR: 1e-6
  WARMUP_EPOCHS: 30.0
  LR_POLICY: cosine
  MAX_EPOCH: 200
  MOMENTUM: 0.9
  WEIGHT_DECAY: 0.05
  OPTIMIZING_METHOD: adamw
  COSINE_AFTER_WARMUP: True
MODEL:
  NUM_CLASSES: 400
  ARCH: mvit
  MODEL_NAME: MViT
  LOSS_FUNC: soft_cross_entropy
  DROPOUT_RATE: 0.5
TEST:
  ENABLE: True
  DATASET: kinetics
  BATCH_SIZE: 64
  NUM_SPATIAL_CROPS: 1
  NUM_ENSEMBLE_VIEWS: 5
DATA_LOADER:
  NUM_WORKERS: 8
  PIN_MEMORY: True
NUM_GPUS: 8
NUM_SHARDS: 1
RNG_SEED: 0
OUTPUT_DIR: .
"""


_C2 = {"enable": False, "train": "  CHECKPOINT_TYPE: caffe2\n"}
_MULTIGRID = "MULTIGRID:\n  SHORT_CYCLE: True\n  LONG_CYCLE: True\n"


def _temporal(slow: int, fast: int) -> str:
    return f"[[3, 3], [4, 4], [{slow}, {fast}], [3, 3]]"


SHAPES = {
    "C2D_8x8_R50": resnet_yaml("c2d", 8, 8, instantiation="softmax"),
    "C2D_8x8_R50_IN1K": resnet_yaml("c2d", 8, 8, instantiation="softmax", solver=FROM_PICTURES, train=INFLATE),
    "C2D_NLN_8x8_R50": resnet_yaml("c2d", 8, 8, instantiation="softmax", location=NLN),
    "I3D_8x8_R50": resnet_yaml("i3d", 8, 8, instantiation="softmax"),
    "I3D_8x8_R50_IN1K": resnet_yaml("i3d", 8, 8, instantiation="softmax", solver=FROM_PICTURES, train=INFLATE),
    "I3D_NLN_8x8_R50": resnet_yaml("i3d", 8, 8, instantiation="softmax", location=NLN),
    "I3D_NLN_8x8_R50_IN1K": resnet_yaml(
        "i3d", 8, 8, instantiation="softmax", location=NLN, solver=FROM_PICTURES, train=INFLATE
    ),
    "SLOW_4x16_R50": resnet_yaml("slow", 4, 16),
    "SLOW_8x8_R50": resnet_yaml("slow", 8, 8),
    "SLOW_NLN_4x16_R50": resnet_yaml("slow", 4, 16, location=NLN),
    "SLOW_NLN_8x8_R50": resnet_yaml("slow", 8, 8, location=NLN),
    "SLOWFAST_4x16_R50": slowfast_yaml(8, 5),
    "SLOWFAST_8x8_R50": slowfast_yaml(4, 7),
    "SLOWFAST_8x8_R50_stepwise": slowfast_yaml(4, 7, solver=STEPWISE),
    "SLOWFAST_8x8_R50_stepwise_multigrid": slowfast_yaml(4, 7, solver=STEPWISE, test_crop=224, before=_MULTIGRID),
    "SLOWFAST_NLN_4x16_R50": slowfast_yaml(8, 5, location=NLN),
    "SLOWFAST_NLN_8x8_R50": slowfast_yaml(4, 5, location=NLN),
    "c2/C2D_NOPOOL_8x8_R50": resnet_yaml("c2d", 8, 8, model_name="ResNet_nopool", instantiation="softmax", **_C2),  # type: ignore[arg-type]
    "c2/SLOWFAST_8x8_R101_101_101": slowfast_yaml(4, 5, depth=101, temporal=_temporal(23, 23), **_C2),
    "c2/SLOWFAST_8x8_R101_50_101": slowfast_yaml(4, 5, depth=101, temporal=_temporal(6, 23), **_C2),
    "c2/SLOWFAST_8x8_R101_50_50": slowfast_yaml(4, 5, depth=101, temporal=_temporal(6, 6), **_C2),
    "c2/SLOWFAST_16x8_R101_50_50": slowfast_yaml(4, 5, 64, depth=101, temporal=_temporal(6, 6), **_C2),
    "c2/SLOWFAST_NLN_16x8_R101_50_50": slowfast_yaml(
        4, 5, 64, depth=101, temporal=_temporal(6, 6), location=("[]", "[]", "[6, 13, 20]", "[]"), **_C2
    ),
    "X3D_XS": x3d_yaml(4, 12, (182, 228), 160),
    "X3D_S": x3d_yaml(13, 6, (182, 228), 160),
    "X3D_M": x3d_yaml(16, 5, (256, 320), 224),
    "X3D_L": x3d_yaml(16, 5, (356, 446), 312, depth=5.0, batch=64, test_batch=32, rate_of_machine=0.05, epochs=256),
    "MVITv2_S_16x4": mvit_yaml(),
}

# Keys of the kind that articles show, PySlowFast's own and others.
SEED_ARTICLE = """TRAIN:
  ENABLE: True
  BATCH_SIZE: 16
  EVAL_PERIOD: 5
  CHECKPOINT_PERIOD: 5
DATA:
  PATH_TO_DATA_DIR: /data/kinetics
  NUM_FRAMES: 32
  SAMPLING_RATE: 2
  TRAIN_CROP_SIZE: 224
  INPUT_CHANNEL_NUM: [3, 3]
MODEL:
  ARCH: slowfast_50
  DROPOUT_RATE: 0.5
  HEAD_ACT: softmax
  ACTIVATION_CHECKPOINTING: True
SOLVER:
  BASE_LR: 0.05
  LR_POLICY: cosine
  USE_AMP: True
  GRADIENT_ACCUMULATION_STEPS: 4
TENSORBOARD:
  ENABLE: True
  LOG_DIR: ./logs
  MODEL_VIS: True
NUM_GPUS: 2
"""
