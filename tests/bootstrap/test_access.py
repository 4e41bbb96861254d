"""Access: who may write, by key, by address, by certificate; and what a refusal leaves behind."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from kit.directory import Reply, Seat, Wire, rank, serving

from kvplane.bootstrap import DirectorySettings
from kvplane.bootstrap.access import Writer, refusal, writer

AWAY = {"X-Forwarded-For": "10.9.9.9"}  # a proxy on this machine tells where a caller really is
WRITES = (
    ("PUT", "/route", json.dumps(rank(rank_ip="10.6.6.6", rank_port=2)).encode()),
    ("POST", "/register_dp_rank", b'{"bootstrap_room": 5, "dp_rank": 1}'),
    ("POST", "/forget_rooms", b'{"bootstrap_rooms": [7]}'),
    ("PUT", "/register_transfer_engine_info",
     b'{"tp_rank":0,"transfer_engine_info":{"session_id":"s","weights_info_dict":{}}}'),
)  # fmt: skip


def status(who: Writer, **settings: Any) -> int:
    found = refusal(DirectorySettings(**settings), who)
    return 200 if found is None else found.status


@pytest.mark.parametrize(("authorization", "expected"), [
    (b"Bearer k3y", 200), (b"bearer k3y", 200), (b"BEARER   k3y ", 200),
    (None, 401), (b"", 401), (b"k3y", 401), (b"Basic k3y", 401), (b"Bearer", 401),
    (b"Bearer k3", 401), (b"Bearer k3yy", 401), (b"Bearer K3Y", 401), (b"Bearer \xff\x00", 401),
])  # fmt: skip
def test_with_a_key_only_the_key_counts(authorization: bytes | None, expected: int) -> None:
    for host in ("127.0.0.1", "10.9.9.9", None):
        who = Writer(host, authorization=authorization, certified=True)
        assert status(who, write_key="k3y", open_writes=True) == expected


@pytest.mark.parametrize(("host", "server", "expected"), [
    (None, None, 200), ("127.0.0.1", "127.0.0.1", 200), ("127.8.9.1", "127.0.0.1", 200),
    ("::1", "::1", 200), ("::ffff:127.0.0.1", "::ffff:127.0.0.1", 200),
    ("10.0.0.3", "10.0.0.3", 200), ("fd00::3", "fd00::3", 200),  # the leader at its own address
    ("10.0.0.4", "10.0.0.3", 403), ("::ffff:10.0.0.4", "::ffff:10.0.0.3", 403),
    ("fe80::1%eth0", "fe80::2%eth0", 403), ("not-an-address", "127.0.0.1", 403), ("", "", 403),
])  # fmt: skip
def test_without_a_key_only_this_machine_writes(
    host: str | None, server: str | None, expected: int
) -> None:
    assert status(Writer(host, server)) == expected
    assert status(Writer(host, server), open_writes=True) == 200
    assert status(Writer(host, server, certified=True)) == 200
    assert status(Writer(host, server, authorization=b"Bearer any")) == expected


def test_a_refusal_names_the_flags_and_never_the_key() -> None:
    away = refusal(DirectorySettings(), Writer("10.9.9.9", "10.0.0.3"))
    assert away is not None
    for flag in ("10.9.9.9", "--write-key", "--open-writes"):
        assert flag in away.text
    settings = DirectorySettings(write_key="k3y")
    wrong = refusal(settings, Writer(authorization=b"Bearer no"))
    assert wrong is not None
    assert "k3y" not in wrong.text + repr(settings)
    assert "Bearer" in wrong.text


def test_a_certificate_is_seen_in_the_servers_own_words() -> None:
    scope: dict[str, Any] = {"headers": [], "client": ("10.0.0.4", 5), "server": ("10.0.0.3", 1)}
    assert not writer(scope).certified
    for tls, certified in (
        ({"client_cert_name": "CN=p1"}, True),
        ({"client_cert_name": None}, False),
    ):
        assert writer(scope | {"extensions": {"tls": tls}}).certified is certified
    assert writer({"headers": [], "client": None, "server": None}).host is None


async def each(seat: Seat, headers: dict[str, str]) -> list[Reply]:
    return [await seat.wire.call(method, path, body, headers) for method, path, body in WRITES]


@pytest.mark.parametrize(("settings", "headers", "expected"), [
    ({"write_key": "k3y"}, {}, 401), ({"write_key": "k3y"}, {"Authorization": "Bearer no"}, 401),
    ({}, AWAY, 403), ({}, AWAY | {"Authorization": "Bearer k3y"}, 403),
    ({"open_writes": True, "write_key": "k3y"}, AWAY, 401),
])  # fmt: skip
async def test_nobody_rewrites_the_table_without_leave(
    settings: dict[str, Any], headers: dict[str, str], expected: int
) -> None:
    """FR-BS-05 with protection on: rejected, counted, table and connection as before."""
    async with serving(metrics=True, **settings) as seat:
        own = {"Authorization": "Bearer k3y"} if "write_key" in settings else {}
        assert (
            await seat.wire.call("PUT", "/route", json.dumps(rank()).encode(), own)
        ).status == 200
        seat.rooms.register(7, 2, seat.clock.now())
        before = await seat.ranks()
        replies = await each(seat, headers)
        assert [reply.status for reply in replies] == [expected] * 4
        if expected == 401:
            assert {reply.headers["www-authenticate"] for reply in replies} == {"Bearer"}
        assert await seat.ranks() == before
        assert (await seat.get(0, 0, 0, 0)).json() == {"rank_ip": "10.0.0.1", "rank_port": 40000}
        assert (await seat.wire.call("GET", "/get_transfer_engine_info?rank=0")).status == 404
        why = "key" if expected == 401 else "address"
        text = (await seat.wire.call("GET", "/metrics")).text
        assert f'kvplane_bootstrap_refused_total{{reason="{why}"}} 4.0' in text
        assert seat.wire.opened == 1


async def test_who_has_the_key_writes_from_anywhere() -> None:
    async with serving(write_key="k3y") as seat:
        replies = await each(seat, AWAY | {"Authorization": "Bearer k3y"})
        assert [reply.status for reply in replies] == [200] * 4


async def test_a_rank_that_only_says_again_that_it_is_there_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ranks register every two seconds while another one is missing."""
    async with serving() as seat:
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                await seat.put(rank_ip="10.0.0.1", rank_port=1)
        assert caplog.text.count("rank registered") == 1


