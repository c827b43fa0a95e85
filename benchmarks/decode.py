"""How fast clips are read: twinreel against other readers and against the codec's floor, one thread, CPU time.

    python benchmarks/decode.py --work runs/decode                   # hours; with --quick a minute, with no targets
    python benchmarks/decode.py --work runs/decode --data CLIPS      # real clips joined instead of drawn frames
    python benchmarks/decode.py --work runs/decode --report          # the tables of the rounds that are done

The other readers are no dependencies of twinreel. Those that are not installed are left out and named. All of them:

    python -m venv peers && peers/bin/pip install -c constraints.txt -e . \
        decord2==3.4.0 opencv-python-headless==5.0.0.93 torchcodec==0.13.0

and a command `ffmpeg` on the PATH, whose shared libraries torchcodec uses, too.

A row is a file and a workload: 16 frames at 5 a second, 32 frames two apart (both from a random time on), 8 clips of 2
frames half a second apart (one clip from each eighth of the file), one frame of each second of the file. The time is
from the path to a uint8 tensor: at the level `224` the center square of each frame scaled to 224 x 224; at the level
`full` frames as they are, to be scaled on a device. In every round each method reads the same random clips, in a
shuffled order; the process's CPU time counts, with that of its children. What is printed are medians over rounds of a
peer's time divided by twinreel's, and 90 % bootstrap intervals.

The floor is libavcodec decoding from the key frame before each wanted frame to that frame and nothing else; the file is
open already. With `opening` PyAV opens the file, too; with `discard` frames are left out that are not wanted and to
which no other refers. A frame's number is drawn into it, so wrong frames are noticed; a peer that gives some in a row
is marked and never its best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are imported

import av
import numpy as np
import torch
from numpy.typing import NDArray

from decode_peers import PEERS, Clip, decode_only, missing_peers, twinreel
from natural_videos import Movie, frame_numbers, make_movies

SIZE = 224
LEVELS: dict[str, int | None] = {str(SIZE): SIZE, "full": None}
WORKLOADS = ("16 at 5 fps", "32 x 2", "8 clips x 2", "1 fps, all")
SHORT, SPARSE = WORKLOADS[:2], WORKLOADS[2]
MOVIES = (
    *(Movie("h264", 320, 240, gop, 30, 60) for gop in (250, 30, 16)),
    Movie("vp9", 320, 240, 128, 30, 60),
    Movie("hevc", 320, 240, 250, 30, 60),
    *(Movie("h264", 1280, 720, gop, 25, 60) for gop in (250, 30, 16)),
)
QUICK_MOVIES = (Movie("h264", 320, 240, 30, 30, 6),)
FLOORS = ("floor", "floor, opening", "floor, discard")
OPENING = "opening"
RESAMPLES = 2000
Row = tuple[str, str, str]  # level, movie, workload
Results = dict[str, Any]


def draw_clip(movie: Movie, path: Path, workload: str, rng: random.Random) -> Clip:
    rate, total = movie.rate, movie.num_frames
    if workload == WORKLOADS[3]:
        return Clip(path, rate, (tuple(range(rate // 2, total, rate)),), rate)
    if workload == SPARSE:
        step, part = rate // 2, total // 8
        starts = [number * part + rng.randrange(max(1, part - step)) for number in range(8)]
        return Clip(path, rate, tuple((start, start + step) for start in starts), step)
    count, step = (16, rate // 5) if workload == WORKLOADS[0] else (32, 2)
    start = rng.randrange(total - (count - 1) * step)
    return Clip(path, rate, (tuple(start + step * number for number in range(count)),), step)


def cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(action: Callable[[], object]) -> tuple[float, object]:
    """CPU milliseconds, and what came out."""
    began = cpu_seconds()
    result = action()
    return 1000 * (cpu_seconds() - began), result


def actions(level: str, absent: Iterable[str]) -> dict[str, Callable[[Clip], Callable[[], object]]]:
    """Method -> for a clip, what is to be timed."""
    size = LEVELS[level]
    methods = {"twinreel": twinreel} | {name: method for name, method in PEERS.items() if name not in absent}
    if size is None:
        methods.pop("torchcodec scaling", None)
    made: dict[str, Callable[[Clip], Callable[[], object]]] = {
        name: (lambda clip, method=method: lambda: method(clip, size)) for name, method in methods.items()
    }
    made["floor"] = lambda clip: decode_only(clip, discard=False)
    made["floor, discard"] = lambda clip: decode_only(clip, discard=True)
    made[OPENING] = lambda clip: lambda: av.open(str(clip.path)).close()
    return made


def count_wrong(result: object, clip: Clip) -> int:
    """How many of the wanted frames a method did not give."""
    wanted = clip.indices
    if result is None:  # it was only opened
        return 0
    if isinstance(result, int):
        return len(wanted) - result
    assert isinstance(result, torch.Tensor)
    numbers = frame_numbers(result)
    return sum(got != want for got, want in zip(numbers, wanted, strict=False)) + abs(len(numbers) - len(wanted))


def measure(number: int, row: Row, movie: Movie, path: Path, results: Results) -> None:
    """One round of a row: each method's milliseconds a clip, and the wrong frames that it gave."""
    level, name, workload = row
    rng = random.Random(repr((number, name, workload)))
    count = 4 if workload in SHORT and movie.width == 320 and movie not in QUICK_MOVIES else 1
    sums: dict[str, float] = {}
    wrong = results["wrong"].setdefault("; ".join(row), {})
    for clip in [draw_clip(movie, path, workload, rng) for _ in range(count)]:
        methods = list(actions(level, results["absent"]).items())
        random.Random(repr((row, clip.indices))).shuffle(methods)
        pictures: dict[str, torch.Tensor] = {}
        for method, prepare in methods:
            spent, result = timed(prepare(clip))
            sums[method] = sums.get(method, 0.0) + spent
            if bad := count_wrong(result, clip):
                wrong[method] = wrong.get(method, 0) + bad
            elif isinstance(result, torch.Tensor):
                pictures[method] = result[:4].clone()
        if number == 0:
            compare_pixels(pictures, results["pixels"].setdefault(level, {}))
    for method, spent in sums.items():
        results["ms"].setdefault("; ".join(row), {}).setdefault(method, []).append(spent / count)


