"""Peers that are killed, stopped, or never were ours: raw sockets against both sides."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.wait import until

from kvplane.transfer import (
    PeerGone,
    PrefillFailed,
    Refused,
    Stalled,
    TransferError,
)
from kvplane.transfer.backends.tcp_frames import (
    HEAD_BYTES,
    Head,
    Kind,
    Status,
    answer,
    body_bytes,
    digest,
    encode_pages,
)
from kvplane.transfer.control import Channel
from kvplane.transfer.frames import (
    MOST_BIND,
    PROTOCOL,
    BindFrame,
    BoundFrame,
    CommitFrame,
    VerdictFrame,
    encode_frame,
)
from kvplane.transfer.metadata import record_bytes
from kvplane.vocabulary import Stage

PAGES = [9, 1, 2]


class RawPrefill:
    """Binds like a prefill, then does on the data path exactly what a test says."""

    def __init__(self) -> None:
        self.bind: asyncio.Future[BindFrame] = asyncio.get_running_loop().create_future()
        self.channel: Channel | None = None
        self.data: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer) -> None:
        self.channel = Channel(reader, writer)
        frame = await self.channel.read(MOST_BIND)
        self.channel.post(BoundFrame(generation="raw"))
        self.bind.set_result(frame)

    async def announce(self, **changes: int) -> bytes:
        """Dial, send head and body, read GO; returns the payload that should follow."""
        bind = await self.bind
        count, items = len(bind.pages), bind.offer.items
        total = count * sum(items)
        facts = {
            "kind": Kind.PAGES, "room": bind.room, "session": bind.attempt,
            "generation": digest(bind.generation), "pages": count, "regions": len(items),
            "body_bytes": body_bytes(count, len(items)), "total_bytes": total,
        }  # fmt: skip
        self.data = await asyncio.open_connection(bind.offer.host, bind.offer.port)
        front = Head(**(facts | changes)).encode() + encode_pages(bind.pages, items)
        self.data[1].write(front)
        status = (await self.data[0].readexactly(4))[0]
        assert status == Status.GO, status
        return b"\x5a" * total

    def reset(self) -> None:
        """As a killed process: RST on both connections."""
        for writer in (self.data[1], self.channel._writer):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def stop(self) -> None:
        self._server.close()
        if self.data is not None:
            self.data[1].close()
        if self.channel is not None:
            self.channel.close()
        await self._server.wait_closed()


@pytest.fixture
async def raw(rig):
    prefill = RawPrefill()
    rig.real_port = rig.resolver.endpoints[0].port
    rig.resolver.endpoints[0].port = await prefill.start()
    yield prefill
    await prefill.stop()


def back(rig) -> None:
    """The resolver tells the real prefill again."""
    rig.resolver.endpoints[0].port = rig.real_port


async def test_a_prefill_stopped_at_half_is_stalled_within_its_time(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    payload = await raw.announce()
    raw.data[1].write(payload[: len(payload) // 2])
    with pytest.raises(Stalled, match="nothing moved while receiving") as caught:
        await asyncio.wait_for(pulling, 10)
    assert caught.value.stage is Stage.VERIFY
    assert f"127.0.0.1:{rig.resolver.endpoints[0].port}" in str(caught.value)
    back(rig)
    await until(lambda: rig.released == [tuple(PAGES)])
    await rig.recovers()


async def test_late_bytes_of_a_stopped_prefill_never_land(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    payload = await raw.announce()
    raw.data[1].write(payload[:100])
    with pytest.raises(Stalled):
        await pulling
    await until(lambda: rig.released == [tuple(PAGES)])
    before = [rig.page(rig.decode_memory, page) for page in range(24)]
    raw.data[1].write(payload[100:])  # it wakes up
    await until(lambda: raw.data[0].at_eof() or raw.data[0].exception())
    assert [rig.page(rig.decode_memory, page) for page in range(24)] == before
    back(rig)
    await rig.recovers()


async def test_a_prefill_killed_in_the_middle_is_gone_at_once(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    payload = await raw.announce()
    raw.data[1].write(payload[:4000])
    raw.reset()
    with pytest.raises(PeerGone):
        await asyncio.wait_for(pulling, 10)
    back(rig)
    await rig.recovers()


async def test_a_prefill_that_closes_between_pages_and_record_is_gone(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    payload = await raw.announce()
    raw.data[1].write(payload)
    assert (await raw.data[0].readexactly(4))[0] == Status.APPLIED
    raw.data[1].close()
    with pytest.raises(PeerGone, match="closed after 3 pages"):
        await asyncio.wait_for(pulling, 10)
    back(rig)
    await rig.recovers()


async def test_a_commit_without_a_record_consumes_nothing(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    payload = await raw.announce()
    raw.data[1].write(payload)
    await raw.data[0].readexactly(4)
    raw.channel.post(CommitFrame(pages=3))
    with pytest.raises(TransferError, match="never written"):
        await asyncio.wait_for(pulling, 10)
    back(rig)
    await rig.recovers()


async def test_a_second_connection_for_a_session_is_refused_and_harms_nobody(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    await raw.announce()
    first = raw.data
    with pytest.raises(AssertionError, match="3"):
        await raw.announce()
    raw.data[1].close()
    raw.data = first
    assert rig.refused("data", "head") == 1
    assert not pulling.done()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    back(rig)
    await rig.recovers()


async def test_garbage_instead_of_a_commit_is_a_named_failure(rig, raw) -> None:
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    await raw.bind
    raw.channel._writer.write(b"\xff\xff\xff\xff")
    with pytest.raises(Refused, match="speaks something else"):
        await pulling
    back(rig)
    await rig.recovers()


async def test_something_else_at_the_rank_port_is_refused(rig) -> None:
    async def http(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    rig.real_port = rig.resolver.endpoints[0].port
    rig.resolver.endpoints[0].port = server.sockets[0].getsockname()[1]
    with pytest.raises(Refused, match="speaks something else") as caught:
        await rig.pull(71, PAGES)
    assert caught.value.stage is Stage.CONNECT
    server.close()
    await server.wait_closed()
    back(rig)
    await rig.recovers()


class RawDecode:
    """Binds like a decode; its data port does what a test says."""

    def __init__(self, rig) -> None:
        self._rig = rig
        self._writers: list[asyncio.StreamWriter] = []
        self.dialled: asyncio.Future = asyncio.get_running_loop().create_future()

    async def bind(self, room: int) -> None:
        self._server = await asyncio.start_server(self._data, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        offer = self._rig.backends[1].offer()
        frame = BindFrame(
            protocol=PROTOCOL, room=room, attempt=5, generation="raw",
            layout=self._rig.puller._side.layout, tokens=64, pages=(1, 2, 3),
            offer=replace(offer, host="127.0.0.1", port=port),
            aux_bytes=record_bytes(3),
        )  # fmt: skip
        self.control = await asyncio.open_connection(
            "127.0.0.1", self._rig.resolver.endpoints[0].port
        )
        self.control[1].write(encode_frame(frame))

    async def _data(self, reader, writer) -> None:
        self._writers.append(writer)
        await reader.readexactly(HEAD_BYTES)
        self.dialled.set_result((reader, writer))

    async def stop(self) -> None:
        self._server.close()
        self.control[1].close()
        for writer in self._writers:  # also of who was cut off before its head came
            writer.transport.abort()
        await self._server.wait_closed()


@pytest.fixture
async def raw_decode(rig):
    decode = RawDecode(rig)
    await decode.bind(71)
    yield decode
    await decode.stop()


@pytest.mark.parametrize("says", [b"", answer(Status.GO), answer(Status.GO)[:2]])
async def test_a_decode_that_stops_is_stalled_within_its_time(rig, raw_decode, says) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [4, 5, 6]))
    _, writer = await raw_decode.dialled
    writer.write(says)
    with pytest.raises(Stalled, match="nothing moved while sending"):
        await asyncio.wait_for(delivering, 10)
    await rig.recovers()


@pytest.mark.parametrize(
    ("says", "kind", "words"),
    [
        (answer(Status.REFUSED, "no such session"), Refused, "no such session"),
        (answer(Status.APPLIED), Refused, "instead of GO"),
        (b"\x63\x00\xff\xff" + b"x" * 600, Refused, "answered 99"),
        (b"", PeerGone, "closed before it confirmed"),
    ],
    ids=["refused", "out of order", "garbage", "closed"],
)
async def test_a_decode_that_answers_wrongly_fails_its_own_room(
    rig, raw_decode, says, kind, words
) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [4, 5, 6]))
    _, writer = await raw_decode.dialled
    writer.write(says)
    writer.close()
    with pytest.raises(kind, match=words):
        await asyncio.wait_for(delivering, 10)
    await rig.recovers()


async def test_a_decode_that_dies_while_it_waits_frees_its_room(rig, raw_decode) -> None:
    await until(lambda: rig.offers.counts()["rooms"] == 1)
    raw_decode.control[1].transport.abort()
    await until(lambda: rig.offers.counts()["rooms"] == 0)
    with pytest.raises(PeerGone, match="control connection closed"):
        await rig.deliver(71, [4, 5, 6])
    await rig.recovers()


async def test_a_decode_that_dies_in_the_middle_ends_the_delivery_at_once(rig, raw_decode) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [4, 5, 6]))
    await raw_decode.dialled
    raw_decode.control[1].transport.abort()
    with pytest.raises(PeerGone):
        await asyncio.wait_for(delivering, 10)
    with pytest.raises(PrefillFailed):
        await rig.pull(71, PAGES)
    await rig.recovers()


async def test_a_verdict_before_the_commit_is_no_verdict(rig, raw_decode) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [4, 5, 6]))
    await raw_decode.dialled
    raw_decode.control[1].write(encode_frame(VerdictFrame(ok=True)))
    with pytest.raises(Refused, match="a good verdict before the commit"):
        await asyncio.wait_for(delivering, 10)
    await rig.recovers()


async def test_a_room_that_stalls_does_not_hold_up_the_others(make_rig) -> None:
    rig = await make_rig(decode_settings={"stall_s": 30.0})  # longer than all of this takes
    raw = RawPrefill()
    real, rig.resolver.endpoints[0].port = rig.resolver.endpoints[0].port, await raw.start()
    stuck = asyncio.create_task(rig.pull(71, PAGES, deadline_s=30.0))
    await raw.announce()
    rig.resolver.endpoints[0].port = real
    for room in range(100, 120):
        metadata, delivered = await rig.both(room, [1, 2], [20, 21])
        assert delivered is None and metadata.room == room
    assert not stuck.done(), "it stalls all the while"
    raw.reset()
    with pytest.raises(PeerGone):
        await stuck
    await raw.stop()
    await rig.recovers()


async def test_silent_connections_are_closed_and_do_not_keep_real_ones_out(make_rig) -> None:
    rig = await make_rig(decode_settings={"most_handshakes": 4})
    control, data = rig.resolver.endpoints[0].port, rig.backends[1].offer().port
    silent = [await asyncio.open_connection("127.0.0.1", port) for port in [data] * 12 + [control]]
    await rig.both(71, [1, 2], [3, 4])
    assert rig.arrived([1, 2], [3, 4])
    for reader, writer in silent:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
        writer.close()
    await until(lambda: rig.refused("data", "silent") == 12, what="all are counted")
    await until(lambda: rig.refused("control", "silent") == 1, what="this one, too")
    await rig.recovers()


class Gate:
    """Around a selector: closed, it tells nothing; open, who asked for the listener comes first."""

    def __init__(self, inner) -> None:
        self._inner, self.open, self.reached = inner, threading.Event(), threading.Event()
        self.open.set()

    def select(self, timeout=None):
        if not self.open.is_set():
            self.reached.set()
            self.open.wait(5)
        return sorted(self._inner.select(timeout), key=lambda found: found[0].data is not None)

    def __getattr__(self, name):
        return getattr(self._inner, name)


async def test_who_is_given_up_for_a_newcomer_may_speak_at_that_moment(make_rig) -> None:
    rig = await make_rig(decode_settings={"most_handshakes": 1})
    receiver, port = rig.backends[1]._receiver, rig.backends[1].offer().port
    gate = receiver._selector = Gate(receiver._selector)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: receiver.counts()["received"] == 1)
    gate.open.clear()
    receiver._nudge()
    await until(gate.reached.is_set)
    newcomer = (await asyncio.open_connection("127.0.0.1", port))[1]
    writer.write(b"K")  # both are ready when the receiver looks
    gate.open.set()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    for each in (writer, newcomer):
        each.close()
    await rig.recovers()


@pytest.fixture
def living() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread, so that Hypothesis can throw bytes at one living rig."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def throw(port: int, data: bytes) -> None:
    """Send and read until the other side is done with us."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except OSError:
            pass  # it hung up on us


