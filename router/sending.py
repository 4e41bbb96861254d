"""Sending: an attempt's requests, in the order its hand-off asks for, and how its engines hear of
its end.

Edge: mints rooms, begins the legs, and runs the errands that follow. journey.py calls it once at
either end of an attempt; handoffs/ say what is written. Open it to change what engines are sent.

    rooms -> both bodies at once                  -> Attempt
          -> prefill's; decode's of its answer    /
    given up at work -> the engine's abort, once     kept for nobody -> a decode fetches it, once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

import msgspec

from kvplane.bootstrap import mint
from kvplane.dice import DICE
from kvplane.runtime import Clock
from kvplane.vocabulary import MAX_ROOM, Binding, BootstrapTriple, Role, Room

from .attempt import Attempt
from .blame import Side
from .choice import Choice
from .errands import Errands
from .facts import BOOTSTRAP_PORT
from .fleet import Fleet
from .handoffs import HANDOFFS, SINGLE, Bodies, Handoff, Seats, alone, way
from .handovers import Handovers
from .legs import Legs
from .legs_errors import Aborted, Stale
from .legs_exchange import Bell, Exchange
from .legs_settings import LegSettings
from .legs_wire import Origin, forwarded, header_lines
from .logprobs import Merge
from .metrics import RouterMetrics
from .prefill_ids import PrefillIds
from .request import Ask
from .target import Target
from .usage import Usage

MOST_ABORTS = 64  # names of one request that are called off; the rest ends with its connection
NAME_FREE_S = 0.5  # a name being called off is waited for; engines answer in milliseconds
CLEAN_UP_S = 30.0  # a fetch of blocks and one token; Nixl's lease is as long
JSON_LINE = b"content-type: application/json\r\n"
UNSENT = LegSettings()  # of a leg that waits for prefill: no deadline runs


def bind(ask: Ask, choice: Choice) -> list[Binding]:
    """A room for each prompt and sample, the first congruent to the prefill's dp rank: all, unless
    the engine counts on from it."""
    prefill = choice.prefill
    if prefill is None:
        return []
    how, rank, size = HANDOFFS[prefill.way], prefill.worker.dp_rank, prefill.up.dp_size
    if (count := how.rooms(ask)) == 1:
        return [_bound(choice, prefill, mint(DICE.bits63, rank, size))]
    rooms = _rooms(count, how.counted and not ask.batched, rank, size)
    return [_bound(choice, prefill, room) for room in rooms]


def _bound(choice: Choice, prefill: Target, room: Room) -> Binding:
    port = prefill.up.bootstrap_port or BOOTSTRAP_PORT
    triple = BootstrapTriple(prefill.bootstrap_host, port, room)
    first, second = prefill.worker, choice.decode.worker
    return Binding(room, first, second, triple, choice.prefill_epoch, choice.decode_epoch)


def _rooms(count: int, in_a_row: bool, rank: int, size: int) -> Sequence[Room]:
    rooms: dict[Room, None] = {}
    while len(rooms) < count:
        room = mint(DICE.bits63, rank, size)
        if not in_a_row:
            rooms[room] = None
        elif room + count <= MAX_ROOM:
            return [Room(room + at) for at in range(count)]
    return list(rooms)


class Sent(msgspec.Struct, eq=False):
    """One attempt's requests, as long as anybody may ask what became of them."""

    by: Sending
    ask: Ask
    prefill: Target | None
    decode: Target
    bodies: Bodies
    lines: bytes  # headers of both legs
    tokens: int  # of the prompts; 0 = not known
    attempt: Attempt

    def target(self, side: Side) -> Target:
        """The worker of a side."""
        return self.prefill if side is Side.PREFILL and self.prefill is not None else self.decode

    def given_up(self, side: Side) -> None:
        """The attempt closed one leg, whose engine may be at work."""
        self.by.call_off(self, side)


