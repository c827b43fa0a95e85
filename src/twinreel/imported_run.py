"""A founding system's classifier, or fine-tuned ClipBERT, as a run folder that `eval` and others take as it is.

What the weights do not say is taken from ClipBERT's own run folder, `../log/args.json`, where it is, and from what is
asked for; the rest is assumed, and named.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinreel.assembly import build_task
from twinreel.checkpoint import save_checkpoint
from twinreel.config import Tree, load_tree
from twinreel.data.classes import ClassTable
from twinreel.data.manifest.class_names import read_class_names
from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import CLASSIFIERS, MATCHERS, NOT_TAKEN, Preprocessing, create_model
from twinreel.models.import_report import Imported
from twinreel.models.importing import import_weights
from twinreel.recipe import Recipe, build_recipe
from twinreel.run_folder import write_run_files
from twinreel.wordpiece import WordPiece

__all__ = ["ImportedRun", "import_run"]

# Keys of ClipBERT's args.json that weights do not show, and ours. What its losses and pooling rules are called is ours.
_FOUNDING = {
    "max_txt_len": "model.max_text_tokens",
    "num_frm": "model.preprocessing.num_frames",
    "fps": "model.preprocessing.frame_rate",
    "max_img_size": "model.preprocessing.crop_size",
    "score_agg_func": "task.pooling",
}
_LOSSES = {"ce": "match_cross_entropy", "rank": "match_hinge"}
_CHOICES = ("action", "transition")  # its tasks of multiple choice
_OPEN = (*_FOUNDING.values(), "task.loss", "model.num_heads", "eval.num_clips", "eval.windows")
_SECTIONS = ("model", "task", "data", "eval")
# Keys that the command says otherwise.
_ELSEWHERE = {
    "model.name": "--model says it",
    "model.weights": "the file is they",
    "model.weights_scope": "the file is taken whole",
    "model.num_classes": "the weights say it",
    "model.vocabulary": "--vocabulary says it",
    "task.name": "the model says it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """A run folder that was written, and where its values come from.

    Args:
        folder: of the run.
        recipe: of the run.
        taken: keys that something beside the weights said, each with where that is.
        assumed: of ClipBERT, keys that nothing said.
        looked_for: of ClipBERT, its args.json, if it is not there.
    """

    folder: Path
    recipe: Recipe
    taken: dict[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    looked_for: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {key: _value(self.recipe, key) for key in (*self.taken, *self.assumed)}
        return {
            "run": str(self.folder),
            "model": self.recipe.model.name,
            "taken": {key: {"value": values[key], "from": where} for key, where in self.taken.items()},
            "assumed": {key: values[key] for key in self.assumed},
        }

    def to_table(self) -> str:
        """Lines of text for people, the last with commands that work."""
        lines = [f"{self.folder}: a run of {self.recipe.model.name}, {self.recipe.task.name}"]
        for where in dict.fromkeys(self.taken.values()):
            lines.append(f"  from {where}: {self._words(key for key in self.taken if self.taken[key] == where)}")
        if self.looked_for is not None:
            lines.append(f"  there is no {self.looked_for}, which would say how it was trained")
        if self.assumed:
            lines.append(f"  assumed, as nothing says it: {self._words(self.assumed)}")
            lines.append("    what was otherwise in training: import again, with KEY=VALUE")
        run = shlex.quote(str(self.folder))
        texts = " --sentence TEXT --sentence TEXT" if self.recipe.task.name == "video_text_matching" else ""
        lines.append(f"  use it: twinreel eval {run} --input MANIFEST; twinreel predict {run} VIDEO{texts}")
        return "\n".join(lines)

    def _words(self, keys: Iterable[str]) -> str:
        return ", ".join(f"{key}={_value(self.recipe, key)}" for key in keys)


def import_run(
    path: str | Path,
    run: str | Path,
    *,
    model: str | None = None,
    class_names: str | Path | None = None,
    vocabulary: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> ImportedRun:
    """Write a run folder with one checkpoint, `step_0000000`, of the weights; its recipe says how they are judged.

    Args:
        path: the file of weights.
        run: the folder; new or empty.
        model: a name of `MODELS`; None = found.
        class_names: a file with the name of each class number; None = their numbers.
        vocabulary: of ClipBERT, the vocab.txt that it was trained with; None = the one beside the file.
        overrides: `section.key=value` of the recipe, for what neither the weights nor what is beside them says.

    Raises:
        CheckpointError, ConfigError: as `importing.import_weights`; two towers, other classes than those named, a
            ClipBERT without a vocabulary or with another head than its task has, or a value that contradicts the
            weights or is none of the recipe.
        DataError: the vocabulary cannot be read.
    """
    asked = _asked(overrides)
    folder = Path(run).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose another --run")
    folder.mkdir(parents=True, exist_ok=True)
    imported = import_weights(path, model=model, out=folder / "imported.safetensors")
    try:
        if imported.model in MATCHERS:
            return _import_matcher(Path(path).expanduser(), folder, imported, vocabulary, asked)
        return _import_classifier(Path(path).expanduser(), folder, imported, class_names, asked)
    finally:
        imported.out.unlink()


def _asked(overrides: Sequence[str]) -> Tree:
    """The values that are asked for.

    Raises:
        ConfigError: of another section, or said otherwise.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of key=value; got the string {overrides!r}: write [{overrides!r}]")
    problems = []
    for key in (override.partition("=")[0].strip() for override in overrides):
        if key.partition(".")[0] not in _SECTIONS:
            problems.append(f"{key}: nothing is trained here; what can be set begins with {'., '.join(_SECTIONS)}.")
        elif key in _ELSEWHERE:
            problems.append(f"{key} is not set here: {_ELSEWHERE[key]}")
    if problems:
        raise ConfigError("\n".join(f"command line: {problem}" for problem in problems))
    tree = load_tree(None, overrides)
    tree.origins[""] = "twinreel import"
    return tree


