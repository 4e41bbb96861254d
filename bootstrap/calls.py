"""Calls: one HTTP exchange with a deadline, foreign failures made ours.

Edge: aiohttp for control calls. Below client.py, which knows what is asked and answered. Open it to
change how a connection is made, how long an answer may be or which status means what.

Every call has a connection of its own: a kept one may lead to a server that was replaced behind
its address and only lives on for who is still connected. The calls are few.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from errno import ECONNREFUSED
from typing import Any

import aiohttp

from kvplane.vocabulary import Generation, Stage

from .addresses import Address
from .errors import BadAnswer, NoDirectory, NotRegistered, RankUnknown, Refused, Silent
from .replies import GENERATION
from .settings import ClientSettings

MISSING = "x-kvplane-missing"  # beside 503: which ranks are not in
NO_LIMIT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
BUSY = (408, 425, 429)  # the same call may go well later


def fresh_session(tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """A session for BootstrapClient: no connection is kept, no name is believed for long.

    Connections are bounded by who asks, one per address and question; a common limit would let
    the addresses that swallow calls stop all others.
    """
    connector = aiohttp.TCPConnector(
        limit=0, force_close=True, ttl_dns_cache=2, ssl=True if tls is None else tls
    )
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of whom, and for which step of a room."""

    method: str
    address: str
    path: str
    stage: Stage
    body: Any = None
    headers: Mapping[str, str] | None = None
    wait_s: float = 0.0  # that the server may take beyond the deadline, because we asked it to


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, read to its end."""

    call: Call
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def generation(self) -> Generation | None:
        """The life that answered; None where the server does not tell."""
        told = self.headers.get(GENERATION)
        return Generation(told) if told and len(told) <= 256 else None

    def expect_ok(self) -> None:
        """Anything but 200 becomes the error a caller can act on."""
        if self.status == 200:
            return
        address, stage = self.call.address, self.call.stage
        said = self.body[:200].decode("utf-8", "replace")
        if self.status == 503 and stage is not Stage.REGISTER:
            missing = self.headers.get(MISSING, "")[:200]
            raise NotRegistered(address, f"{said} Missing {missing}." if missing else said)
        if self.status == 404 and stage is Stage.RESOLVE_RANK:
            raise RankUnknown(address, said)
        if self.status >= 500 or self.status in BUSY or self.status < 400:
            raise BadAnswer(address, f"status {self.status}: {said}", stage)
        raise Refused(address, self.status, said, stage)

    def json(self) -> Any:
        """The body of a 200."""
        self.expect_ok()
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.bad(f"no JSON: {error}"[:200]) from error

    def object(self) -> Mapping[str, Any]:
        """The body of a 200 that must be a JSON object."""
        answer = self.json()
        if not isinstance(answer, Mapping):
            raise self.bad("no JSON object")
        return answer

    def bad(self, why: str) -> BadAnswer:
        """The error for an answer that no bootstrap server gives."""
        return BadAnswer(self.call.address, why, self.call.stage)


class Caller:
    """Makes calls; every failure is a BootstrapError."""

    def __init__(self, session: aiohttp.ClientSession, settings: ClientSettings) -> None:
        self._session, self._settings = session, settings

    async def make(self, call: Call, deadline_s: float | None) -> Reply:
        """The answer whatever its status. Raises Silent, NoDirectory, BadAnswer or BadAddress."""
        limit = self._settings.call_s if deadline_s is None else deadline_s
        limit = min(limit, self._settings.call_s) + call.wait_s
        scheme = "https" if self._settings.tls else "http"
        url = f"{scheme}://{Address.parse(call.address)}{call.path}"
        headers = {"connection": "close", **(call.headers or {})}
        try:
            async with (
                asyncio.timeout(limit),
                self._session.request(
                    call.method,
                    url,
                    json=call.body,
                    headers=headers,
                    timeout=NO_LIMIT,
                    allow_redirects=False,
                ) as response,
            ):
                return Reply(
                    call, response.status, await self._read(call, response), response.headers
                )
        except TimeoutError:
            raise Silent(call.address, limit, call.stage) from None
        except aiohttp.ClientConnectorError as error:
            raise NoDirectory(call.address, _why(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise BadAnswer(call.address, why, call.stage) from error

    async def _read(self, call: Call, response: aiohttp.ClientResponse) -> bytes:
        most = self._settings.most_answer_bytes
        parts: list[bytes] = []
        length = 0
        async for part in response.content.iter_chunked(65_536):
            parts.append(part)
            length += len(part)
            if length > most:
                raise BadAnswer(call.address, f"more than {most} bytes", call.stage)
        return b"".join(parts)


def _why(error: aiohttp.ClientConnectorError) -> str:
    cause = getattr(error, "os_error", error)  # a refused certificate has none
    refused = f"[Errno {ECONNREFUSED}]"  # so a name says it that has several addresses
    if isinstance(cause, ConnectionRefusedError) or refused in str(cause):
        return "connection refused"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
