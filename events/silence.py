"""Silence: when has an engine been quiet so long that something may be lost?

Pure: time comes as an argument. Used by subscriber.py. Open it to change how often replay is asked
while nothing is heard.

    connected --settle_s quiet--> due, once --idle_check_s quiet--> due --idle_check_s--> due ...
"""

from __future__ import annotations

from .settings import EventsSettings


class Silence:
    """Of one connection; seconds are monotonic."""

    def __init__(self, settings: EventsSettings) -> None:
        self._settings = settings
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A new connection: the subscription travels behind the handshake, so ask again soon."""
        self._patience_s, self._since = self._settings.settle_s, now

    def broken(self, now: float) -> None:
        """A batch came."""
        self._since = now

    def due(self, now: float) -> bool:
        """Quiet for long enough; from then on counted anew."""
        if now - self._since < self._patience_s:
            return False
        self._patience_s, self._since = self._settings.idle_check_s, now
        return True

    @property
    def look_s(self) -> float:
        """How long to listen before looking round."""
        return min(self._patience_s, self._settings.store_check_s)
