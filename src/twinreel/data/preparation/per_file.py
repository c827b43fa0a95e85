"""Work on many files in processes of its own, so that a file that ends or hangs a decoder costs nothing but itself.

A process has one file at a time. Where it dies or gives no answer in time, that file is named, and another process
takes its place.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from twinreel.data.processes import end_with_the_run, signals_held

__all__ = ["Died", "each_file"]

_PRELOAD = "twinreel.data.preparation.inspection"
_LOOK_SECONDS = 1.0  # between looks at the clock while nothing is answered


@dataclass(frozen=True, slots=True)
class Died:
    """In place of a result: why there is none."""

    reason: str


@dataclass(slots=True)
class _Worker:
    process: Any
    connection: Connection
    index: int  # of the item that it works on
    since: float


def each_file(
    work: Callable[[Any], Any], items: Sequence[Any], *, num_workers: int, most_seconds: float
) -> Iterator[tuple[int, Any]]:
    """(index, result) of `work` on each item, in the order in which they are done.

    Args:
        work: a function of a module, called in other processes.
        items: what it is called with, one at a time; can be pickled.
        num_workers: processes, 1 or more.
        most_seconds: that one item may take.

    Yields a `Died` as the result where the process ended, took too long or raised.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([_PRELOAD])  # imported once, not by each process
    waiting = iter(range(len(items)))
    workers: list[_Worker] = []
    try:
        for index in waiting:
            workers.append(_start(context, work, items, index))
            if len(workers) >= num_workers:
                break
        while workers:
            answering = {id(c) for c in wait([worker.connection for worker in workers], timeout=_LOOK_SECONDS)}
            for worker in list(workers):
                late = time.monotonic() - worker.since > most_seconds
                if id(worker.connection) not in answering and not late:
                    continue
                index = worker.index
                result, alive = _answer(worker) if not late else (_late(most_seconds), False)
                following = next(waiting, None)
                if not alive or following is None:
                    workers.remove(worker)
                    _stop(worker)
                    if following is not None:
                        workers.append(_start(context, work, items, following))
                else:
                    worker.index, worker.since = following, time.monotonic()
                    worker.connection.send(items[following])
                yield index, result
    finally:
        for worker in workers:
            _stop(worker)


def _start(context: Any, work: Callable[[Any], Any], items: Sequence[Any], index: int) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    with signals_held((signal.SIGINT,)):  # a fork server that starts here serves others too: it must end on SIGTERM
        process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    ours.send(items[index])
    return _Worker(process, ours, index, time.monotonic())


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    end_with_the_run()  # also where it is busy with a file
    try:
        while True:
            connection.send(_result(work, connection.recv()))
    except (EOFError, ConnectionError):  # the parent has enough, or is no more
        return


def _result(work: Callable[[Any], Any], item: Any) -> Any:
    try:
        return work(item)
    except Exception as error:  # one file must not lose the others; the text says whose mistake it is
        return Died(f"unexpected {type(error).__name__}: {error} (please report this as a bug in twinreel)")


def _answer(worker: _Worker) -> tuple[Any, bool]:
    """The result, and whether the process can go on."""
    try:
        return worker.connection.recv(), True
    except (EOFError, ConnectionError):
        worker.process.join(5)
        code = worker.process.exitcode
    if code is None or code >= 0:
        return Died(f"reading it ended the process (exit code {code})"), False
    name = signal.Signals(-code).name
    hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return Died(f"reading it ended the process ({name}{hint})"), False


def _late(most_seconds: float) -> Died:
    return Died(f"no answer in {most_seconds:g} s; reading it was given up")


def _stop(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.join(0.2)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
