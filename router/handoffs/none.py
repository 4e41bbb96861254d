"""No hand-off: one unified worker prefills and decodes; there is one leg and no room.

Pure: members of the seam handoffs/. A decode that serves a request alone is sent the same. Open it
to change what a unified worker is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvplane.vocabulary import Binding

from ..request import Ask
from ..splice import splice
from .base import Bodies, Seats, reserved


class Unified:
    """The client's body, without what could make the engine reach for a prefill."""

    directory: Literal["route", "query", ""] = ""
    counted = False

    def rooms(self, ask: Ask) -> int:
        """Nobody meets."""
        return 0

    def alone(self, ask: Ask) -> str:
        """There is nobody to hand over to."""
        return ""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """One body; the dp rank travels where the worker has several."""
        rank = b'"routed_dp_rank":%d' % seats.decode_rank if seats.decode_dp > 1 else b""
        return Bodies(None, splice(ask.raw, ask.body, reserved, rank))


class UnifiedVllm(Unified):
    """The same for vLLM, which reads the rank off a header."""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """One body, and a header where the worker has several ranks."""
        body = splice(ask.raw, ask.body, reserved)
        return Bodies(None, body, decode_headers=seats.decode_header)
