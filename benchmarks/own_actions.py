"""Small classifiers from scratch on real clips with labels: models x seeds, judged at the last step.

    python benchmarks/own_actions.py --data CLIPS                  # 6 classes: action/ut_train.csv, ut_val.csv
    python benchmarks/own_actions.py --data CLIPS --lists action/train.csv action/val.csv --steps 600

Accuracies are those of the last step: no checkpoint is chosen on the clips that it is judged by. Beside them stand
chance, the largest class, and for a collection of several domains (the folder below the first one: `action/DOMAIN/...`)
the most that one can get who knows only the domain of a clip: its most frequent class among the rows to judge by.

`--jobs 2` trains two runs at once, one thread each. Runs that are there already are not done again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twinreel.data.clip import Clip
from twinreel.data.manifest import read_manifest

MODELS = ("slowfast_small", "s3dg_small", "x3d_small")


def twinreel(*arguments: object) -> str:
    """What a command prints; its stderr is shown if it fails."""
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-m", "twinreel", *map(str, arguments)], env=quiet, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def train(model: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Train one run, if it is not there, and judge its last step; accuracy, minutes, predictions by id."""
    run = options.out / f"{model}-{seed}"
    began = time.perf_counter()
    if not (run / "predictions.csv").exists():
        more = [f"train.num_steps={options.steps}"] if options.steps else []
        twinreel(
            "train", "own_actions_small", f"model.name={model}", f"data.manifest={options.data / options.lists[0]}",
            f"data.root={options.data}", f"eval.manifest={options.data / options.lists[1]}", f"train.seed={seed}",
            "data.num_workers=1", *more, *options.set, "--out", run,
        )  # fmt: skip
        twinreel("eval", run, "--checkpoint", "last", "--predictions", run / "predictions.csv")
    with (run / "predictions.csv").open(newline="", encoding="utf-8") as file:
        ranks = {row["id"]: int(row["rank"]) for row in csv.DictReader(file)}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line["top_1_accuracy"] for line in lines if line["kind"] == "eval"]
    return {
        "last": scores[-1], "best": max(scores), "ranks": ranks, "minutes": (time.perf_counter() - began) / 60,
        "steps": lines[-1]["step"],
    }  # fmt: skip


def domain(row: Clip) -> str:
    """The folder below the first one."""
    return row.id.split("/")[1] if row.id.count("/") > 1 else "all"


def domain_baseline(rows: list[Clip]) -> dict[str, tuple[int, int]]:
    """(right, rows) of each domain for one who knows nothing else and always says its most frequent class."""
    counts: dict[str, Counter[object]] = defaultdict(Counter)
    for row in rows:
        counts[domain(row)][row.labels[0]] += 1
    return {name: (max(own.values()), sum(own.values())) for name, own in counts.items()}


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that the lists' paths start from")
    parser.add_argument("--lists", nargs=2, default=["action/ut_train.csv", "action/ut_val.csv"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--set", nargs="*", default=[], help="more key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/own_actions"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()

    train_rows, rows = (list(read_manifest(options.data / name, root=options.data)) for name in options.lists)
    wanted = [(model, seed) for seed in options.seeds for model in options.models]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(wanted, pool.map(lambda pair: train(*pair, options), wanted), strict=True))

    classes = Counter(row.labels[0] for row in rows)
    largest = max(classes.values()) / len(rows)
    baseline = domain_baseline(rows)
    knows = sum(right for right, _ in baseline.values()) / len(rows)
    print(f"{len(train_rows)} training rows, {len(rows)} to judge by, {len(classes)} classes")
    print(f"chance {1 / len(classes):.3f}, largest class {largest:.3f}, domain alone {knows:.3f}\n")
    print("| model | steps | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " | mean | least | minutes |")
    print("|---" * (len(options.seeds) + 5) + "|")
    for model in options.models:
        found = [results[model, seed] for seed in options.seeds]
        last = [float(one["last"]) for one in found]  # type: ignore[arg-type]
        minutes = sum(float(one["minutes"]) for one in found) / len(found)  # type: ignore[arg-type]
        cells = " | ".join(f"{value:.3f}" for value in last)
        ends = f"{sum(last) / len(last):.3f} | {min(last):.3f} | {minutes:.1f}"
        print(f"| {model} | {found[0]['steps']} | {cells} | {ends} |")
    if len(baseline) > 1:
        print("\n| domain | rows | domain alone | " + " | ".join(options.models) + " |")
        print("|---" * (len(options.models) + 3) + "|")
        for name, (right, seen) in sorted(baseline.items()):
            ids = {row.id for row in rows if domain(row) == name}
            shares = []
            for model in options.models:
                ranks = [results[model, seed]["ranks"] for seed in options.seeds]
                shares.append(sum(own[i] == 1 for own in ranks for i in ids) / len(ids) / len(ranks))  # type: ignore[index]
            print(f"| {name} | {seen} | {right / seen:.3f} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")


if __name__ == "__main__":
    main()
