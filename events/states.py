"""States: how far along is one stream, and what may be believed of the index then?

Pure. The table that events/subscriber.py and repair.py ask; telling.py says the outcome to the
store. Open it to add a state or a signal, or to change a sentence: it reaches every gateway.

                 connected     lost        hole    asked        whole    short      one of DARKENS
    live         replaying     partial     gap     -            live     partial    dark
    gap          replaying     partial     gap     replaying    live     partial    dark
    replaying    replaying     partial     gap     -            live     partial    dark
    partial      replaying     partial     gap     -            live     partial    dark
    dark         replaying     -           -       -            live     partial    dark
"""

from __future__ import annotations

from enum import StrEnum

from kvplane.vocabulary import Knowledge


class State(StrEnum):
    """Of one stream of batches; label of a gauge."""

    LIVE = "live"  # every batch is known, the next one is awaited
    GAP = "gap"  # batches are missing
    REPLAYING = "replaying"  # they are asked for
    PARTIAL = "partial"  # followed, but what came before is not all known
    DARK = "dark"  # no stream, or not one that can be believed


class Signal(StrEnum):
    """What may happen to a stream."""

    CONNECTED = "connected"
    LOST = "lost"  # the connection
    HOLE = "hole"
    ASKED = "asked"
    WHOLE = "whole"  # nothing is missing, or all that was has come
    SHORT = "short"  # something is missing for good, or depths are worth less than they say
    NO_STREAM = "no stream"
    FOREIGN = "foreign"
    SILENT = "silent"  # the replay socket
    DEAF = "deaf"
    MISTAKEN = "mistaken"
    ASLEEP = "asleep"
    FAILED = "failed"


DARKENS = (
    Signal.NO_STREAM,
    Signal.FOREIGN,
    Signal.SILENT,
    Signal.DEAF,
    Signal.MISTAKEN,
    Signal.ASLEEP,
    Signal.FAILED,
)
_ALWAYS = dict.fromkeys(DARKENS, State.DARK) | {
    Signal.CONNECTED: State.REPLAYING,
    Signal.WHOLE: State.LIVE,
    Signal.SHORT: State.PARTIAL,
}
_HEARD = _ALWAYS | {Signal.LOST: State.PARTIAL, Signal.HOLE: State.GAP}
NEXT: dict[State, dict[Signal, State]] = {
    State.LIVE: _HEARD,
    State.GAP: _HEARD | {Signal.ASKED: State.REPLAYING},
    State.REPLAYING: _HEARD,
    State.PARTIAL: _HEARD,
    State.DARK: _ALWAYS,
}
KNOWLEDGE = {
    State.LIVE: Knowledge.EXACT,
    State.GAP: Knowledge.PARTIAL,
    State.REPLAYING: Knowledge.PARTIAL,
    State.PARTIAL: Knowledge.PARTIAL,
    State.DARK: Knowledge.DARK,
}
SAYS = {  # {why}: the facts of the moment
    Signal.CONNECTED: "connected to {endpoint}, what was said before is asked for",
    Signal.LOST: "connection to {endpoint} is lost",
    Signal.HOLE: "{why} are asked for",
    Signal.ASKED: "{why} are asked for",
    Signal.WHOLE: "stream live, no open gap",
    Signal.SHORT: "{why}",
    Signal.NO_STREAM: "not connected to {endpoint}",
    Signal.FOREIGN: "{endpoint} does not speak the event protocol",
    Signal.SILENT: "replay at {replay} does not answer",
    Signal.DEAF: "connected, nothing heard yet and no replay to ask",
    Signal.MISTAKEN: "{why}",
    Signal.ASLEEP: "the engine sleeps: its cache is gone, though its stream does not say so yet",
    Signal.FAILED: "following it failed and is tried again: {why}",
}


class Stream:
    """State and sentence of one stream. `rank` names it where its pod has several."""

    def __init__(self, endpoint: str, replay: str | None, rank: int | None = None) -> None:
        self.state, self.reason = State.DARK, "not connected yet"
        self.mistaken = ""  # why it is taken for another worker's
        self.asleep = False  # the engine, until it says something again
        self._endpoint, self._replay = endpoint, replay
        self._who = "" if rank is None else f"rank {rank}: "

    @property
    def knowledge(self) -> Knowledge:
        """How far the index may be believed in this state."""
        return KNOWLEDGE[self.state]

    def hear(self, signal: Signal, why: str = "") -> bool:
        """Move as the table says; false for a signal that it does not name."""
        after = NEXT[self.state].get(signal)
        if after is None:
            return False
        self.state = after
        said = SAYS[signal].format(endpoint=self._endpoint, replay=self._replay, why=why)
        none = "no stream, " if self._who and signal is Signal.NO_STREAM else ""
        self.reason = f"{self._who}{none}{said}" if after is State.DARK else said
        return True

    def settle(self, heard: bool, silent: bool, doubt: str, caveat: str) -> None:
        """What a connected stream amounts to, the worst first.

        `heard`: a batch of this life. `silent`: replay was asked and did not answer. `doubt`: what
        was lost, in words. `caveat`: why a depth may be more than the engine serves.
        """
        if self.mistaken:
            self.hear(Signal.MISTAKEN, self.mistaken)
        elif self.asleep:
            self.hear(Signal.ASLEEP)
        elif silent:
            self.hear(Signal.SILENT)
        elif self._replay is None and not heard:
            self.hear(Signal.DEAF)
        elif doubt or caveat:
            self.hear(Signal.SHORT, doubt or caveat)
        else:
            self.hear(Signal.WHOLE)
