"""`make bench`: all benchmarks of this folder, or those named: python -m bench hashing index.

Those of LONG run only when they are named.
Each row is one line: name, median of the rounds, unit, spread. Compare inside one run only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench import (
    conversation,
    directory,
    exact,
    gateway,
    hashing,
    index,
    lag,
    memory,
    pause,
    redis,
    service,
    transfer,
)
from bench.timing import Line

ROWS: dict[str, Callable[[], Iterable[Line]]] = {
    "hashing": hashing.rows,
    "conversation": conversation.rows,
    "index": index.rows,
    "memory": memory.rows,
    "exact": exact.rows,
    "pause": pause.rows,
    "directory": directory.rows,
    "lag": lag.rows,
    "transfer": transfer.rows,
    "redis": redis.rows,
    "service": service.rows,
    "gateway": gateway.rows,
}
LONG: dict[str, Callable[[], Iterable[Line]]] = {  # minutes, and 1 GB of memory
    "memory-5m": memory.big,
}


def main(names: list[str]) -> int:
    """Run and print; 2 for a name that is none."""
    known = {**ROWS, **LONG}
    wrong = [name for name in names if name not in known]
    if wrong:
        print(f"bench: no {', '.join(wrong)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or list(ROWS):
        for row in known[name]():
            print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
