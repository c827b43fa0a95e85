"""The command line on real clips: check, train, eval, embed, search on a caption set and on an action set.

    python benchmarks/real_clips.py --data CLIPS --out runs/real_clips    # or TWINREEL_TEST_DATA=CLIPS

CLIPS holds caption/items.jsonl (with a split column), action/train.csv, action/val.csv and their videos. The small
S3D-G must reach R@1 0.8 on the caption set's training rows within 15 minutes on two cores, else the exit code is 1.
Validation is reported as it is, beside chance. `--epochs` shortens the run for a test of the commands alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = "s3dg_small_own_videos"


def twinreel(*words: object) -> str:
    """Run a command of twinreel as a user does; its stdout."""
    command = [sys.executable, "-m", "twinreel", *map(str, words)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"exit {result.returncode}: {' '.join(command)}")
    return result.stdout


def scores(run: Path, name: str, *words: object) -> dict[str, float]:
    """Judge a run and print a row of the table."""
    report: dict[str, Any] = json.loads(twinreel("eval", run, *words, "--json"))
    metrics, protocol = report["metrics"], report["protocol"]
    cells = [
        100 * metrics[key]
        for side in ("text_to_video", "video_to_text")
        for key in (f"{side}/recall_at_1", f"{side}/recall_at_5", f"chance/{side}/recall_at_1")
    ]
    numbers = " | ".join(f"{value:.1f}" for value in cells)
    print(f"| {name} | {protocol['queries']} | {protocol['candidates']} | {numbers} |", flush=True)
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("TWINREEL_TEST_DATA"), help="folder with caption/ and action/")
    parser.add_argument("--out", type=Path, default=Path("runs/real_clips"))
    parser.add_argument("--epochs", type=int, help="instead of the recipe's 100 (caption) and of 20 (action)")
    arguments = parser.parse_args()
    if not arguments.data:
        parser.error("where are the clips? --data FOLDER, or TWINREEL_TEST_DATA")
    data, out = Path(arguments.data).resolve(), arguments.out
    out.mkdir(parents=True, exist_ok=True)

    caption = [f"data.manifest={data}/caption/items.jsonl", f"data.root={data}", "data.split=train"]
    caption += [f"train.num_epochs={arguments.epochs}"] if arguments.epochs else []
    twinreel("check", RECIPE, *caption, "--out", out / "caption.png")
    began = time.perf_counter()
    twinreel("train", RECIPE, *caption, "--out", out / "caption")
    minutes = (time.perf_counter() - began) / 60

    template = "data.caption_template=a person is {label}"
    action = [f"data.manifest={data}/action/train.csv", f"data.root={data}", template, "data.min_window_seconds=0"]
    action += [f"train.num_epochs={arguments.epochs or 20}"]
    twinreel("check", RECIPE, *action, "--out", out / "action.png")
    twinreel("train", RECIPE, *action, "--out", out / "action")

    print("| rows | queries | videos | t2v R@1 | R@5 | chance R@1 | v2t R@1 | R@5 | chance R@1 |")
    print("|---|---|---|---|---|---|---|---|---|")
    learned = scores(out / "caption", "caption, training rows", "--split", "train")
    scores(out / "caption", "caption, validation rows", "--split", "val")
    merged = ("--root", data, "eval.merge_equal_captions=true")
    scores(out / "action", "action, training rows", "--input", data / "action/train.csv", *merged)
    scores(out / "action", "action, validation rows", "--input", data / "action/val.csv", *merged)

    for run, manifest, sentence in (
        ("caption", "caption/items.jsonl", "a gray cat sits at a piano and plays the keys"),
        ("action", "action/val.csv", "a person is pushing"),
    ):
        twinreel("embed", out / run, "--input", data / manifest, "--root", data, "--out", out / f"{run}_index")
        print(f"\n{sentence!r}:\n{twinreel('search', out / f'{run}_index', sentence, '--top', 3)}", end="")
    reached = learned["text_to_video/recall_at_1"]
    print(f"\ncaption training rows: R@1 {100 * reached:.1f} after {minutes:.1f} minutes (asked: 80 within 15)")
    return 0 if arguments.epochs or (reached >= 0.8 and minutes <= 15) else 1


if __name__ == "__main__":
    sys.exit(main())