def _import_classifier(
    path: Path, folder: Path, imported: Imported, class_names: str | Path | None, asked: Tree
) -> ImportedRun:
    if imported.model not in CLASSIFIERS or imported.found.weights.layout == "howto100m":
        raise ConfigError(
            f"{path}: two towers of {imported.model} are no classifier; start a run from them with model.weights"
        )
    taken = _taken(asked)
    config = imported.found.config
    judging = config.judging if config is not None else {}
    values = _judged(imported.model, imported.options, imported.preprocessing.to_dict(), judging)
    recipe = _recipe(asked, values, "the weights")
    changed = {key: value for key, value in recipe.model.options.items() if f"model.{key}" in taken}
    preprocessing = _preprocessing(imported, recipe)
    network: Any = create_model(imported.model, weights=imported.out, preprocessing=preprocessing, **changed)
    classes = ClassTable(_names(class_names, network.num_classes))
    description = {
        "name": imported.model,
        "options": {key: value for key, value in imported.options.items() if key != "num_classes"} | changed,
        "preprocessing": preprocessing.to_dict(),
        "has_vocabulary": False,
        "class_names": list(classes.names),
    }
    save_checkpoint(folder, 0, network, description, {"imported": path.name})
    write_run_files(folder, recipe)
    return ImportedRun(folder=folder, recipe=recipe, taken=taken)


