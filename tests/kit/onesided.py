"""A one-sided engine inside this process: memory copies, named a stand-in because nothing travels.

It lets tests of transfer/backends/onesided*.py stop a remote process and wake it: a write to it
hangs meanwhile, and lands when it wakes, exactly as with the real libraries.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from typing import ClassVar

from kvplane.transfer import PeerGone, Stalled, TransferMetrics, TransferSettings
from kvplane.transfer.backends.onesided import OneSidedBackend
from kvplane.transfer.backends.onesided_plan import Move, Reach, Span
from kvplane.transfer.backends.onesided_work import Stop


class StandInEngine:
    """See onesided_session.Engine."""

    library, port, worn = b"", 0, False
    numbers = itertools.count(1)
    living: ClassVar[dict[str, StandInEngine]] = {}

    def __init__(self) -> None:
        self.session = f"engine {next(self.numbers)}"
        self.awake = threading.Event()
        self.awake.set()
        self.reached: list[str] = []
        self.writes = 0  # that were begun
        self.closing = threading.Event()
        self.closing.set()

    def open(self, advertise: str, spans: Sequence[Span]) -> None:
        self.spans = list(spans)
        self.living[self.session] = self

    def reach(self, reach: Reach, peer: str) -> str:
        if reach.session not in self.living:
            raise PeerGone(peer, "no such engine")
        self.reached.append(reach.session)
        return reach.session

    def write(self, where: str, moves: Sequence[Move], peer: str, stop: Stop) -> None:
        self.writes += 1
        other = self.living.get(where)
        if other is not None and not other.awake.wait(30):
            raise Stalled(peer, "asleep for ever")
        for move in moves:
            if where not in self.living:
                raise PeerGone(peer, "no such engine")
            self.living[where].demand(move)
            ctypes.memmove(move.remote, move.local, move.size)

    def demand(self, move: Move) -> None:
        assert any(
            span.address <= move.remote and move.remote + move.size <= span.address + span.size
            for span in self.spans
        ), "outside registered memory"

    def leave(self, where: str, gone: bool) -> None:
        self.reached.remove(where)

    def close(self) -> None:
        self.closing.wait(30)
        self.living.pop(self.session, None)


class StandInBackend(OneSidedBackend):
    """One-sided, over the engine above; two pieces a batch."""

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        super().__init__("stand-in", 2, lambda advertise: StandInEngine(), settings, metrics)

    @property
    def engine(self) -> StandInEngine:
        """That of the session that takes new landings."""
        engine = self._sessions.current.engine
        assert isinstance(engine, StandInEngine)
        return engine
