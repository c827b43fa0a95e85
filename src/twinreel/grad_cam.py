"""Where a classifier looks: Grad-CAM (arXiv:1610.02391) of a named layer, as heat, pictures and an mp4.

Needs nothing of the model but its name for a layer; the model is as it was afterwards.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError, DataError

__all__ = ["find_layer", "grad_cam", "overlay", "write_images", "write_video"]

COLORS = ((0, 0, 130), (0, 90, 255), (0, 220, 220), (255, 230, 0), (220, 0, 0))  # of heat 0, 1/4, ..., 1
MOST_OPAQUE = 0.65  # of the hottest pixel; where nothing is hot the frame stays as it is
NAMES_SHOWN = 8


def grad_cam(
    model: nn.Module, video: Tensor, layer: str, classes: Sequence[int] | Tensor | None = None
) -> list[Tensor]:
    """How much each place speaks for a class: heat (B, T, H, W) from 0 to 1, one tensor a pathway of the layer.

    The layer's features weighted by the mean of the class score's gradient over time and space, added over channels,
    negative sums cut off; scaled to the video's size, and by the largest value of each clip. A clip in which nothing
    speaks for the class stays 0. The score is the logit, averaged over the head's positions.

    Args:
        model: a classifier; it computes in eval mode here, whatever its mode.
        video: float (B, 3, T, H, W), as the model wants it, on its device.
        layer: a name of `model.named_modules()`. Its output is features (B, C, T', H', W'), a list of them (pathways),
            or tokens (B, N, C) of a module that says its grid (`q_grid`), as those of `mvit.py` do.
        classes: the class of each clip (B,); None = the one with the largest score.

    Raises:
        ConfigError: no such layer (with the nearest names), a class that does not exist, or a layer whose output is no
            features, or on which the scores do not depend.
    """
    module = find_layer(model, layer)
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> Any:
        found.clear()  # a layer that is used twice: its last use
        return _with_leaves(output, found)

    handle = module.register_forward_hook(keep)
    try:
        with _as_logits(model), torch.inference_mode(False), torch.enable_grad():
            logits = model(video)
            gradients = _gradients(_scores(logits, classes).sum(), found, layer)
    finally:
        handle.remove()
    return [_heat(*pair, _grid_of(module), layer, video) for pair in zip(found, gradients, strict=True)]


def find_layer(model: nn.Module, name: str) -> nn.Module:
    """The module of this name.

    Raises:
        ConfigError: there is none; with the nearest names.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name and name in modules:
        return modules[name]
    near = difflib.get_close_matches(name, modules, n=NAMES_SHOWN, cutoff=0.5)
    tops = [known for known in modules if known and "." not in known][: 2 * NAMES_SHOWN]
    said = f"did you mean {', '.join(near)}?" if near else f"the outermost are {', '.join(tops)}"
    raise ConfigError(f"{type(model).__name__} has no layer {name!r}; {said} (names of model.named_modules())")


def _with_leaves(output: Any, found: list[Tensor]) -> Any:
    """The output with every tensor replaced by a copy of a leaf, which is noted: the graph begins there."""
    if isinstance(output, Tensor) and output.is_floating_point():
        found.append(output.detach().clone().requires_grad_())
        return found[-1].clone()  # a later operation in place must not change the leaf
    if isinstance(output, (list, tuple)):
        parts = [_with_leaves(part, found) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


@contextmanager
def _as_logits(model: nn.Module) -> Iterator[None]:
    """Eval mode without the head's activation, whose gradient vanishes where the model is sure."""
    modes = [(part, part.training) for part in model.modules()]
    heads = [(part, vars(part)["head_activation"]) for part in model.modules() if "head_activation" in vars(part)]
    try:
        model.eval()
        for part, _ in heads:
            setattr(part, "head_activation", "none")  # noqa: B010
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, activation in heads:
            setattr(part, "head_activation", activation)  # noqa: B010


def _scores(logits: Any, classes: Sequence[int] | Tensor | None) -> Tensor:
    """The logit of each clip's class, (B,)."""
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ConfigError("Grad-CAM needs a classifier: forward(video) must return (B, classes)")
    if classes is None:
        return logits.max(dim=1).values
    wanted = torch.as_tensor(classes, device=logits.device)
    if wanted.shape != logits.shape[:1] or wanted.min() < 0 or wanted.max() >= logits.shape[1]:
        raise ConfigError(
            f"Grad-CAM: one class from 0 to {logits.shape[1] - 1} for each of {len(logits)} clips is needed; got "
            f"{wanted.tolist()}"
        )
    return logits.gather(1, wanted.long()[:, None])[:, 0]


def _gradients(score: Tensor, found: list[Tensor], layer: str) -> list[Tensor]:
    """Of the score by what the layer gave; parameters get none."""
    gradients = torch.autograd.grad(score, found, allow_unused=True) if found and score.requires_grad else ()
    kept = [gradient for gradient in gradients if gradient is not None]
    if len(kept) != len(found) or not kept or not any(bool(gradient.any()) for gradient in kept):
        raise ConfigError(
            f"Grad-CAM: the class scores do not depend on what layer {layer!r} gives; choose a layer before it whose "
            "output is used"
        )
    return kept


def _grid_of(module: nn.Module) -> tuple[int, ...] | None:
    """Time, height and width of a module's output tokens, if it says so."""
    for part in (module, getattr(module, "attn", None)):
        grid = getattr(part, "q_grid", None)
        if grid is not None:
            return tuple(grid)
    return None


def _heat(features: Tensor, gradient: Tensor, grid: tuple[int, ...] | None, layer: str, video: Tensor) -> Tensor:
    if features.ndim == 3 and grid is not None:
        places = grid[0] * grid[1] * grid[2]
        features, gradient = (
            part[:, -places:].transpose(1, 2).reshape(len(part), -1, *grid)  # a class token comes first
            for part in (features, gradient)
        )
    if features.ndim != 5 or len(features) != len(video):
        raise ConfigError(
            f"Grad-CAM: layer {layer!r} gives {tuple(features.shape)}, no features (B, C, T, H, W); choose a layer "
            "before the pooling"
        )
    weights = gradient.mean(dim=(2, 3, 4), keepdim=True)
    heat = (weights * features.detach()).sum(dim=1, keepdim=True).relu().float()
    heat = functional.interpolate(heat, size=tuple(video.shape[2:]), mode="trilinear", align_corners=False)[:, 0]
    highest = heat.amax(dim=(1, 2, 3), keepdim=True)
    return torch.where(highest > 0, heat / highest.clamp_min(torch.finfo(heat.dtype).tiny), heat)


def overlay(frames: Tensor, heat: Tensor) -> Tensor:
    """Frames with heat over them: cold places stay as they are, hot ones turn yellow and red.

    Args:
        frames: uint8 (..., H, W, 3).
        heat: (..., H, W), 0 to 1.

    Returns:
        uint8, of the shape of the frames.
    """
    heat = heat.clamp(0, 1).to(frames.device, torch.float32)[..., None]
    anchors = torch.tensor(COLORS, dtype=torch.float32, device=frames.device)
    place = heat[..., 0] * (len(COLORS) - 1)
    low = place.floor().long().clamp(max=len(COLORS) - 2)
    color = torch.lerp(anchors[low], anchors[low + 1], (place - low)[..., None])
    opacity = MOST_OPAQUE * heat.sqrt()
    return torch.lerp(frames.float(), color, opacity).round().clamp(0, 255).to(torch.uint8)


def write_video(path: Path, frames: Tensor, frame_rate: float) -> None:
    """Write frames as an H.264 mp4, whole or not at all; an odd last row or column is left out.

    Args:
        path: ends with .mp4.
        frames: uint8 (T, H, W, 3).
        frame_rate: frames a second.

    Raises:
        ConfigError: no frames, or smaller than 2 x 2 pixels.
        DataError: it cannot be written.
    """
    import av

    height, width = (size // 2 * 2 for size in frames.shape[1:3])
    if min(len(frames), height, width) < 1:
        raise ConfigError(f"{path}: frames of the shape {tuple(frames.shape)} make no video")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with av.open(str(temporary), "w", format="mp4") as container:
            rate = Fraction(frame_rate).limit_denominator(1001)
            stream: Any = container.add_stream("libx264", rate=rate, options={"crf": "18"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for picture in frames[:, :height, :width].cpu().contiguous().numpy():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        _finish(temporary, path)
    except (OSError, av.FFmpegError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {error}") from error


def write_images(folder: Path, pictures: Mapping[str, Tensor]) -> list[Path]:
    """Write pictures uint8 (H, W, 3) as `NAME.png`, each whole or not at all; their paths.

    Raises:
        DataError: one cannot be written.
    """
    from PIL import Image

    paths = []
    for name, pixels in pictures.items():
        path = folder / f"{name}.png"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            Image.fromarray(pixels.cpu().contiguous().numpy()).save(temporary, format="PNG")
            _finish(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise DataError(f"{path}: cannot be written: {error}") from error
        paths.append(path)
    return paths


def _finish(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
