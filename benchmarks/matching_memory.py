"""What end-to-end training of ClipBERT holds: memory of a training step by the number of frames, and its slope.

    python benchmarks/matching_memory.py                             # Linux; --model clipbert_tiny, --size 448, ...

A step is forward, loss and backward of V videos (2) with C clips (1, 2, 4, 8) of 2 frames each and R texts a video (2:
one that matches, one that does not) of 20 tokens, in float32 with random weights, with and without
`train.activation_checkpointing`. So 2 videos x 8 clips x 2 frames are 32 frames.

Extra memory is the highest resident size of a fresh process during the step, less the resident size just before.
Before are: the imports, a step of small pictures (thread pools and libraries), the weights, their zeroed `.grad` and
the pixels. So what grows is what backward needs. The slope is that of the line of least squares over the numbers of
frames: what one more frame costs, its half of a clip's pairs in BERT included. What an optimizer keeps (twice the
weights) and the readers are beside it. A first step of each is timed; it is one step of a busy machine, no more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from twinreel.losses import match_cross_entropy
from twinreel.models import create_model
from twinreel.models.clipbert import ClipBert
from twinreel.models.training_modes import checkpoint_activations

NUM_FRAMES = 2  # of a clip


def status_megabytes(name: str) -> float:
    """A size of this process as the kernel has it, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


def make_batch(videos: int, clips: int, texts: int, size: int, num_words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels (V, 3, C * 2, S, S), word ids (V, R, 20) of full length, and targets (V, R)."""
    pixels = torch.randn(videos, 3, clips * NUM_FRAMES, size, size)
    tokens = torch.randint(1, num_words, (videos, texts, 20))
    targets = torch.zeros(videos, texts)
    targets[:, 0] = 1
    return pixels, tokens, targets


def step(model: ClipBert, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Forward, loss, backward; gradients add up in `.grad`."""
    pixels, tokens, targets = batch
    match_cross_entropy(model(pixels, tokens), targets).backward()


def measure(arguments: argparse.Namespace, clips: int, checkpointing: bool) -> dict[str, float]:
    """Extra MB and seconds of one step; to be called in a fresh process."""
    torch.manual_seed(0)
    model = create_model(arguments.model)
    assert isinstance(model, ClipBert) and model.preprocessing.num_frames == NUM_FRAMES
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    num_words = model.transformer.bert.embeddings.word_embeddings.num_embeddings
    step(model, make_batch(1, 1, arguments.texts, 64, num_words))
    batch = make_batch(arguments.videos, clips, arguments.texts, arguments.size, num_words)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest size so far
    before, began = status_megabytes("VmRSS"), time.perf_counter()
    step(model, batch)
    seconds = time.perf_counter() - began
    return {"extra_megabytes": status_megabytes("VmHWM") - before, "before_megabytes": before, "seconds": seconds}


def measure_in_new_process(arguments: argparse.Namespace, clips: int, checkpointing: bool) -> dict[str, float]:
    options = [f"--{name}={getattr(arguments, name)}" for name in ("model", "videos", "texts", "size")]
    command = [sys.executable, __file__, *options, "--one", str(clips), str(int(checkpointing))]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def line(xs: list[int], ys: list[float]) -> tuple[float, float]:
    """Slope and start of the line of least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    return slope, mean_y - slope * mean_x


def print_table(arguments: argparse.Namespace) -> None:
    """Each measurement as it comes, then the two lines."""
    print(
        f"{arguments.model}, {arguments.videos} videos, {NUM_FRAMES} frames a clip at {arguments.size} pixels, "
        f"{arguments.texts} texts a video, float32, {torch.get_num_threads()} threads\n"
    )
    print("| frames | clips a video | checkpointing | extra MB | before MB | seconds |\n|---|---|---|---|---|---|")
    frames = [arguments.videos * clips * NUM_FRAMES for clips in arguments.clips]
    lines = {}
    for checkpointing in (False, True):
        found = []
        for clips, count in zip(arguments.clips, frames, strict=True):
            one = measure_in_new_process(arguments, clips, checkpointing)
            found.append(one["extra_megabytes"])
            print(
                f"| {count} | {clips} | {'yes' if checkpointing else 'no'} | {found[-1]:.0f} "
                f"| {one['before_megabytes']:.0f} | {one['seconds']:.1f} |",
                flush=True,
            )
        lines[checkpointing] = line(frames, found)
    for checkpointing, (slope, start) in lines.items():
        print(f"\n{'with' if checkpointing else 'without'} checkpointing: {slope:.1f} MB a frame, {start:+.0f} MB")
    print(f"\nslope with checkpointing: {lines[True][0] / lines[False][0]:.2f} of that without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="clipbert_base", help="clipbert_base, clipbert_tiny or clipbert_small")
    parser.add_argument("--videos", type=int, default=2, help="of a batch")
    parser.add_argument("--texts", type=int, default=2, help="of a video")
    parser.add_argument("--clips", type=int, nargs="+", default=[1, 2, 4, 8], help="of a video; at least two numbers")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--one", type=int, nargs=2, metavar=("CLIPS", "CHECKPOINTING"), help="only this one, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.one[0], bool(arguments.one[1]))))
    elif len(set(arguments.clips)) < 2:
        parser.error("--clips needs two different numbers for a slope")
    else:
        print_table(arguments)


if __name__ == "__main__":
    main()