def _import_matcher(
    path: Path, folder: Path, imported: Imported, vocabulary: str | Path | None, asked: Tree
) -> ImportedRun:
    """A run of ClipBERT, judged as the founding code does: one clip, from a third of the way in."""
    outputs = imported.found.num_classes
    if outputs not in (1, 2):
        got = "heads of pretraining" if outputs is None else f"{outputs} outputs, a table of answers that is not in it"
        raise ConfigError(
            f"{path}: {got}, so it cannot judge which caption fits; start a run from it: model.name={imported.model} "
            f"model.weights={path}"
        )
    words = Path(vocabulary).expanduser() if vocabulary is not None else path.with_name("vocab.txt")
    if not words.exists():
        raise ConfigError(f"{words}: no such vocabulary; name the vocab.txt that {path.name} was trained with")
    taken = _taken(asked)
    arguments = path.absolute().parent.parent / "log" / "args.json"
    for key, (value, name) in _founding(arguments, taken).items():
        if _put(asked, key, value, f"{arguments} ({name})"):
            taken[key] = str(arguments)
    recipe = _recipe(asked, _matching(imported, words, outputs, asked), "the weights")
    _check_goal(path, recipe, outputs)
    preprocessing = _preprocessing(imported, recipe)
    network: Any = create_model(
        imported.model,
        weights=imported.found.weights,
        vocabulary=WordPiece.load(words, fold_case=None if recipe.model.fold_case else False),
        preprocessing=preprocessing,
        **recipe.model.options,
    )
    description = {
        "name": imported.model,
        "options": recipe.model.options,
        "preprocessing": preprocessing.to_dict(),
        "has_vocabulary": True,
        "class_names": None,
        "num_outputs": outputs,
        "answers": [],
    }
    save_checkpoint(folder, 0, network, description, {"imported": path.name})
    write_run_files(folder, recipe)
    weights = imported.found.weights
    known = {*taken, *(f"model.{key}" for key in weights.architecture), *(["task.loss"] if outputs == 2 else [])}
    if weights.model == imported.model:
        known |= {f"model.{key}" for key in weights.options}
        known |= {f"model.preprocessing.{key}" for key in weights.preprocessing}
    if "model.preprocessing.frame_stride" in taken:
        known.add("model.preprocessing.frame_rate")
    assumed = tuple(key for key in _OPEN if key not in known)
    missing = None if arguments.is_file() else arguments
    return ImportedRun(folder=folder, recipe=recipe, taken=taken, assumed=assumed, looked_for=missing)


def _founding(path: Path, taken: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """What ClipBERT's args.json says: our keys, each with its value and the key there; nothing without the file.

    Raises:
        ConfigError: it cannot be read, or is of a task or of pixels that are not taken over.
    """
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}; mend or remove it, and give KEY=VALUE") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not ClipBERT's settings by name; mend or remove it, and give KEY=VALUE")
    for key, option in (("img_pixel_mean", "mean"), ("img_pixel_std", "std")):
        if values.get(key) is not None and f"model.preprocessing.{option}" not in taken:
            raise ConfigError(
                f"{path}: {key}={values[key]}; give it as model.preprocessing.{option}=[...], in the order of the "
                "channels, blue first"
            )
    found = {ours: (values[key], key) for key, ours in _FOUNDING.items() if values.get(key) is not None}
    if "model.preprocessing.frame_stride" in taken:
        found.pop("model.preprocessing.frame_rate", None)
    task, loss = values.get("task"), values.get("loss_type")
    if task in _CHOICES:
        found |= {"task.goal": ("multiple_choice", "task"), "task.loss": ("choice_cross_entropy", "task")}
    elif task is not None:
        raise ConfigError(f"{path}: task={task}, whose table of answers is not in the weights; start a run from them")
    elif loss is not None and "task.goal" not in taken:
        found["task.loss"] = (_LOSSES.get(loss, loss) if isinstance(loss, str) else loss, "loss_type")
    return found


def _matching(imported: Imported, words: Path, outputs: int, asked: Tree) -> dict[str, Any]:
    """What the weights say of the recipe, and how ClipBERT judges."""
    weights = imported.found.weights
    described = weights.options if weights.model == imported.model else {}
    options = {**imported.options, **{key: value for key, value in described.items() if key not in NOT_TAKEN}}
    options.pop("num_outputs", None)
    task: dict[str, Any] = {"name": "video_text_matching"}
    given = asked.values.get("task")
    if not isinstance(given, dict) or "goal" not in given:
        # Two outputs were trained by cross entropy on logits put together by logsumexp, one by the hinge on their mean.
        task |= {"goal": "retrieval", "loss": "match_cross_entropy" if outputs == 2 else "match_hinge"}
    judging = asked.values.get("eval")
    clips = judging.get("num_clips", 1) if isinstance(judging, dict) else 1
    chooses = isinstance(given, dict) and given.get("goal") == "multiple_choice"
    return {
        "model": {
            "name": imported.model,
            **options,
            "preprocessing": weights.preprocessing if described else imported.preprocessing.to_dict(),
            "vocabulary": str(words),
        },
        "task": task,
        "data": {"source": "manifest"},
        "train": {"num_steps": 1},
        "eval": {"windows": "clipbert_start" if chooses and clips == 1 else "clipbert", "num_clips": 1},
    }


