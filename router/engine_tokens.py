"""Engine tokens: what does an engine itself say the tokens of this prompt are?

Edge: POST /tokenize over the legs, as SGLang, vLLM and our own engine have it. prompts.py asks
where there is no tokenizer here, self_check.py to compare. Open it to change whom a question goes
to, what is remembered, or what an answer may look like.

    {"model", "prompt", "add_special_tokens"}            -> {"tokens": [..], "count": ..}
    {"model", "messages", "tools", "tool_choice", ...}   -> the same; SGLang knows it since 2026

One that does not answer is left alone for a moment, one that has no such route for longer.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec

from kvplane.recall import Shelf
from kvplane.runtime import Clock
from kvplane.vocabulary import Generation, Pod, Role

from .fleet import Fleet
from .legs import Legs
from .legs_errors import LegError
from .legs_wire import Origin
from .plans import Body, Plan, Reason
from .settings import SourceSettings
from .target import Target

log = logging.getLogger(__name__)

PATH = "/tokenize"
HEADERS = [(b"content-type", b"application/json")]
MEMBERS = (  # of a chat's body, that decide its tokens
    "messages", "tools", "tool_choice", "add_generation_prompt", "chat_template_kwargs",
    "documents", "reasoning_effort",
)  # fmt: skip
IN_THREAD_BYTES = 256 * 1024  # longer questions and answers are not made on the event loop
LOOK_AGAIN_S = 1.0  # whether somebody by now tells what he holds of a model
ABSENT = (404, 405, 501, 401, 403)  # no such route, or none for us
Key = tuple[Pod, Generation | None, bytes]


class Untold(Exception):
    """No tokens from this engine; `reason` as it labels the request, the text says why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason: Reason = reason


class _Told(msgspec.Struct):
    tokens: list[int]


_read = msgspec.json.Decoder(_Told)


