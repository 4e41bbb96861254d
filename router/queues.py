"""Queues: what an engine's own metrics say of requests that wait there.

Pure: a page of Prometheus text in, a few numbers out. diagnosing.py asks an engine whose requests
seem stuck, patterns.py says it. Open it when an engine counts its queues under another name.
Sources: SGLang's and vLLM's own servers.

    sglang:num_prefill_bootstrap_queue_reqs{tp_rank="0"} 12.0   ->   num_prefill_bootstrap_queue 12
"""

from __future__ import annotations

import re

MOST_BYTES = 4 * 1024 * 1024  # of a page; what lies behind is not read
MOST_SHOWN = 6
NAMES = re.compile(
    r"^(?:[a-z]+[:_])?(num_[a-z_]{0,60}?(?:queue|waiting|running|swapped)[a-z_]{0,40})"
    r"(?:\{[^}\n]{0,2000}\})? ([0-9.eE+]{1,24})$",
    re.M,
)


def queues(page: str) -> dict[str, int]:
    """Requests by queue, over all ranks; only those that hold some."""
    found: dict[str, float] = {}
    for name, value in NAMES.findall(page[:MOST_BYTES]):
        try:
            count = float(value)
        except ValueError:
            continue
        name = name.removesuffix("_reqs")
        found[name] = found.get(name, 0.0) + count
    return {name: int(count) for name, count in found.items() if 0 < count < 2**53}


def said(found: dict[str, int]) -> str:
    """The longest of them in words; "" where none holds anything."""
    longest = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:MOST_SHOWN]
    return ", ".join(f"{name} {count}" for name, count in longest)
