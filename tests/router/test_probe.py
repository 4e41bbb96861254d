"""Probe: is an engine alive, and what when it is strange."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp.client_reqrep import ConnectionKey
from kit.engine import HANG, FakeEngine, fake_engine
from kit.peer import Call, answer, peer
from kit.ports import free_port

from kvplane.router.discovery.probe import Probed, ProbeFailed, alive, probe
from kvplane.router.settings import ProbeSettings
from kvplane.vocabulary import Generation, Pod, Role, WorkerUp

SETTINGS = ProbeSettings(deadline_s=20.0, most_bytes=10_000)  # a busy machine is no finding
SHORT = ProbeSettings(deadline_s=0.5, most_bytes=10_000)  # for who never answers
INFO = {"disaggregation_mode": "prefill", "page_size": 16, "kvplane": {"generation": "g"}}
MODELS = {"data": [{"id": "tiny"}]}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


def declared(url: str, **more: Any) -> WorkerUp:
    return WorkerUp(Pod("p1"), url, Role.PREFILL, **more)


async def asked(session: aiohttp.ClientSession, engine: FakeEngine, **more: Any) -> Probed:
    return await probe(session, declared(engine.url, **more), patience(engine))


def patience(engine: FakeEngine) -> ProbeSettings:
    return SHORT if any(said is HANG for said in engine.answers.values()) else SETTINGS


async def test_an_engine_is_filled_from_its_answers(session: aiohttp.ClientSession) -> None:
    async with fake_engine(server_info=INFO, v1__models=MODELS) as engine:
        found = await asked(session, engine)
    assert (found.up.model, found.up.block_size, found.up.generation) == ("tiny", 16, "g")
    assert not found.pending


async def test_older_sglang_answers_under_the_old_name(session: aiohttp.ClientSession) -> None:
    async with fake_engine(get_server_info=INFO) as engine:
        assert (await asked(session, engine)).up.block_size == 16


async def test_a_vllm_engine_is_asked_for_its_event_sources(session: aiohttp.ClientSession) -> None:
    source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:1"}
    async with fake_engine(v1__models=MODELS, kv_event_sources={"0": source}) as engine:
        assert (await asked(session, engine)).up.events == ("tcp://127.0.0.1:1",)


async def test_sglang_is_asked_for_ready_because_its_health_runs_a_request(
    session: aiohttp.ClientSession,
) -> None:
    async with fake_engine(ready=200, health=HANG) as engine:
        await alive(session, declared(engine.url, engine="sglang"), SETTINGS)
        assert engine.asked == ["/ready"]
        engine.answers["/ready"] = 503
        with pytest.raises(ProbeFailed, match="GET /ready answered 503"):
            await alive(session, declared(engine.url, engine="sglang"), SETTINGS)
    async with fake_engine() as engine:
        await alive(session, declared(engine.url, engine="sglang"), SETTINGS)
        assert engine.asked == ["/ready", "/health"]


@pytest.mark.parametrize("status", [204, 301, 404, 405, 500, 503])
async def test_only_200_is_alive(session: aiohttp.ClientSession, status: int) -> None:
    async with fake_engine(health=status) as engine:
        with pytest.raises(ProbeFailed, match=f"answered {status}"):
            await asked(session, engine)


async def test_what_an_engine_says_of_its_trouble_is_kept_with_the_stage(
    session: aiohttp.ClientSession,
) -> None:
    said = {"error": {"message": "not registered\nat p1:8998", "stage": "register"}}

    async def serve(call: Call) -> None:
        while await call.request():
            await call.send(answer(json.dumps(said).encode(), 503))

    async with peer(serve) as engine:
        with pytest.raises(ProbeFailed) as failed:
            await alive(session, declared(engine.url), SETTINGS)
    assert str(failed.value) == "GET /health answered 503: not registered at p1:8998"
    assert failed.value.stage == "register"


async def test_a_silent_engine_is_not_waited_for(session: aiohttp.ClientSession) -> None:
    async with fake_engine(health=HANG) as engine:
        with pytest.raises(ProbeFailed, match=r"no answer in 0.5 s"):
            await asked(session, engine)


async def test_an_engine_that_is_down_is_named(session: aiohttp.ClientSession) -> None:
    port = free_port()
    for host in ("127.0.0.1", "localhost"):  # the second has several addresses on many machines
        with pytest.raises(ProbeFailed) as failed:
            await probe(session, declared(f"http://{host}:{port}"), ProbeSettings())
        assert str(failed.value) == f"{host}:{port} refused the connection"


NAMELESS = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
UNREACHED = [
    (ConnectionRefusedError(111, "Connect call failed ('::1', 5)"), "h:5 refused the connection"),
    (OSError("Multiple exceptions: [Errno 111] Connect call failed"), "h:5 refused the connection"),
    (OSError(113, "Connect call failed ('1.1.1.1', 5)"), "h:5 cannot be reached: No route to host"),
    (NAMELESS, "h:5 cannot be reached: no such name: Name or service not known"),
    (OSError(None, None), "h:5 cannot be reached: OSError"),
]


@pytest.mark.parametrize(("cause", "said"), UNREACHED)
async def test_why_there_was_no_connection_is_said_without_a_librarys_words(
    cause: OSError, said: str
) -> None:
    at = ConnectionKey("h", 5, False, True, None, None, None)

    class Unreached:
        def get(self, *_: object, **__: object) -> Any:
            raise aiohttp.ClientConnectorError(at, cause)

    with pytest.raises(ProbeFailed) as failed:
        await alive(Unreached(), declared("http://h:5"), SETTINGS)  # type: ignore[arg-type]
    assert str(failed.value) == said


@pytest.mark.parametrize("speaks", [False, True])
async def test_tls_that_fails_is_said_without_a_librarys_words(
    session: aiohttp.ClientSession, speaks: bool
) -> None:
    certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(certificate)

    async def serve(call: Call) -> None:
        await call.send(answer(b"no TLS here", 400))

    async with peer(serve, certificate if speaks else None) as engine:
        url = f"https://127.0.0.1:{engine.port}"
        with pytest.raises(ProbeFailed) as failed:
            await alive(session, declared(url), ProbeSettings())
    said = str(failed.value)
    assert said.startswith(f"127.0.0.1:{engine.port} cannot be reached: TLS: "), said
    assert ("WRONG_VERSION" in said) is not speaks and ("certificate" in said) is speaks
    assert "ssl:" not in said and "Cannot connect" not in said


@pytest.mark.parametrize("info", [HANG, 500, b"{", b"x" * 20_000])
async def test_an_engine_that_lives_but_tells_nothing_is_used_as_declared(
    session: aiohttp.ClientSession, info: Any
) -> None:
    async with fake_engine(server_info=info, v1__models=MODELS) as engine:
        found = await asked(session, engine, model="mine")
        assert found == Probed(declared(engine.url, model="mine"), pending=True)


async def test_an_answer_that_is_no_object_tells_nothing(session: aiohttp.ClientSession) -> None:
    async with fake_engine(server_info=b"[1]", v1__models=b"7") as engine:
        assert (await asked(session, engine)).up == declared(engine.url)


PAGE = b"process_start_time_seconds 1.7e9\n"


async def test_metrics_are_asked_of_engines_that_tell_no_generation(
    session: aiohttp.ClientSession,
) -> None:
    async with fake_engine(v1__models=MODELS, metrics=PAGE) as engine:
        found = await asked(session, engine)
        assert (found.up.generation, found.changing) == ("started:1700000000", True)
    async with fake_engine(server_info=INFO, v1__models=MODELS, metrics=PAGE) as engine:
        assert (await asked(session, engine)).up.generation == "g"
        assert "/metrics" not in engine.asked


@pytest.mark.parametrize("metrics", [404, 500, HANG, b"\xff\xfe", b"x" * 20_000, {"a": 1}])
async def test_nobody_is_down_for_want_of_metrics(
    session: aiohttp.ClientSession, metrics: Any
) -> None:
    async with fake_engine(v1__models=MODELS, metrics=metrics) as engine:
        found = await asked(session, engine)
        assert (found.up.model, found.up.generation, found.pending) == ("tiny", None, False)
        known = replace(found.up, generation=Generation("started:5"), asleep=True)
        again = await probe(session, declared(engine.url), patience(engine), known)
        assert again.up.generation == "started:5"
        assert again.up.asleep == (not isinstance(metrics, bytes | dict) or len(metrics) > 10_000)
