"""`make bench`: all benchmarks of this folder, or those named: python -m bench hashing index.

Each row is one line: name, median of the rounds, unit, spread. Compare inside one run only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench import conversation, directory, hashing, index, lag, redis, service, transfer
from bench.timing import Absent, Row

ROWS: dict[str, Callable[[], Iterable[Row | Absent]]] = {
    "hashing": hashing.rows,
    "conversation": conversation.rows,
    "index": index.rows,
    "directory": directory.rows,
    "lag": lag.rows,
    "transfer": transfer.rows,
    "redis": redis.rows,
    "service": service.rows,
}


def main(names: list[str]) -> int:
    """Run and print; 2 for a name that is none."""
    wrong = [name for name in names if name not in ROWS]
    if wrong:
        print(f"bench: no {', '.join(wrong)}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    for name in names or list(ROWS):
        for row in ROWS[name]():
            print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
