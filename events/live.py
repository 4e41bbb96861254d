"""Live: the SUB socket of one worker.

Edge: bytes off the wire and the state of the connection, no judgement. Used by subscriber.py. Open
it to change how messages are taken off a socket: its descriptor tells that something came, the next
beat of pulse.py wakes who waits for it, and all that is there by then is taken without waiting.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .pulse import Pulse
from .settings import EventsSettings

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Live:
    """Connects on `open`; ZMQ reconnects by itself, `connections` counts how often it did."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        settings: EventsSettings,
        topic: str,
        pulse: Pulse,
    ) -> None:
        self._context, self._endpoint, self._settings = context, endpoint, settings
        self._topic, self._pulse = topic, pulse
        self._asked = False  # the next beat will tell of what came
        self.connections = 0
        self.up = False
        self.fresh = False  # what was taken last came by this connection, not by one before it
        self._emptied = 0  # the connection in which nothing was left in the queue
        self.foreign = False  # something answers there that is no publisher
        self._shaking = False  # connected, no handshake yet
        self._wake: asyncio.Future[None] | None = None  # of who waits in receive() or connected()
        self._moved = False  # the connection changed since somebody waited
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Subscribe; limits are set before the connection is made, or they would not hold."""
        socket = _plain(self._context, zmq.SUB)
        self._socket = socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)  # IPv4 goes on working
        socket.setsockopt(zmq.RCVHWM, self._settings.receive_batches)
        socket.setsockopt(zmq.MAXMSGSIZE, self._settings.message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        if self._endpoint.startswith("inproc:"):  # no handshake there, it is up or it fails
            self.up, self.connections = True, 1
        else:
            address = f"inproc://monitor.s-{_descriptor(socket)}"
            socket.monitor(address, _WATCHED)
            self._monitor = monitor = _plain(self._context, zmq.PAIR)
            monitor.connect(address)
            asyncio.get_running_loop().add_reader(_descriptor(monitor), self._look)
            self._look()  # a descriptor tells of the first only after a look in vain
        asyncio.get_running_loop().add_reader(_descriptor(socket), self._arrived)
        socket.connect(self._endpoint)

    async def connected(self, timeout_s: float) -> bool:
        """Wait until the publisher's handshake is done."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while not self.up and loop.time() < until:
            await self._wait(until - loop.time())
        return self.up

    async def receive(self, timeout_s: float) -> list[list[bytes]]:
        """What is there at the next beat; empty when nothing came in time, or the connection
        changed."""
        assert self._socket is not None, "open() comes first"
        if not self._asked and _waiting(self._socket):
            self._ask()
        await self._wait(timeout_s)
        return self.take()

    def _arrived(self) -> None:
        """The descriptor tells of anything; only the socket knows whether a message is whole.

        To look also keeps the descriptor from telling the same again while nobody waits.
        """
        if self._socket is not None and _waiting(self._socket) and self._wake and not self._asked:
            self._ask()

    def _ask(self) -> None:
        self._asked = True
        self._pulse.call(self._beat)

    def _beat(self) -> None:
        self._asked = False
        self._call()

    def take(self) -> list[list[bytes]]:
        """What is there, and then what the monitor said: first whose batches these are."""
        assert self._socket is not None, "open() comes first"
        taken: list[list[bytes]] = []
        before = self._emptied
        try:
            while len(taken) < self._settings.drain_batches:
                taken.append(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            self._emptied = self.connections
        self._look()
        self.fresh = before == self.connections
        return taken

    async def _wait(self, timeout_s: float) -> None:
        """Until something calls; at once where the connection changed before."""
        if self._moved:
            self._moved = False
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = loop.call_later(timeout_s, self._call)
        try:
            await self._wake
        finally:
            timer.cancel()
            self._wake, self._moved = None, False

    def _call(self, *_: Any) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _look(self) -> None:
        """One reader of the monitor, so that what it says stays in order."""
        while self._monitor is not None and _waiting(self._monitor):
            self._event(self._monitor.recv_multipart(zmq.NOBLOCK))

    def _event(self, message: list[bytes]) -> None:
        """Follow the connection's state; a second handshake may be a new life.

        A peer of another kind of socket ends the connection before the handshake, and ZMQ does not
        try again (seen with ROUTER and PULL): only `reopen` finds what comes after it.
        """
        event = parse_monitor_message(message)["event"]
        if event == zmq.EVENT_CONNECTED:
            self._shaking = True
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.up, self.foreign = True, False
            self.connections += 1
        else:
            refused = event != zmq.EVENT_DISCONNECTED
            self.foreign = self.foreign or refused or self._shaking
            self.up = False
        self._shaking, self._moved = False, True
        self._call()

    async def reopen(self) -> None:
        """A fresh socket, for an endpoint where something else was."""
        await self.close()
        self.open()

    async def close(self) -> None:
        """Give the sockets back."""
        self.up = self._shaking = self._moved = False
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            asyncio.get_running_loop().remove_reader(_descriptor(monitor))
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(_descriptor(self._socket))
            if monitor is not None:
                self._socket.disable_monitor()
            self._socket.close(linger=0)
        if monitor is not None:
            monitor.close(linger=0)  # a context does not end while one is open
        self._socket = None


def _plain(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Of a context whose own sockets would wait by themselves."""
    return zmq.Socket(context, kind)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _waiting(socket: zmq.Socket[bytes]) -> bool:
    """Is there a whole message?"""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
