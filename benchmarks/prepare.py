"""What `twinreel data prepare` gains on a 1280x720 H.264 video with a key frame every 250 frames: clips/s and bytes.

    python benchmarks/prepare.py --out runs/prepare_benchmark [--data CLIPS]

The video is drawn (natural-like, see natural_videos.py), or joined from the real videos below CLIPS. A clip is 16
frames at 5 Hz from a random time, from a path to uint8 of 224x224 (center square), the file opened for it. Source and
prepared file answer the same clips by turns, in one process and thread; what counts is processor time. Ratios have a
90 % interval by bootstrap over rounds. The exit code is 1 if the ratio is below the target, 8.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from natural_videos import Movie, frame_numbers, make_movies
from twinreel.data.preparation.encode import Encoding
from twinreel.data.preparation.prepare import prepare_collection
from twinreel.data.preparation.prepare_gain import CLIP_FRAMES, CLIP_RATE, read_random_clip
from twinreel.data.storage import open_video

TARGET = 8.0
FILES = [Movie("h264", 1280, 720, 250, 30, 60), Movie("h264", 320, 240, 250, 30, 60)]


def measure(source: Path, prepared: Path, rounds: int) -> np.ndarray:
    """Processor seconds of the same random clips: (rounds, 2), from the source and from the prepared file."""
    with open_video(str(source)) as reader:
        latest = reader.info.duration_seconds - CLIP_FRAMES / CLIP_RATE
    rng = np.random.default_rng(0)
    seconds = []
    for start in rng.uniform(0, latest, rounds):
        seconds.append([read_random_clip(str(path), float(start)) for path in (source, prepared)])
    return np.array(seconds)


def interval(seconds: np.ndarray) -> tuple[float, float, float]:
    """How many times faster, and the 90 % interval."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, len(seconds), (2000, len(seconds)))
    ratios = seconds[chosen, 0].sum(1) / seconds[chosen, 1].sum(1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    return float(seconds[:, 0].sum() / seconds[:, 1].sum()), float(low), float(high)


def wrong_frames(source: Path, prepared: Path) -> int:
    """How many of 200 random times show another frame in the prepared file, by the numbers that the frames carry."""
    times = np.sort(np.random.default_rng(2).uniform(0, 55, 200)).tolist()
    numbers = []
    for path in (source, prepared):
        with open_video(str(path)) as reader:
            found: list[int] = []
            for first in range(0, len(times), 20):
                found += frame_numbers(reader.frames_at(times[first : first + 20]).data)
        numbers.append(found)
    return sum(before != after or before < 0 for before, after in zip(*numbers, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with real videos, instead of drawing")
    parser.add_argument("--out", type=Path, default=Path("runs/prepare_benchmark"))
    parser.add_argument("--rounds", type=int, default=40, help="random clips a file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    sources = make_movies(FILES, arguments.out / "sources", arguments.data)
    print("| file | settings | MB before | after | ms/clip before | after | times faster (90 %) | wrong frames |")
    print("|---|---|---|---|---|---|---|---|")
    reached = True
    for movie, source in sources.items():
        for encoding in (Encoding(), Encoding(gop=8), Encoding(gop=32), Encoding(crf=18)):
            folder = arguments.out / f"{source.stem}_{encoding.gop}_{encoding.crf}"
            listed = arguments.out / "one" / source.stem
            shutil.rmtree(listed, ignore_errors=True)
            listed.mkdir(parents=True)
            os.symlink(source.resolve(), listed / source.name)
            result = prepare_collection(listed, folder, encoding=encoding, measured_files=0)
            prepared = folder / "videos" / source.name
            seconds = measure(source, prepared, arguments.rounds)
            ratio, low, high = interval(seconds)
            before, after = 1000 * seconds.mean(0)
            print(
                f"| {movie.name} | gop {encoding.gop}, crf {encoding.crf} | {result.bytes_before / 1e6:.1f} | "
                f"{result.bytes_after / 1e6:.1f} | {before:.1f} | {after:.1f} | {ratio:.1f} ({low:.1f}-{high:.1f}) | "
                f"{wrong_frames(source, prepared)} of 200 |",
                flush=True,
            )
            if movie.height == 720 and encoding == Encoding():
                reached = ratio >= TARGET
    print(f"target at 1280x720 GOP 250: {TARGET:g} times; {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
