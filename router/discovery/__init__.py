"""Discovery: where we hear of workers.

Seam: the table is here, base.py says what each member must do; tests/contracts/test_discovery.py
runs every row. A newcomer is one file and one line.
"""

from __future__ import annotations

from .base import Discovery, OnDown, OnHealth, OnUp, Waiting
from .probe import Probed, ProbeFailed, alive, probe
from .static import Static

DISCOVERIES = {"static": Static}

__all__ = [
    "DISCOVERIES",
    "Discovery",
    "OnDown",
    "OnHealth",
    "OnUp",
    "ProbeFailed",
    "Probed",
    "Static",
    "Waiting",
    "alive",
    "probe",
]
