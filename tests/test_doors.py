"""Doors: a port is opened, shared out by path and closed; a taken one is named."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import pytest
from kit.ports import free_port
from kit.wait import until
from prometheus_client import CollectorRegistry, Counter
from yarl import URL

from kvplane.cycle import Cycle
from kvplane.doors import Metrics, PortTaken, Server, Switchboard, bind


def telling(name: str) -> Any:
    """An app that tells its name and what it was asked."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        told = {"app": name, "path": scope["path"], "root": scope.get("root_path", "")}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    return app


async def test_a_direct_route_has_its_posts_and_the_app_everything_else() -> None:
    seen: list[bytes] = []

    async def direct(cycle: Cycle) -> None:
        seen.append(cycle.url)
        body = b"" if cycle.more_body else cycle.take()
        headers = [(b"content-length", b"%d" % len(body))]
        assert cycle.answer(200, headers, body, more=False)

    server = Server(telling("app"), "127.0.0.1", 0, "test", direct={b"/fast": direct})
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
            for path in ("/fast", "/fast?a=b"):
                async with session.post(path, data=b"hello") as answer:
                    assert await answer.read() == b"hello"
            for method, path in (("GET", "/fast"), ("POST", "/fast/"), ("POST", "/%66ast")):
                async with session.request(method, URL(path, encoded=True)) as answer:
                    assert (await answer.json())["app"] == "app"
    finally:
        await server.stop()
    assert seen == [b"/fast", b"/fast?a=b"]


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "forgets"])
async def test_a_direct_route_that_breaks_is_a_500_and_the_connection_ends(fails: bool) -> None:
    async def direct(cycle: Cycle) -> None:
        if fails:
            raise ValueError("no")

    server = Server(telling("app"), "127.0.0.1", 0, "test", direct={b"/fast": direct})
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/fast"
        async with aiohttp.ClientSession() as session, session.post(url) as answer:
            assert (answer.status, answer.headers["connection"]) == (500, "close")
    finally:
        await server.stop()


async def test_requests_sent_ahead_are_answered_in_order_by_whoever_has_the_route() -> None:
    async def direct(cycle: Cycle) -> None:
        await asyncio.sleep(0)
        cycle.answer(200, [(b"content-length", b"6")], b"direct", more=False)

    server = Server(telling("app"), "127.0.0.1", 0, "test", direct={b"/fast": direct})
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        one = b"POST /%b HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        writer.write((one % b"fast" + one % b"slow") * 20)
        async with asyncio.timeout(10):
            for _ in range(20):
                assert (await reader.readuntil(b"direct")).startswith(b"HTTP/1.1 200")
                assert b"/slow" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    finally:
        await server.stop()


async def test_each_path_reaches_its_app_and_the_rest_has_what_is_left() -> None:
    board = Switchboard({"": telling("rest"), "/index": telling("index")})
    server = Server(board, "127.0.0.1", 0, "test")
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
            for path, app in (("/index/rank", "index"), ("/index", "index"), ("/indexes", "rest")):
                async with session.get(path) as answer:
                    found = await answer.json()
                assert (found["app"], found["path"]) == (app, path)
    finally:
        await server.stop()


@pytest.mark.parametrize("trusted", ["*", "127.0.0.0/8,::/0"])
def test_whose_word_about_a_client_counts_is_not_for_the_environment(
    monkeypatch: pytest.MonkeyPatch, trusted: str
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    believed = Server(telling("any"), "127.0.0.1", 0, "test")._server.config.forwarded_allow_ips
    assert believed == ["127.0.0.1", "::1"]


async def test_metrics_are_prometheus_text_and_take_no_writes() -> None:
    registry = CollectorRegistry()
    Counter("kvplane_test_things", "Things.", registry=registry).inc()
    server = Server(Metrics(registry), "127.0.0.1", 0, "metrics")
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
            async with session.get("/metrics") as answer:
                assert "kvplane_test_things_total 1.0" in await answer.text()
            async with session.post("/metrics") as answer:
                assert answer.status == 405
                assert answer.headers["allow"] == "GET, HEAD"
            async with session.get("/metrics/x") as answer:
                assert answer.status == 404
                assert (await answer.json())["error"] == {
                    "message": "GET /metrics/x: Not Found",
                    "type": "invalid_request_error",
                    "code": "not_found",
                    "param": None,
                }
    finally:
        await server.stop()


async def test_a_taken_port_is_named_and_a_stopped_server_gives_it_back() -> None:
    server = Server(telling("a"), "127.0.0.1", free_port(), "a")
    await server.start()
    with pytest.raises(
        PortTaken, match=f"a cannot listen on 127.0.0.1:{server.port}: Address already in use"
    ):
        bind("127.0.0.1", server.port, "a")
    with pytest.raises(PortTaken, match="in use; --prometheus-port chooses another"):
        bind("127.0.0.1", server.port, "metrics")
    with pytest.raises(PortTaken) as elsewhere:  # another port would be no better
        bind("192.0.2.1", 1, "a")
    assert "chooses" not in str(elsewhere.value)
    await server.stop()
    bind("127.0.0.1", server.port).close()


async def test_a_server_that_nobody_asks_stops_at_once_and_one_that_answers_when_it_has() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        begun.set()
        await may_end.wait()
        await telling("slow")(scope, receive, send)

    server = Server(app, "127.0.0.1", 0, "test")
    await server.start()
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}"
        asked = asyncio.create_task(session.get(url))
        await begun.wait()
        stopped = asyncio.create_task(server.stop())
        await until(lambda: _refused(server.port))
        assert not stopped.done()
        may_end.set()
        assert (await (await asked).json())["app"] == "slow"
        await stopped
    least: list[float] = []
    for _ in range(20):
        quiet = Server(telling("quiet"), "127.0.0.1", 0, "test")
        await quiet.start()
        began = time.monotonic()
        await quiet.stop()
        least.append(time.monotonic() - began)
    assert min(least) < 0.05, "nothing had to be waited for"


def _refused(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def test_a_listener_is_named_as_tcp_so_that_answers_do_not_wait_for_an_ack() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_prefix_that_is_more_than_one_part_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'/index/rank'"):
        Switchboard({"/index/rank": telling("rank")})
