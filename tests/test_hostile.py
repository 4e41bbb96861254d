"""Clients that break off, mix up or only half obey HTTP: what they are told, and what is left."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.wait import until

from kvplane import cycle as cycles
from kvplane import writing
from kvplane.connections import MOST_UNREAD, Connection
from kvplane.cycle import EXTENSION, KEPT, Cycle
from kvplane.doors import Server

POST = b"POST /%b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b"
GET = b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n"


class Desk:
    """Answers by messages, and POST /direct without; each answer tells what was understood."""

    def __init__(self) -> None:
        self.go, self.begun, self.seen = asyncio.Event(), 0, list[Cycle]()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        self.seen.append(cycle)
        self.begun += 1
        what = scope["path"][1:]
        if what == "fails":
            raise ValueError("as it should")
        if what == "early":
            cycle.answer(401, [(b"content-length", b"2")], b"no", more=False)
        elif what == "much":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * 8_000_000})
        elif what == "stream":
            await self._flow(send)
        elif what == "waits":
            cycle.on_leave(lambda: None)
            await self.go.wait()
            await self._echo(cycle, send)
        else:
            await self._echo(cycle, send)

    async def _flow(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await self.go.wait()
        await send({"type": "http.response.body", "body": b"end"})

    async def _echo(self, cycle: Cycle, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await cycle.receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        names = b",".join(name for name, _ in cycle.headers)
        said = b"<%b %b [%b] %b>" % (cycle.method, cycle.url, names, body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": said})

    async def direct(self, cycle: Cycle) -> None:
        self.seen.append(cycle)
        self.begun += 1
        body = b""
        while cycle.more_body:
            message = await cycle.receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
        said = b"<direct %b>" % (body + cycle.take())
        cycle.on_leave(lambda: None)
        assert cycle.answer(200, [(b"content-length", b"%d" % len(said))], said, more=False)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@asynccontextmanager
async def opened(desk: Desk) -> AsyncIterator[Server]:
    server = Server(desk, "127.0.0.1", 0, "test", direct={b"/direct": desk.direct})
    await server.start()
    try:
        async with asyncio.timeout(30):
            yield server
    finally:
        desk.go.set()
        await server.stop()


async def told(server: Server, *parts: bytes) -> bytes:
    """All that one connection hears until we end it; each part is a write of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def connections(server: Server) -> list[Any]:
    return list(server._server.server_state.connections)


# -- HTTP/1.0, expectations, offers, trailers


@pytest.mark.parametrize("sent", [b"", b"connection: keep-alive\r\n"])
async def test_an_old_client_gets_no_chunks_but_an_end(desk: Desk, sent: bytes) -> None:
    desk.go.set()
    async with opened(desk) as server:
        for path, body in ((b"/", b"<GET / [%b] >"), (b"/stream", b"partend")):
            found = await told(server, b"GET %b HTTP/1.0\r\n%b\r\n" % (path, sent))
            head, _, rest = found.partition(b"\r\n\r\n")
            assert b"connection: close" in head and b"transfer-encoding" not in head
            assert rest == body.replace(b"%b", sent.partition(b":")[0])


async def test_an_old_client_is_not_told_to_go_on_and_offers_nothing(desk: Desk) -> None:
    async with opened(desk) as server:
        expects = b"POST /direct HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        found = await told(server, expects, b"ab")
        assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"<direct ab>")
        offers = b"GET / HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        assert (await told(server, offers)).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_before_a_body_that_was_held_back_ends_the_connection(desk: Desk) -> None:
    """Its client may send the body or not: what follows could be read as either."""
    head = b"POST /early HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 44\r\n\r\n"
    async with opened(desk) as server:
        found = await told(server, head, GET % b"")
        assert found.count(b"HTTP/1.1 ") == 1 and b"connection: close" in found
        assert b"401" in found and desk.begun == 1


async def test_who_expects_but_sends_no_body_is_not_told_to(desk: Desk) -> None:
    async with opened(desk) as server:
        head = b"GET / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        assert (await told(server, head)).startswith(b"HTTP/1.1 200 ")


async def test_what_stands_behind_a_body_is_no_header(desk: Desk) -> None:
    """A proxy before us takes care of what is in a head, and of nothing else."""
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    body = b"1\r\nx\r\n0\r\nx-forwarded-for: 127.0.0.1\r\nauthorization: b\r\n\r\n"
    async with opened(desk) as server:
        for parts in ([head + body], [head, body]):
            found = await told(server, *parts)
            assert b"[host,transfer-encoding,connection] x>" in found


