"""FR-EV-14: a salt may be a secret; nothing that is kept, logged or counted shows it in clear."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import pytest
from kit.batches import SIZE, SPACE, tokens
from kit.streams import Publisher, following
from prometheus_client import generate_latest
from redis.asyncio import Redis

from kvplane.events import DIALECTS, AllCleared, BlocksRemoved, BlocksStored, engine_key
from kvplane.index import RedisStore, chain, rank
from kvplane.vocabulary import Namespace

SECRET = "tenant-17-secret"


def stored(first: int, last: int, parent: int | None) -> BlocksStored:
    """Blocks of one salted prompt, as SGLang says them: the salt in every event."""
    keys = tuple(engine_key(100 + at) for at in range(first, last))
    above = None if parent is None else engine_key(parent)
    ids = array("I", tokens(1, last)[first * SIZE :])
    return BlocksStored(keys, above, ids, SIZE, salt=SECRET)


async def everything(redis: Redis, prefix: str) -> list[tuple[bytes, Any]]:
    """Every key of ours with all that lies in it."""
    found: list[tuple[bytes, Any]] = []
    async for key in redis.scan_iter(f"*{prefix}*"):
        kind = await redis.type(key)
        if kind == b"hash":
            found.append((key, await redis.hgetall(key)))
        elif kind == b"stream":
            found.append((key, await redis.xrange(key)))
        elif kind == b"set":
            found.append((key, await redis.smembers(key)))
        else:
            found.append((key, await redis.zrange(key, 0, -1)))
    return found


async def test_what_engines_say_under_a_salt_lies_nowhere_in_clear(
    redis_url: str, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store, redis = RedisStore(redis_url, redis_prefix), Redis.from_url(redis_url)
    speak = DIALECTS["sglang"].encode
    async with Publisher() as publisher, following(publisher, "sglang", store) as followed:
        await publisher.listened()
        await publisher.publish(speak(1.0, [stored(0, 2, None)], 0))
        await publisher.publish(speak(1.0, [stored(4, 5, 103)], 0))  # its parent comes later
        await followed.at(1)
        kept = await everything(redis, redis_prefix)
        assert len(kept) >= 5
        await publisher.publish(speak(1.0, [stored(2, 4, 101)], 0))
        await followed.at(2)
        salted = chain(tokens(1, 5), Namespace(SPACE.model, SIZE, "", SECRET))
        (held,) = rank(followed.view, salted, [followed.subscriber.worker])
        assert held.depth_blocks == 5
        (plain,) = rank(followed.view, chain(tokens(1, 5), SPACE), [followed.subscriber.worker])
        assert plain.depth_blocks == 0
        await publisher.publish(speak(1.0, [BlocksRemoved((engine_key(104),)), AllCleared()], 0))
        await followed.at(3)
        kept += await everything(redis, redis_prefix)
        texts = [repr(one) for one in kept]
        texts += [caplog.text, generate_latest(followed.registry).decode()]
        assert not [text[:200] for text in texts if SECRET in text]
    await redis.aclose()
    await store.close()
