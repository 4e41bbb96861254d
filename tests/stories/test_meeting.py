"""Meeting: real engines behind a real gateway, and what keeps a prefill and a decode apart.

One story for each report of the field (FR-BS-*, FR-TR-*) that needs the whole plane.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kit.directory import serving
from kit.engine import fake_engine
from kit.house import House, Resident, house, prefill_facts, served
from kit.peer import Call, peer
from kit.ports import free_port, has_ipv6
from kit.wait import until

from kvplane.vocabulary import Role, Room, Worker

PROMPT = list(range(40, 90))


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as built:
        yield built


async def test_a_prefill_that_cannot_register_is_named_at_once_and_not_selected(
    home: House,
) -> None:
    """FR-BS-02, second run: its bootstrap server was never started; its own health says so."""
    prefill = await home.engine(Role.PREFILL, directory=False)
    decode = await home.engine(Role.DECODE)
    await home.gateway(*prefill.words, *decode.words, ready=False)
    await until(lambda: waits_at_register(home, prefill.pod))
    found = await home.generate(PROMPT)
    assert (found.status, found.error["stage"]) == (503, "register")
    assert f"127.0.0.1:{prefill.bootstrap_port}" in found.error["message"]
    assert found.took_s < 2
    assert not (await home.worker(prefill.pod))["is_healthy"]


async def waits_at_register(home: House, pod: str) -> bool:
    return "regist" in (await home.worker(pod))["reason"]


async def test_a_prefill_that_looks_healthy_without_its_directory_gets_no_request(
    home: House,
) -> None:
    """FR-BS-02, second run, with an engine whose health knows nothing of its directory."""
    nobody = free_port()
    decode = await home.engine(Role.DECODE)
    async with fake_engine(**prefill_facts(nobody)) as prefill:
        await home.gateway("--prefill", prefill.url, str(nobody), *decode.words, ready=False)
        pod = prefill.url.removeprefix("http://")
        await until(lambda: waits_at_register(home, pod))
        found = await home.generate(PROMPT)
        assert (found.status, found.error["stage"]) == (503, "register")
        assert f"127.0.0.1:{nobody}: connection refused" in found.error["message"]
        assert found.took_s < 2 and served(prefill) == 0
        findings = (await home.get("/diagnosis"))["findings"]
        (said,) = (one["sentence"] for one in findings if one["culprit"] == pod and one["blocks"])
        assert f"register: no bootstrap server at 127.0.0.1:{nobody}" in said


async def test_where_directories_cannot_be_seen_from_the_gateway_it_need_not_look(
    home: House,
) -> None:
    """The other side of FR-BS-02: decodes may reach what a gateway must not."""
    decode = await home.engine(Role.DECODE)
    async with fake_engine(**prefill_facts(free_port())) as prefill:
        named = ("--prefill", prefill.url, *decode.words)
        await home.gateway(*named, "--no-watch-directories")
        assert await home.well(prefill.url.removeprefix("http://"))


V6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize(
    ("listens", "url", "bootstrap"),
    [
        pytest.param("::1", "[::1]:{http}", {"bootstrap_host": "[::1]:{boot}"}, marks=V6),
        pytest.param(
            "::1",
            "http://[::1]:{http}",
            {"bootstrap_host": "::1", "bootstrap_port": "{boot}"},
            marks=V6,
        ),
        pytest.param("::1", "http://[::1]:{http}", {"bootstrap_port": "{boot}"}, marks=V6),
        ("127.0.0.1", "http://localhost:{http}", {"bootstrap_host": "localhost:{boot}"}),
    ],
    ids=["[::1]:8998", "::1 and a port", "http://[::1]:30000", "a name"],
)
async def test_an_address_may_be_written_in_every_usual_way(
    home: House, listens: str, url: str, bootstrap: dict[str, str]
) -> None:
    """FR-BS-04: one full request each; what is injected is the bare host."""
    prefill, decode = await home.pair(host=listens)

    def written(engine: Resident, **more: str) -> dict[str, str]:
        ports = {"http": engine.engine.settings.port, "boot": engine.bootstrap_port}
        return {name: text.format(**ports) for name, text in ({"url": url} | more).items()}

    tables = [
        written(prefill) | {"role": "prefill"} | written(prefill, **bootstrap),
        written(decode) | {"role": "decode"},
    ]
    await home.gateway(tables=tables)
    found = await home.generate(PROMPT)
    assert found.status == 200, found.body
    room = await home.get(f"/rooms/{found.headers['x-kvplane-room']}")
    bare = "localhost" if "localhost" in url else listens
    assert room["triple"] == {"host": bare, "port": prefill.bootstrap_port}
    assert room["prefill"]["url"] == (await home.worker(found.prefill))["url"]
    assert ("[" in room["prefill"]["url"]) == (":" in bare)


@V6
async def test_a_name_of_the_other_family_is_as_good(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-BS-04: a host name with an AAAA record only."""
    real = socket.getaddrinfo

    def lookup(host: Any, *more: Any, **named: Any) -> Any:
        return real("::1" if host == "prefill-0.test" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    prefill, decode = await home.pair(host="::1")
    url = prefill.url.replace("[::1]", "prefill-0.test")
    await home.gateway("--prefill", url, str(prefill.bootstrap_port), *decode.words)
    found = await home.generate(PROMPT)
    assert found.status == 200, found.body
    room = await home.get(f"/rooms/{found.headers['x-kvplane-room']}")
    assert room["triple"] == {"host": "prefill-0.test", "port": prefill.bootstrap_port}


async def test_a_rank_that_was_chosen_is_carried_and_never_computed_from_the_room(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-BS-07, second half: rooms of another rank than the chosen one change nothing."""

    def wrong(draw: Callable[[], int], rank: int, size: int) -> Room:
        return Room(draw() // size * size + (rank + 1) % size)

    monkeypatch.setattr("kvplane.router.sending.mint", wrong)
    prefill = await home.engine(Role.PREFILL, dp=4)
    decode = await home.engine(Role.DECODE)
    await home.gateway(*prefill.words, *decode.words, "--policy", "round_robin")
    for number in range(8):
        used = await pages_used(home, prefill)
        found = await home.generate([50 + number] * 40)
        assert found.status == 200, found.body
        rank = Worker.parse(found.prefill).dp_rank
        assert int(found.headers["x-kvplane-room"]) % 4 == (rank + 1) % 4
        now = await pages_used(home, prefill)
        assert [at for at in range(4) if now[at] != used[at]] == [rank]


async def pages_used(home: House, engine: Resident) -> list[int]:
    told = await home.get("/truth", at=engine.url)
    return [rank["pages"]["used"] for rank in told["ranks"]]


async def test_a_directory_that_accepts_and_is_silent_costs_nobody_anything(home: House) -> None:
    """FR-BS-08: one probe at a time, ever more seldom; the others never wait for it."""
    prefill, decode = await home.pair()
    most_open = 0

    async def silent(call: Call) -> None:
        nonlocal most_open
        most_open = max(most_open, call.peer.open)
        await call.closed()

    async with peer(silent) as hole, fake_engine(**prefill_facts(hole.port)) as second:
        pod = second.url.removeprefix("http://")
        words = [*prefill.words, "--prefill", second.url, str(hole.port), *decode.words]
        await home.gateway(*words, "--policy", "round_robin", ready=False)
        await until(lambda: hole.connections == 1)
        answers = []
        while hole.connections < 2 or hole.open:  # two probes, of 2 s each
            answers.append(await home.generate(PROMPT))
        assert {(one.status, one.prefill) for one in answers} == {(200, prefill.pod)}
        assert max(one.took_s for one in answers) < 2, "nobody waited for the silent one"
        reason = (await home.worker(pod))["reason"]
        assert reason.startswith("resolve-topology: ") and "no answer within 2.0 s" in reason
        assert f"127.0.0.1:{hole.port}" in reason
        assert (most_open, served(second)) == (1, 0)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            {"page_size": 64, "kv_cache_dtype": "auto"},
            "page_size: prefill 64, decode 16; kv_dtype: prefill auto, decode float16",
        ),
        ({"page_size": 16, "kv_cache_dtype": "fp8_e5m2"}, "kv_dtype: prefill fp8_e5m2"),
    ],
)
async def test_a_pair_that_stores_kv_otherwise_is_refused_before_any_request(
    home: House, told: dict[str, Any], reason: str
) -> None:
    """FR-BS-09: what the ranks registered decides; both values are in the reason."""
    decode = await home.engine(Role.DECODE)
    async with serving() as seat, fake_engine(**prefill_facts(seat.port)) as other:
        await seat.put(**told)
        await home.gateway("--prefill", other.url, str(seat.port), *decode.words)
        found = await home.generate(PROMPT)
        assert (found.status, found.error["code"]) == (503, "no_compatible_pair")
        assert reason in found.error["message"] and found.took_s < 2
        fitting = await home.engine(Role.PREFILL)
        await home.add(fitting)
        await until(lambda: home.well(fitting.pod))
        answers = [await home.generate([60 + number] * 40) for number in range(6)]
        assert {(one.status, one.prefill) for one in answers} == {(200, fitting.pod)}
        assert served(other) == 0


async def test_two_prefills_of_one_host_are_met_at_their_own_ports(home: House) -> None:
    """FR-BS-12: the bootstrap port is that of the prefill chosen, whoever comes and goes."""
    first, second, third = [await home.engine(Role.PREFILL) for _ in range(3)]
    decode = await home.engine(Role.DECODE)
    policy = ("--policy", "round_robin")
    await home.gateway(*first.words, *second.words, *decode.words, *policy)
    await until(lambda: home.all_well(first.pod, second.pod))
    ports = {one.pod: one.bootstrap_port for one in (first, second, third)}
    assert await met(home, ports, 14) == {first.pod, second.pod}
    assert (await home.worker(first.pod))["bootstrap_port"] == first.bootstrap_port
    assert (await home.worker(second.pod))["bootstrap_port"] == second.bootstrap_port
    await home.add(third)
    await until(lambda: home.well(third.pod))
    assert await met(home, ports, 15) == set(ports)
    async with home.session.delete(f"{home.url}/workers/{first.pod}") as gone:
        assert gone.status == 202
    assert await met(home, ports, 11) == {second.pod, third.pod}


async def met(home: House, ports: dict[str, int], requests: int) -> set[str]:
    """Who served; each was met where its own directory is."""
    served_by = set()
    for number in range(requests):
        found = await home.generate([40 + number] * 40)
        assert found.status == 200, found.body
        room = await home.get(f"/rooms/{found.headers['x-kvplane-room']}")
        assert room["triple"] == {"host": "127.0.0.1", "port": ports[found.prefill]}
        served_by.add(found.prefill)
    return served_by
