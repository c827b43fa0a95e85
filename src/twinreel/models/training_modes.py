"""How a model is run in training: what its batch norms do, and which activations are kept for the backward pass.

Nothing here changes a state dict's keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType, TracebackType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

from twinreel.errors import ConfigError
from twinreel.models.half_on_cpu import RoomyConvolutions, roomy_convolutions_active

__all__ = ["BatchNormMode", "apply_batch_norm", "batch_norms", "checkpoint_activations", "paused_statistics"]

BatchNormMode: TypeAlias = Literal["per_process", "frozen", "sync"]

# They keep little more than their input for the backward pass, and a checkpoint keeps the input as well.
_SINGLE_LAYERS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, _ConvNd, _NormBase)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Every batch norm of a model, `SyncBatchNorm` included, in the order of `model.modules()`."""
    return [part for part in model.modules() if isinstance(part, _BatchNorm)]


def apply_batch_norm(model: nn.Module, mode: BatchNormMode, device: torch.device, num_processes: int) -> nn.Module:
    """The model with its batch norms as the mode asks: the same object, except for a model that is itself a batch norm.

    Args:
        model: on any device; a model without batch norms is returned as it is.
        mode: `per_process`: every process normalizes by its own micro-batch. `sync`: by the micro-batches of all
            processes. `frozen`: by the running statistics, which never change, while scale and shift still train;
            nothing is converted, the caller keeps the modules of `batch_norms` in eval mode.
        device: where the model will train.
        num_processes: how many processes train it; with 1, `sync` is the same as `per_process`.

    Raises:
        ConfigError: another mode, or `sync` on a CPU.
    """
    if mode not in get_args(BatchNormMode):
        raise ConfigError(f"train.batch_norm must be per_process, frozen or sync; got {mode!r}")
    if mode != "sync":
        return model
    if device.type == "cpu":
        raise ConfigError(
            "train.batch_norm=sync needs a GPU: torch's SyncBatchNorm has no CPU kernel; use per_process or frozen"
        )
    if num_processes == 1:
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


class _PausedStatistics(AbstractContextManager[None]):
    """Entered any number of times, one after the other or nested: a second backward pass recomputes once more."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: list[list[tuple[nn.Module, str, Tensor]]] = []

    def __enter__(self) -> None:
        parts = self._model.modules()
        self._kept.append([(part, *item) for part in parts for item in part.named_buffers(recurse=False)])
        # Copies take the updates. Switching track_running_stats off would also keep the statistics, but a norm then
        # saves two tensors less for its backward pass, and a checkpoint refuses a recomputation that saves others.
        for part, name, buffer in self._kept[-1]:
            setattr(part, name, buffer.clone())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part, name, buffer in self._kept.pop():
            setattr(part, name, buffer)


def paused_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which norms give the same outputs, but their running statistics and batch counts stay as they are.

    It holds for every buffer below the model. The same context may be entered again, inside itself too.
    """
    return _PausedStatistics(model)


class _Recomputation(AbstractContextManager[None]):
    """What a second run needs to be the first once more: statistics stand still, and convolutions are made roomy where
    they were. The backward pass, in which it happens, has no function modes.
    """

    def __init__(self, block: nn.Module) -> None:
        self._statistics = paused_statistics(block)
        self._roomy = RoomyConvolutions() if roomy_convolutions_active() else nullcontext()

    def __enter__(self) -> None:
        self._statistics.__enter__()
        self._roomy.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._roomy.__exit__(kind, error, trace)
        self._statistics.__exit__(kind, error, trace)


def checkpoint_activations(model: nn.Module) -> int:
    """Let a model's blocks recompute their activations in the backward pass instead of keeping them.

    A block is a child of a tower (a tower is a child of the model) that holds parameters; a tower without children is
    one itself. A model that nests deeper has a method `activation_parts() -> list[nn.Module]`, which names the blocks
    instead. Lists of modules, and `nn.Sequential` of anything larger than single layers, count as their members.
    Single layers (linear, convolution, norm, embedding) are left alone: they keep little more than their input.
    In training a block then keeps its input only and runs twice, with the same random numbers and without updating
    running statistics again; in eval mode and without gradients it runs as before. State-dict keys stay as they are.

    Returns:
        How many blocks recompute, at least 1.

    Raises:
        ConfigError: the model has no such block.
    """
    stated = getattr(model, "activation_parts", None)
    parts = (
        stated()
        if callable(stated)
        else [part for tower in model.children() for part in (list(tower.children()) or [tower])]
    )
    blocks = dict.fromkeys(block for part in parts for block in _members(part) if _keeps_more_than_its_input(block))
    if not blocks:
        raise ConfigError(
            f"{type(model).__name__} has no block whose activations could be recomputed: below its towers there are "
            "only single layers; train without activation checkpointing"
        )
    for block in blocks:
        _recompute(block)
    return len(blocks)


def _members(part: nn.Module) -> list[nn.Module]:
    """The part itself, or what a container holds, so that not everything is recomputed (and then kept) at once."""
    children = list(part.children())
    larger = isinstance(part, nn.Sequential) and any(list(child.children()) for child in children)
    if not larger and not isinstance(part, nn.ModuleList | nn.ModuleDict):
        return [part]
    return [member for child in children for member in _members(child)]


def _keeps_more_than_its_input(block: nn.Module) -> bool:
    return not isinstance(block, _SINGLE_LAYERS) and next(block.parameters(), None) is not None


def _recompute(block: nn.Module) -> None:
    plain = block.forward
    if getattr(plain, "__func__", None) is _checkpointed_forward:
        return
    # Bound methods, because those of a deep copy belong to the copy; a closure would run the original's weights.
    block.plain_forward = plain  # type: ignore[assignment]
    block.forward = MethodType(_checkpointed_forward, block)


def _checkpointed_forward(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    plain: Any = block.plain_forward
    if not (block.training and torch.is_grad_enabled()):
        return plain(*inputs, **options)
    contexts = (nullcontext(), _Recomputation(block))  # of the first run, of the second
    return checkpoint(plain, *inputs, use_reentrant=False, context_fn=lambda: contexts, **options)
