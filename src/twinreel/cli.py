"""The command line: one verb = one thin function = one public function.

Progress goes to stderr, results to stdout (`--json` for programs). Errors that the user can mend are printed without
a traceback. Exit codes: 0 done, 2 mend it, 1 our bug, 143 stopped by SIGTERM with everything saved.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinreel.cli_bench import bench_app
from twinreel.cli_data import data_app
from twinreel.cli_explain import explain_command
from twinreel.cli_import import import_weights
from twinreel.cli_import_config import import_config
from twinreel.cli_predict import predict_command
from twinreel.cli_search import search_command
from twinreel.errors import ConfigError, TwinreelError

if TYPE_CHECKING:
    from twinreel.data.clip import Clip
    from twinreel.recipe import Recipe

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train, evaluate and use models that understand video and connect it with language.",
)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.seed=2")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Checkpoint = Annotated[str | None, typer.Option(help="last, best or step_N; default best, else last")]


PR_SET_PDEATHSIG = 1  # of Linux's prctl
SEVERAL_PROCESSES = ("train", "eval")
SPEAKER_SECONDS = 10.0  # given to the process that says what all have found
MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)


def main() -> None:
    """Run the command line and exit."""
    # Torch's threads sleep instead of spinning while they wait for each other: on cores that are shared with reader
    # processes or neighbors a step takes half the time. Read when torch is imported, which the verbs do later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _end_with_the_launcher()
    code: Any = 0
    logging.getLogger("twinreel").addHandler(_Warnings())
    try:
        code = app(args=_resume_value(sys.argv[1:]), standalone_mode=False) or 0
        sys.stdout.flush()
    except TwinreelError as error:
        _say(error)
        code = 2
    except SystemExit as end:  # typer ends with 1 where a pipe breaks
        broken = isinstance(end.__context__, OSError) and end.__context__.errno == errno.EPIPE
        code = 0 if broken else end.code
        if code == 130:  # typer turns Ctrl-C into this
            print("twinreel: interrupted", file=sys.stderr)
    except KeyboardInterrupt:
        print("twinreel: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stdout = None  # the reader of our output (head, less) has seen enough
        code = 0
    except Exception as error:
        code = _explain(error)
    _leave(code)


def _leave(code: Any) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(code)
    from twinreel.distributed import leave

    leave(code if isinstance(code, int) else 1)


def _end_with_the_launcher() -> None:
    """Where torchrun is killed, its processes get SIGTERM: they save and end instead of going on unseen."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(error: TwinreelError) -> None:
    """Print an error; where torchrun started several processes, those that others speak for are silent."""
    rank = os.environ.get("RANK", "0")
    silent = (error.speaker == "main" and rank != "0") or (
        error.speaker == "machine" and os.environ.get("LOCAL_RANK", "0") != "0"
    )
    if silent and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(SPEAKER_SECONDS)  # torchrun ends all as soon as one has ended; the one that speaks may be late
    if not silent:
        who = f"process {rank}: " if error.speaker == "process" and "RANK" in os.environ else ""
        print(f"twinreel: {who}{error}", file=sys.stderr)


def _speaks() -> bool:
    """Whether this process prints results: the main one of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _one_process(context: typer.Context) -> None:
    """Refuse verbs that one process does where torchrun started several.

    Raises:
        ConfigError: they would do it several times over, or write to one place at once.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and context.invoked_subcommand not in SEVERAL_PROCESSES:
        raise ConfigError(
            f"twinreel {context.invoked_subcommand} runs as one process, but torchrun started {size}; start it without "
            f"torchrun ({' and '.join(SEVERAL_PROCESSES)} run as several)"
        )


