"""Tiny videos whose frames carry their own number in color, so that a test can say which frame it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from torch import Tensor

__all__ = ["frame_number", "frame_numbers", "make_audio", "make_video", "numbered_image", "textured_image"]

COLUMNS, ROWS = 4, 3
MAX_NUMBER = 2 ** (COLUMNS * ROWS - 2) - 1
BLUE = np.array([30, 60, 220], np.uint8)  # a cell that says 0
YELLOW = np.array([230, 200, 40], np.uint8)  # a cell that says 1: red and blue swapped would read as the other


def _cells(number: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The grid of a frame: the first cell is always 1, the last always 0, the number between, high bits first."""
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"frame number {number} does not fit; allowed: 0 to {MAX_NUMBER}")
    bits = [1, *((number >> shift) & 1 for shift in range(COLUMNS * ROWS - 3, -1, -1)), 0]
    return np.array(bits, bool).reshape(ROWS, COLUMNS)


def numbered_image(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The picture of frame `number`: uint8 (height, width, 3) RGB. `size` is (width, height)."""
    width, height = size
    cells = _cells(number)[np.arange(height) * ROWS // height][:, np.arange(width) * COLUMNS // width]
    return np.where(cells[..., None], YELLOW, BLUE)


def textured_image(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A picture as busy as a filmed one, waves that move and noise: uint8 (height, width, 3) RGB."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    shift = 2.5 * number
    waves = [
        np.sin((columns + shift) / 9) + np.sin((rows - shift / 2) / 7),
        np.sin((columns + rows + shift) / 13),
        np.cos((columns - 2 * rows + shift) / 11),
    ]
    noise = np.random.default_rng(number).normal(0, 6, (height, width, 1))
    return np.clip(128 + 50 * np.stack(waves, axis=2) + noise, 0, 255).astype(np.uint8)


def frame_number(frame: Tensor | np.ndarray[Any, Any]) -> int:
    """The number that a (lossily coded) frame carries; ValueError if it is turned, swapped, grey or foreign."""
    image = np.asarray(frame).astype(np.int64)
    height, width = image.shape[:2]
    bits = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            top, bottom = row * height // ROWS, (row + 1) * height // ROWS
            left, right = column * width // COLUMNS, (column + 1) * width // COLUMNS
            quarter_y, quarter_x = (bottom - top) // 4, (right - left) // 4
            cell = image[top + quarter_y : bottom - quarter_y, left + quarter_x : right - quarter_x].mean((0, 1))
            distances = [float(np.abs(cell - color).max()) for color in (BLUE, YELLOW)]
            if min(distances) > 60:
                raise ValueError(f"not a numbered frame: cell ({row}, {column}) has the color {cell.round()}")
            bits.append(int(distances[1] < distances[0]))
    if (bits[0], bits[-1]) != (1, 0):
        raise ValueError(f"not an upright numbered frame: cells {bits}")
    return int("".join(map(str, bits[1:-1])), 2)


def frame_numbers(frames: Tensor) -> list[int]:
    """The numbers of the frames of a clip: (T, H, W, 3)."""
    return [frame_number(frame) for frame in frames]


def make_video(
    path: str | Path,
    *,
    num_frames: int = 30,
    frame_rate: float | Fraction = 10,
    size: tuple[int, int] = (64, 48),
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    b_frames: int = 0,
    pts_seconds: Sequence[float] | None = None,
    time_base: Fraction | None = None,
    rotation: int = 0,
    mirrored: bool = False,
    first_number: int = 0,
    audio_seconds: float = 0.0,
    container_options: Mapping[str, str] | None = None,
    codec_options: Mapping[str, str] | None = None,
    format: str | None = None,
    picture: Callable[[int, tuple[int, int]], np.ndarray[Any, np.dtype[np.uint8]]] = numbered_image,
) -> Path:
    """Write a video whose frame `i` carries the number `first_number + i`; returns its path.

    `size` is (width, height) as shown. `gop` is the number of frames between key frames, `b_frames` the greatest run
    of B-frames. `pts_seconds` gives each frame its own time (variable rate, first time not 0), in units of
    `time_base` (1 / frame_rate without, 1 / 90000 with `pts_seconds`). `rotation` (90, 180, 270) turns the coded
    pictures clockwise and writes the display matrix that turns them back; `mirrored` does so with left and right.
    `audio_seconds` adds a silent track. `picture` draws other frames than numbered ones.
    """
    rate = Fraction(frame_rate).limit_denominator(1001)
    base = time_base or (Fraction(1, 90_000) if pts_seconds is not None else 1 / rate)
    if pts_seconds is None:
        pts_seconds = [float(i / rate) for i in range(num_frames)]
    turns = rotation // 90
    options = {"g": str(gop), "bf": str(b_frames), "threads": "1", **_quick(codec, gop), **(codec_options or {})}
    with av.open(str(path), "w", format=format, options=dict(container_options or {})) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size[::-1] if turns % 2 else size
        stream.pix_fmt = pix_fmt
        stream.codec_context.time_base = base
        stream.time_base = base
        if turns or mirrored:
            stream.set_display_rotation(rotation, hflip=mirrored)
        audio = _add_audio(container, codec="aac" if audio_seconds else None)
        for index in range(num_frames):
            image = np.rot90(picture(first_number + index, size), -turns)
            image = np.ascontiguousarray(image[:, ::-1] if mirrored else image)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = round(Fraction(pts_seconds[index]) / base)
            frame.time_base = base
            container.mux(stream.encode(frame.reformat(format=pix_fmt, threads=1)))
        container.mux(stream.encode(None))
        _write_silence(container, audio, audio_seconds)
    return Path(path)


def make_audio(path: str | Path, seconds: float = 1.0, codec: str = "aac") -> Path:
    """Write a file with a silent audio track and no video; returns its path."""
    with av.open(str(path), "w") as container:
        _write_silence(container, _add_audio(container, codec), seconds)
    return Path(path)


def _quick(codec: str, gop: int) -> dict[str, str]:
    """Options that make an encoder quick and obedient: key frames where asked, and nowhere else."""
    if codec == "libx264":
        return {"preset": "veryfast", "sc_threshold": "0", "keyint_min": str(gop), "crf": "18"}
    if codec == "libx265":
        return {
            "preset": "ultrafast",
            "x265-params": f"log-level=none:keyint={gop}:min-keyint={gop}:scenecut=0:pools=1",
        }
    if codec.startswith("libvpx"):
        return {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "0"}
    return {"b": "2000000", "sc_threshold": "1000000000"} if codec in ("mpeg4", "mpeg2video") else {}


def _add_audio(container: Any, codec: str | None) -> Any:
    if codec is None:
        return None
    stream = container.add_stream(codec, rate=16_000)
    stream.codec_context.layout = "mono"
    return stream


def _write_silence(container: Any, stream: Any, seconds: float) -> None:
    if stream is None:
        return
    for start in range(0, round(seconds * 16_000), 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16_000, start, Fraction(1, 16_000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
