"""What readers are worth: clips a second with 0, 1 and 2 of them, processes against threads, and memory for each.

    python benchmarks/loader.py                    # about three minutes; --data CLIPS for real videos

Clips are read as training reads them (16 frames at 5 a second, the largest square, 224 x 224) from natural-like H.264
files, and compared with one thread that does nothing but read clips. The ways take turns, so that whatever else runs on
the machine meets all alike; given are the best round, and CPU time, which a busy machine stretches less: "a core each"
is the rate, in that of one thread, which the CPU time allows where every reader has a core. Starting the readers is
left out of the rates, but not of the CPU time (1 to 3 ms a clip here).

The second table is of libavcodec alone, on the spans that these clips need: does it gain by threads of its own? The
third is memory: of a reader that decodes, and of one that holds the rows of a large collection.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported
os.environ["OMP_NUM_THREADS"] = "1"

import av
import torch
from av.codec.context import ThreadType
from torch.utils.data import DataLoader

from natural_videos import Movie, make_movies
from twinreel.data.clip import Batch, Caption, Clip, Sample
from twinreel.data.dataset import ClipDataset
from twinreel.data.loader import collate, load_batches
from twinreel.data.training_sample import TrainingRules
from twinreel.models.preprocessing import Preprocessing

MOVIES = (
    Movie("h264", 320, 240, 250, 30, 20),
    Movie("h264", 320, 240, 16, 30, 20),
    Movie("h264", 1280, 720, 250, 25, 12),
    Movie("h264", 1280, 720, 16, 25, 12),
)
CLIPS = {320: 48, 1280: 16}  # a round, by width
BATCH = 4
PREP = Preprocessing(num_frames=16, frame_rate=5.0, crop_size=224)
RULES = TrainingRules(preprocessing=PREP, seed=1, num_candidates=1, crop="square")
STARTS: tuple[Literal["fork", "spawn", "forkserver"], ...] = ("fork", "spawn", "forkserver")
MEMORY = ("Rss", "Pss", "Private_Dirty", "Private_Clean")


def row_of(path: Path) -> Clip:
    return Clip(id="a", video=str(path), captions=(Caption(text="x"),))


def cpu_seconds() -> float:
    """Of this process and of those that it has seen end."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def of_batches(batches: Iterable[Batch], skip: int) -> tuple[float, int]:
    """Clips a second after the first `skip` batches, and how many there were in all."""
    arrivals, counts = [], []
    for batch in batches:
        arrivals.append(time.perf_counter())
        counts.append(len(batch.ids))
    return sum(counts[skip:]) / (arrivals[-1] - arrivals[skip - 1]), sum(counts)


Way = Callable[[Clip, int], tuple[float, int]]


def one_thread(row: Clip, count: int) -> tuple[float, int]:
    began = time.perf_counter()
    for epoch in range(count):
        RULES(row, epoch)
    return count / (time.perf_counter() - began), count


def threads(number: int) -> Way:
    def read(row: Clip, count: int) -> tuple[float, int]:
        with ThreadPoolExecutor(number) as pool:
            list(pool.map(lambda epoch: RULES(row, epoch), range(number)))
            began = time.perf_counter()
            list(pool.map(lambda epoch: RULES(row, epoch), range(count)))
            return count / (time.perf_counter() - began), count + number

    return read


def readers(number: int) -> Way:
    def read(row: Clip, count: int) -> tuple[float, int]:
        first = max(1, number) * BATCH  # of each reader one batch, which is not counted
        keys = [[(epoch, 0) for epoch in range(at, at + BATCH)] for at in range(0, count + first, BATCH)]
        with closing(load_batches(ClipDataset([row], RULES), keys, num_workers=number)) as batches:
            return of_batches(batches, max(1, number))

    return read


WAYS: dict[str, Way] = {
    "one thread": one_thread,
    "loader, 0 readers": readers(0),
    "loader, 1 reader": readers(1),
    "loader, 2 readers": readers(2),
    "2 threads": threads(2),
}
CORES = {"one thread": 1, "loader, 0 readers": 1, "loader, 1 reader": 1, "loader, 2 readers": 2}


def measure_rates(paths: dict[Movie, Path], rounds: int) -> None:
    """Clips a second of every way on every file."""
    print("| file | way | clips/s | of one thread | CPU ms a clip | a core each |\n|---|---|---|---|---|---|")
    for movie, path in paths.items():
        count, row = CLIPS[movie.width], row_of(path)
        RULES(row, 0)
        best = dict.fromkeys(WAYS, 0.0)
        cpu = dict.fromkeys(WAYS, float("inf"))
        for _ in range(rounds):
            for name, way in WAYS.items():
                began = cpu_seconds()
                rate, clips = way(row, count)
                best[name] = max(best[name], rate)
                cpu[name] = min(cpu[name], (cpu_seconds() - began) / clips)
        for name in WAYS:
            share = best[name] / best["one thread"]
            cores = f"{CORES[name] * cpu['one thread'] / cpu[name]:.2f}" if name in CORES else "-"
            cells = f"{movie.name} | {name} | {best[name]:.1f} | {share:.2f} | {1e3 * cpu[name]:.1f} | {cores}"
            print(f"| {cells} |", flush=True)


def decode_span(path: Path, start: float, kind: ThreadType, number: int) -> None:
    """Open, seek, and decode the frames of one clip."""
    with av.open(str(path)) as container:
        video: Any = container.streams.video[0]
        video.codec_context.thread_type, video.codec_context.thread_count = kind, number
        container.seek(int(start / video.time_base), stream=video)
        for frame in container.decode(video):
            if frame.time >= start + PREP.clip_seconds:
                break


