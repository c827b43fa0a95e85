"""All models by name, and the one function that makes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinreel.config import import_function, nearest
from twinreel.errors import ConfigError
from twinreel.models import clipbert, conv3d, mvit, resnet3d, s3dg, s3dg_classifier, slowfast, x3d
from twinreel.models.classifier import VideoClassifier, check_classifier
from twinreel.models.founding_config import read_config
from twinreel.models.matcher import Matcher, check_matcher
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.two_towers import TwoTowers, VideoTextModel, check_towers
from twinreel.models.weights import (
    Scope,
    Weights,
    assumed_heads,
    load_partial,
    load_weights,
    read_weights,
    sizes_of,
)
from twinreel.text import Vocabulary
from twinreel.wordpiece import WordPiece, load_vocabulary

__all__ = [
    "CLASSIFIERS",
    "MATCHERS",
    "MODELS",
    "TOWERS",
    "Matcher",
    "Preprocessing",
    "TwoTowers",
    "VideoClassifier",
    "VideoTextModel",
    "check_classifier",
    "check_matcher",
    "check_towers",
    "create_model",
    "find_builder",
    "load_partial",
    "load_weights",
    "whole_preprocessing",
]

# The keyword-only parameters of a builder are the options of the recipe's model section.
TOWERS: dict[str, Callable[..., TwoTowers]] = {
    "conv3d_small": conv3d.conv3d_small,
    "s3dg": s3dg.s3dg,
    "s3dg_small": s3dg.s3dg_small,
}
CLASSIFIERS: dict[str, Callable[..., nn.Module]] = {
    "c2d_8x8_r50": resnet3d.c2d_8x8_r50,
    "c2d_nopool_8x8_r50": resnet3d.c2d_nopool_8x8_r50,
    "i3d_8x8_r50": resnet3d.i3d_8x8_r50,
    "i3d_nln_8x8_r50": resnet3d.i3d_nln_8x8_r50,
    "mvitv2_s_16x4": mvit.mvitv2_s_16x4,
    "s3dg": s3dg_classifier.s3dg_classifier,
    "s3dg_small": s3dg_classifier.s3dg_small_classifier,
    "slow_4x16_r50": resnet3d.slow_4x16_r50,
    "slow_8x8_r50": resnet3d.slow_8x8_r50,
    "slowfast_16x8_r101": slowfast.slowfast_16x8_r101,
    "slowfast_4x16_r50": slowfast.slowfast_4x16_r50,
    "slowfast_8x8_r101": slowfast.slowfast_8x8_r101,
    "slowfast_8x8_r50": slowfast.slowfast_8x8_r50,
    "slowfast_small": slowfast.slowfast_small,
    "x3d_l": x3d.x3d_l,
    "x3d_m": x3d.x3d_m,
    "x3d_s": x3d.x3d_s,
    "x3d_small": x3d.x3d_small,
    "x3d_xs": x3d.x3d_xs,
}
MATCHERS: dict[str, Callable[..., nn.Module]] = {
    "clipbert_base": clipbert.clipbert_base,
    "clipbert_small": clipbert.clipbert_small,
    "clipbert_tiny": clipbert.clipbert_tiny,
}
MODELS: dict[str, Callable[..., nn.Module]] = {**CLASSIFIERS, **MATCHERS, **TOWERS}

# Options that a file states of its model: those that change what its backbone computes, and those that only a user
# gives, who then runs that code, or has those heads.
BACKBONE_OPTIONS = ("non_local", "grid_pool", "cnn_blocks", "cnn_width", "cnn_norm")
NOT_TAKEN = ("image_tower", "pretraining_heads")
GIVEN = ("vocabulary", "preprocessing", "num_classes", "num_outputs")  # not options: create_model passes them itself

_log = logging.getLogger(__name__)


def create_model(
    name: str,
    *,
    weights: str | Path | Mapping[str, Any] | Weights | None = None,
    weights_scope: Scope = "all",
    vocabulary: str | Path | Vocabulary | WordPiece | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    num_outputs: int | None = None,
    **options: Any,
) -> nn.Module:
    """A model by name, in eval mode, on the CPU: two towers, a classifier, or a cross-modal model.

    Sizes (embedding_size, the word table, space_to_depth, ...) are read from the weights where they are given. Of a
    file that `twinreel import` wrote for this model, and of a cross-modal model's checkpoint with its `model.json`, so
    are options and preprocessing that are not given; the options are in its attribute `imported_options`.

    Args:
        name: a name of `MODELS`, or `package.module:function` for a user's own builder. That one is called with the
            options, and with `vocabulary`, `preprocessing`, `num_classes` and `num_outputs` if it takes them; what it
            returns must have `preprocessing`, and `encode_video` and `encode_text`, or `encode_grid` and `match`, or
            `forward(video)`.
        weights: a file or a state dict, see `weights.load_weights`; None means random weights.
        weights_scope: `all`, or `backbone` to start new heads.
        vocabulary: the words of the text tower, or their file; of a cross-modal model BERT's vocab.txt.
        preprocessing: in whole, or the values that differ from the builder's own.
        num_classes: of a classifier; with a name that two towers have too, this asks for the classifier.
        num_outputs: of the head of a cross-modal model; None = the builder's own, or that of the weights.
        options: the builder's keyword-only parameters.

    Raises:
        ConfigError: an unknown name or option, or an option that contradicts the weights or another one.
        CheckpointError: weights that cannot be read or do not fit.
        DataError: the vocabulary's file cannot be read.
    """
    builder = find_builder(name, classifier=num_classes is not None)
    arguments = _checked_options(name, builder, options)
    if num_classes is not None and "num_classes" in inspect.signature(builder).parameters:
        arguments["num_classes"] = num_classes
    if num_outputs is not None and "num_outputs" in inspect.signature(builder).parameters:
        arguments["num_outputs"] = num_outputs
    taken = None
    if weights is not None:
        taken = weights if isinstance(weights, Weights) else read_weights(weights)
        # Whoever passes what was read states all that it takes: a run's own checkpoint is loaded so.
        _take_sizes(name, builder, arguments, taken, weights_scope, warn=not isinstance(weights, Weights))
        preprocessing = _take_description(name, builder, arguments, taken, weights_scope, preprocessing)
    takes = inspect.signature(builder).parameters
    if vocabulary is not None and "vocabulary" in takes:
        arguments["vocabulary"] = _vocabulary(name, builder, vocabulary)
    elif isinstance(vocabulary, str | Path):
        _log.warning("model %s takes no vocabulary: %s is not used", name, vocabulary)
    if builder in CLASSIFIERS.values() and preprocessing is not None:
        preprocessing = whole_preprocessing(builder, arguments, preprocessing)  # their heads are built for its size
    if isinstance(preprocessing, Preprocessing) and "preprocessing" in takes:
        arguments["preprocessing"] = preprocessing
    model = builder(**arguments)
    checked: Any = _check(model, name, num_classes=num_classes, num_outputs=num_outputs)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}: {type(model).__name__} is no torch.nn.Module; derive it from torch.nn.Module")
    if preprocessing:
        _set_preprocessing(checked, name, preprocessing)
    if taken is not None:
        # Heads of attention show in no shape: a saved model must say how many the weights were found to have.
        kept = [*(taken.options if taken.model == name else ()), *({"num_heads"} - options.keys())]
        found = {key: arguments[key] for key in kept if key in arguments and key not in GIVEN}
        if found:
            checked.imported_options = found
        report = load_weights(model, taken, scope=weights_scope)
        _log.log(logging.WARNING if report.dropped or report.kept else logging.INFO, "%s", report)
    return model.cpu().eval()


def find_builder(name: str, *, classifier: bool = False) -> Callable[..., Any]:
    """The function behind a model's name, or a user's own behind `package.module:function`.

    Args:
        name: of `MODELS`, or a user's.
        classifier: take the classifier where two towers have the name too.

    Raises:
        ConfigError: there is no such model or function.
    """
    if ":" in name:
        return import_function(name, "model")
    table: Mapping[str, Callable[..., Any]] = CLASSIFIERS if classifier else MODELS
    if name in table:
        return table[name]
    if name in MODELS:
        raise ConfigError(
            f"model {name} is a pair of towers, no classifier; classifiers: {', '.join(sorted(CLASSIFIERS))}"
        )
    raise ConfigError(f"unknown model {name!r}{nearest(name, table)}")


def whole_preprocessing(
    builder: Callable[..., Any], arguments: Mapping[str, Any], preprocessing: Preprocessing | Mapping[str, Any]
) -> Preprocessing:
    """A builder's own preprocessing with the values that differ, found without making the model.

    Args:
        builder: of `MODELS`.
        arguments: its options.
        preprocessing: in whole, or the values that differ.
    """
    if isinstance(preprocessing, Preprocessing):
        return preprocessing
    with torch.device("meta"):  # shapes only: nothing is drawn or held
        own: Preprocessing = builder(**arguments).preprocessing
    return own.replace(**preprocessing)


def _vocabulary(
    name: str, builder: Callable[..., Any], vocabulary: str | Path | Vocabulary | WordPiece
) -> Vocabulary | WordPiece:
    """The words, of the kind that the model reads.

    Raises:
        ConfigError: they are of the other kind.
    """
    if not isinstance(vocabulary, str | Path):
        words = vocabulary
    elif builder in MATCHERS.values():
        words = WordPiece.load(vocabulary)
    else:
        words = load_vocabulary(vocabulary) if builder not in TOWERS.values() else Vocabulary.load(vocabulary)
    if builder in MATCHERS.values() and not isinstance(words, WordPiece):
        raise ConfigError(f"model {name} reads word pieces, and this is a list of words; give BERT's vocab.txt")
    if builder in TOWERS.values() and isinstance(words, WordPiece):
        raise ConfigError(f"model {name} reads whole words, and these are word pieces; give a word list")
    return words


def _check(model: object, name: str, *, num_classes: int | None, num_outputs: int | None) -> object:
    """The model, if it is what was asked for; without a wish, what it looks like."""
    if num_outputs is not None or (num_classes is None and hasattr(model, "encode_grid")):
        return check_matcher(model, name)
    return (check_classifier if num_classes is not None or _classifies(model) else check_towers)(model, name)


def _classifies(model: object) -> bool:
    """Whether a model is a classifier: it has no way into a joint space, but a forward, and says what it wants."""
    towers = hasattr(model, "encode_video") or hasattr(model, "encode_text")
    return isinstance(model, nn.Module) and not towers and hasattr(model, "preprocessing")


def _set_preprocessing(
    towers: VideoTextModel | VideoClassifier | Matcher, name: str, preprocessing: Preprocessing | Mapping[str, Any]
) -> None:
    if not isinstance(preprocessing, Preprocessing):
        preprocessing = towers.preprocessing.replace(**preprocessing)
    try:
        towers.preprocessing = preprocessing
    except AttributeError as error:
        raise ConfigError(
            f"{name}: preprocessing cannot be set on {type(towers).__name__} ({error}); make it a plain attribute"
        ) from error


def _checked_options(name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(builder).parameters
    known = [key for key in parameters if key not in GIVEN]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_all else [key for key in options if key not in known]
    problems = [f"unknown option {key}{nearest(key, known)}" for key in unknown]
    problems += [
        f"{key} is missing and has no default"
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and key not in options
        and key not in GIVEN
    ]
    if problems:
        raise ConfigError(f"model {name}: " + "; ".join(problems))
    return dict(options)


def _take_description(
    name: str,
    builder: Callable[..., Any],
    arguments: dict[str, Any],
    weights: Weights,
    scope: Scope,
    preprocessing: Preprocessing | Mapping[str, Any] | None,
) -> Preprocessing | Mapping[str, Any] | None:
    """Fill in options that an imported file states and that are not given; its preprocessing, with what is given.

    A founding file that holds its configuration states how it reads videos, no options.

    Raises:
        ConfigError: the checkpoint is of a model with a user's image tower, which is not given.
    """
    if weights.model is None:
        if weights.config is None or isinstance(preprocessing, Preprocessing):
            return preprocessing
        if builder not in CLASSIFIERS.values():
            return preprocessing  # its configuration is another system's
        given = dict(preprocessing or {})
        stated = read_config(weights.config, weights.source).preprocessing
        if given.get("frame_rate") is not None or given.get("frame_stride") is not None:
            stated = {key: value for key, value in stated.items() if not key.startswith("frame_")}
        return stated | given
    if weights.model != name:
        _log.warning("%s is of a %s; here it starts a %s", weights.source, weights.model, name)
        return preprocessing
    tower = weights.options.get("image_tower")
    if tower is not None and arguments.get("image_tower") is None:
        raise ConfigError(
            f"model {name}, weights {weights.source}: their CNN is a user's image tower; set model.image_tower={tower}"
        )
    takes = inspect.signature(builder).parameters
    for key, value in weights.options.items():
        if key in takes and key not in NOT_TAKEN and (scope == "all" or key in BACKBONE_OPTIONS):
            arguments.setdefault(key, value)
    if isinstance(preprocessing, Preprocessing):
        return preprocessing
    return Preprocessing.from_dict(weights.preprocessing).replace(**(preprocessing or {}))


def _take_sizes(
    name: str, builder: Callable[..., Any], arguments: dict[str, Any], weights: Weights, scope: Scope, *, warn: bool
) -> None:
    """Fill in what the weights state, and refuse what contradicts them; say what nothing states, if that is wanted."""
    takes = inspect.signature(builder).parameters
    problems = []
    for key, size in {**sizes_of(weights.tensors, scope=scope), **weights.architecture}.items():
        if key not in takes:
            continue
        if arguments.get(key) is not None and arguments[key] != size:
            problems.append(f"{key} is {size} in the weights, but {arguments[key]} was asked for")
        arguments[key] = size
    if "num_heads" in takes and arguments.get("hidden_size") is not None and weights.model != name:
        _take_heads(builder, arguments, weights, warn)
    if problems:
        of_backbone = {*sizes_of(weights.tensors, scope="backbone"), *weights.architecture}
        new_head = any(problem.partition(" ")[0] not in of_backbone for problem in problems)
        raise ConfigError(
            f"model {name}, weights {weights.source}: {'; '.join(problems)}; set these options to what the "
            "weights have or leave them out" + (", or use weights_scope=backbone for a new head" if new_head else "")
        )
    # The table is in the weights: its file of word vectors is not read again, but still means a frozen table.
    if scope == "all" and "text_tower.word_embd.weight" in weights.tensors and "word_vectors" in takes:
        given = arguments.pop("word_vectors", None) is not None
        if (given or weights.layout == "howto100m") and arguments.get("train_word_vectors") is None:
            arguments["train_word_vectors"] = False


def _take_heads(builder: Callable[..., Any], arguments: dict[str, Any], weights: Weights, warn: bool) -> None:
    """Fill in how many heads of attention BERT has where nothing says it: the model's own number, or 64 numbers each.

    Of a founding file with the size and the heads of the model, 64 numbers each, nothing is to be said.
    """
    if arguments.get("num_heads") is not None:
        return
    assumed = assumed_heads(builder, arguments) if weights.layout == "clipbert" else {}
    usual = inspect.signature(builder).parameters["num_heads"].default
    heads = arguments["num_heads"] = assumed.get("num_heads", usual)
    published = not assumed and weights.layout == "clipbert" and heads * 64 == arguments["hidden_size"]
    if warn and not published:
        _log.warning(
            "%s does not say how many attention heads it has; taken: %s (num_heads; another number gives other scores)",
            weights.source,
            heads,
        )
