"""Imports go one way, `import twinreel` is light, and the help answers at once."""

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import twinreel

SOURCE = Path(twinreel.__file__).parent

# The order of the house: a room imports from its own and from earlier rooms only.
ROOMS = [
    {"errors", "knobs"},
    {"config", "text"},
    {"wordpiece"},
    {"losses", "metrics", "models"},
    {"data"},
    {"distributed", "tasks"},
    {"recipe"},
    {"checkpoint", "log", "optim"},
    {"assembly", "guards", "monitors", "run_folder"},
    {"evaluation"},
    {"parts", "recognition", "search"},
    {"start_line"},
    {"gradients", "grad_cam", "imported_run", "prediction", "run_state"},
    {"audit", "precise_norms", "visual"},
    {"training"},
    {"agreement", "demo", "replay", "trial"},
    {"bench", "check", "explain", "founding_configs", "step_costs"},
    {"bench_step"},
    {"cli_bench", "cli_data", "cli_explain", "cli_import", "cli_import_config", "cli_predict", "cli_search"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "twinreel" else node.module for alias in node.names
            ]
        rooms |= {name.split(".")[1] for name in names if name.startswith("twinreel.")}
    return rooms


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in LEVEL, f"{room} has no place in the order of rooms"
    for other in imported_rooms(path) - {room}:
        assert LEVEL[other] < LEVEL[room], f"{path.name} ({room}) imports {other}, which comes later or beside it"


def test_models_losses_and_metrics_know_nothing_of_recipes_data_or_tasks():
    paths = [path for room in ("losses", "metrics", "models") for path in (SOURCE / room).rglob("*.py")]
    assert {"milnce.py", "s3dg.py"} <= {path.name for path in paths}
    for path in paths:
        assert not imported_rooms(path) & {"recipe", "data", "tasks", "training", "distributed"}, path


def test_import_twinreel_does_not_import_torch():
    code = "import sys, twinreel; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_is_quick_and_needs_no_torch():
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, "-m", "twinreel", "--help"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)  # whatever else runs
    assert result.returncode == 0 and "search" in result.stdout
    assert best < 0.5


def test_every_public_name_is_there():
    for name in twinreel.__all__:
        assert getattr(twinreel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twinreel.nothing  # noqa: B018


def test_every_module_imports_without_extras():
    modules = ["twinreel." + ".".join(p.relative_to(SOURCE).with_suffix("").parts) for p in SOURCE.rglob("*.py")]
    modules = [m.removesuffix(".__init__") for m in modules if not m.endswith("__main__")]
    code = f"import importlib; [importlib.import_module(m) for m in {modules!r}]"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_no_founding_dependency_is_named_in_an_import():  # B097, B099, B101, B102
    forbidden = {"torchvision", "decord", "horovod", "apex", "detectron2", "fairseq"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, path


def test_the_source_is_ascii():
    for path in SOURCE.rglob("*.py"):
        assert path.read_text(encoding="utf-8").isascii(), path
