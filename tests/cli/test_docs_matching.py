"""docs/matching.md and docs/from-clipbert.md, typed as they stand: commands, files, and the table of defects."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from twinreel.recipe import load_recipe
from videos import make_video

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "matching.md").read_text(encoding="utf-8")
FROM_CLIPBERT = (ROOT / "docs" / "from-clipbert.md").read_text(encoding="utf-8")
COMMON = ["train.num_epochs=1", "data.num_workers=0", "train.memory_format=contiguous"]
SMALL = {
    "clipbert_small": [
        *("model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "model.intermediate_size=32"),
        *("model.preprocessing.crop_size=64", "train.global_batch_size=2"),
    ],
    "s3dg_small_own_videos": ["train.global_batch_size=4", "optim.warmup_epochs=0"],
}
PUBLISHED = ("clipbert_image_text_pretrained.pt",)  # files that nobody has to have


def commands(page):
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("twinreel")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The files of the page: collection.csv of twelve videos and, as shown there, rows with options and answers."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "cooking").mkdir()
    lines = ["video,caption,split"]
    for i in range(12):
        name = {0: "cooking/onion.mp4", 1: "cooking/eggs.mp4"}.get(i, f"cooking/{i}.mp4")
        make_video(folder / name, num_frames=30, frame_rate=10, size=(64, 48), first_number=20 * i)
        text = {0: "someone cuts an onion", 1: "whisk the eggs"}.get(i, f"someone whisks the eggs and an onion {i}")
        lines.append(f"{name},{text},{'val' if i in (1, 9, 10, 11) else 'train'}")
    (folder / "collection.csv").write_text("\n".join(lines) + "\n")
    for name, block in zip(("choices", "questions"), re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL), strict=True):
        (folder / f"{name}.jsonl").write_text(block)
    return folder


@pytest.mark.slow
def test_the_commands_of_the_page_run(home):
    done = {}
    for words in commands(PAGE):
        if any(name in " ".join(words) for name in PUBLISHED):
            continue
        small = [*SMALL[words[1]], *COMMON] if words[0] in ("check", "train") else []
        result = subprocess.run(
            [sys.executable, "-m", "twinreel", *words, *small], cwd=home, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, (words, result.stderr)
        done[" ".join(words)] = result.stdout
    said = list(done.items())
    assert [command.split()[0] for command, _ in said] == [
        *("check", "train", "eval", "predict", "train", "eval", "embed", "search"),
        *("eval", "train", "train", "eval"),
    ]
    assert "someone cuts an onion" in said[3][1]
    reranked = done["eval runs/towers --split val rerank.run=runs/matching rerank.k=50"]
    assert "first" in reranked and "text to video" in reranked
    assert ".mp4" in said[7][1]


def test_the_commands_for_published_weights_load():
    lines = [words for words in commands(PAGE) if any(name in " ".join(words) for name in PUBLISHED)]
    assert [words[0] for words in lines] == ["import", "train"]
    [(_, name, *arguments)] = [words for words in lines if words[0] == "train"]
    recipe = load_recipe(name, arguments[: arguments.index("--out")])
    assert recipe.model.weights == PUBLISHED[0] and recipe.data.source == "manifest"


def test_every_defect_has_a_test_or_a_sentence():
    rows = re.findall(r"^\| (\d+) \| .*$", FROM_CLIPBERT, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 30))
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", FROM_CLIPBERT)
    assert len(named) >= 24
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_the_jsonl_of_the_pages_is_jsonl():
    for page in (PAGE, FROM_CLIPBERT):
        for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL):
            for line in block.splitlines():
                assert json.loads(line)
