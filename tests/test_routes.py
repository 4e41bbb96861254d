"""docs/routes.md and the gateway say the same of every route; FR-AP-11."""

from __future__ import annotations

import re
from pathlib import Path

from kvplane.router.legs_wire import FORWARDED
from kvplane.router.proxied import PROXIED, UNIFIED
from kvplane.router.request import COUNTS

PAGE = (Path(__file__).parents[1] / "docs" / "routes.md").read_text()
ROW = re.compile(r"^\| `POST (/[^`]+)` \| (.+) \|$", re.M)


def told(path: str) -> str:
    if path in COUNTS:
        return "a prefill and a decode, else a unified worker"
    if PROXIED[path] is UNIFIED:
        return "a unified worker; 501 `unsupported_route` where there is none"
    return "one worker of that model"


def test_the_table_has_every_route_and_says_what_becomes_of_it() -> None:
    rows = ROW.findall(PAGE)
    assert len({path for path, _ in rows}) == len(rows)
    assert dict(rows) == {path: told(path) for path in (*COUNTS, *PROXIED)}


def test_it_names_the_headers_that_engines_see() -> None:
    for name in FORWARDED:
        assert f"`{name.decode()}`" in PAGE.lower(), name