def compare_pixels(pictures: dict[str, torch.Tensor], worst: dict[str, float]) -> None:
    """Note how far each method's pixels are from PyAV's, on average."""
    expected = pictures.pop("naive PyAV", None)
    for method, picture in pictures.items():
        if expected is not None:
            picture = picture.flip(-1) if method == "OpenCV" and len(picture[0]) != SIZE else picture  # BGR if unscaled
            worst[method] = max(worst.get(method, 0.0), float((picture.float() - expected.float()).abs().mean()))


def warm_up(rows: list[Row], paths: dict[Movie, Path], absent: list[str]) -> None:
    """Have all modules loaded and all files in memory."""
    for path in paths.values():
        path.read_bytes()
    movie, path = next(iter(paths.items()))
    clip = draw_clip(movie, path, WORKLOADS[0], random.Random(0))
    for level in {row[0] for row in rows}:
        for prepare in actions(level, absent).values():
            prepare(clip)()


# The report


class Table:
    """The rows of one level: ratios of times to twinreel's over rounds, resampled."""

    def __init__(self, results: Results, level: str) -> None:
        self.rows: list[Row] = []
        self.ms: dict[Row, dict[str, NDArray[np.float64]]] = {}
        self.wrong = results["wrong"]
        self._resampled: dict[tuple[Row, str], NDArray[np.float64]] = {}
        for key, times in results["ms"].items():
            row = tuple(key.split("; "))
            if row[0] == level:
                self.rows.append(row)
                self.ms[row] = {method: np.array(values) for method, values in times.items()}
                self.ms[row]["floor, opening"] = self.ms[row]["floor"] + self.ms[row].pop(OPENING)
        present = [name for row in self.rows for name in self.ms[row]]
        self.peers = [name for name in PEERS if name in present]

    def ratios(self, row: Row, method: str) -> NDArray[np.float64]:
        """A method's time divided by twinreel's, in each round."""
        return self.ms[row][method] / self.ms[row]["twinreel"]

    def ratio(self, row: Row, method: str) -> float:
        """The median over rounds."""
        return float(np.median(self.ratios(row, method)))

    def resampled(self, row: Row, method: str) -> NDArray[np.float64]:
        """The median ratio in each of the resamples of the rounds; the same rounds for all methods of a row."""
        if (row, method) not in self._resampled:
            ratios = self.ratios(row, method)
            rng = np.random.default_rng(self.rows.index(row))
            picks = rng.integers(0, len(ratios), (RESAMPLES, len(ratios)))
            self._resampled[row, method] = np.median(ratios[picks], axis=1)
        return self._resampled[row, method]

    def interval(self, row: Row, method: str) -> tuple[float, float]:
        """The 90 % interval of the median."""
        low, high = np.quantile(self.resampled(row, method), (0.05, 0.95))
        return float(low), float(high)

    def best(self, row: Row) -> str | None:
        """The fastest peer whose frames are right."""
        right = [peer for peer in self.peers if peer not in self.wrong.get("; ".join(row), {})]
        return min(right, key=lambda peer: self.ratio(row, peer), default=None)

    def mean(self, picks: list[tuple[Row, str]]) -> tuple[float, float, float]:
        """The geometric mean of ratios, and its interval."""
        value = float(np.exp(np.mean([np.log(self.ratio(*pick)) for pick in picks])))
        spread = np.exp(np.mean([np.log(self.resampled(*pick)) for pick in picks], axis=0))
        low, high = np.quantile(spread, (0.05, 0.95))
        return value, float(low), float(high)

    def print(self) -> None:
        """A line for each row."""
        columns = ["file", "workload", "twinreel, ms", *self.peers, "best peer", *FLOORS]
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for row in self.rows:
            best = self.best(row)
            cells = [row[1], row[2], f"{np.median(self.ms[row]['twinreel']):.1f}"]
            cells += [self._cell(row, peer) for peer in self.peers]
            cells += [best or "none", *(f"{self.ratio(row, floor):.2f}" for floor in FLOORS)]
            print("| " + " | ".join(cells) + " |")

    def _cell(self, row: Row, peer: str) -> str:
        low, high = self.interval(row, peer)
        mark = self.wrong.get("; ".join(row), {}).get(peer)
        return f"{self.ratio(row, peer):.2f} ({low:.2f}-{high:.2f})" + (" WRONG" if mark else "")

    def print_means(self) -> None:
        """A line for each group of rows."""
        groups = {"all rows": self.rows}
        for size in ("320x240", "1280x720"):
            groups |= {f"{size}, {workload}": self._rows(size, (workload,)) for workload in WORKLOADS}
        columns = ["rows", "best peer", *self.peers, *FLOORS]
        print("\nGeometric means over rows:\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for name, rows in groups.items():
            if rows:
                cells = [_numbers(self.mean(self._best_picks(rows)))] if self.peers else ["none"]
                cells += [_numbers(self.mean([(row, method) for row in rows])) for method in (*self.peers, *FLOORS)]
                print("| " + " | ".join([f"{name} ({len(rows)})", *cells]) + " |")

    def _rows(self, size: str, workloads: Iterable[str]) -> list[Row]:
        return [row for row in self.rows if size in row[1] and row[2] in workloads]

    def _best_picks(self, rows: list[Row]) -> list[tuple[Row, str]]:
        return [(row, best) for row in rows if (best := self.best(row)) is not None]

    def print_targets(self) -> None:
        """Each target of this level, and the rows that miss it."""
        print("\nTargets:\n")
        best = self._best_picks(self.rows)
        if best:
            self._print_target("geometric mean over all rows, against the best peer of each", best, 1.0, each=False)
            low = [pick for pick in best if self.interval(*pick)[1] < 0.9]
            print(f"- no row's upper bound against its best peer below 0.9: {_misses(self, low)}")
        if self.rows and self.rows[0][0] == "full":
            self._print_target("the floor's rate", [(row, "floor") for row in self.rows], 0.8)
            return
        for workload in (*SHORT, SPARSE):
            picks = self._best_picks(self._rows("1280x720", (workload,)))
            self._print_target(f"1280x720, {workload}, against the best peer", picks, 1.3)
        for peer, workloads, factor in (("ffmpeg process", SHORT, 2.0), ("naive PyAV", (SPARSE,), 3.0)):
            picks = [(row, peer) for row in self._rows("", workloads) if peer in self.ms[row]]
            self._print_target(f"{', '.join(workloads)}, against {peer}", picks, factor)

    def _print_target(self, what: str, picks: list[tuple[Row, str]], factor: float, each: bool = True) -> None:
        if picks:
            mean = self.mean(picks)
            misses = _misses(self, [pick for pick in picks if self.ratio(*pick) < factor]) if each else ""
            met = "met" if mean[0] >= factor else "MISSED"
            print(
                f"- {what}, at least {factor:g}: mean {_numbers(mean)}, {met}" + (f"; rows: {misses}" if each else "")
            )


def _numbers(mean: tuple[float, float, float]) -> str:
    return f"{mean[0]:.2f} ({mean[1]:.2f}-{mean[2]:.2f})"


def _misses(table: Table, picks: list[tuple[Row, str]]) -> str:
    if not picks:
        return "all meet it"
    return "MISSED by " + ", ".join(
        f"{row[1]} {row[2]} ({method} {table.ratio(row, method):.2f})" for row, method in picks
    )


def report(results: Results, targets: bool) -> None:
    rounds = max((len(times["twinreel"]) for times in results["ms"].values()), default=0)
    print(
        f"{rounds} rounds. Numbers are a method's CPU time / twinreel's (90 % interval): above 1, twinreel is faster."
    )
    print(f"Not installed: {', '.join(results['absent']) or 'none'}.\n")
    print("| file | kbit/s |\n|---|---|")
    for name, rate in results["kbit"].items():
        print(f"| {name} | {rate:.0f} |")
    for level in LEVELS:
        table = Table(results, level)
        if table.rows:
            print(f"\n## To {'224 x 224' if LEVELS[level] else 'full-size frames'}\n")
            table.print()
            table.print_means()
            if targets:
                table.print_targets()
    for level, pixels in results["pixels"].items():
        offs = ", ".join(f"{method} {off:.2f}" for method, off in pixels.items())
        print(f"\nLevel {level}, mean difference from PyAV's pixels in the worst clip, of 255: {offs}")
    wrong = [
        f"- {row}: {method}, {count} in all rounds"
        for row, found in results["wrong"].items()
        for method, count in found.items()
    ]
    print("\nWrong frames: " + ("none of any method." if not wrong else "\n" + "\n".join(wrong)))


def save(results: Results, path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results))
    partial.rename(path)


