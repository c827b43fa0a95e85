"""Names and files -> recipes: everything is checked at once, before any slow work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from twinreel import losses
from twinreel.config import Tree, check_options, import_function, load_tree, nearest, validate
from twinreel.data.sources import SOURCES
from twinreel.errors import ConfigError
from twinreel.models import CLASSIFIERS, MATCHERS, MODELS, TOWERS, whole_preprocessing
from twinreel.recipe.recipe import Recipe
from twinreel.recipe.sections import (
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    PreprocessingSection,
    RerankSection,
    TaskSection,
    TrainSection,
)
from twinreel.tasks import TASKS

__all__ = ["build_recipe", "find_recipe", "list_recipes", "load_recipe", "recipe_header"]

# Parameters that twinreel passes itself, or that are keys of a section.
RESERVED = {
    "model": ("vocabulary", "preprocessing", "num_classes", "num_outputs", "sampled_grid_tokens"),
    "task": ("mask", "valid", "text_ids", "own", "negative_seed", "targets"),
    "data": ("manifest", "caption_template"),
    "eval": ("manifest", "caption_template"),
}

_MODELS_OF: dict[str, Mapping[str, Callable[..., Any]]] = {
    "contrastive": TOWERS,
    "action_recognition": CLASSIFIERS,
    "video_text_matching": MATCHERS,
}


def load_recipe(name: str | Path, overrides: Sequence[str] = (), *, eval_source: str | None = None) -> Recipe:
    """A shipped recipe by name, or a YAML file, with `section.key=value` overrides.

    Args:
        name: of `list_recipes`, or a file.
        overrides: laid over it.
        eval_source: takes the place of its `eval.source` and `eval.manifest`; options of another source go with that.

    Raises:
        ConfigError: no such recipe, or anything in it is wrong; all problems at once.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of key=value; got the string {overrides!r}: write [{overrides!r}]")
    tree = load_tree(find_recipe(str(name)), overrides)
    if eval_source is not None:
        _judge_by(tree, eval_source, overrides)
    return build_recipe(tree)


def _judge_by(tree: Tree, source: str, overrides: Sequence[str]) -> None:
    values = tree.values.setdefault("eval", {})
    if not isinstance(values, dict):
        return  # reported by the typed validation
    given = {override.partition("=")[0].partition(".")[2] for override in overrides if override.startswith("eval.")}
    of_data = _section_value(tree, "data", "source")
    own = values.get("source") or ("manifest" if values.get("manifest") is not None else of_data)
    if own == source:
        return
    for key in [key for key in values if key not in EvalSection.model_fields and key not in given]:
        del values[key]
    values |= {"source": None if source == of_data else source, "manifest": None}  # null inherits the options of data


def build_recipe(tree: Tree) -> Recipe:
    """Check a tree of values and turn it into a recipe."""
    sections: dict[str, type[BaseModel]] = {
        "model": ModelSection,
        "task": TaskSection,
        "data": DataSection,
        "optim": OptimSection,
        "train": TrainSection,
        "eval": EvalSection,
        "rerank": RerankSection,
        "model.preprocessing": PreprocessingSection,
    }
    known = {"": list(Recipe.model_fields)} | {name: list(cls.model_fields) for name, cls in sections.items()}
    _fill_task_keys(tree)
    for section, key, choices in _named(tree.values):
        chosen = _choose(tree, section, key, choices)
        if chosen is not None:
            values = tree.values[section]
            free = {name: value for name, value in values.items() if name not in known[section]}
            checked = check_options(tree, section, chosen, free, reserved=RESERVED[section], fields=known[section])
            # What is left out here is not the signature's default: eval inherits from data, sizes come with weights.
            open_ended = section == "eval" and values.get("source") is None
            open_ended |= section == "model" and _sizes_come_with_weights(tree.values)
            values.update({name: checked[name] for name in free if name in checked} if open_ended else checked)
    _check_manifest(tree)
    _check_transform(tree)
    recipe = validate(tree, Recipe, known)
    return _with_whole_preprocessing(recipe)


def _sizes_come_with_weights(values: Mapping[str, Any]) -> bool:
    """Weights of the whole model state its sizes; of a cross-modal model those of its parts do."""
    weights = values["model"].get("weights")
    return isinstance(weights, str) or (isinstance(weights, dict) and _task_name(values) == "video_text_matching")


def _with_whole_preprocessing(recipe: Recipe) -> Recipe:
    """The model's own preprocessing filled in, so that a resolved recipe says everything.

    A user's own model states it itself when it is built, and so may weights that were imported; only what the recipe
    changes is known here.
    """
    section = recipe.model
    if ":" in section.name or isinstance(section.weights, str) or section.options.get("image_tower") is not None:
        return recipe  # stated by the user's model or tower, or perhaps by the weights
    options = {name: value for name, value in section.options.items() if name != "word_vectors"}
    table = _MODELS_OF[recipe.task.name]
    stated = section.preprocessing.model_dump(exclude_none=True)
    whole = whole_preprocessing(table[section.name], options, stated).to_dict()
    named = {name: whole[name] for name in PreprocessingSection.model_fields}
    filled = section.model_copy(update={"preprocessing": PreprocessingSection.model_validate(named)})
    return recipe.model_copy(update={"model": filled})


