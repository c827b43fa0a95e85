"""A matching model without weights, that sees brightness and reads numbers; videos of even brightness; rows of them.

And what torch makes meanwhile.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinreel.data.clip import Caption, Clip
from twinreel.models.preprocessing import Preprocessing

__all__ = ["Brightness", "Made", "grey_rows", "make_grey_videos"]

PREP = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=16)
LETTERS = 24  # of a text that are read


class Brightness(nn.Module):
    """Says how near the brightness of a clip, 0 to 1, is to the number at the end of a text, in tenths: `n3`, `a n3.2`.

    What it is asked is counted: `clips` seen, `texts` tokenized, `pairs` of (brightness in hundredths, text).
    """

    def __init__(
        self,
        answer: Callable[[Tensor], Tensor] | None = None,
        num_outputs: int = 2,
        *,
        scale: float = 100.0,
        preprocessing: Preprocessing = PREP,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.num_outputs = num_outputs
        self.answer = answer
        self.scale = nn.Parameter(torch.tensor(scale))
        self.clips = 0
        self.texts: Counter[str] = Counter()
        self.pairs: Counter[tuple[int, str]] = Counter()
        self.largest = 0

    def encode_grid(self, video: Tensor) -> Tensor:
        self.clips += len(video)
        self.largest = max(self.largest, len(video))
        return video.mean((1, 2, 3, 4))[:, None]

    def tokenize(self, captions: Sequence[str], max_tokens: int | None = None) -> Tensor:
        self.texts.update(captions)
        return torch.tensor([[ord(letter) for letter in text.lower().ljust(LETTERS)[:LETTERS]] for text in captions])

    def match(self, grid: Tensor, tokens: Tensor) -> Tensor:
        words = [["".join(map(chr, text)).strip() for text in own] for own in tokens.tolist()]
        self.largest = max(self.largest, tokens.shape[0] * tokens.shape[1])
        for seen, own in zip((100 * grid[:, 0]).round().int().tolist(), words, strict=True):
            self.pairs.update((seen, text) for text in own)
        numbers = torch.tensor([[float(text.rpartition("n")[2]) / 10 for text in own] for own in words])
        off = (grid - numbers).abs() * self.scale
        if self.answer is not None:
            return self.answer(off)
        return torch.stack([off, -off], dim=2) if self.num_outputs == 2 else -off[..., None]


def make_grey_videos(folder: Path, number: int) -> Path:
    """Videos `0.mp4`, `1.mp4`, ... of a second, each of even brightness i / 10; returns the folder."""
    for i in range(number):
        with av.open(str(folder / f"{i}.mp4"), "w") as container:
            stream: Any = container.add_stream("libx264", rate=10, options={"qp": "0"})
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for _ in range(10):
                frame = np.full((16, 16, 3), round(25.5 * i), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
    return folder


def grey_rows(
    folder: Path, numbers: Sequence[int], captions: Callable[[int], Sequence[str]] | None = None
) -> list[Clip]:
    """A row `v3` a video `3.mp4`, its caption `n3`, or those that `captions` gives for its number."""
    texts = captions or (lambda i: [f"n{i}"])
    return [
        Clip(id=f"v{i}", video=str(folder / f"{i}.mp4"), captions=tuple(Caption(text=text) for text in texts(i)))
        for i in numbers
    ]


class Made(TorchDispatchMode):
    """What operations of this thread make: `largest`, the numbers of a tensor; `most`, the bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = self.alive = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else (made,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        """Storages are counted, because views share them; they tell when they go."""
        if storage not in self.known:
            self.known.add(storage)
            self.alive += storage.nbytes()
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.alive -= size
