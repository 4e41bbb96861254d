"""Doors: a port is opened, shared out by path and closed; a taken one is named."""

from __future__ import annotations

import json
import socket
from typing import Any

import aiohttp
import pytest
from kit.ports import free_port
from prometheus_client import CollectorRegistry, Counter

from kvplane.doors import Metrics, PortTaken, Server, Switchboard, bind


def telling(name: str) -> Any:
    """An app that tells its name and what it was asked."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        told = {"app": name, "path": scope["path"], "root": scope.get("root_path", "")}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    return app


async def test_each_path_reaches_its_app_and_the_longest_prefix_wins() -> None:
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


def test_a_listener_is_named_as_tcp_so_that_answers_do_not_wait_for_an_ack() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
