"""Hand-off seam: how a binding is written into the requests of the two legs.

Seam: what each member of handoffs/ must do. gateway.py mints the rooms and calls it; dispatch.py
sends what it returns. Open it to change what every engine's way of starting a transfer must offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.vocabulary import Binding

from ..request import Ask

# Never taken from a client: they say which engine to reach and which room to enter.
RESERVED = frozenset(
    {"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size"}
    | {"kv_transfer_params"}
)


def reserved(name: str) -> bool:
    """Is this top-level member the gateway's alone?"""
    return name in RESERVED or name.startswith("bootstrap_")


@dataclass(frozen=True, slots=True)
class Bodies:
    """What is sent to the two engines; no prefill leg where `prefill` is None."""

    prefill: bytes | None
    decode: bytes


class Handoff(Protocol):
    """One engine family's way to start a transfer. Pure: no IO, same input, same bytes."""

    def rooms(self, ask: Ask) -> int:
        """How many rooms the request needs: one for each prompt and sample; 0 for no transfer."""

    def write(
        self,
        ask: Ask,
        bindings: Sequence[Binding],
        prefill_dp: int = 1,
        decode_dp: int = 1,
    ) -> Bodies:
        """Bodies of both legs. `bindings` has `rooms(ask)` entries, all of one pair; the dp sizes
        are those of the two pods. Reserved members of the client never pass."""
