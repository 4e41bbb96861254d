"""Errors: what can go wrong here that a caller can do something about.

Pure: facts only. Raised by hashing.py, stores/ and client.py; api.py turns them into status codes.
Open it to add a failure that somebody handles differently from the ones below.
"""

from __future__ import annotations

from dataclasses import dataclass


class IndexFault(Exception):
    """Base of everything index/ raises on purpose."""


@dataclass(eq=False)
class BadValue(IndexFault, ValueError):
    """Somebody gave us a value that cannot be meant. Names it and says what would be right."""

    field: str
    value: object
    want: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.field}: {shown[:80]} is wrong, must be {self.want}"


@dataclass(eq=False)
class StoreDown(IndexFault):
    """The store does not answer or refuses writes. Keep what you have and try again later."""

    store: str  # address without credentials
    reason: str

    def __str__(self) -> str:
        return f"store {self.store}: {self.reason}"


class StoreUnused(StoreDown):
    """It answers, and nobody has written yet: an ingest will."""


@dataclass(eq=False)
class CursorGone(IndexFault):
    """The stream no longer holds what follows this cursor. Take a snapshot and go on from it."""

    cursor: str
    reason: str
    shards: frozenset[int] = frozenset()  # whose stream it is; empty = all

    def __str__(self) -> str:
        return f"cursor {self.cursor!r}: {self.reason}; take a snapshot"


@dataclass(eq=False)
class StoreUnfit(IndexFault):
    """The store must not be used as it is set up: it could lose keys, or its format is another."""

    store: str  # address without credentials
    reason: str  # names the setting, its value and what would be right

    def __str__(self) -> str:
        return f"store {self.store}: {self.reason}"


@dataclass(eq=False)
class ShardsFixed(IndexFault):
    """The number of shards was fixed when the store was first used. Start with that number."""

    asked: int
    kept: int

    def __str__(self) -> str:
        return f"shards {self.asked}: this store was made with {self.kept}, start with that"


@dataclass(eq=False)
class IndexRefused(IndexFault):
    """An index process answered with an error; `status` and its own words."""

    status: int
    message: str

    def __str__(self) -> str:
        return f"index answered {self.status}: {self.message}"
