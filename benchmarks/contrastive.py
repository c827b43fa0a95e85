"""What MIL-NCE costs: extra memory and time of the loss, forward and backward, against the founding form.

    python benchmarks/contrastive.py --sizes 1024 2048 4096          # Linux; --json for programs

The founding form is written from its formula: with x = V T^T viewed as (B, B, K), the mean over clips i of

    logsumexp of all x[i, j, k] and all x[j, i, k]  -  logsumexp over k of (x times an identity mask, summed over j)

Compared with it: `twinreel.losses.milnce(positives_twice=True)`, which has the same value and gradients, and the share
of one of several processes, `own` being its block of clips.

Extra memory is the highest resident size of a fresh process during one forward and backward pass, less the resident
size just before. Before are: the imports, a pass with 64 clips (thread pools and libraries), the embeddings and their
zeroed `.grad`. So everything the loss holds counts, the gradients before they are added to `.grad` too. Times are the
medians of passes that take turns within one process, so that whatever else runs on the machine meets all alike; they
need the memory of the founding form.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import torch
from torch import Tensor

from twinreel.losses import milnce

NUM_CANDIDATES, EMBEDDING_SIZE, NUM_PROCESSES = 4, 512, 8
Loss = Callable[[Tensor, Tensor], Tensor]
Result = dict[str, float]


def founding(videos: Tensor, texts: Tensor) -> Tensor:
    num_clips = videos.shape[0]
    x = (videos @ texts.T).view(num_clips, num_clips, -1)
    nominator = x * torch.eye(num_clips)[:, :, None]
    nominator = nominator.sum(dim=1).logsumexp(dim=1)
    denominator = torch.cat((x, x.permute(1, 0, 2)), dim=1).view(num_clips, -1).logsumexp(dim=1)
    return (denominator - nominator).mean()


def ours(videos: Tensor, texts: Tensor) -> Tensor:
    return milnce(videos, texts, positives_twice=True)


def share(videos: Tensor, texts: Tensor) -> Tensor:
    own = torch.arange(len(videos) // NUM_PROCESSES)
    return milnce(videos, texts, positives_twice=True, own=own)


FORMS: dict[str, Loss] = {"founding": founding, "ours": ours, "share": share}


def make_embeddings(num_clips: int) -> tuple[Tensor, Tensor]:
    """Leaves with `.grad`, scores of about -3 to 3: the sums have many terms that matter."""
    generator = torch.Generator().manual_seed(num_clips)
    videos = torch.randn(num_clips, EMBEDDING_SIZE, generator=generator)
    texts = torch.randn(num_clips * NUM_CANDIDATES, EMBEDDING_SIZE, generator=generator)
    for embeddings in (videos, texts):
        embeddings.mul_(EMBEDDING_SIZE**-0.25).requires_grad_().grad = torch.zeros_like(embeddings)
    return videos, texts


def status_megabytes(name: str) -> float:
    """A size of this process as the kernel has it, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def measure_memory(form: str, num_clips: int) -> float:
    """Extra memory of one pass in MB; to be called in a fresh process."""
    loss = FORMS[form]
    loss(*make_embeddings(64)).backward()
    videos, texts = make_embeddings(num_clips)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest size so far
    before = status_megabytes("VmRSS")
    loss(videos, texts).backward()
    return status_megabytes("VmHWM") - before


def measure_memory_in_new_process(form: str, num_clips: int) -> float:
    command = [sys.executable, __file__, "--memory", form, str(num_clips)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_once(form: str, videos: Tensor, texts: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    began = time.perf_counter()
    FORMS[form](videos, texts).backward()
    return time.perf_counter() - began


def measure_times(num_clips: int, repeats: int) -> dict[str, float]:
    """Median seconds by form, after one pass that is not counted."""
    videos, texts = make_embeddings(num_clips)
    seconds = [[run_once(form, videos, texts) for form in FORMS] for _ in range(repeats + 1)]
    return {
        form: statistics.median(column)
        for form, column in zip(FORMS, list(zip(*seconds[1:], strict=True)), strict=True)
    }


def gradient_difference(num_clips: int) -> float:
    """The largest |ours - founding| over the largest |founding|, of both embeddings' gradients."""
    gradients = {}
    for form in ("founding", "ours"):
        videos, texts = make_embeddings(num_clips)
        FORMS[form](videos, texts).backward()
        gradients[form] = (videos.grad, texts.grad)
    pairs = zip(*gradients.values(), strict=True)
    return max(float((ours - founding).abs().max() / founding.abs().max()) for founding, ours in pairs)


def measure(num_clips: int, repeats: int) -> dict[str, Result]:
    seconds = measure_times(num_clips, repeats)
    difference = gradient_difference(num_clips)
    return {
        form: {
            "extra_megabytes": measure_memory_in_new_process(form, num_clips),
            "seconds": seconds[form],
            "time_ratio": seconds[form] / seconds["founding"],
        }
        | ({"gradient_difference": difference} if form == "ours" else {})
        for form in FORMS
    }


def print_rows(num_clips: int, results: dict[str, Result]) -> None:
    names = {"founding": "founding form", "ours": "milnce", "share": f"milnce, 1 of {NUM_PROCESSES} processes"}
    for form, result in results.items():
        difference = f"{result['gradient_difference']:.1e}" if "gradient_difference" in result else ""
        print(
            f"| {num_clips} | {names[form]} | {result['extra_megabytes']:.0f} | {result['seconds']:.3f} "
            f"| {result['time_ratio']:.2f} | {difference} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096], help="clips of the global batch")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each form that are timed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--memory", nargs=2, metavar=("FORM", "SIZE"), help="only print the extra MB of one pass")
    arguments = parser.parse_args()
    if arguments.memory:
        print(measure_memory(arguments.memory[0], int(arguments.memory[1])))
        return
    if not arguments.json:
        print(f"K = {NUM_CANDIDATES}, D = {EMBEDDING_SIZE}, float32, {torch.get_num_threads()} threads\n")
        print(
            "| B | form | extra MB | seconds | of the founding time | gradient difference |\n|---|---|---|---|---|---|"
        )
    results = {}
    for num_clips in arguments.sizes:
        results[str(num_clips)] = measure(num_clips, arguments.repeats)
        if not arguments.json:
            print_rows(num_clips, results[str(num_clips)])
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
