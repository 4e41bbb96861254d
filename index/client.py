"""Client: ask an index process who holds a prompt.

Door: the caller's side of api.py's POST /rank; `kvplane rank` uses it. Open it to add a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from .errors import IndexRefused, StoreDown


class IndexClient:
    """One index (or a gateway's /index) at a URL; the session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, url: str, deadline_s: float = 10.0) -> None:
        self._session, self._url = session, url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=deadline_s)

    async def rank(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to {model, token_ids | prompt | messages | block_hashes, ...}.

        Raises IndexRefused with the index's own words, StoreDown where nobody answers.
        """
        return await self._ask("POST", "/rank", question)

    async def workers(self) -> list[dict[str, Any]]:
        """All workers the index knows."""
        found: list[dict[str, Any]] = (await self._ask("GET", "/workers"))["workers"]
        return found

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if data else {}
        try:
            async with self._session.request(
                method, self._url + path, data=data, headers=headers, timeout=self._timeout
            ) as answer:
                said = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StoreDown(self._url, f"{type(error).__name__}: {error}") from error
        return _read(answer.status, said)


def _read(status: int, said: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(said)
        message = None if status < 400 else found["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise IndexRefused(status, said[:200].decode(errors="replace")) from None
    if message is not None:
        raise IndexRefused(status, str(message))
    if not isinstance(found, dict):
        raise IndexRefused(status, "the answer is no JSON object")
    return found
