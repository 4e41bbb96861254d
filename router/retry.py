"""Retry: may this attempt be repeated, when, and without whom?

Pure: time and chance are arguments. dispatch reports how an attempt failed, gateway.py asks here
and goes back to choosing, with a fresh room. Open it to change what is worth another attempt.

    first byte gone out, caller's mistake, no attempts, time or budget left   ->  Stop(why)
    else                                                              ->  Again(wait_s, without)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.vocabulary import Worker

from .settings import RetrySettings

RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})  # sgl router's


@dataclass(frozen=True, slots=True)
class Failed:
    """How an attempt ended. `status` None = no answer at all (refused, cut, stalled)."""

    guilty: tuple[Worker, ...] = ()  # who caused it; the pair where nobody can tell
    status: int | None = None
    committed: bool = False  # a byte of the answer left towards the client
    retry_after_s: float | None = None  # the engine's own word
    aborted: bool = False  # the client left
    others: bool = False  # somebody else can serve: what the guilty asked to wait is not waited for


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after `wait_s`, without these workers where others can serve."""

    wait_s: float
    without: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Answer with the failure. `why` is one of a closed set: it labels a metric."""

    why: str


class Budget:
    """How many retries the plane may afford: a share of requests, with some saved up."""

    def __init__(self, settings: RetrySettings) -> None:
        self._settings = settings
        self._left = settings.budget_most

    def earn(self) -> None:
        """A request came in."""
        if self._left < self._settings.budget_most:
            more = self._left + self._settings.budget_share
            self._left = min(more, self._settings.budget_most)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


def wait_s(attempt: int, settings: RetrySettings, chance: float) -> float:
    """Seconds before attempt number `attempt` + 1; attempts count from 1, chance in [0, 1)."""
    plain = min(settings.first_wait_s * settings.factor ** (attempt - 1), settings.most_wait_s)
    return plain * (1 + settings.jitter * (2 * chance - 1))


def decide(
    failed: Failed,
    attempt: int,
    settings: RetrySettings,
    budget: Budget,
    left_s: float,
    chance: float = 0.5,
) -> Again | Stop:
    """After attempt number `attempt` (from 1) failed with `left_s` seconds to the deadline."""
    if failed.aborted:
        return Stop("aborted")
    if failed.committed:
        return Stop("committed")
    if failed.status is not None and failed.status not in RETRYABLE:
        return Stop("not retryable")
    if attempt > settings.retries:
        return Stop("no attempts left")
    wait = wait_s(attempt, settings, chance)
    if failed.retry_after_s is not None and not failed.others:
        wait = max(wait, failed.retry_after_s)
    if wait >= left_s or wait > settings.most_wait_s * (1 + settings.jitter):
        return Stop("no time left")
    if not budget.spend():
        return Stop("no budget left")
    return Again(wait, failed.guilty)
