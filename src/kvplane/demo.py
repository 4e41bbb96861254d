"""Demo: `kvplane demo`, a whole plane on one machine and a chat through it.

Edge. Four engines as processes, the plane in this one; wiring.py makes the plane. Open it to
change what a newcomer sees first.

    prefill-1 prefill-2 decode-1 decode-2   processes, tiny real engines
    ingest + index + gateway                this process, index in memory
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvplane.children import Child, stop_all
from kvplane.doors import PortTaken, bind
from kvplane.runtime import Part, running
from kvplane.vocabulary import Pod, Role, WorkerUp

# Where to look for another port: beside the wanted one, below the range (from 32768 on Linux) of
# which kernels take ports for who connects, as these engines do until the port is listened on.
STEP, STEPS = 10, 200
BLOCK = 16  # tokens a block of the tiny engine
ANSWER_TOKENS = 48
READY_S = 30.0  # the plane must know all four engines within this
SEEN_S = 10.0  # and the first turn's blocks must be in the index within this
SYSTEM = (
    "You are the smallest engine in the house: two layers, four heads and a big heart. "
    "You answer in characters that only you understand, and always the same ones."
)
TURNS = (
    "Who keeps the blocks of this conversation while we talk?",
    "And who will be asked first when I come back with one more line?",
)


class DemoFailed(RuntimeError):
    """The demo did not show what it promises; the sentence says what was seen instead."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One engine of the demo and where it sits."""

    name: str
    role: Role
    port: int
    events: int
    replay: int
    bootstrap: int | None = None

    def arguments(self) -> list[str]:
        words = ["engine", "--role", self.role.value, "--port", str(self.port)]
        words += ["--events-port", str(self.events), "--replay-port", str(self.replay)]
        words += ["--log-level", "warning", "--config", os.devnull]
        if self.bootstrap is not None:
            words += ["--bootstrap-port", str(self.bootstrap)]
        return words

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def worker(self) -> WorkerUp:
        return WorkerUp(
            pod=Pod(self.name), url=self.url, role=self.role, bootstrap_port=self.bootstrap
        )


@dataclass
class Ports:
    """Hands out each wanted port, or a free one where it is taken; never one twice."""

    given: set[int] = field(default_factory=set)

    def take(self, wanted: int) -> int:
        near = range(wanted, min(wanted + STEP * STEPS, 65536), STEP)
        for port in (*near, 0, 0, 0, 0):
            if port in self.given:
                continue
            try:
                with contextlib.closing(bind("127.0.0.1", port)) as probe:
                    found = int(probe.getsockname()[1])
            except PortTaken:
                continue
            if found not in self.given:
                self.given.add(found)
                return found
        raise PortTaken("no free port on 127.0.0.1")


def seats(ports: Ports) -> list[Seat]:
    """Two prefill and two decode engines on the default ports, or on free ones."""
    found = []
    for number in range(4):
        role = Role.PREFILL if number < 2 else Role.DECODE
        found.append(
            Seat(
                f"{role.value}-{number % 2 + 1}",
                role,
                ports.take(30000 + number),
                ports.take(5557 + number),
                ports.take(5657 + number),
                ports.take(8998 + number) if role is Role.PREFILL else None,
            )
        )
    return found


async def demo(
    make_plane: Callable[[list[WorkerUp], int], Part],
    wanted_port: int,
    once: bool,
    say: Callable[[str], None],
    until_told: Callable[[], Awaitable[None]],
) -> None:
    """Start everything, chat twice, show the evidence; then serve until told, unless `once`.

    Raises DemoFailed, ChildFailed or PortTaken. On every path all processes are gone at the end.
    """
    began = time.monotonic()
    ports = Ports()
    port = ports.take(wanted_port)
    if port != wanted_port:
        say(f"port {wanted_port} is taken: the gateway goes to {port}")
    chairs = seats(ports)
    say("starting two prefill and two decode engines ...")
    async with contextlib.AsyncExitStack() as stack:
        await _engines(chairs, stack, say)
        await stack.enter_async_context(running([make_plane([c.worker() for c in chairs], port)]))
        url = f"http://127.0.0.1:{port}"
        session = await stack.enter_async_context(
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60))
        )
        await _ready(session)
        say(f"gateway    up   {url}   index in memory, knowledge exact")
        await _chat(session, say)
        say(f"all of it took {time.monotonic() - began:.1f} s")
        page = f"{url}/dashboard      the page: fleet, prompts, rooms, diagnosis"
        if once:
            say(f"without --once it goes on serving, and has {page}")
        else:
            say(f"serving on {url} until Ctrl-C; in another terminal try")
            say(f"  {page}")
            say(f"  curl {url}/index/workers        who holds how many blocks")
            say(f"  curl '{url}/rooms?limit=1'      what happened to the last request, and why")
            await until_told()
            say("ending ...")
    say("every process is gone")


