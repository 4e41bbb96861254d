"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LEAST_S = 20.0  # a busy machine is no finding: no condition is given up before this


async def until(
    condition: Callable[[], T | Awaitable[T]], timeout_s: float = 10.0, what: str = ""
) -> T:
    """The first true value of `condition`, asked every few ms; AssertionError past the deadline."""
    timeout_s = max(timeout_s, LEAST_S)
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value  # type: ignore[return-value]
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)
