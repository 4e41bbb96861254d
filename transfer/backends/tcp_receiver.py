"""tcp_receiver: what lands in this process, and what does not.

Edge, for the `tcp` backend. One thread accepts connections and reads heads without blocking;
payload is read by a small pool, straight into the registered memory. A connection is owned by
one of the two at a time, and only the owner closes it. Open it to change who may write.

    accept -> head -> known session? room, generation, sizes fit? -> pool: body, GO, payload,
       ^        |no: REFUSED, counted, closed                         APPLIED
       '------- next head of the same connection <----------------------'
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

from kvplane.vocabulary import Stage

from ..errors import PeerGone, Refused, Stalled, TransferError
from ..metrics import TransferMetrics
from ..settings import TransferSettings
from .landing import OpenLanding
from .tcp_frames import (
    HEAD_BYTES,
    MAGIC,
    BadHead,
    Head,
    Kind,
    Status,
    answer,
    decode_head,
    head_fault,
)
from .tcp_payload import close, receive

log = logging.getLogger(__name__)


class TcpLanding(OpenLanding):
    """And the one connection that feeds it."""

    sock: socket.socket | None = None  # under lock
    job: Future[None] | None = None  # under lock; reads payload now, or did


@dataclass(slots=True)
class _Waiting:
    """A connection whose next head is not complete yet."""

    sock: socket.socket
    deadline: float
    landing: TcpLanding | None = None  # None: nothing known of it so far
    data: bytearray = field(default_factory=bytearray)


class Receiver:
    """The listening socket, its thread and its pool."""

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._landings: dict[int, TcpLanding] = {}  # by session; loop and accept thread
        self._waiting: dict[socket.socket, _Waiting] = {}  # accept thread only
        self._parked: deque[_Waiting] = deque()  # from the pool to the accept thread
        self._active = 0  # connections the pool owns; under _lock
        self._lock = threading.Lock()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._pool = ThreadPoolExecutor(settings.receive_threads, "kv-receive")
        self._thread = threading.Thread(target=self._accept_loop, name="kv-accept", daemon=True)

    def listen(self, host: str) -> int:
        """Bind and begin; returns the port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        for sock in (self._listener, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def admit(self, landing: TcpLanding) -> None:
        """From now on its session is known."""
        assert landing.ticket.session not in self._landings, "a session is used once"
        self._landings[landing.ticket.session] = landing

    def forbid(self, landing: TcpLanding) -> Future[None] | None:
        """The session is unknown, its connection cut; the job to wait for, if one still reads."""
        self._landings.pop(landing.ticket.session, None)
        with landing.lock:
            landing.fenced = True
            sock, job = landing.sock, landing.job
            if sock is not None:
                with suppress(OSError):  # its owner closed it
                    sock.shutdown(socket.SHUT_RDWR)
            if job is None or not job.cancel():
                return job
            landing.job = None  # never started, so its connection is ours to close
        self._end(landing, sock)
        return None

    def stop(self) -> None:
        """Blocks until both kinds of threads are gone."""
        self._stopping = True
        for landing in list(self._landings.values()):
            self.forbid(landing)
        self._nudge()
        self._thread.join()
        self._pool.shutdown(wait=True)
        for waiting in [*self._parked, *self._waiting.values()]:
            close(waiting.sock)
        self._parked.clear()
        self._waiting.clear()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def counts(self) -> dict[str, int]:
        """Sockets of peers, landings, and jobs reading payload."""
        sockets = len(self._waiting) + len(self._parked) + self._active
        return {"received": sockets, "landings": len(self._landings), "receiving": self._active}

    # --- accept thread ---

    def _accept_loop(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(timeout=0.5):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif key.data.sock in self._waiting:  # else given up earlier in this very round
                    self._read_head(key.data)
            while self._parked:
                self._watch(self._parked.popleft())
            now = time.monotonic()
            for waiting in [w for w in self._waiting.values() if w.deadline < now]:
                self._give_up(waiting)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # gone again before we looked
        except OSError:
            log.exception("accept failed action=wait")
            time.sleep(0.05)  # out of descriptors: never spin
            return
        unknown = [waiting for waiting in self._waiting.values() if waiting.landing is None]
        if len(unknown) >= self._settings.most_handshakes:
            self._give_up(unknown[0])  # the oldest: who knows a session sends its head at once
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(_Waiting(sock, time.monotonic() + self._settings.hello_s))

    def _watch(self, waiting: _Waiting) -> None:
        waiting.sock.setblocking(False)
        self._waiting[waiting.sock] = waiting
        self._selector.register(waiting.sock, selectors.EVENT_READ, waiting)

    def _unwatch(self, waiting: _Waiting) -> None:
        self._selector.unregister(waiting.sock)
        del self._waiting[waiting.sock]

    def _read_head(self, waiting: _Waiting) -> None:
        try:
            more = waiting.sock.recv(HEAD_BYTES - len(waiting.data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        waiting.data += more
        if not more:
            self._unwatch(waiting)
            self._close(waiting.sock, waiting.landing)
            self._ended(waiting)
        elif len(waiting.data) == HEAD_BYTES or waiting.data[:4] != MAGIC[: len(waiting.data)]:
            self._unwatch(waiting)
            self._judge(waiting)

    def _ended(self, waiting: _Waiting) -> None:
        """The peer closed between two writes: fine after the record, else it broke off."""
        landing = waiting.landing
        if landing is None:
            if waiting.data:
                self._metrics.refused.labels("data", "garbage").inc()
        elif not landing.recorded:
            reason = f"data connection closed after {landing.landed} pages"
            landing.break_off(PeerGone(landing.ticket.peer, reason))

    def _give_up(self, waiting: _Waiting) -> None:
        self._unwatch(waiting)
        self._close(waiting.sock, waiting.landing)
        if waiting.landing is None:
            self._metrics.refused.labels("data", "silent").inc()
        else:
            error = Stalled(waiting.landing.ticket.peer, "no write within the deadline")
            waiting.landing.break_off(error)

    def _judge(self, waiting: _Waiting) -> None:
        try:
            head = decode_head(bytes(waiting.data))
        except BadHead as error:
            self._refuse(waiting, "garbage", str(error))
            return
        landing = self._landings.get(head.session)
        if landing is None or waiting.landing not in (None, landing):
            self._refuse(waiting, "unknown session", f"session of room {head.room} is unknown")
            return
        fault = head_fault(head, landing.ticket, landing.regions.items)
        with landing.lock:
            taken = landing.sock not in (None, waiting.sock)
            fault = fault or landing.fault_of(head.kind is Kind.RECORD)
            if fault is None and not taken and not landing.fenced:
                landing.sock = waiting.sock
                self._hand_over(landing, waiting.sock, head)
                return
        if fault is not None and not taken:
            landing.break_off(fault)
        self._refuse(waiting, "head", str(fault or "session is in use or over"))

    def _refuse(self, waiting: _Waiting, why: str, text: str) -> None:
        self._metrics.refused.labels("data", why).inc()
        log.debug("data connection refused why=%s text=%r", why, text)
        with suppress(OSError):
            waiting.sock.send(answer(Status.REFUSED, text))
        self._close(waiting.sock, waiting.landing)
        if waiting.landing is not None:
            waiting.landing.break_off(Refused(waiting.landing.ticket.peer, text, Stage.VERIFY))

    def _hand_over(self, landing: TcpLanding, sock: socket.socket, head: Head) -> None:
        with self._lock:
            self._active += 1
        landing.job = self._pool.submit(self._receive, landing, sock, head)

    # --- pool ---

    def _receive(self, landing: TcpLanding, sock: socket.socket, head: Head) -> None:
        """One write: body, GO, payload, APPLIED. The connection goes back or is closed."""
        try:
            moved = receive(sock, head, landing, self._settings.stall_s)
            self._metrics.bytes.labels("received").inc(moved)
        except TransferError as error:
            if isinstance(error, Refused):
                self._metrics.refused.labels("data", "body").inc()
            landing.break_off(error)
            self._end(landing, sock)
            return
        with self._lock:
            self._active -= 1
            self._parked.append(_Waiting(sock, landing.deadline, landing))
        self._nudge()

    def _end(self, landing: TcpLanding, sock: socket.socket | None) -> None:
        with self._lock:
            self._active -= 1
        if sock is not None:
            self._close(sock, landing)

    def _close(self, sock: socket.socket, landing: TcpLanding | None) -> None:
        """Under the landing's lock, so that forbid() never shuts down a reused descriptor."""
        with landing.lock if landing is not None else nullcontext():
            close(sock)

    def _nudge(self) -> None:
        with suppress(OSError):
            self._wake.send(b"x")