class Sending:
    """One per gateway."""

    def __init__(self, legs: Legs, fleet: Fleet, metrics: RouterMetrics, clock: Clock) -> None:
        self._legs, self._fleet = legs, fleet
        self._errands, self._ids = Errands(legs), PrefillIds(legs, clock)
        self._ending: dict[tuple[str, Side], asyncio.Future[None]] = {}  # names being called off
        lost = metrics.undisaggregated
        self.handovers = Handovers(
            self._errands, metrics.registry, lambda why: lost.labels(why).inc(), clock.now
        )

    async def begin(self, ask: Ask, choice: Choice, bindings: list[Binding], bell: Bell) -> Sent:
        """Both requests leave in one step, or prefill's alone. Raises LegFailed where the prefill
        cannot be told from others."""
        prefill, decode = choice.prefill, choice.decode
        how = alone(decode.up) if prefill is None else HANDOFFS[prefill.way]
        seats, sizes = SINGLE, decode.up.dp_size * (prefill or decode).up.dp_size
        if sizes != 1 or how.directory == "query":
            seats = await self._seats(how, prefill, decode)
        bodies = how.write(ask, bindings, seats)
        if self._ending:
            await self._free(bodies.rids)
        lines = b"x-request-id: %b\r\n%b" % (ask.request_id.encode(), shared_lines(ask))
        begin, path, plain = self._legs.begin, ask.path, not ask.stream
        first: Exchange | None = None
        if prefill is not None and bodies.prefill is not None:  # it has to work before decode can
            told = lines + header_lines(more) if (more := bodies.prefill_headers) else lines
            origin = Origin.parse(prefill.url)  # nobody looks at its answer before it is whole
            first = begin(origin, path, told, bodies.prefill, bell, "POST", plain, True)
        origin = Origin.parse(decode.url)
        if bodies.decode is None:
            second = Exchange(origin, b"", b"", UNSENT, bell)
        else:
            told = lines + header_lines(more) if (more := bodies.decode_headers) else lines
            second = begin(origin, path, told, bodies.decode, bell, "POST", plain)
        attempt = Attempt(second, decode.name, first, "" if prefill is None else prefill.name)
        sent = Sent(self, ask, prefill, decode, bodies, lines, choice.prompt_tokens, attempt)
        if bodies.rids or first is not None:
            attempt.on_given_up = sent.given_up
        if first is not None:
            first.bell = attempt
            if bodies.merge or bodies.then or bodies.clean_up or bodies.ignored:
                self._keep(sent)
        return sent

    def ended(self, sent: Sent) -> str:
        """The attempt is over: what it left behind is cleaned up, what it was is counted. Tells why
        nothing was handed over, where that is known already."""
        attempt, prefill = sent.attempt, sent.prefill
        if prefill is None or not attempt.keeps:
            return ""
        leg = attempt.prefill
        answered = leg is not None and leg.complete and 200 <= leg.status < 300
        whole = attempt.decode.complete and 200 <= attempt.decode.status < 300
        if not whole:
            self._ids.forget(prefill.worker.pod)
        if answered and not attempt.taken:
            self._clean_up(sent)
        if answered and whole and sent.bodies.ignored is not None:
            told = attempt.decode_usage.cached_tokens() if attempt.decode_usage else None
            why, proven = sent.bodies.ignored(attempt.answer, told)
            why = attempt.without or why
            self.handovers.ended(prefill, sent.decode, why, proven, sent.tokens)
            return why
        return ""

    # -- in order of use

    async def _seats(self, how: Handoff, prefill: Target | None, decode: Target) -> Seats:
        size = prefill.up.dp_size if prefill is not None else 1
        engine_id = ""
        if prefill is not None and how.directory == "query":
            engine_id = await self._ids.of(prefill)
        return Seats(size, decode.up.dp_size, decode.worker.dp_rank, engine_id)

    async def _free(self, rids: Sequence[str]) -> None:
        """A name that the client gave is used again only when its engines heard that it ended, or
        the abort of one attempt would end the next."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NAME_FREE_S):
                for rid in rids:
                    for side in Side:
                        if (heard := self._ending.get((rid, side))) is not None:
                            await asyncio.shield(heard)

    def _keep(self, sent: Sent) -> None:
        """What prefill answers is needed."""
        attempt, bodies = sent.attempt, sent.bodies
        attempt.keeps = bodies.merge or bodies.then is not None or bodies.clean_up is not None
        attempt.merge = Merge() if bodies.merge else None
        attempt.decode_usage = Usage() if bodies.ignored is not None else None
        if (then := bodies.then) is not None:

            def follow(answer: bytes) -> Exchange:
                second, ask, bell = then(answer), sent.ask, attempt.decode.bell
                attempt.without = second.without
                origin, told = Origin.parse(sent.decode.url), header_lines(bodies.decode_headers)
                told, plain = sent.lines + told, not ask.stream
                return self._legs.begin(origin, ask.path, told, second.body, bell, "POST", plain)

            attempt.follow = follow

    def call_off(self, sent: Sent, side: Side) -> None:
        """Its connection is closed already; an engine that knows its name ends it at once too."""
        if not sent.bodies.rids:
            self.handovers.aborted(side, "closed")
            return
        lines, url = shared_lines(sent.ask), sent.target(side).url
        for rid in sent.bodies.rids[:MOST_ABORTS]:
            heard = self._ending[rid, side] = asyncio.get_running_loop().create_future()
            body = msgspec.json.encode({"rid": rid})
            told = partial(self._told, (rid, side), heard)
            if not self._errands.run(url, "/abort_request", lines, body, then=told):
                del self._ending[rid, side]
                self.handovers.aborted(side, "dropped")

    def _told(
        self, name: tuple[str, Side], heard: asyncio.Future[None], status: int, body: bytes
    ) -> None:
        """An engine heard that a name of ours is given up, or did not."""
        if self._ending.get(name) is heard:
            del self._ending[name]
        if not heard.done():
            heard.set_result(None)
        outcome = "told" if status == 200 else "refused" if status else "unheard"
        self.handovers.aborted(name[1], outcome)

    def _clean_up(self, sent: Sent) -> None:
        """Blocks wait at the prefill for a decode that never came: one fetches them, with one
        token to answer. Where none can, they go when their lease ends."""
        clean_up, attempt = sent.bodies.clean_up, sent.attempt
        body = clean_up(attempt.answer) if clean_up is not None else None
        if body is None:
            return
        target = self._cleaner(sent)
        if target is None:
            self.handovers.cleaned("no decode")
            return

        def told(status: int, answer: bytes) -> None:
            fetched = 200 <= status < 300
            self.handovers.cleaned("fetched" if fetched else "refused" if status else "unheard")

        lines = sent.lines + header_lines(sent.bodies.decode_headers)
        path, limit = sent.ask.path, CLEAN_UP_S
        if not self._errands.run(target.url, path, lines, body, deadline_s=limit, then=told):
            self.handovers.cleaned("dropped")

    def _cleaner(self, sent: Sent) -> Target | None:
        """The decode that was chosen, if nothing is known against it; else another like it."""
        own, leg = sent.decode, sent.attempt.decode
        harmless = leg.error is None or isinstance(leg.error, (Aborted, Stale))
        if harmless and not leg.status and own.usable:
            return own
        if sent.bodies.decode_headers:  # another pod has other ranks
            return own if own.usable and leg.status else None
        like = self._fleet.selectable(Role.DECODE, sent.ask.model)
        others = [t for t in like if t.worker != own.worker and way(t.up) == way(own.up)]
        others.sort(key=lambda target: target.inflight_tokens)
        return next(iter(others), own if leg.status else None)


def shared_lines(ask: Ask) -> bytes:
    """Headers of whatever is sent to an engine for this request: nothing of the client's that could
    name a room, a rank or a host."""
    if not ask.headers:  # as most
        return JSON_LINE
    return header_lines([(b"content-type", b"application/json"), *forwarded(ask.headers)])
