"""Quarantine: which pages may still be hit by late bytes?

Pure. Sits below pull.py. Pages of a failed room stay here until the backend has fenced the
session; time alone is no proof. Open it to change when a page may be used again.

    pull failed -> hold(room, pages) -> backend.fence() returned -> release(room) -> free list
"""

from __future__ import annotations

from collections.abc import Sequence


class Quarantine:
    """Pages by the attempt that failed; a page is in here at most once."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def hold(self, attempt: int, pages: Sequence[int]) -> None:
        """Keep these pages away from everybody."""
        assert attempt not in self._held, f"attempt {attempt} is in quarantine already"
        self._held[attempt] = tuple(pages)

    def release(self, attempt: int) -> tuple[int, ...]:
        """Fenced: the pages, exactly once; empty when there are none (any more)."""
        return self._held.pop(attempt, ())

    def __len__(self) -> int:
        return sum(len(pages) for pages in self._held.values())

    def __contains__(self, page: int) -> bool:
        return any(page in pages for pages in self._held.values())
