"""kvplane tail as a process: words for people, records for programs, and it outlives the index."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from kit.indexed import fill, indexed
from kit.plane import EngineSeat
from kit.ports import free_port
from kit.wait import until

from kvplane.doors import Server, Switchboard
from kvplane.events import Broadcast, routes
from kvplane.events import broadcast as events_broadcast
from kvplane.events.broadcast import TooMany
from kvplane.events.records import record
from kvplane.index import Batch, IndexSettings, MemoryStore
from kvplane.runtime import SystemClock, running
from kvplane.tailing import Event, Events, _Tail, tail, words
from kvplane.terminal import NotKvplane
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

P = Worker(Pod("p"))
E = Epoch(1)
SETTINGS = {"after": "", "json": False}


@pytest.mark.parametrize("reason", ["at\u00a0p1", "a\u2028b", "\x7f\x9b2J", "caf\u00e9"])
def test_a_record_is_told_as_it_is_and_draws_nothing(
    reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = msgspec.json.encode({"reason": reason}).decode()
    _Tail(SETTINGS | {"json": True, "url": ""})._take(Event("1", "changes", told))  # type: ignore[arg-type]
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert line.isprintable() and json.loads(line) == {"reason": reason}


class Tail:
    """The command as a process, with what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.said: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        self._tasks = [
            asyncio.create_task(self._read(process.stdout, self.lines)),
            asyncio.create_task(self._read(process.stderr, self.said)),
        ]

    @staticmethod
    async def _read(stream: asyncio.StreamReader, into: list[str]) -> None:
        while line := await stream.readline():
            into.append(line.decode().rstrip("\n"))

    async def ended(self) -> int:
        await asyncio.wait_for(asyncio.gather(*self._tasks), 30)
        return await asyncio.wait_for(self.process.wait(), 30)


@contextlib.asynccontextmanager
async def tailing(*words: str) -> AsyncIterator[Tail]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvplane", "tail", *words,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    tail = Tail(process)
    try:
        yield tail
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await tail.ended()


