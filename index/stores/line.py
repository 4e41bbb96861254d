"""Line: how does a call of ours reach the node that keeps a key, and what is an error of it?

Edge: deadlines, one error class, and what follows from a server's refusal. servers.py knows the
nodes, pool.py talks to one. Open it to change what is tried again and what counts as down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as Cut
from redis.exceptions import TimeoutError as Slow

from ..errors import StoreDown
from .lane import Lane
from .pool import Command, Pool
from .servers import Servers

HERE = Path(__file__).parent
AGAIN_S = 0.02  # between two tries while a slot moves from node to node, or a server is full
FULL = "max number of clients"  # others must close a connection before it takes one of ours
_DOUBTFUL = (Cut, Slow, OSError, ReadOnlyError, MasterDownError, ClusterDownError)
_WORDS = ("READONLY", "MASTERDOWN", "LOADING", "UNBLOCKED", "NOREPLICAS")  # said inside a script


def _right(answers: list[Any]) -> list[Any]:
    """The answers, where none of them is an error."""
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return answers


class Script:
    """A Lua file beside this one; sent by its digest, and whole where the server forgot it."""

    def __init__(self, name: str) -> None:
        self.text = (HERE / name).read_bytes()
        self.digest = sha1(self.text, usedforsecurity=False).hexdigest()


class Line:
    """Calls to the nodes of one store."""

    def __init__(self, servers: Servers, deadline_s: float) -> None:
        self._servers, self._deadline_s = servers, deadline_s
        self._lanes: dict[int, Lane] = {}  # by slot; a store has one per shard
        self.apart = servers.apart  # keys may lie on different nodes

    async def call(self, key: str, *command: Any, deadline_s: float | None = None) -> Any:
        """The answer of the node that keeps `key`."""
        return (await self.calls(key, [command], deadline_s))[0]

    async def run(
        self, script: Script, keys: Sequence[str], *args: Any, deadline_s: float | None = None
    ) -> Any:
        """What a script answers; its keys share a slot."""
        words = (len(keys), *keys, *args)
        with ours(self._servers.shown), contextlib.suppress(NoScriptError):
            found = await self._reach(keys[0], [("EVALSHA", script.digest, *words)], deadline_s)
            return found[0]
        return await self.call(keys[0], "EVAL", script.text, *words, deadline_s=deadline_s)

    async def share(self, script: Script, keys: Sequence[str], *args: Any) -> Any:
        """The same, together with what others ask of these keys' slot at the same time.

        What the server refuses is asked once more alone: `run` knows what to do about it.
        """
        slot = key_slot(keys[0].encode())
        if slot not in self._lanes:
            self._lanes[slot] = Lane(partial(self._together, keys[0]))
        words = (len(keys), *keys, *args)
        answer = await self._lanes[slot].call(("EVALSHA", script.digest, *words))
        if isinstance(answer, ResponseError):
            return await self.run(script, keys, *args)
        return answer

    async def _together(self, key: str, commands: Sequence[Command]) -> list[Any]:
        with ours(self._servers.shown):
            return await self._reach(key, commands, None, list)  # refusals in their places

    async def calls(
        self, key: str, commands: Sequence[Command], deadline_s: float | None = None
    ) -> list[Any]:
        """The answers of commands whose keys all lie where `key` lies; StoreDown for any error."""
        with ours(self._servers.shown):
            return await self._reach(key, commands, deadline_s)

    async def many(
        self, asked: Sequence[tuple[str, Command]], deadline_s: float | None = None
    ) -> list[Any]:
        """One answer, or its StoreDown, per (key, command): nobody waits for somebody else's node.

        Where there is one node, in one go.
        """

        async def one(key: str, command: Command) -> Any:
            try:
                return await self.call(key, *command, deadline_s=deadline_s)
            except StoreDown as error:
                return error

        if self.apart or not asked:
            return await asyncio.gather(*(one(key, command) for key, command in asked))
        try:
            return await self.calls(asked[0][0], [command for _, command in asked], deadline_s)
        except StoreDown as error:
            return [error] * len(asked)

    async def run_each(
        self, script: Script, keys: Sequence[str], *args: Any, deadline_s: float | None = None
    ) -> list[Any]:
        """A script of one key, for each of these; answers as those of many()."""
        asked = [(key, ("EVAL", script.text, 1, key, *args)) for key in keys]
        return await self.many(asked, deadline_s)

    async def each(self, *command: Any) -> list[tuple[str, Any]]:
        """(name, answer) of every node that is written to."""
        with ours(self._servers.shown):
            async with asyncio.timeout(self._deadline_s):
                pools = await self._servers.all()
                return [(pool.name, _right(await pool.call([command]))[0]) for pool in pools]

    async def aclose(self) -> None:
        """Close what is idle; what is under way is given up."""
        await asyncio.gather(*(lane.aclose() for lane in self._lanes.values()))
        await self._servers.aclose()

    async def _reach(
        self,
        key: str,
        commands: Sequence[Command],
        deadline_s: float | None,
        right: Callable[[list[Any]], list[Any]] = _right,
    ) -> list[Any]:
        slot, pool, aside = key_slot(key.encode()), None, None
        try:
            async with asyncio.timeout(deadline_s or self._deadline_s):
                while True:
                    pool, asking = aside or await self._servers.pool(slot), aside is not None
                    aside = None
                    try:
                        return right(await _said(pool, commands, asking))
                    except MovedError as error:  # before AskError, which it is in the library
                        self._servers.moved(slot, error.host, error.port)
                    except AskError as error:
                        aside = self._servers.at(error.host, error.port)
                    except TryAgainError:
                        pass
                    except Cut as error:
                        if FULL not in str(error):
                            raise
                    await asyncio.sleep(0 if aside else AGAIN_S)
        except TimeoutError:
            if pool is not None:
                self._servers.doubt(pool)
            raise Slow(f"no answer in {deadline_s or self._deadline_s:g} s") from None
        except (RedisError, OSError) as error:
            if pool is not None and _doubtful(error):
                self._servers.doubt(pool)
            raise


async def _said(pool: Pool, commands: Sequence[Command], asking: bool) -> list[Any]:
    """What a node answers; `asking` where the slot is on its way to it."""
    if not asking:
        return await pool.call(commands)
    pairs = [word for one in commands for word in (("ASKING",), one)]
    return (await pool.call(pairs))[1::2]


def _doubtful(error: Exception) -> bool:
    """Whether the node may no longer be the one that keeps these keys."""
    return isinstance(error, _DOUBTFUL) or any(word in str(error) for word in _WORDS)


@contextlib.contextmanager
def ours(shown: str) -> Iterator[None]:
    """Errors of the client become StoreDown.

    A cancellation that was lost inside passes after all: before Python 3.12 asyncio.wait_for, which
    the client may use, drops one that arrives as its work ends; the task would never stop.
    """
    before = _cancels()
    try:
        yield
    except (RedisError, OSError) as error:
        if _cancels() > before:
            raise asyncio.CancelledError from error
        raise StoreDown(shown, f"{type(error).__name__}: {error}") from error
    if _cancels() > before:
        raise asyncio.CancelledError


def _cancels() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0
