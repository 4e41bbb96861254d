"""Router tests: files about engine legs run on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

# The gateway runs on uvloop, embedders may not.
BOTH_LOOPS = {"test_legs.py", "test_legs_keeping.py", "test_legs_tls.py", "test_dispatch.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which loops a test runs on."""
    factories = {"asyncio": asyncio.new_event_loop}
    return factories | ({"uvloop": uvloop.new_event_loop} if item.path.name in BOTH_LOOPS else {})
