"""Founding configurations as twinreel's recipes: every key becomes a recipe key, or is named with the reason why not.

PySlowFast's YAMLs: `keys` are the founding keys with defaults and types, `settings` reads a file and its overrides,
`network`, `clips`, `schedule`, `judging` and `leftovers` say what becomes of which key. ClipBERT's JSON files:
`clipbert_keys`, `clipbert_settings`, `clipbert` (model, task, data) and `clipbert_schedule`. `report` puts it into
words, `conversion` checks and writes the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinreel.errors import ConfigError
from twinreel.founding_configs.clipbert import convert_clipbert
from twinreel.founding_configs.clips import convert_clips
from twinreel.founding_configs.conversion import SECTIONS, Conversion, finish
from twinreel.founding_configs.draft import Draft
from twinreel.founding_configs.judging import convert_head, convert_judging, convert_start
from twinreel.founding_configs.leftovers import account_for_the_rest
from twinreel.founding_configs.network import choose_network
from twinreel.founding_configs.schedule import convert_schedule
from twinreel.founding_configs.settings import read_settings

__all__ = ["Conversion", "convert_config"]


def convert_config(
    path: str | Path, overrides: Sequence[str] = (), *, gpus: int | None = None, maps: Sequence[str] = ()
) -> Conversion:
    """The recipe of a PySlowFast YAML, or of a ClipBERT JSON (by its ending), with `KEY VALUE ...` laid over it.

    Args:
        path: the configuration; ending `.json`: ClipBERT's, otherwise PySlowFast's.
        overrides: keys and values in turn.
        gpus: of ClipBERT: how many GPUs its batch was for. A PySlowFast batch is that of a machine.
        maps: of ClipBERT: `/img=/data/lmdb`, where a folder of its container is.

    Raises:
        ConfigError: the file cannot be read; keys are unknown or have values of another type; or no model or option of
            twinreel is what it asks for. All problems of a kind in one message, each with its place.
    """
    if Path(path).suffix.lower() == ".json":
        return convert_clipbert(path, overrides, gpus=gpus, maps=maps)
    if gpus is not None or maps:
        raise ConfigError(
            f"{path}: --gpus and --map go with ClipBERT's JSON files; PySlowFast's YAML says NUM_GPUS and NUM_SHARDS, "
            "and its paths are keys: DATA.PATH_TO_DATA_DIR /data/kinetics"
        )
    settings = read_settings(path, overrides)
    draft = Draft(settings, {section: {} for section in SECTIONS})
    name = choose_network(draft)
    convert_head(draft, name)
    convert_clips(draft)
    convert_schedule(draft)
    convert_judging(draft)
    convert_start(draft)
    account_for_the_rest(draft)
    words = "".join(f" {key} {value}" for key, value in zip(overrides[::2], overrides[1::2], strict=True))
    return finish(draft, f"{Path(path).name}{words}", num_gpus=settings["NUM_GPUS"])
