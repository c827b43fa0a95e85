"""`twinreel import`: a founding system's file of weights becomes one of twinreel's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["import_weights"]


def import_weights(
    file: Annotated[Path, typer.Argument(help=".pyth, .pkl or .pth of PySlowFast, PyTorchVideo or MIL-NCE")],
    model: Annotated[str | None, typer.Option(help="a model of `twinreel list`, where several fit")] = None,
    out: Annotated[Path | None, typer.Option(help="FILE.safetensors; default: beside the file")] = None,
    inspect: Annotated[bool, typer.Option("--inspect", help="say what the file is, write nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Convert a founding system's weights: what they are, which model they fit, and a file for model.weights."""
    from twinreel.models import importing

    result = importing.inspect_weights(file) if inspect else importing.import_weights(file, model=model, out=out)
    print(json.dumps(result.to_json(), indent=1, ensure_ascii=False) if as_json else result.to_table())
