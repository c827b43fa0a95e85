"""YAML and `key=value` overrides into typed, immutable sections, with every problem reported at once.

The rules are those of a form, not of a language: no inheritance between files, no interpolation, a key may stand
once. A problem names its place (`recipe.yaml:5` or `command line`), what was got, and the nearest valid key.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from twinreel.errors import ConfigError

__all__ = ["Tree", "check_options", "import_function", "load_tree", "nearest", "option_defaults", "validate"]

COMMAND_LINE = "command line"
# What others call our keys.
ALIASES = {
    "lr": "learning_rate",
    "bs": "global_batch_size",
    "batch_size": "global_batch_size",
    "epochs": "num_epochs",
    "fps": "frame_rate",
    "steps": "num_steps",
    "workers": "num_workers",
    "image_size": "crop_size",
}
Section = TypeVar("Section", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of scalars: `1e-4` is a number; `on`, `no` and dates are words."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":timestamp", ":float", ":int"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")  # 010 and 1:30 are words, not 8 and 90
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false|True|False)$"), list("tTfF"))


@dataclass(slots=True)
class Tree:
    """Nested values, where each of them was written, and what is wrong so far."""

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def where(self, key: str) -> str:
        """The place of a dotted key, or of its nearest written parent."""
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, self.origins.get("", "recipe"))

    def problem(self, key: str, text: str) -> None:
        """Note a problem at a dotted key."""
        self.problems.append(f"{self.where(key)}: {text}")

    def raise_problems(self) -> None:
        """Raise one ConfigError with all problems, if there are any."""
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for a misspelt name, or the list of what exists."""
    known = sorted(candidates)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(known)}" if known else ""


def nearest_key(dotted: str, sections: Mapping[str, Iterable[str]]) -> str:
    """`; did you mean section.key?` for a misspelt dotted key: in its own section, else in another, else a list.

    Only the last part is compared: a shared section name makes no two keys alike.
    """
    parent, _, last = dotted.rpartition(".")
    prefix = f"{parent}." if parent else ""
    here = sorted(sections.get(parent, ()))
    last = ALIASES.get(last, last)
    for key in difflib.get_close_matches(last, here, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{key}?"
    everywhere = {key: f"{name}.{key}" if name else key for name, keys in sections.items() for key in keys}
    for key in difflib.get_close_matches(last, sorted(everywhere), n=1, cutoff=0.8):
        return f"; did you mean {everywhere[key]}?"
    return f"; there are: {', '.join(prefix + key for key in here)}" if here else ""


def load_tree(path: Path | None, overrides: Sequence[str] = (), *, text: str | None = None) -> Tree:
    """Read a YAML file (or `text`) and lay `key=value` overrides over it.

    Raises:
        ConfigError: the file cannot be read or is not YAML. Other problems are collected in the result.
    """
    name = path.name if path is not None else "recipe"
    if text is None:
        if path is None:
            text = ""
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path}: cannot read this recipe: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason})") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        tree = Tree({}, {"": name})
        if node is not None:
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"{name}:1: a recipe is a mapping of sections (model:, task:, data:, ...)")
            tree.values = _mapping(loader, node, "", name, tree)
    except RecursionError as error:
        raise ConfigError(f"{name}: an anchor holds itself (&x ... *x); write the values out") from error
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: not valid YAML: a tag (!!...) does not fit its value: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    for override in overrides:
        _override(tree, override)
    return tree


def _mapping(loader: _Loader, node: yaml.MappingNode, prefix: str, name: str, tree: Tree) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        dotted = f"{prefix}{key}"
        place = f"{name}:{key_node.start_mark.line + 1}"
        if key in values:
            tree.problems.append(f"{place}: key {dotted} stands twice (first at {tree.origins[dotted]}); keep one")
            continue
        tree.origins[dotted] = place
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _mapping(loader, value_node, f"{dotted}.", name, tree)
        else:
            values[key] = loader.construct_object(value_node, deep=True)
    return values


def _override(tree: Tree, override: str) -> None:
    key, equals, raw = override.partition("=")
    key = key.strip()
    if not equals or not key:
        tree.problems.append(
            f"{COMMAND_LINE}: {override!r} is not key=value; write for example optim.learning_rate=0.001"
        )
        return
    try:
        value = yaml.load(raw, Loader=_Loader) if raw.strip() else ""
        json.dumps(value, default=str)
    except yaml.YAMLError:
        value = raw  # a sentence with a colon, a template with braces: plain text
    except (ValueError, AttributeError, RecursionError) as error:
        tree.problems.append(f"{COMMAND_LINE}: {key}: {_short(raw)} is no value ({error})")
        return
    *parents, last = key.split(".")
    level = tree.values
    for depth, parent in enumerate(parents):
        tree.origins.setdefault(".".join(parents[: depth + 1]), COMMAND_LINE)
        below = level.get(parent)
        if below is None:
            below = level[parent] = {}
        if not isinstance(below, dict):
            tree.problems.append(
                f"{COMMAND_LINE}: cannot set {key}: {'.'.join(parents[: depth + 1])} is the value {below!r}, "
                "not a section"
            )
            return
        level = below
    level[last] = value
    tree.origins[key] = COMMAND_LINE


