"""Pictures of a run for TensorBoard: histograms, the confusion matrix, where the model looks.

Plain functions that the loop calls on one line each. `writer` is TensorBoard's SummaryWriter, or None in processes that
write no log: then nothing is done. What cannot be drawn is returned in words, to be logged; nothing is left out unsaid.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from twinreel.data.clip import Clip, Sample
from twinreel.errors import ConfigError
from twinreel.grad_cam import grad_cam, overlay

__all__ = ["confusion_picture", "write_confusion", "write_grad_cam", "write_histograms"]

MOST_NAMED = 60  # classes: names beside more rows could not be read
CELL = (8, 40)  # pixels of a cell, least and most
MATRIX_SIDE = 800  # pixels that the cells take up, if they can
LETTER = (6, 12)  # pixels that a letter takes up
MOST_LETTERS = 24
GIF_MILLISECONDS = 125  # a frame; 8 a second


def write_histograms(writer: Any, model: nn.Module, step: int) -> list[str]:
    """Histograms of every trained parameter, `weights/NAME`, and of its gradient, `gradients/NAME`.

    Call it after the optimizer's step: gradients are then those that were applied, after clipping.

    Returns:
        Which were left out, and why.
    """
    if writer is None:
        return []
    left_out = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind, values in (("weights", parameter.detach()), ("gradients", parameter.grad)):
            if values is None:
                left_out.append(f"{kind}/{name}: it took no part in the step")
            elif not bool(torch.isfinite(values).all()):
                left_out.append(f"{kind}/{name}: not finite")
            else:
                writer.add_histogram(f"{kind}/{name}", values.float(), step)
    return left_out


def write_confusion(
    writer: Any, matrix: Tensor | Sequence[Sequence[int]], names: Sequence[str] | None, step: int, tag: str = "eval"
) -> None:
    """The confusion matrix as a picture, `TAG/confusion_matrix`, see `confusion_picture`."""
    if writer is not None:
        writer.add_image(f"{tag}/confusion_matrix", confusion_picture(matrix, names), step, dataformats="HWC")


def confusion_picture(matrix: Tensor | Sequence[Sequence[int]], names: Sequence[str] | None = None) -> Tensor:
    """A picture uint8 (H, W, 3): a row for each class that is right, darker the larger its share of the row.

    Up to 60 classes have their names, and cells that are large enough their counts.

    Args:
        matrix: counts (C, C), the right class by the class that was said.
        names: of the classes; where there are none, or less than C, a class is called by its number.

    Raises:
        ConfigError: no square matrix of numbers from 0.
    """
    counts = torch.as_tensor(matrix).double()
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not counts.numel() or not bool((counts >= 0).all()):
        raise ConfigError(f"a confusion matrix is square and counts from 0; got {tuple(counts.shape)}")
    size = len(counts)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    cell = min(max(MATRIX_SIDE // size, CELL[0]), CELL[1])
    titles = [_short(name) for name in [*(names or ())][:size]]
    titles += [str(place) for place in range(len(titles), size)]
    named = size <= MOST_NAMED
    room = 6 + max(map(len, titles)) * LETTER[0] if named else 4
    side = size * cell + 1
    picture = Image.new("RGB", (room + side, room + side), "white")
    pen = ImageDraw.Draw(picture)
    for row in range(size):
        for column in range(size):
            place = (room + column * cell, room + row * cell)
            _cell(pen, place, cell, float(shares[row, column]), int(counts[row, column]))
    if named:
        _titles(picture, pen, titles, room, cell)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)


def _short(name: str) -> str:
    """A name that the picture's letters can show."""
    plain = name.encode("ascii", "replace").decode("ascii")
    return plain if len(plain) <= MOST_LETTERS else plain[: MOST_LETTERS - 2] + ".."


