"""One node of an instance in a process of its own, and the hand that stops, wakes and kills it.

python -m kit.node_process leader PORT LIFE          python -m kit.node_process node PORT LIFE
stdout: one line of JSON per event; a node answers a question with its process id and the question,
and never answers b"hang". It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kit.wait import until
from kvplane.bootstrap import (
    Address,
    Announced,
    Leader,
    Member,
    Node,
    NotWelcome,
    RendezvousSettings,
)
from kvplane.vocabulary import Generation

SETTINGS = RendezvousSettings(
    beat_s=0.1, silent_s=2.0, hello_s=2.0, first_wait_s=0.05, most_wait_s=0.2
)
TESTS = Path(__file__).parents[1]


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


async def work(body: bytes) -> bytes:
    if body == b"hang":
        await asyncio.Event().wait()
    return b"%d %s" % (os.getpid(), body)


async def as_node(port: int, life: str) -> None:
    me = Member(1, 2, Generation(life))
    node = Node(Address("127.0.0.1", port), me, work, settings=SETTINGS)
    node.watch(lambda told, why: say(event="link", leader=told and told.generation, why=why))
    say(event="dials")
    try:
        await node.join(60.0)
        await node.ended()
    except NotWelcome as error:
        say(event="refused", why=str(error))


async def as_leader(port: int, life: str) -> None:
    told = Announced(Generation(life), "127.0.0.1", 8998)
    leader = Leader(Address("127.0.0.1", port), 2, told, settings=SETTINGS)
    leader.watch(lambda node: say(event="node", state=node.state, why=node.why))
    await leader.start()
    say(event="listens", port=leader.port)
    await asyncio.Event().wait()


async def until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


async def main(role: str, port: str, life: str) -> None:
    part = as_leader if role == "leader" else as_node
    tasks = {
        asyncio.ensure_future(part(int(port), life)),
        asyncio.ensure_future(until_stdin_ends()),
    }
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    os._exit(0)


class Child:
    """One such process and what it said."""

    def __init__(self, role: str, port: int, life: str) -> None:
        self._words = (role, str(port), life)
        self.said: list[dict[str, Any]] = []

    async def start(self) -> Child:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kit.node_process", *self._words, cwd=TESTS,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read())
        await until(lambda: self.said, 30, what="the child has started")
        return self

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.said.append(json.loads(line))

    @property
    def pid(self) -> int:
        return self._process.pid

    def heard(self, **wanted: Any) -> dict[str, Any] | None:
        """The last event with these members."""
        events = reversed(self.said)
        return next((e for e in events if wanted.items() <= e.items()), None)

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def ended(self) -> int:
        return await asyncio.wait_for(self._process.wait(), 30)

    async def stop(self) -> None:
        if self._process.returncode is None:
            self.send(signal.SIGCONT)
            self._process.kill()
        await self._process.wait()
        await self._reader


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