@pytest.mark.parametrize("path", [b"direct", b"early"])
async def test_who_says_behind_the_body_that_this_was_all_is_believed(
    desk: Desk, path: bytes
) -> None:
    """Else the connection stays, and swallows whatever is sent on it."""
    head = b"POST /%b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" % path
    end = b"0\r\nconnection: close\r\n\r\n"
    async with opened(desk) as server:
        for parts in ([head + end], [head, end], [head + end + GET % b""]):
            assert (await told(server, *parts)).count(b"HTTP/1.1 ") == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.replace(b"/direct", b"/early"))
        await reader.readuntil(b"no")
        writer.write(end)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("url", [b"http://a:b:c/", b"http://", b"http://a@b@c/"])
async def test_a_url_that_is_none_is_the_clients_fault(
    desk: Desk, url: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(desk) as server:
        found = await told(server, b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % url)
        assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1 ") == 1
    assert "an app" not in caplog.text and not desk.begun


# -- requests behind requests


async def test_direct_and_other_routes_behind_each_other_keep_their_bodies(desk: Desk) -> None:
    chunked = b"POST /direct HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = [
        POST % (b"direct", 3, b"one"), POST % (b"", 3, b"two"), GET % b"direct",
        chunked + b"2\r\nth\r\n3\r\nree\r\n0\r\n\r\n", POST % (b"direct?a=b", 0, b""),
        b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    ]  # fmt: skip
    whole = b"".join(sent)
    async with opened(desk) as server:
        for step in (len(whole), 1, 7):
            found = await told(
                server, *(whole[at : at + step] for at in range(0, len(whole), step))
            )
            assert found.count(b"HTTP/1.1 200 ") == 6
            order = [b"<direct one>", b" two>", b"<GET /direct ", b"<direct three>", b"<direct >"]
            places = [found.index(one) for one in order]
            assert places == sorted(places) and b"<GET / [host,connection] >" in found


