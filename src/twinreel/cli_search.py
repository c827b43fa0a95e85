"""`twinreel search`: the right seconds of the right videos. One verb = one thin function."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from twinreel.search import Found

__all__ = ["search_command"]


def search_command(
    index: str,
    sentence: str,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. rerank.run=runs/matching rerank.k=50")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="how many answers")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Find the seconds of the videos that a sentence means; with rerank.run a matching run looks again."""
    from twinreel.log import Progress
    from twinreel.search import search_collection

    progress = Progress()
    answers = search_collection(
        index,
        sentence,
        top=top,
        overrides=overrides or [],
        report=lambda done, total: progress.show(f"looking again at {done}/{total} windows", force=done == total),
    )
    progress.clear()
    if as_json:
        print(json.dumps([asdict(answer) for answer in answers], indent=1, ensure_ascii=False))
    else:
        print("\n".join(_table(answers)))


def _table(answers: Sequence[Found]) -> list[str]:
    """A line an answer; where windows were looked at again, both scores under their names."""
    places = [f"{answer.start_seconds:7.2f}-{answer.end_seconds:.2f} s  {answer.video}" for answer in answers]
    if all(answer.rerank_score is None for answer in answers):
        return [f"{answer.score:7.3f}  {place}" for answer, place in zip(answers, places, strict=True)]
    again = ["-" if answer.rerank_score is None else f"{answer.rerank_score:.3f}" for answer in answers]
    lines = [
        f"{score:>8}  {answer.score:7.3f}  {place}" for score, answer, place in zip(again, answers, places, strict=True)
    ]
    return [f"{'matching':>8}  {'towers':>7}", *lines]
