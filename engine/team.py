"""Team: all ranks of one dp rank, acting at once for a room.

Edge, over transfer/. prefill.py and decode.py see one meeting, whatever the number of ranks; the
ranks of both sides find each other (transfer/). Open it to change what one rank's failure means.

    deliver   every rank, same page list     first failure: the others' decodes are told at once
    pull      every rank, same page list     first failure: the others give up
              all verified and agreeing, or nothing; a page is free of late bytes when every rank's
              pull has let go of it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, Self

from kvplane.runtime import cancel
from kvplane.transfer import Metadata, TransferError
from kvplane.vocabulary import BootstrapTriple, Room, Stage, StageRecord

from .errors import RoomFailed
from .ranks import Rank
from .stages import Stages

Released = Callable[[Sequence[int]], None]


class Gives(Protocol):
    """Who delivers a part of a room: a rank of ours, or a node with others (leading.py)."""

    @property
    def name(self) -> str: ...
    async def deliver(
        self, room: Room, pages: Sequence[int], said: Metadata, deadline_s: float
    ) -> None: ...
    def fail(self, room: Room, reason: str) -> None: ...
    def seen(self, room: Room, error: BaseException) -> StageRecord | None: ...


class Team:
    """The ranks of a dp rank that live in this process."""

    def __init__(self, ranks: Sequence[Rank], stages: Stages) -> None:
        self.ranks = tuple(ranks)
        self._stages = stages

    async def deliver(
        self,
        room: Room,
        pages: Sequence[int],
        said: Metadata,
        deadline_s: float,
        others: Sequence[Gives] = (),
    ) -> None:
        """Return once every rank's decodes agreed. Raises RoomFailed naming the first that failed.

        `others` deliver their part elsewhere. Our pages are not read any more when this returns.
        """
        failed: list[tuple[Gives, BaseException]] = []
        everybody: tuple[Gives, ...] = (*self.ranks, *others)

        async def one(giver: Gives) -> None:
            try:
                await giver.deliver(room, pages, said, deadline_s)
            except BaseException as error:
                failed.append((giver, error))
                record = giver.seen(room, error)
                if record is not None:
                    self._stages.of(giver.name)(record)
                for other in everybody:
                    other.fail(room, _sentence(giver.name, error))
                raise

        with self._stages.room(room):
            await asyncio.gather(*(one(giver) for giver in everybody), return_exceptions=True)
        if failed:
            giver, error = failed[0]
            raise _failure(room, giver.name, error)

    def fail(self, room: Room, reason: str) -> None:
        """Tell the decode of this room that it will never come; no rank delivers it any more."""
        for rank in self.ranks:
            rank.fail(room, reason)

    async def pull(
        self,
        triple: BootstrapTriple,
        pages: Sequence[int],
        tokens: int,
        *,
        deadline_s: float,
        released: Released,
        dp_rank: int | None = None,
        held_pages: int = 0,
        prompt: str = "",
    ) -> Metadata:
        """As Puller.pull, for all ranks. Raises RoomFailed naming the first that failed."""
        words = {
            "deadline_s": deadline_s, "dp_rank": dp_rank, "held_pages": held_pages,
            "prompt": prompt,
        }  # fmt: skip
        with _Account(len(self.ranks), pages, released) as account:
            return await self._pulled(triple, pages, tokens, account, words)

    async def _pulled(
        self,
        triple: BootstrapTriple,
        pages: Sequence[int],
        tokens: int,
        account: _Account,
        words: dict[str, Any],
    ) -> Metadata:
        failed: list[tuple[Rank, BaseException]] = []

        async def one(rank: Rank) -> Metadata:
            assert rank.puller is not None, "a decode's rank has a puller"
            try:
                return await rank.puller.pull(
                    triple, pages, tokens, released=account.let_go, **words
                )
            except BaseException as error:
                failed.append((rank, error))
                if isinstance(error, TransferError):  # else their prefills hear a mere abort
                    for other in self.ranks:
                        assert other.puller is not None, "a decode's rank has a puller"
                        other.puller.give_up(triple.room, _sentence(rank.name, error))
                raise

        with self._stages.room(triple.room):
            tasks = [asyncio.create_task(one(rank)) for rank in self.ranks]
            account.settle(tasks, failed)
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                await cancel(*tasks)
        if failed:
            rank, error = failed[0]
            raise _failure(triple.room, rank.name, error)
        return self._agreed(triple.room, [task.result() for task in tasks])

    def _agreed(self, room: Room, said: Sequence[Metadata]) -> Metadata:
        """What all of them say. Each was verified by itself; the answer must be one."""
        for rank, other in zip(self.ranks, said, strict=True):
            if other.first_token != said[0].first_token:
                reason = (
                    f"rank {rank.name}: first token {other.first_token}, "
                    f"rank {self.ranks[0].name}: {said[0].first_token}"
                )
                raise RoomFailed(room, Stage.VERIFY, reason)
        return said[0]

    @asynccontextmanager
    async def holding(self, triple: BootstrapTriple, dp_rank: int | None) -> AsyncIterator[None]:
        """While inside, every prefill rank that has a part of this room keeps it for us."""
        async with AsyncExitStack() as stack:
            for rank in self.ranks:
                assert rank.puller is not None, "a decode's rank has a puller"
                await stack.enter_async_context(rank.puller.holding(triple, dp_rank))
            yield

    def counts(self) -> dict[str, int]:
        """What all ranks hold now, added up; all 0 when idle."""
        found: dict[str, int] = {}
        for rank in self.ranks:
            for name, count in rank.counts().items():
                found[name] = found.get(name, 0) + count
        return found


class _Account:
    """When does nobody hold the pages of a failed room any more?

    Left by an exception the room has failed, also where every rank succeeded: they disagree, or who
    asked went away just then. Ranks that succeeded or never began let go when all have ended.
    """

    def __init__(self, ranks: int, pages: Sequence[int], released: Released) -> None:
        self._holding, self._pages, self._released = ranks, pages, released
        self._running, self._failed = 0, False
        self._silent = ranks  # that succeeded or never began; known when all have ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._failed = kind is not None
        self._settled()

    def let_go(self, pages: Sequence[int]) -> None:
        """One rank: no late byte can hit them. The last one frees them."""
        self._holding -= 1
        if self._holding == 0:
            self._released(pages)

    def settle(
        self, tasks: Sequence[asyncio.Task[Metadata]], failed: Sequence[tuple[Rank, BaseException]]
    ) -> None:
        """What these ranks do counts; those in `failed` let go by themselves."""
        self._running = len(tasks)

        def ended(_: object) -> None:
            self._running -= 1
            self._silent = len(tasks) - len(failed)
            self._settled()

        for task in tasks:
            task.add_done_callback(ended)

    def _settled(self) -> None:
        if self._running or not self._failed:
            return
        for _rank in range(self._silent):
            self.let_go(self._pages)
        self._silent = 0


def _sentence(name: str, error: BaseException) -> str:
    if isinstance(error, RoomFailed):
        return error.reason  # of a node elsewhere; it says who
    text = error.sentence() if isinstance(error, TransferError) else str(error)
    text = text or type(error).__name__
    return f"rank {name}: {text}" if name else text


def _failure(room: Room, name: str, error: BaseException) -> BaseException:
    """As the engine's own error; what is no failure of the transfer stays what it is."""
    if not isinstance(error, TransferError):
        return error
    failure = RoomFailed(room, error.stage, _sentence(name, error))
    failure.__cause__ = error
    return failure