class EngineTokens:
    """Asks engines for tokens; bounded in time, number and memory."""

    def __init__(
        self,
        fleet: Fleet,
        legs: Legs,
        clock: Clock,
        settings: SourceSettings | None = None,
        key: str = "",  # of the engines
    ) -> None:
        self._fleet, self._legs, self._clock = fleet, legs, clock
        self._settings = settings or SourceSettings()
        bearer = [(b"authorization", b"Bearer " + key.encode())] if key else []
        self._headers = [*HEADERS, *bearer]
        self._aside: dict[Pod, tuple[float, Reason]] = {}  # until when, and why
        self._told: Shelf[Key, bytes] = Shelf(self._settings.remembered_bytes)
        self._useless: dict[str, float] = {}  # models nobody tells blocks of, until looked again
        self._running = 0
        self.counted: Counter[str] = Counter()  # questions by what came of them

    def tells(self, model: str) -> bool:
        """Does anybody hold blocks that tokens could be compared with, as far as is known?"""
        again = self._useless.get(model)
        return again is None or again <= self._clock.now()

    async def tokenise(
        self, found: Plan, body: Body, model: str
    ) -> tuple[tuple[Sequence[int], ...] | None, Reason | None]:
        """Ids of every prompt, or why not; "no_tokenizer" where there is nobody to ask."""
        settings = self._settings
        if not self.tells(model):
            return None, "no_tokenizer"
        asked = questions(found, body, model)
        if len(asked) > settings.most_texts or found.size > settings.most_chars:
            return None, "too_large"
        if self._running >= settings.together:
            return None, "busy"
        self._running += 1
        try:
            async with asyncio.timeout(settings.deadline_s):
                return tuple([await self._one(one, model) for one in asked]), None
        except TimeoutError:
            return None, "slow"
        except UnicodeEncodeError:
            return None, "not_unicode"
        except Untold as error:
            log.debug("no tokens model=%s why=%s action=by-load", model, error)
            return None, error.reason
        finally:
            self._running -= 1

    async def ask(self, url: str, raw: bytes) -> array[int]:
        """The tokens one engine tells, asked now. Raises Untold."""
        try:
            tokens = await self._ask(url, raw)
        except Untold as error:
            self.counted[error.reason] += 1
            raise
        self.counted["told"] += 1
        return tokens

    async def _ask(self, url: str, raw: bytes) -> array[int]:
        leg = self._legs.begin(Origin.parse(url), PATH, self._headers, raw)
        try:
            async with asyncio.timeout(self._settings.attempt_s):
                status = await leg.head()
                data = await leg.read(self._settings.most_bytes)
        except TimeoutError:
            why = f"POST {url}{PATH}: no answer within {self._settings.attempt_s:g} s"
            raise Untold("engine_silent", why) from None
        except LegError as error:
            raise Untold("engine_silent", f"POST {url}{PATH}: {error}") from error
        finally:
            leg.abort()
        if status != 200:
            reason: Reason = "no_route" if status in ABSENT else "engine_refused"
            reason = "engine_silent" if status >= 500 and status != 501 else reason
            raise Untold(reason, f"POST {url}{PATH} answered {status}")
        long = len(data) > IN_THREAD_BYTES
        return await asyncio.to_thread(_tokens, url, data) if long else _tokens(url, data)

    async def _one(self, question: Body, model: str) -> Sequence[int]:
        """From whoever is asked for this prompt, else from the next one."""
        targets = self._askable(model)
        raw = await _written(question, len(question.get("prompt", "")) > IN_THREAD_BYTES)
        first = zlib.crc32(raw) % len(targets)  # the same prompt goes to the same engine
        order = [*targets[first:], *targets[:first]][: self._settings.attempts]
        why = Untold("engine_silent", "nobody was asked")
        for target in order:
            key = target.up.pod, target.up.generation, raw
            if (told := self._told.one(key)) is not None:
                self.counted["remembered"] += 1
                return array("I", told)
            try:
                tokens = await self.ask(target.url, raw)
            except Untold as error:
                if error.reason == "engine_refused":
                    raise  # the next one would say the same
                self._put_aside(target.up.pod, error.reason)
                why = error
                continue
            packed = tokens.tobytes()
            self._told.put(key, packed, len(raw) + len(packed))
            return tokens
        raise why

    def _askable(self, model: str) -> list[Target]:
        """One target per pod that serves the model: prefills and unified workers, else decodes.
        Raises Untold where there is none, or where nobody tells what he holds: then tokens are of
        no use."""
        serving = [
            target
            for target in self._fleet.targets()
            if target.worker.dp_rank == 0 and (not model or target.serves(model))
        ]
        if not any(target.up.events for target in serving):
            self._useless = {one: at for one, at in self._useless.items() if at > self._clock.now()}
            self._useless[model] = self._clock.now() + LOOK_AGAIN_S
            raise Untold("no_tokenizer", f"no engine with events serves {model!r}")
        now, well = self._clock.now(), [target for target in serving if target.usable]
        self._aside = {pod: told for pod, told in self._aside.items() if told[0] > now}
        free = [target for target in well if target.up.pod not in self._aside]
        if not free:
            reasons = {self._aside[one.up.pod][1] for one in well if one.up.pod in self._aside}
            absent = reasons == {"no_route"}
            raise Untold("no_route" if absent else "engine_silent", f"engines of {model!r}: {well}")
        return [target for target in free if target.role is not Role.DECODE] or free

    def _put_aside(self, pod: Pod, reason: Reason) -> None:
        without = reason == "no_route"
        wait = self._settings.without_s if without else self._settings.aside_s
        self._aside[pod] = self._clock.now() + wait, reason
        log.info("engine tells no tokens pod=%s why=%s action=ask others %g s", pod, reason, wait)


def questions(found: Plan, body: Body, model: str) -> list[Body]:
    """What to send for a planned body: one question for each prompt."""
    named = {"model": model} if model else {}
    if found.messages is not None:
        return [{**named, **{name: body[name] for name in MEMBERS if name in body}}]
    special = {"add_special_tokens": found.special}
    return [{**named, "prompt": text, **special} for text in found.texts]


async def _written(question: Body, long: bool) -> bytes:
    encode = msgspec.json.encode
    return await asyncio.to_thread(encode, question) if long else encode(question)


def _tokens(url: str, data: bytes) -> array[int]:
    try:
        return array("I", _read.decode(data).tokens)
    except (msgspec.DecodeError, OverflowError, RecursionError) as error:
        why = f"POST {url}{PATH}: no list of token ids: {error}"
        raise Untold("engine_refused", why) from None
