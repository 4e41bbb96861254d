"""Flights: one call is out per question, whoever waits for it.

Edge: tasks. Used by resolver.py. Open it to change how waiters share a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvplane.runtime import cancel

T = TypeVar("T")
Key = tuple[Any, ...]  # the address first


class Flights:
    """Calls that are out, by question."""

    def __init__(self) -> None:
        self._out: dict[Key, asyncio.Task[Any]] = {}
        self._left: set[asyncio.Task[Any]] = set()

    async def join(self, key: Key, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Join the call that is out for `key`, or make it; a waiter that leaves stops nobody."""
        task = self._out.get(key)
        if task is None:
            task = asyncio.create_task(ask(), name=f"resolve {key}")
            self._out[key] = task
            task.add_done_callback(lambda done: self._landed(key, done))
        result: T = await asyncio.shield(task)
        return result

    def leave(self, address: str) -> None:
        """Calls to this address run to their end, but nobody new waits for them."""
        for key in [key for key in self._out if key[0] == address]:
            self._left.add(self._out.pop(key))

    async def close(self) -> None:
        """End all calls that are still out."""
        await cancel(*self._out.values(), *self._left)

    def _landed(self, key: Key, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if self._out.get(key) is task:
            del self._out[key]
        if not task.cancelled():
            task.exception()  # seen, also where every waiter has left
