"""The command line as a function: the real entry point, in this process (quick) or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from twinreel import cli

__all__ = ["SMALL", "Outcome", "hashes", "start", "twinreel"]

# The demo, shrunk until a step takes a hundredth of a second.
SMALL = (
    *("data.num_videos=8", "data.num_test_videos=6", "data.num_workers=0", "model.embedding_size=16"),
    "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32, short_side: 40}",
    *("train.device=cpu", "train.num_steps=6", "train.global_batch_size=4", "train.log_every=1"),
    *("train.save_every=2 steps", "optim.warmup_steps=2", "eval.num_clips=2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def fails(self, *words: str) -> None:
        """Exit 2, nothing on stdout, and one message on stderr that holds all these words and no traceback."""
        assert self.code == 2, self
        assert self.out == "", self
        assert "Traceback" not in self.err and "bug in twinreel" not in self.err, self.err
        messages = [line for line in self.err.splitlines() if line.startswith("twinreel: ")]
        assert len(messages) == 1, self.err
        for word in words:
            assert word in self.err, f"{word!r} is not in: {self.err}"


def twinreel(*arguments: object) -> Outcome:
    """Run a command through `twinreel.cli.main` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", ["twinreel", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            raise
    return Outcome(code=code or 0, out=out.getvalue(), err=err.getvalue())


def start(
    *arguments: object, folder: Path | None = None, program: Sequence[str] = ("-m", "twinreel"), **environment: str
) -> subprocess.Popen[str]:
    """Start a command as a process (and group) of its own, on one thread, with stdout and stderr as text pipes."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def hashes(folder: Path) -> dict[str, int]:
    """A hash of every file and link under a folder, to see that nothing changed."""
    return {
        str(path.relative_to(folder)): hash(os.readlink(path) if path.is_symlink() else path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
