"""A founding system's classifier, or fine-tuned ClipBERT, as a run folder that `eval` and others take as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinreel.checkpoint import save_checkpoint
from twinreel.config import Tree
from twinreel.data.classes import ClassTable
from twinreel.data.manifest.class_names import read_class_names
from twinreel.errors import CheckpointError, ConfigError
from twinreel.models import CLASSIFIERS, MATCHERS, create_model
from twinreel.models.import_report import Imported
from twinreel.models.importing import import_weights
from twinreel.recipe import Recipe, build_recipe
from twinreel.run_folder import write_run_files
from twinreel.wordpiece import WordPiece

__all__ = ["import_run"]


def import_run(
    path: str | Path,
    run: str | Path,
    *,
    model: str | None = None,
    class_names: str | Path | None = None,
    vocabulary: str | Path | None = None,
) -> Recipe:
    """Write a run folder with one checkpoint, `step_0000000`, of the weights; its recipe says how they are judged.

    Args:
        path: the file of weights.
        run: the folder; new or empty.
        model: a name of `MODELS`; None = found.
        class_names: a file with the name of each class number; None = their numbers.
        vocabulary: of ClipBERT, the vocab.txt that it was trained with; None = the one beside the file.

    Raises:
        CheckpointError, ConfigError: as `importing.import_weights`; two towers, other classes than those named, or a
            ClipBERT without a vocabulary or with another head than that of retrieval.
        DataError: the vocabulary cannot be read.
    """
    folder = Path(run).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose another --run")
    folder.mkdir(parents=True, exist_ok=True)
    imported = import_weights(path, model=model, out=folder / "imported.safetensors")
    if imported.model in MATCHERS:
        try:
            return _import_matcher(Path(path).expanduser(), folder, imported, vocabulary)
        finally:
            imported.out.unlink()
    if imported.model not in CLASSIFIERS or imported.found.weights.layout == "howto100m":
        imported.out.unlink()
        raise ConfigError(
            f"{path}: two towers of {imported.model} are no classifier; start a run from them with model.weights"
        )
    network: Any = create_model(imported.model, weights=imported.out)
    classes = ClassTable(_names(class_names, network.num_classes))
    config = imported.found.config
    judging = config.judging if config is not None else {}
    recipe = _recipe(imported.model, imported.options, imported.preprocessing.to_dict(), judging)
    description = {
        "name": imported.model,
        "options": {key: value for key, value in imported.options.items() if key != "num_classes"},
        "preprocessing": imported.preprocessing.to_dict(),
        "has_vocabulary": False,
        "class_names": list(classes.names),
    }
    save_checkpoint(folder, 0, network, description, {"imported": Path(path).name})
    write_run_files(folder, recipe)
    imported.out.unlink()
    return recipe


def _import_matcher(path: Path, folder: Path, imported: Imported, vocabulary: str | Path | None) -> Recipe:
    """A run of retrieval, judged as the founding code does: one clip, from a third of the way in."""
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
    network: Any = create_model(imported.model, weights=imported.out, vocabulary=WordPiece.load(words))
    options = {key: value for key, value in imported.options.items() if key != "num_outputs"}
    preprocessing = imported.preprocessing.to_dict()
    # Two outputs were trained by cross entropy on logits put together by logsumexp, one by the hinge on their mean.
    loss = "match_cross_entropy" if outputs == 2 else "match_hinge"
    tree = {
        "model": {"name": imported.model, **options, "preprocessing": preprocessing, "vocabulary": str(words)},
        "task": {"name": "video_text_matching", "goal": "retrieval", "loss": loss},
        "data": {"source": "manifest"},
        "train": {"num_steps": 1},
        "eval": {"windows": "clipbert", "num_clips": 1},
    }
    recipe = build_recipe(Tree(tree, {"": "twinreel import"}))
    description = {
        "name": imported.model,
        "options": options,
        "preprocessing": preprocessing,
        "has_vocabulary": True,
        "class_names": None,
        "num_outputs": outputs,
        "answers": [],
    }
    save_checkpoint(folder, 0, network, description, {"imported": path.name})
    write_run_files(folder, recipe)
    return recipe


def _names(path: str | Path | None, num_classes: int) -> tuple[str, ...]:
    if path is None:
        return tuple(map(str, range(num_classes)))
    named = read_class_names(path)
    if sorted(named) != list(range(num_classes)):
        raise CheckpointError(f"{path}: names {len(named)} classes, but the weights have {num_classes}, from 0")
    return tuple(named[number] for number in range(num_classes))


def _recipe(model: str, options: dict[str, Any], preprocessing: dict[str, Any], judging: dict[str, Any]) -> Recipe:
    """How it is judged: as the configuration inside says, else as published: 10 x 3 of the test scale, MViT 5 x 1."""
    several = options.get("head_activation") == "sigmoid"
    published: dict[str, Any] = {"num_clips": 5, "windows": "slowfast_offset"}
    if not model.startswith("mvit"):
        side = preprocessing["short_side"] or preprocessing["crop_size"]
        published = {"num_clips": 10, "num_crops": 3, "windows": "slowfast", "crop_size": side}
    views = {name: value for name, value in (judging or published).items() if value is not None}
    views.setdefault("combine_views", "max" if several else "mean")
    options = {key: value for key, value in options.items() if key != "num_classes"}
    tree = {
        "model": {"name": model, **options, "preprocessing": preprocessing},
        "task": {"name": "action_recognition", "multi_label": several},
        "data": {"source": "manifest"},
        "train": {"num_steps": 1},
        "eval": views,
    }
    return build_recipe(Tree(tree, {"": "twinreel import"}))
