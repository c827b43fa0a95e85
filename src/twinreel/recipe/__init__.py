"""The recipe: the typed table of contents of a run.

Sections are immutable. `model`, `task`, `data` and `eval` also take the options of what they name: those are checked
against that function's own signature, which is the schema, written once. Nothing is inherited between files.
"""

from __future__ import annotations

from twinreel.recipe.loading import build_recipe, find_recipe, list_recipes, load_recipe, recipe_header
from twinreel.recipe.recipe import Recipe, cadence_steps
from twinreel.recipe.sections import (
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    PreprocessingSection,
    TaskSection,
    TrainSection,
)

__all__ = [
    "DataSection",
    "EvalSection",
    "ModelSection",
    "OptimSection",
    "PreprocessingSection",
    "Recipe",
    "TaskSection",
    "TrainSection",
    "build_recipe",
    "cadence_steps",
    "find_recipe",
    "list_recipes",
    "load_recipe",
    "recipe_header",
]
