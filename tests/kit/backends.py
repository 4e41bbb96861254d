"""Backends: where the index may live, each real; what a machine lacks is skipped with the reason.

This process's memory, or any kind of Redis that kit/redis.py can start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kit.redis import launched, redis_kinds
from kvplane.index import IndexSettings, MemoryStore, RedisStore, Store

PROMPT = IndexSettings(block_ms=50)  # reads that wait no longer: tests end soon
BACKENDS = ("memory", *redis_kinds())
Opener = Callable[[str], Store]  # of the keys under a prefix


class Kept:
    """A memory store for several users: closed by none of them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def close(self) -> None:
        """Nothing: others use it."""


@contextlib.contextmanager
def backend(name: str) -> Iterator[Opener]:
    """Opens stores in one place; the place is gone at the end."""
    if name == "memory":
        shared: dict[str, Kept] = {}
        yield lambda prefix: shared.setdefault(prefix, Kept(MemoryStore()))  # type: ignore[return-value]
        return
    with launched(name) as url:
        yield lambda prefix: RedisStore(url, prefix, None, PROMPT)
