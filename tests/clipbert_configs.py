"""ClipBERT's published configurations, made of a table of their values, as its files are laid out.

A column a file: text tokens, picture size, rate, frames, clips, pooling, texts of a video, batch of a GPU, batches
accumulated, epochs, least steps between validations, number of validations, learning rate, clipping.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["FILES", "PUBLISHED", "clipbert_json"]

_KEYS = (
    "max_txt_len", "max_img_size", "fps", "num_frm", "train_n_clips", "score_agg_func", "max_n_example_per_group",
    "train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "min_valid_steps", "num_valid",
    "learning_rate", "grad_norm",
)  # fmt: skip

PUBLISHED: dict[str, tuple[Any, ...]] = {
    "msrvtt_ret": (20, 448, 2, 2, 8, "lse", 1, 16, 1, 20, 100, 100, 5e-5, 5.0),
    "didemo_ret": (100, 448, 2, 2, 8, "lse", 1, 8, 4, 20, 100, 200, 5e-5, 5.0),
    "anet_ret": (100, 448, 1, 2, 4, "lse", 1, 16, 2, 80, 100, 200, 5e-5, 5.0),
    "msrvtt_qa": (100, 448, 2, 2, 8, "lse", 1, 16, 1, 10, 50, 10, 5e-5, 5.0),
    "tgif_qa_action": (25, 768, 1, 1, 1, None, 1, 16, 1, 15, 20, 15, 5e-5, 5.0),
    "tgif_qa_transition": (25, 768, 1, 1, 1, None, 1, 16, 1, 15, 20, 15, 5e-5, 5.0),
    "tgif_qa_frameqa": (25, 768, 1, 1, 1, None, 1, 16, 1, 15, 20, 15, 5e-5, 5.0),
    "vqa": (20, 768, None, None, None, None, 2, 32, 1, 5, 100, 30, 1e-4, 2.0),
    "pretrain_image_text": (30, 768, None, None, None, None, 2, 32, 2, 40, 100, 200, 5e-5, 5.0),
}

_EVERYWHERE = {
    "img_pixel_mean": [123.675, 116.28, 103.53],
    "img_pixel_std": [1.0, 1.0, 1.0],
    "img_input_format": "BGR",
    "model_config": "src/configs/base_model.json",
    "detectron2_model_cfg": "src/configs/detectron2_configs/R-50-grid.yaml",
    "e2e_weights_path": "/pretrain/clipbert_image_text_pretrained.pt",
    "detectron2_weights_path": None,
    "bert_weights_path": None,
    "tokenizer_dir": "/pretrain/bert-base-uncased/",
    "weight_decay": 1e-3,
    "decay": "linear",
    "optim": "adamw",
    "betas": [0.9, 0.98],
    "dropout": 0.1,
    "cnn_weight_decay": 1e-3,
    "cnn_lr_decay": "linear",
    "seed": 42,
    "fp16": 1,
}

_OWN: dict[str, dict[str, Any]] = {
    "retrieval": {"loss_type": "ce", "itm_neg_size": 1},
    "questions": {"classifier": "mlp", "cls_hidden_scale": 2},
    "vqa": {"classifier": "mlp", "cls_hidden_scale": 2, "num_labels": 3129},
    "pretraining": {"pixel_random_sampling_size": 100, "use_itm": 1, "use_mlm": 1},
}


def clipbert_json(name: str) -> str:
    """The text of a published configuration."""
    values = {key: value for key, value in zip(_KEYS, PUBLISHED[name], strict=True) if value is not None}
    values |= _EVERYWHERE | {"val_batch_size": values["train_batch_size"], "output_dir": f"/storage/{name}_default"}
    values["cnn_learning_rate"] = values["learning_rate"]
    task = name.removeprefix("tgif_qa_")
    if name.endswith("_ret"):
        values |= _OWN["retrieval"]
    elif name == "vqa":
        values |= _OWN["vqa"] | {"ans2label_path": "/txt/vqa/trainval_ans2label.json"}
    elif name.startswith("pretrain"):
        values |= _OWN["pretraining"] | {
            "e2e_weights_path": None,
            "detectron2_weights_path": "/pretrain/grid_feat_R-50.pth",
            "bert_weights_path": "/pretrain/bert-base-uncased/pytorch_model.bin",
        }
    else:
        values |= _OWN["questions"] | {"task": task, "ans2label_path": f"/txt/{name}/ans2label.json"}
    folder = {"tgif": "tgif_qa", "msrvtt_qa": "msrvtt_qa"}.get(name[:4] if "tgif" in name else name, name)
    for part in ("train", "val"):
        text: Any = f"/txt/{folder}/{part}.jsonl"
        if "task" in values:
            text = {task: f"/txt/{folder}/{task}_{part}.jsonl", "other": f"/txt/{folder}/other_{part}.jsonl"}
        elif name == "vqa" and part == "train":
            text = ["/txt/vqa/vqa_train.jsonl", "/txt/vqa/vg_train.jsonl"]
        values[f"{part}_datasets"] = [{"name": name, "txt": text, "img": f"/img/{name.split('_')[0]}"}]
    return json.dumps(values, indent=2)


FILES = {name: f"{name}_base_resnet50.json" for name in PUBLISHED}
"""The name of each file."""
