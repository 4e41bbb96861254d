"""Start orders: whoever comes first, the plane ends the same, and its first request is served.

A Redis, an ingest with a gateway, and two pairs of engines (FR-OP-07).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.durable import Durable, durable
from kit.house import House, house
from kit.ports import free_port
from kit.wait import until

from kvplane.plane import GatewayPlane, IngestPlane
from kvplane.runtime import Part
from kvplane.settings import parser, resolve
from kvplane.vocabulary import Role

ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
QUICK = ["--health-check-interval-secs", "0.5"]


@dataclass
class Building:
    """Where each of them will be, before it is there."""

    home: House
    redis: Durable
    ports: list[tuple[int, int]] = field(
        default_factory=lambda: [(free_port(), free_port()) for _ in ROLES]
    )
    product: list[Part] = field(default_factory=list)

    async def store(self) -> None:
        await asyncio.to_thread(self.redis.start)

    async def engines(self) -> None:
        for role, (port, bootstrap) in zip(ROLES, self.ports, strict=True):
            await self.home.engine(role, port=port, bootstrap_port=bootstrap)

    async def plane(self) -> None:
        words = ["--redis", self.redis.url, *QUICK]
        for role, (port, bootstrap) in zip(ROLES, self.ports, strict=True):
            more = [str(bootstrap)] if role is Role.PREFILL else []
            words += [f"--{role}", f"http://127.0.0.1:{port}", *more]
        gateway = free_port()
        self.home.url = f"http://127.0.0.1:{gateway}"
        listen = ["--port", str(gateway), "--tokenizer", "builtin"]
        made = told("router", *words, *listen)
        parts = [IngestPlane(told("ingest", *words)), GatewayPlane(made, made.workers, gateway)]
        for part in parts:
            await part.start()
            self.product.append(part)

    async def close(self) -> None:
        for part in reversed(self.product):
            await part.stop()


def told(*words: str) -> Any:
    return resolve(vars(parser().parse_args(list(words))), {}, {})


STEPS: dict[str, Callable[[Building], Awaitable[None]]] = {
    "redis": Building.store,
    "engines": Building.engines,
    "product": Building.plane,
}


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids=" ".join)
async def test_in_every_order_of_starting_the_plane_ends_the_same(order: tuple[str, ...]) -> None:
    with durable() as redis:
        redis.end()
        async with house() as home:
            building = Building(home, redis)
            try:
                for step in order:
                    await STEPS[step](building)
                await until(lambda: ready(home), timeout_s=30, what="a gateway that is ready")
                found = await home.generate(list(range(40, 90)))
                assert found.status == 200, found.body
                await until(lambda: settled(home), timeout_s=30, what="all four known exactly")
                await until(lambda: nothing_wrong(home), timeout_s=30, what="no finding is left")
            finally:
                await building.close()


async def ready(home: House) -> bool:
    async with home.session.get(f"{home.url}/readiness") as answer:
        return answer.status == 200


async def nothing_wrong(home: House) -> bool:
    return (await home.get("/diagnosis"))["findings"] == []


async def settled(home: House) -> bool:
    known = (await home.get("/index/workers"))["workers"]
    workers = (await home.get("/workers"))["workers"]
    exact = [one for one in known if one["knowledge"] == "exact"]
    # One that was not met yet is shown by its job, and has no status.
    return len(exact) == 4 and all(one.get("status") == "serving" for one in workers)
