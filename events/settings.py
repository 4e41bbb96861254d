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
    replay_rounds: int = 8  # answers with holes (vLLM before 0.33) that are asked on for
    replay_batches: int = 200_000  # most batches held of one answer; twice any engine's buffer
    replay_bytes: int = 512 << 20  # most bytes held of one answer
    receive_batches: int = 20_000  # high-water mark of a socket; what is above is lost and replayed
    message_bytes: int = 64 << 20  # a longer message closes the connection; batches are kilobytes
    drain_batches: int = 1024  # taken off a socket before the loop looks around
    apply_batches: int = 256  # engine batches in one store batch; bounds the work of one script
    apply_rows: int = 4096  # rows in one store batch, for the same reason
    remembered: int = 1024  # digests of applied batches that tell a repeat from a new life
    store_retry_s: float = 0.1  # first pause when the store is down, doubled each time
    store_retry_most_s: float = 5.0  # longest such pause
    heartbeat_s: float = 15.0  # comment line on an idle change stream, so that a dead one is seen
