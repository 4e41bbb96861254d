"""tcp_payload: the blocking halves of one write, as run in worker threads.

Edge, for the `tcp` backend: `send` on the prefill, `receive` on the decode. Every call on a socket
has a time-out; foreign exceptions become ours here. Open it to change how bytes are moved.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from ..errors import PeerGone, Refused, Stalled, TransferError
from ..regions import runs
from .landing import OpenLanding
from .tcp_frames import (
    ANSWER,
    MOST_TEXT,
    BadHead,
    Head,
    Kind,
    Status,
    answer,
    decode_pages,
    pages_fault,
)

PIECES = 512  # of one sendmsg; Linux takes 1024
AHEAD_BYTES = 8 * 1024 * 1024  # asked for before they are sent: pieces of a device are copies

Left = Callable[[], float]  # seconds allowed for the next step; raises Stalled at the deadline


def close(sock: socket.socket) -> None:
    """Never raises."""
    with suppress(OSError):
        sock.close()


def receive(sock: socket.socket, head: Head, landing: OpenLanding, stall_s: float) -> int:
    """Read what `head` (checked) announces; bytes of pages moved. Raises TransferError."""
    peer = landing.ticket.peer
    try:
        with _named(peer, "receiving"):
            if head.kind is Kind.RECORD:
                return _receive_record(sock, head, landing, stall_s)
            return _receive_pages(sock, head, landing, stall_s)
    except Refused as error:
        with suppress(OSError):
            sock.sendall(answer(Status.REFUSED, error.reason))
        raise


def _receive_pages(sock: socket.socket, head: Head, landing: OpenLanding, stall_s: float) -> int:
    body = memoryview(bytearray(head.body_bytes))
    _fill(sock, body, landing, stall_s)
    try:
        pages, sizes = decode_pages(head, bytes(body))
    except BadHead as error:
        raise Refused(landing.ticket.peer, str(error)) from error
    fault = pages_fault(pages, sizes, landing.wanted, landing.regions.items)
    if fault is not None:
        raise Refused(landing.ticket.peer, fault)
    landing.started()
    sock.sendall(answer(Status.GO))
    for region in landing.regions:
        for first, count in runs(pages):
            for view in region.into(first, count):
                _fill(sock, view, landing, stall_s)
    landing.landed_pages(pages)
    sock.sendall(answer(Status.APPLIED))
    return head.total_bytes


def _receive_record(sock: socket.socket, head: Head, landing: OpenLanding, stall_s: float) -> int:
    sock.settimeout(landing.left_s(stall_s))
    sock.sendall(answer(Status.GO))
    record = memoryview(bytearray(head.total_bytes))
    _fill(sock, record, landing, stall_s)
    with landing.lock:
        landing.slot[: len(record)] = record
        landing.recorded = True
    sock.sendall(answer(Status.APPLIED))
    return 0


def _fill(sock: socket.socket, view: memoryview, landing: OpenLanding, stall_s: float) -> None:
    """All of `view`, nothing once the landing is fenced; each step within `stall_s`."""
    while view:
        if landing.fenced:
            raise PeerGone(landing.ticket.peer, "fenced")
        sock.settimeout(landing.left_s(stall_s))
        got = sock.recv_into(view)
        if got == 0:
            raise PeerGone(
                landing.ticket.peer, f"data connection closed, {len(view)} bytes missing"
            )
        view = view[got:]


def send(
    sock: socket.socket,
    front: bytes,
    pieces: Iterable[memoryview],
    peer: str,
    deadline: float,
    stall_s: float,
) -> None:
    """Head and body, wait for GO, payload, wait for APPLIED. Raises TransferError."""

    def step() -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Stalled(peer, "write not confirmed within its deadline")
        sock.settimeout(min(stall_s, left))

    with _named(peer, "sending"):
        step()
        with suppress(ConnectionError):  # refused early: the answer says why
            sock.sendall(front)
        _await(sock, Status.GO, peer, step)
        with suppress(BrokenPipeError):
            _send_all(sock, pieces, step)
        _await(sock, Status.APPLIED, peer, step)


def _send_all(sock: socket.socket, pieces: Iterable[memoryview], step: Callable[[], None]) -> None:
    """Gather: many pieces a call, no copy; asks for more only when what it has is little."""
    rest = (piece for piece in pieces if len(piece))
    queue: deque[memoryview] = deque()
    waiting = 0  # bytes in it
    while True:
        while waiting < AHEAD_BYTES and len(queue) < PIECES:
            piece = next(rest, None)
            if piece is None:
                break
            queue.append(piece)
            waiting += len(piece)
        if not queue:
            return
        step()
        sent = sock.sendmsg(queue)
        waiting -= sent
        while sent:
            first = queue.popleft()
            if sent < len(first):
                queue.appendleft(first[sent:])
                break
            sent -= len(first)


def _await(sock: socket.socket, wanted: Status, peer: str, step: Callable[[], None]) -> None:
    step()
    status, _, length = ANSWER.unpack(_exact(sock, ANSWER.size, peer))
    text = _exact(sock, min(length, MOST_TEXT), peer).decode(errors="replace") if length else ""
    if status == Status.REFUSED:
        raise Refused(peer, text)
    if status != wanted:
        raise Refused(peer, f"answered {status} instead of {wanted.name}")


def _exact(sock: socket.socket, size: int, peer: str) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise PeerGone(peer, "data connection closed before it confirmed")
        data += more
    return data


class _named:
    """Socket errors become PeerGone and Stalled with the peer's name."""

    def __init__(self, peer: str, doing: str) -> None:
        self._peer, self._doing = peer, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise Stalled(self._peer, f"nothing moved while {self._doing}") from error
        if isinstance(error, OSError):
            why = error.strerror or type(error).__name__
            raise PeerGone(self._peer, f"{self._doing}: {why}") from error


__all__ = ["TransferError", "close", "receive", "send"]