async def _engines(
    chairs: list[Seat], stack: contextlib.AsyncExitStack, say: Callable[[str], None]
) -> None:
    # What the environment tells a kvplane of the user's own is not meant for these.
    environ = {name: value for name, value in os.environ.items() if not _is_ours(name)}
    children = [
        Child(seat.name, seat.arguments(), f"{seat.url}/health", environ=environ) for seat in chairs
    ]
    stack.push_async_callback(stop_all, children)

    async def one(seat: Seat, child: Child) -> None:
        began = time.monotonic()
        await child.start()
        where = f"{seat.url}   events tcp://127.0.0.1:{seat.events}"
        say(f"{seat.name:<10} up   {where}   {time.monotonic() - began:.1f} s")

    async with asyncio.TaskGroup() as group:
        for seat, child in zip(chairs, children, strict=True):
            group.create_task(one(seat, child))


def _is_ours(name: str) -> bool:
    return name.startswith("KVPLANE_")


async def _ready(session: aiohttp.ClientSession) -> None:
    """All four workers selectable and their knowledge exact."""

    async def all_exact() -> bool:
        async with session.get("/index/workers") as answer:
            workers = (await answer.json())["workers"]
        async with session.get("/readiness") as answer:
            ready = answer.status == 200
        exact = [worker for worker in workers if worker["knowledge"] == "exact"]
        return ready and len(exact) == 4

    await _until(all_exact, READY_S, "the gateway to know all four engines exactly")


async def _chat(session: aiohttp.ClientSession, say: Callable[[str], None]) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    for number, question in enumerate(TURNS, start=1):
        messages.append({"role": "user", "content": question})
        body = {"model": "tiny", "messages": messages, "max_tokens": ANSWER_TOKENS}
        answer, headers = await _ask(session, body)
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        say("")
        if number == 1:
            say("A chat. The engines compute for real, with random weights: words mean nothing.")
            say("")
        say(f"turn {number}  user       {question}")
        say(f"        assistant  {text}")
        depth, predicted, actual = _told(answer["usage"], headers)
        say(
            f"        chosen     {headers['x-kvplane-prefill']} -> {headers['x-kvplane-decode']}"
            f"   that prefill held {headers['x-kvplane-depth']} blocks of the prompt"
        )
        say(f"        cached     predicted {predicted} tokens, actual {actual}")
        if predicted != actual:
            raise DemoFailed(f"turn {number}: predicted {predicted} cached tokens, got {actual}")
        if number == 2 and depth == 0:
            raise DemoFailed("turn 2 hit nothing: the first turn's blocks were not found")
        if number == 1:
            await _seen(session, body, headers["x-kvplane-prefill"])
    await _stages(session, headers["x-kvplane-room"], say)


async def _ask(
    session: aiohttp.ClientSession, body: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    async with session.post("/v1/chat/completions", json=body) as answer:
        found = await answer.json()
        if answer.status != 200:
            raise DemoFailed(f"the gateway answered {answer.status}: {found}")
        return found, {name.lower(): value for name, value in answer.headers.items()}


def _told(usage: dict[str, Any], headers: dict[str, str]) -> tuple[int, int, int]:
    """(depth, predicted, actual) in tokens; an engine always computes the last prompt token."""
    depth = int(headers["x-kvplane-depth"].split("/")[0]) * BLOCK
    predicted = min(depth, (usage["prompt_tokens"] - 1) // BLOCK * BLOCK)
    return depth, predicted, usage["prompt_tokens_details"]["cached_tokens"]


async def _seen(session: aiohttp.ClientSession, body: dict[str, Any], prefill: str) -> None:
    """The index has heard of the blocks that the first turn left on its prefill."""
    question = {"model": body["model"], "messages": body["messages"][:2]}

    async def held() -> bool:
        async with session.post("/index/rank", json=question) as answer:
            found = await answer.json()
        blocks = found.get("blocks", 1)
        return any(
            worker["worker"] == prefill and worker["depth_blocks"] == blocks
            for worker in found.get("workers", [])
        )

    await _until(held, SEEN_S, f"the index to hold the first turn's blocks on {prefill}")


async def _stages(session: aiohttp.ClientSession, room: str, say: Callable[[str], None]) -> None:
    async with session.get(f"/rooms/{room}") as answer:
        found = await answer.json()
    say("")
    say(f"room {room} is where the pair of turn 2 met   outcome {found['outcome']}")
    for stage in found["stages"]:
        milliseconds = (stage["duration_s"] or 0.0) * 1000
        say(
            f"        {stage['stage']:<17} {stage['outcome']:<7} {milliseconds:8.2f} ms"
            f"   by {stage['by']:<24} {stage['detail']}"
        )
    say("")


async def _until(condition: Callable[[], Awaitable[bool]], deadline_s: float, what: str) -> None:
    until = time.monotonic() + deadline_s
    while not await condition():
        if time.monotonic() > until:
            raise DemoFailed(f"waited {deadline_s:.0f} s for {what}")
        await asyncio.sleep(0.05)
