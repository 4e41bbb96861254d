"""Service process: the whole index in one, `python -m bench.service_process PORT ENDPOINT ...`.

Engines' events over ZMQ into a memory store, a follower, a view, and the HTTP routes; no Redis, so
that it is the same job as the peer's.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from kvplane.doors import Metrics, Server, Switchboard, new_registry
from kvplane.events import EventsMetrics, Subscriptions
from kvplane.index import Chains, Follower, IndexMetrics, MemoryStore, View, index_app
from kvplane.runtime import SystemClock, running, spare_garbage_looks
from kvplane.vocabulary import Pod, Role, WorkerUp

CHAINS_BYTES = 64 * 2**20  # what the command gives them where it is told nothing: parts.py


async def serve(port: int, endpoints: list[str]) -> None:
    """Until SIGTERM."""
    clock, registry = SystemClock(), new_registry()
    store, view, metrics = MemoryStore(clock), View(), IndexMetrics(registry)
    follower = Follower(store, view, clock, metrics)
    subscriptions = Subscriptions(store, clock, EventsMetrics(registry))
    ups = [
        WorkerUp(Pod(f"w{number}"), "http://127.0.0.1:1", Role.PREFILL, "vllm", "m", events=(end,))
        for number, end in enumerate(endpoints)
    ]
    chains = Chains(CHAINS_BYTES)
    app = index_app(view, follower, fleet=lambda: ups, metrics=metrics, clock=clock, chains=chains)
    door = Switchboard({"/metrics": Metrics(registry), "/index": app, "": app})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    direct = {b"/rank": app.desk.direct}  # as the command has it
    server = Server(door, "127.0.0.1", port, "index", direct=direct)
    async with running([follower, subscriptions, server]):
        for up in ups:
            await subscriptions.up(up)
        await stop.wait()


if __name__ == "__main__":
    spare_garbage_looks()  # as the command does
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), sys.argv[2:]))