def measure_codec_threads(paths: dict[Movie, Path], rounds: int) -> None:
    """Clips of libavcodec alone, with threads of its own."""
    kinds = {"1 thread": (ThreadType.NONE, 1), "2 frame threads": (ThreadType.FRAME, 2),
             "2 slice threads": (ThreadType.SLICE, 2)}  # fmt: skip
    print("\n| file | libavcodec | ms a clip | of 1 thread | CPU ms a clip |\n|---|---|---|---|---|")
    for movie, path in paths.items():
        starts = [0.5 + at * (movie.seconds - 4.5) / 7 for at in range(8)]
        best = {name: (float("inf"), float("inf")) for name in kinds}
        for _ in range(rounds):
            for name, (kind, number) in kinds.items():
                began, cpu = time.perf_counter(), time.process_time()
                for start in starts:
                    decode_span(path, start, kind, number)
                took = (time.perf_counter() - began) / len(starts), (time.process_time() - cpu) / len(starts)
                best[name] = tuple(map(min, best[name], took))  # type: ignore[assignment]
        for name, (wall, used) in best.items():
            share = wall / best["1 thread"][0]
            print(f"| {movie.name} | {name} | {1e3 * wall:.1f} | {share:.2f} | {1e3 * used:.1f} |", flush=True)


def memory_mb(pid: int) -> dict[str, float]:
    """Resident, proportional and private memory of a process, MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {name: int(value.split()[0]) / 1024 for name, _, value in (line.partition(":") for line in lines)}
    return {name: values[name] for name in MEMORY}


def own_readers() -> list[int]:
    """Process ids of the readers of this process, those of a fork server included."""
    parents = {int(pid): int((Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[1])
               for pid in os.listdir("/proc") if pid.isdigit()}  # fmt: skip
    children = [pid for pid, parent in parents.items() if parent == os.getpid()]
    servers = [pid for pid in children if "forkserver" in (Path("/proc") / str(pid) / "cmdline").read_text()]
    helpers = {pid for pid in children if "resource_tracker" in (Path("/proc") / str(pid) / "cmdline").read_text()}
    found = [pid for pid in children if pid not in servers and pid not in helpers]
    return found + [pid for pid, parent in parents.items() if parent in servers]


def of_nothing(row: Clip, epoch: int) -> Sample:
    """Looks at the row, as reading does, and gives next to nothing."""
    assert row.video.endswith(".mp4")
    return Sample(id=row.id, frames=torch.zeros(1, dtype=torch.uint8), pts_seconds=torch.zeros(1))


def plain_loader(dataset: ClipDataset, keys: list[list[tuple[int, int]]], start: str) -> Iterator[Batch]:
    """What is usually done: a DataLoader over a list."""
    loader = DataLoader(dataset, batch_sampler=keys, collate_fn=collate, num_workers=2, multiprocessing_context=start)
    yield from loader


def print_memory(name: str, start: str, batches: Iterable[Batch], most: int, began: float) -> None:
    """A line of the memory table, of the dearest reader after `most` batches."""
    for number, _ in enumerate(batches, start=1):
        if number == 1:
            first = time.perf_counter() - began
        if number == most:
            dearest = max((memory_mb(pid) for pid in own_readers()), key=lambda memory: memory["Pss"])
            private = dearest["Private_Dirty"] + dearest["Private_Clean"]
            print(f"| {name} | {start} | {first:.1f} | {dearest['Rss']:.0f} | {dearest['Pss']:.0f} | {private:.0f} |",
                  flush=True)  # fmt: skip
            break


def measure_memory(paths: dict[Movie, Path], num_rows: int) -> None:
    """Of readers that decode, and of readers of a large collection, by start method."""
    print("\n| 2 readers | start | s to the first batch | RSS MB | PSS MB | private MB |\n|---|---|---|---|---|---|")
    for movie in (MOVIES[0], MOVIES[2]):
        dataset = ClipDataset([row_of(paths[movie])], RULES)
        keys = [[(epoch, 0) for epoch in range(BATCH)]] * 6
        for start in STARTS:
            began = time.perf_counter()
            with closing(load_batches(dataset, keys, num_workers=2, worker_start=start)) as batches:
                print_memory(f"decode {movie.name}", start, batches, 4, began)
    rows = [Clip(id=f"{n:011d}.mp4", video=f"/data/howto100m/videos/part{n % 100}/{n:011d}.mp4",
                 caption_file=f"/data/howto100m/captions/{n:011d}.csv") for n in range(num_rows)]  # fmt: skip
    large = ClipDataset(rows, of_nothing)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[: num_rows // 8].tolist()
    keys = [[(0, index) for index in order[first : first + 1000]] for first in range(0, len(order), 1000)]
    last = len(keys) - 8  # a reader runs a little ahead, and has ended after the last
    for start in STARTS:
        began = time.perf_counter()
        with closing(load_batches(large, keys, num_workers=2, worker_start=start)) as batches:
            print_memory(f"{num_rows:,} rows, held once", start, batches, last, began)
        began = time.perf_counter()
        print_memory(f"{num_rows:,} rows, a list", start, plain_loader(large, keys, start), last, began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of real .mp4 files to make the videos of")
    parser.add_argument("--work", type=Path, default=Path("/tmp/twinreel_benchmark"), help="where the videos go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="of the large collection; HowTo100M has 1200000")
    parser.add_argument("--only", choices=["rates", "threads", "memory"], help="one table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paths = make_movies(MOVIES, arguments.work, arguments.data)
    print(f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, PyAV {av.__version__}\n")
    if arguments.only in (None, "rates"):
        measure_rates(paths, arguments.rounds)
    if arguments.only in (None, "threads"):
        measure_codec_threads(paths, arguments.rounds)
    if arguments.only in (None, "memory"):
        measure_memory(paths, arguments.rows)


if __name__ == "__main__":
    main()
