"""A small trained run and a small collection of numbered videos, made once."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.command_line import SMALL, twinreel
from videos import make_video

OWN_TOWERS = '''
"""A user's own towers: batch norm and dropout, so that an inexact resume shows; slow on demand, to be killed."""

import os
import time

import torch
from torch import nn

from twinreel.models.preprocessing import Preprocessing


class Towers(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=16, short_side=20)
        self.video_tower = nn.Sequential(
            nn.AvgPool3d((1, 4, 4)), nn.Conv3d(3, 4, 1, bias=False), nn.BatchNorm3d(4), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(4 * 4 * 4 * 4, size),
        )
        self.text_tower = nn.Linear(26, size)

    def encode_video(self, video):
        if self.training:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return self.video_tower(video)

    def encode_text(self, captions):
        counts = [[text.count(letter) / 10 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in captions]
        return self.text_tower(torch.tensor(counts))


def towers(*, size: int = 8) -> nn.Module:
    return Towers(size)
'''


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The demo, shrunk, on generated videos: `.run`, `.root` of the videos, `.recipe` arguments, `.outcome`.

    Nobody writes into it; `copy_of` gives a copy to be spoiled.
    """
    folder = tmp_path_factory.mktemp("trained")
    recipe = ("demo", *SMALL, f"data.root={folder / 'videos'}")
    outcome = twinreel("train", *recipe, "--out", folder / "run")
    assert outcome.code == 0, outcome
    return SimpleNamespace(run=folder / "run", root=folder / "videos", recipe=recipe, outcome=outcome)


@pytest.fixture
def copy_of(tmp_path: Path) -> Iterator[object]:
    """A copy of a run folder, links kept, under another name."""

    def copy(run: Path, name: str = "copy") -> Path:
        return shutil.copytree(run, tmp_path / name, symlinks=True)

    yield copy


@pytest.fixture
def own_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's own towers in the current folder, as a recipe names them."""
    (tmp_path / "our_towers.py").write_text(OWN_TOWERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "our_towers:towers"
    sys.modules.pop("our_towers", None)


class Collection:
    """Tiny numbered videos in a folder, and manifests of them."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.names = [f"{i}.mp4" for i in range(number)]
        for i, name in enumerate(self.names):
            make_video(folder / name, num_frames=8, frame_rate=8, size=(32, 32), first_number=10 * i)

    def manifest(self, path: Path, names: list[str] | None = None, **columns: list[object]) -> Path:
        """Write a CSV of videos of this folder; a caption for each unless columns are given."""
        names = self.names if names is None else names
        columns = columns or {"caption": [f"number {i} of the videos" for i in range(len(names))]}
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["video", *columns])
            writer.writerows(zip([self.folder / name for name in names], *columns.values(), strict=True))
        return path


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """40 videos `0.mp4`, `1.mp4`, ... of a second each, in a folder that nobody writes into."""
    return Collection(tmp_path_factory.mktemp("collection"), 40)
