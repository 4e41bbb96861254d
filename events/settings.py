"""Settings: the numbers of events/, each with unit, default and reason.

Pure. kvplane/settings.py fills it. Open it to change how long ingest waits or how much it holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventsSettings:
    """How ingest listens to engines and writes to the store."""

    topic: str = ""  # prefix filter of the SUB socket; "" takes all, as engines default to ""
    connect_s: float = 5.0  # until a worker whose stream is not there is called dark
    settle_s: float = 0.25  # the subscription travels after the handshake; then we ask once more
    idle_check_s: float = 30.0  # silence until replay is asked whether all is well; one message
    store_check_s: float = 2.0  # silence until we look whether the store lost something; one read
    replay_s: float = 10.0  # longest pause inside a replay answer; engines serve it between steps
    replay_total_s: float = 60.0  # a whole answer; 10000 batches take well under a second
    replay_retry_s: float = 1.0  # first pause before a silent replay is asked again, doubled
    replay_retry_most_s: float = 60.0  # longest such pause
    replays_at_once: int = 32  # answers read at one time, when a whole fleet was restarted
    replay_rounds: int = 8  # answers with holes (vLLM before 0.33) that are asked on for
    replay_batches: int = 200_000  # most batches held of one answer; twice any engine's buffer
    replay_bytes: int = 512 << 20  # most bytes held of one answer
    receive_batches: int = 20_000  # high-water mark of a socket; what is above is lost and replayed
    message_bytes: int = 64 << 20  # a longer message closes the connection; batches are kilobytes
    drain_batches: int = 1024  # taken off a socket before the loop looks around
    breath_s: float = 0.005  # of work, then others on the loop have their turn
    linger_s: float = 0.002  # between two beats of writing; a block alone costs 15 times as much
    apply_batches: int = 256  # engine batches in one store batch; bounds the work of one script
    apply_rows: int = (
        256  # rows that are not waited with any longer; beyond, a block costs the same
    )
    worker_blocks: int = 4_000_000  # of one worker that are kept, oldest go first; 0.4 GB of tables
    remembered: int = 1024  # digests of applied batches that tell a repeat from a new life
    store_retry_s: float = 0.1  # first pause when the store is down, doubled each time
    store_retry_most_s: float = 5.0  # longest such pause
    outage_check_s: float = 0.25  # between two looks whether a store that was down is back
    beat_s: float = 1.5  # between two signs of life in the store
    beat_ttl_s: float = 6.0  # silence after which what this ingest said of workers is void
    evicted_check_s: float = 5.0  # between two looks whether the store threw keys away
    sockets: int = 32_000  # of one ZMQ context; its default 1023 ends at some 340 workers
    heartbeat_s: float = 15.0  # comment line on an idle change stream, so that a dead one is seen
    changes_readers: int = 1000  # of the change stream in one process; more are answered 429
    changes_entries: int = 10_000  # newest changes, kept ready once for all readers
    changes_bytes: int = 32 << 20  # most bytes of those
    changes_behind: int = 16  # readers with older cursors that read the store for themselves
    changes_wait_s: float = 2.0  # for one of those places, or for the store's end to come here
    changes_linger_s: float = 30.0  # the store is still followed after the last reader left
