"""Convolutions in half precision on a CPU that give the same gradient every time.

In torch 2.13 oneDNN's gradient of a 3-D convolution's weights in bf16 or fp16 is wrong where the input has fewer
frames, rows or columns than the kernel: parts of it are what lay in memory before (so it differs from call to call, or
is NaN), and memory beside it is written, which can end the process. Where no size is below the kernel's it is right:
some five thousand shapes (kernels to 8 x 3 x 3 and 3 x 7 x 7, strides, paddings, both layouts) against PyTorch's own
kernels, with memory filled with large numbers before every call. So a convolution that is too small for its kernel gets
its padding laid around it first, which means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["RoomyConvolutions", "roomy_convolutions_active"]

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_SIZES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class RoomyConvolutions(TorchFunctionMode):
    """A context in which every convolution has an input at least as large as its kernel; the numbers are the same.

    It must hold for the forward pass alone: the backward pass follows what was computed there. A recomputation of
    activations is a forward pass, but one without modes: it must enter this one again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch, a small convolution with its padding laid around the input."""
        kwargs = dict(kwargs or {})
        dimensions = _SIZES.get(func)
        if dimensions is None:
            return func(*args, **kwargs)
        given = _DEFAULTS | dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        given["input"], given["padding"] = _roomy(given, dimensions)
        return func(**given)


def roomy_convolutions_active() -> bool:
    """Whether the code that asks runs in a `RoomyConvolutions`."""
    stack: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, RoomyConvolutions) for mode in stack)


def _roomy(given: Mapping[str, Any], dimensions: int) -> tuple[Tensor, Any]:
    """The input and what padding is left to do."""
    video, padding = given["input"], given["padding"]
    kernel, dilation = given["weight"].shape[2:], _each(given["dilation"], dimensions)
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    if video.device.type != "cpu" or all(a >= b for a, b in zip(video.shape[-dimensions:], spans, strict=True)):
        return video, padding
    if padding == "valid":
        return video, padding  # torch says that the kernel is too large
    if padding == "same":
        around = [(span // 2 if span % 2 else (span - 1) // 2, span // 2) for span in spans]
    else:
        around = [(size, size) for size in _each(padding, dimensions)]
    flat = [side for pair in reversed(around) for side in pair]  # pad begins at the last dimension
    return functional.pad(video, flat), 0


def _each(value: Any, dimensions: int) -> Sequence[int]:
    """One number for every dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dimensions if len(values) == 1 else values