def _cell(pen: ImageDraw.ImageDraw, place: tuple[int, int], cell: int, share: float, count: int) -> None:
    left, top = place
    shade = (round(255 - 225 * share), round(255 - 165 * share), round(255 - 75 * share))
    pen.rectangle((left, top, left + cell, top + cell), fill=shade, outline=(225, 225, 225) if cell > CELL[0] else None)
    text = str(count)
    if count and len(text) * LETTER[0] + 2 <= cell and cell >= LETTER[1] + 2:
        ink = "white" if share > 0.55 else "black"
        pen.text((left + (cell - len(text) * LETTER[0]) // 2, top + (cell - LETTER[1]) // 2), text, fill=ink)


def _titles(picture: Image.Image, pen: ImageDraw.ImageDraw, titles: Sequence[str], room: int, cell: int) -> None:
    """Names of the rows at the left, of the columns above them, upwards."""
    for place, title in enumerate(titles):
        middle = room + place * cell + (cell - LETTER[1]) // 2
        pen.text((room - 4 - len(title) * LETTER[0], middle), title, fill="black")
        strip = Image.new("RGB", (room, LETTER[1]), "white")
        ImageDraw.Draw(strip).text((2, 0), title, fill="black")
        picture.paste(strip.rotate(90, expand=True), (middle, 0))


def write_grad_cam(
    writer: Any,
    model: nn.Module,
    rows: Sequence[Clip],
    read: Callable[[Clip, int], Sample],
    *,
    layer: str,
    step: int,
    device: torch.device,
    names: Sequence[str] | None = None,
) -> list[str]:
    """Where the model looks in the middle view of each row: moving pictures `grad_cam/LAYER/ID`, for the top class.

    Frames are above, the heat of each pathway below, see `grad_cam.grad_cam`.

    Args:
        writer: TensorBoard's.
        model: a classifier, on the device, in any mode.
        rows: a few.
        read: `ViewRules` or the like.
        layer: of `model.named_modules()`.
        step: of the training.
        device: the model's.
        names: of the classes, for the pictures' tags.

    Returns:
        Why a picture is missing, a line each; empty if all were drawn.

    Raises:
        ConfigError: there is no such layer, or it gives no features.
    """
    if writer is None:
        return []
    missing = [] if rows else ["Grad-CAM: no row to look at"]
    preprocessing: Any = model.preprocessing
    for row in rows:
        sample = read(row, 0)
        if sample.fault is not None:
            missing.append(f"Grad-CAM of {row.id}: {sample.fault.reason}")
            continue
        frames = sample.frames[len(sample.frames) // 2]
        video = preprocessing.normalize(frames[None].to(device))
        with torch.no_grad():
            top = _top_class(model, video)
        maps = grad_cam(model, video, layer, [top])
        strip = torch.cat([frames, *(overlay(frames, heat[0].cpu()) for heat in maps)], dim=1)
        said = names[top] if names is not None and top < len(names) else top
        _write_moving(writer, f"grad_cam/{layer}/{row.id}", strip, step)
        writer.add_text(f"grad_cam/{layer}/{row.id}", f"where it looks for {said}, its first choice", step)
        if not any(bool(heat.any()) for heat in maps):
            missing.append(f"Grad-CAM of {row.id}: nothing in layer {layer} speaks for {said}; the picture has no heat")
    return missing


def _top_class(model: nn.Module, video: Tensor) -> int:
    modes = [(part, part.training) for part in model.modules()]
    try:
        return int(model.eval()(video)[0].argmax())
    finally:
        for part, mode in modes:
            part.training = mode


def _write_moving(writer: Any, tag: str, frames: Tensor, step: int) -> None:
    """Frames uint8 (T, H, W, 3) as an animated GIF, which TensorBoard shows; its own add_video needs moviepy."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    pictures = [Image.fromarray(frame.contiguous().numpy()) for frame in frames.cpu()]
    buffer = io.BytesIO()
    pictures[0].save(buffer, format="GIF", save_all=True, append_images=pictures[1:], duration=GIF_MILLISECONDS, loop=0)
    height, width = frames.shape[1:3]
    picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=buffer.getvalue())
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)
