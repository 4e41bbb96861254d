"""Rules: the table of the operator's guide, and whether a finding is as its row says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvplane.router.findings import Finding

GUIDE = Path(__file__).parents[2] / "docs" / "operators.md"
COLUMNS = 7


@dataclass(frozen=True)
class Row:
    """What the guide says of one rule."""

    rule: str
    fault: str  # number in the matrix, "pattern" or ""
    stages: str
    culprit: str
    blocks: str
    sentence: str
    then: str


def rows() -> list[Row]:
    """The table, in its order."""
    lines = GUIDE.read_text().partition("### What it says\n")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [Row(one[0].strip("`"), *one[1:]) for one in cells[2:] if len(one) == COLUMNS]


ROWS = {row.rule: row for row in rows()}


def held(finding: Finding) -> Finding:
    """The same; an AssertionError where the guide tells it otherwise."""
    row = ROWS[finding.rule]
    assert row.stages == "of the last attempt" or finding.stage in row.stages.split(", "), row
    assert not (row.blocks.startswith("no") and finding.blocks), row
    assert row.blocks != "yes" or finding.blocks, row
    forms = re.findall(r"\*(.+?)\*", row.sentence)
    assert any(_is(finding.sentence, form) for form in forms), (finding.sentence, forms)
    assert _blamed(finding.culprit, row.culprit), (finding.culprit, row.culprit)
    return finding


def _is(text: str, form: str) -> bool:
    pattern = ".+".join(map(re.escape, form.split("…"))).replace("room", "(room|request)", 1)
    return re.fullmatch(pattern, text, re.S) is not None


def _blamed(culprit: str, said: str) -> bool:
    named = re.findall(r"`([^`]+)`", said)
    if any(culprit == one or culprit.startswith(one) or _is(culprit, one) for one in named):
        return True
    pair = "the pair" in said and _is(culprit, "… and …")
    return pair or ("the worker" in said and re.fullmatch(r"[\w.:@-]+", culprit) is not None)
