"""Signing: questions to engines carry the key that each of them wants.

Edge of the roof. Stands before an HTTP client that other packages know as one; plane.py gives it to
discovery. Open it when more than GET is asked that way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import aiohttp

from kvplane.router import Credentials
from kvplane.settings import Settings
from kvplane.vocabulary import WorkerUp


def credentials_of(told: Settings, workers: Iterable[WorkerUp]) -> Credentials:
    """The engines' keys as they were told: one for all, and those of workers by themselves."""
    found = Credentials(told["api_key"])
    for worker in workers:
        found.learn(worker.pod, worker.url, worker.api_key)
    return found


class _Signed:
    """As much of a client as probes use."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session, self._credentials = session, credentials

    def get(self, url: str, **more: Any) -> Any:
        """As the client's own, and the key with it."""
        return self._session.get(url, headers=self._credentials.asking(url), **more)


def signed(session: aiohttp.ClientSession, credentials: Credentials) -> aiohttp.ClientSession:
    """The same client, for GET alone."""
    return cast(aiohttp.ClientSession, _Signed(session, credentials))
