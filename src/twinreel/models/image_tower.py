"""A user's own network for pictures: called by name, checked, measured."""

from __future__ import annotations

import inspect
from itertools import chain

import torch
from torch import Tensor, nn

from twinreel.config import import_function
from twinreel.errors import ConfigError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["feature_channels", "load_image_tower"]


def load_image_tower(name: str) -> tuple[nn.Module, Preprocessing | None]:
    """What a user's function returns, a network with its weights, and what it wants of a picture, if it says so.

    It is in training mode whenever the model is. To keep one as it is, set `model.freeze: [cnn.feature]` in the recipe:
    `requires_grad_(False)` does not stop batch norms from counting, nor dropout.

    Args:
        name: `package.module:function`; it is called without arguments.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    function = import_function(name, "image_tower")
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"image_tower {name} needs {', '.join(needed)}; it is called without arguments: give defaults"
        )
    tower = function()
    if not isinstance(tower, nn.Module):
        raise ConfigError(f"image_tower {name} returned a {type(tower).__name__}; it must return a torch.nn.Module")
    own = getattr(tower, "preprocessing", None)
    if own is not None and not isinstance(own, Preprocessing):
        raise ConfigError(
            f"image_tower {name}: its attribute preprocessing is a {type(own).__name__}; it must be a "
            "twinreel.models.preprocessing.Preprocessing"
        )
    return tower, own


def feature_channels(feature: nn.Module, size: int, name: str) -> int:
    """How many channels a network's features have: its attribute `num_channels`, else found with a black picture.

    Args:
        feature: pixels (N, 3, H, W) -> (N, C, h, w); left in the mode that it is in.
        size: height and width of the picture.
        name: the network's, for the message.

    Raises:
        ConfigError: the network fails on it, or what it gives is no such tensor.
    """
    stated = getattr(feature, "num_channels", None)
    if type(stated) is int and stated > 0:
        return stated
    tensor = next(chain(feature.parameters(), feature.buffers()), torch.zeros(()))
    training = {part: part.training for part in feature.modules()}
    try:
        with torch.no_grad():
            features = feature.eval()(torch.zeros(1, 3, size, size, device=tensor.device))
    except Exception as error:
        raise ConfigError(
            f"image_tower {name}: {type(feature).__name__} failed on pixels (1, 3, {size}, {size}): "
            f"{type(error).__name__}: {error}. With an attribute num_channels or preprocessing it is "
            "not tried at this size"
        ) from error
    finally:
        for part, mode in training.items():
            part.training = mode
    if not isinstance(features, Tensor) or features.ndim != 4 or features.shape[0] != 1 or 0 in features.shape:
        got = f"a tensor {tuple(features.shape)}" if isinstance(features, Tensor) else f"a {type(features).__name__}"
        raise ConfigError(
            f"image_tower {name}: pixels (1, 3, {size}, {size}) must become features (1, C, h, w); "
            f"{type(feature).__name__} gave {got}; return the feature map before pooling and classifier"
        )
    return int(features.shape[1])
