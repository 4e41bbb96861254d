"""Site: a house in a thread with a loop of its own, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kit.house import House, Resident, house
from kit.wait import until
from kvplane.vocabulary import Role

T = TypeVar("T")
MOST_S = 60.0
KEY = "sk-of-this-site"


@dataclass
class Site:
    """A gateway over pairs of tiny engines, one pair a model, and another that wants a key."""

    house: House
    loop: asyncio.AbstractEventLoop
    url: str = ""
    keyed_url: str = ""
    pairs: dict[str, tuple[Resident, Resident]] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the site's loop, from any thread without one."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(MOST_S)

    async def open(self, models: Sequence[str], words: Sequence[str]) -> None:
        """Engines, then both gateways; ready when they know exactly what the engines hold."""
        for model in models:
            self.pairs[model] = await self.house.pair(model=model)
        self.keyed_url = await self.another_gateway(*words, "--api-key", KEY)
        self.url = self.house.url = await self.another_gateway(*words)
        await until(self._known, what="all workers known exactly")

    async def another_gateway(self, *words: str, only: str = "") -> str:
        """URL of one more over the same engines, or those of one model; what it is told harms no
        other."""
        before = self.house.url
        pairs = [self.pairs[only]] if only else self.pairs.values()
        told = [word for pair in pairs for one in pair for word in one.words]
        await self.house.gateway(*told, *words)
        made, self.house.url = self.house.url, before or self.house.url
        return made

    async def _known(self) -> bool:
        found = (await self.house.get("/index/workers"))["workers"]
        return [one["knowledge"] for one in found] == ["exact"] * 2 * len(self.pairs)

    def at_work(self) -> int:
        """Sequences that hold pages, in all engines."""
        engines = [one.engine for pair in self.pairs.values() for one in pair]
        return sum(unit.cache.at_work for engine in engines for unit in engine.units)

    def idle(self) -> None:
        """Wait until no engine works, no page is held and the gateway has nothing booked."""
        self.run(until(self._idle, what="everything given back"))

    async def _idle(self) -> bool:
        workers = (await self.house.get("/workers"))["workers"]
        loads = [
            one[name] for one in workers for name in ("load", "inflight_tokens") if name in one
        ]
        engines = [one.engine for pair in self.pairs.values() for one in pair]
        rooms = sum(len(engine.open_rooms()) for engine in engines)
        return not (any(loads) or rooms or self.at_work())

    async def newcomer(self, model: str) -> tuple[Resident, Resident]:
        """A pair that the running gateway is told of; returns when it serves."""
        made = (
            await self.house.engine(Role.PREFILL, model=model),
            await self.house.engine(Role.DECODE, model=model),
        )
        for one in made:
            await self.house.add(one)
        await until(lambda: self.house.all_well(*(one.pod for one in made)))
        return made

    async def depart(self, *pairs: Resident) -> None:
        """Tell the gateway that they are gone, then stop them."""
        for one in pairs:
            async with self.house.session.delete(f"{self.url}/workers/{one.pod}") as answer:
                assert answer.status in (202, 404), await answer.text()
        await asyncio.gather(*(self.house.leave(one) for one in pairs))


@contextlib.contextmanager
def site(models: Sequence[str], *words: str) -> Iterator[Site]:
    """All of it, for `with`; everything is stopped at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="site", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(MOST_S)

    stack = contextlib.AsyncExitStack()
    try:
        built = Site(run(stack.enter_async_context(house())), loop)
        run(built.open(models, words))
        yield built
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(MOST_S)
        loop.close()