class _Warnings(logging.Handler):
    """What the library warns of (a broken checkpoint, parts of weights left out) goes to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        if record.levelno >= logging.WARNING and _speaks():
            print(f"twinreel: warning: {record.getMessage()}", file=sys.stderr)


def _explain(error: Exception) -> int:
    """Say what went wrong with words that fit whose mistake it is; the exit code."""
    usage = getattr(error, "show", None)  # typer's own errors: an unknown option, a missing argument
    if usage is not None:
        usage()
        return int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "Abort":
        return 130
    if isinstance(error, OSError) and error.errno in MENDABLE:
        print(f"twinreel: {error.strerror}: {error.filename or 'the file system'}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    place = _users_own_code(error)
    if place is not None:
        print(f"twinreel: the error comes from your own code: {place}", file=sys.stderr)
        return 2
    print("twinreel: this is a bug in twinreel; please report it with the text above", file=sys.stderr)
    return 1


def _users_own_code(error: Exception) -> str | None:
    """`file:line` of the innermost frame that belongs neither to twinreel nor to an installed package, if any."""
    ours = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and Path(frame.filename).name not in ("twinreel", "__main__.py"):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _resume_value(arguments: list[str]) -> list[str]:
    """`--resume step_1000` becomes `--resume-from step_1000`: an option whose value may be left out."""
    for i, argument in enumerate(arguments[:-1]):
        value = arguments[i + 1]
        if argument == "--resume" and re.fullmatch(r"last|best|(aside_)?(step_)?[0-9]+", Path(value).name):
            return [*arguments[:i], "--resume-from", Path(value).name, *arguments[i + 2 :]]
    return arguments


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _load(name: str, overrides: list[str] | None) -> Recipe:
    from twinreel.recipe import load_recipe

    return load_recipe(name, overrides or [])


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Train, evaluate and use models that understand video and connect it with language."""
    if version:
        import twinreel

        print(f"twinreel {twinreel.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    _one_process(context)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for videos, run and index")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="of videos and training")] = 0,
    as_json: Json = False,
) -> None:
    """Everything, in about two minutes, on videos it makes itself."""
    from twinreel.demo import run_demo

    result = run_demo(out, seed=seed)
    _print_json(result.to_json()) if as_json else print(result.to_table())


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """Models, sources, losses and recipes."""
    from twinreel.data.sources import SOURCES
    from twinreel.losses import LOSSES
    from twinreel.models import MODELS
    from twinreel.recipe import list_recipes, recipe_header

    tables = {
        "models": {name: _first_line(item) for name, item in MODELS.items()},
        "losses": {name: _first_line(item) for name, item in LOSSES.items()},
        "sources": {name: _first_line(item) for name, item in SOURCES.items()},
        "recipes": {name: recipe_header(name) for name in list_recipes()},
    }
    if as_json:
        _print_json(tables)
        return
    for title, names in tables.items():
        print(f"{title}:")
        for name, text in names.items():
            print(f"  {name:24} {text}")


def _first_line(item: Any) -> str:
    return (item.__doc__ or "").strip().splitlines()[0]


