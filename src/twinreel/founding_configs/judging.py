"""MODEL's head, TRAIN's start and TEST as model, task and eval: what is learned from what, and how it is judged."""

from __future__ import annotations

from twinreel.founding_configs.draft import Draft

__all__ = ["convert_head", "convert_judging", "convert_start"]

_LOSSES = {
    "cross_entropy": "cross_entropy",
    "soft_cross_entropy": "cross_entropy",
    "bce_logit": "binary_cross_entropy",
    "bce": "binary_cross_entropy",
}
_PUBLISHED_CLASSES = 400


def convert_head(draft: Draft, name: str | None) -> None:
    """Set the head of the model, and the task."""
    settings = draft.settings
    classes, activation = settings["MODEL.NUM_CLASSES"], settings["MODEL.HEAD_ACT"]
    if classes < 1:
        draft.refuse("MODEL.NUM_CLASSES", f"MODEL.NUM_CLASSES={classes}: give at least 1")
    draft.put("model.num_classes", classes, "MODEL.NUM_CLASSES")
    draft.put("model.dropout", settings["MODEL.DROPOUT_RATE"], "MODEL.DROPOUT_RATE")
    if activation not in ("softmax", "sigmoid", "none"):
        text = f"MODEL.HEAD_ACT={activation}: there are softmax, sigmoid and none"
        draft.refuse("MODEL.HEAD_ACT", text)
    draft.put("model.head_activation", activation, "MODEL.HEAD_ACT")
    draft.put("task.name", "action_recognition")
    loss = settings["MODEL.LOSS_FUNC"]
    if loss not in _LOSSES:
        text = f"MODEL.LOSS_FUNC={loss}: of classifiers there are {', '.join(_LOSSES)}"
        draft.refuse("MODEL.LOSS_FUNC", text)
    else:
        draft.put("task.loss", _LOSSES[loss], "MODEL.LOSS_FUNC")
    draft.put("task.multi_label", settings["DATA.MULTI_LABEL"], "DATA.MULTI_LABEL")
    train, test = settings["DATA.TRAIN_CROP_SIZE"], settings["DATA.TEST_CROP_SIZE"]
    if name is not None and train != test and settings["MODEL.ARCH"] == "mvit":
        keys = ("DATA.TEST_CROP_SIZE", "DATA.TRAIN_CROP_SIZE")
        text = f"DATA.TEST_CROP_SIZE={test} and DATA.TRAIN_CROP_SIZE={train}: {name} takes one size; make them equal"
        draft.refuse(keys, text)


def convert_start(draft: Draft) -> None:
    """Set the weights that training begins with."""
    settings = draft.settings
    train, test = settings["TRAIN.CHECKPOINT_FILE_PATH"], settings["TEST.CHECKPOINT_FILE_PATH"]
    only_test = not settings["TRAIN.ENABLE"] and bool(test)
    path, key = (test, "TEST.CHECKPOINT_FILE_PATH") if only_test else (train, "TRAIN.CHECKPOINT_FILE_PATH")
    inflates, reset = settings["TRAIN.CHECKPOINT_INFLATE"], settings["TRAIN.CHECKPOINT_EPOCH_RESET"]
    other_classes = settings["MODEL.NUM_CLASSES"] != _PUBLISHED_CLASSES
    foreign = settings["TRAIN.CHECKPOINT_TYPE"] == "caffe2" and other_classes and not only_test
    draft.put("model.weights", path or None, key)
    if path:
        scope = "backbone" if not only_test and (inflates or reset or foreign) else "all"
        why = "a new head" if scope == "backbone" else "the head too; weights_scope=backbone starts a new one"
        draft.put("model.weights_scope", scope, key, because=why)
        if scope == "all" and not only_test:
            draft.notes.append(
                f"{key}: weights are taken, epoch and optimizer are not: twinreel train starts at step 0"
            )
    if inflates and path:
        draft.say("TRAIN.CHECKPOINT_INFLATE", "model.weights: weights of pictures are recognized and inflated")
    elif inflates:
        text = "there is no TRAIN.CHECKPOINT_FILE_PATH: give model.weights=FILE model.weights_scope=backbone"
        draft.lose("TRAIN.CHECKPOINT_INFLATE", text)
    draft.drop("TRAIN.CHECKPOINT_INFLATE", "off; weights of pictures are recognized and inflated anyway")
    if reset and path:
        draft.say("TRAIN.CHECKPOINT_EPOCH_RESET", "training always starts at step 0; model.weights_scope: backbone")
    draft.drop("TRAIN.CHECKPOINT_EPOCH_RESET", "training from weights always starts at step 0")
    draft.drop("TRAIN.CHECKPOINT_TYPE", "the kind of a file of weights is recognized")
    if settings["TRAIN.CHECKPOINT_CLEAR_NAME_PATTERN"]:
        draft.lose(
            "TRAIN.CHECKPOINT_CLEAR_NAME_PATTERN", "names are not cut; `twinreel import` knows the usual prefixes"
        )
    draft.drop("TRAIN.CHECKPOINT_CLEAR_NAME_PATTERN", "empty")
    draft.drop("TRAIN.CHECKPOINT_IN_INIT", "weights of pictures are recognized and inflated")
    if test and not only_test:
        draft.drop("TEST.CHECKPOINT_FILE_PATH", "`twinreel eval RUN` judges what was trained")
    draft.drop("TEST.CHECKPOINT_FILE_PATH", "empty")
    draft.drop("TRAIN.CHECKPOINT_FILE_PATH", "a test of TEST.CHECKPOINT_FILE_PATH alone")


