"""What it costs to judge a matching model: looks of the CNN, pairs, seconds, and memory beside the scores.

    python benchmarks/matching_cost.py --videos 40 --captions 1 5 20 --out runs/matching_cost

Each number of captions a video is judged in a process of its own, by a small ClipBERT without training on generated
videos, in both directions. `CNN passes` counts what goes through the CNN; `once a caption` is what its passes would
take at that speed if every caption had one, as in the founding code. `beside scores` is by how much the process is
larger at its largest than before, less the matrix of scores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import torch
from torch import Tensor

from twinreel.data.clip import Caption, Clip
from twinreel.data.sources import generated
from twinreel.evaluation import evaluate_task
from twinreel.losses import LOSSES
from twinreel.models.clipbert import clipbert_small
from twinreel.recipe import EvalSection
from twinreel.tasks import VideoTextMatching
from twinreel.wordpiece import WordPiece

WORDS = [*generated.COLORS, *generated.SHAPES, *generated.MOTIONS, "first", "then", "slowly", "again", "and", "never"]
COLUMNS = ("videos", "captions", "clips", "pairs", "CNN passes", "CNN s", "once a caption s", "pairs s", "all s",
           "scores MiB", "beside scores MiB")  # fmt: skip


def rows(root: Path, num_videos: int, num_captions: int) -> list[Clip]:
    """Generated videos, each with so many captions that differ from all others."""
    made = generated.rows(str(root), "train", num_videos=num_videos, num_test_videos=1)
    listed = []
    for number, row in enumerate(made):
        texts = []
        for place in range(num_captions):
            code, words = number * num_captions + place, []
            for _ in range(4):
                code, digit = divmod(code, len(WORDS))
                words.append(WORDS[digit])
            texts.append(Caption(text=" ".join(words)))
        listed.append(Clip(id=row.id, video=row.video, captions=tuple(texts)))
    return listed


def megabytes() -> float:
    """The most memory this process has held so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def judge(root: Path, num_videos: int, num_captions: int, num_clips: int, batch_size: int) -> dict[str, float]:
    """One evaluation, counted and timed."""
    listed = rows(root, num_videos, num_captions)
    torch.manual_seed(0)
    model = clipbert_small(vocabulary=WordPiece.build(WORDS, size=200)).eval()
    task = VideoTextMatching(loss=LOSSES["match_cross_entropy"])
    section = EvalSection(num_clips=num_clips, batch_size=batch_size)
    evaluate_task(model, task, listed[:2], section, device=torch.device("cpu"))  # what is loaded and built only once
    seen, seconds, look = 0, 0.0, model.encode_grid

    def counted(video: Tensor) -> Tensor:
        nonlocal seen, seconds
        began = time.perf_counter()
        grid = look(video)
        seen, seconds = seen + len(video), seconds + time.perf_counter() - began
        return grid

    model.encode_grid = counted
    before, began = megabytes(), time.perf_counter()
    report = evaluate_task(model, task, listed, section, device=torch.device("cpu"))
    took = time.perf_counter() - began
    scores = num_videos * num_videos * num_captions * 4 / 2**20
    compared = float(report.protocol["seconds"].split()[0])
    return {
        "videos": num_videos, "captions": num_videos * num_captions, "clips": num_clips,
        "pairs": num_videos * num_videos * num_captions, "CNN passes": seen, "CNN s": seconds,
        "once a caption s": seconds * num_captions, "pairs s": compared - seconds, "all s": took, "scores MiB": scores,
        "beside scores MiB": megabytes() - before - scores,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--videos", type=int, default=40)
    parser.add_argument("--captions", type=int, nargs="+", default=[1, 5, 20], help="of each video")
    parser.add_argument("--num-clips", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/matching_cost"))
    parser.add_argument("--one", action="store_true", help="judge here and print JSON")
    arguments = parser.parse_args()
    root = arguments.out / "videos"
    if arguments.one:
        [captions] = arguments.captions
        print(json.dumps(judge(root, arguments.videos, captions, arguments.num_clips, arguments.batch_size)))
        return
    rows(root, arguments.videos, 1)  # make the videos
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for captions in arguments.captions:
        command = [sys.executable, __file__, *sys.argv[1:], "--captions", str(captions), "--one"]
        values = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        cells = [f"{values[name]:.1f}" if isinstance(values[name], float) else str(values[name]) for name in COLUMNS]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
