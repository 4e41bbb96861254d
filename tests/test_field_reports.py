"""Field reports: each kind has tests, and the table in README.md names them.

Reads the sources with ast: a test that was renamed or deleted is missed here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COUNTS = {"BS": 14, "TR": 11, "EV": 30, "IX": 25, "RT": 31, "AP": 15, "OP": 9}
# Not built yet: several gateways side by side, discovery of pods, a decode that already has its
# request, Envoy, an end that waits for streams, a configuration that changes.
LATER = {"IX": (15,), "RT": (17, 18, 27, 29, 30, 31), "AP": (8, 10, 14), "OP": (9,)}
IDS = [
    f"FR-{kind}-{n:02}"
    for kind, count in COUNTS.items()
    for n in range(1, count + 1)
    if n not in LATER.get(kind, ())
]
ROW = re.compile(r"\| (FR-[A-Z]{2}-\d\d)? \|[^|]*\| `([^`|]+)::([^`|]+)` \|")


def table() -> dict[str, list[tuple[str, str]]]:
    """Report -> (file, test) as README.md has them; a row without a report belongs to the last."""
    found: dict[str, list[tuple[str, str]]] = {}
    report = ""
    for line in (TESTS / "README.md").read_text().splitlines():
        if row := ROW.fullmatch(line):
            report = row[1] or report
            found.setdefault(report, []).append((row[2], row[3]))
    return found


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(), str(path))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions}


def test_the_table_holds_every_report_in_order_and_no_other() -> None:
    assert list(table()) == IDS


@pytest.mark.parametrize("report", IDS)
def test_each_test_of_the_table_is_there(report: str) -> None:
    named = table()[report]
    assert len(set(named)) == len(named), "named twice"
    for file, name in named:
        assert (TESTS / file).is_file(), file
        assert name.startswith("test_") and name in functions_of(TESTS / file), f"{file}::{name}"
