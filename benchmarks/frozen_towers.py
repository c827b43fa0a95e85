"""What frozen networks with trained projections reach on 132 training and 44 validation videos: five seeds.

    python benchmarks/frozen_towers.py --data CLIPS        # or TWINREEL_TEST_DATA=CLIPS; about 20 minutes on 2 cores

CLIPS holds `caption/items.jsonl` (rows with a split) and its videos. The packages that examples/frozen_towers.py names
must be installed. Each run is judged twice. "one caption": the first caption of each video is a query, 44 in all; this
is what must reach R@1 0.25 and R@5 0.60 as the mean of the seeds (text to video), else the exit code is 1. "all
captions": every caption is a query; a single video has 32 of these 76, so that table is mostly about one video.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import twinreel
from twinreel.assembly import load_run

ROOT = Path(__file__).resolve().parent.parent
TARGET = {"text_to_video/recall_at_1": 0.25, "text_to_video/recall_at_5": 0.60}
COLUMNS = [
    f"{direction}/{name}"
    for direction in ("text_to_video", "video_to_text")
    for name in ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank")
]
Scores = dict[str, float]


def write_one_caption(items: Path, target: Path) -> None:
    """The rows of a manifest with the first caption of each."""
    rows = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(row | {"texts": row["texts"][:1]}) + "\n" for row in rows]
    target.write_text("".join(lines), encoding="utf-8")


def train_and_evaluate(seed: int, data: Path, one_caption: Path, folder: Path) -> dict[str, Scores]:
    """Train one seed on the training rows; scores on the validation rows, by protocol."""
    items = data / "caption" / "items.jsonl"
    overrides = [f"data.manifest={items}", f"data.root={data}", "data.split=train", f"train.seed={seed}"]
    recipe = twinreel.load_recipe(ROOT / "examples" / "frozen_towers.yaml", overrides)
    twinreel.train(recipe, folder, quiet=True)
    run = load_run(folder)  # loaded once: it remembers the features of the validation videos
    manifests = {"one caption": one_caption, "all captions": items}
    return {
        name: twinreel.evaluate(run, manifest=str(manifest), split="val", root=str(data)).metrics
        for name, manifest in manifests.items()
    }


def mean(scores: list[Scores]) -> Scores:
    return {key: sum(row[key] for row in scores) / len(scores) for key in scores[0]}


def print_table(title: str, scores: dict[str, Scores]) -> None:
    """Per cent, and ranks as they are."""
    print(f"\n{title:16}{'text to video':>29}{'video to text':>29}")
    print(f"{'':16}" + f"{'R@1':>8}{'R@5':>7}{'R@10':>7}{'MedR':>7}" * 2)
    for name, row in scores.items():
        values = [row.get(column) for column in COLUMNS]
        cells = [
            "-" if value is None else f"{value:.1f}" if "rank" in column else f"{100 * value:.1f}"
            for column, value in zip(COLUMNS, values, strict=True)
        ]
        print(f"{name:16}" + "".join(f"{cell:>{8 if i % 4 == 0 else 7}}" for i, cell in enumerate(cells)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TWINREEL_TEST_DATA"), help="the folder CLIPS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data is missing and TWINREEL_TEST_DATA is not set")
    sys.path.insert(0, str(ROOT))  # the recipe names examples.frozen_towers
    results: list[dict[str, Scores]] = []
    with tempfile.TemporaryDirectory() as folder:
        one_caption = Path(folder) / "one_caption.jsonl"
        write_one_caption(options.data / "caption" / "items.jsonl", one_caption)
        for seed in options.seeds:
            began = time.perf_counter()
            results.append(train_and_evaluate(seed, options.data.resolve(), one_caption, Path(folder) / f"seed_{seed}"))
            print(f"seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    for name in results[0]:
        chance = {key.removeprefix("chance/"): value for key, value in results[0][name].items() if "chance/" in key}
        by_seed = {f"seed {seed}": row[name] for seed, row in zip(options.seeds, results, strict=True)}
        print_table(name, by_seed | {"mean": mean([row[name] for row in results]), "chance": chance})
    reached = mean([row["one caption"] for row in results])
    missed = [key for key, least in TARGET.items() if reached[key] < least]
    print(f"\nmissed: {', '.join(missed)}" if missed else "\nreached: R@1 >= 25, R@5 >= 60 (one caption, mean)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
