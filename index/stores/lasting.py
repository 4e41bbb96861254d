"""Lasting: texts with a lifetime, in the Redis the index is in.

Edge, over line.py. For what other processes may want to read for a while and nobody has to: a write
that fails is dropped, and says so. Open it to change how such texts are kept.

    PREFIX:e:KEY   STRING with a lifetime; each key by itself, so a cluster spreads them
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StoreDown
from . import address
from .line import Line
from .servers import servers

CONNECTIONS = 2  # one writes, one reads: neither is in a hurry


class Lasting:
    """Texts by key. `close` at the end."""

    def __init__(self, url: str, prefix: str = "kvplane", deadline_s: float = 1.0) -> None:
        where = address.parse(url)
        self._line = Line(servers(where, CONNECTIONS, deadline_s), deadline_s)
        self._prefix = prefix

    async def put(self, texts: Sequence[tuple[str, bytes]], seconds: int) -> int:
        """Keep these for so long; how many could not be."""
        asked = [
            (key, ("SET", key, text, "EX", seconds))
            for key, text in ((self._key(name), text) for name, text in texts)
        ]
        answers = await self._line.many(asked)
        return sum(isinstance(answer, StoreDown) for answer in answers)

    async def get(self, name: str) -> bytes | None:
        """One of them; None where it is not there, or no longer. Raises StoreDown."""
        key = self._key(name)
        found: bytes | None = await self._line.call(key, "GET", key)
        return found

    async def close(self) -> None:
        """Let go of the connections."""
        await self._line.aclose()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:e:{name}"
