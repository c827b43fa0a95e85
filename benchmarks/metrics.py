"""Ranks of 10 000 queries among 10 000 candidates: time and memory of twinreel, of a full sort, of the old formula.

    python benchmarks/metrics.py                      # Linux only; two minutes on two cores

Each query has one right candidate, the diagonal of a random float32 matrix; all methods must give the same ranks. The
targets for `retrieval_ranks`, else the exit code is 1: at least 10 times faster than `torch.sort` of every row, and at
most 20 MB beside the matrix.

Time: all methods in turn, in one process, over several rounds, with the threads that torch takes by itself (`np.sort`
takes one); the ratio is the median over the rounds. `embedding_ranks` also computes the scores, in float64 (D = 512).

Memory: each method in a fresh process, the median of three. The input exists and the method has run once, with 64
queries and candidates; then the kernel's high-water mark of the resident memory is reset, and the extra memory is what
the next run adds to it: copies of the matrix, indices, flags, ranks, and what the allocator and the matrix product keep
for later; not the input, the list of positives or the libraries. MB are 2**20 bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import numpy as np
import torch
from torch import Tensor

from twinreel.metrics import embedding_ranks, retrieval_ranks

WIDTH = 512  # D of the embeddings
FASTER, MEGABYTES = 10, 20  # the targets
OURS, SORT, OLD, EMBEDDINGS = "retrieval_ranks", "torch_sort", "numpy_formula", "embedding_ranks"
NAMES = {
    OURS: "`retrieval_ranks`",
    SORT: "full sort: `torch.sort` of each row",
    OLD: "the founding formula: `np.sort`, `where(sorted - diagonal == 0)`",
    EMBEDDINGS: f"`embedding_ranks`, D = {WIDTH}, no matrix",
}
Inputs = tuple[Tensor, ...]
Positives = Sequence[Sequence[int]]


def torch_sort(similarity: Tensor, positives: Positives) -> Tensor:
    """Sort all candidates of a query, best first, then look where the right one stands."""
    order = torch.sort(similarity, dim=1, descending=True).indices
    return torch.where(order == torch.tensor(positives))[1] + 1


def numpy_formula(similarity: Tensor, positives: Positives) -> Tensor:
    """The founding metric; right where no score of a row equals that of the diagonal, and on the diagonal only."""
    x = similarity.numpy()
    sx = np.sort(-x, axis=1)
    d = np.diag(-x)[:, None]
    return torch.from_numpy(np.where(sx - d == 0)[1] + 1)


METHODS: dict[str, Callable[..., Tensor]] = {
    OURS: retrieval_ranks, SORT: torch_sort, OLD: numpy_formula, EMBEDDINGS: embedding_ranks,
}  # fmt: skip


def make_inputs(name: str, size: int) -> Inputs:
    """A matrix (size, size), or two sets of embeddings (size, WIDTH); the same each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, WIDTH)] * 2 if name == EMBEDDINGS else [(size, size)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def diagonal(size: int) -> Positives:
    return [[position] for position in range(size)]


def high_water() -> int:
    """The most resident memory of this process since the last reset, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure_memory(name: str, size: int) -> int:
    """Bytes that one run of the method adds to this process at its peak."""
    inputs, positives = make_inputs(name, size), diagonal(size)
    small = [tensor[:64] if name == EMBEDDINGS else tensor[:64, :64].contiguous() for tensor in inputs]
    METHODS[name](*small, positives[:64])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what is resident now
    before = high_water()
    METHODS[name](*inputs, positives)
    return high_water() - before


def memory_in_fresh_processes(name: str, size: int) -> float:
    """The median of three `measure_memory`, in MB."""
    command = [sys.executable, __file__, "--size", str(size), "--memory-of", name]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True) for _ in range(3)]
    return statistics.median(int(run.stdout) for run in runs) / 2**20


def measure_seconds(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every method, a number a round; ends if two methods give different ranks for the matrix."""
    positives = diagonal(size)
    matrix, embeddings = make_inputs(OURS, size), make_inputs(EMBEDDINGS, size)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    ranks: dict[str, Tensor] = {}
    for _ in range(rounds):
        for name, method in METHODS.items():
            inputs = embeddings if name == EMBEDDINGS else matrix
            began = time.perf_counter()
            ranks[name] = method(*inputs, positives)
            seconds[name].append(time.perf_counter() - began)
    wrong = [name for name in (SORT, OLD) if not torch.equal(ranks[name].double(), ranks[OURS])]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: ranks differ from retrieval_ranks. Two equal scores, or an error.")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10_000, help="queries and candidates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--memory-of", choices=METHODS, help="only this: the extra bytes of one method, in this process"
    )
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(measure_memory(arguments.memory_of, arguments.size))
        return 0
    memory = {name: memory_in_fresh_processes(name, arguments.size) for name in METHODS}
    seconds = measure_seconds(arguments.size, arguments.rounds)
    print("| ranks | seconds (median) | times `retrieval_ranks` (lowest to highest) | extra memory, MB |")
    print("|---|---|---|---|")
    ratios = {}
    for name, title in NAMES.items():
        each = [other / ours for other, ours in zip(seconds[name], seconds[OURS], strict=True)]
        ratios[name] = statistics.median(each)
        spread = f"{ratios[name]:.1f} ({min(each):.1f} to {max(each):.1f})"
        print(f"| {title} | {statistics.median(seconds[name]):.2f} | {spread} | {memory[name]:.1f} |")
    reached = ratios[SORT] >= FASTER and memory[OURS] <= MEGABYTES
    target = f"{FASTER} times faster than the full sort, at most {MEGABYTES} MB"
    print(f"\n{'reached' if reached else 'missed'}: {target} ({torch.get_num_threads()} threads)")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
