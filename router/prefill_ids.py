"""Prefill ids: what is the engine behind each data-parallel rank of a prefill called?

Edge: asks a prefill's rank directory as vLLM's Mooncake connector serves it (GET /query), when a
request needs it and what is known is no longer fresh. sending.py waits for it. Open it to change
how long an answer is believed. Source: vllm.md section 5.

    {"0": {"engine_id": "a", ...}, "1": {...}}      a restarted prefill has other ids
"""

from __future__ import annotations

import asyncio
import weakref

import msgspec

from kvplane.runtime import Clock
from kvplane.vocabulary import Pod, Stage

from .blame import LegFailed, Side
from .errors import GatewayError
from .facts import BOOTSTRAP_PORT
from .legs import Legs
from .legs_errors import LegError
from .legs_wire import Origin
from .target import Target

FRESH_S = 5.0  # an engine that restarts takes longer to load its weights
ASK_S = 2.0  # a living directory answers in milliseconds
MOST_BYTES = 1024 * 1024
MOST_PODS = 4096  # remembered; a fleet has fewer


class _Rank(msgspec.Struct):
    engine_id: str


_ANSWER = msgspec.json.Decoder(dict[str, _Rank])


class PrefillIds:
    """What was heard, by pod."""

    def __init__(self, legs: Legs, clock: Clock) -> None:
        self._legs, self._clock = legs, clock
        self._heard: dict[Pod, tuple[float, dict[str, str]]] = {}
        self._unheard: dict[Pod, tuple[float, str]] = {}  # since when nothing is, and why
        self._lines: weakref.WeakValueDictionary[Pod, asyncio.Lock]
        self._lines = weakref.WeakValueDictionary()  # one question at a time to each

    async def of(self, target: Target) -> str:
        """The id of this worker's engine. Raises LegFailed where its directory does not tell."""
        pod, rank, came = target.worker.pod, str(target.worker.dp_rank), self._clock.now()
        line = self._lines.setdefault(pod, asyncio.Lock())
        async with line:
            at, ids = self._heard.get(pod, (float("-inf"), {}))
            if self._clock.now() - at > FRESH_S or rank not in ids:
                failed_at, text = self._unheard.get(pod, (came, ""))
                if failed_at > came:  # who waited meanwhile hears the same, not one after the other
                    raise _told(target, text)
                ids = await self._heard_of(target)
        if rank not in ids:
            known = ", ".join(sorted(ids)) or "none"
            raise _failed(target, f"tells nothing of dp rank {rank}; registered: {known}")
        return ids[rank]

    def forget(self, pod: Pod) -> None:
        """An attempt with it failed: its next one asks again."""
        self._heard.pop(pod, None)

    async def _heard_of(self, target: Target) -> dict[str, str]:
        """Ask; what came of it is remembered."""
        pod = target.worker.pod
        if len(self._heard) + len(self._unheard) >= MOST_PODS:
            self._heard.clear()
            self._unheard.clear()
        try:
            ids = await self._ask(target)
        except LegFailed as failed:
            self._unheard[pod] = self._clock.now(), failed.cause.message
            raise
        self._unheard.pop(pod, None)
        self._heard[pod] = self._clock.now(), ids
        return ids

    async def _ask(self, target: Target) -> dict[str, str]:
        leg = self._legs.begin(Origin.parse(directory(target)), "/query", method="GET")
        try:
            async with asyncio.timeout(ASK_S):
                status, body = await leg.head(), await leg.read(MOST_BYTES)
            if status != 200:
                raise _failed(target, f"answered {status}")
            return {rank: told.engine_id for rank, told in _ANSWER.decode(body).items()}
        except LegError as error:
            raise _failed(target, error.detail) from error
        except TimeoutError:
            raise _failed(target, f"did not answer within {ASK_S:g} s") from None
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise _failed(target, f"answered what is no rank table: {error}") from None
        finally:
            leg.abort()


def directory(target: Target) -> str:
    """Where its rank directory answers."""
    host, port = target.bootstrap_host, target.up.bootstrap_port or BOOTSTRAP_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _failed(target: Target, why: str) -> LegFailed:
    text = f"prefill {target.worker}: its rank directory at {directory(target)}/query {why}"
    return _told(target, text)


def _told(target: Target, text: str) -> LegFailed:
    cause = GatewayError("prefill_failed", text, status=503, stage=Stage.RESOLVE_RANK.value)
    return LegFailed(Side.PREFILL, str(target.worker), cause)
