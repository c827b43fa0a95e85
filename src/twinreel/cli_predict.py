"""`twinreel predict`: what is seen in videos, by a run of any task. One verb = one thin function."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinreel.errors import ConfigError

if TYPE_CHECKING:
    from twinreel.assembly import Run
    from twinreel.prediction import Answer, Prediction

__all__ = ["predict_command"]


def predict_command(
    run: str,
    videos: Annotated[list[str], typer.Argument(metavar="VIDEO...")],
    sentence: Annotated[list[str] | None, typer.Option(help="a sentence to choose from; repeatable")] = None,
    sentences: Annotated[Path | None, typer.Option(help="a file, one sentence a line")] = None,
    question: Annotated[str | None, typer.Option(help="to be answered, by a run that was trained for it")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many a video")] = 5,
    stride_seconds: Annotated[float | None, typer.Option(help="window to window; default a window's length")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="last, best or step_N; default best, else last")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Name what happens in each video, window by window; rank a list of sentences for it; or answer a question."""
    from twinreel.assembly import load_run
    from twinreel.prediction import answer, predict

    loaded = load_run(run, checkpoint)
    listed = sentence is not None or sentences is not None
    if loaded.task.name == "action_recognition":
        _recognize(loaded, videos, listed, question, top, stride_seconds, as_json)
        return
    choices = list(sentence or [])
    if sentences is not None:
        choices += [line.strip() for line in _read_text(sentences).splitlines() if line.strip()]
    found: Sequence[Sequence[Prediction | Answer]]
    if question is not None and not listed:
        found = answer(loaded, videos, question, top=top, stride_seconds=stride_seconds)
    else:
        ranked = predict(loaded, videos, choices, question=question, stride_seconds=stride_seconds)
        found = [own[:top] for own in ranked]
    if as_json:
        print(json.dumps([[asdict(item) for item in own] for own in found], indent=1, ensure_ascii=False))
        return
    for own in found:
        print(own[0].video)
        for item in own:
            print(f"  {item.score:7.3f}  {item.start_seconds:7.2f}-{item.end_seconds:.2f} s  {_said(item)}")


def _said(item: Prediction | Answer) -> str:
    from twinreel.prediction import Answer

    return item.answer if isinstance(item, Answer) else item.sentence


def _recognize(
    run: Run,
    videos: list[str],
    has_sentences: bool,
    question: str | None,
    top: int,
    stride_seconds: float | None,
    as_json: bool,
) -> None:
    from twinreel.data.clip import Fault
    from twinreel.log import Progress
    from twinreel.recognition import recognize

    if has_sentences or question is not None:
        raise ConfigError(
            f"{run.folder} is a classifier: it chooses among its own classes, not among sentences, and answers no "
            "question; leave --sentence, --sentences and --question out"
        )
    progress, faults = Progress(), list[Fault]()
    found = recognize(
        run,
        videos,
        faults=faults,
        top=top,
        stride_seconds=stride_seconds,
        report=lambda done, total: progress.show(f"{done}/{total} videos", force=done == total),
    )
    progress.clear()
    if as_json:
        print(json.dumps([item.to_json() for item in found], indent=1, ensure_ascii=False))
    elif found:
        print("\n".join(item.to_table() for item in found))
    for fault in faults:
        print(f"twinreel: {fault.reason}", file=sys.stderr)
    if faults:
        raise typer.Exit(2)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this file of sentences: {error}") from error
