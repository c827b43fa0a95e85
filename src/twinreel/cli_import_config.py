"""`twinreel import-config`: a PySlowFast YAML or a ClipBERT JSON as a recipe. One verb = one thin function."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["import_config"]


def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="PySlowFast's YAML, or ClipBERT's JSON")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY VALUE", help="SOLVER.BASE_LR 0.05, or fps 1: over the file")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="of ClipBERT: how many its batch was for; 4 unless the file says it")
    ] = None,
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="of ClipBERT: where a folder is, /img=/data/lmdb; repeatable")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the recipe's file; without it the recipe is printed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs: recipe and account")] = False,
) -> None:
    """Turn a PySlowFast YAML or a ClipBERT JSON into a recipe, and say what became of every key."""
    import torch

    from twinreel.data.tables import write_whole
    from twinreel.errors import ConfigError
    from twinreel.founding_configs import convert_config

    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already and may have been edited; give another --out, or remove it")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    result = convert_config(file, overrides or [], gpus=gpus, maps=maps or [])
    if out is not None:
        write_whole(out, result.yaml)
    present = torch.cuda.device_count()
    if result.num_gpus > present:
        text = f"NUM_GPUS={result.num_gpus}: this machine has {present}; the recipe is the same on any number"
        print(f"twinreel: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"recipe": result.values, "keys": result.rows}, indent=1, ensure_ascii=False))
        return
    print(result.account, file=sys.stderr)
    if out is None:
        print(result.yaml, end="")
    else:
        print(out)
