"""What the processes of `each_file` do in tests: answer, or fail in every way there is."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from twinreel.data.preparation import inspection

_inspect = inspection._inspect


def work(item: str) -> tuple[str, int]:
    """The item in capitals and the process, or what its name says."""
    if item.startswith("abort"):
        os.abort()
    if item.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if item.startswith("exit"):
        os._exit(3)
    if item.startswith("hang"):
        time.sleep(60)
    if item.startswith("raise"):
        raise RuntimeError("no such luck")
    return item.upper(), os.getpid()


def inspect_or_abort(task: tuple[str, Any], *, deep: bool) -> Any:
    """As the real one, but for a video with `abort` in its name: a decoder that ends its process."""
    if "abort" in task[0]:
        os.abort()
    if "hang" in task[0]:
        time.sleep(60)
    return _inspect(task, deep=deep)
