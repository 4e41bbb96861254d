"""Bootstrap client: one call to somebody's rank directory, ours or SGLang's own.

Edge: aiohttp for control calls. Used by resolver.py (decode side) and by engines that register.
Open it to change how a call is made or how foreign failures become ours; what is remembered is
resolver.py's affair.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvplane.runtime import Clock, SystemClock, backoff
from kvplane.vocabulary import Generation, Room, Stage

from .addresses import Address, bare, is_host
from .answers import GENERATION, PARAMETERS
from .errors import (
    BadAnswer,
    BadInput,
    NoDirectory,
    NotRegistered,
    RankUnknown,
    Refused,
    Silent,
)
from .fields import number, port, text
from .registration import Registration
from .settings import ClientSettings
from .topology import Topology

NO_LIMIT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
AGAIN = (NoDirectory, Silent, BadAnswer)  # a try to register that may go well later


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one rank listens, in which life of its instance (None: the server does not tell)."""

    host: str  # bare literal or name
    port: int
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, read to its end."""

    status: int
    body: bytes
    generation: Generation | None


class BootstrapClient:
    """Calls with deadlines. `address` is host:port, IPv6 in brackets, or an http:// URL.

    Every failure is a BootstrapError; an address that cannot be meant is BadAddress.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ClientSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._session, self._settings = session, settings or ClientSettings()
        self._clock = clock or SystemClock()

    async def register(
        self, address: str, registration: Registration, deadline_s: float | None = None
    ) -> Generation | None:
        """Tell a directory where a rank is; tried again until it listens. Gives its generation.

        Raises Refused at once where it says no, else the last failure when the time is over.
        """
        wanted = self._settings.register_s if deadline_s is None else deadline_s
        end = self._clock.now() + wanted
        waits = backoff(self._settings.first_wait_s, most_s=self._settings.most_wait_s)
        while True:
            left = max(end - self._clock.now(), 0.001)
            try:
                reply = await self._call(
                    "PUT", address, "/route", Stage.REGISTER, left, registration.body()
                )
                _expect_ok(address, reply, Stage.REGISTER)
                return reply.generation
            except AGAIN:
                wait = next(waits)
                if self._clock.now() + wait >= end:
                    raise
                await self._clock.sleep(wait)

    async def topology(
        self, address: str, deadline_s: float | None = None
    ) -> tuple[Topology, Generation | None]:
        """What the instance looks like. Raises NotRegistered while ranks are missing."""
        stage = Stage.RESOLVE_TOPOLOGY
        reply = await self._call("GET", address, _route(-1, -1, -1, -1), stage, deadline_s)
        try:
            return Topology.parse(_json(address, reply, stage)), reply.generation
        except BadInput as error:
            raise BadAnswer(address, str(error), stage) from error

    async def rank(
        self, address: str, dp: int, cp: int, tp: int, pp: int, deadline_s: float | None = None
    ) -> Endpoint:
        """Where one rank listens. Raises RankUnknown where there is none such."""
        stage = Stage.RESOLVE_RANK
        reply = await self._call("GET", address, _route(dp, cp, tp, pp), stage, deadline_s)
        answer = _object(address, reply, stage)
        try:
            host = bare(text(answer, "rank_ip"))
            if not is_host(host):
                raise BadInput("rank_ip", host, "an address")
            return Endpoint(host, port(answer, "rank_port"), reply.generation)
        except BadInput as error:
            raise BadAnswer(address, str(error), stage) from error

    async def dp_ranks(
        self, address: str, rooms: Iterable[int], deadline_s: float | None = None
    ) -> dict[Room, int]:
        """The dp ranks of those rooms that are known there."""
        stage, body = Stage.RESOLVE_RANK, {"bootstrap_rooms": list(rooms)}
        reply = await self._call("POST", address, "/query_dp_ranks", stage, deadline_s, body)
        answer = _object(address, reply, stage)
        try:
            return {Room(number("room", k)): number("dp_rank", v) for k, v in answer.items()}
        except BadInput as error:
            raise BadAnswer(address, str(error), stage) from error

    async def register_dp_rank(
        self, address: str, room: int, dp_rank: int, deadline_s: float | None = None
    ) -> None:
        """Tell which dp rank of the prefill a room went to; one try."""
        stage, body = Stage.REGISTER, {"bootstrap_room": room, "dp_rank": dp_rank}
        reply = await self._call("POST", address, "/register_dp_rank", stage, deadline_s, body)
        _expect_ok(address, reply, stage)

    async def health(self, address: str, deadline_s: float | None = None) -> Generation | None:
        """Whether it answers, and which life of it does; raises where it does not."""
        reply = await self._call("GET", address, "/health", Stage.RESOLVE_TOPOLOGY, deadline_s)
        _expect_ok(address, reply, Stage.RESOLVE_TOPOLOGY)
        return reply.generation

    async def _call(
        self,
        method: str,
        address: str,
        path: str,
        stage: Stage,
        deadline_s: float | None,
        body: Any = None,
    ) -> Reply:
        limit = self._settings.call_s if deadline_s is None else deadline_s
        limit = min(limit, self._settings.call_s)
        url = Address.parse(address).url + path
        try:
            async with (
                asyncio.timeout(limit),
                self._session.request(
                    method, url, json=body, timeout=NO_LIMIT, allow_redirects=False
                ) as response,
            ):
                raw = await self._read(address, response, stage)
                return Reply(response.status, raw, _life(response.headers.get(GENERATION)))
        except TimeoutError:
            raise Silent(address, limit, stage) from None
        except aiohttp.ClientConnectorError as error:
            raise NoDirectory(address, _why(error.os_error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise BadAnswer(address, str(error) or type(error).__name__, stage) from error

    async def _read(self, address: str, response: aiohttp.ClientResponse, stage: Stage) -> bytes:
        most = self._settings.most_answer_bytes
        parts: list[bytes] = []
        length = 0
        async for part in response.content.iter_chunked(65_536):
            parts.append(part)
            length += len(part)
            if length > most:
                raise BadAnswer(address, f"more than {most} bytes", stage)
        return b"".join(parts)


def _route(*ranks: int) -> str:
    return "/route?" + "&".join(f"{n}={r}" for n, r in zip(PARAMETERS, ranks, strict=True))


def _expect_ok(address: str, reply: Reply, stage: Stage) -> None:
    """Anything but 200 becomes the error a caller can act on."""
    if reply.status == 200:
        return
    said = reply.body[:200].decode("utf-8", "replace")
    if reply.status == 503 and stage is not Stage.REGISTER:
        raise NotRegistered(address, said)
    if reply.status == 404 and stage is Stage.RESOLVE_RANK:
        raise RankUnknown(address, said)
    if reply.status >= 500 or reply.status in (408, 425, 429) or reply.status < 400:
        raise BadAnswer(address, f"status {reply.status}: {said}", stage)
    raise Refused(address, reply.status, said, stage)


def _json(address: str, reply: Reply, stage: Stage) -> Any:
    _expect_ok(address, reply, stage)
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(address, f"no JSON: {error}"[:200], stage) from error


def _object(address: str, reply: Reply, stage: Stage) -> Mapping[str, Any]:
    answer = _json(address, reply, stage)
    if not isinstance(answer, Mapping):
        raise BadAnswer(address, "no JSON object", stage)
    return answer


def _life(header: str | None) -> Generation | None:
    return Generation(header) if header and len(header) <= 256 else None


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error) or type(error).__name__
