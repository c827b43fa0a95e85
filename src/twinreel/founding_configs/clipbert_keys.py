"""The keys of ClipBERT's configuration, what each is where a file does not say it, and which values it may have.

Names and defaults are those of its command line (src/configs/config.py), of all of its scripts; some keys belong to
one script alone. Keys of a third kind stand in the `log/args.json` of a run.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

__all__ = ["CHOICES", "DEFAULTS", "LENGTHS", "Kind", "kind_of"]

Kind: TypeAlias = Literal["flag", "int", "float", "text", "path", "numbers", "datasets"]

DEFAULTS: dict[str, Any] = {
    # where things are
    "train_datasets": None,
    "val_datasets": None,
    "model_config": None,
    "tokenizer_dir": None,
    "output_dir": None,
    "detectron2_model_cfg": "",
    "e2e_weights_path": None,
    "detectron2_weights_path": None,
    "bert_weights_path": None,
    "ans2label_path": None,
    # text and pictures
    "max_txt_len": 20,
    "max_img_size": 448,
    "img_pixel_mean": None,
    "img_pixel_std": None,
    "img_input_format": "BGR",
    "max_n_example_per_group": 2,
    # clips
    "fps": 1.0,
    "num_frm": 3,
    "frm_sampling_strategy": "rand",
    "train_n_clips": 3,
    "score_agg_func": "mean",
    "random_sample_clips": True,
    # training
    "train_batch_size": 128,
    "val_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "num_valid": 20,
    "min_valid_steps": 100,
    "save_steps_ratio": 0.01,
    "num_train_epochs": 10,
    "optim": "adamw",
    "betas": [0.9, 0.98],
    "decay": "linear",
    "dropout": 0.1,
    "weight_decay": 1e-3,
    "grad_norm": 2.0,
    "warmup_ratio": 0.1,
    "transformer_lr_mul": 1.0,
    "transformer_lr_mul_prefix": "",
    "step_decay_epochs": None,
    "cnn_optim": "adamw",
    "cnn_learning_rate": 5e-5,
    "cnn_weight_decay": 1e-3,
    "cnn_sgd_momentum": 0.9,
    "cnn_lr_mul": 1.0,
    "cnn_lr_mul_prefix": "grid_encoder",
    "cnn_lr_decay": "linear",
    "cnn_step_decay_epochs": None,
    "freeze_cnn": False,
    "seed": 42,
    "fp16": False,
    "n_workers": 4,
    "pin_mem": True,
    "debug": False,
    "data_ratio": 1.0,
    "config": None,
    # tasks
    "loss_type": "ce",
    "itm_neg_size": 1,
    "margin": 0.2,
    "classifier": "mlp",
    "cls_hidden_scale": 2,
    "eval_retrieval_batch_size": 256,
    "task": None,
    "num_labels": None,
    "use_itm": False,
    "use_mlm": False,
    "itm_neg_prob": 0.5,
    "pixel_random_sampling_size": 0,
    # inference
    "do_inference": False,
    "inference_model_step": -1,
    "inference_split": "val",
    "inference_txt_db": None,
    "inference_img_db": None,
    "inference_batch_size": 64,
    "inference_n_clips": 1,
    # what a run adds to its log/args.json
    "n_gpu": None,
    "num_train_steps": None,
    "valid_steps": None,
}

# Kinds that a default does not show.
_KINDS: dict[str, Kind] = {
    "train_datasets": "datasets",
    "val_datasets": "datasets",
    "img_pixel_mean": "numbers",
    "img_pixel_std": "numbers",
    "step_decay_epochs": "numbers",
    "cnn_step_decay_epochs": "numbers",
    "task": "text",
    "num_labels": "int",
    "n_gpu": "int",
    "num_train_steps": "int",
    "valid_steps": "int",
}

# How many values a list has; None: any number.
LENGTHS: dict[str, int | None] = {
    "betas": 2,
    "img_pixel_mean": 3,
    "img_pixel_std": 3,
    "step_decay_epochs": None,
    "cnn_step_decay_epochs": None,
}

CHOICES: dict[str, tuple[str, ...]] = {
    "img_input_format": ("BGR", "RGB"),
    "frm_sampling_strategy": ("rand", "uniform", "start", "middle", "end"),
    "score_agg_func": ("mean", "max", "lse"),
    "optim": ("adam", "adamax", "adamw"),
    "decay": ("linear", "invsqrt"),
    "cnn_optim": ("adam", "adamax", "adamw", "sgd"),
    "cnn_lr_decay": ("linear", "invsqrt", "multi_step", "constant"),
    "loss_type": ("ce", "rank", "bce"),
    "classifier": ("mlp", "linear"),
    "task": ("action", "transition", "frameqa", "msrvtt_qa"),
}


def kind_of(key: str) -> Kind:
    """What kind of value a key has; a `path` may be null."""
    if key in _KINDS:
        return _KINDS[key]
    default = DEFAULTS[key]
    if isinstance(default, bool):
        return "flag"
    if isinstance(default, list):
        return "numbers"
    kinds: dict[type, Kind] = {int: "int", float: "float", str: "text"}
    return kinds.get(type(default), "path")