@app.command()
def show(recipe: str, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the complete resolved recipe."""
    resolved = _load(recipe, overrides)
    _print_json(resolved.model_dump(mode="json")) if as_json else print(resolved.to_yaml(), end="")


@app.command()
def check(
    recipe: str,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="the contact sheet of what the model sees")] = Path("check.png"),
    steps: Annotated[
        int, typer.Option(min=0, help="also train so long on one batch, and compare two processes with one")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Check recipe and files, draw what the model sees, run one batch forward and backward."""
    from twinreel.check import check_recipe

    result = check_recipe(_load(recipe, overrides), out, steps=steps)
    _print_json(result.to_json()) if as_json else print(result.to_table())
    if result.problems:
        raise typer.Exit(2)


@app.command()
def train(
    recipe: str,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="the run folder")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint, or --resume step_N")
    ] = False,
    resume_from: Annotated[str | None, typer.Option(hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe into a run folder."""
    if out is None:
        raise ConfigError("where to? Give the run folder: --out runs/NAME")
    from twinreel.training import train as run_training

    result = run_training(_load(recipe, overrides), out, resume=resume_from or resume)
    if not _speaks():
        pass
    elif as_json:
        report = result.report.to_json() if result.report else None
        _print_json({"steps": result.steps, "total_steps": result.total_steps, "report": report})
    elif result.report is not None:
        print(result.report.to_table())
    if result.stopped_by is not None:
        raise typer.Exit(128 + signal.Signals[result.stopped_by])


@app.command("eval")
def evaluate(
    run: str,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    manifest: Annotated[list[str] | None, typer.Option("--input", help="CSV or JSONL to judge on")] = None,
    source: Annotated[str | None, typer.Option(help="or a source of `twinreel list`")] = None,
    split: Annotated[str | None, typer.Option(help="split of it")] = None,
    root: Annotated[str | None, typer.Option(help="folder that paths are relative to")] = None,
    predictions: Annotated[Path | None, typer.Option(help="each row's class, choice or answer, .csv")] = None,
    confusion: Annotated[Path | None, typer.Option(help="a classifier's confusion matrix, .csv or .png")] = None,
    as_json: Json = False,
) -> None:
    """Judge a run, with the protocol: retrieval in both directions, or a classifier's accuracy."""
    from twinreel.evaluation import evaluate as run_evaluation
    from twinreel.log import Progress

    progress = Progress()
    report = run_evaluation(
        run,
        checkpoint=checkpoint,
        manifest=manifest or None,
        source=source,
        split=split,
        root=root,
        overrides=overrides or [],
        predictions=predictions,
        confusion=confusion,
        say=(lambda words, all_done: progress.show(f"judging {words}", force=all_done)) if _speaks() else None,
    )
    progress.clear()
    if _speaks():
        _print_json(report.to_json()) if as_json else print(report.to_table())


@app.command()
def replay(
    run: str,
    step: Annotated[int, typer.Option(min=1, help="as the log counts, from 1")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Rebuild the batch of a step on one process and show each clip's loss term."""
    from twinreel.replay import replay as run_replay

    result = run_replay(run, step, overrides or [])
    _print_json(result.to_json()) if as_json else print(result.to_table())


@app.command()
def embed(
    run: str,
    source: Annotated[str, typer.Option("--input", help="a manifest, or a folder of videos")],
    out: Annotated[Path, typer.Option(help="the index folder")],
    split: Annotated[str | None, typer.Option(help="split of the manifest; all = every row")] = "all",
    root: Annotated[str | None, typer.Option(help="folder that the manifest's paths are relative to")] = None,
    stride_seconds: Annotated[float | None, typer.Option(help="window to window; default half a clip")] = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
) -> None:
    """Embed windows of every video of a manifest or folder; goes on where a killed run stopped."""
    from twinreel.log import Progress
    from twinreel.search import embed_collection

    rows = _rows(source, root, split)
    progress = Progress()
    result = embed_collection(
        run,
        rows,
        out,
        checkpoint=checkpoint,
        stride_seconds=stride_seconds,
        report=lambda done, total: progress.show(f"embedding {done}/{total} videos", force=done == total),
    )
    progress.clear()
    if as_json:
        _print_json(_as_dict(result))
    else:
        counts = f"{result.written} written, {result.already_there} already there, {len(result.faults)} failed"
        print(f"{result.listed} videos listed: {counts}; {result.windows} windows in {out}")
    if result.faults:
        for fault in result.faults[:5]:
            print(f"twinreel: not embedded: {fault.reason}", file=sys.stderr)
        print(f"twinreel: all {len(result.faults)} are in {out / 'faults.jsonl'}", file=sys.stderr)
        raise typer.Exit(2)


app.command("predict")(predict_command)
app.command("search")(search_command)
app.command("explain")(explain_command)
app.command("import")(import_weights)
app.command("import-config", context_settings={"ignore_unknown_options": True})(import_config)


def _rows(source: str, root: str | None, split: str | None) -> list[Clip]:
    from twinreel.data.manifest import read_folder, read_manifest
    from twinreel.data.storage import is_store

    if Path(source).is_dir() or is_store(source):
        if root is not None or split not in (None, "all"):
            raise ConfigError(f"{source} is a folder: --root and --split go with a manifest; leave them out")
        return read_folder(source)
    return list(read_manifest(source, root=root, split=None if split == "all" else split))


def _as_dict(item: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(item)
