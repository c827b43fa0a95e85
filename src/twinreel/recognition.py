"""A trained classifier on videos: what happens in each, over the whole of it and window by window, with the seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinreel.assembly import Run, load_run, pick_device
from twinreel.data.clip import Clip, Fault
from twinreel.data.windows import check_stride, see_windows
from twinreel.errors import ConfigError, DataError
from twinreel.metrics import aggregate_views, ranked_classes
from twinreel.models.preprocessing import Preprocessing
from twinreel.tasks import ActionRecognition

__all__ = ["NamedScore", "Recognition", "SpanOfClasses", "recognize"]

WINDOWS_AT_ONCE = 16
SHOWN_A_WINDOW = 3  # classes, in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedScore:
    """A class and how strongly the model says it: a probability, unless its head has no activation."""

    name: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOfClasses:
    """The best classes of the window [start, end), seconds."""

    start_seconds: float
    end_seconds: float
    classes: list[NamedScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognition:
    """What happens in a video: the best classes over all its windows, and those of each window, in order of time.

    `repeated_frames` counts frames that repeat the last one of a video shorter than a window.
    """

    video: str
    classes: list[NamedScore]
    windows: list[SpanOfClasses]
    repeated_frames: int

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return asdict(self)

    def to_table(self) -> str:
        """For people: the whole video first, a class a line, then a line a window."""
        count = len(self.windows)
        repeated = f", {self.repeated_frames} frames repeat the last one" if self.repeated_frames else ""
        windows = "1 window" if count == 1 else f"{count} windows"
        lines = [f"{self.video}  ({self.windows[-1].end_seconds:.2f} s, {windows}{repeated})"]
        lines += [f"  {item.score:7.3f}  {item.name}" for item in self.classes]
        if count > 1:
            for window in self.windows:
                best = ", ".join(f"{item.name} {item.score:.3f}" for item in window.classes[:SHOWN_A_WINDOW])
                lines.append(f"  {window.start_seconds:9.2f}-{window.end_seconds:.2f} s  {best}")
        return "\n".join(lines)


def recognize(
    run: str | Path | Run,
    videos: Sequence[str | Path],
    *,
    checkpoint: str | None = None,
    top: int = 5,
    stride_seconds: float | None = None,
    faults: list[Fault] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[Recognition]:
    """The best classes of each video, over windows that cover it from its first to its last frame.

    The scores of the windows are combined as the run's `eval.combine_views` says.

    Args:
        run: a run folder, or a loaded run.
        videos: files.
        checkpoint: `last`, `best`, `step_N`.
        top: how many classes.
        stride_seconds: from window to window; None = a window's length.
        faults: takes up why videos could not be read, which are then left out; None = the first one raises.
        report: called with (videos done, videos in all).

    Raises:
        ConfigError: the run is not of a classifier, or the stride is none.
        DataError: a video cannot be read, or a score is not finite.
    """
    if isinstance(videos, str | Path):
        raise ConfigError("recognize takes a list: videos=[...]")
    if top < 1:
        raise ConfigError(f"top={top}: must be at least 1")
    check_stride(stride_seconds)
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint)
    if not isinstance(loaded.task, ActionRecognition):
        raise ConfigError(
            f"{loaded.folder}: trained with task.name={loaded.task.name}, it has no classes; give sentences to choose "
            "from: twinreel predict RUN VIDEO --sentence TEXT"
        )
    device = pick_device(loaded.recipe.train.device)
    loaded.model.to(device)
    found = []
    for number, video in enumerate(map(str, videos), start=1):
        try:
            found.append(_recognize_one(loaded, loaded.task, video, device, top, stride_seconds))
        except DataError as error:
            if faults is None:
                raise
            faults.append(Fault(id=video, video=video, reason=str(error)))
        if report is not None:
            report(number, len(videos))
    return found


def _recognize_one(
    run: Run, task: ActionRecognition, video: str, device: torch.device, top: int, stride_seconds: float | None
) -> Recognition:
    preprocessing: Preprocessing = run.model.preprocessing  # type: ignore[assignment]
    data, faults = run.recipe.data, list[Fault]()
    seen = list(
        see_windows(
            [Clip(id=video, video=video)],
            preprocessing,
            lambda clips: task.scores(run.model, clips),
            faults,
            stride_seconds=stride_seconds,
            device=device,
            at_once=min(WINDOWS_AT_ONCE, run.recipe.eval.batch_size),
            num_workers=data.num_workers,
            worker_start=data.worker_start,
        )
    )
    if faults:
        raise DataError(faults[0].reason)
    _, windows, scores, repeated = seen[0]
    bad = (~scores.isfinite().all(1)).nonzero().flatten().tolist()
    if bad:
        window = windows[bad[0]]
        raise DataError(
            f"{video}: {len(bad)} of {len(windows)} windows have scores that are not finite (first: "
            f"{window.start_seconds:.2f}-{window.end_seconds:.2f} s); look at the weights"
        )
    views = [(video, place) for place in range(len(windows))]
    whole = aggregate_views(scores, views, num_views=len(windows), how=run.recipe.eval.combine_views)
    by_window = _best(task, scores, top)
    return Recognition(
        video=video,
        classes=_best(task, whole.scores, top)[0],
        windows=[
            SpanOfClasses(start_seconds=window.start_seconds, end_seconds=window.end_seconds, classes=classes)
            for window, classes in zip(windows, by_window, strict=True)
        ],
        repeated_frames=repeated,
    )


def _best(task: ActionRecognition, scores: Tensor, top: int) -> list[list[NamedScore]]:
    """The best classes of each row of scores (N, C); of equal ones the first."""
    ranked = ranked_classes(scores, torch.zeros_like(scores))[:, :top].tolist()
    return [
        [NamedScore(name=task.classes.names[place], score=float(own[place])) for place in places]
        for own, places in zip(scores, ranked, strict=True)
    ]
