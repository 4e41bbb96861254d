"""The backends with a package of their own; where it is missing the tests are skipped with why."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from kit.rank_child import Child

from kvplane.transfer import BACKENDS
from kvplane.transfer.backends import why_unavailable

NAMES = ("mooncake", "nixl")


def members() -> list[object]:
    why = {name: why_unavailable(BACKENDS[name]) for name in NAMES}
    if why["nixl"] is None and "KVPLANE_TEST_EXITS_HARD" not in os.environ:
        why["nixl"] = "it crashes a process that exits: make test-transfer runs it in its own"
    return [
        pytest.param(name, marks=pytest.mark.skipif(why[name] is not None, reason=f"{why[name]}"))
        for name in NAMES
    ]


@pytest.fixture(params=members())
def name(request: pytest.FixtureRequest) -> str:
    """Of a backend that can run here."""
    return str(request.param)


@pytest.fixture
async def children() -> AsyncIterator[list[Child]]:
    """Whoever is in the list is ended with the test, stopped or not."""
    made: list[Child] = []
    yield made
    for child in made:
        await child.stop()
