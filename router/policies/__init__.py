"""Policies: in which order workers are tried for one request.

Seam: the table is here, base.py says what each member must do; tests/contracts/test_policies.py
runs every row. A newcomer is one file with one pure function and one line.
"""

from __future__ import annotations

from .base import Candidate, Need, Policy
from .consistent_hash import consistent_hash
from .least_loaded import least_loaded
from .power_of_two import power_of_two
from .prefix import prefix
from .random import random
from .round_robin import round_robin

POLICIES: dict[str, Policy] = {
    "prefix": prefix,
    "cache_aware": prefix,  # sgl router's names of the same wish
    "prefix_hash": prefix,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "consistent_hash": consistent_hash,
    "round_robin": round_robin,
    "random": random,
}

__all__ = ["POLICIES", "Candidate", "Need", "Policy"]
