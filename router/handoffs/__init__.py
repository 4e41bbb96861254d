"""Hand-offs: how a binding is written into two requests, by way of transfer.

Seam: the table is here, base.py says what each member must do. A worker takes part in the way it
was declared with (`handoff`), else in its engine's own; two meet only where their ways are one. A
worker of role both takes "none". A newcomer is one file and one line.
"""

from __future__ import annotations

from kvplane.vocabulary import WorkerUp

from .base import SINGLE, Bodies, Handoff, Headers, Seats, Second, reserved, way
from .none import Unified, UnifiedVllm
from .sglang import Kvplane, Sglang, SglangCounted, SglangLists
from .sglang_headers import SglangHeaders
from .vllm_mooncake import VllmMooncake
from .vllm_nixl import VllmNixl

HANDOFFS: dict[str, Handoff] = {
    "none": Unified(),
    "none-vllm": UnifiedVllm(),
    "sglang": Sglang(),
    "sglang-lists": SglangLists(),  # engines that give each sample of n its room of the list
    "sglang-counted": SglangCounted(),  # the same, whose chat route takes no lists of rooms
    "sglang-headers": SglangHeaders(),  # engines that let headers override members
    "kvplane": Kvplane(),  # the tiny engine reads SGLang's triple
    "vllm": VllmNixl(),
    "vllm-mooncake": VllmMooncake(),
}


def alone(decode: WorkerUp) -> Handoff:
    """What a worker without a prefill is sent; two take the row of `way`."""
    return HANDOFFS["none-vllm" if decode.engine == "vllm" else "none"]


__all__ = [
    "HANDOFFS",
    "SINGLE",
    "Bodies",
    "Handoff",
    "Headers",
    "Seats",
    "Second",
    "alone",
    "reserved",
    "way",
]
