"""Engines: a prefill and its own rank directory are one life."""

from __future__ import annotations

import aiohttp
from kit.directory import rank
from kit.ports import free_port
from kit.wait import until

from kvplane.bootstrap import Address
from kvplane.engines import EngineProcess
from kvplane.settings import parser, resolve


async def test_a_rank_of_an_older_life_does_not_take_a_prefills_directory() -> None:
    """Node 0 was killed and is back at once; a rank of another node renews what it knows."""
    door, directory = free_port(), free_port()
    line = ["engine", "--role", "prefill", "--port", str(door), "--bootstrap-port", str(directory)]
    line += ["--events-port", "0", "--replay-port", "0", "--blocks", "16"]
    process = EngineProcess(resolve(vars(parser().parse_args(line)), {}, {}))
    await process.start()
    at = Address("127.0.0.1", directory).url
    async with aiohttp.ClientSession() as session:

        async def complete() -> bool:
            async with session.get(f"{at}/ranks") as answer:
                return bool((await answer.json())["complete"])

        try:
            await until(complete)
            old = rank() | {"generation": "older"}
            async with session.put(f"{at}/route", json=old) as answer:
                assert answer.status == 409, await answer.text()
            assert await complete()
        finally:
            await process.stop()
