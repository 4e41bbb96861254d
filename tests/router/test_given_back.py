"""Given back: a request that ends at any of its waits, in any way, leaves nothing taken.

At the k-th wait, for every k: the task is cancelled, or it is cancelled as what it waited for is
here, or the client leaves. Engines of both sides answer, refuse, break off and stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.instant import SCOPE, body
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.router.api import Api
from kvplane.router.settings import BreakerSettings, RetrySettings, RouterSettings

GOOD, BAD = answer(b'{"text":"x"}'), answer(b'{"error":{"message":"x"}}', 500)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = HEAD, b"9\r\ndata: 1\n\n\r\n", b"9\r\ndata: 2\n\n\r\n", b"0\r\n\r\n"
ENDINGS = ("cancelled", "cancelled as it goes on", "client gone")
SETTINGS = RouterSettings(
    tokenizer="builtin",
    retry=RetrySettings(retries=1, first_wait_s=0.001, budget_most=1000),
    breaker=BreakerSettings(faults=10_000),
)


def says(*parts: bytes) -> Script:
    """In turns of the loop of their own; one that does not end is cut."""

    async def script(call: Call) -> None:
        while await call.asked():
            for part in parts:
                await call.send(part)
                await asyncio.sleep(0)
            if not parts[-1].endswith((b"}", b"0\r\n\r\n")):
                return call.reset()

    return script


class Steps(Awaitable[None]):
    """Runs a coroutine and ends it at its k-th wait."""

    def __init__(self, work: Awaitable[None], last: int, ending: str, leave: Callable[[], None]):
        self.work, self.last, self.ending, self.leave, self.done = work, last, ending, leave, 0

    def __await__(self) -> Generator[Any, Any, None]:
        steps, error = self.work.__await__(), None
        while True:
            try:
                wait = next(steps) if error is None else steps.throw(error)  # type: ignore[attr-defined]
            except StopIteration:
                return
            self.done, error = self.done + 1, None
            now = self.done == self.last
            if now and self.ending == "cancelled":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            elif now and self.ending == "client gone":
                self.leave()
            try:
                yield wait
            except BaseException as raised:
                error = raised
            if now and error is None and self.ending == "cancelled as it goes on":
                error = asyncio.CancelledError()


async def ended(api: Api, sent: bytes, last: int, ending: str) -> bool:
    """One request that ends at this wait; False where it had fewer."""
    left = asyncio.Event()
    parts = [{"type": "http.request", "body": sent[:9], "more_body": True}]
    parts.append({"type": "http.request", "body": sent[9:]})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if parts:
            return parts.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    steps = Steps(api(dict(SCOPE), receive, send), last, ending, left.set)

    async def run() -> None:
        await steps

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.create_task(run())
    return steps.done >= last


def taken(house: Gatehouse, api: Api) -> list[Any]:
    """What is not given back."""
    places, legs = api.admission.places, house.legs
    found: list[Any] = [t for t in house.fleet.targets() if t.inflight_requests]
    found += [t for t in house.fleet.targets() if t.inflight_tokens or t.waiting_requests]
    found += [legs.live] if legs.live else []
    found += [busy] if (busy := legs.sockets - legs.idling) else []
    found += [key for key in api.keys if key.running]
    found += [what for what in (places.running, places.waiting, api.admission.held_bytes) if what]
    dialled = sum(engine.open for engine in legs._engines.values())
    found += [(dialled, legs.sockets)] if dialled != legs.sockets else []
    return found if house.idle else [*found, "not idle"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((GOOD,), STREAM), ((BAD,), STREAM), ((GOOD,), STREAM[:2]), (STREAM, (BAD[:-3], BAD[-3:]))],
    ids=["stream", "prefill fails", "stream cut", "decode refuses"],
)  # fmt: skip
async def test_a_request_that_ends_at_any_wait_leaves_nothing_taken(
    prefill: tuple[bytes, ...], decode: tuple[bytes, ...], ending: str
) -> None:
    async with gatehouse({"p1": says(*prefill), "d1": says(*decode)}, SETTINGS) as house:
        api = Api(house.gateway, None)
        last = 1
        while await ended(api, body(stream=True), last, ending):
            await until(lambda: not taken(house, api))
            last += 1
            assert last < 100
        total = sum(
            sample.value
            for family in house.registry.collect()
            for sample in family.samples
            if sample.name == "kvplane_router_legs_total"
        )
        ring = house.ledger.meetings(10_000)
        assert total == sum(len(meeting.parties) for meeting in ring) > 0
