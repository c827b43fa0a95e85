"""The wheel, built and installed elsewhere, is complete and lists its recipes."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import twinreel
from twinreel.recipe import list_recipes

pytestmark = pytest.mark.slow

PACKAGE = Path(twinreel.__file__).parent
PROJECT = PACKAGE.parent.parent


def run(*arguments, folder, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for tool in ("build", "hatchling"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install -e .[dev]")
    if not (PROJECT / "pyproject.toml").is_file():
        pytest.skip("twinreel runs from an installed copy, so there is nothing to build it from")
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", out, PROJECT, folder=out)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"twinreel-{twinreel.__version__}.dist-info/METADATA").decode()
    expected = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {"twinreel/py.typed", *(f"twinreel/recipes/{name}.yaml" for name in list_recipes())} <= names
    assert f"Version: {twinreel.__version__}\n" in metadata and "://" not in metadata.split("\n\n")[0]


def test_installed_elsewhere_it_lists_its_recipes(wheel, tmp_path):
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, folder=tmp_path)
    elsewhere = {"PYTHONPATH": str(site)}
    where = run("-c", "import twinreel; print(twinreel.__file__)", folder=tmp_path, **elsewhere)
    assert where.strip() == str(site / "twinreel" / "__init__.py")
    tables = json.loads(run("-m", "twinreel", "list", "--json", folder=tmp_path, **elsewhere))
    assert sorted(tables["recipes"]) == list_recipes()
    assert all(tables["recipes"].values())
    shown = run("-m", "twinreel", "show", "demo", folder=tmp_path, **elsewhere)
    assert shown.startswith("model:")
