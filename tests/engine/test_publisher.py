"""Publisher: real sockets; who was away asks for what it missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from kit.clock import FakeClock
from prometheus_client import CollectorRegistry

from kvplane.engine.errors import PortTaken
from kvplane.engine.metrics import EngineMetrics
from kvplane.engine.publisher import END, Publisher
from kvplane.events import DIALECTS, BlocksRemoved, BlocksStored, engine_key


def stored(number: int) -> BlocksStored:
    return BlocksStored((engine_key(number),), None, [1, 2], 2)


def made(form: str = "vllm", buffer: int = 100) -> Publisher:
    return Publisher(form, 0, buffer, FakeClock(), EngineMetrics(CollectorRegistry()))


@pytest.fixture
async def zctx() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def read(socket: zmq.asyncio.Socket) -> list[bytes]:
    async with asyncio.timeout(5):
        return await socket.recv_multipart()


async def replayed(context: zmq.asyncio.Context, port: int, first: int) -> list[list[bytes]]:
    """Everything a DEALER reads up to the end mark."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{port}")
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        answers = [await read(dealer)]
        while answers[-1][-2] != END:
            answers.append(await read(dealer))
        return answers


@pytest.mark.parametrize("form", ["vllm", "sglang"])
async def test_a_subscriber_reads_topic_sequence_and_a_batch_of_its_form(
    form: str, zctx: zmq.asyncio.Context
) -> None:
    publisher = made(form)
    await publisher.start("127.0.0.1", 0, 0)
    with zctx.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.connect(f"tcp://127.0.0.1:{publisher.port}")
        frames: list[bytes] = []
        for number in range(500):  # a subscriber is late: its first batch is not number 0
            publisher.publish([stored(number)])
            if await sub.poll(10):
                frames = await read(sub)
                break
        await publisher.stop()
    topic, sequence, payload = frames
    assert (topic, len(sequence)) == (b"", 8)
    event = DIALECTS[form].decode(payload).events[0]
    assert isinstance(event, BlocksStored)
    assert event.hashes == (engine_key(int.from_bytes(sequence, "big")),)


async def test_replay_gives_every_kept_batch_from_the_asked_one_on_and_an_end_mark(
    zctx: zmq.asyncio.Context,
) -> None:
    publisher = made()
    await publisher.start("127.0.0.1", 0, 0)
    for number in range(5):
        publisher.publish([stored(number), BlocksRemoved((engine_key(number),))])
    answers = await replayed(zctx, publisher.replay_port, 3)
    beyond = await replayed(zctx, publisher.replay_port, 99)
    await publisher.stop()
    assert [len(frames) for frames in answers] == [4, 4, 4]
    assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == [3, 4]
    assert beyond == [[b"", b"", END, b""]]


async def test_replay_starts_at_the_oldest_kept_batch_where_the_buffer_was_too_small(
    zctx: zmq.asyncio.Context,
) -> None:
    publisher = made(buffer=2)
    await publisher.start("127.0.0.1", 0, 0)
    for number in range(9):
        publisher.publish([stored(number)])
    answers = await replayed(zctx, publisher.replay_port, 0)
    await publisher.stop()
    assert [int.from_bytes(frames[2], "big") for frames in answers[:-1]] == [7, 8]


async def test_a_request_that_is_none_is_left_alone(zctx: zmq.asyncio.Context) -> None:
    publisher = made()
    await publisher.start("127.0.0.1", 0, 0)
    with zctx.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        await dealer.send_multipart([b"hello"])
        await dealer.send_multipart([b"", b"\0"])
        await dealer.send_multipart([b"", bytes(8)])
        assert await read(dealer) == [b"", b"", END, b""]
    await publisher.stop()


async def test_nothing_to_say_uses_no_number() -> None:
    publisher = made()
    await publisher.start("127.0.0.1", 0, 0)
    publisher.publish([])
    assert publisher.sequence == 0
    await publisher.stop()


async def test_a_taken_port_is_named() -> None:
    first, second = made(), made()
    await first.start("127.0.0.1", 0, 0)
    with pytest.raises(PortTaken, match=str(first.port)):
        await second.start("127.0.0.1", first.port, 0)
    await first.stop()
    await second.stop()
