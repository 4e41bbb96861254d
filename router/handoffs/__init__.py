"""Hand-offs: how a binding is written into two requests, by engine family.

Seam: the table is here, base.py says what each member must do. The engine named in WorkerUp picks
its row; a worker of role both takes "none". A newcomer is one file and one line.
"""

from __future__ import annotations

from .base import Bodies, Handoff, reserved
from .none import Unified
from .sglang import Sglang

HANDOFFS: dict[str, Handoff] = {
    "none": Unified(),
    "sglang": Sglang(),
    "kvplane": Sglang(),  # the tiny engine reads SGLang's triple
}

__all__ = ["HANDOFFS", "Bodies", "Handoff", "Sglang", "Unified", "reserved"]
