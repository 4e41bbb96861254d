"""Remembered: what is kept of an attempt's choice, of its two workers and of their legs.

Pure. Names and numbers only: ten thousand attempts are kept, and nothing of them is looked through
for garbage. meeting.py has one of each, facts.py makes them. Open it to keep one more fact.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvplane.vocabulary import Epoch


class Party(msgspec.Struct, frozen=True, gc=False):
    """One worker, as it was when it was chosen; its load then is the attempt's own."""

    worker: str
    url: str = ""
    epoch: Epoch | None = None

    def shown(self, tokens: int, requests: int) -> dict[str, Any]:
        """As JSON, with what was booked on it then."""
        load = {"inflight_tokens": tokens, "inflight_requests": requests}
        return msgspec.structs.asdict(self) | load


class Why(msgspec.Struct, frozen=True, gc=False):
    """What the choice went by. Attempts whose choices are alike share one."""

    depth_blocks: int = 0
    asked_blocks: int = 0
    depth_tokens: int = 0
    prompt_tokens: int | None = None  # None = not known
    prefill_policy: str = ""
    decode_policy: str = ""
    candidates: int = 0  # prefills that could have been taken
    knowledge: str = ""
    reason: str = ""  # "" where knowledge is exact
    without_transfer: str | None = None  # why no prefill took part, or none was of use


UNCHOSEN = Why()  # of a request for which nobody was


class Leg(msgspec.Struct, frozen=True, gc=False):
    """What could be seen of one engine from outside, whoever made it."""

    status: int  # 0 = no answer came
    received_bytes: int
    complete: bool
    error: str = ""

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "status": self.status or None,
            "bytes": self.received_bytes,
            "complete": self.complete,
            "error": self.error or None,
        }
