"""What the configuration inside a PySlowFast checkpoint says of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from twinreel.errors import CheckpointError
from twinreel.models.preprocessing import Preprocessing

__all__ = ["FoundingConfig", "read_config"]

_POOL_AFTER_FIRST_STAGE = {"c2d": True, "i3d": True, "c2d_nopool": False, "slow_c2d": False}
# Their loaders read pictures with OpenCV, blue first; REVERSE_INPUT_CHANNEL turns the order of any loader round.
_READ_BY_OPENCV = ("ssv2", "charades")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundingConfig:
    """The parts of a configuration that belong to a model.

    Args:
        arch: MODEL.ARCH.
        options: of twinreel's builders.
        preprocessing: values that it states.
        pool_after_first_stage: None = the architecture has no such choice.
        judging: how it was tested, under the names of a recipe's eval section.
    """

    arch: str
    options: dict[str, Any]
    preprocessing: dict[str, Any]
    pool_after_first_stage: bool | None
    judging: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """In one line, for people."""
        values = {**self.options, **self.preprocessing}
        return ", ".join([self.arch, *(f"{name} {value}" for name, value in values.items())])

    def reads_as(self, preprocessing: Preprocessing) -> bool:
        """Whether it reads frames, stride and crop of this preprocessing."""
        names = ("num_frames", "frame_stride", "crop_size")
        return all(self.preprocessing.get(name) == getattr(preprocessing, name) for name in names)


def read_config(text: str, source: str) -> FoundingConfig:
    """What a configuration says; keys that say nothing of a model are not looked at.

    Raises:
        CheckpointError: it is no YAML of a PySlowFast configuration.
    """
    try:
        values = yaml.safe_load(text)
        data, model = _section(values, "DATA"), _section(values, "MODEL")
        arch = str(model["ARCH"])
        options = {"dropout": model.get("DROPOUT_RATE"), "head_activation": model.get("HEAD_ACT")}
        if _blocks(_section(values, "NONLOCAL").get("LOCATION")):
            options["non_local"] = _section(values, "NONLOCAL").get("INSTANTIATION")
        test = _section(values, "TEST")
        preprocessing = _preprocessing(data, test, str(_section(values, "TRAIN").get("DATASET")))
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: the configuration inside (cfg) is none of PySlowFast's: {type(error).__name__} {error}"
        ) from error
    return FoundingConfig(
        arch=arch,
        options={name: value for name, value in options.items() if value is not None},
        preprocessing={name: value for name, value in preprocessing.items() if value is not None},
        pool_after_first_stage=_POOL_AFTER_FIRST_STAGE.get(arch),
        judging=_judging(data, test),
    )


def _section(values: Any, name: str) -> Mapping[str, Any]:
    section = values.get(name, {})
    if not isinstance(section, Mapping):
        raise TypeError(f"{name} is no section")
    return section


def _judging(data: Mapping[str, Any], test: Mapping[str, Any]) -> dict[str, Any]:
    """Views and how they are combined; what it does not say has the founding default."""
    crops = int(test.get("NUM_SPATIAL_CROPS", 3))
    return {
        "num_clips": int(test.get("NUM_ENSEMBLE_VIEWS", 10)),
        "num_crops": crops,
        "crop_size": data.get("TEST_CROP_SIZE"),
        "windows": "slowfast_offset" if data.get("USE_OFFSET_SAMPLING", False) else "slowfast",
        "combine_views": "max" if data.get("ENSEMBLE_METHOD") == "max" else "mean",
    }


def _preprocessing(data: Mapping[str, Any], tested: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    crop, test = data.get("TRAIN_CROP_SIZE"), data.get("TEST_CROP_SIZE")
    scales = data.get("TRAIN_JITTER_SCALES")
    if int(tested.get("NUM_SPATIAL_CROPS", 3)) == 1 and scales and crop:  # the center, of the least training scale
        test = max(int(scales[0]), crop)
    rate, stride = data.get("TARGET_FPS", 30), data.get("SAMPLING_RATE")
    bgr = (dataset in _READ_BY_OPENCV) != bool(data.get("REVERSE_INPUT_CHANNEL", False))
    return {
        "num_frames": data.get("NUM_FRAMES"),
        "frame_stride": stride if rate == 30 else None,
        "frame_rate": rate / stride if rate != 30 and stride else None,
        "crop_size": crop,
        "short_side": max(crop, test) if crop and test else None,
        "mean": data.get("MEAN"),
        "std": data.get("STD"),
        "channel_order": "bgr" if bgr else None,
    }


def _blocks(location: Any) -> bool:
    """Whether any stage has non-local blocks: LOCATION lists their places, nested by stage and pathway."""
    if isinstance(location, list):
        return any(_blocks(item) for item in location)
    return isinstance(location, int)
