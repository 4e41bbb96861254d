"""Diagnosing: bring everything the rules of diagnosis.py look at, now.

Edge: a few questions with short deadlines, asked only when somebody wants a diagnosis: the engines
of attempts that failed, prefills that cannot be found, the index store. admin_evidence.py serves
it. Open it to give the rules one more thing to look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from kvplane.index import IndexFault, StoreUnfit, StoreUnused
from kvplane.vocabulary import Pod, Role, Stage, WorkerUp

from .diagnosis import MOST_ATTEMPTS, RECENT_S, Scene, report
from .discovery.facts import bootstrap_port
from .engines import get
from .evidence import MOST_REFUSED
from .fleet import Waited
from .gateway import Gateway
from .legs_errors import LegError
from .patterns import stuck
from .queues import queues, said

ASK_S = 1.0  # all questions together
MOST_ASKED = 20  # failed attempts whose engines are asked
MOST_PORTS = 16  # prefills asked where their rank directory is
MOST_PAGES = 4  # workers that seem stuck, asked for their metrics


class Discovered(Protocol):
    """What is asked of discovery."""

    def waiting(self) -> Iterable[Waited]: ...
    def named(self) -> Mapping[Pod, WorkerUp]: ...


async def diagnose(gateway: Gateway, desk: Discovered | None) -> dict[str, Any]:
    """GET /diagnosis."""
    return report(await scene(gateway, desk))


async def scene(gateway: Gateway, desk: Discovered | None) -> Scene:
    """The plane as it is now, and what requests ran into lately."""
    waiting = tuple(desk.waiting()) if desk is not None else ()
    ledger, now = gateway.ledger, gateway.clock.now()
    failed = ledger.meetings(MOST_ASKED, failed=True, since=now - RECENT_S)
    _, ports, (unfit, unused) = await asyncio.gather(
        ledger.settle(failed, ASK_S), _ports(gateway, waiting), _store(gateway)
    )
    living = gateway.view.living  # None: nobody told yet
    lives = not unused and (living is None or bool(living))
    meetings = ledger.meetings(MOST_ATTEMPTS)
    return Scene(
        fleet=gateway.fleet,
        breakers=gateway.breakers,
        now=gateway.clock.now(),
        known=gateway.view.known,
        drift=gateway.doubts.verdict,
        waiting=waiting,
        declared=desk.named() if desk is not None else {},
        told_ports=ports,
        meetings=meetings,
        queues=await _queues(gateway, [one.culprit for one in stuck(meetings, now)]),
        refused=tuple(ledger.refusals(MOST_REFUSED, now - RECENT_S)),
        crowd=_crowd(gateway),
        ingest_lives=lives,
        store_refuses="" if lives else await _refuses(gateway),
        store_down_s=0.0 if unused else gateway.loop.store_down_s(),
        store_unfit=unfit,
    )


def _crowd(gateway: Gateway) -> tuple[int, int, int]:
    places, queue = gateway.places, gateway.settings.admission.queue
    return (places.running, places.waiting, queue) if places is not None else (0, 0, queue)


async def _ports(gateway: Gateway, waiting: Iterable[Waited]) -> dict[Pod, int]:
    """Where prefills say that their rank directory listens; asked are those that cannot be found
    and did not tell yet."""
    lost = [
        target.up
        for target in gateway.fleet.targets(Role.PREFILL)
        if target.pulse.lost is not None and target.worker.dp_rank == 0
    ]
    known = {up.pod: up.own_bootstrap_port for up in lost}
    lost += [one.declared for one in waiting if one.stage == Stage.REGISTER]
    asked = [up for up in lost if known.get(up.pod) is None][:MOST_PORTS]
    told = await asyncio.gather(*(_port(gateway, up) for up in asked))
    known |= {up.pod: port for up, port in zip(asked, told, strict=True)}
    return {pod: port for pod, port in known.items() if port is not None}


async def _port(gateway: Gateway, up: WorkerUp) -> int | None:
    try:
        async with asyncio.timeout(ASK_S):
            status, body = await get(gateway, up.url, "/server_info")
        told = msgspec.json.decode(body) if status == 200 else {}
    except (LegError, TimeoutError, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return bootstrap_port(told) if isinstance(told, dict) else None


async def _queues(gateway: Gateway, stuck: Iterable[str]) -> dict[str, str]:
    """What the metrics of workers that seem stuck say of their queues."""
    urls = {str(one.worker): one.url for one in gateway.fleet.targets()}
    asked = [name for name in stuck if name in urls][:MOST_PAGES]
    pages = await asyncio.gather(*(_page(gateway, urls[name]) for name in asked))
    told = {name: said(queues(page)) for name, page in zip(asked, pages, strict=True)}
    return {name: text for name, text in told.items() if text}


async def _page(gateway: Gateway, url: str) -> str:
    try:
        async with asyncio.timeout(ASK_S):
            status, body = await get(gateway, url, "/metrics")
    except (LegError, TimeoutError):
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""


async def _refuses(gateway: Gateway) -> str:
    """Why the index store takes no writes; "" where it does, or is away."""
    if gateway.refuses is None:
        return ""
    try:
        async with asyncio.timeout(ASK_S):
            return await gateway.refuses()
    except (IndexFault, TimeoutError):
        return ""


async def _store(gateway: Gateway) -> tuple[str, bool]:
    """Why the index store may throw parts of the index away; "" where it does not, or is away. And
    whether it is there, and no ingest has written to it yet."""
    if gateway.fit is None:
        return "", False
    try:
        async with asyncio.timeout(ASK_S):
            await gateway.fit()
    except StoreUnfit as error:
        return str(error), False
    except StoreUnused:
        return "", True
    except (IndexFault, TimeoutError):
        return "", False  # away: store_down_s says so
    return "", False
