"""docs/from-pyslowfast.md: every defect has a row, and the tests that the page names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-pyslowfast.md").read_text(encoding="utf-8")


def test_every_defect_has_a_test_or_a_sentence():
    rows = re.findall(r"^\| (\d+) \| .*$", PAGE, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 20))
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 18
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)