def test_arbitrary_bytes_on_any_socket_harm_nobody(living, new_maker) -> None:
    make = new_maker()
    rig = asyncio.run_coroutine_threadsafe(make(), living).result(5)
    ports = [rig.resolver.endpoints[0].port, rig.backends[1].offer().port]
    starts = st.sampled_from(
        [b"", b"KVT1", b"\x00\x00\x00\x08", b"\x00\x3f\xff\xff", b"GET / HTTP"]
    )

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(ports), starts, st.binary(max_size=400))
    def attack(port: int, start: bytes, rest: bytes) -> None:
        throw(port, start + rest)

    attack()
    asyncio.run_coroutine_threadsafe(rig.recovers(), living).result(10)
    asyncio.run_coroutine_threadsafe(make.close(), living).result(10)


async def test_a_flood_of_garbage_beside_real_transfers_is_counted(rig) -> None:
    chance = random.Random(3)
    ports = [rig.resolver.endpoints[0].port, rig.backends[1].offer().port]

    async def flood() -> None:
        for _ in range(60):
            await asyncio.to_thread(throw, chance.choice(ports), chance.randbytes(200))

    async def real() -> None:
        for room in range(300, 330):
            metadata, delivered = await rig.both(room, [1, 2], [3, 4])
            assert delivered is None and metadata.room == room

    await asyncio.gather(flood(), real())
    await until(lambda: rig.refused("control", "garbage") + rig.refused("data", "garbage") == 60)
    await rig.recovers()
