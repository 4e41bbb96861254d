"""SGLang's hand-off: the bootstrap triple in both bodies, both legs at once.

Pure: members of the seam handoffs/. Sources: sglang.md sections 3 and 8, sgl-router.md section 4.
The tiny engine speaks it too. Open it when SGLang reads other members.

    one prompt, one sample      "bootstrap_room": 71             "rid": "kvplane-0000000000000047"
    a list, or n > 1            "bootstrap_room": [71, 12, 5]    every sample its own room
    n > 1, counted              "bootstrap_room": 71             SGLang counts on: 71, 72, 73
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from kvplane.vocabulary import Binding

from ..logprobs import needed
from ..request import Ask
from ..splice import appended, splice
from .base import SINGLE, Bodies, Seats, reserved, suspect
from .sglang_samples import Members, refusal, replaced, unrolled

# Streams of OpenAI routes tell usage only when asked to. Nobody but us reads prefill's stream, and
# its cached tokens are what the index's foresight is judged by.
OPTIONS = "stream_options"
CHAT = "/v1/chat/completions"  # whose log-probabilities are all decode's
USAGE = b'"stream_options":{"include_usage":true}'
NO_RANKS = b"", b""


class Sglang:
    """Both engines get the client's body plus the triple."""

    directory: Literal["route", "query", ""] = "route"
    counted = False

    def rooms(self, ask: Ask) -> int:
        """One per prompt and sample: samples that share a room hang SGLang (sglang#26486)."""
        return ask.prompts * ask.samples

    def alone(self, ask: Ask) -> str:
        """A decode of SGLang serves nothing without a room. Raises GatewayError for samples that
        could not have one each."""
        if ask.samples > 1 and (error := refusal(ask)) is not None:
            raise error
        return ""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """The triple in both; dp ranks where there is more than one."""
        if ask.plain and seats is SINGLE:
            return _plain(ask, bindings[0])
        assert len(bindings) == ask.prompts * ask.samples, "a room for each prompt and sample"
        samples = self._samples(ask) if ask.samples > 1 else []
        name, rids = self._named(ask, bindings, bool(samples))
        ours = self._triple(ask, bindings) + name
        gone: tuple[str, ...] = ()
        if samples:
            gone = replaced(samples)
            ours += b"".join([b',"%b":%b' % (one.encode(), value) for one, value in samples])
        to_prefill, to_decode = NO_RANKS if seats is SINGLE else ranks(bindings[0], seats)
        drop = dropping(ask, gone) if gone or suspect(ask.body) else None
        decode = splice(ask.raw, ask.body, drop, ours + to_decode)
        prefill = decode
        if ask.stream and ask.path != "/generate":
            drop = dropping(ask, (*gone, OPTIONS))
            prefill = splice(ask.raw, ask.body, drop, b"%b%b,%b" % (ours, to_prefill, USAGE))
        elif to_prefill != to_decode:
            prefill = splice(ask.raw, ask.body, drop, ours + to_prefill)
        merge = ask.path != CHAT and needed(ask)
        return Bodies(prefill, decode, (), (), None, None, None, merge, rids)

    def _samples(self, ask: Ask) -> Members:
        """Members that take the place of the client's, so that each sample is a prompt."""
        return unrolled(ask)

    def _triple(self, ask: Ask, bindings: Sequence[Binding]) -> bytes:
        if not ask.batched and len(bindings) == 1:
            triple = bindings[0].triple
            return _place(triple.host, triple.port) + b"%d" % triple.room
        return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%b' % (
            _json([binding.triple.host for binding in bindings]),
            _json([binding.triple.port for binding in bindings]),
            _json([binding.triple.room for binding in bindings]),
        )

    def _named(
        self, ask: Ask, bindings: Sequence[Binding], unrolled: bool = False
    ) -> tuple[bytes, tuple[str, ...]]:
        """The member that names the request, where the client did not, and the names to abort.

        One of ours is new with each attempt, or the abort of one would end the next. SGLang numbers
        the prompts of a list, and names samples anew: those end with their connection only.
        """
        given, member = ask.body.get("rid"), b""
        if given is None:
            given = f"kvplane-{bindings[0].room:016x}"  # as `name_of`
            member = b',"rid":"%b"' % given.encode()
        if ask.samples > 1 and not unrolled:
            return member, ()
        if isinstance(given, str):
            if not ask.batched and ask.samples == 1:
                return member, (given,)
            return member, tuple(f"{given}_{at}" for at in range(len(bindings)))
        told = given if isinstance(given, list) else []
        return member, tuple(one for one in told if isinstance(one, str))


class SglangLists(Sglang):
    """For engines that give each sample its room of the list."""

    def alone(self, ask: Ask) -> str:
        """All samples can be handed over."""
        return ""

    def _samples(self, ask: Ask) -> Members:
        """The client's own members stay."""
        return []


class SglangCounted(SglangLists):
    """For those whose chat route refuses lists (sglang#9351): one room, counted on from.

    Both dp ranks travel where the prefill has several, for the rooms do not name its rank.
    """

    counted = True

    def _triple(self, ask: Ask, bindings: Sequence[Binding]) -> bytes:
        if ask.batched:
            return super()._triple(ask, bindings)
        return super()._triple(ask, bindings[:1])


class Kvplane(SglangLists):
    """The tiny engine: one name for the whole request, whatever it holds."""

    def _named(
        self, ask: Ask, bindings: Sequence[Binding], unrolled: bool = False
    ) -> tuple[bytes, tuple[str, ...]]:
        given = ask.body.get("rid")
        if given is not None:
            return b"", (given,) if isinstance(given, str) else ()
        name = name_of(bindings[0])
        return b',"rid":"%b"' % name.encode(), (name,)


def _plain(ask: Ask, pair: Binding) -> Bodies:
    """As `write` does it where nothing of the client's has to go, nor names the request."""
    triple, name = pair.triple, f"kvplane-{pair.room:016x}"  # as `name_of`
    ours = b'%b%d,"rid":"%b"' % (_place(triple.host, triple.port), triple.room, name.encode())
    prefill = decode = appended(ask.raw, ours)
    if ask.stream:
        drop = (OPTIONS,).__contains__ if OPTIONS in ask.body else None
        prefill = splice(ask.raw, ask.body, drop, b"%b,%b" % (ours, USAGE))
    return Bodies(prefill, decode, (), (), None, None, None, False, (name,))


def name_of(binding: Binding) -> str:
    """A name nobody else gives, of one length: SGLang ends all that begin with an aborted one."""
    return f"kvplane-{binding.room:016x}"


def ranks(pair: Binding, seats: Seats) -> tuple[bytes, bytes]:
    """Members that pin the dp ranks, for prefill and for decode, behind others."""
    prefill, decode = pair.prefill.dp_rank, pair.decode.dp_rank
    pinned = b',"disagg_prefill_dp_rank":%d' % prefill if seats.prefill_dp > 1 else b""
    return (
        pinned + (b',"routed_dp_rank":%d' % prefill if seats.prefill_dp > 1 else b""),
        pinned + (b',"routed_dp_rank":%d' % decode if seats.decode_dp > 1 else b""),
    )


def dropping(ask: Ask, gone: tuple[str, ...]) -> Callable[[str], bool] | None:
    """Which members of the client go, the reserved ones among them; None where none can."""
    if suspect(ask.body):
        return (lambda name: name in gone or reserved(name)) if gone else reserved
    return gone.__contains__ if gone else None


@lru_cache(maxsize=4096)  # a few engines, over and over
def _place(host: str, port: int | None) -> bytes:
    """The triple but for its room."""
    return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":' % (_json(host), _json(port))


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
