"""What the pages quote is what the code prints; their torchrun lines, variables and recipe keys are real."""

import ast
import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from twinreel.data.sources import SOURCES
from twinreel.losses import LOSSES
from twinreel.models import MODELS
from twinreel.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
MANY_MACHINES = ROOT / "docs" / "many-machines.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
MODULES = sorted((ROOT / "src" / "twinreel").rglob("*.py"))
MESSAGES, NO_MESSAGE = "what twinreel prints", "nothing"  # a column of the pages; how its other cells begin
SHORTEST = 12  # letters of a quotation: a shorter one says nothing


def one_line(text):
    """Runs of white space are a space, neighboring placeholders are one."""
    return re.sub(r"(?:\.\.\.){2,}", "...", re.sub(r"\s+", " ", text))


def text_of(node):
    """A string expression with `...` for whatever is known only when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "..."


def children(node):
    """Parts of a syntax tree but docstrings and the format of a placeholder."""
    if isinstance(node, ast.FormattedValue):
        return [node.value]
    parts = ast.iter_child_nodes(node)
    return [part for part in parts if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]


def messages_of(source):
    """Every whole string expression of a source, those inside placeholders too."""
    found = []

    def visit(node, joined=False):
        text = text_of(node)
        if text.strip(".") and not joined:
            found.append(one_line(text))
        joins = isinstance(node, (ast.JoinedStr, ast.BinOp)) and text != "..."
        for part in children(node):
            visit(part, joined=joins and text_of(part) != "...")

    visit(ast.parse(source))
    return found


@cache
def messages():
    return [text for path in MODULES for text in messages_of(path.read_text(encoding="utf-8"))]


def is_printed(quotation, texts):
    return any(quotation in text for text in texts)


def tables(page):
    """Each table of a page as rows of cells, its header first."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith("| "):
            rows = [line, *takewhile(lambda row: row.startswith("|"), lines)]
            yield [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|--")]


def column(page, name):
    """The cells of every column of that name."""
    found = [(header.index(name), rows) for header, *rows in tables(page) if name in header]
    return [row[at] for at, rows in found for row in rows]


def quoted(page):
    return [text for cell in column(page, MESSAGES) if not cell.startswith(NO_MESSAGE) for text in code(cell)]


def code(text):
    return re.findall(r"`([^`]+)`", text)


def torchrun_lines(page):
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("torchrun ")]


def test_every_message_that_a_page_quotes_is_in_the_source():
    quotations = [(page.name, text) for page in PAGES for text in quoted(page)]
    assert len(quotations) > 30
    assert [(page, text) for page, text in quotations if not is_printed(text, messages())] == []
    assert [(page, text) for page, text in quotations if sum(map(str.isalpha, text)) < SHORTEST] == []


def test_every_row_quotes_a_message_or_says_that_there_is_none():
    cells = [cell for page in PAGES for cell in column(page, MESSAGES)]
    assert [cell for cell in cells if not code(cell) and not cell.startswith(NO_MESSAGE)] == []


SOURCE = '''
"""A page may not quote this docstring."""


def fail(step, value, run):
    """Nor this other docstring."""
    advice = "lower the rate; " if value else ""
    raise ValueError(
        f"step {step}: the loss is {value:.3g}, " + (f"look into {run}" if run else "see above") + f" and {advice}go "
        "on with --resume.\\nBye"
    )
'''


def test_messages_are_whole_with_placeholders_and_docstrings_are_none():
    whole = "step ...: the loss is ..., ... and ...go on with --resume. Bye"
    assert messages_of(SOURCE) == ["lower the rate; ", whole, "look into ...", "see above"]


@pytest.mark.parametrize(
    ("quotation", "printed"),
    [
        ("the loss is ..., ... and", True),
        ("go on with --resume", True),
        ("the loss was ...", False),  # reworded
        ("the loss is bad", False),  # a placeholder stands there
        ("step ...: look into", False),  # two messages
        ("A page may not quote", False),
        ("this other docstring", False),
    ],
)
def test_a_quotation_must_be_within_one_message(quotation, printed):
    assert is_printed(quotation, messages_of(SOURCE)) == printed


def test_a_message_that_is_reworded_is_noticed():
    audit = (ROOT / "src" / "twinreel" / "audit.py").read_text(encoding="utf-8")
    [text] = [text for page in PAGES for text in quoted(page) if "hold different weights" in text]
    assert is_printed(text, messages_of(audit))
    assert not is_printed(text, messages_of(audit.replace("hold different weights", "have different weights")))


def test_the_torchrun_lines_are_understood_by_this_torch_and_their_recipes_load():
    lines = torchrun_lines(MANY_MACHINES)
    assert [parse_args(line).nnodes for line in lines] == ["1:1", "1:1", "2"]
    for line in lines:
        launch = parse_args(line)
        assert launch.module and launch.training_script == "twinreel" and int(launch.nproc_per_node) > 1
        verb, name, *arguments = launch.training_script_args
        assert verb == "train" and arguments[-2] == "--out"
        recipe = load_recipe(name, arguments[:-2])
        pieces = int(launch.nproc_per_node) * int(launch.nnodes.partition(":")[0])
        assert recipe.train.global_batch_size % ((recipe.train.micro_batch_size or 1) * pieces) == 0


def test_bash_reads_the_blocks():
    for block in re.findall(r"```bash\n(.*?)```", MANY_MACHINES.read_text(encoding="utf-8"), flags=re.DOTALL):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_the_variables_that_the_page_calls_read_are_those_that_the_code_reads():
    listed = zip(column(MANY_MACHINES, "variable"), column(MANY_MACHINES, "read by twinreel"), strict=True)
    called_read = {name for names, answer in listed if answer.startswith("yes") for name in code(names)}
    pattern = r"""environ(?:\.(?:get|setdefault)\(|\[)["'](\w+)|["'](\w+)["'] in os\.environ"""
    text = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    assert called_read == {one or other for one, other in re.findall(pattern, text)}


def test_the_recipe_keys_that_the_pages_name_exist():
    sections = {name: set(field.annotation.model_fields) for name, field in Recipe.model_fields.items()}
    for section, table in (("model", MODELS), ("task", LOSSES), ("data", SOURCES), ("eval", SOURCES)):
        sections[section] |= {name for item in table.values() for name in inspect.signature(item).parameters}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"data\.mdb|(train|val|model)\.(csv|json|safetensors|pth?)", "", text)  # files, no keys
        for section, key in re.findall(rf"[`' ({{](?=\w+\.)({'|'.join(sections)})\.([a-z_]+)", text):
            assert key in sections[section], f"{page.name}: {section}.{key}"


@pytest.mark.slow
def test_the_line_to_try_here_runs(tmp_path):
    line, small = torchrun_lines(MANY_MACHINES)[0], ["train.num_steps=2", "data.num_videos=32", "optim.warmup_steps=0"]
    at = line.index("--out")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *line[:at], *small, *line[at:]],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "global batch 32 = 2 processes" in done.stderr and (tmp_path / line[-1] / "checkpoints" / "last").exists()
