"""A user's own towers and rows, as a recipe names them; the environment says what they do beside that.

SEEN: a folder; each process appends there what it trains on, a line a step. STOP_AFTER: so many steps, then SIGTERM.
PAUSE_AT: a step; the writing of its checkpoint never ends.
"""

import json
import os
import signal
import time
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from twinreel import checkpoint
from twinreel.data.clip import Caption, Clip
from twinreel.data.sources import generated
from twinreel.models.preprocessing import Preprocessing

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
BROKEN, PAUSED = "broken.mp4", "paused"


def rows(root, split, *, num_videos=16, num_test_videos=6, seed=0):
    """Generated videos with captions that name the row; among those to train on, one that cannot be read."""
    made = generated.rows(root, split, num_videos=num_videos, num_test_videos=num_test_videos, seed=seed)
    named = [replace(row, captions=_captions(row.id), caption_file=None) for row in made]
    if split == "train":
        named.append(Clip(id="broken", video=str(Path(root) / BROKEN), captions=_captions("broken"), split=split))
    return named


def _captions(row_id):
    return tuple(Caption(text=f"{row_id} called {name}") for name in ("one", "two", "three", "four"))


class Towers(nn.Module):
    """With dropout and batch norm an inexact resume shows; without them every layout computes the same.

    The text tower comes first: in the order in which gradients are ready it is not where DDP expects it.
    """

    def __init__(self, size, uneven):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16, short_side=20)
        self.text_tower = nn.Sequential(nn.Linear(len(LETTERS), 16), nn.Tanh(), nn.Linear(16, size))
        self.video_tower = nn.Sequential(
            nn.Conv3d(3, 6, 3, 2, 1), nn.BatchNorm3d(6) if uneven else nn.Identity(), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.5 if uneven else 0.0), nn.Linear(6 * 2 * 8 * 8, size),
        )  # fmt: skip
        self.shown = []
        self.steps = 0

    def encode_video(self, video):
        self.shown = [zlib.crc32(clip.contiguous().numpy().tobytes()) for clip in video]
        return self.video_tower(video)

    def encode_text(self, captions):
        if self.training:
            self._trains_on(captions)
        counts = [[text.count(letter) / 4 for letter in LETTERS] for text in captions]
        return self.text_tower(torch.tensor(counts))

    def _trains_on(self, captions):
        self.steps += 1
        if "SEEN" in os.environ:
            launch, rank = Path(os.environ["LAUNCH"]).name, os.environ.get("RANK", "0")
            path = Path(os.environ["SEEN"]) / f"{launch}_{rank}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps([self.shown, captions]) + "\n")
        if self.steps == int(os.environ.get("STOP_AFTER", "0")):
            os.kill(os.getpid(), signal.SIGTERM)


def towers(*, size: int = 8, uneven: bool = True) -> nn.Module:
    return Towers(size, uneven)


def _pausing(flush):
    def paused(path):
        flush(path)
        if path.parent.name == f".part_step_{int(os.environ['PAUSE_AT']):07d}":
            Path(PAUSED).touch()
            time.sleep(3600)

    return paused


if "PAUSE_AT" in os.environ:
    checkpoint._flush = _pausing(checkpoint._flush)