def validate(tree: Tree, section: type[Section], known: Mapping[str, Iterable[str]]) -> Section:
    """The whole tree as one typed object; all problems at once.

    Args:
        tree: what was written.
        section: the pydantic class of the whole recipe.
        known: for dotted section names (`""` is the top), the keys that exist there, for suggestions.
    """
    try:
        result = section.model_validate_json(json.dumps(tree.values, default=str), strict=True)
    except ValidationError as error:
        for item in error.errors():
            _translate(tree, item, known)
        result = None
    tree.raise_problems()
    assert result is not None, "a validation error without problems"
    return result


def _translate(tree: Tree, item: Any, known: Mapping[str, Iterable[str]]) -> None:
    location = [str(part) for part in item["loc"]]
    dotted = ".".join(location)
    while dotted and dotted not in tree.origins and item["type"] not in ("missing",):
        dotted = dotted.rpartition(".")[0]  # drop pydantic's own names for branches of a union
    kind = item["type"]
    if kind == "extra_forbidden":
        tree.problem(dotted, f"unknown key {dotted}{nearest_key(dotted, known)}")
    elif kind == "missing":
        tree.problem(dotted, f"{'.'.join(location)} is missing and has no default; add it")
    elif kind == "value_error":  # of several keys of a section: the place is the command line if any of them is there
        overridden = [
            key for key, place in tree.origins.items() if place == COMMAND_LINE and key.startswith(f"{dotted}.")
        ]
        tree.problem(overridden[0] if overridden else dotted, f"{dotted or 'recipe'}: {item['ctx']['error']}")
    else:
        tree.problem(dotted, f"{dotted}: got {_short(item['input'])}; {_lower_first(item['msg'])}")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def import_function(name: str, what: str) -> Callable[..., Any]:
    """The user's own function behind `package.module:function`, importable from the current folder too.

    Raises:
        ConfigError: the name is not of that form, the module does not import, or has no such function.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(f"{what} {name!r} is not of the form package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(f"{what} {name!r}: importing {module_name} failed: {error}") from error
        raise ConfigError(
            f"{what} {name!r}: no module named {module_name}; it must be installed or lie in the current folder"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{what} {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{what} {name!r}: {module_name} has no function {function_name}{nearest(function_name, defined)}"
        )
    return typing.cast("Callable[..., Any]", function)


def _options(function: Callable[..., Any], reserved: Iterable[str]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in set(reserved)
    }


def option_defaults(function: Callable[..., Any], reserved: Iterable[str] = ()) -> dict[str, Any]:
    """The keyword-only options of a function that have defaults: the signature is the schema."""
    return {
        name: parameter.default
        for name, parameter in _options(function, reserved).items()
        if parameter.default is not inspect.Parameter.empty
    }


def _writable(annotation: Any) -> Any:
    """What of an annotation a YAML can hold: `float | Tensor` is a float there."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    kept = []
    for member in typing.get_args(annotation):
        try:
            TypeAdapter(member)
        except PydanticSchemaGenerationError:
            continue
        kept.append(member)
    return typing.Union[tuple(kept)]  # noqa: UP007  (built from a list)


def check_options(
    tree: Tree,
    section: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    reserved: Iterable[str] = (),
    fields: Iterable[str] = (),
) -> dict[str, Any]:
    """Check a section's free keys against the chosen function's signature; problems go to the tree.

    Args:
        tree: where problems are noted.
        section: the section's name, `model`.
        function: what was chosen; its keyword-only parameters are the options.
        options: the section's free keys.
        reserved: parameters that twinreel passes itself.
        fields: the section's own keys, for suggestions.

    Returns:
        The options with the signature's defaults filled in, lists as the annotation wants them.
    """
    parameters = _options(function, reserved)
    hints = typing.get_type_hints(function)
    checked = option_defaults(function, reserved)
    title = getattr(function, "__name__", str(function))
    for name, value in options.items():
        dotted = f"{section}.{name}"
        if name not in parameters:
            text = nearest_key(dotted, {section: [*parameters, *fields]})
            tree.problem(dotted, f"unknown key {dotted} (not an option of {title}){text}")
            continue
        try:
            adapter = TypeAdapter(_writable(hints.get(name, Any)))
            checked[name] = adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            messages = "; ".join(dict.fromkeys(_lower_first(item["msg"]) for item in error.errors()))
            tree.problem(dotted, f"{dotted}: got {_short(value)}; {messages}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            tree.problem(section, f"{section}.{name} is missing: {title} needs it")
    return checked
