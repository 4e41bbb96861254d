"""Credentials: which key does each engine want?

Pure. A worker may be named with a key of its own; then every request to it carries that one and no
other, whatever the client sent. legs.py asks for each leg, the roof for each probe; departures.py
learns and forgets. Open it to change how engines are told who we are.

    worker's own api_key     that one
    else                     what keys.py let through: --api-key, or the client's
"""

from __future__ import annotations

import re

from kvplane.vocabulary import Pod

from .legs_wire import Headers, Origin

LINE = re.compile(rb"(?<![^\n])authorization: [^\r\n]*\r\n")


class Credentials:
    """Own keys of workers. Never shown."""

    def __init__(self, usual: str = "") -> None:
        self._usual = usual  # of questions of ours, where a worker has no key of its own
        self._keys: dict[Origin, bytes] = {}
        self.known = False  # has any worker a key of its own? Else nobody need look: most have none
        self._homes: dict[Pod, Origin] = {}

    def learn(self, pod: Pod, url: str, key: str) -> None:
        """From now on this is its key; "" = it has none of its own."""
        self.forget(pod)
        if key:
            origin = self._homes[pod] = Origin.parse(url)
            self._keys[origin], self.known = b"Bearer " + key.encode(), True

    def forget(self, pod: Pod) -> None:
        """It is gone."""
        origin = self._homes.pop(pod, None)
        if origin is not None:
            self._keys.pop(origin, None)
            self.known = bool(self._keys)

    def asking(self, url: str) -> dict[str, str]:
        """Headers of a question of our own to this address."""
        if self._keys:
            whole = Origin.parse(url)
            own = self._keys.get(Origin(whole.host, whole.port, whole.tls))
            if own is not None:
                return {"Authorization": own.decode()}
        return {"Authorization": f"Bearer {self._usual}"} if self._usual else {}

    def signed(self, origin: Origin, headers: Headers | bytes) -> Headers | bytes:
        """Headers of one leg, or the lines made of them, with this engine's own key."""
        own = self._keys.get(origin)
        if own is None:
            return headers
        if isinstance(headers, bytes):
            return LINE.sub(b"", headers) + b"authorization: %s\r\n" % own
        return [pair for pair in headers if pair[0] != b"authorization"] + [(b"authorization", own)]
