"""Bytes of real engines, through real sockets and real stores: PUB -> ingest -> store -> view.

Every request of every run of a recording is compared with what the engine says it had cached. Left
out are those that ran side by side (the order of their steps is not on the wire) and those marked
`stale_events` (an idle engine keeps the clear until the next request). KVPLANE_RECORDING=file.jsonl
takes another recording of this form than that of tests/vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kit.backends import BACKENDS, Opener, backend
from kit.links import links
from kit.recording import DEFAULT, Run, recording
from kit.streams import Publisher, following, lines

from kvplane.events import DIALECTS
from kvplane.vocabulary import Knowledge

EXPECTED = {  # run of the default file: (compared, side by side, stale)
    "sha256-int-seed0": (42, 5, 2),
    "sha256_cbor-bytes-seed0": (17, 0, 0),
    "sha256-int-noseed": (17, 0, 0),
    "hybrid-gemma3-sha256_cbor-int": (17, 0, 0),
}
FILE, RUNS = recording()


@pytest.fixture(scope="module", params=BACKENDS)
def place(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Every place where the index may live."""
    with backend(request.param) as opened:
        yield opened


@pytest.mark.skipif(FILE != DEFAULT, reason="another recording has other counts")
def test_the_recording_has_as_many_requests_as_it_had() -> None:
    assert {run.name: run.counts() for run in RUNS} == EXPECTED


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
async def test_our_depth_equals_the_engines_cached_tokens(
    run: Run, place: Opener, redis_prefix: str
) -> None:
    compared, wrong = 0, []
    async with links(lambda: place(redis_prefix), run.topic) as made:
        await made.seen()
        await made.publisher.listened()
        for after in sorted({one.after for one in run.requests} | set(run.frames)):
            while made.sent < after:
                await made.send(run.frames[made.sent + 1])
            await made.seen()
            for asked in run.between(after, after):
                found = asked.found(made.view, made.worker, run.block_size)
                compared += 1
                if found != asked.cached:
                    wrong.append((asked.n, asked.desc, found, asked.cached))
        assert made.ingest is not None
        assert made.ingest.count("gaps_total", outcome="lost") == 0
    _, at_once, stale = run.counts()
    print(f"{run.name}: {compared} compared, {at_once} at once and {stale} stale left out")
    assert not wrong


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
