"""docs/own-actions.md, typed as it stands: commands, files, and the user's own parts."""

import csv
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from videos import make_video

PAGE = (Path(__file__).parents[2] / "docs" / "own-actions.md").read_text(encoding="utf-8")
QUICK = [
    *("train.num_steps=2", "train.global_batch_size=4", "optim.warmup_steps=1", "eval.every=null"),
    "data.num_workers=1",
]
SMALL = "model.preprocessing={num_frames: 8, frame_rate: 8.0, crop_size: 32, short_side: 40}"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands():
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("twinreel")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder for each class with four videos, and my_actions.csv; `kitchen/c.mp4` as the page has it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "kitchen").mkdir()
    lines = ["path,label,split"]
    for label in ("cut", "whisk"):
        (folder / label).mkdir()
        for i in range(4):
            make_video(folder / label / f"{label}{i}.mp4", num_frames=30, frame_rate=10, size=(64, 48))
            lines.append(f"{label}/{label}{i}.mp4,{label},{'val' if i == 3 else 'train'}")
    make_video(folder / "kitchen" / "c.mp4", num_frames=60, frame_rate=10, size=(64, 48))
    (folder / "my_actions.csv").write_text("\n".join(lines) + "\n")
    (folder / "my_parts.py").write_text(blocks("python")[0], encoding="utf-8")
    return folder


def run(home, words):
    result = subprocess.run(
        [sys.executable, "-m", "twinreel", *words], cwd=home, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (words, result.stderr)
    return result


@pytest.mark.slow
def test_the_commands_for_own_actions_run(home):
    done = []
    for words in commands():
        if words[0] == "import" or "finetune_action_recognition" in words or "my_parts:Net" in " ".join(words):
            continue  # needs published weights; the own parts are the next test
        small = [*QUICK, SMALL] if words[0] in ("check", "train") else []
        done.append((words[0], run(home, [*words, *small]).stdout))
    assert [verb for verb, _ in done] == ["check", "train", "eval", "predict", "explain"]
    assert "3 windows (uniform) x 3 crops" in done[2][1]
    with (home / "predictions.csv").open(newline="") as file:
        assert {row["id"] for row in csv.DictReader(file)} == {"cut/cut3.mp4", "whisk/whisk3.mp4"}
    assert "cut" in (home / "confusion.csv").read_text() and (home / "check.png").stat().st_size > 0
    assert "kitchen/c.mp4" in done[3][1] and "whisk" in done[3][1]
    assert list((home / "look").glob("*.mp4"))
    shutil.rmtree(home / "look")  # the user's own data set takes every video below the folder


@pytest.mark.slow
def test_the_users_own_parts_run(home):
    [words] = [words for words in commands() if "my_parts:Net" in " ".join(words)]
    said = run(home, [*words, *QUICK])
    assert "3 classes (cut, kitchen, whisk)" in said.stderr and "model.json" not in said.stderr
    again = run(home, ["eval", "runs/own", "--split", "val"])
    assert "top 1" in again.stdout


def test_the_example_is_as_short_as_the_page_says():
    [code] = blocks("python")
    parts = re.split(r"\n\n\n", code)
    lines = {part.split("(")[0].split()[-1]: len([x for x in part.splitlines() if x.strip()]) for part in parts[1:]}
    assert lines["videos"] <= 15 and lines["Net"] <= 11, lines  # 10 and a docstring
