"""Signals to a whole group of processes are for the one that the user started, not for its readers."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

__all__ = ["RUN_SIGNALS", "signals_held"]

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
