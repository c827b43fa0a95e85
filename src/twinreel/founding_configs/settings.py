"""A PySlowFast YAML and its `KEY VALUE` overrides as typed values, each with its place; all problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from twinreel.errors import ConfigError
from twinreel.founding_configs.keys import GROUPS, KEYS
from twinreel.founding_configs.values import parse_value, short

__all__ = ["Settings", "Written", "read_configuration", "read_settings"]

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Written:
    """A value that was given, and where: `file:line` or `command line`."""

    value: Any
    place: str


@dataclass(slots=True)
class Settings:
    """What a file and overrides say. `settings[key]` is the given value, else the founding system's default.

    Args:
        source: the name of the file.
        written: what was given.
        notes: what the user should know of the file.
        problems: what is wrong so far.
        defaults: of all keys of the system.
        system: its name.
    """

    source: str
    written: dict[str, Written] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    defaults: Mapping[str, Any] = field(default_factory=lambda: KEYS)
    system: str = "PySlowFast"

    def __getitem__(self, key: str) -> Any:
        if key in self.written:
            return self.written[key].value
        default = self.defaults[key]
        return list(default) if isinstance(default, tuple) else default

    def __contains__(self, key: object) -> bool:
        return key in self.written

    def raise_problems(self) -> None:
        """Raise one ConfigError with all problems, if there are any."""
        if self.problems:
            raise ConfigError("\n".join(dict.fromkeys(self.problems)))


def read_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """The values of a YAML file, with `KEY VALUE ...` laid over it.

    Args:
        path: the YAML.
        overrides: keys and values in turn, as PySlowFast's `--opts` takes them.

    Raises:
        ConfigError: the file cannot be read or is not YAML; or unknown keys (with the nearest one), values of another
            type, a key without a value: all of these in one message.
    """
    path = Path(path)
    settings = Settings(path.name)
    for key, value, line in _entries(path.name, read_configuration(path, "PySlowFast's YAML"), settings):
        _take(settings, key, value, f"{path.name}:{line}")
    _lay_over(settings, overrides)
    settings.raise_problems()
    return settings


def read_configuration(path: Path, what: str) -> str:
    """The text of a file.

    Args:
        path: the file.
        what: it should be, for the message.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason}); give {what}") from error


def _entries(name: str, text: str, settings: Settings) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, value, line) of all that is no section."""
    try:
        loader = yaml.SafeLoader(text)  # YAML 1.1, as PySlowFast reads it: `yes` is true, `1e-4` a text
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{name}: the file is empty; give PySlowFast's YAML")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}:1: PySlowFast's YAML has sections (TRAIN:, DATA:, MODEL:, ...); this has none")
        entries = list(_walk(loader, node, "", settings))
    except yaml.YAMLError as error:
        raise ConfigError(_syntax(name, error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    yield from entries


def _syntax(name: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    line = f":{mark.line + 1}" if mark is not None else ""
    hint = ""
    if "block end" in problem or "mapping values" in problem or "block mapping" in str(error):
        hint = "; the keys of a section begin in the same column: look at the indentation of this line"
    return f"{name}{line}: not valid YAML: {problem}{hint}"


def _walk(loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str, settings: Settings) -> Iterator[Any]:
    loader.flatten_mapping(node)  # `<<: *anchor`
    last: dict[str, tuple[int, yaml.Node]] = {}
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in last:
            lines = f"in lines {last[key][0]} and {line}"
            settings.notes.append(f"{key} stands twice, {lines}: the last one counts, as in PySlowFast")
        last[key] = line, value_node
    for key, (line, value_node) in last.items():
        if isinstance(value_node, yaml.MappingNode) and (value_node.value or key in GROUPS):
            if key in KEYS and key not in GROUPS:
                settings.problems.append(f"{settings.source}:{line}: {key} is a value, not a section")
            else:
                yield from _walk(loader, value_node, f"{key}.", settings)
            continue
        value = loader.construct_object(value_node, deep=True)
        if not (value is None and key in GROUPS):  # a section whose keys are all commented out
            yield key, value, line


def _lay_over(settings: Settings, overrides: Sequence[str]) -> None:
    for key, value in zip(overrides[::2], overrides[1::2], strict=False):
        _take(settings, key, value, COMMAND_LINE)
    if len(overrides) % 2:
        alone = overrides[-1]
        hint = f": write {alone.replace('=', ' ', 1)}, with a space" if "=" in alone else f": write {alone} VALUE"
        settings.problems.append(f"{COMMAND_LINE}: {alone} has no value; overrides are keys and values in turn{hint}")


def _take(settings: Settings, key: str, value: object, place: str) -> None:
    if key == "_BASE_":
        settings.problems.append(f"{place}: _BASE_ ({short(value)}): inheritance is not read; put the keys in one file")
    elif key not in KEYS:
        what = "is a section, not a key" if key in GROUPS else "unknown key"
        text = f"{key} {what}; it has {_listed(key)}" if key in GROUPS else f"{what} {key}{_nearest(key)}"
        settings.problems.append(f"{place}: {text}")
    else:
        try:
            settings.written[key] = Written(parse_value(key, value), place)
        except ValueError as error:
            settings.problems.append(f"{place}: {key}: {error}")


def _listed(group: str) -> str:
    return ", ".join(key for key in KEYS if key.startswith(f"{group}."))


def _nearest(key: str) -> str:
    """`; did you mean ...?`: the same name in another section, else a like one in this section, else anywhere."""
    group, _, name = key.upper().rpartition(".")
    same = [known for known in KEYS if known.rpartition(".")[2] == name]
    groups = difflib.get_close_matches(group, sorted(GROUPS), n=1, cutoff=0.7) if group else [""]
    here = {known.rpartition(".")[2]: known for known in KEYS if groups and known.rpartition(".")[0] == groups[0]}
    if name in here:
        return f"; did you mean {here[name]}?"
    if 1 <= len(same) <= 3:
        return f"; did you mean {' or '.join(same)}?"
    for like in difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.6):
        return f"; did you mean {here[like]}?"
    for like in difflib.get_close_matches(key.upper(), sorted(KEYS), n=1, cutoff=0.6):
        return f"; the nearest is {like}"
    return f"; sections are {', '.join(sorted(group for group in GROUPS if '.' not in group))}"
