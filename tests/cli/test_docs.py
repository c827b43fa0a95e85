"""What README and docs tell people to type is typed here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import write_manifest
from videos import make_video

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = ["train.num_epochs=1", "train.global_batch_size=4", "train.memory_format=contiguous"]
OF_TOWERS, OF_MATCHING = ["optim.warmup_epochs=0"], ["task.num_negatives=2"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page):
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("twinreel")]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with my_videos.csv: ten training rows and three to validate with."""
    rows = []
    for i in range(13):
        path = tmp_path / f"{i}.mp4"
        make_video(path, num_frames=20, frame_rate=10, size=(48, 48))
        text = f"someone cuts an onion in kitchen {i}"
        rows.append(
            Clip(id=f"v{i}", video=str(path), captions=(Caption(text=text),), split="val" if i > 9 else "train")
        )
    write_manifest(tmp_path / "my_videos.csv", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_readme_example_runs(tmp_path):
    [code] = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    result = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "text to video" in result.stdout and "chance" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "my_videos.csv" in page.read_text()], ids=lambda p: p.name)
def test_the_commands_for_own_videos_run(home, page):
    lines = [words for words in commands(page) if any("my_videos" in w or "runs/mine" in w for w in words)]
    lines = [words for words in lines if not any("frozen" in w for w in words)]  # needs packages of its own
    assert {words[1] for words in lines} >= {"check", "train", "embed", "search"}
    for words in lines:
        own = OF_MATCHING if words[2].startswith("clipbert") else OF_TOWERS
        small = [*SMALL, *own] if words[1] in ("check", "train") else []
        result = subprocess.run([sys.executable, "-m", "twinreel", *words[1:], *small], capture_output=True, text=True)
        assert result.returncode == 0, (words, result.stderr)
    assert (home / "check.png").stat().st_size > 0
    assert ".mp4" in result.stdout


def test_every_recipe_that_the_pages_name_exists():
    from twinreel.recipe import list_recipes

    for page in PAGES:
        for words in commands(page):
            if words[1] in ("train", "check", "show") and not words[2].endswith((".yaml", "RECIPE")):
                assert words[2] in list_recipes(), (page.name, words)


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)
