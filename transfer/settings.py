"""Settings of transfer/: bounds and deadlines, each with its unit, default and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """One for Offers, Puller and backend; nothing here changes the wire form."""

    checksums: bool = True  # xxh3-64 per page; 5.9 GB/s a core, so on. Both sides must agree
    bootstrapping_s: float = 60.0  # wait for the other side of a room; a prefill queue is seconds.
    # For a prefill it is the lease of its pages: a decode that queues longer renews it
    hold_every_s: float = 5.0  # a decode that queues renews so often; well below any lease
    most_hold_s: float = 600.0  # however often it is renewed
    tolerated: tuple[str, ...] = ()  # fields of Layout that may differ: only who knows why says so
    connect_s: float = 3.0  # TCP connect and bind answer; a retry in a fresh room is cheap
    stall_s: float = 5.0  # nothing moved on a data socket: the peer is stopped, not slow
    verdict_s: float = 10.0  # decode hashes its pages before it answers
    hello_s: float = 5.0  # first frame of a new connection; garbage is often silence
    fence_s: float = 5.0  # one try to fence a failed session, then again with backoff
    most_arriving_bytes: int = 64 * 1024 * 1024  # first frames that are not complete yet; then the
    # slowest connection goes: a bind of 128 k tokens has 40 KB and arrives at once
    most_bound_bytes: int = 512 * 1024 * 1024  # of all rooms bound, beside their page numbers
    most_waiting: int = 4096  # rooms bound before their prefill is ready
    most_bound_pages: int = 4 * 1024 * 1024  # page numbers of all rooms bound; some 160 MB at most
    most_connections: int = 8192  # control connections; more are closed at once
    most_handshakes: int = 256  # data connections that have not shown a known session yet
    most_ended: int = 20_000  # rooms remembered so that a late or second decode is told at once
    ended_s: float = 300.0  # and for how long
    most_pages: int = 262_144  # of one room: 4 Mi tokens in pages of 16
    send_threads: int = 8  # blocked in the kernel most of the time; one per moving room
    receive_threads: int = 8
    slot_bytes: int = 8 * 1024 * 1024  # one-sided: room for the records of all rooms under way
