"""Fixtures of the rank directory's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kit.directory import Seat, serving


@pytest.fixture
async def seat() -> AsyncIterator[Seat]:
    async with serving() as found:
        yield found
