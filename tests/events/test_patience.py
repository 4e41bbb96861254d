"""Patience: the store is asked until it answers, and an outage is two lines of log, not a flood."""

from __future__ import annotations

import asyncio
import logging

import pytest
from kit.clock import FakeClock
from prometheus_client import CollectorRegistry

from kvplane.events.metrics import EventsMetrics
from kvplane.events.patience import Outage, Patience
from kvplane.events.settings import EventsSettings
from kvplane.index import StoreDown
from kvplane.vocabulary import Pod, Worker


async def test_an_outage_is_told_once_and_its_end_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, registry, calls = FakeClock(), CollectorRegistry(), 0
    metrics = EventsMetrics(registry)

    async def call() -> int:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise StoreDown("r:1", "refused")
        return calls

    patiently = Patience(Worker(Pod("p")), clock, metrics, EventsSettings())
    waiting = asyncio.create_task(patiently(call))
    while not waiting.done():
        await asyncio.sleep(0)
        clock.advance(10.0)
    assert await waiting == 4
    down, back = caplog.messages
    assert down == "store down worker=p store r:1: refused action=retry"
    assert back.startswith("store is back worker=p after_s=")
    assert registry.get_sample_value("kvplane_events_store_errors_total") == 3


async def test_whoever_hears_the_store_again_wakes_all_who_wait_for_it() -> None:
    clock, outage, down = FakeClock(), Outage(), True
    metrics = EventsMetrics(CollectorRegistry())

    async def call() -> str:
        if down:
            raise StoreDown("r:1", "refused")
        return "written"

    workers = [Worker(Pod(f"p{number}")) for number in range(50)]
    patient = [Patience(one, clock, metrics, EventsSettings(), outage) for one in workers]
    waiting = [asyncio.create_task(one(call)) for one in patient]
    for _ in range(20):
        await asyncio.sleep(0)
    down = False
    outage.end()  # no clock moves: nobody waits out its pause
    assert await asyncio.gather(*waiting) == ["written"] * 50
