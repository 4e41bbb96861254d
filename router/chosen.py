"""Chosen: who serves a request, and why.

Pure. choice.py makes one per attempt, or one for many where nothing of a request decides it;
whoever sends, books or shows an attempt reads it. Open it to remember one more thing of a choice.
"""

from __future__ import annotations

import msgspec

from kvplane.vocabulary import Epoch, Knowledge

from .foretold import Depth, Foretold
from .target import Target


class Choice(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Who serves, and why."""

    prefill: Target | None  # None: a unified worker does both
    decode: Target
    depth: Depth
    knowledge: Knowledge
    reason: str  # "" where knowledge is exact
    prefill_policy: str
    decode_policy: str
    candidates: int  # prefills that could have been taken
    prompt_tokens: int = 0  # of all prompts; 0 = not known
    prefill_epoch: Epoch | None = None  # lives the choice was made under, as the view has them
    decode_epoch: Epoch | None = None
    foretold: Foretold | None = None  # to be compared with what the engine tells; None = cannot be
    alone: str = ""  # why its decode serves it alone, though there is a prefill

    @property
    def holder(self) -> Target:
        """Whose cache was judged."""
        return self.prefill or self.decode
