"""Training as its user starts it, alone or under torchrun, with towers that get into trouble when they are told to."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any
from unittest import mock

import pytest
import torch

from cli.command_line import Outcome, start, twinreel
from twinreel.checkpoint import find_checkpoint, load_training_state, read_weights
from twinreel.data.sources import generated

__all__ = [
    *("ALONE", "PLAIN", "SETTINGS", "TORCHRUN", "alone", "end", "exit_codes", "launch", "launched", "make_videos"),
    *("messages", "ranks", "readers", "recipe", "records", "same_runs", "saved", "troubled_towers", "wait_for"),
]

ALONE = ("-m", "twinreel")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ALONE)
PLAIN = "model={name: 'troubled_towers:towers', size: 16, plain: true}"
SETTINGS = (
    *("model={name: 'troubled_towers:towers', size: 16}", "train.device=cpu", "train.num_steps=6"),
    *("train.global_batch_size=8", "train.log_every=1", "train.save_every=2 steps", "optim.warmup_steps=2"),
    "eval.num_clips=2",
)
SECONDS = 60  # within which a launch ends, whatever happens to it

TROUBLED_TOWERS = '''
"""A user's own towers: batch norm and dropout, so that an inexact resume shows, and one trouble at one step.

TROUBLE="what rank step" tells which, in which process, at which of its steps; STEP_SECONDS makes every step slow.
"""

import os
import signal
import time

import torch
from torch import nn

from twinreel.models.preprocessing import Preprocessing

RANK = int(os.environ.get("RANK", "0"))


def raises(embeddings):
    raise ValueError("these towers do not like this video")


def leaves(embeddings):
    os._exit(9)


def stops(embeddings):
    os.kill(os.getpid(), signal.SIGTERM)


def spoils(embeddings):
    with torch.no_grad():
        embeddings[1] = float("nan")


def fills(embeddings):
    with open(os.environ["FILLER"], "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def moves(embeddings):
    os.rename(os.environ["MOVED"], os.environ["MOVED"] + "_gone")


TROUBLES = {"raise": raises, "leave": leaves, "stop": stops, "spoil": spoils, "fill": fills, "move": moves}


class Towers(nn.Module):
    def __init__(self, size, plain):
        super().__init__()
        self.preprocessing = Preprocessing(num_frames=4, frame_rate=8.0, crop_size=32, short_side=40)
        noise = [] if plain else [nn.BatchNorm3d(4), nn.Dropout(0.5)]
        self.video_tower = nn.Sequential(
            nn.AvgPool3d((1, 8, 8)), nn.Conv3d(3, 4, 1), *noise, nn.Flatten(), nn.Linear(4 * 4 * 4 * 4, size)
        )
        self.text_tower = nn.Linear(26, size)
        self.steps = 0

    def encode_video(self, video):
        embeddings = self.video_tower(video)
        if self.training:
            self.steps += 1
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            what, rank, step = os.environ.get("TROUBLE", "no 0 0").split()
            if (int(rank), int(step)) == (RANK, self.steps):
                TROUBLES[what](embeddings)
        return embeddings

    def encode_text(self, captions):
        counts = [[text.count(letter) / 10 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in captions]
        return self.text_tower(torch.tensor(counts))


def towers(*, size: int = 8, plain: bool = False) -> nn.Module:
    return Towers(size, plain)
'''


def troubled_towers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the towers' file and go there; for a fixture to yield from."""
    (folder / "troubled_towers.py").write_text(TROUBLED_TOWERS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("troubled_towers", None)


def make_videos(root: Path) -> Path:
    """The collection of `recipe`: 16 generated videos to train on, 8 to judge by."""
    for split in ("train", "test"):
        generated.rows(root, split, num_videos=16, num_test_videos=8)
    return root


def recipe(root: Path, *more: str) -> tuple[str, ...]:
    """Arguments: the demo, shrunk, with the troubled towers; six steps of eight clips, saved after every other."""
    data = (f"data.root={root}", "data.num_videos=16", "data.num_test_videos=8", "data.num_workers=0")
    return ("demo", *data, *SETTINGS, *more)


def alone(*arguments: object, **environment: str) -> Outcome:
    """Run a command as one process: this one."""
    with mock.patch.dict(os.environ, environment):
        return twinreel(*arguments)


@contextmanager
def launched(*arguments: object, program: tuple[str, ...] = TORCHRUN, **environment: str) -> Iterator[Popen[str]]:
    """Start a command, by default as two processes under torchrun; nothing of it is left afterwards."""
    process = start(*arguments, program=program, **environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks end with their launcher
            process.communicate()


def end(process: Popen[str], seconds: float = SECONDS) -> Outcome:
    """How a started command ends, which it does in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not ended after {seconds} s: {process.communicate()}")
    return Outcome(code=process.returncode, out=out, err=err)


def launch(*arguments: object, program: tuple[str, ...] = TORCHRUN, **environment: str) -> Outcome:
    """Run a command to its end, by default as two processes under torchrun."""
    with launched(*arguments, program=program, **environment) as process:
        return end(process)


def wait_for(condition: Callable[[], Any], process: Popen[str]) -> None:
    """Wait until a condition holds while a process runs."""
    last = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < last, "waited too long"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks(process: Popen[str]) -> list[int]:
    """Process ids of what torchrun started, by rank."""
    found = {}
    for child in _children(process.pid):
        rank = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes())
        if rank is not None:
            found[int(rank[1])] = child
    return [found[rank] for rank in sorted(found)]


def readers(pid: int) -> list[int]:
    """Process ids of the readers of a training process: its children, or those of its fork server."""
    servers = [child for child in _children(pid) if "multiprocessing.forkserver" in _command(child)]
    forked = [child for child in _children(pid) if "multiprocessing" not in _command(child)]
    return forked + [reader for server in servers for reader in _children(server)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def exit_codes(outcome: Outcome) -> list[int]:
    """Of the ranks, as torchrun reports them."""
    return [int(code) for code in re.findall(r"^ *exitcode *: (-?\d+)", outcome.err, re.MULTILINE)]


def messages(outcome: Outcome) -> list[str]:
    """What twinreel itself said at the end, the lines that torchrun adds left out."""
    return [line for line in outcome.err.splitlines() if line.startswith("twinreel: ")]


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of this kind in metrics.jsonl, but for what depends on the clock."""
    path = run / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    noisy = {"clips_per_second", "step_seconds", "data_seconds", "waiting_share", "memory_gb"}
    return [{key: line[key] for key in line.keys() - noisy} for line in lines if line["kind"] == kind]


def saved(run: Path) -> int:
    """The step of the newest checkpoint, which is whole, and nothing half written lies beside it."""
    checkpoint, warnings = find_checkpoint(run)
    assert not warnings and not list((run / "checkpoints").glob(".part_*")), warnings
    return int(checkpoint.name.removeprefix("step_"))


def same_runs(one: Path, other: Path) -> None:
    """Weights, optimizer, counters, losses, scores and faults are equal bit for bit."""
    checkpoints = [find_checkpoint(run)[0] for run in (one, other)]
    assert checkpoints[0].name == checkpoints[1].name
    weights = [read_weights(checkpoint) for checkpoint in checkpoints]
    states = [load_training_state(checkpoint) for checkpoint in checkpoints]
    slots = [state["optimizer"].pop("state") for state in states]
    assert slots[0].keys() == slots[1].keys()
    for first, second in zip((weights[0], *slots[0].values()), (weights[1], *slots[1].values()), strict=True):
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []
    for state in states:
        state["state"].pop("seconds")
    assert states[0] == states[1]
    assert records(one, "train") == records(other, "train") != []
    assert records(one, "eval") == records(other, "eval")
    assert _faults(one) == _faults(other)


def _faults(run: Path) -> str:
    path = run / "faults.jsonl"
    return path.read_text() if path.exists() else ""
