"""Events: who listens from the start, or asks for a replay, knows exactly what is resident."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvplane.events import (
    DIALECTS,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    engine_hash,
)

Start = Callable[..., Awaitable[Any]]


async def replay(port: int, form: str) -> list[EngineEvent]:
    """Every event a DEALER gets from the start on; sequences are unbroken."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        await dealer.send_multipart([b"", bytes(8)])
        found: list[EngineEvent] = []
        expected = 0
        while True:
            async with asyncio.timeout(5):
                frames = await dealer.recv_multipart()
            if frames[-1] == b"":
                return found
            assert int.from_bytes(frames[-2], "big") == expected
            expected += 1
            batch = DIALECTS[form].decode(frames[-1])
            assert batch.dropped == ()
            found.extend(batch.events)
    finally:
        context.destroy(linger=0)


def told(events: list[EngineEvent]) -> dict[int | bytes, tuple[Any, tuple[int, ...]]]:
    """Hash -> (parent, tokens) of what should be resident."""
    resident: dict[int | bytes, tuple[Any, tuple[int, ...]]] = {}
    for event in events:
        if isinstance(event, AllCleared):
            resident.clear()
        elif isinstance(event, BlocksRemoved):
            for key in event.hashes:
                del resident[engine_hash(key)]
        else:
            assert isinstance(event, BlocksStored) and event.dense
            parent = None if event.parent is None else engine_hash(event.parent)
            for at, key in enumerate(event.hashes):
                ids = tuple(event.tokens[at * 16 : at * 16 + 16])
                resident[engine_hash(key)] = (parent, ids)
                parent = engine_hash(key)
    return resident


@pytest.mark.parametrize("form", ["vllm", "sglang"])
async def test_replayed_events_are_the_truth_also_after_evictions(start: Start, form: str) -> None:
    both = await start(event_form=form, blocks=24)
    drawn = random.Random(4)
    turns = [[drawn.randrange(256) for _ in range(90)] for _ in range(3)]
    for number in range(12):
        ids = turns[drawn.randrange(3)][: drawn.randrange(20, 90)] + [number] * number
        await both.tokens(input_ids=ids, sampling_params={"max_new_tokens": 40, "ignore_eos": True})
    assert both.engine.units[0].cache.evicted_blocks > 0
    _, truth = await both.get("/truth")
    events = await replay(both.engine.units[0].publisher.replay_port, form)
    assert told(events) == {
        block["hash"]: (block["parent"], tuple(block["tokens"]))
        for block in truth["ranks"][0]["blocks"]
    }
    await both.post("/flush_cache")
    assert told(await replay(both.engine.units[0].publisher.replay_port, form)) == {}


async def test_a_salt_travels_with_its_blocks(start: Start) -> None:
    both = await start()
    body = {"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 1}}
    await both.tokens(**body, cache_salt="tenant")
    await both.tokens(**body)
    events = await replay(both.engine.units[0].publisher.replay_port, "vllm")
    salts = [event.salt for event in events if isinstance(event, BlocksStored)]
    assert salts == ["tenant", ""]