class Index:
    """A served change stream that can go away and come back on the same port."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock(), IndexSettings(stream_entries=50))
        self.port, self.sequence = free_port(), -1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Broadcast]:
        broadcast, app = Broadcast(self.store), FastAPI()
        app.router.routes.extend(routes(broadcast, "/index/snapshot"))
        server = Server(Switchboard({"/index": app, "": app}), "127.0.0.1", self.port, "index")
        async with running([server, broadcast]):
            yield broadcast

    async def write(self, *changes: Change) -> None:
        if self.sequence < 0:
            await self.store.begin_life(P, None)
        self.sequence += 1
        await self.store.apply(Batch(P, E, self.sequence, self.sequence, changes))

    async def store_blocks(self, *blocks: int) -> None:
        names = tuple(map(BlockHash, blocks))
        await self.write(Stored(P, E, Tier.GPU, None, names, 16))


async def read_by(broadcast: Broadcast) -> None:
    def begun() -> bool:
        return [bool(one.began) for one in broadcast._readers] == [True]

    await until(begun, 30, "tail to be connected")


async def test_it_prints_a_line_of_words_for_every_change_and_ends_well_by_ctrl_c() -> None:
    index = Index()
    async with index.served() as broadcast, tailing("--url", index.url) as tail:
        await read_by(broadcast)
        await index.store_blocks(1, 2)
        await index.write(
            Removed(P, E, Tier.GPU, (BlockHash(1),)),
            Cleared(P, E, ClearReason.ENGINE, Tier.CPU),
        )
        await until(lambda: len(tail.lines) == 4, 30, f"four lines, not {tail.lines}")
        assert [line.split("  ", 1)[1].split() for line in tail.lines] == [
            ["p", "cleared", "everything:", "restart"],
            ["p", "stored", "2", "blocks", "on", "gpu"],
            ["p", "removed", "1", "block", "from", "gpu"],
            ["p", "cleared", "cpu:", "engine"],
        ]
        tail.process.send_signal(signal.SIGINT)
        assert await tail.ended() == 0
        assert tail.said == []


async def test_it_prints_records_and_goes_on_from_a_cursor() -> None:
    index = Index()
    await index.store_blocks(1)
    after = await index.store.head()
    await index.store_blocks(*range(20_000))  # longer than any buffer for lines
    words = ("--url", index.url, "--after", after, "--json")
    async with index.served(), tailing(*words) as tail:
        await until(lambda: tail.lines, 30, "the change after the cursor")
        (line,) = tail.lines
        said = json.loads(line)
        assert said["sequence"] == 1 and len(said["changes"][0]["blocks"]) == 20_000
        assert said["cursor"] == await index.store.head()


async def test_an_index_that_goes_away_and_comes_back_costs_no_change() -> None:
    index = Index()
    async with tailing_over(index) as tail:
        async with index.served() as broadcast:
            await read_by(broadcast)  # and nothing was heard yet: the place is known all the same
        await until(lambda: tail.said, 30, "a word about the index")
        for number in range(5):
            await index.store_blocks(number)
        async with index.served():
            await until(lambda: len(tail.lines) == 6, 30, f"all changes, not {tail.lines}")
            await index.store_blocks(99)
            await until(lambda: len(tail.lines) == 7, 30, "and the next")
        assert all(line.endswith("trying again") for line in tail.said)
        assert len(tail.said) <= 3, "one line for each time it went away"


@contextlib.asynccontextmanager
async def tailing_over(index: Index) -> AsyncIterator[Tail]:
    """Begun while the index is up for a moment, since a first contact must succeed."""
    async with contextlib.AsyncExitStack() as stack:
        async with index.served() as broadcast:
            tail = await stack.enter_async_context(tailing("--url", index.url))
            await read_by(broadcast)
        yield tail


async def test_what_was_missed_is_said_and_it_goes_on_from_now() -> None:
    index = Index()
    await index.store_blocks(1)
    old = await index.store.head()
    for number in range(200):  # the stream holds 50 entries
        await index.store_blocks(number)
    words = ("--url", index.url, "--after", old)
    async with index.served() as broadcast, tailing(*words) as tail:
        await until(lambda: tail.said, 30, "a word about what is gone")
        assert "take a snapshot; going on from now" in tail.said[0]
        await read_by(broadcast)
        await index.store_blocks(7, 8)
        await until(lambda: tail.lines, 30, "the changes from now on")
        assert tail.lines[0].endswith("stored   2 blocks on gpu")


async def test_a_stream_that_is_gone_while_it_is_read_is_said_too() -> None:
    index = Index()
    async with index.served() as broadcast, tailing("--url", index.url) as tail:
        await read_by(broadcast)
        broadcast.ring.begin(await index.store.head(), "cut on purpose")
        await index.store_blocks(1)
        await until(lambda: tail.said, 30, "a word about it")
        assert "cut on purpose; take a snapshot; going on from now" in tail.said[0]


async def test_too_many_readers_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_broadcast, "TooMany", lambda what, _: TooMany(what, 1))
    index = Index()
    async with index.served() as broadcast:
        broadcast.settings = type(broadcast.settings)(changes_readers=0)
        async with tailing("--url", index.url) as tail:
            await until(lambda: tail.said, 30, "a word about the refusal")
            assert "0 readers follow here" in tail.said[0] and "trying again" in tail.said[0]
            broadcast.settings = type(broadcast.settings)(changes_readers=1)
            await read_by(broadcast)


async def test_nobody_there_or_somebody_else_is_one_line_and_the_end() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with tailing("--url", url) as tail:
        assert await tail.ended() == 1
        assert tail.said == [
            f"kvplane: {url} cannot be reached: Connection refused; "
            "is a gateway running there? (--url)"
        ]
    server = Server(FastAPI(), "127.0.0.1", 0, "other")
    async with running([server]), tailing("--url", f"http://127.0.0.1:{server.port}") as tail:
        assert await tail.ended() == 1
        assert (
            len(tail.said) == 1 and "is this kvplane? /index/changes answered 404" in tail.said[0]
        )


async def test_a_pipe_that_is_closed_ends_it_quietly() -> None:
    index = Index()
    async with index.served() as broadcast:
        command = f"{sys.executable} -m kvplane tail --url {index.url} | head -n 1"
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", f"set -o pipefail; {command}", stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        ended = asyncio.create_task(process.communicate())
        await read_by(broadcast)

        async def over() -> bool:
            await index.store_blocks(1)
            return ended.done()

        await until(over, 30, "both ends of the pipe to be gone")
        out, err = await ended
        assert (process.returncode, out.decode().count("\n"), err) == (0, 1, b"")


async def test_it_follows_a_gateway_and_an_index_process(redis_url: str, redis_prefix: str) -> None:
    seats = [EngineSeat("p", "both")]
    async with indexed(seats, redis_url, redis_prefix) as plane, index_process(
        redis_url, redis_prefix
    ) as url, tailing("--url", plane.url) as one, tailing("--url", url) as other:  # fmt: skip
        number = 0

        async def heard() -> bool:  # it follows from when it is connected, so speak until it is
            nonlocal number
            number += 1
            await fill(plane, "p", number)
            pod = plane.engines["p"].pod
            return all(
                any("stored" in line and pod in line for line in tail.lines)
                for tail in (one, other)
            )

        await until(heard, 30, "both to print what the engine stored")


@contextlib.asynccontextmanager
async def index_process(redis_url: str, prefix: str) -> AsyncIterator[str]:
    from kvplane.children import Child

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["index", "--redis", redis_url, "--redis-prefix", prefix, "--port", str(port)]
    child = Child("index", words, f"{url}/stats")
    await child.start()
    try:
        yield url
    finally:
        await child.stop()


@pytest.mark.parametrize(
    "data",
    [b"{{{", b"\xff", b"[]", b'"text"', b'{"x": 1}', b'{"at": 1e300, "changes": []}',
     b'{"at": 1, "changes": [{"worker": "w", "kind": "stored"}]}', b'{"at": 1, "changes": 7}'],
)  # fmt: skip
async def test_a_stream_of_somebody_else_is_one_line_and_the_end(data: bytes) -> None:
    app = FastAPI()

    @app.get("/index/changes")
    async def changes() -> Response:
        body = b"id: 1\nevent: changes\ndata: " + data + b"\n\n"
        return Response(body, media_type="text/event-stream")

    server = Server(app, "127.0.0.1", 0, "other")
    async with running([server]):
        with pytest.raises(NotKvplane, match="is this kvplane"):
            await tail({**SETTINGS, "url": f"http://127.0.0.1:{server.port}"})  # type: ignore[arg-type]


# -- pure --------------------------------------------------------------------------------------


def test_events_are_found_in_pieces_of_any_size() -> None:
    text = b'id: 1\n: hello\n\n: nothing new\n\nid: 2\nevent: changes\ndata: {"a": "\xc3\xa9"}\n\n'
    for size in (1, 2, 3, 7, len(text)):
        events = Events()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [event for piece in pieces for event in events.feed(piece)]
        assert [(one.id, one.name, one.data) for one in found] == [
            ("1", "", ""),
            ("2", "changes", '{"a": "é"}'),
        ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Stored(P, E, Tier.GPU, None, (BlockHash(1),), 16), "stored   1 block on gpu"),
        (Removed(P, E, Tier.DISK, (BlockHash(1),) * 3), "removed  3 blocks from disk"),
        (Cleared(P, E, ClearReason.GONE), "cleared  everything: gone"),
        (Cleared(P, E, ClearReason.ENGINE, Tier.GPU), "cleared  gpu: engine"),
        (Known(P, E, Knowledge.DARK, "silent", 1.0), "known    dark: silent"),
        (Known(P, E, Knowledge.EXACT, "live", 1.0, "ab1"), "known    exact: live (ingest ab1)"),
        (
            Stored(P, E, Tier.GPU, None, (), 16, Group(2, GroupKind.WINDOW, 128)),
            "stored   0 blocks on gpu, cache group 2 (window of 128 tokens)",
        ),
        (
            Removed(P, E, Tier.GPU, (BlockHash(1),), 2),
            "removed  1 block from gpu, cache group 2",
        ),
    ],
)
def test_every_kind_of_change_has_its_words(change: Change, said: str) -> None:
    shown: dict[str, Any] = {"at": 0.0, "changes": [record(change)]}
    (line,) = words(shown)
    assert line.split("  ", 1)[1] == f"{'p':<24} {said}"


def test_what_is_printed_is_one_line_and_nothing_that_a_terminal_obeys() -> None:
    evil = Known(P, E, Knowledge.DARK, "\x1b[2J\x07 a\nb\u202e é", 1.0)
    (line,) = words({"at": 0.0, "changes": [record(evil)]})
    assert line.isprintable() and "a?b" in line and "é" in line
