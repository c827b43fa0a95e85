"""Videos for the decoding benchmark that cost a decoder what real ones do, and whose frames tell their number.

Drawn frames have the spectrum of natural images, hard edges, a hand-held camera, things that move over one another,
and the noise of a sensor; with x264's medium preset they come to some 400 kbit/s at 320x240 and 3 Mbit/s at 1280x720.
Or real clips are joined one after another, at the frame rate and size of the video that is made.

Each frame carries its number as small gray cells at the top left of its center square, so that it can be told after
any cropping to that square and scaling. The numbers are in Gray code: one cell changes from frame to frame, which
costs the encoder next to nothing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["Movie", "frame_numbers", "make_movies", "stamp"]

SIDE_CELLS, ROWS, COLUMNS = 28, 2, 7  # the side of the square in cells; the grid: one white, 12 bits, one black
WHITE, BLACK = 210, 40
SHAKE, NOISE = 0.006, 3.0  # of the camera, in shares of the picture; standard deviation of the noise in gray levels
ENCODERS = {
    "h264": ("libx264", {"preset": "medium", "crf": "23", "sc_threshold": "0"}),
    "hevc": ("libx265", {"preset": "medium", "crf": "26", "x265-params": "log-level=error:scenecut=0:pools=1"}),
    "vp9": ("libvpx-vp9", {"crf": "34", "b": "0", "deadline": "good", "cpu-used": "4"}),
}


@dataclass(frozen=True)
class Movie:
    """A file to make: `gop` frames between key frames, `rate` in Hz, `seconds` long."""

    codec: str
    width: int
    height: int
    gop: int
    rate: int
    seconds: int

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.codec} {self.width}x{self.height} GOP {self.gop}"

    @property
    def num_frames(self) -> int:
        """Of the whole file."""
        return self.rate * self.seconds

    def path(self, folder: Path, real: bool) -> Path:
        """Where the file lies: the name says all that it was made from."""
        suffix = "webm" if self.codec == "vp9" else "mp4"
        kind = "real" if real else "drawn"
        return (
            folder
            / f"{kind}_{self.codec}_{self.width}x{self.height}_{self.rate}hz_g{self.gop}_{self.seconds}s.{suffix}"
        )


def make_movies(movies: Iterable[Movie], folder: Path, clips: Path | None = None) -> dict[Movie, Path]:
    """The files of `movies`; those that `folder` holds already are kept. Frames of one size are drawn once for all.

    Args:
        movies: what to make.
        folder: where the files go.
        clips: a folder with real videos to join, instead of drawing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {movie: movie.path(folder, clips is not None) for movie in movies}
    missing = [movie for movie, path in paths.items() if not path.exists()]
    key = lambda movie: (movie.width, movie.height, movie.rate, movie.seconds)  # noqa: E731
    for (width, height, rate, seconds), group in itertools.groupby(sorted(missing, key=key), key):
        frames = joined(clips, width, height, rate) if clips else drawn(width, height, rate)
        _write(frames, rate * seconds, {movie: paths[movie] for movie in group})
    return paths


