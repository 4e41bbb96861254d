"""Signing: whoever asks an engine what it is brings the key that this engine wants."""

from __future__ import annotations

import aiohttp
import pytest
from kit.peer import Call, peer

from kvplane.router import ProbeFailed, probe
from kvplane.settings import parser, resolve
from kvplane.signing import credentials_of, signed
from kvplane.workers import worker_from_table


async def guarded(call: Call) -> None:
    """An engine behind a key: SGLang leaves only its health open."""
    while request := await call.request():
        known = b"authorization: bearer k-engine\r\n" in request.lower()
        open_ = request.startswith(b"GET /health ") or request.startswith(b"GET /ready ")
        status, body = (200, b'{"served_model_name":"tiny"}') if known or open_ else (401, b"{}")
        await call.send(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)


@pytest.mark.parametrize("command", ["router", "all", "ingest"])
@pytest.mark.parametrize("own", [False, True])
async def test_an_engine_behind_a_key_tells_what_it_is(command: str, own: bool) -> None:
    words = [command, "--redis", "redis://h:1"] if command == "ingest" else [command]
    words += [] if own else ["--api-key", "k-engine"]
    told = resolve(vars(parser().parse_args(words)), {}, {})
    async with peer(guarded) as engine, aiohttp.ClientSession() as session:
        table = {"url": engine.url, "engine": "sglang"}
        worker = worker_from_table(table | ({"api_key": "k-engine"} if own else {}))
        client = signed(session, credentials_of(told, [worker]))
        found = await probe(client, worker)
        assert (found.pending, found.up.model) == (False, "tiny")
        assert found.up.api_key == worker.api_key  # and it stays with what was learnt
        strangers = signed(session, credentials_of(told, []))
        if own:
            assert (await probe(strangers, worker)).pending
        with pytest.raises(ProbeFailed):
            await probe(strangers, worker_from_table({"url": "http://127.0.0.1:9"}))
