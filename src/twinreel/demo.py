"""The whole story in about two minutes: make videos, train two towers, judge them, search.

The table puts every score beside what it must be compared with: chance, the untrained model, the same model when it
sees one frame repeated (no motion), and an oracle that knows two of the three attributes.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from twinreel.assembly import Run, build_model, build_task, evaluation_rows, load_run, pick_device, training_rows
from twinreel.data.captions import collection_captions
from twinreel.data.clip import Batch, Clip
from twinreel.data.sources.generated import oracle_recall_at_1
from twinreel.errors import ConfigError
from twinreel.evaluation import Report, evaluate_task
from twinreel.log import Progress
from twinreel.recipe import Recipe, load_recipe
from twinreel.search import Found, embed_collection, search_collection
from twinreel.training import train

__all__ = ["DemoResult", "repeat_one_frame", "run_demo"]

MARKER = ".twinreel_demo"
COLUMNS = ("text_to_video/recall_at_1", "text_to_video/recall_at_5", "video_to_text/recall_at_1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo prints. `rows`: label -> the three columns, as fractions; None where it has no meaning."""

    rows: dict[str, tuple[float | None, ...]]
    num_videos: int
    sentence: str
    answers: list[Found]
    seconds: dict[str, float]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "columns": COLUMNS,
            "rows": self.rows,
            "num_videos": self.num_videos,
            "sentence": self.sentence,
            "answers": [asdict(answer) for answer in self.answers],
            "seconds": self.seconds,
            "folder": str(self.folder),
        }

    def to_table(self) -> str:
        """Scores in per cent, the search, and where things lie."""
        lines = [
            f"retrieval among {self.num_videos} held-out videos; no combination of shape, color and motion was trained",
            "",
            f"{'':44}{'text to video':>20}{'video to text':>15}",
            f"{'per cent':44}{'R@1':>12}{'R@5':>8}{'R@1':>15}",
        ]
        for label, values in self.rows.items():
            cells = ["" if value is None else f"{100 * value:.1f}" for value in values]
            lines.append(f"{label:44}{cells[0]:>12}{cells[1]:>8}{cells[2]:>15}")
        lines += ["", f"search: {self.sentence!r}"]
        for answer in self.answers:
            times = f"{answer.start_seconds:5.2f}-{answer.end_seconds:.2f} s"
            lines.append(f"  {answer.score:6.3f}  {times}  {answer.video}")
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        lines += [
            "",
            f"time: {parts}",
            f"run: {self.folder / 'run'}   (twinreel eval {self.folder / 'run'}; twinreel show demo)",
            f"try: twinreel search {self.folder / 'index'} 'a red ring moves left'",
        ]
        return "\n".join(lines)


def repeat_one_frame(batch: Batch) -> Batch:
    """The clips of a batch with their middle frame repeated: what a model without motion would see."""
    middle = batch.frames.shape[2] // 2
    batch.frames = batch.frames[:, :, middle : middle + 1].expand_as(batch.frames).contiguous()
    return batch


def run_demo(folder: str | Path, *, seed: int = 0, overrides: tuple[str, ...] = ()) -> DemoResult:
    """Make the videos, train, evaluate, search.

    Args:
        folder: gets `videos/`, `run/` and `index/`; an earlier demo's run there is replaced.
        seed: of videos and training.
        overrides: further `section.key=value` of the recipe `demo`.

    Raises:
        ConfigError: the folder holds something else.
    """
    folder = Path(folder)
    _make_room(folder)
    seconds: dict[str, float] = {}
    progress = Progress()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        progress.clear()
        print(f"demo: {name} ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        result = call()
        seconds[name] = time.perf_counter() - began
        return result

    recipe = load_recipe(
        "demo", [f"data.root={folder / 'videos'}", f"data.seed={seed}", f"train.seed={seed}", *overrides]
    )
    rows, test_rows = timed("making videos", lambda: (training_rows(recipe), evaluation_rows(recipe)))
    untrained = timed("evaluating the untrained model", lambda: _untrained(recipe, rows, test_rows))
    timed("training", lambda: train(recipe, folder / "run"))
    run = load_run(folder / "run")
    trained = timed("evaluating", lambda: _judge(run, test_rows))
    one_frame = timed("evaluating with one frame", lambda: _judge(run, test_rows, repeat_one_frame))
    sentence = test_rows[0].captions[0].text
    timed("embedding windows", lambda: embed_collection(run, test_rows, folder / "index"))
    answers = timed("searching", lambda: search_collection(folder / "index", sentence, top=3, run=run))
    seconds["in all"] = sum(seconds.values())
    return DemoResult(
        rows=_table(test_rows, trained, untrained, one_frame),
        num_videos=len(test_rows),
        sentence=sentence,
        answers=answers,
        seconds=seconds,
        folder=folder,
    )


def _make_room(folder: Path) -> None:
    """Only what an earlier demo made, known by its marker, is replaced."""
    if folder.is_dir():
        mine = {MARKER, "videos", "run", "index"}
        others = sorted(item.name for item in folder.iterdir() if item.name not in mine)
        if others or (any(folder.iterdir()) and not (folder / MARKER).is_file()):
            raise ConfigError(
                f"{folder} holds what no demo made ({', '.join(others[:3]) or 'no marker'}); choose another --out"
            )
        for name in ("videos", "run", "index"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("made by `twinreel demo`, which may replace this folder\n", encoding="utf-8")


def _untrained(recipe: Recipe, rows: list[Clip], test_rows: list[Clip]) -> Report:
    task = build_task(recipe)
    model = build_model(recipe, task, collection_captions(rows))
    device = pick_device(recipe.train.device)
    return evaluate_task(
        model.to(device), task, test_rows, recipe.eval, device=device, num_workers=recipe.data.num_workers
    )


def _judge(run: Run, rows: list[Clip], transform: Callable[[Batch], Batch] | None = None) -> Report:
    device = pick_device(run.recipe.train.device)
    return evaluate_task(
        run.model.to(device), run.task, rows, run.recipe.eval, device=device, transform=transform,
        num_workers=run.recipe.data.num_workers,
    )  # fmt: skip


def _table(
    test_rows: list[Clip], trained: Report, untrained: Report, one_frame: Report
) -> dict[str, tuple[float | None, ...]]:
    names = ("shape", "color", "motion")
    two = {pair: oracle_recall_at_1(test_rows, pair) for pair in combinations(names, 2)}
    best = max(two, key=lambda pair: two[pair])
    return {
        "trained": tuple(trained.metrics.get(column) for column in COLUMNS),
        "the same, one frame repeated (no motion)": tuple(one_frame.metrics.get(column) for column in COLUMNS),
        "untrained": tuple(untrained.metrics.get(column) for column in COLUMNS),
        "chance": tuple(trained.metrics.get(f"chance/{column}") for column in COLUMNS),
        f"oracle that knows {best[0]} and {best[1]} only": (two[best], None, two[best]),
        "oracle that knows all three": (oracle_recall_at_1(test_rows), None, oracle_recall_at_1(test_rows)),
    }
