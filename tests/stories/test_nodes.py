"""Nodes: a prefill in two processes; one is killed, stopped, named, and back; the other stays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from typing import Any

import aiohttp
from kit.pair import alone, asked
from kit.plane import EngineSeat, Plane, plane, together
from kit.ports import free_port
from kit.wait import until

FLAGS = [
    "--retry-max-retries", "0", "--cb-failure-threshold", "100000",
    "--health-check-interval-secs", "0.3",
]  # fmt: skip
NODE = "node 1 of 2 (tp=2, tp=3)"


@dataclass
class Follower(EngineSeat):
    """A node that no gateway is told of."""

    def gateway_flags(self) -> list[str]:
        return []


async def health(running: Plane, name: str) -> tuple[int, str]:
    try:
        async with running.session.get(f"{running.engines[name].url}/health") as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientError as error:
        return 0, str(error)


async def same_tokens(running: Plane, seed: int) -> None:
    chance = random.Random(seed)
    for length in (1, 100, 700):
        ids = [chance.randrange(32, 127) for _ in range(length)]
        status, two, _ = await running.ask("/generate", asked(ids, 8))
        assert status == 200, two
        assert two["output_ids"] == alone(ids, 8)


async def test_a_killed_node_is_named_and_its_return_needs_nobody_else() -> None:
    told = ["--tp", "4", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    seats = [
        EngineSeat("node0", "prefill", told),
        Follower("node1", "prefill", [*told, "--node-rank", "1"]),
        EngineSeat("decode", "decode", ["--tp", "2"]),
    ]
    async with plane(seats, FLAGS, workers=2) as running:
        await same_tokens(running, 1)
        life = await generation(running)
        error = await killed_in_the_middle(running)
        # whoever saw it first says it: node 0 names the node, a decode the rank that is there
        assert any(name in error["message"] for name in (NODE, "prefill tp=2", "prefill tp=3"))
        await until(lambda: sick(running), what="node 0 names it")
        async with running.session.post(
            f"{seats[0].url}/generate", json=asked([40] * 20, 2) | {"bootstrap_room": 77}
        ) as answer:
            said = await answer.json()
            assert (answer.status, said["error"]["stage"]) == (502, "register"), said
            assert f"2 of 4, missing tp=2, tp=3: {NODE} is gone" in said["error"]["message"]
        again = seats[1].child()
        async with together([again]):
            await until(lambda: served(running), timeout_s=30, what="the pair serves again")
            await same_tokens(running, 2)
            assert again.pid is not None
            os.kill(again.pid, signal.SIGSTOP)
            await until(lambda: sick(running), what="a stopped node is noticed, too")
            os.kill(again.pid, signal.SIGCONT)
            await until(lambda: served(running), timeout_s=30, what="awake, it serves again")
            await same_tokens(running, 3)
            assert await generation(running) == life  # node 0 was never restarted


async def killed_in_the_middle(running: Plane) -> dict[str, Any]:
    """A room whose node 1 hangs and is then killed; what the client is told, in time."""
    await running.fault("node1", stage="verify", kind="hang", rank="tp=3")
    asking = asyncio.create_task(running.ask("/generate", asked([50] * 90, 4)))
    url = running.engines["node1"].url

    async def at_work() -> bool:
        return bool((await running.get("/truth", at=url))["rooms"]["open"])

    await until(at_work, what="node 1 has the room")
    running.children["node1"].kill()
    status, found, _ = await asyncio.wait_for(asking, 15)
    assert status >= 500, found
    error: dict[str, Any] = found["error"]
    return error


async def sick(running: Plane) -> bool:
    """Node 0 names the node in its health, and the gateway shows it."""
    status, said = await health(running, "node0")
    workers = (await running.get("/workers"))["workers"]
    shown = [one["reason"] for one in workers if one["pod"] == running.engines["node0"].pod]
    return status == 503 and all(f"{NODE} is gone" in text for text in (said, *shown))


async def served(running: Plane) -> bool:
    status, _, _ = await running.ask("/generate", asked([60] * 20, 2))
    return status == 200


async def generation(running: Plane) -> str:
    info = await running.get("/server_info", at=running.engines["node0"].url)
    return str(info["kvplane"]["generation"])
