"""DATA, AUG and MIXUP as what the model wants of a video, where videos come from, and how clips are varied."""

from __future__ import annotations

import os
import re
from typing import Any

from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.values import short

__all__ = ["convert_clips", "rand_augment"]

_KINETICS = ("kinetics", "ptvkinetics")
_BGR_READERS = ("ssv2", "ptvssv2", "charades", "ptvcharades")  # frames from image files, blue first
_RAND = re.compile(r"(m|n|mstd|inc|p|w)([0-9.]+|inf)")


def convert_clips(draft: Draft) -> None:
    """Set model.preprocessing and the data section."""
    _input(draft)
    _colors(draft)
    _source(draft)
    _cropping(draft)
    _augmentation(draft)
    _mixing(draft)


def _input(draft: Draft) -> None:
    settings = draft.settings
    draft.put("model.preprocessing.num_frames", settings["DATA.NUM_FRAMES"], "DATA.NUM_FRAMES")
    rate, stride = settings["DATA.TARGET_FPS"], settings["DATA.SAMPLING_RATE"]
    for key in ("DATA.NUM_FRAMES", "DATA.SAMPLING_RATE", "DATA.TARGET_FPS", "DATA.TRAIN_CROP_SIZE"):
        if settings[key] < 1:
            draft.refuse(key, f"{key}={settings[key]}: give at least 1")
            return
    draft.put("model.preprocessing.frame_rate", rate / stride, "DATA.TARGET_FPS", "DATA.SAMPLING_RATE")
    draft.put("model.preprocessing.frame_stride", None)
    draft.notes.append(
        f"a clip is {settings['DATA.NUM_FRAMES']} frames, 1 of every {stride} at {rate} a second whatever the file's "
        f"rate, {settings['DATA.NUM_FRAMES'] * stride / rate:.3g} s, as in PySlowFast"
    )
    draft.put("model.preprocessing.crop_size", settings["DATA.TRAIN_CROP_SIZE"], "DATA.TRAIN_CROP_SIZE")
    channels = settings["DATA.INPUT_CHANNEL_NUM"]
    if all(number == 3 for number in channels) and channels:
        draft.drop("DATA.INPUT_CHANNEL_NUM", "every model takes RGB; pathways are taken inside it")
    else:
        text = "the models take 3 channels; write [3] or [3, 3]"
        draft.refuse("DATA.INPUT_CHANNEL_NUM", f"DATA.INPUT_CHANNEL_NUM={short(channels)}: {text}")


def _colors(draft: Draft) -> None:
    settings = draft.settings
    reverse = settings["DATA.REVERSE_INPUT_CHANNEL"]
    blue_first = settings["TRAIN.DATASET"] in _BGR_READERS
    bgr = blue_first != reverse
    because = "its images are read blue first" if blue_first else ""
    if bgr or "DATA.REVERSE_INPUT_CHANNEL" in settings:
        order = "bgr" if bgr else "rgb"
        draft.put("model.preprocessing.channel_order", order, "DATA.REVERSE_INPUT_CHANNEL", because=because)
    for name in ("MEAN", "STD"):
        key, values = f"DATA.{name}", settings[f"DATA.{name}"]
        if len(values) != 3 or not all(type(value) in (int, float) for value in values):
            draft.refuse(key, f"{key}={short(values)}: give 3 numbers, one for each channel")
            continue
        # Normalized there before the channels are turned around, here after.
        kept = [float(value) for value in (reversed(values) if reverse else values)]
        draft.put(f"model.preprocessing.{name.lower()}", kept, key)


def _source(draft: Draft) -> None:
    """PySlowFast's lists, `path label` a line, are manifests; other data sets' files have to become some."""
    settings = draft.settings
    folder, prefix = settings["DATA.PATH_TO_DATA_DIR"], settings["DATA.PATH_PREFIX"]
    dataset = settings["TRAIN.DATASET"]
    lists = dataset in _KINETICS
    because = "PySlowFast's lists are manifests" if lists else f"the files of {dataset} are not read"
    draft.put("data.source", "manifest", "TRAIN.DATASET", because=because)
    draft.put("data.manifest", os.path.join(folder, "train.csv"), "DATA.PATH_TO_DATA_DIR")
    draft.put("data.root", prefix or None, "DATA.PATH_PREFIX")
    draft.put("eval.manifest", os.path.join(folder, "val.csv"), "DATA.PATH_TO_DATA_DIR")
    draft.drop("DATA.PATH_LABEL_SEPARATOR", "the separator of a list is found by itself")
    if not lists:
        draft.notes.append(f"{dataset}: write its rows as manifests: data.manifest=train.csv eval.manifest=val.csv")
    elif not folder:
        draft.notes.append("give the lists: data.manifest=FOLDER/train.csv eval.manifest=FOLDER/val.csv")
    if lists and not prefix:
        text = "relative paths in the lists start from the folder of the list (there: the working directory); data.root"
        draft.notes.append(f"{text} says another")


