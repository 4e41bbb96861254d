"""Hand-off seam: how a binding is written into the requests of the two legs.

Seam: what each member of handoffs/ must do. sending.py mints the rooms, calls it and sends what it
returns. Open it to change what every engine's way of starting a transfer must offer.

    sglang, mooncake   both bodies at once
    nixl               prefill's body, and a way to make decode's out of prefill's answer
    none               one body
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kvplane.vocabulary import Binding, WorkerUp

from ..request import Ask

# Never taken from a client: they say which engine to reach and which room to enter.
RESERVED = frozenset(
    {"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size"}
    | {"kv_transfer_params", "disagg_transfer_id"}
)
PREFIX = "bootstrap_"

Headers = tuple[tuple[bytes, bytes], ...]


def reserved(name: str) -> bool:
    """Is this top-level member the gateway's alone?"""
    return name in RESERVED or name.startswith(PREFIX)


def suspect(body: Mapping[str, Any]) -> bool:
    """May one of these members be reserved? One look at all of them; most bodies hold none."""
    return not RESERVED.isdisjoint(body) or PREFIX in " ".join(body)


class Second(msgspec.Struct, frozen=True):
    """Decode's body, made of prefill's answer."""

    body: bytes
    without: str = ""  # why decode has nothing to fetch and computes the prompt itself


class Bodies(msgspec.Struct, frozen=True):
    """What is sent to the two engines; no prefill leg where `prefill` is None."""

    prefill: bytes | None
    decode: bytes | None  # None: only `then` can make it
    prefill_headers: Headers = ()
    decode_headers: Headers = ()
    then: Callable[[bytes], Second] | None = None  # of prefill's whole answer
    # The request that makes a decode fetch, and so frees, what that answer says is kept for it;
    # None where nothing is.
    clean_up: Callable[[bytes], bytes | None] | None = None
    # Of prefill's answer and decode's cached tokens: why decode seems to have fetched nothing ("" =
    # it does not), and whether that it did is proven.
    ignored: Callable[[bytes, int | None], tuple[str, bool]] | None = None
    merge: bool = False  # prefill's log-probabilities belong into decode's answer
    rids: tuple[str, ...] = ()  # by which POST /abort_request ends it; () = closing does


class Seats(msgspec.Struct, frozen=True, gc=False):
    """What a hand-off needs to know of the two pods beside the binding."""

    prefill_dp: int = 1  # data-parallel ranks
    decode_dp: int = 1
    decode_rank: int = 0  # also of one that works alone
    engine_id: str = ""  # of the prefill's rank, where `directory` is "query"

    @property
    def decode_header(self) -> Headers:
        """The decode's rank as vLLM reads it, where there are several."""
        rank = (b"x-data-parallel-rank", b"%d" % self.decode_rank)
        return (rank,) if self.decode_dp > 1 else ()


SINGLE = Seats()  # both have one rank, and its name need not be known


class Handoff(Protocol):
    """One way to start a transfer. Pure: no IO, same input, same bytes."""

    directory: Literal["route", "query", ""]  # what the prefill's rank directory answers to, if any
    counted: bool  # rooms of a request follow each other: the engine counts on from the first

    def rooms(self, ask: Ask) -> int:
        """How many rooms the request needs; 0 for no transfer."""

    def alone(self, ask: Ask) -> str:
        """Why this request cannot be handed over, so that its decode serves it alone; "" = it can.
        From a closed set: it labels a metric. Raises GatewayError where nobody could serve it."""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """Bodies of both legs. `bindings` has `rooms(ask)` entries, all of one pair. Reserved
        members of the client never pass."""


def way(up: WorkerUp) -> str:
    """Which row of the table this worker takes part in."""
    return up.handoff or up.engine