def _check_goal(path: Path, recipe: Recipe, outputs: int) -> None:
    """Raises:
    ConfigError: the head is not one of the task.
    """
    if recipe.task.goal == "question_answering":
        raise ConfigError(f"{path}: task.goal=question_answering needs a table of answers, which is not in the weights")
    wanted: Any = build_task(recipe)
    if wanted.num_outputs != outputs:
        raise ConfigError(
            f"{path}: its head has {outputs} output{'s' * (outputs > 1)}, and task.loss={recipe.task.loss} wants "
            f"{wanted.num_outputs}; give the loss that it was trained with"
        )


def _names(path: str | Path | None, num_classes: int) -> tuple[str, ...]:
    if path is None:
        return tuple(map(str, range(num_classes)))
    named = read_class_names(path)
    if sorted(named) != list(range(num_classes)):
        raise CheckpointError(f"{path}: names {len(named)} classes, but the weights have {num_classes}, from 0")
    return tuple(named[number] for number in range(num_classes))


def _judged(
    model: str, options: Mapping[str, Any], preprocessing: Mapping[str, Any], judging: Mapping[str, Any]
) -> dict[str, Any]:
    """How it is judged: as the configuration inside says, else as published: 10 x 3 of the test scale, MViT 5 x 1."""
    several = options.get("head_activation") == "sigmoid"
    published: dict[str, Any] = {"num_clips": 5, "windows": "slowfast_offset"}
    if not model.startswith("mvit"):
        side = preprocessing["short_side"] or preprocessing["crop_size"]
        published = {"num_clips": 10, "num_crops": 3, "windows": "slowfast", "crop_size": side}
    views = {name: value for name, value in (judging or published).items() if value is not None}
    views.setdefault("combine_views", "max" if several else "mean")
    options = {key: value for key, value in options.items() if key != "num_classes"}
    return {
        "model": {"name": model, **options, "preprocessing": preprocessing},
        "task": {"name": "action_recognition", "multi_label": several},
        "data": {"source": "manifest"},
        "train": {"num_steps": 1},
        "eval": views,
    }


def _recipe(asked: Tree, values: Mapping[str, Any], where: str) -> Recipe:
    """The recipe of what is asked for, and else of the values."""
    given = asked.values.get("model")
    read = given.get("preprocessing") if isinstance(given, dict) else None
    strides = isinstance(read, dict) and read.get("frame_stride") is not None  # then there is no rate, and vice versa
    rates = isinstance(read, dict) and read.get("frame_rate") is not None
    for section, keys in values.items():
        for key, value in keys.items():
            if key != "preprocessing":
                _put(asked, f"{section}.{key}", value, where)
                continue
            for name, own in value.items():
                if not (name == "frame_rate" and strides) and not (name == "frame_stride" and rates):
                    _put(asked, f"model.preprocessing.{name}", own, where)
    return build_recipe(asked)


def _put(tree: Tree, key: str, value: Any, where: str) -> bool:
    """Set a dotted key, unless it is there; whether it was set."""
    *parents, last = key.split(".")
    level = tree.values
    for parent in parents:
        level = level.setdefault(parent, {})
        if not isinstance(level, dict):
            return False  # a value where a section belongs: the recipe refuses it
    if last in level:
        return False
    level[last] = value
    tree.origins[key] = where
    return True


def _taken(asked: Tree) -> dict[str, str]:
    """The keys that are asked for, each with where."""
    sections = {"", *_SECTIONS, "model.preprocessing"}
    return {key: where for key, where in asked.origins.items() if key not in sections}


def _preprocessing(imported: Imported, recipe: Recipe) -> Preprocessing:
    return imported.preprocessing.replace(**recipe.model.preprocessing.model_dump())


def _value(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = recipe.model_dump(mode="json")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