async def test_nonsense_behind_requests_never_falls_into_an_answer(desk: Desk) -> None:
    async with opened(desk) as server:
        for between in (b"", GET % b"", (GET % b"") * 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(GET % b"stream")
            await reader.readuntil(b"part\r\n")
            writer.write(between + b"\x00\x01\r\n\r\n")
            assert await reader.read() == b"", "the answer is cut, and nothing is said in it"
            writer.close()


async def test_a_refusal_is_told_also_where_requests_went_well_before(desk: Desk) -> None:
    async with opened(desk) as server:
        for bad in (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"GET / HTTP/a\r\n", b"\x00\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(GET % b"")
            await reader.readuntil(b"0\r\n\r\n")
            writer.write(bad)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 "), bad
            writer.close()


# -- deadlines


@pytest.mark.parametrize(
    "sent",
    [GET % b"" + b"GET /x HT", GET % b"" + b"POST /x HTTP/1.1\r\nhost: a\r\n", b"\r\n\r\n",
     POST % (b"early", 9, b"ab"), POST % (b"early", 9, b""), GET % b"" + POST % (b"early", 9, b"")],
    ids=["half a line", "half a head", "empty lines", "half a body", "no body", "second"],
)  # fmt: skip
async def test_what_never_comes_whole_is_not_waited_for_for_ever(
    desk: Desk, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_s", 0.2)
    async with opened(desk) as server:
        await told(server, sent)
        await until(lambda: not connections(server))


@pytest.mark.parametrize("path", [b"", b"direct"])
async def test_a_body_that_stops_is_refused_and_its_app_let_go(
    desk: Desk, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycles, "BODY_S", 0.2)
    monkeypatch.setattr(writing, "LINGER_S", 0.1)
    async with opened(desk) as server:
        found = await told(server, POST % (path, 9, b"abc"))
        assert found.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in found
        await until(lambda: not connections(server) and not server._server.server_state.tasks)


async def test_a_body_that_comes_after_its_answer_leaves_the_connection_in_use(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(desk) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST % (b"early", 4, b"ab"))
        await reader.readuntil(b"no")
        (connection,) = connections(server)
        assert connection._late is not None
        writer.write(b"cd" + POST % (b"direct", 1, b"x"))
        assert (await reader.readuntil(b">")).endswith(b"<direct x>")
        assert connection._late is None
        writer.write(b"\r\n")  # as old browsers end a form
        writer.write(POST % (b"direct", 1, b"y"))
        assert (await reader.readuntil(b">")).endswith(b"<direct y>")
        assert connection._late is None
        writer.close()


async def test_the_last_of_an_answer_that_nobody_takes_is_not_kept_for_ever(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is less than a transport finds worth mentioning."""
    monkeypatch.setattr(Connection, "stall_s", 0.2)
    before = Connection.stalled
    async with opened(desk) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(GET % b"waits")
        await until(lambda: connections(server) and desk.begun)
        (connection,) = connections(server)
        inner = connection.writer._inner
        inner.set_write_buffer_limits(high=1 << 30)
        inner.write(b"x" * 8_000_000)
        assert inner.get_write_buffer_size(), "the kernel took it all"
        connection.transport.close()
        await until(lambda: not connections(server))
        writer.close()
    assert Connection.stalled == before + 1


# -- faults of apps, and our end


async def test_an_app_that_fails_while_the_client_does_not_drain_ends_the_connection(
    desk: Desk,
) -> None:
    async with opened(desk) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(GET % b"much" + GET % b"fails")
        await until(lambda: desk.begun == 2)
        found = b""
        while data := await reader.read(1 << 20):
            found = found[-1000:] + data
        assert b"x\r\n0\r\n\r\nHTTP/1.1 500 " in found
        writer.close()


async def test_nothing_put_is_no_end(desk: Desk) -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        assert cycle.answer(200, [], b"a", more=True)
        assert cycle.put(b"") and cycle.put(b"b")
        await send({"type": "http.response.body", "body": b""})

    server = Server(app, "127.0.0.1", 0, "test")
    await server.start()
    try:
        head = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert (await told(server, head)).endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
    finally:
        await server.stop()


async def test_our_end_leaves_no_connection_whatever_its_state(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "LINGER_S", 0.1)
    desk.go.set()
    server = Server(desk, "127.0.0.1", 0, "test", direct={b"/direct": desk.direct})
    server._server.config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]
    await server.start()
    states = [
        b"", b"GET / HT", POST % (b"direct", 9, b"x"), POST % (b"early", 9, b"x"), GET % b"",
        GET % b"much", POST % (b"", 9, b"x") + GET % b"", GET % b"much" + GET % b"fails",
    ]  # fmt: skip
    writers = []
    for state in states:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(state)
        writers.append(writer)
    await until(lambda: desk.begun >= 7 and len(connections(server)) == len(states))
    await server.stop()
    await until(lambda: not connections(server) and not server._server.server_state.tasks)
    for writer in writers:
        writer.close()


# -- memory


async def test_small_parts_of_a_body_count_as_what_they_cost(desk: Desk) -> None:
    async with opened(desk) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /waits HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"2\r\nab\r\n" * 100_000)
        await until(lambda: desk.begun and connections(server)[0].flow.read_paused)
        assert desk.seen[0].size < 100_000 * KEPT
        desk.go.set()
        writer.write(b"0\r\n\r\n")
        await until(lambda: desk.seen[0].response_complete)
        assert not desk.seen[0]._parts
        writer.close()


async def test_of_a_body_that_is_sent_ahead_only_a_little_is_read(desk: Desk) -> None:
    async with opened(desk) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET % b"waits")
        await until(lambda: desk.begun)
        writer.write(POST % (b"direct", 3_000_000, b"x" * 3_000_000))
        (connection,) = connections(server)
        await until(lambda: connection.ahead and connection.flow.read_paused)
        assert sum(map(len, connection.ahead[0]._parts)) < MOST_UNREAD / 2
        desk.go.set()
        assert b"<GET /waits " in await reader.readuntil(b"0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 3000009" in head
        assert await reader.readexactly(3_000_009) == b"<direct %b>" % (b"x" * 3_000_000)
        writer.close()


async def test_a_body_nobody_wanted_is_not_kept_with_an_idle_connection(desk: Desk) -> None:
    async with opened(desk) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST % (b"early", 50_000, b"x" * 50_000))
        await reader.readuntil(b"no")
        await until(lambda: not connections(server)[0]._within)
        assert not desk.seen[0]._parts and not desk.seen[0].size
        writer.close()


KINDS = ("Bounded", "Cycle", "Writer", "FlowControl", "HttpRequestParser")


def counted() -> Counter[str]:
    """Objects of a connection; the Server above has none itself."""
    return Counter(name for one in gc.get_objects() if (name := type(one).__name__) in KINDS)


async def test_whenever_a_client_leaves_nothing_of_it_is_left_for_the_collector(
    desk: Desk,
) -> None:
    """At each byte, and without reading: objects that hold each other would wait for gc."""
    whole = POST % (b"direct", 3, b"abc") + POST % (b"", 3, b"abc") + GET % b"stream"
    async with opened(desk) as server:
        gc.collect()
        gc.disable()
        try:
            before = counted()
            for cut in range(0, len(whole) + 1, 2):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(whole[:cut])
                writer.close()
            del writer
            state = server._server.server_state
            await until(lambda: not state.connections and not state.tasks)
            desk.seen.clear()
            await until(lambda: counted() - before == Counter(), what=str(counted()))
        finally:
            gc.enable()
