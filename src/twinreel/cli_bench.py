"""`twinreel bench ...`: where time goes, and which knob to turn. One verb = one thin function."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["bench_app"]

bench_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Where time goes, and which knob to turn.",
)


@bench_app.callback()
def _bench() -> None:
    """Where time goes, and which knob to turn."""


@bench_app.command()
def loader(
    recipe: str,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.seed=2")] = None,
    clips: Annotated[int, typer.Option(min=4, help="how many are read")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Measure reading stage by stage, the codec's floor, and what the device will wait."""
    from twinreel.bench import bench_loader
    from twinreel.log import Progress
    from twinreel.recipe import load_recipe

    progress = Progress()
    report = bench_loader(load_recipe(recipe, overrides or []), clips=clips, say=progress.show)
    progress.clear()
    print(json.dumps(report.to_json(), indent=1, ensure_ascii=False)) if as_json else print(report.to_table())


@bench_app.command()
def step(
    recipe: str,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.seed=2")] = None,
    clips: Annotated[int | None, typer.Option(min=1, help="at once, for the times; default 2, on a GPU more")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Measure a training step on random clips: time and memory part by part, and how many clips fit at once."""
    from twinreel.bench_step import bench_step
    from twinreel.log import Progress
    from twinreel.recipe import load_recipe

    progress = Progress()
    report = bench_step(load_recipe(recipe, overrides or []), clips=clips, say=progress.show)
    progress.clear()
    print(json.dumps(report.to_json(), indent=1, ensure_ascii=False)) if as_json else print(report.to_table())
