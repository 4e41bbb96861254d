"""The operators' matrix: sixteen faults in real processes, each named by stage and culprit.

One plane for nearly all of them; each fault is mended before the next one. GET /diagnosis and
`kvplane doctor` must say which stage is blocked and by whom, and nothing where all is well.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from kit.chaos import restarted
from kit.durable import durable
from kit.gallery import WATCHED, Gallery, doctor, gallery
from kit.ports import free_port
from kit.wait import until

from kvplane.children import Child
from kvplane.index import Lasting
from kvplane.tokens import BUILTIN

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown() -> AsyncIterator[Gallery]:
    async with gallery() as made:
        yield made


async def test_nothing_is_said_of_a_healthy_plane_under_load(shown: Gallery) -> None:
    said: list[Any] = []

    async def client() -> None:
        for _ in range(12):
            status, found = await shown.ask()
            assert status == 200, found

    async def look() -> None:
        for _ in range(4):
            said.extend((await shown.running.get("/diagnosis"))["findings"])
            await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(4)), look())
    found = await shown.running.get("/diagnosis")
    assert said == [] and found == {"ok": True, "blocked": False, "first": None, "findings": []}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvplane", "doctor", "--url", shown.running.url),
        stdout=asyncio.subprocess.PIPE,
    )
    text, _ = await process.communicate()
    first = f"asking the gateway at {shown.running.url}; to visit engines with real requests: "
    first += "kvplane doctor --prefill URL [PORT] --decode URL"
    assert (process.returncode, text.decode()) == (
        0,
        f"{first}\n{shown.running.url}: nothing is wrong\n",
    )


async def test_01_the_pool_is_empty(shown: Gallery) -> None:
    await shown.forget()
    told = await shown.failed("fault-01")
    (attempt,) = told["attempts"]
    assert attempt["stages"][""][-1]["stage"] == "worker-pool"
    await shown.says("pool-empty", "worker-pool", "prefill pool")
    await shown.renamed()


async def test_02_a_worker_is_named_as_what_it_is_not(shown: Gallery) -> None:
    await shown.forget()
    await shown.add(f"http://localhost:{shown.decode.ports[0]}")
    culprit = f"localhost:{shown.decode.ports[0]}"
    found = await shown.says("wrong-role", "worker-pool", culprit)
    assert "was named as prefill and says that it is a decode" in found["sentence"]
    await shown.renamed()


async def test_03_a_worker_is_unhealthy(shown: Gallery) -> None:
    pid = shown.running.children["p1"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await shown.says("unhealthy", "availability", shown.prefill.pod)
        told = await shown.failed("fault-03")
        assert told["attempts"][-1]["outcome"] == "failed"
    finally:
        os.kill(pid, signal.SIGCONT)
    await shown.mended()


async def test_04_a_circuit_is_open(shown: Gallery) -> None:
    await shown.running.fault("d1", stage="consume", kind="error", count=100)
    for number in range(3):
        await shown.failed(f"fault-04-{number}")
    await shown.says("circuit-open", "availability", shown.decode.pod)
    await shown.mended()


async def test_05_the_policy_gets_no_tokens(shown: Gallery, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    await shown.forget()
    await shown.add(tokenizer=str(tmp_path))
    await shown.running.fault("p1", stage="policy-input", kind="error", count=100)
    await until(lambda: _blind(shown), timeout_s=40)
    found = await shown.says("no-tokens", "policy-input", "tokenizer of the gateway", blocks=False)
    assert "requests were placed without tokens" in found["sentence"]
    assert "--tokenizer" in found["next_step"]
    await shown.renamed()


async def _blind(shown: Gallery) -> bool:
    """Was a request answered that was placed without tokens?"""
    status, _ = await shown.ask("fault-05", text="a text the gateway has no tokens of")
    told = await shown.running.get("/requests/fault-05")
    first = told["attempts"][-1]["stages"]
    details = [one["detail"] for each in first.values() for one in each]
    return status == 200 and "no tokens" in details


async def test_06_further_attempts_are_used_up(shown: Gallery) -> None:
    await shown.running.fault("p1", stage="verify", kind="flip-byte", count=1)
    await shown.running.fault("d1", stage="consume", kind="error", count=1)
    told = await shown.failed("fault-06")
    assert [one["attempt"] for one in told["attempts"]] == [1, 2]
    assert told["attempts"][-1]["stopped"] == "no attempts left"
    culprit = f"{shown.prefill.pod} and {shown.decode.pod}"
    found = await _said(shown, "retries-used-up", "consume", culprit)
    assert f"verify at {shown.prefill.pod}; consume at {shown.decode.pod}" in found["sentence"]
    await shown.mended()


async def _said(shown: Gallery, rule: str, stage: str, culprit: str) -> Any:
    """It blocks, and is said beside the attempts it is made of."""
    findings = (await shown.running.get("/diagnosis"))["findings"]
    (found,) = [one for one in findings if one["rule"] == rule]
    assert (found["stage"], found["culprit"], found["blocks"]) == (stage, culprit, True), findings
    code, text = await doctor("--url", shown.running.url)
    assert code == 1 and f"BLOCKS   {stage:<17} {culprit}\n" in text, text
    return found


async def test_07_ranks_are_missing_in_the_table(shown: Gallery) -> None:
    await shown.register(attn_tp_size=2)
    await shown.forget()
    await shown.add(bootstrap_port=shown.lies)
    found = await shown.says("ranks-missing", "register", shown.prefill.pod)
    assert "tp=1" in found["sentence"] and f"127.0.0.1:{shown.lies}" in found["sentence"]
    await shown.renamed()


async def test_08_the_bootstrap_port_is_wrong(shown: Gallery) -> None:
    await shown.forget()
    await shown.add(bootstrap_port=free_port())
    culprit = f"bootstrap port of {shown.prefill.pod}"
    found = await shown.says("wrong-bootstrap-port", "register", culprit)
    assert f"--prefill {shown.prefill.url} {shown.prefill.ports[3]}" in found["next_step"]
    await shown.renamed()


async def test_08_the_bootstrap_port_is_another_engines(shown: Gallery) -> None:
    await shown.register()
    await shown.forget()
    await shown.add(bootstrap_port=shown.lies)
    culprit = f"bootstrap port of {shown.prefill.pod}"
    found = await shown.says("wrong-bootstrap-port", "resolve-topology", culprit)
    own = shown.prefill.ports[3]
    # Both are named, whether the directory was looked at already or the engine said so before.
    assert str(shown.lies) in found["sentence"] and str(own) in found["sentence"]
    assert f"--prefill {shown.prefill.url} {own}" in found["next_step"]
    status, told = await shown.ask()
    assert status == 503 and told["error"]["stage"] == "resolve-topology", "at once, not at 504"
    await shown.renamed()


async def test_09_a_rank_is_no_longer_where_the_table_says(shown: Gallery) -> None:
    await shown.register(generation=await shown.own_life())
    await shown.forget()
    await shown.add(bootstrap_port=shown.lies)
    await until(lambda: _fails_at(shown, "connect"))
    culprit = f"rank directory 127.0.0.1:{shown.lies} of {shown.prefill.pod}"
    await shown.says("stale-rank", "connect", culprit)
    await shown.renamed()


async def _fails_at(shown: Gallery, stage: str) -> bool:
    _, found = await shown.ask()
    return bool(found.get("error", {}).get("stage") == stage)


async def test_10_the_connection_is_refused(shown: Gallery) -> None:
    shown.running.children["p1"].kill()
    await until(lambda: _refused(shown))
    await shown.says("connection-refused", "connect", shown.prefill.pod)
    await restarted(shown.running, "p1", 0.0)
    await shown.mended()


async def _refused(shown: Gallery) -> bool:
    status, _ = await shown.ask()
    return status == 503


async def test_11_metadata_of_another_room_arrives(shown: Gallery) -> None:
    await shown.running.fault("p1", stage="verify", kind="foreign-room", count=2)
    told = await shown.failed("fault-11")
    found = await shown.says("room-mismatch", "verify", shown.prefill.pod)
    assert "room mismatch" in found["sentence"]
    assert set(found["rooms"]) == {room for one in told["attempts"] for room in one["rooms"]}
    await shown.mended()


async def test_12_page_sizes_or_dtypes_differ(shown: Gallery) -> None:
    life = await shown.own_life()  # another one since it was started again
    await shown.register(page_size=64, kv_cache_dtype="fp8_e5m2", generation=life)
    await shown.forget()
    await shown.add(bootstrap_port=shown.lies)
    culprit = f"{shown.prefill.pod} and {shown.decode.pod}"
    found = await shown.says("shapes-differ", "pair", culprit)
    assert "page_size: prefill 64, decode 16" in found["sentence"]
    assert "kv_dtype: prefill fp8_e5m2, decode float16" in found["sentence"]
    await shown.renamed()


async def test_13_the_kv_never_comes(shown: Gallery) -> None:
    await shown.running.fault("p1", stage="verify", kind="hang", count=2)
    told = await shown.failed("fault-13")
    assert told["attempts"][0]["error"]["code"] == "deadline_exceeded"
    await shown.says("kv-never-came", "verify", shown.prefill.pod)
    await shown.mended()


async def test_14_the_event_stream_is_silent(shown: Gallery) -> None:
    await shown.forget()
    await shown.add(events=f"tcp://127.0.0.1:{free_port()}")
    culprit = f"event stream of {shown.prefill.pod}"
    found = await shown.says("stream-silent", "policy-input", culprit, blocks=False)
    assert "not heard" in found["sentence"] or "no event" in found["sentence"]
    await shown.renamed()


async def test_15_the_tokenizer_is_another(shown: Gallery, tmp_path: Path) -> None:
    other = json.loads((BUILTIN / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    for file in BUILTIN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    await shown.forget()
    await shown.add(tokenizer=str(tmp_path))
    culprit = f"tokenizer of {shown.prefill.pod} at the gateway"
    await shown.says("tokenizer-differs", "policy-input", culprit, blocks=False)
    await shown.renamed()


async def test_16_redis_evicts_and_is_away(shown: Gallery) -> None:
    with durable() as redis:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        words = ["router", "--redis", redis.url, "--port", str(port), *WATCHED]
        words += ["--evidence-secs", "60", "--spans"]
        words += [*shown.prefill.gateway_flags(), *shown.decode.gateway_flags()]
        child = Child("second gateway", words, f"{url}/liveness")
        try:
            await child.start()
            found = await store_finding(url, "no-ingest", "ingest")  # nobody wrote to it yet
            assert "nothing is known" in found["sentence"]
            await until(lambda: evidence_of(shown, url, redis.url))
            await redis_told(redis.port, "CONFIG SET maxmemory 100mb")
            await redis_told(redis.port, "CONFIG SET maxmemory-policy allkeys-lru")
            found = await store_finding(url, "store-evicts")
            assert "allkeys-lru" in found["sentence"] and "noeviction" in found["next_step"]
            await redis_told(redis.port, "CONFIG SET maxmemory-policy noeviction")
            redis.send(signal.SIGSTOP)
            found = await store_finding(url, "store-away")
            assert "does not answer" in found["sentence"]
            _, text = await doctor("--url", url)
            assert f"look     {'policy-input':<17} index store\n" in text, text
        finally:
            redis.send(signal.SIGCONT)
            await child.stop()


async def evidence_of(shown: Gallery, url: str, store: str) -> bool:
    """A room of the second gateway, kept where any other could tell of it."""
    body = {"input_ids": [33] * 40, "sampling_params": {"max_new_tokens": 2}}
    status, _, headers = await shown.running.ask("/generate", body, at=url)
    if status != 200:
        return False
    texts = Lasting(store)
    try:
        room = headers["x-kvplane-room"]
        told = json.loads(await until(lambda: texts.get(f"r:{room}")))
        whole = json.loads(await until(lambda: texts.get(f"q:{told['request_id']}")))
        assert whole["attempts"] == [room]
        stages = [one["stage"] for one in told["stages"][room]]
        assert stages[-1] == "end" and "worker-pool" in stages
    finally:
        await texts.close()
    return True


async def redis_told(port: int, words: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words.encode() + b"\r\n")
    assert await reader.readline() == b"+OK\r\n"
    writer.close()


async def store_finding(url: str, rule: str, culprit: str = "index store") -> Any:
    """Until the second gateway says it of its store; it serves all the same."""
    async with aiohttp.ClientSession() as session:

        async def seen() -> Any:
            await asyncio.sleep(0.1)
            async with session.get(f"{url}/diagnosis") as answer:
                found = (await answer.json())["findings"]
            return next((one for one in found if one["rule"] == rule), None)

        found = await until(seen, timeout_s=30)
    assert (found["stage"], found["culprit"]) == ("policy-input", culprit)
    assert not found["blocks"]
    return found


# Engines alone -----------------------------------------------------------------------------------


async def test_the_doctor_visits_engines_that_no_gateway_serves(shown: Gallery) -> None:
    prefill, decode = shown.prefill.gateway_flags(), shown.decode.gateway_flags()
    code, text = await doctor(*prefill, *decode)
    assert code == 0, text
    assert text.endswith("2 workers: nothing is wrong\n"), text
    for stage in ("register", "resolve-topology", "resolve-rank", "connect", "verify", "consume"):
        assert f"\n   {stage:<17} ok " in text, text
    code, text = await doctor("--prefill", shown.prefill.url, str(free_port()), *decode)
    assert code == 1, text
    culprit = f"bootstrap port of {shown.prefill.pod}"
    assert f"BLOCKS   {'register':<17} {culprit}\n" in text, text


async def test_what_answers_and_is_no_engine_is_named_and_no_callers_mistake(
    shown: Gallery,
) -> None:
    """A prefill's rank directory in the place of a decode: it answers /health, and 404 else."""
    stranger = f"127.0.0.1:{shown.prefill.ports[3]}"
    code, text = await doctor(*shown.prefill.gateway_flags(), "--decode", f"http://{stranger}")
    assert code == 1, text
    assert f"BLOCKS   {'first-byte':<17} {stranger}\n" in text, text
    assert f"decode {stranger} answered 404" in text and "nothing is wrong" not in text


async def test_a_gateway_that_is_not_there_is_said_to_be_so() -> None:
    code, text = await doctor("--url", f"http://127.0.0.1:{free_port()}")
    assert code == 1 and "nobody answers" in text
