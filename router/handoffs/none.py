"""No hand-off: one unified worker prefills and decodes; there is one leg and no room.

Pure: a member of the seam handoffs/. Open it to change what a unified worker is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.vocabulary import Binding

from ..request import Ask
from ..splice import splice
from .base import Bodies, reserved


class Unified:
    """The client's body, without what could make the engine reach for a prefill."""

    def rooms(self, ask: Ask) -> int:
        """Nobody meets."""
        return 0

    def write(
        self,
        ask: Ask,
        bindings: Sequence[Binding],
        prefill_dp: int = 1,
        decode_dp: int = 1,
    ) -> Bodies:
        """One body; the dp rank travels where the worker has several."""
        rank = [("routed_dp_rank", b"%d" % bindings[0].decode.dp_rank)] if bindings else []
        return Bodies(None, splice(ask.raw, ask.body, reserved, rank if decode_dp > 1 else []))
