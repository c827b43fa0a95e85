"""Run a function in several gloo processes on this machine, as torchrun would start them."""

import multiprocessing
import os
import pickle
import socket
import traceback

import torch

from twinreel.distributed import process_group

TIMEOUT_SECONDS = 240


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(num_processes, work, *args):
    """What `work(*args)` returns in each process of a group, by rank.

    Raises:
        AssertionError: with the tracebacks of the processes that failed.
    """
    context = multiprocessing.get_context("fork")  # no second import of torch: tests hold no threads
    results, port = context.Queue(), free_port()
    started = [
        context.Process(target=_work, args=(rank, num_processes, port, results, work, args))
        for rank in range(num_processes)
    ]
    for process in started:
        process.start()
    told = {}
    try:
        for _ in started:
            rank, ok, value = results.get(timeout=TIMEOUT_SECONDS)
            assert ok, f"process {rank}:\n{value}"
            told[rank] = pickle.loads(value)
    finally:
        for process in started:
            process.join(5 if len(told) == num_processes else 0.1)
            process.kill()
            process.join()
    return [told[rank] for rank in range(num_processes)]


def _work(rank, num_processes, port, results, work, args):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        if num_processes == 1:
            del os.environ["WORLD_SIZE"]
        with process_group(torch.device("cpu")):
            results.put((rank, True, pickle.dumps(work(*args))))  # bytes: a tensor would be shared memory
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
