"""What several processes cost: steps of 1 and 2 processes on this machine, and a projection to 64 GPUs.

    python benchmarks/scale.py                     # or TWINREEL_TEST_DATA=CLIPS for decoding; about a minute

Measured is the whole step of the demo's recipe on batches that lie in memory: forward, loss, backward, exchange,
optimizer. The parent is the single process, its two children the group; they take turns, each with one thread, so that
whatever else runs on the machine meets all alike. The learning rate is 0, so that every step does the same sums. What
communication costs is the time inside collectives, waiting for the other process included, and, for the exchange of
gradients that DDP does during backward, the difference to the same step under `no_sync`.

The projection is arithmetic, and no GPU is used: bytes and FLOPs are counted, decoding is measured, links and the use
that a GPU makes of its peak are assumed and stated.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported
os.environ["OMP_NUM_THREADS"] = "1"  # one process and each of two have a core

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from twinreel.data.clip import Batch
from twinreel.data.dataset import ClipDataset
from twinreel.data.decode import probe
from twinreel.data.loader import load_batches
from twinreel.data.sources import load_rows
from twinreel.distributed import exchange, process_group, share_buffers, world
from twinreel.gradients import global_gradient
from twinreel.models import MODELS
from twinreel.monitors import embedding_statistics
from twinreel.parts import Parts, build_parts, for_device, training_rules
from twinreel.recipe import Recipe, load_recipe

CPU = torch.device("cpu")
CLIPS = 32  # of one process, and of each of two; or of two together
NUM_VIDEOS, NUM_DECODED = 128, 61
NO_SYNC = ", no_sync"
LARGE = "milnce_s3dg_howto100m"
NUM_TOLD = 5  # numbers that the loop exchanges after every step: loss, repeated frames, waiting, two for signals
NUM_WORDS = 66_251  # assumed: the founding word list and its padding row
NUM_GPUS, GPUS_A_NODE = 64, 8
PEAK_FLOPS = 312e12  # assumed: an A100 in bf16
UTILIZATIONS = (0.05, 0.30)
NODE_LINKS = {"200 Gbit/s a node": 25e9, "200 Gbit/s a GPU": 200e9}  # bytes/s out of a node and into it
LINK_USE = 0.7
GPU_HOP_SECONDS, CPU_HOP_SECONDS = 5e-6, 50e-6  # of a small message to the next process: NCCL, gloo over TCP
BUCKET_BYTES = 25 * 2**20  # DDP's
OF_DDP = ("parameters' gradients", "who took part")


class Traffic(NamedTuple):
    """A collective of every step. `payload`: bytes in one process; `sent`: by each process around a ring."""

    payload: int
    sent: float
    hops: int


def embedding_size(recipe: Recipe) -> int:
    return int(recipe.model.options["embedding_size"])


def count_traffic(recipe: Recipe, model: nn.Module, processes: int, clips: int) -> dict[str, Traffic]:
    """What a step sends, by kind, with `clips` a process."""
    candidates, others = recipe.task.num_candidates, processes - 1
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    buffers = [b.numel() for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    embedded = clips * (1 + candidates) * embedding_size(recipe) * 4
    gathers = {
        "embeddings": embedded,
        "embeddings' gradients": embedded,
        "facts": clips * (1 + 2 * candidates) * 8,
        "exchange": NUM_TOLD * 8,
    }
    sums = {
        "batch norms": sum(buffers) * 4,
        "parameters' gradients": sum(trained) * 4,
        "who took part": len(trained) * 4,
    }
    counted = {kind: Traffic(payload, payload * others, others) for kind, payload in gathers.items()}
    return counted | {
        kind: Traffic(payload, payload * 2 * others / processes, 2 * others) for kind, payload in sums.items()
    }


@dataclass(slots=True)
class Collectives:
    """Seconds and payload by kind since the last look. DDP's own exchange does not pass through torch.distributed."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    payload: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def watch(self) -> None:
        """Put a clock around the collectives of this process; what they carry is told by its type."""
        gathers = {torch.float32: "embeddings", torch.int64: "facts", torch.float64: "exchange"}
        self._wrap("all_gather", lambda arguments: (gathers[arguments[1].dtype], arguments[1]))
        self._wrap("reduce_scatter", lambda arguments: ("embeddings' gradients", arguments[0]))
        self._wrap("all_reduce", lambda arguments: ("batch norms", arguments[0]))

    def _wrap(self, name: str, tell: Callable[[Any], tuple[str, Tensor]]) -> None:
        function = getattr(dist, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            kind, tensor = tell(arguments)
            self.seconds[kind] += time.perf_counter() - began
            self.payload[kind] += tensor.nbytes
            return result

        setattr(dist, name, timed)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """What was seen, and forget it."""
        seen = dict(self.seconds), dict(self.payload)
        self.seconds.clear()
        self.payload.clear()
        return seen


@dataclass(slots=True, kw_only=True)
class Side:
    """A recipe, built and with its first batch in memory."""

    recipe: Recipe
    parts: Parts
    batches: list[Batch]

    @classmethod
    def build(cls, root: str, clips: int) -> Side:
        """Of `clips` in each of the processes there are."""
        batch = f"train.global_batch_size={clips * world().size}"
        recipe = load_recipe("demo", [f"data.root={root}", f"data.num_videos={NUM_VIDEOS}", "eval.split=null", batch])
        recipe = for_device(recipe, CPU)
        parts = build_parts(recipe, CPU)
        for group in parts.optimizer.param_groups:
            group["lr"] = 0.0
        dataset = ClipDataset(parts.rows, training_rules(recipe, parts.model, parts.rows))
        keys = parts.plan.micro_batches(0, 1, parts.shares, world().rank)
        return cls(recipe=recipe, parts=parts, batches=list(load_batches(dataset, keys, num_workers=0)))

    def step(self, collectives: Collectives, exchanged: bool) -> dict[str, float]:
        """Seconds of a training step as the loop does it, of its collectives, and of the monitors after it."""
        parts, began = self.parts, time.perf_counter()
        parts.train_mode()
        with nullcontext() if exchanged else parts.whole.no_sync():  # type: ignore[operator]
            result = global_gradient(parts, self.recipe, self.batches, 0)
        exchange([result.loss, *[0.0] * (NUM_TOLD - 1)])
        share_buffers(parts.model, parts.norms)
        torch.nn.utils.get_total_norm([p.grad for p in parts.parameters if p.grad is not None]).item()
        parts.optimizer.step()
        ended, seen = time.perf_counter(), result.compared[-1]
        embedding_statistics(seen.video, seen.text, mask=seen.facts.mask, valid=seen.facts.valid)
        looked = time.perf_counter()
        seconds, sent = collectives.take()
        if sent:
            self.check_traffic(sent)
        return seconds | {"step": ended - began, "monitors": looked - ended}

    def check_traffic(self, sent: dict[str, int]) -> None:
        """The bytes that the projection counts must be those that a step sends here."""
        counted = count_traffic(self.recipe, self.parts.model, world().size, len(self.batches[0].ids))
        wanted = {kind: traffic.payload for kind, traffic in counted.items() if kind not in OF_DDP}
        if wanted != sent:
            raise SystemExit(f"bytes of a step: counted {wanted}, sent {sent}")


def follow(rank: int, port: int, root: str, pipe: Connection) -> None:
    """One of two processes: does the steps that the parent asks for and tells their seconds."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    collectives = Collectives()
    with process_group(CPU):
        sides = {clips: Side.build(root, clips) for clips in (CLIPS // 2, CLIPS)}
        collectives.watch()
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            clips, exchanged = asked
            dist.barrier()
            pipe.send(sides[clips].step(collectives, exchanged))


def measure(root: str, num_steps: int) -> dict[str, list[dict[str, float]]]:
    """Steps by kind; they take turns, and the first of each is not counted."""
    sides, nobody = {clips: Side.build(root, clips) for clips in (CLIPS, CLIPS // 2)}, Collectives()
    context, pipes, children = mp.get_context("spawn"), [], []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for rank in range(2):
        mine, theirs = context.Pipe()
        pipes.append(mine)
        children.append(context.Process(target=follow, args=(rank, port, root, theirs), daemon=True))
        children[-1].start()
        theirs.close()  # so that the end of a child is an error here, not a wait
    for pipe in pipes:
        pipe.recv()
    found = defaultdict(list)
    for number in range(num_steps + 1):
        for clips, side in sides.items():
            found[f"1 x {clips}"].append(side.step(nobody, exchanged=True))
            for exchanged in (True, False) if number % 2 else (False, True):
                kind = f"2 x {clips}" + ("" if exchanged else NO_SYNC)
                found[kind].append(step_of_both(pipes, clips, exchanged))
    for pipe, child in zip(pipes, children, strict=True):
        pipe.send(None)
        child.join()
    return {kind: steps[1:] for kind, steps in found.items()}


def step_of_both(pipes: list[Connection], clips: int, exchanged: bool) -> dict[str, float]:
    """Seconds: the step is the slower one's, all else the mean."""
    for pipe in pipes:
        pipe.send((clips, exchanged))
    both = [pipe.recv() for pipe in pipes]
    means = {key: statistics.mean(own[key] for own in both) for key in both[0]}
    return means | {"step": max(own["step"] for own in both)}


def print_measured(found: dict[str, list[dict[str, float]]]) -> None:
    print_head(
        "processes x clips, step in ms, clips/s, to one process, gathers in ms, gradients in ms, batch norms in ms, "
        "exchange in ms, communication, monitors in ms a line, of the time of 10 steps"
    )
    medians = {
        kind: {key: 1e3 * statistics.median(step[key] for step in steps) for key in steps[0]}
        for kind, steps in found.items()
    }
    one = CLIPS / medians[f"1 x {CLIPS}"]["step"]
    for kind in (f"1 x {CLIPS}", f"2 x {CLIPS // 2}", f"2 x {CLIPS}", f"1 x {CLIPS // 2}"):
        own, (processes, clips) = medians[kind], map(int, kind.split(" x "))
        speed, cells = processes * clips / own["step"], [""] * 5
        if processes > 1:
            pairs = zip(found[kind], found[kind + NO_SYNC], strict=True)
            gradients = 1e3 * statistics.median(step["step"] - without["step"] for step, without in pairs)
            gathers = own["embeddings"] + own["embeddings' gradients"] + own["facts"]
            spent = [gathers, gradients, own["batch norms"], own["exchange"]]
            cells = [f"{value:.1f}" for value in spent] + [f"{sum(spent) / own['step']:.1%}"]
        print(
            f"| {kind} | {own['step']:.1f} | {1e3 * speed:.1f} | {speed / one:.2f} | {' | '.join(cells)} "
            f"| {own['monitors']:.2f} | {own['monitors'] / (10 * own['step']):.2%} |"
        )


def print_head(columns: str) -> None:
    print(f"\n| {columns.replace(', ', ' | ')} |\n" + "|---" * len(columns.split(", ")) + "|")


class Flops(NamedTuple):
    """Of a clip and its captions: `forward`, and the `whole` with backward."""

    forward: int
    whole: int


def count_flops(recipe: Recipe, model: Any) -> Flops:
    """Those of a model on the meta device."""
    prep = recipe.model.preprocessing
    video = torch.empty(1, 3, prep.num_frames, prep.crop_size, prep.crop_size, device="meta")  # type: ignore[arg-type]
    words = torch.zeros(recipe.task.num_candidates, recipe.task.max_words, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        outputs = model.encode_video(video), model.encode_text(words)
        forward = counter.get_total_flops()
        torch.autograd.backward([output.sum() for output in outputs])
    return Flops(forward, counter.get_total_flops())


class Decoding(NamedTuple):
    """CPU `seconds` of each sample, and what was read."""

    seconds: list[float]
    videos: str


def measure_decoding(recipe: Recipe, model: nn.Module, data: Path | None, root: str) -> Decoding:
    """Of training samples of the large recipe, in one process."""
    if data is None:
        rows, what = load_rows("generated", root, "train", seed=0, num_videos=NUM_VIDEOS), "the demo's (give --data)"
    else:
        rows = load_rows("manifest", str(data), "train", manifest=str(data / "caption" / "items.jsonl"))
        what = "real ones"
    read, seconds, sides = training_rules(recipe, model, rows), [], []
    for row in rows[:NUM_DECODED]:
        began = time.process_time()
        if read(row, 0).fault is None:
            seconds.append(time.process_time() - began)
            info = probe(row.video)
            sides.append(min(info.height, info.width))
    return Decoding(seconds[1:], f"{what}, short side {statistics.median(sides):.0f} pixels")  # the first warms up


def measure_monitors(recipe: Recipe) -> float:
    """Median CPU seconds of one look at a global batch of the large recipe, in one thread."""
    clips, candidates, size = recipe.train.global_batch_size, recipe.task.num_candidates, embedding_size(recipe)
    generator, seconds = torch.Generator().manual_seed(0), []
    videos, texts = (torch.randn(rows, size, generator=generator) for rows in (clips, clips * candidates))
    everything = torch.ones(clips, candidates, dtype=torch.bool)
    for _ in range(11):
        began = time.process_time()
        embedding_statistics(videos, texts, mask=everything, valid=everything[:, 0])
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def num_buckets(payload: int) -> int:
    return max(1, round(payload / BUCKET_BYTES))


def transfer_seconds(traffic: dict[str, Traffic], bytes_per_second: float) -> dict[str, float]:
    """Of each kind, while nothing else goes on: a ring leaves each node once, whatever it does inside."""
    seconds = {}
    for kind, (payload, sent, hops) in traffic.items():
        hop = CPU_HOP_SECONDS if kind in ("facts", "exchange") else GPU_HOP_SECONDS
        seconds[kind] = sent / (bytes_per_second * LINK_USE) + hops * hop * num_buckets(payload)
    return seconds


def print_projection(data: Path | None, root: str) -> None:
    recipe = load_recipe(LARGE, ["data.root=/data/howto100m"])
    with torch.device("meta"):
        model = MODELS["s3dg"](embedding_size=embedding_size(recipe), num_words=NUM_WORDS).train()
    clips = recipe.train.global_batch_size // NUM_GPUS
    traffic, flops = count_traffic(recipe, model, NUM_GPUS, clips), count_flops(recipe, model)
    decoding, looking = measure_decoding(recipe, model, data, root), measure_monitors(recipe)

    print(f"\n{LARGE} on {NUM_GPUS} GPUs x {clips} clips (train.micro_batch_size={clips}). No GPU was used for this.")
    print_head("sent in a step by a GPU, its own bytes, MB sent, hops one after the other")
    for kind, (payload, sent, hops) in traffic.items():
        times = f" in {num_buckets(payload)} buckets" if num_buckets(payload) > 1 else ""
        print(f"| {kind} | {payload:,} | {sent / 1e6:.3f} | {hops}{times} |")
    print_head(
        "use of the peak, links, compute in ms, communication in ms, not hidden in ms, step in ms, of the step, of the "
        "step if nothing is hidden, clips/s a GPU, cores a GPU that decode, monitors of the time of 10 steps"
    )
    decode = statistics.mean(decoding.seconds)
    for use in UTILIZATIONS:
        for links, speed in NODE_LINKS.items():
            compute, seconds = clips * flops.whole / (PEAK_FLOPS * use), transfer_seconds(traffic, speed)
            hidden = hidden_seconds(traffic, seconds, compute * (1 - flops.forward / flops.whole))
            communication = sum(seconds.values())
            shown = communication - hidden
            step = compute + shown
            print(
                f"| {use:.0%} | {links} | {1e3 * compute:.1f} | {1e3 * communication:.1f} | {1e3 * shown:.1f} "
                f"| {1e3 * step:.1f} | {shown / step:.0%} | {communication / (compute + communication):.0%} "
                f"| {clips / step:.0f} | {clips / step * decode:.1f} | {looking / 10 / step:.1%} |"
            )
    print_assumptions(flops, sum(parameter.numel() for parameter in model.parameters()), decoding, looking)


def hidden_seconds(traffic: dict[str, Traffic], seconds: dict[str, float], backward: float) -> float:
    """How much of the gradients' exchange goes on behind backward: all but the last bucket, if there is time."""
    whole = seconds["parameters' gradients"]
    return min(backward, whole - whole / num_buckets(traffic["parameters' gradients"].payload))


def print_assumptions(flops: Flops, parameters: int, decoding: Decoding, looking: float) -> None:
    mean, longest = 1e3 * statistics.mean(decoding.seconds), 1e3 * max(decoding.seconds)
    low, high = UTILIZATIONS
    lines = [
        f"Counted: {parameters:,} parameters, all trained; {flops.forward / 1e9:.1f} GFLOP forward and "
        f"{flops.whole / 1e9:.1f} in all a clip with its captions (a multiplication and an addition are two); bytes, "
        "by the formula that every measured step above was checked with.",
        f"Measured: {mean:.1f} ms of one core a clip from file to uint8 frames (mean of {len(decoding.seconds)}, "
        f"longest {longest:.0f}; videos: {decoding.videos}); {1e3 * looking:.1f} ms of one core a look of the monitors "
        "at a global batch, while all processes wait.",
        f"Assumed: {PEAK_FLOPS / 1e12:.0f} TFLOP/s at most (A100, bf16), of which {low:.0%} or {high:.0%} is had, as "
        "narrow 3-D convolutions and batch norms wait for memory: everything else hangs on this. A vocabulary of "
        f"{NUM_WORDS:,}.",
        f"Assumed: {GPUS_A_NODE} GPUs a node; rings leave each node once, and NVLink inside is faster; {LINK_USE:.0%} "
        f"of the links' speed is had; a hop takes {1e6 * GPU_HOP_SECONDS:.0f} us between GPUs and "
        f"{1e6 * CPU_HOP_SECONDS:.0f} us between CPUs (facts, exchange).",
        "Assumed: gradients are exchanged while backward goes on, but for the last of DDP's buckets of 25 MiB; nothing "
        "else is hidden. No process is slower than another, and no step waits for videos: with fewer cores than that, "
        "decoding decides.",
    ]
    print("\n" + "\n".join(textwrap.fill(line, 118, initial_indent="- ", subsequent_indent="  ") for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each kind")
    parser.add_argument("--data", type=Path, default=os.environ.get("TWINREEL_TEST_DATA"), help="real clips to decode")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before; a process has one thread; gloo, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as root:
        print_measured(measure(root, arguments.steps))
        print_projection(arguments.data, root)


if __name__ == "__main__":
    main()
