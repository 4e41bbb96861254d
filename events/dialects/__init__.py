"""Dialects: which engine says its KV events how?

Seam: the table of what can be plugged in; base.py says what each must do. Open it to add an
engine's event format in one line.
"""

from __future__ import annotations

from .base import Dialect
from .sglang import SGLANG
from .vllm import VLLM

DIALECTS: dict[str, Dialect] = {"vllm": VLLM, "sglang": SGLANG}


def dialect_of(engine: str) -> Dialect:
    """The dialect of an engine's name; our own engine speaks maps that vLLM's decoder reads.

    Raises ValueError for a name that is not in the table.
    """
    if engine == "kvplane":
        return VLLM
    if engine not in DIALECTS:
        known = ", ".join(["kvplane", *DIALECTS])
        raise ValueError(f"engine {engine!r}: events are understood of {known}")
    return DIALECTS[engine]
