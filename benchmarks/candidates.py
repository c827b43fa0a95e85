"""Do the candidates of MIL-NCE matter? The demo with K = 4 and with K = 1 captions a clip, over seeds.

    python benchmarks/candidates.py --seeds 0 1 2 3 4 --out runs/candidates

A seed decides videos, captions, order and weights. Narration is early, late or about nothing on screen, so a single
caption (K = 1) is often wrong; with K = 4 the loss may choose. Prints per cent; about two minutes a run on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from twinreel.demo import run_demo

T2V, V2T = 0, 2  # columns of the demo's table


def run_seed(folder: Path, seed: int, num_candidates: int) -> dict[str, float]:
    """One demo; R@1 as fractions and the seconds it took."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    result = run_demo(folder, seed=seed, overrides=(f"task.num_candidates={num_candidates}",))
    rows = list(result.rows.values())
    shutil.rmtree(folder / "videos")
    return {
        "t2v": rows[0][T2V], "v2t": rows[0][V2T], "one_frame": rows[1][T2V], "untrained": rows[2][T2V],
        "two_of_three": rows[4][T2V], "seconds": time.perf_counter() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--candidates", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/candidates"))
    arguments = parser.parse_args()
    columns = ("t2v", "v2t", "one_frame", "untrained", "two_of_three")
    print(
        "| K | seed | R@1 text to video | R@1 video to text | one frame | untrained | oracle two of three | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    means = {}
    for k in arguments.candidates:
        results = []
        for seed in arguments.seeds:
            values = run_seed(arguments.out / f"k{k}_seed{seed}", seed, k)
            results.append(values)
            cells = " | ".join(f"{100 * values[name]:.1f}" for name in columns)
            print(f"| {k} | {seed} | {cells} | {values['seconds']:.0f} |", flush=True)
        means[k] = {name: sum(values[name] for values in results) / len(results) for name in columns}
        cells = " | ".join(f"{100 * means[k][name]:.1f}" for name in columns)
        print(f"| {k} | mean | {cells} | |")
        print(f"| {k} | worst | {100 * min(values['t2v'] for values in results):.1f} | | | | | |", flush=True)
    if len(means) > 1:
        most, least = max(means), min(means)
        print(f"\nK = {most} over K = {least}: {100 * (means[most]['t2v'] - means[least]['t2v']):+.1f} points of R@1")


if __name__ == "__main__":
    main()
