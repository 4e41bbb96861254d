"""Composite: a part made of parts.

Edge of the roof. plane.py and engines.py say which; wiring.py runs them. Open it to change how the
parts of a process are started and ended together.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import aiohttp

from kvplane.runtime import Part


class Closable(Protocol):
    """Anything with an async close."""

    async def close(self) -> None: ...


class Composite:
    """A Part made of parts: `build` starts them with `begin`; stop ends them in reverse."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Build everything; on failure what was started is stopped again."""
        async with contextlib.AsyncExitStack() as stack:
            self._stack = stack
            await self.build()
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End everything, the last started first."""
        await self._stack.aclose()

    async def build(self) -> None:
        """Make and begin the parts, in the order in which one needs the other."""
        raise AssertionError("a composite says what it is made of")

    async def begin(self, *parts: Part) -> None:
        """Start parts that belong to this one."""
        for part in parts:
            await part.start()
            self._stack.push_async_callback(part.stop)

    async def session(self, total_s: float = 10.0) -> aiohttp.ClientSession:
        """A client for control calls, closed with this part."""
        timeout = aiohttp.ClientTimeout(total=total_s)
        session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        self._stack.push_async_callback(session.close)
        return session

    def closing(self, thing: Closable) -> None:
        """Close this at the end."""
        self._stack.push_async_callback(thing.close)
