"""Settings: numbers of the index, each with its unit and reason.

Pure: values only; wiring.py fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How the index keeps, reads and answers."""

    block_size: int = 16  # tokens; asked with while no worker told its own; vLLM's default
    stream_entries: int = 100_000  # kept per shard; a follower may be away for minutes at 1000/s
    read_entries: int = 256  # taken from the stream at once; bounds the wait of other tasks
    block_ms: int = 1_000  # longest wait of one stream read; how soon a lost stream is noticed
    command_timeout_s: float = 5.0  # of one Redis command; above any honest answer
    connections: int = 16  # to Redis for commands; more wait their turn
    tail_connections: int = 256  # to Redis for tails, one each while it waits; more take turns
    beat_s: float = 1.0  # for a shard's answer about who lives; one that is late is left out
    tombstone_s: int = 86_400  # a forgotten worker's epoch is remembered for a day
    scan_count: int = 500  # rows per step of a snapshot; keeps other clients' waits near 1 ms
    scans: int = 4  # tables read at once for a snapshot; more only wait for each other
    most_hashes: int = 100_000  # blocks in one question: 1.6 M tokens, above every model
    body_bytes: int = 32 * 2**20  # longest request body
    snapshots: int = 8  # GET /snapshot at the same time; each holds the blocks of one worker