async def test_a_takeover_is_an_event_with_old_and_new_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FR-BS-05 with protection off: accepted only as a logged event, and a metric."""
    async with serving(metrics=True, open_writes=True) as seat:
        await seat.put(rank_ip="10.0.0.1", rank_port=1)
        other = Wire(seat.port)
        try:
            with caplog.at_level(logging.WARNING):
                assert (await other.call(*WRITES[0], AWAY)).status == 200
        finally:
            await other.close()
        assert "replaced=10.0.0.1:1" in caplog.text
        assert "address=10.6.6.6:2" in caplog.text
        table = await seat.ranks()
        assert table["takeovers"] == [{
            "place": "tp=0", "old": "10.0.0.1:1", "new": "10.6.6.6:2",
            "generation": table["generation"], "at": seat.clock.wall(),
        }]  # fmt: skip
        text = (await seat.wire.call("GET", "/metrics")).text
        assert "kvplane_bootstrap_takeovers_total 1.0" in text


async def test_a_body_that_may_not_be_written_is_not_kept() -> None:
    async with serving(write_key="k3y", most_body_bytes=1000) as seat:
        reply = await seat.wire.call("PUT", "/route", b"x" * 999)
        assert reply.status == 401
        assert (await seat.wire.call("PUT", "/route", b"x" * 100_000)).status == 413
        assert (await seat.get()).status == 503
