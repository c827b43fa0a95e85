"""Processes that work for a run: signals to the whole group are for the run, and they end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

__all__ = ["RUN_SIGNALS", "end_with_the_run", "signals_held"]

RUN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def signals_held(signals: Collection[signal.Signals] = RUN_SIGNALS) -> Iterator[None]:
    """A process started here is born with these signals blocked: one to the whole group does not end it.

    A reader that has begun ignores them (`loader._start_worker`, `per_file._serve`); before, it may still be importing.
    What arrives for this process meanwhile is delivered at the end.
    """
    resource_tracker.ensure_running()  # when it starts later, it unblocks SIGTERM and SIGINT here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_the_run() -> None:
    """From now on this process ends with the one that it works for; a fork server ends with its last process."""
    threading.Thread(target=_wait_for_its_end, daemon=True).start()


def _wait_for_its_end() -> None:
    run = multiprocessing.parent_process()
    if run is not None:
        run.join()
        os.kill(os.getpid(), signal.SIGKILL)