def convert_judging(draft: Draft) -> None:
    """Set the section eval."""
    settings = draft.settings
    clips, crops = settings["TEST.NUM_ENSEMBLE_VIEWS"], settings["TEST.NUM_SPATIAL_CROPS"]
    if clips < 1:
        draft.refuse("TEST.NUM_ENSEMBLE_VIEWS", f"TEST.NUM_ENSEMBLE_VIEWS={clips}: give at least 1")
    if crops not in (1, 3):
        text = f"TEST.NUM_SPATIAL_CROPS={crops}: there are 1, the center, and 3, along the longer side"
        draft.refuse("TEST.NUM_SPATIAL_CROPS", text)
        return
    draft.put("eval.every", f"{settings['TRAIN.EVAL_PERIOD']} epochs", "TRAIN.EVAL_PERIOD")
    draft.put("eval.num_clips", clips, "TEST.NUM_ENSEMBLE_VIEWS")
    draft.put("eval.num_crops", crops, "TEST.NUM_SPATIAL_CROPS")
    offset = settings["DATA.USE_OFFSET_SAMPLING"]
    draft.put("eval.windows", "slowfast_offset" if offset else "slowfast", "DATA.USE_OFFSET_SAMPLING")
    _framing(draft, crops)
    method = settings["DATA.ENSEMBLE_METHOD"]
    if method not in ("sum", "max"):
        draft.refuse("DATA.ENSEMBLE_METHOD", f"DATA.ENSEMBLE_METHOD={method}: there are sum and max")
    because = "the sum over the number of views" if method == "sum" else ""
    combined = "max" if method == "max" else "mean"
    draft.put("eval.combine_views", combined, "DATA.ENSEMBLE_METHOD", because=because)
    own = max(1, settings["TEST.BATCH_SIZE"] // max(1, settings["NUM_GPUS"]))
    text = f"{settings['TEST.BATCH_SIZE']} over {settings['NUM_GPUS']} GPUs; of a process here"
    draft.put("eval.batch_size", own, "TEST.BATCH_SIZE", because=text)
    many = settings["DATA.MULTI_LABEL"]
    draft.put("eval.best_metric", "mean_average_precision" if many else "top_1_accuracy", "DATA.MULTI_LABEL")
    if settings["TEST.NUM_TEMPORAL_CLIPS"]:
        draft.lose("TEST.NUM_TEMPORAL_CLIPS", "one number of clips at a time: twinreel eval RUN eval.num_clips=N")
    draft.drop("TEST.NUM_TEMPORAL_CLIPS", "empty")
    draft.notes.append(
        f"a judgment during training looks at {clips} x {crops} views as the final test does (PySlowFast: one random "
        "view): eval.num_clips=1 eval.num_crops=1 makes it cheap; `twinreel eval RUN` takes other numbers"
    )


def _framing(draft: Draft, crops: int) -> None:
    settings = draft.settings
    train, test = settings["DATA.TRAIN_CROP_SIZE"], settings["DATA.TEST_CROP_SIZE"]
    scales = settings["DATA.TRAIN_JITTER_SCALES"]
    short, key = (
        (test, "DATA.TEST_CROP_SIZE") if crops > 1 else (scales[0] if scales else test, "DATA.TRAIN_JITTER_SCALES")
    )
    draft.put("eval.crop_size", None if test == train else test, "DATA.TEST_CROP_SIZE")
    because = "PySlowFast's short side of a test with one crop" if crops == 1 else ""
    if type(short) is int and short >= max(train, test):
        draft.put("model.preprocessing.short_side", short, key, because=because)
    else:
        rule = "DATA.TEST_CROP_SIZE where TEST.NUM_SPATIAL_CROPS is above 1, else the first of DATA.TRAIN_JITTER_SCALES"
        draft.refuse(
            key,
            f"{key}: the test scales the short side to {short} ({rule}), which is less than the crop of "
            f"{max(train, test)}; raise it",
        )
