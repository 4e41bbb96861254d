"""Listening: how a stand-in's server ends so that no connection is left half accepted.

One that was accepted in the very last moment has a transport, but its handler has not begun: nobody
would close it, and a look for garbage in some later test would name that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

TURNS = 5  # of the loop, from an accepted socket to the first step of its handler


async def ended(server: asyncio.Server, handlers: Collection[asyncio.Task[None]]) -> None:
    """No new connection; `handlers`, which the server adds to and each of them leaves, are told to
    end, and close what they have on the way."""
    server.close()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    for task in list(handlers):
        task.cancel()
    await asyncio.gather(*handlers, return_exceptions=True)
    for _ in range(TURNS):
        await asyncio.sleep(0)  # what they closed is gone
