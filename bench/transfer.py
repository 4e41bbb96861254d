"""Transfer: pages per second through each backend, two processes, random pages on both sides.

One pair of processes per backend (transfer_pair.py); a backend that cannot run here says why.
`sums` = with the page sums of both sides, as by default.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.timing import ROUNDS, Absent, Row
from bench.transfer_pair import CASES
from kvplane.transfer import BACKENDS
from kvplane.transfer.backends import why_unavailable

BURST_S = 0.4
MOST_S = 120.0  # of one backend
INSIDE = "moves nothing between processes"


def rows(
    seconds: float = BURST_S, rounds: int = ROUNDS, names: tuple[str, ...] = tuple(BACKENDS)
) -> Iterator[Row | Absent]:
    """Pages/s and GB/s of every case, backend by backend."""
    for name in names:
        why = INSIDE if name == "fake" else why_unavailable(BACKENDS[name])
        if why is not None:
            yield Absent(f"transfer, {name}", why)
        else:
            yield from _measured(name, seconds, rounds)


def _measured(name: str, seconds: float, rounds: int) -> Iterator[Row | Absent]:
    words = [sys.executable, "-m", "bench.transfer_pair", name, str(seconds), str(rounds)]
    root = Path(__file__).parents[1]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S, cwd=root)
    except subprocess.TimeoutExpired:
        yield Absent(f"transfer, {name}", f"failed: not done within {MOST_S:g} s")
        return
    if ran.returncode != 0:
        last = ran.stderr.strip().splitlines()[-1:] or [f"status {ran.returncode}"]
        yield Absent(f"transfer, {name}", f"failed: {last[0]}")
        return
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    for case in CASES:
        values = tuple(found[case.name])
        yield Row(f"transfer, {name}, {case.name}", "pages/s", values)
        gb = tuple(value * case.page_bytes / 1e9 for value in values)
        yield Row(f"transfer, {name}, {case.name}", "GB/s", gb)
