"""What every test gets: fixed seeds, one torch thread, no network, and tiny videos on demand."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests in sub-folders can `from videos import ...`

import videos

LOCAL_HOSTS = ("localhost", "127.", "::1", "0.0.0.0")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections that leave this machine; processes of a test may still talk to one another."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(LOCAL_HOSTS):
            raise RuntimeError(f"a test tried to reach the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture
def make_video(tmp_path: Path) -> Callable[..., Path]:
    """A factory of tiny numbered videos: `make_video("a.mp4", num_frames=30, ...)`; options as in `videos.make_video`.

    A relative name lands in the test's own folder.
    """

    def factory(path: str | Path = "video.mp4", **options: Any) -> Path:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return videos.make_video(target, **options)

    return factory


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real clips that TWINREEL_TEST_DATA names; the test is skipped without it."""
    folder = os.environ.get("TWINREEL_TEST_DATA")
    if not folder:
        pytest.skip("TWINREEL_TEST_DATA is not set: it names a folder of real clips")
    if not Path(folder).is_dir():
        pytest.fail(f"TWINREEL_TEST_DATA names {folder}, which is not a folder")
    return Path(folder)