def _task_name(values: Mapping[str, Any]) -> Any:
    task = values.get("task")
    return task.get("name", "contrastive") if isinstance(task, dict) else "contrastive"


def _fill_task_keys(tree: Tree) -> None:
    """The task's own loss where none is named, and a classifier's activation, so that a resolved recipe says them."""
    task = tree.values.get("task")
    if not isinstance(task, dict):
        return
    usual = losses.MATCHING_LOSSES.get(str(task.get("goal", "retrieval")))
    if task.get("name") == "video_text_matching" and task.get("loss") is None and usual is not None:
        task["loss"] = usual[0]
    if task.get("name") != "action_recognition":
        return
    several, model = bool(task.get("multi_label")), tree.values.get("model")
    if task.get("loss") is None:
        task["loss"] = "binary_cross_entropy" if several else "cross_entropy"
    if several and isinstance(model, dict) and ":" not in str(model.get("name")):
        model.setdefault("head_activation", "sigmoid")


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Callable[..., Any]]]]:
    """The sections that name a function: (section, key, table)."""
    name = _task_name(values)
    yield "model", "name", _MODELS_OF.get(name, TOWERS)
    yield "task", "loss", _losses_of(name, values)
    yield "data", "source", SOURCES
    if isinstance(values.get("eval"), dict):
        yield "eval", "source", SOURCES


def _losses_of(task: str, values: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The losses that go with a task, of video_text_matching those of its goal."""
    if task == "video_text_matching":
        goal = str(values["task"].get("goal", "retrieval"))
        known = losses.MATCHING_LOSSES.get(goal)
        return dict(losses.LOSSES) if known is None else {name: losses.LOSSES[name] for name in known}
    matching = {name for names in losses.MATCHING_LOSSES.values() for name in names}
    classifies = task == "action_recognition"
    return {
        name: loss
        for name, loss in losses.LOSSES.items()
        if name not in matching and (loss in losses.CLASS_LOSSES) == classifies
    }


def _choose(tree: Tree, section: str, key: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    values = tree.values.setdefault(section, {}) if section != "model" else tree.values.get(section)
    if not isinstance(values, dict):
        return None  # reported by the typed validation
    defaults: dict[str, type[BaseModel]] = {"task": TaskSection, "data": DataSection}
    name = values.get(key, defaults[section].model_fields[key].default if section in defaults else None)
    inherits = section == "eval" and name is None
    if inherits:
        name = "manifest" if values.get("manifest") is not None else _section_value(tree, "data", "source")
    if section == "task" and values.get("name", "contrastive") not in TASKS:
        tree.problem("task.name", f"unknown task {values['name']!r}{nearest(str(values['name']), TASKS)}")
    if not isinstance(name, str) or (inherits and ":" not in name and name not in table):
        return None  # of another type, or said of data.source already
    if ":" in name:
        try:
            return import_function(name, f"{section}.{key}")
        except ConfigError as error:
            tree.problem(f"{section}.{key}", str(error))
            return None
    if name not in table:
        other = " (it goes with another task.name or task.goal)" if name in MODELS or name in losses.LOSSES else ""
        tree.problem(f"{section}.{key}", f"{section}.{key}: unknown name {name!r}{other or nearest(name, table)}")
        return None
    return table[name]


def _section_value(tree: Tree, section: str, key: str) -> Any:
    values = tree.values.get(section)
    return values.get(key, DataSection.model_fields[key].default) if isinstance(values, dict) else None


def _check_manifest(tree: Tree) -> None:
    for section in ("data", "eval"):
        values = tree.values.get(section)
        if not isinstance(values, dict):
            continue
        source = values.get("source", "manifest" if section == "data" else None)
        if values.get("manifest") is not None and source not in (None, "manifest"):
            tree.problem(
                f"{section}.manifest",
                f"{section}.manifest goes with {section}.source: manifest, not with {source!r}; leave one out",
            )


def _check_transform(tree: Tree) -> None:
    name = _section_value(tree, "data", "transform")
    if isinstance(name, str) and ":" in name:
        try:
            import_function(name, "data.transform")
        except ConfigError as error:
            tree.problem("data.transform", str(error))


def list_recipes() -> list[str]:
    """The names of the shipped recipes, sorted."""
    folder = resources.files("twinreel") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def recipe_header(name: str) -> str:
    """The first comment line of a shipped recipe, or of a file."""
    first = find_recipe(name).read_text(encoding="utf-8").splitlines()[:1]
    return first[0].removeprefix("#").strip() if first else ""


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe, or the file that is named.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"{name}: no such recipe file; shipped recipes: {', '.join(list_recipes())}")
        return path
    shipped = list_recipes()
    if name not in shipped:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, shipped)} (or the path of a .yaml file)")
    return Path(str(resources.files("twinreel") / "recipes" / f"{name}.yaml"))
