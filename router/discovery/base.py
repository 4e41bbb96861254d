"""Discovery seam: who serves, and who no longer does?

Seam. A member watches some source (a list, an orchestrator) and calls back; wiring.py gives the
callbacks to the fleet, the tokenizers and the event subscriptions. Open it to change what every
source must tell. Rules: up before down, once each per life; the same pod again with another
generation is down, then up; a source that fails tells nothing and keeps what it told.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvplane.vocabulary import Pod, WorkerUp

OnUp = Callable[[WorkerUp], Awaitable[None] | None]
OnDown = Callable[[Pod], Awaitable[None] | None]
# One sign: well or not, and why not. What comes back: may it be left alone for a while?
OnHealth = Callable[[Pod, bool, str], Awaitable[bool] | bool]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod we were told of that does not serve yet, and why."""

    declared: WorkerUp
    reason: str
    stage: str | None = None  # of a meeting, where the engine says which one fails


class Discovery(Protocol):
    """A Part that calls back. start() returns at once, whoever is down."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def waiting(self) -> tuple[Waiting, ...]: ...


def another_life(before: WorkerUp, now: WorkerUp) -> bool:
    """Did the process behind a pod change? A generation that is told for the first time is news of
    the life we know, and one that is not told any more is no news."""
    return None not in (before.generation, now.generation) and before.generation != now.generation


async def tell(callback: Callable[..., Any], *facts: Any) -> Any:
    """Call back, plain function or coroutine; what it said."""
    result = callback(*facts)
    return await result if inspect.isawaitable(result) else result
