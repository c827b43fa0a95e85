"""Parameter groups, optimizers, averaged weights, and the learning rate as a pure function of the step."""

from twinreel.optim.average import WeightAverage
from twinreel.optim.groups import freeze, layers_by_depth, parameter_groups
from twinreel.optim.optimizers import build_optimizer, clip_gradients
from twinreel.optim.schedules import Schedule, build_schedule

__all__ = [
    "Schedule",
    "WeightAverage",
    "build_optimizer",
    "build_schedule",
    "clip_gradients",
    "freeze",
    "layers_by_depth",
    "parameter_groups",
]
