"""Knowledge: how far may the index be believed about a worker?

Pure. Used by subscriber.py, which tells the store. Open it to change what counts as exact, partial
or dark; the reasons are sentences for people and reach every gateway.
"""

from __future__ import annotations

from kvplane.vocabulary import Knowledge

PAIRED = "speculative decoding: the last block of a prefix may not be usable"
DEAF = "connected, nothing heard yet and no replay to ask"
EXACT = (Knowledge.EXACT, "stream live, no open gap")


def believed(
    heard: bool, replay: str | None, silent: bool, doubt: str, paired: bool
) -> tuple[Knowledge, str]:
    """State and reason while the stream is connected, the worst first.

    `silent`: the replay socket was asked and did not answer. `doubt`: what was lost, in words.
    """
    if silent:
        return Knowledge.DARK, f"replay at {replay} does not answer"
    if replay is None and not heard:
        return Knowledge.DARK, DEAF
    if doubt:
        return Knowledge.PARTIAL, doubt
    return (Knowledge.PARTIAL, PAIRED) if paired else EXACT


def unreachable(endpoint: str, foreign: bool) -> tuple[Knowledge, str]:
    """State and reason while there is no connection to the stream."""
    if foreign:
        return Knowledge.DARK, f"{endpoint} does not speak the event protocol"
    return Knowledge.DARK, f"not connected to {endpoint}"
