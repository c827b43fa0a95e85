"""ClipBERT's JSON as model, task and data: what is learned from what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from twinreel.data.manifest.class_names import read_class_names
from twinreel.errors import ConfigError, DataError
from twinreel.founding_configs.clipbert_paths import PathMap
from twinreel.founding_configs.clipbert_schedule import convert_clipbert_judging, convert_clipbert_schedule
from twinreel.founding_configs.clipbert_settings import read_clipbert
from twinreel.founding_configs.clipbert_sizes import convert_sizes
from twinreel.founding_configs.conversion import SECTIONS, Conversion, finish
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short

__all__ = ["convert_clipbert"]

_PRETRAINING = ("use_itm", "use_mlm", "itm_neg_prob", "pixel_random_sampling_size")
_CHOICES = ("action", "transition")

# Without an effect there, or done by itself here.
_DROPPED = {
    "dropout": "it had no effect there: model_config's 0.1 counted, as model.dropout does here",
    "cnn_optim": "it had no effect there: `optim` was used for both parts",
    "cnn_sgd_momentum": "it had no effect there: `optim` was used for both parts",
    "classifier": "it had no effect there: the head always had one hidden layer, as here",
    "cls_hidden_scale": "it had no effect there: the hidden layer was always twice as wide, as here",
    "num_labels": "it follows from task.goal and task.loss, of questions from the table of answers",
    "pin_mem": "always, where there is a GPU",
    "output_dir": "twinreel train ... --out DIR says where",
    "config": "the file itself",
    "debug": "twinreel check RECIPE --steps 50 is the trial",
    "do_inference": "twinreel eval RUN does it when it is called",
    "inference_split": "twinreel eval RUN --input MANIFEST says what is judged",
    "inference_model_step": "twinreel eval RUN --checkpoint step_N",
}


def convert_clipbert(
    path: str | Path, overrides: Sequence[str] = (), *, gpus: int | None = None, maps: Sequence[str] = ()
) -> Conversion:
    """The recipe of a ClipBERT JSON, or of the `log/args.json` of a run, with `KEY VALUE ...` laid over it.

    Args:
        path: the JSON.
        overrides: keys and values in turn.
        gpus: how many its batch was for; None: what a run's args.json says, else 4, as ClipBERT's README starts it.
        maps: `/img=/data/lmdb`: paths that begin with the first begin with the second instead.

    Raises:
        ConfigError: as for `convert_config`.
    """
    settings = read_clipbert(path, overrides)
    draft = Draft(settings, {section: {} for section in SECTIONS})
    paths = PathMap.parse(maps)
    if gpus is not None and gpus < 1:
        raise ConfigError(f"--gpus {gpus}: give at least 1")
    if _is_pretraining(draft):
        draft.refuse(
            _PRETRAINING,
            "pretraining on pictures and captions: twinreel has no such task, it begins with what pretraining made: "
            "e2e_weights_path clipbert_image_text_pretrained.pt in a configuration of retrieval or questions",
        )
        settings.raise_problems()
    _model(draft, paths, Path(path))
    goal = _task(draft, paths)
    _data(draft, paths, goal)
    convert_clipbert_schedule(draft, gpus, goal)
    convert_clipbert_judging(draft, paths, goal)
    for key, reason in _DROPPED.items():
        draft.drop(key, reason)
    paths.check(draft)
    words = [*overrides, *([f"--gpus {gpus}"] if gpus is not None else []), *(f"--map {pair}" for pair in maps)]
    return finish(draft, " ".join([Path(path).name, *words]))


def _is_pretraining(draft: Draft) -> bool:
    return any(draft.settings[key] for key in ("use_itm", "use_mlm", "pixel_random_sampling_size"))


def _of_pictures(draft: Draft) -> bool:
    """Whether it is VQA: questions about pictures, a table of answers and no task of videos."""
    settings = draft.settings
    return settings["task"] is None and (settings["loss_type"] == "bce" or settings["ans2label_path"] is not None)


def _model(draft: Draft, paths: PathMap, path: Path) -> None:
    settings = draft.settings
    for key in ("max_txt_len", "num_frm", "fps", "max_img_size"):
        if settings[key] <= 0:
            draft.refuse(key, f"{key}={settings[key]:g}: it must be above 0")
    convert_sizes(draft, paths, path)
    draft.put("model.max_text_tokens", settings["max_txt_len"], "max_txt_len")
    _weights(draft, paths)
    folder = settings["tokenizer_dir"]
    words = None if folder is None else os.path.join(paths.find("tokenizer_dir", folder), "vocab.txt")
    draft.put("model.vocabulary", words, "tokenizer_dir")
    if folder is None:
        draft.refuse("tokenizer_dir", "tokenizer_dir: it is missing; give the folder of bert-base-uncased's vocab.txt")
    if settings["freeze_cnn"] or "freeze_cnn" in settings:
        frozen = ["cnn.feature"] if settings["freeze_cnn"] else []
        draft.put("model.freeze", frozen, "freeze_cnn", because="not the grid encoder, as there" if frozen else "")
    _preprocessing(draft)


def _weights(draft: Draft, paths: PathMap) -> None:
    settings = draft.settings
    whole = settings["e2e_weights_path"]
    parts = {"cnn": "detectron2_weights_path", "transformer.bert": "bert_weights_path"}
    if whole:
        draft.put("model.weights", paths.find("e2e_weights_path", whole), "e2e_weights_path")
    else:
        own = {part: paths.find(key, settings[key]) for part, key in parts.items() if settings[key]}
        draft.put("model.weights", own or None, *parts.values())
        draft.drop("e2e_weights_path", "null: the weights of the parts are taken")
        if not own:
            draft.notes.append("no weights are given: everything would be trained from scratch; set model.weights=FILE")
    for key in parts.values():
        draft.drop(key, "e2e_weights_path goes before it there" if settings[key] else "null")


def _preprocessing(draft: Draft) -> None:
    settings = draft.settings
    to, frames, rate = "model.preprocessing", settings["num_frm"], float(settings["fps"])
    if _of_pictures(draft):
        frames, rate = 1, 1.0
        for key in ("num_frm", "fps"):
            draft.drop(key, "of videos; a picture is one frame")
    draft.put(f"{to}.num_frames", frames, *(["num_frm"] if not _of_pictures(draft) else []))
    draft.put(f"{to}.frame_rate", rate, *(["fps"] if not _of_pictures(draft) else []))
    draft.put(f"{to}.crop_size", settings["max_img_size"], "max_img_size", because="the longer side")
    draft.put(f"{to}.fit", "pad", "max_img_size", because="the shorter side is filled up with black, as there")
    if settings["img_input_format"] == "RGB":
        text = "img_input_format=RGB: ClipBERT's own code refuses it; the weights want BGR"
        draft.refuse("img_input_format", text)
    draft.put(f"{to}.channel_order", "bgr", "img_input_format")
    mean, std = settings["img_pixel_mean"], settings["img_pixel_std"]
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            draft.drop(f"img_pixel_{name}", "null: the model's own")
        else:
            kept = [float(value) for value in reversed(values)]
            draft.put(f"{to}.{name}", kept, f"img_pixel_{name}", because="in the order of the channels, blue first")
    if mean is not None:  # the founding rule: pixels are divided by 255 where the mean is of such
        draft.put(f"{to}.value_range", [0.0, 1.0 if max(mean) <= 1 else 255.0])
    if rate > 0:
        draft.notes.append(f"a clip is {frames} frame{'s' * (frames > 1)}, {rate:g} a second: {frames / rate:.3g} s")


def _task(draft: Draft, paths: PathMap) -> str:
    """Set the task; returns its goal."""
    settings = draft.settings
    name, loss, pooling = settings["task"], settings["loss_type"], settings["score_agg_func"]
    draft.put("task.name", "video_text_matching")
    if name in _CHOICES:
        goal, chosen = "multiple_choice", "choice_cross_entropy"
    elif name is not None:
        goal, chosen = "question_answering", "answer_cross_entropy"
    elif _of_pictures(draft):
        goal, chosen = "question_answering", "answer_binary_cross_entropy"
    else:
        goal, chosen = "retrieval", "match_hinge" if loss == "rank" else "match_cross_entropy"
    draft.put("task.goal", goal, *(["task"] if name is not None else []))
    draft.drop("task", "null: retrieval, or questions about pictures where there is ans2label_path")
    draft.put("task.loss", chosen, "loss_type", because="the loss of this task, whatever loss_type says" * bool(name))
    if chosen == "match_hinge" and pooling == "lse":
        text = "score_agg_func=lse with loss_type=rank: a sum over clips is no probability; ClipBERT refuses it too"
        draft.refuse(("score_agg_func", "loss_type"), text)
    draft.put("task.pooling", pooling, "score_agg_func")
    if goal == "retrieval":
        _negatives(draft, chosen)
    else:
        for key in ("itm_neg_size", "margin"):
            draft.drop(key, "of retrieval")
    _answers(draft, paths, goal)
    for key in _PRETRAINING:
        draft.drop(key, "of pretraining")
    return goal


def _negatives(draft: Draft, chosen: str) -> None:
    settings = draft.settings
    if settings["itm_neg_size"] < 1:
        draft.refuse("itm_neg_size", f"itm_neg_size={settings['itm_neg_size']}: give at least 1")
    because = "uniform over the other videos; there over groups, so videos with many captions came up more often"
    draft.put("task.num_negatives", settings["itm_neg_size"], "itm_neg_size", because=because)
    draft.put("task.negatives", "random")
    if chosen == "match_hinge":
        draft.put("task.margin", settings["margin"], "margin")
    draft.drop("margin", "of loss_type rank")


def _answers(draft: Draft, paths: PathMap, goal: str) -> None:
    """How many answers there are. Which number means which is another matter there: a file says it."""
    settings = draft.settings
    table, key = settings["ans2label_path"], "ans2label_path"
    if goal != "question_answering":
        draft.drop(key, "there it had to be given and was not used; the options of a row are its answers")
        return
    file = None if table is None else Path(paths.find(key, table))
    why = "the most frequent of the training rows; the outputs of a finetuned file are in another order"
    if file is not None and file.is_file():
        try:
            draft.put("model.num_classes", len(read_class_names(file)), key, because=why)
        except DataError as error:
            draft.refuse(key, f"ans2label_path: {error}")
    elif _of_pictures(draft) and settings["num_labels"] is not None:
        draft.put("model.num_classes", settings["num_labels"], "num_labels", because=why)
        draft.drop(key, "model.num_classes says how many answers there are")
    else:
        text = "not here: every answer of the training rows counts; model.num_classes=N keeps the most frequent"
        draft.lose(key, text)


def _data(draft: Draft, paths: PathMap, goal: str) -> None:
    settings = draft.settings
    draft.put("data.source", "manifest", because="ClipBERT's JSONL files are manifests")
    draft.put("data.manifest", paths.lists(draft, "train_datasets"), "train_datasets")
    draft.put("data.root", paths.images(draft, "train_datasets"), "train_datasets", because="LMDB or folder")
    if goal == "retrieval":
        draft.put("data.caption_rows", "caption")
    clips, strategy = settings["train_n_clips"], settings["frm_sampling_strategy"]
    if clips < 1:
        draft.refuse("train_n_clips", f"train_n_clips={clips}: give at least 1")
    if _of_pictures(draft):
        for key in ("train_n_clips", "frm_sampling_strategy", "random_sample_clips"):
            draft.drop(key, "of videos; a picture is one clip")
        draft.put("data.num_clips", 1)
    else:
        draft.put("data.num_clips", clips, "train_n_clips")
        _clip_start(draft, clips, strategy, goal)
    draft.put("data.crop", "pad", because="the whole picture")
    draft.put("data.flip", 0.0)
    if settings["data_ratio"] != 1:
        share = f"a random {settings['data_ratio']:g} of the training and validation rows there"
        draft.lose("data_ratio", f"{share}; write a shorter manifest")
    draft.drop("data_ratio", "1")
    draft.put("data.num_workers", settings["n_workers"], "n_workers")
    if _of_pictures(draft):
        draft.lose(
            "train_datasets",
            "questions about pictures: write manifests with the columns video, question, answer; of several answers "
            "with scores a row keeps one",
        )


def _clip_start(draft: Draft, clips: int, strategy: str, goal: str) -> None:
    settings = draft.settings
    key, several = "frm_sampling_strategy", clips > 1
    if several and settings["random_sample_clips"]:
        draft.put("data.clip_start", "random", "random_sample_clips", because="each clip drawn by itself")
        draft.drop(key, "of one clip a video, in training" if strategy == "rand" else "of one clip a video")
        return
    if several and goal == "retrieval":
        draft.put("data.clip_start", "center", "random_sample_clips", because="several clips are spread evenly")
        draft.drop(key, "of one clip a video")
        return
    draft.drop("random_sample_clips", "of several clips a video; of questions it was never used there")
    starts = {"rand": "random", "uniform": "uniform", "start": "start"}
    if several or strategy in starts:
        draft.put("data.clip_start", "random" if several else starts[strategy], key)
    else:
        draft.put("data.clip_start", "center")
        where = "at one third of the free range" if strategy == "middle" else "at the end of the video"
        draft.lose(key, f"{short(strategy)} started {where}; here data.clip_start: center")