def _write(frames: Iterator[NDArray[np.uint8]], num_frames: int, paths: dict[Movie, Path]) -> None:
    partial = {movie: path.with_name(f"partial{os.getpid()}_{path.name}") for movie, path in paths.items()}
    outputs = []
    for movie, path in partial.items():
        container: Any = av.open(str(path), "w")
        encoder, options = ENCODERS[movie.codec]
        stream = container.add_stream(
            encoder, rate=movie.rate, options={**options, "g": str(movie.gop), "threads": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = movie.width, movie.height, "yuv420p"
        outputs.append((container, stream))
    for number, image in enumerate(itertools.islice(frames, num_frames)):
        picture = av.VideoFrame.from_ndarray(stamp(image, number), format="rgb24").reformat(format="yuv420p")
        picture.pts = number
        for container, stream in outputs:
            container.mux(stream.encode(picture))
    for container, stream in outputs:
        container.mux(stream.encode(None))
        container.close()
    for movie, path in partial.items():
        path.rename(paths[movie])


def stamp(image: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """The image, changed in place, with `number` written into its center square."""
    top, left, side = _center(image.shape[0], image.shape[1])
    code = number ^ (number >> 1)
    bits = [1, *((code >> place) & 1 for place in range(ROWS * COLUMNS - 3, -1, -1)), 0]
    edges = [round(cell * side / SIDE_CELLS) for cell in range(COLUMNS + 1)]
    for position, bit in enumerate(bits):
        row, column = divmod(position, COLUMNS)
        rows = slice(top + edges[row], top + edges[row + 1])
        image[rows, left + edges[column] : left + edges[column + 1]] = WHITE if bit else BLACK
    return image


def frame_numbers(frames: Tensor) -> list[int]:
    """The numbers of frames, (T, H, W, 3) uint8, whole or cut to the center square at any scale; -1 if unreadable."""
    top, left, side = _center(frames.shape[1], frames.shape[2])
    cell = side / SIDE_CELLS
    middles = []
    for row, column in itertools.product(range(ROWS), range(COLUMNS)):
        y, x = top + round((row + 0.3) * cell), left + round((column + 0.3) * cell)
        size = max(1, round(0.4 * cell))
        middles.append(frames[:, y : y + size, x : x + size].float().mean((1, 2, 3)))
    grays = torch.stack(middles, 1)
    readable = ((grays - (WHITE + BLACK) / 2).abs() > (WHITE - BLACK) / 5).all(1)
    bits = grays > (WHITE + BLACK) / 2
    numbers = []
    for row_bits, is_readable in zip(bits.tolist(), readable.tolist(), strict=True):
        number = 0
        for bit in row_bits[1:-1]:  # from Gray code: each bit is turned by the one before
            number = number << 1 | (bit ^ (number & 1))
        numbers.append(number if is_readable and row_bits[0] and not row_bits[-1] else -1)
    return numbers


def _center(height: int, width: int) -> tuple[int, int, int]:
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side


def drawn(width: int, height: int, rate: int) -> Iterator[NDArray[np.uint8]]:
    """Endless natural-like frames, (height, width, 3) RGB; the same at every call."""
    rng = np.random.default_rng(0)
    layers = [_texture(rng, 2 * height, 2 * width) for _ in range(3)]
    masks = [None, *(_blob(rng, 2 * height, 2 * width, share) for share in (0.2, 0.08))]
    grain = torch.from_numpy(rng.normal(0, NOISE, (2 * height, 2 * width)).astype(np.float32))
    shake = np.zeros(2)
    for number in itertools.count():
        seconds = number / rate
        shake = 0.9 * shake + rng.normal(0, SHAKE / math.sqrt(rate), 2)
        image = torch.zeros(3, height, width)
        for depth, (texture, mask) in enumerate(zip(layers, masks, strict=True)):
            grid = _view(seconds, depth, shake, width, height)
            moved = _sample(texture, grid)
            if mask is None:
                image = moved
            else:
                alpha = _sample(mask, grid)
                image = alpha * moved + (1 - alpha) * image
        top, left = rng.integers(0, height), rng.integers(0, width)
        image = image + grain[top : top + height, left : left + width]
        yield image.clamp(0, 255).round().byte().permute(1, 2, 0).contiguous().numpy()


def _view(seconds: float, depth: int, shake: NDArray[np.float64], width: int, height: int) -> Tensor:
    """Where a layer is looked at: the camera pans, turns and zooms slowly, and nearer layers move on their own."""
    speed = (0.35, 0.8, 1.7)[depth]
    angle = 0.04 * math.sin(0.5 * seconds * speed + depth)
    zoom = 0.45 + 0.05 * math.sin(0.23 * seconds * speed)
    x = 0.4 * math.sin(0.31 * seconds * speed + 2 * depth) + shake[0]
    y = 0.35 * math.cos(0.27 * seconds * speed + depth) + shake[1]
    cos, sin = zoom * math.cos(angle), zoom * math.sin(angle)
    return functional.affine_grid(torch.tensor([[[cos, -sin, x], [sin, cos, y]]]), [1, 1, height, width], False)


def _sample(layer: Tensor, grid: Tensor) -> Tensor:
    return functional.grid_sample(layer[None], grid.to(layer.dtype), padding_mode="reflection", align_corners=False)[0]


def _noise(rng: np.random.Generator, height: int, width: int, falloff: float) -> NDArray[np.float64]:
    """Noise whose amplitude falls with frequency, standard deviation 1; natural images have a falloff near 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.normal(size=(height, width))) / np.maximum(frequency, 1 / height) ** falloff
    image = np.fft.irfft2(spectrum, (height, width))
    return image / image.std()


def _texture(rng: np.random.Generator, height: int, width: int) -> Tensor:
    """A colored surface with smooth shades, edges and detail: float (3, height, width), 0 to 255."""
    shade = _noise(rng, height, width, 1.2)
    edges = np.sign(_noise(rng, height, width, 1.6))
    colors = np.stack([_noise(rng, height, width, 1.6) for _ in range(3)])
    image = 120 + 26 * shade + 18 * edges + 14 * colors * (1 + 0.5 * edges)
    return torch.from_numpy(image.clip(0, 255).astype(np.float32))


def _blob(rng: np.random.Generator, height: int, width: int, share: float) -> Tensor:
    """Where a near layer hides what is behind it, `share` of the picture: float (1, height, width), 0 to 1."""
    shape = _noise(rng, height, width, 2.2)
    edge = np.quantile(shape, 1 - share)
    return torch.from_numpy((0.5 + 30 * (shape - edge)).clip(0, 1).astype(np.float32))[None]


def joined(clips: Path, width: int, height: int, rate: int) -> Iterator[NDArray[np.uint8]]:
    """Endless frames of the real videos below `clips`, (height, width, 3) RGB; those of at least the size, if any."""
    sizes = {}
    for path in sorted(clips.rglob("*.mp4")):
        try:
            with av.open(str(path)) as container:
                sizes[path] = container.streams.video[0].height
        except (av.FFmpegError, IndexError):
            continue
    if not sizes:
        raise SystemExit(f"{clips}: no .mp4 with a video below this folder")
    chosen = [path for path, size in sizes.items() if size >= height] or list(sizes)
    for path in itertools.cycle(chosen):
        yield from _frames_of(path, width, height, rate)


def _frames_of(path: Path, width: int, height: int, rate: int) -> Iterator[NDArray[np.uint8]]:
    """A clip's frames at `rate`: repeated or left out; its center is cut to the shape, then scaled."""
    shown = 0.0
    with av.open(str(path)) as container:
        for frame in container.decode(container.streams.video[0]):
            seconds = frame.time or 0.0
            if seconds + 1e-6 < shown:
                continue
            image = torch.from_numpy(frame.to_ndarray(format="rgb24"))
            scale = min(frame.height / height, frame.width / width)
            cut_height, cut_width = round(height * scale), round(width * scale)
            top, left = (frame.height - cut_height) // 2, (frame.width - cut_width) // 2
            part = image[top : top + cut_height, left : left + cut_width].permute(2, 0, 1)[None]
            scaled = functional.interpolate(part, (height, width), mode="bilinear", antialias=True)
            while shown <= seconds + 1e-6:
                yield scaled[0].permute(1, 2, 0).contiguous().numpy().copy()
                shown += 1 / rate
