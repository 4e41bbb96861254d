"""Standing: how an address has been doing, and when it may be asked again.

Pure: time and waits are given. One per address in resolver.py. Open it to change when an address
that failed is left alone, and what is told of it.

    asking -- answer --> ok -- failure --> waiting -- time is over --> failing -- answer --> ok
                          each failure doubles the wait; one answer ends the row
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplane.vocabulary import Generation

from .errors import BootstrapError


@dataclass(frozen=True, slots=True)
class AddressState:
    """What people are told of one address."""

    state: str  # asking: no answer yet | ok | waiting: not asked before again_at | failing
    since: float  # monotonic seconds; of a row of failures its first
    attempts: int = 0  # failures in a row
    again_at: float | None = None  # while waiting
    why: str = ""  # stage and sentence of the last failure
    generation: Generation | None = None
    used_at: float = 0.0  # when somebody last wanted to know


class Standing:
    """Answers and failures of one address, in the order they are learnt."""

    def __init__(self, now: float, waits: Callable[[], Iterator[float]]) -> None:
        self._make_waits = waits
        self._since = self.used_at = now
        self._answered = False
        self._failure: BootstrapError | None = None
        self._waits: Iterator[float] | None = None
        self._attempts, self._failed_at, self._again_at = 0, now, now

    @property
    def failing(self) -> bool:
        """Whether the last that was learnt is a failure."""
        return self._failure is not None

    def hold_back(self, now: float) -> None:
        """Raises the last failure again while its wait lasts."""
        if self._failure is not None and now < self._again_at:
            raise copy.copy(self._failure)

    def went_well(self, now: float) -> None:
        """It answered a question."""
        if self._failure is not None or not self._answered:
            self._since = now
        self._answered, self._failure, self._waits, self._attempts = True, None, None, 0

    def failed(self, error: BootstrapError, sent_at: float, now: float, most_s: float) -> None:
        """It did not; questions that were out together fail as one. Waits `most_s` at most."""
        if self._failure is not None and sent_at < self._failed_at:
            return
        if self._failure is None or self._waits is None:
            self._since, self._waits = now, self._make_waits()
        self._failure, self._failed_at = error, now
        self._attempts += 1
        self._again_at = now + min(next(self._waits), most_s)

    def view(self, now: float, generation: Generation | None) -> AddressState:
        """For people."""
        if self._failure is None:
            state = "ok" if self._answered else "asking"
            return AddressState(state, self._since, generation=generation, used_at=self.used_at)
        waiting = now < self._again_at
        return AddressState(
            "waiting" if waiting else "failing",
            self._since,
            self._attempts,
            self._again_at if waiting else None,
            f"{self._failure.stage.value}: {self._failure}",
            generation,
            self.used_at,
        )
