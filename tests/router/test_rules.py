"""Rules: the guide has a row for each, and each is one that the diagnosis can say."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from kit.rules import ROWS, held, rows

from kvplane.router.findings import FAILED, Finding, Rule
from kvplane.vocabulary import Stage

ROOT = Path(__file__).parents[2]
RULES = list(get_args(Rule))
SOURCES = [*sorted((ROOT / "router").glob("diagnosis*.py")), ROOT / "router" / "patterns.py"]
HELD = ("test_diagnosis.py", "test_patterns.py", "test_blamed.py")  # hold all to its row


@cache
def said(path: Path) -> set[str]:
    """Every text in a file's code, docstrings aside."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    asides = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    texts = [one for one in nodes if isinstance(one, ast.Constant) and id(one) not in asides]
    return {str(one.value) for one in texts}


def test_the_table_has_each_rule_once_and_no_other_in_order() -> None:
    assert [row.rule for row in rows()] == RULES


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_said_by_the_code_and_held_to_its_row_by_a_test(rule: str) -> None:
    coded = {text for path in SOURCES for text in said(path)} | set(FAILED.values())
    assert rule in coded
    assert any(rule in said(Path(__file__).parent / name) for name in HELD), "no test makes it"
    row = ROWS[rule]
    assert row.stages and row.culprit and row.blocks and row.then
    assert "…" in row.sentence or rule == "pool-empty"
    for stage in row.stages.split(", "):
        assert stage in [one.value for one in Stage] or stage == "of the last attempt"


def test_the_sixteen_faults_are_in_the_table_as_the_stories_break_them() -> None:
    source = (ROOT / "tests" / "stories" / "test_faults.py").read_text()
    parts = re.split(r"^async def test_(\d\d)_", source, flags=re.M)[1:]
    told: dict[int, set[str]] = {}
    for number, body in zip(parts[::2], parts[1::2], strict=True):
        named = re.findall(r'(?:says|_said|store_finding)\((?:shown|url)?,? ?"([a-z-]+)"', body)
        told.setdefault(int(number), set()).update(named)
    for row in rows():
        if row.fault.isdecimal():
            assert row.rule in told[int(row.fault)], row
    assert {int(row.fault) for row in rows() if row.fault.isdecimal()} == set(range(1, 17))
    assert {row.rule for row in rows() if row.fault == "pattern"} <= said(SOURCES[-1])


def test_a_finding_that_is_not_as_its_row_says_is_noticed() -> None:
    right = Finding(
        "worker p1", True, "prefill p1 is unhealthy: 503", "p1", "x", Stage.AVAILABILITY,
        "unhealthy",
    )  # fmt: skip
    held(right)
    for wrong in (
        replace(right, stage=Stage.CONNECT), replace(right, sentence="p1 is ill"),
        replace(right, culprit="index store"), replace(right, rule="store-away"),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            held(wrong)