def limit_threads(absent: Iterable[str]) -> None:
    torch.set_num_threads(1)
    if "OpenCV" not in absent:
        import cv2

        cv2.setNumThreads(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/decode"), help="the files that are made, and the times")
    parser.add_argument("--data", type=Path, help="a folder of real clips to make the files from")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--files", default="", help="only files whose name has one of these, a|b; such as 'h264 1280'")
    parser.add_argument("--workloads", default="", help="likewise")
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--name", default="times", help="of the file in the work folder that holds the times")
    parser.add_argument("--report", action="store_true", help="measure nothing, print what was measured")
    parser.add_argument("--quick", action="store_true", help="one small file, two rounds: does it work at all?")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    store = arguments.work / f"{arguments.name}.json"
    if arguments.report:
        report(json.loads(store.read_text()), targets=True)
        return 0
    has = lambda name, words: any(word in name for word in words.split("|"))  # noqa: E731
    movies = [movie for movie in (QUICK_MOVIES if arguments.quick else MOVIES) if has(movie.name, arguments.files)]
    absent = missing_peers()
    limit_threads(absent)
    paths = make_movies(movies, arguments.work, arguments.data)
    workloads = [workload for workload in WORKLOADS if has(workload, arguments.workloads)]
    rows = [(level, movie.name, work) for level in arguments.levels for movie in movies for work in workloads]
    left_out = [*absent, *(name for name in PEERS if name not in arguments.peers)]
    kbit = {movie.name: path.stat().st_size * 8 / 1000 / movie.seconds for movie, path in paths.items()}
    results: Results = {"absent": left_out, "kbit": kbit, "ms": {}, "wrong": {}, "pixels": {}}
    warm_up(rows, paths, left_out)
    by_name = {movie.name: movie for movie in paths}
    for number in range(2 if arguments.quick else arguments.rounds):
        began = time.perf_counter()
        for row in rows:
            movie = by_name[row[1]]
            measure(number, row, movie, paths[movie], results)
        save(results, store)
        print(f"round {number + 1}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    report(results, targets=not arguments.quick)
    return int(any("twinreel" in found for found in results["wrong"].values()))


if __name__ == "__main__":
    sys.exit(main())