def _cropping(draft: Draft) -> None:
    settings = draft.settings
    area, aspect = settings["DATA.TRAIN_JITTER_SCALES_RELATIVE"], settings["DATA.TRAIN_JITTER_ASPECT_RELATIVE"]
    relative = "DATA.TRAIN_JITTER_SCALES_RELATIVE", "DATA.TRAIN_JITTER_ASPECT_RELATIVE"
    scales, inverse = settings["DATA.TRAIN_JITTER_SCALES"], settings["DATA.INV_UNIFORM_SAMPLE"]
    if area or aspect:
        if not (_is_range(area) and _is_range(aspect)):
            text = f"{relative[0]}={short(area)} and {relative[1]}={short(aspect)}: give both, such as [0.08, 1.0] and "
            draft.refuse(relative, text + "[0.75, 1.3333]")
            return
        draft.put("data.crop", "resized", *relative)
        draft.put("data.crop_area", [float(value) for value in area], relative[0])
        draft.put("data.crop_aspect", [float(value) for value in aspect], relative[1])
        draft.drop("DATA.INV_UNIFORM_SAMPLE", "of DATA.TRAIN_JITTER_SCALES, which relative scales replace")
        if settings["TEST.NUM_SPATIAL_CROPS"] > 1:
            draft.drop("DATA.TRAIN_JITTER_SCALES", "relative scales replace it")
    elif not _is_range(scales) or any(type(value) is not int for value in scales):
        text = "give the least and the most of the short side, pixels, such as [256, 320]"
        draft.refuse("DATA.TRAIN_JITTER_SCALES", f"DATA.TRAIN_JITTER_SCALES={short(scales)}: {text}")
        return
    else:
        draft.put("data.crop", "random", "DATA.TRAIN_JITTER_SCALES")
        draft.put("data.short_side", list(scales), "DATA.TRAIN_JITTER_SCALES")
        if inverse or "DATA.INV_UNIFORM_SAMPLE" in settings:
            draft.put("data.short_side_draw", "inverse" if inverse else "uniform", "DATA.INV_UNIFORM_SAMPLE")
        for key in relative:
            draft.drop(key, "empty")
    draft.put("data.flip", 0.5 if settings["DATA.RANDOM_FLIP"] else 0.0, "DATA.RANDOM_FLIP")


def _is_range(values: list[Any]) -> bool:
    numbers = len(values) == 2 and all(type(value) in (int, float) for value in values)
    return numbers and 0 < values[0] <= values[1]


def _augmentation(draft: Draft) -> None:
    settings = draft.settings
    views = settings["AUG.NUM_SAMPLE"]
    if views < 1:
        draft.refuse("AUG.NUM_SAMPLE", f"AUG.NUM_SAMPLE={views}: give at least 1")
    draft.put("data.repeated_augmentation", views, "AUG.NUM_SAMPLE")
    given = [key for key in settings.written if key.startswith("AUG.") and key != "AUG.NUM_SAMPLE"]
    if not settings["AUG.ENABLE"]:
        for key in given:
            draft.drop(key, "AUG.ENABLE is false")
        return
    draft.say("AUG.ENABLE", "data.rand_augment and data.random_erasing")
    _rand(draft)
    draft.put("data.random_erasing", settings["AUG.RE_PROB"], "AUG.RE_PROB")
    for key, only in {"AUG.RE_MODE": "pixel", "AUG.RE_COUNT": 1, "AUG.RE_SPLIT": False}.items():
        if settings[key] == only:
            draft.say(key, "part of data.random_erasing")
        else:
            draft.lose(key, f"data.random_erasing has {short(only)} alone")
    for key in given:
        if key not in draft.outcomes:
            draft.drop(key, "of masked pretraining, or not used beside RandAugment")


def _rand(draft: Draft) -> None:
    kind = draft.settings["AUG.AA_TYPE"]
    draft.drop("AUG.COLOR_JITTER", "not used there beside RandAugment")
    if not kind:
        draft.put("data.rand_augment", None, "AUG.AA_TYPE")
        draft.drop("AUG.INTERPOLATION", "there is no RandAugment")
        return
    options, left = rand_augment(kind)
    if not options:
        draft.refuse("AUG.AA_TYPE", f"AUG.AA_TYPE={kind}: only RandAugment is known, such as rand-m7-n4-mstd0.5-inc1")
        return
    draft.put("data.rand_augment", options, "AUG.AA_TYPE")
    for part in left:
        draft.lose("AUG.AA_TYPE", f"{part}: data.rand_augment has no such option")
    draft.drop("AUG.INTERPOLATION", "how RandAugment's rotations are filled in is its own affair here")


def rand_augment(kind: str) -> tuple[dict[str, Any], list[str]]:
    """Options of data.rand_augment for timm's `rand-m7-n4-mstd0.5-inc1`, and the parts that have no option.

    Nothing for another kind of augmentation.
    """
    name, *parts = kind.split("-")
    if name != "rand":
        return {}, []
    numbers = {"m": 10.0, "n": 2.0, "mstd": 0.0, "inc": 0.0}
    left = []
    for part in parts:
        match = _RAND.fullmatch(part)
        if match is None or match[1] not in numbers:
            left.append(part)
        else:
            numbers[match[1]] = float(match[2])
    if not numbers["inc"]:
        left.append("without inc1")  # some operations grow weaker as the magnitude grows
    return {"num_ops": int(numbers["n"]), "magnitude": numbers["m"], "magnitude_std": numbers["mstd"]}, left


def _mixing(draft: Draft) -> None:
    settings = draft.settings
    if not settings["MIXUP.ENABLE"]:
        for key in settings.written:
            if key.startswith("MIXUP."):
                draft.drop(key, "MIXUP.ENABLE is false")
        return
    draft.say("MIXUP.ENABLE", "data.mixup and data.cutmix")
    draft.put("data.mixup", settings["MIXUP.ALPHA"], "MIXUP.ALPHA")
    draft.put("data.cutmix", settings["MIXUP.CUTMIX_ALPHA"], "MIXUP.CUTMIX_ALPHA")
    draft.put("data.mix_probability", settings["MIXUP.PROB"], "MIXUP.PROB")
    draft.put("data.mix_switch_probability", settings["MIXUP.SWITCH_PROB"], "MIXUP.SWITCH_PROB")
    draft.put("task.label_smoothing", settings["MIXUP.LABEL_SMOOTH_VALUE"], "MIXUP.LABEL_SMOOTH_VALUE")
