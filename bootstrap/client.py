"""Bootstrap client: one question to somebody's rank directory, ours or SGLang's own.

Edge, over calls.py. Used by resolver.py (decode side) and by engines that register. Open it to
change what is asked and how an answer is read; what is remembered is resolver.py's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvplane.runtime import Clock, SystemClock, backoff
from kvplane.vocabulary import Generation, Room, Stage

from .addresses import bare, is_host
from .calls import Call, Caller, Reply
from .errors import BadAnswer, BadInput, NoDirectory, Silent
from .fields import number, port, text
from .lookups import PARAMETERS
from .registration import Registration
from .settings import ClientSettings
from .topology import Topology

PREFER, APPLIED = "prefer", "preference-applied"  # RFC 7240
AGAIN = (NoDirectory, Silent, BadAnswer)  # a try to register that may go well later


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one rank listens, in which life of its instance (None: the server does not tell)."""

    host: str  # bare literal or name
    port: int
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class RoomRanks:
    """What a directory knows of the rooms it was asked for."""

    ranks: Mapping[Room, int]  # known rooms only
    generation: Generation | None = None
    waited: bool = False  # it kept the question until it could answer; SGLang's answers at once


class BootstrapClient:
    """Calls with deadlines. `address` is host:port, IPv6 in brackets, or an http:// URL.

    `key` goes with what changes a directory, and nowhere else; it is never shown. Every failure is
    a BootstrapError; an address that cannot be meant is BadAddress.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ClientSettings | None = None,
        clock: Clock | None = None,
        key: str = "",
    ) -> None:
        if not (key.isascii() and key.isprintable()):  # a header could not carry it
            raise BadInput("write key", "(hidden)", "printable ASCII")
        self._settings = settings or ClientSettings()
        self._caller = Caller(session, self._settings)
        self._clock = clock or SystemClock()
        self._sign = {"authorization": f"Bearer {key}"} if key else {}

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
                reply = await self._write("PUT", address, "/route", registration.body(), left)
                reply.expect_ok()
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
        call = Call("GET", address, _route(-1, -1, -1, -1), Stage.RESOLVE_TOPOLOGY)
        reply = await self._caller.make(call, deadline_s)
        try:
            return Topology.parse(reply.json()), reply.generation
        except BadInput as error:
            raise reply.bad(str(error)) from error

    async def rank(
        self, address: str, dp: int, cp: int, tp: int, pp: int, deadline_s: float | None = None
    ) -> Endpoint:
        """Where one rank listens. Raises RankUnknown where there is none such."""
        call = Call("GET", address, _route(dp, cp, tp, pp), Stage.RESOLVE_RANK)
        reply = await self._caller.make(call, deadline_s)
        answer = reply.object()
        try:
            host = bare(text(answer, "rank_ip"))
            if not is_host(host):
                raise BadInput("rank_ip", host, "an address")
            return Endpoint(host, port(answer, "rank_port"), reply.generation)
        except BadInput as error:
            raise reply.bad(str(error)) from error

    async def dp_ranks(
        self, address: str, rooms: Iterable[int], deadline_s: float | None = None
    ) -> dict[Room, int]:
        """The dp ranks of those rooms that are known there now."""
        return dict((await self.ask_rooms(address, rooms, 0.0, deadline_s)).ranks)

    async def ask_rooms(
        self,
        address: str,
        rooms: Iterable[int],
        wait_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> RoomRanks:
        """The same with what else the answer says; it may take `wait_s` more for unknown rooms.

        The wait is a wish in whole seconds, less than one is none.
        """
        wait = int(wait_s)
        wish = {PREFER: f"wait={wait}"} if wait else {}
        body = {"bootstrap_rooms": list(rooms)}
        stage = Stage.RESOLVE_RANK
        call = Call("POST", address, "/query_dp_ranks", stage, body, wish, wait)
        reply = await self._caller.make(call, deadline_s)
        waited = bool(wait) and "wait" in reply.headers.get(APPLIED, "")
        try:
            answer = reply.object().items()
            found = {Room(number("room", k)): number("dp_rank", v) for k, v in answer}
        except BadInput as error:
            raise reply.bad(str(error)) from error
        return RoomRanks(found, reply.generation, waited)

    async def register_dp_rank(
        self, address: str, room: int, dp_rank: int, deadline_s: float | None = None
    ) -> None:
        """Tell which dp rank of the prefill a room went to; one try."""
        body = {"bootstrap_room": room, "dp_rank": dp_rank}
        (await self._write("POST", address, "/register_dp_rank", body, deadline_s)).expect_ok()

    async def forget_rooms(
        self, address: str, rooms: Iterable[int], deadline_s: float | None = None
    ) -> int:
        """Tell that these rooms are over; how many the server forgot. One try.

        0 where it does not know how to: SGLang's own lets them expire.
        """
        body = {"bootstrap_rooms": list(rooms)}
        reply = await self._write("POST", address, "/forget_rooms", body, deadline_s)
        if reply.status in (404, 405):
            return 0
        try:
            return number("forgotten", reply.object().get("forgotten"))
        except BadInput as error:
            raise reply.bad(str(error)) from error

    async def health(self, address: str, deadline_s: float | None = None) -> Generation | None:
        """Whether it answers, and which life of it does; raises where it does not."""
        call = Call("GET", address, "/health", Stage.RESOLVE_TOPOLOGY)
        reply = await self._caller.make(call, deadline_s)
        reply.expect_ok()
        return reply.generation

    async def _write(
        self, method: str, address: str, path: str, body: Any, deadline_s: float | None
    ) -> Reply:
        call = Call(method, address, path, Stage.REGISTER, body, self._sign)
        return await self._caller.make(call, deadline_s)


def _route(*ranks: int) -> str:
    return "/route?" + "&".join(f"{n}={r}" for n, r in zip(PARAMETERS, ranks, strict=True))
