"""What ClipBERT learns from 132 videos and their captions on a CPU, judged on them and on 44 others.

    python benchmarks/matching.py --data CLIPS --out runs/matching   # or TWINREEL_TEST_DATA=CLIPS
    python benchmarks/matching.py --data CLIPS --parts scratch       # needs no pretrained packages

CLIPS holds `caption/items.jsonl` (rows with a split) and its videos. The first caption of each video is a query. Parts:

scratch     the recipe clipbert_small, random weights: R@1 on the training rows must be 20 times chance.
pretrained  examples/clipbert_small_towers.yaml, three seeds: mean R@5 on the other videos must be 0.25.
shuffled    the same with each training caption at another video: what is learned then must be worth nothing.
rerank      examples/frozen_towers.yaml, two frozen towers with trained projections, and their first answers judged
            again by the run `pretrained` of the same seed.

The packages that the two examples name must be installed for the last three. Every run is judged at its last step: no
checkpoint is chosen on the videos that it is judged by. Runs that are in --out already are not trained again. The exit
code is 1 if a target is missed. `--set KEY=VALUE ...` changes the recipe of `pretrained` and `shuffled`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import twinreel
from frozen_towers import ROOT, mean, print_table, write_one_caption

PARTS = ("scratch", "pretrained", "shuffled", "rerank")
Scores = dict[str, float]


def write_shuffled(items: Path, target: Path, seed: int) -> None:
    """The rows of a manifest; those of the split `train` have their captions handed on, none keeps its own."""
    rows = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
    circle = [row for row in rows if row["split"] == "train"]
    random.Random(seed).shuffle(circle)
    texts = [row["texts"] for row in circle]
    for row, others in zip(circle, texts[1:] + texts[:1], strict=True):
        row["texts"] = others
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(folder: Path, recipe: str | Path, overrides: Sequence[str]) -> float:
    """Minutes that the training took; a run that has been done before is left as it is."""
    done = folder / "minutes.json"
    if not done.exists():
        began = time.perf_counter()
        twinreel.train(twinreel.load_recipe(recipe, overrides), folder, resume=folder.exists())
        done.write_text(json.dumps((time.perf_counter() - began) / 60))
    return float(json.loads(done.read_text()))


class Bench:
    """The parts; each prints its table and returns what it missed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.data: Path = options.data.resolve()
        self.out: Path = options.out
        self.seeds: list[int] = options.seeds
        self.changes: list[str] = options.set
        self.k: int = options.k
        self.items = self.data / "caption" / "items.jsonl"
        self.out.mkdir(parents=True, exist_ok=True)
        self.one_caption = self.out / "one_caption.jsonl"
        write_one_caption(self.items, self.one_caption)

    def rows(self, manifest: Path, seed: int) -> list[str]:
        """Overrides: what is trained on, and that nothing is judged before the end."""
        where = [f"data.manifest={manifest}", f"data.root={self.data}", "data.split=train"]
        return [*where, "eval.every=null", f"train.seed={seed}"]

    def scores(self, run: Path, split: str, overrides: Sequence[str] = ()) -> Scores:
        """Of the last step, one caption a video."""
        report = twinreel.evaluate(
            run, checkpoint="last", manifest=str(self.one_caption), split=split, root=str(self.data),
            overrides=overrides,
        )  # fmt: skip
        return report.metrics

    def scratch(self) -> list[str]:
        """Random weights, judged on the rows that were trained on and on the others."""
        run = self.out / f"scratch_{self.seeds[0]}"
        minutes = train(run, "clipbert_small", self.rows(self.items, self.seeds[0]))
        seen, unseen = self.scores(run, "train"), self.scores(run, "val")
        print_table(
            "from scratch",
            {"training rows": seen, "chance": chance(seen), "validation": unseen, "val. chance": chance(unseen)},
        )
        print(f"training took {minutes:.1f} minutes")
        key = "text_to_video/recall_at_1"
        reached = seen[key] / chance(seen)[key]
        return [] if reached >= 20 else [f"scratch: R@1 on training rows is {reached:.1f} times chance, not 20"]

    def pretrained(self) -> list[str]:
        """Frozen EfficientNet and trained MiniLM."""
        means = self.small_towers("pretrained")
        return [] if means >= 0.25 else [f"pretrained: mean R@5 {100 * means:.1f}, not 25"]

    def shuffled(self) -> list[str]:
        """At chance: no more than two standard errors of a mean over these queries and seeds above it."""
        means = self.small_towers("shuffled")
        count = sum(json.loads(line)["split"] == "val" for line in self.one_caption.read_text().splitlines())
        level = 5 / count
        most = level + 2 * (level * (1 - level) / (count * len(self.seeds))) ** 0.5
        return [] if means <= most else [f"shuffled: mean R@5 {100 * means:.1f}, more than {100 * most:.1f}"]

    def small_towers(self, part: str) -> float:
        """Mean R@5, text to video, of the seeds."""
        table, minutes = {}, []
        for seed in self.seeds:
            manifest = self.items
            if part == "shuffled":
                manifest = self.out / f"shuffled_{seed}.jsonl"
                write_shuffled(self.items, manifest, seed)
            minutes.append(self.train_small_towers(part, manifest, seed))
            table[f"seed {seed}"] = self.scores(self.out / f"{part}_{seed}", "val")
        scores = list(table.values())
        print_table(part, table | {"mean": mean(scores), "chance": chance(scores[0])})
        print(f"training took {' / '.join(f'{one:.1f}' for one in minutes)} minutes")
        return mean(scores)["text_to_video/recall_at_5"]

    def train_small_towers(self, part: str, manifest: Path, seed: int) -> float:
        """Minutes of one run of examples/clipbert_small_towers.yaml."""
        from examples.clipbert_small_towers import text_weights

        texts = text_weights()
        weights = [f"model.weights={{transformer.bert: {texts}}}", f"model.vocabulary={texts}/vocab.txt"]
        recipe = ROOT / "examples" / "clipbert_small_towers.yaml"
        return train(self.out / f"{part}_{seed}", recipe, [*self.rows(manifest, seed), *weights, *self.changes])

    def rerank(self) -> list[str]:
        """Two towers alone, and with their first answers in the order of ClipBERT."""
        table: dict[str, list[Scores]] = {"two towers": [], f"first {self.k} again": []}
        for seed in self.seeds:
            self.train_small_towers("pretrained", self.items, seed)
            towers = self.out / f"towers_{seed}"
            train(towers, ROOT / "examples" / "frozen_towers.yaml", self.rows(self.items, seed))
            again = [f"rerank.run={self.out / f'pretrained_{seed}'}", "rerank.checkpoint=last", f"rerank.k={self.k}"]
            both = self.scores(towers, "val", [*again, "rerank.direction=both"])
            first = {key.removeprefix("first_stage/"): both[key] for key in both if key.startswith("first_stage/")}
            for row, scores in zip(table.values(), (first, both), strict=True):
                row.append(scores)
        print_table("re-ranked, mean", {name: mean(scores) for name, scores in table.items()})
        return []


def chance(scores: Scores) -> Scores:
    return {key.removeprefix("chance/"): value for key, value in scores.items() if key.startswith("chance/")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TWINREEL_TEST_DATA"), help="the folder CLIPS")
    parser.add_argument("--out", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--k", type=int, default=10, help="of re-ranking")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data is missing and TWINREEL_TEST_DATA is not set")
    options.data = Path(options.data)
    sys.path.insert(0, str(ROOT))  # the recipes name examples.*
    bench = Bench(options)
    missed = [problem for part in options.parts for problem in getattr(bench, part)()]
    print(f"\nmissed: {'; '.join(missed)}" if missed else "\nall targets are reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
