"""Runtime: how long things live and what time it is.

Edge of the ground floor: Clock, backoff and the supervision of background tasks. Imports nothing
of ours. Open it to change how a loop is restarted or a part is started and stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

# Containers made and not yet gone before a look at the young, looks at the young before one at the
# middle-aged, and so on. Requests leave no garbage: what is young is mostly a hundred of them
# under way, 50 each. A look at so many takes a millisecond; at the 700 of Python there are seven
# times as many, and each lets the same requests grow old.
LOOKS = (5000, 20, 10)


def spare_garbage_looks() -> None:
    """What was loaded until now is not looked through for garbage any more, as it stays anyway;
    and whatever comes is looked through less often.

    A full look at all that a command imports takes 0.1 to 0.2 s, and nobody is served meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*LOOKS)


class Clock(Protocol):
    """Time as an argument: tests bring their own."""

    def now(self) -> float: ...  # monotonic seconds, for durations and deadlines
    def wall(self) -> float: ...  # seconds since 1970, for people
    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The clock of this machine."""

    # As they are: asked for 25 times a request, a method around each would cost more than it.
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Part(Protocol):
    """Something with a life: started once, stopped once; stop never raises and is bounded."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


def backoff(
    first_s: float, factor: float = 2.0, most_s: float = 30.0, jitter: float = 0.2
) -> Iterator[float]:
    """Endless waits in seconds: first, first*factor, ... up to most, each +-jitter of itself."""
    wait = first_s
    while True:
        yield wait * random.uniform(1 - jitter, 1 + jitter)
        wait = min(wait * factor, most_s)


async def supervise(
    name: str, work: Callable[[], Awaitable[None]], clock: Clock, most_s: float = 5.0
) -> None:
    """Run `work` until it returns; restart it with backoff when it raises. Ends on cancel."""
    waits = backoff(0.05, most_s=most_s)
    while True:
        try:
            await work()
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            wait = next(waits)
            log.exception("task failed name=%s action=restart in_s=%.2f", name, wait)
            await clock.sleep(wait)


CANCEL_AGAIN_S = 1.0  # a cancellation can be lost (wait_for of Python 3.11); it is said again
CANCEL_MOST = 10  # this often; then the task is left to itself, and named


async def cancel(*tasks: asyncio.Task[object] | None) -> None:
    """Cancel tasks and wait until they are gone; their errors are swallowed, ours is not."""
    living = {task for task in tasks if task is not None and not task.done()}
    for _ in range(CANCEL_MOST):
        if not living:
            break
        for task in living:
            task.cancel()
        _, living = await asyncio.wait(living, timeout=CANCEL_AGAIN_S)
    for task in living:
        log.error("task does not end name=%s action=leave", task.get_name())
    await asyncio.gather(
        *(task for task in tasks if task is not None and task.done()), return_exceptions=True
    )


@contextlib.asynccontextmanager
async def running(parts: Sequence[Part]) -> AsyncIterator[None]:
    """Start parts in order; stop those that started in reverse order, on every path."""
    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            await part.start()
            stack.push_async_callback(part.stop)
        yield
