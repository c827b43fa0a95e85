"""`twinreel import`: a founding system's file of weights becomes one of twinreel's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["import_weights"]


def import_weights(
    file: Annotated[Path, typer.Argument(help="of PySlowFast, PyTorchVideo, MIL-NCE, ClipBERT, BERT, detectron2")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="with --run: of the recipe, what weights do not say")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a model of `twinreel list`, where several fit")] = None,
    out: Annotated[Path | None, typer.Option(help="FILE.safetensors; default: beside the file")] = None,
    run: Annotated[Path | None, typer.Option(help="or a run folder, for eval, predict and explain")] = None,
    class_names: Annotated[Path | None, typer.Option(help="with --run: a file with the name of each class")] = None,
    vocabulary: Annotated[
        Path | None, typer.Option(help="with --run, of ClipBERT: its vocab.txt; default: beside the file")
    ] = None,
    inspect: Annotated[bool, typer.Option("--inspect", help="say what the file is, write nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Convert a founding system's weights: what they are, which model they fit, and a file for model.weights."""
    from twinreel.errors import ConfigError
    from twinreel.models import importing

    if run is not None:
        from twinreel.imported_run import import_run

        if out is not None or inspect:
            raise ConfigError("--run goes with neither --out nor --inspect; give one of them")
        made = import_run(
            file, run, model=model, class_names=class_names, vocabulary=vocabulary, overrides=overrides or []
        )
        print(json.dumps(made.to_json(), indent=1, ensure_ascii=False) if as_json else f"{file}: {made.to_table()}")
        return
    if overrides:
        raise ConfigError(f"{overrides[0]} goes with --run: a file of weights has no recipe")
    if class_names is not None:
        raise ConfigError("--class-names goes with --run: a file of weights has no names")
    if vocabulary is not None:
        raise ConfigError("--vocabulary goes with --run; where weights are started from, set model.vocabulary")
    result = importing.inspect_weights(file) if inspect else importing.import_weights(file, model=model, out=out)
    print(json.dumps(result.to_json(), indent=1, ensure_ascii=False) if as_json else result.to_table())
