"""Lane: what is written while an answer is under way goes together, as one.

Edge: one pipeline at a time to the node that keeps one slot. A call costs this process far more
than its server (124 us against some 40, measured), nearly all of it once per turn, so many writers
share the turn: the first goes at once, those who come meanwhile go next. A writer that gives up
leaves its command in the line; nobody else notices. line.py makes one per slot. Open it to change
how much goes at once.

    a ---> [a] -------answer--> [b c d] -------answer--> [e]
    b c d    wait for it            e waits
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..errors import StoreDown
from .pool import Command

MOST = 64  # commands in one pipeline
MOST_WORDS = 20_000  # of all of them, but for one that is longer alone: bounds the deadline's work
_Waiting = tuple[Command, "asyncio.Future[Any]"]


class Lane:
    """`calls` answers many commands in order, or raises StoreDown for all."""

    def __init__(self, calls: Callable[[Sequence[Command]], Awaitable[list[Any]]]) -> None:
        self._calls = calls
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def call(self, command: Command) -> Any:
        """The answer, which may be a ResponseError; raises StoreDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drive(), name="lane")
        return await future

    async def _drive(self) -> None:
        while self._waiting:
            some = self._next()
            try:
                answers = await self._calls([command for command, _ in some])
            except StoreDown as error:
                answers = [error] * len(some)
            except BaseException:  # the loop ends, or a fault of ours: nobody waits for ever
                for _, future in some + self._waiting:
                    future.cancel()
                self._waiting.clear()
                raise
            for (_, future), answer in zip(some, answers, strict=True):
                if future.done():
                    continue  # it gave up
                if isinstance(answer, StoreDown):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _next(self) -> list[_Waiting]:
        """Those in front, as many as go at once; who gave up before is left out."""
        some: list[_Waiting] = []
        words = 0
        for at, (command, future) in enumerate(self._waiting):
            words += len(command)
            if len(some) >= MOST or (some and words > MOST_WORDS):
                del self._waiting[:at]
                return some
            if not future.done():
                some.append((command, future))
        self._waiting.clear()
        return some

    async def aclose(self) -> None:
        """Wait for nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
