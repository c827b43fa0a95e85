"""All models by name, and the one function that makes them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from twinreel.config import import_function, nearest
from twinreel.errors import ConfigError
from twinreel.models import conv3d, s3dg
from twinreel.models.preprocessing import Preprocessing
from twinreel.models.two_towers import TwoTowers, VideoTextModel, check_towers
from twinreel.models.weights import Scope, Weights, load_partial, load_weights, read_weights, sizes_of
from twinreel.text import Vocabulary

__all__ = [
    "MODELS",
    "Preprocessing",
    "TwoTowers",
    "VideoTextModel",
    "check_towers",
    "create_model",
    "find_builder",
    "load_partial",
    "load_weights",
]

# The keyword-only parameters of a builder are the options of the recipe's model section.
MODELS: dict[str, Callable[..., TwoTowers]] = {
    "conv3d_small": conv3d.conv3d_small,
    "s3dg": s3dg.s3dg,
    "s3dg_small": s3dg.s3dg_small,
}

_log = logging.getLogger(__name__)


def create_model(
    name: str,
    *,
    weights: str | Path | Mapping[str, Any] | Weights | None = None,
    weights_scope: Scope = "all",
    vocabulary: str | Path | Vocabulary | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A model by name, in eval mode, on the CPU.

    Sizes (embedding_size, the word table, space_to_depth, ...) are read from the weights where they are given.

    Args:
        name: a name of `MODELS`, or `package.module:function` for a user's own builder. That one is called with the
            options, and with `vocabulary` and `preprocessing` if it takes them; what it returns must have
            `encode_video`, `encode_text` and `preprocessing`.
        weights: a file or a state dict, see `weights.load_weights`; None means random weights.
        weights_scope: `all`, or `backbone` to start new heads.
        vocabulary: the words of the text tower, or their file.
        preprocessing: in whole, or the values that differ from the builder's own.
        options: the builder's keyword-only parameters.

    Raises:
        ConfigError: an unknown name or option, or an option that contradicts the weights or another one.
        CheckpointError: weights that cannot be read or do not fit.
        DataError: the vocabulary's file cannot be read.
    """
    builder = find_builder(name)
    arguments = _checked_options(name, builder, options)
    taken = None
    if weights is not None:
        taken = weights if isinstance(weights, Weights) else read_weights(weights)
        _take_sizes(name, builder, arguments, taken, weights_scope)
    takes = inspect.signature(builder).parameters
    if vocabulary is not None and "vocabulary" in takes:
        arguments["vocabulary"] = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary.load(vocabulary)
    elif vocabulary is not None and not isinstance(vocabulary, Vocabulary):
        _log.warning("model %s takes no vocabulary: %s is not used", name, vocabulary)
    if isinstance(preprocessing, Preprocessing) and "preprocessing" in takes:
        arguments["preprocessing"] = preprocessing
    model = builder(**arguments)
    towers = check_towers(model, name)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}: {type(model).__name__} is no torch.nn.Module; derive it from torch.nn.Module")
    if preprocessing:
        _set_preprocessing(towers, name, preprocessing)
    if taken is not None:
        report = load_weights(model, taken, scope=weights_scope)
        _log.log(logging.WARNING if report.dropped or report.kept else logging.INFO, "%s", report)
    return model.cpu().eval()


def find_builder(name: str) -> Callable[..., Any]:
    """The function behind a model's name, or a user's own behind `package.module:function`.

    Raises:
        ConfigError: there is no such model or function.
    """
    if ":" in name:
        return import_function(name, "model")
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}{nearest(name, MODELS)}")
    return MODELS[name]


def _set_preprocessing(towers: VideoTextModel, name: str, preprocessing: Preprocessing | Mapping[str, Any]) -> None:
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
    known = [key for key in parameters if key not in ("vocabulary", "preprocessing")]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_all else [key for key in options if key not in known]
    problems = [f"unknown option {key}{nearest(key, known)}" for key in unknown]
    problems += [
        f"{key} is missing and has no default"
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and key not in options
        and key not in ("vocabulary", "preprocessing")
    ]
    if problems:
        raise ConfigError(f"model {name}: " + "; ".join(problems))
    return dict(options)


def _take_sizes(
    name: str, builder: Callable[..., Any], arguments: dict[str, Any], weights: Weights, scope: Scope
) -> None:
    """Fill in what the weights state, and refuse what contradicts them."""
    takes = inspect.signature(builder).parameters
    problems = []
    for key, size in sizes_of(weights.tensors, scope=scope).items():
        if key not in takes:
            continue
        if arguments.get(key) is not None and arguments[key] != size:
            problems.append(f"{key} is {size} in the weights, but {arguments[key]} was asked for")
        arguments[key] = size
    if problems:
        raise ConfigError(
            f"model {name}, weights {weights.source}: {'; '.join(problems)}; set these options to what the "
            'weights have or leave them out, or use weights_scope="backbone" for new heads'
        )
    # The table is in the weights: its file of word vectors is not read again, but still means a frozen table.
    if scope == "all" and "text_tower.word_embd.weight" in weights.tensors and "word_vectors" in takes:
        given = arguments.pop("word_vectors", None) is not None
        if (given or weights.layout == "howto100m") and arguments.get("train_word_vectors") is None:
            arguments["train_word_vectors"] = False
