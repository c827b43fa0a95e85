"""What re-ranking costs and gains: the first k of two towers judged again, against the matching model on all pairs.

    python benchmarks/rerank.py                       # about eight minutes on two cores, training included
    python benchmarks/rerank.py --towers runs/a --matching runs/b --input my_videos.csv --k 50

Without runs it makes videos (source `generated`), a paragraph of all that is said in each, and trains both models on
these very rows for a moment. That is for the time: the small matching model learns nothing of such paragraphs so soon,
so its recalls are those of chance, and re-ranking by it loses what the towers had. For recalls that mean something
give runs that were trained.

Three evaluations of the same rows, each from reading the files to the scores: the matching run on all pairs, the towers
alone, and both stages. The target, else the exit code is 1: both stages, the towers included, take at most 1.3 k / N of
the CPU time of all pairs (of this process and its readers, which neighbors on the machine change less than the time of
the clock; both are shown). The CNN of the matching model sees each video once whatever k is, so the target holds where
comparing the pairs is most of the work, that is for N large beside k; with `--input` it is measured and not asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from twinreel.evaluation import Report, evaluate
from twinreel.recipe import load_recipe
from twinreel.training import train

TARGET = 1.3
COLUMNS = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank")
FULL, FIRST, BOTH = "matching model, all pairs", "two towers", "both stages"
ROWS = {FULL: (FULL, ""), FIRST: (BOTH, "first_stage/"), BOTH: (BOTH, ""), "chance": (BOTH, "chance/")}


def train_towers(folder: Path, num_videos: int, steps: int) -> Path:
    """The towers of the demo on the first videos of `generated`; the run folder."""
    overrides = [
        f"data.root={folder / 'videos'}", f"data.num_videos={num_videos}", "data.num_workers=1", "eval.split=null",
        f"train.num_steps={steps}", f"train.save_every={steps} steps",
    ]  # fmt: skip
    return _trained("demo", overrides, folder / "towers")


def train_matching(folder: Path, num_videos: int, steps: int) -> Path:
    """A small cross-modal model on the same videos with a paragraph each; the run folder."""
    overrides = [
        "data.source=generated", f"data.root={folder / 'videos'}", f"data.num_videos={num_videos}", "data.split=train",
        "data.caption_rows=paragraph", "data.flip=0", "data.num_clips=2", "data.num_workers=1",
        "model.max_text_tokens=64", "model.preprocessing={num_frames: 2, frame_rate: 2.0, crop_size: 64}",
        "train.num_epochs=null", f"train.num_steps={steps}", f"train.save_every={steps} steps", "train.precision=fp32",
        "eval.every=null", "eval.num_clips=1", "eval.batch_size=128",
    ]  # fmt: skip
    return _trained("clipbert_small", overrides, folder / "matching")


def _trained(recipe: str, overrides: list[str], out: Path) -> Path:
    if not (out / "checkpoints" / "last").exists():
        began = time.perf_counter()
        train(load_recipe(recipe, overrides), out, quiet=True)
        print(f"trained {out} in {time.perf_counter() - began:.0f} s", flush=True)
    return out


def timed(run: Path, rows: dict[str, object], overrides: list[str]) -> tuple[Report, float, float]:
    """A report, the seconds it took, and the CPU seconds."""
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    report = evaluate(run, overrides=overrides, **rows)  # type: ignore[arg-type]
    return report, time.perf_counter() - began, sum(os.times()[:4]) - cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=Path, help="a run of task.name=contrastive")
    parser.add_argument("--matching", type=Path, help="a run of task.name=video_text_matching")
    parser.add_argument("--input", help="a manifest that both are judged on")
    parser.add_argument("--split", help="of the manifest")
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--videos", type=int, default=300, help="that are made")
    parser.add_argument("--steps", type=int, nargs=2, default=(120, 60), metavar=("TOWERS", "MATCHING"))
    parser.add_argument("--out", type=Path, default=Path("runs/rerank"))
    arguments = parser.parse_args()
    given = [arguments.towers, arguments.matching, arguments.input]
    if any(given) and not all(given):
        parser.error("--towers, --matching and --input go together")
    own = all(given)
    rows: dict[str, object] = {"manifest": arguments.input, "split": arguments.split} if own else {"split": "train"}
    towers = arguments.towers or train_towers(arguments.out, arguments.videos, arguments.steps[0])
    matching = arguments.matching or train_matching(arguments.out, arguments.videos, arguments.steps[1])
    common = [] if own else ["eval.caption_rows=paragraph"]
    again = [*common, f"rerank.run={matching}", f"rerank.k={arguments.k}"]
    once = [] if own else ["eval.num_clips=1", "eval.max_words=64"]
    measured = {
        FULL: timed(matching, rows, common),
        FIRST: timed(towers, rows, [*common, *once]),
        BOTH: timed(towers, rows, [*again, *once]),
    }
    return show(measured, arguments.k, asked=not own)


def show(measured: dict[str, tuple[Report, float, float]], k: int, *, asked: bool) -> int:
    """Print what was measured; 1 if the target is asked for and missed."""
    print("\n| text to video | R@1 | R@5 | R@10 | median rank | pairs | seconds | CPU seconds |")
    print("|---|---|---|---|---|---|---|---|")
    protocol = measured[BOTH][0].protocol
    pairs = {FULL: measured[FULL][0].protocol["pairs"].split()[0], BOTH: protocol["second_stage_pairs"].split()[0]}
    for title, (which, prefix) in ROWS.items():
        values = [measured[which][0].metrics.get(f"{prefix}text_to_video/{column}") for column in COLUMNS]
        cells = [
            "" if value is None else f"{value:.1f}" if column == "median_rank" else f"{100 * value:.1f}"
            for column, value in zip(COLUMNS, values, strict=True)
        ]
        spent = " | ".join(f"{value:.1f}" for value in measured[title][1:]) if title in measured else " | "
        print(f"| {title} | {' | '.join(cells)} | {pairs.get(title, '')} | {spent} |")
    number = int(protocol["candidates"])
    clock, cpu = (measured[BOTH][i] / measured[FULL][i] for i in (1, 2))
    target = TARGET * min(1.0, k / number)
    print(f"\nN = {number}, k = {k}: both stages take {cpu:.3f} of the CPU time of all pairs, {clock:.3f} by the clock")
    print(f"{TARGET} k / N = {target:.3f}: {'reached' if cpu <= target else 'missed'}")
    print(f"within reach: {protocol['second_stage_within_reach']}")
    return int(asked and cpu > target)


if __name__ == "__main__":
    sys.exit(main())
