"""Dialects: which engine says its KV events how?

Seam: the table of what can be plugged in; base.py says what each must do. Open it to add an
engine's event format in one line.

    vllm       0.9 to 0.33, LMCache's connector, the Mooncake store connector, our own engine
    sglang     0.5.8 to 0.5.23
    mooncake   the store's master, which speaks for no engine
    AIBrix     nothing of its own: its fleets are vLLM's pods, events at port 5557, replay at 5558
"""

from __future__ import annotations

from .base import Dialect
from .mooncake import MOONCAKE
from .sglang import SGLANG
from .vllm import VLLM

DIALECTS: dict[str, Dialect] = {"vllm": VLLM, "sglang": SGLANG, "mooncake": MOONCAKE}


def dialect_of(engine: str) -> Dialect:
    """The dialect of an engine's name; our own engine speaks maps that vLLM's decoder reads.

    Raises ValueError for a name that is not in the table.
    """
    if engine == "kvplane":
        return DIALECTS["vllm"]
    if engine not in DIALECTS:
        known = ", ".join(["kvplane", *DIALECTS])
        raise ValueError(f"engine {engine!r}: events are understood of {known}")
    return DIALECTS[engine]
