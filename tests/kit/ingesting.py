"""Ingesting: a whole ingest over a store, and a follower's view of what it writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from kit.batches import SPACE, tokens
from kit.streams import QUICK, Publisher
from kit.wait import until
from kvplane.events import EventsMetrics, EventsSettings, Following, Subscriptions
from kvplane.index import Follower, Store, View, chain, rank
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Knowledge, Pod, Role, Worker, WorkerUp


def up(name: str, *publishers: Publisher, **facts: Any) -> WorkerUp:
    """A pod whose ranks are these publishers."""
    events = tuple(one.events for one in publishers)
    replay = tuple(one.replay for one in publishers if one.replay)
    worker = WorkerUp(Pod(name), "http://127.0.0.1:8000", Role.PREFILL, "vllm", "m")
    return replace(worker, events=events, replay=replay, **facts)


@dataclass
class Ingest:
    """Subscriptions, and the view that a router would have."""

    subscriptions: Subscriptions
    store: Store
    view: View
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvplane_events_{name}", labels) or 0.0

    def of(self, name: str) -> Following:
        """What is known of a worker here."""
        worker = Worker.parse(name)
        (found,) = (one for one in self.subscriptions.following() if one.worker == worker)
        return found

    def depth(self, name: str, prompt: int, blocks: int = 1) -> int:
        """How much of a prompt a worker holds, as the view has it."""
        prefix = chain(tokens(prompt, blocks), SPACE)
        (held,) = rank(self.view, prefix, [Worker.parse(name)])
        return held.depth_blocks

    def held(self, name: str, prompts: Sequence[int]) -> list[int]:
        return [prompt for prompt in prompts if self.depth(name, prompt)]

    def believed(self, name: str) -> tuple[Knowledge | None, str]:
        known = self.view.known(Worker.parse(name))
        return (known.state, known.reason) if known else (None, "")

    async def knows(self, name: str, state: Knowledge, what: str = "") -> str:
        """Wait until the view has a state with these words; its reason."""

        def does() -> bool:
            found, reason = self.believed(name)
            return found is state and what in reason

        await until(does, 10, f"{name} {state} {what!r}")
        return self.believed(name)[1]

    async def at(self, name: str, sequence: int) -> None:
        """Wait until the view has seen a batch."""
        worker = Worker.parse(name)

        def seen() -> bool:
            facts = self.view.facts(worker)
            return facts is not None and facts.last == sequence

        await until(seen, 20, f"batch {sequence} of {name}")


@contextlib.asynccontextmanager
async def ingesting(store: Store, settings: EventsSettings = QUICK) -> AsyncIterator[Ingest]:
    """Runs until the block ends; the store stays open."""
    clock, registry, view = SystemClock(), CollectorRegistry(), View()
    subscriptions = Subscriptions(store, clock, EventsMetrics(registry), settings)
    follower = Follower(store, view, clock)
    await subscriptions.start()
    await follower.start()
    try:
        yield Ingest(subscriptions, store, view, registry)
    finally:
        await subscriptions.stop()
        await follower.stop()
        await asyncio.sleep(0)
