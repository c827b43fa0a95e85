"""`twinreel explain`: where a model looks. One verb = one thin function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["explain_command"]


def explain_command(
    run: str,
    video: str,
    layer: Annotated[str, typer.Option(help="a layer of the model, e.g. s5")],
    out: Annotated[Path, typer.Option(help="the folder for mp4 and pictures")],
    class_name: Annotated[str | None, typer.Option("--class", help="for which class; default the top one")] = None,
    start_seconds: Annotated[float | None, typer.Option(min=0, help="where the clip begins; default middle")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="last, best or step_N; default best, else last")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Show where a classifier looks in a video: Grad-CAM of a layer, as an mp4 and as pictures."""
    from twinreel.explain import explain

    found = explain(
        run,
        video,
        out,
        layer=layer,
        class_name=class_name,
        start_seconds=start_seconds,
        checkpoint=checkpoint,
    )
    print(json.dumps(found.to_json(), indent=1, ensure_ascii=False)) if as_json else print(found.to_table())
