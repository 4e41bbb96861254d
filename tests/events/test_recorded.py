"""Bytes of real engines, through real sockets: PUB -> Subscriber -> store -> view.

Which runs of vllm-kv-events.jsonl pass now, request by request, is EXPECTED below.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from kit.streams import Publisher, following, lines

from kvplane.events import DIALECTS
from kvplane.index import MemoryStore, RedisStore, Store, chain, rank
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Knowledge, Namespace

# Requests compared exactly, of all in the run. Left out are requests that ran side by side (the
# order of their steps is not on the wire) and those the recorder marked `stale_events` (an idle
# engine keeps the clear until the next request).
EXPECTED = {  # run: (compared, side by side, stale)
    "sha256-int-seed0": (42, 5, 2),
    "sha256_cbor-bytes-seed0": (17, 0, 0),
    "sha256-int-noseed": (17, 0, 0),
}
HYBRID = "hybrid-gemma3-sha256_cbor-int"  # two groups; the window caps what full attention has


def runs() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for told in lines("vllm-kv-events.jsonl"):
        found.setdefault(told["run"], []).append(told)
    return found


RUNS = runs()


def batches(run: str) -> dict[int, list[bytes]]:
    """Recorded frames by sequence."""
    told = (line for line in RUNS[run] if line["kind"] == "frames")
    return {line["seq"]: [bytes.fromhex(frame) for frame in line["frames"]] for line in told}


def requests(run: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each request with why it is left out, or ""."""
    at_once = False
    for told in RUNS[run]:
        if told["kind"] == "note" and "run at once" in told["desc"]:
            at_once = True
        elif told["kind"] == "note" and told["desc"].startswith("end of"):
            at_once = False
        elif told["kind"] == "request":
            yield told, "at once" if at_once else "stale" if told.get("stale_events") else ""


def predicted(depth_tokens: int, prompt: list[int], block_size: int) -> int:
    """The last token is always computed, so a whole cached prompt counts one block less."""
    return min(depth_tokens, (len(prompt) - 1) // block_size * block_size)


def test_the_list_of_runs_is_complete() -> None:
    assert set(RUNS) == {*EXPECTED, HYBRID}


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The embedded store and the one that survives a restart."""
    kept: Store = MemoryStore(SystemClock())
    if request.param == "redis":
        url, prefix = (request.getfixturevalue(f"redis_{name}") for name in ("url", "prefix"))
        kept = RedisStore(url, prefix)
    yield kept
    await kept.close()


@pytest.mark.parametrize("run", EXPECTED)
async def test_our_depth_equals_the_engines_cached_tokens(run: str, store: Store) -> None:
    size = RUNS[run][0]["block_size"]
    frames = batches(run)
    compared, left_out, wrong = 0, {"at once": 0, "stale": 0}, []
    sent = -1
    async with (
        Publisher(topic=frames[0][0]) as publisher,
        following(publisher, store=store) as followed,
    ):
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        for request, why in sorted(requests(run), key=lambda each: each[0]["after_seq"]):
            while sent < request["after_seq"]:
                sent += 1
                publisher.buffer[sent] = frames[sent][2]
                await publisher.raw(frames[sent])
            if sent >= 0:
                await followed.at(sent)
            if why:
                left_out[why] += 1
                continue
            prompt = request["prompt_token_ids"]
            space = Namespace("m", size, salt=request.get("cache_salt", ""))
            (held,) = rank(followed.view, chain(prompt, space), [followed.subscriber.worker])
            found = predicted(held.depth_tokens, prompt, size)
            compared += 1
            if found != request["cached_tokens"]:
                wrong.append((request["n"], request["desc"], found, request["cached_tokens"]))
        assert followed.count("gaps_total", outcome="lost") == 0
        assert followed.believed()[0] is Knowledge.EXACT
    print(f"{run}: {compared} requests compared, left out {left_out}")
    assert not wrong
    assert (compared, left_out["at once"], left_out["stale"]) == EXPECTED[run]


async def test_the_hybrid_run_never_falls_short_of_full_attention() -> None:
    """Window groups are not followed yet: the depth may be more than the engine serves, by them."""
    frames, size = batches(HYBRID), RUNS[HYBRID][0]["block_size"]
    equal, sent = 0, -1
    async with Publisher(topic=frames[0][0]) as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        for request, _ in sorted(requests(HYBRID), key=lambda each: each[0]["after_seq"]):
            while sent < request["after_seq"]:
                sent += 1
                await publisher.raw(frames[sent])
            if sent >= 0:
                await followed.at(sent)
            prompt = request["prompt_token_ids"]
            space = Namespace("m", size, salt=request.get("cache_salt", ""))
            (held,) = rank(followed.view, chain(prompt, space), [followed.subscriber.worker])
            found = predicted(held.depth_tokens, prompt, size)
            assert found >= request["cached_tokens"], request["desc"]
            equal += found == request["cached_tokens"]
        assert "hybrid" in await followed.knows(Knowledge.PARTIAL)
    assert equal == 15  # of 17


def _decoded_events(told: Any) -> int:
    return len(told[1])


async def _through_sockets(engine: str, payloads: list[bytes], events: int) -> None:
    """Send payloads as live batches; all must decode, none may be dropped."""
    async with Publisher() as publisher, following(publisher, engine) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        for payload in payloads:
            await publisher.publish(payload)
        await followed.at(len(payloads) - 1)
        kinds = ("stored", "removed", "cleared")
        assert sum(followed.count("events_total", kind=kind) for kind in kinds) == events
        assert followed.count("batches_total") == len(payloads)
        for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "unknown"):
            assert followed.count("dropped_total", kind=kind) == 0
        assert followed.count("undecodable_total") == 0


async def test_every_batch_of_seventeen_versions_of_vllm_decodes() -> None:
    told = list(lines("vllm-kv-events-versions.jsonl"))
    assert len({line["vllm"] for line in told}) == 17 and len(told) == 101
    payloads = [bytes.fromhex(line["payload"]) for line in told]
    await _through_sockets("vllm", payloads, sum(_decoded_events(t["decoded"]) for t in told))


def sglang_batches() -> Iterator[tuple[bytes, Any]]:
    for told in lines("sglang-kv-events.jsonl"):
        if told.get("kind") == "payload":
            yield bytes.fromhex(told["payload_hex"]), told["decoded"]
        for step in told.get("steps", ()):
            if "payload_hex" in step:
                yield bytes.fromhex(step["payload_hex"]), step["decoded"]
        if told.get("kind") == "wire":
            for frames in told["frames_hex"]:
                yield bytes.fromhex(frames[2]), None


async def test_every_batch_of_sglang_decodes() -> None:
    told = list(sglang_batches())
    assert len(told) > 40
    events = sum(1 if decoded is None else _decoded_events(decoded) for _, decoded in told)
    await _through_sockets("sglang", [payload for payload, _ in told], events)


def test_the_batches_of_the_versions_mean_what_their_engine_said() -> None:
    for told in lines("vllm-kv-events-versions.jsonl"):
        decoded = DIALECTS["vllm"].decode(bytes.fromhex(told["payload"]))
        assert (decoded.ts, decoded.dp_rank) == (told["decoded"][0], told["decoded"][2])
        assert not decoded.dropped
        names = [e["type"] if isinstance(e, dict) else e[0] for e in told["decoded"][1]]
        ours = {"BlockStored": "BlocksStored", "BlockRemoved": "BlocksRemoved"}
        found = [type(event).__name__ for event in decoded.events]
        assert found == [ours.get(name, "AllCleared") for name in names]
