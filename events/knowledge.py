"""Knowledge: how far may the index be believed about a worker?

Pure. Used by subscriber.py, which tells the store. Open it to change what counts as exact, partial
or dark; the reasons are sentences for people and reach every gateway.
"""

from __future__ import annotations

from kvplane.vocabulary import Knowledge

DEAF = "connected, nothing heard yet and no replay to ask"
EXACT = (Knowledge.EXACT, "stream live, no open gap")


def believed(
    heard: bool, replay: str | None, silent: bool, doubt: str, caveat: str
) -> tuple[Knowledge, str]:
    """State and reason while the stream is connected, the worst first.

    `silent`: the replay socket was asked and did not answer. `doubt`: what was lost, in
    words. `caveat`: why a depth may be more than the engine serves.
    """
    if silent:
        return Knowledge.DARK, f"replay at {replay} does not answer"
    if replay is None and not heard:
        return Knowledge.DARK, DEAF
    if doubt or caveat:
        return Knowledge.PARTIAL, doubt or caveat
    return EXACT


def unreachable(endpoint: str, foreign: bool) -> tuple[Knowledge, str]:
    """State and reason while there is no connection to the stream."""
    if foreign:
        return Knowledge.DARK, f"{endpoint} does not speak the event protocol"
    return Knowledge.DARK, f"not connected to {endpoint}"
