"""Tokenisers: the token ids of a plan, by a folder that is here.

Edge: threads and what is remembered. prompts.py says whose folder; plans.py what; ways.py what an
engine makes of a chat. Open it to change what tokenising may cost, or what is kept of it.

    plan --asked before--> ids                              on the event loop, microseconds
         \\--short--> a thread of its own   \\
         \\--long---> a few others          --> text --recall--> ids
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from kvplane.recall import Recall, Shelf
from kvplane.tokens import EncoderFailed, Tokenizer, TokensError

from .plans import Plan, Reason
from .settings import PromptSettings
from .ways import flat, joiner, seen

log = logging.getLogger(__name__)

Result = tuple[tuple[Sequence[int], ...] | None, Reason | None]
Key = tuple[str, tuple[str, ...], bytes]
SHARE = 8  # of what may be remembered, for short prompts as a whole


class Asked(msgspec.Struct, eq=False, gc=False):
    """A question for ids."""

    folder: str
    engines: tuple[str, ...]
    short: bool
    key: Key | None = None  # under which the answer is remembered
    ids: tuple[Sequence[int], ...] | None = None  # as they were told before


class Lane:
    """Threads for prompts of one size: a short one never waits behind long ones."""

    def __init__(self, threads: int, waiting: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self.places = threading.BoundedSemaphore(waiting)


class Tokenisers:
    """Every folder's tokenizer. A Part."""

    def __init__(self, settings: PromptSettings) -> None:
        self._settings = settings
        self.recall = Recall(settings.recall_bytes)
        self._same: Shelf[Key, tuple[bytes, ...]] = Shelf(settings.recall_bytes // SHARE)
        self._loaded: dict[str, Tokenizer | None] = {}  # folder -> None where it is broken
        self._lanes: tuple[Lane, ...] = ()  # short prompts, long ones

    async def start(self) -> None:
        """Begin to take work."""
        settings = self._settings
        self._lanes = Lane(1, settings.waiting), Lane(settings.threads, settings.waiting)

    async def stop(self) -> None:
        """Let go of the threads; what waits is dropped."""
        for lane in self._lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        self._lanes = ()

    def load(self, folder: str) -> None:
        """Soon to be asked for. One that was broken is looked at again."""
        if self._loaded.get(folder, ...) is None:
            del self._loaded[folder]
        if folder and self._lanes:
            self._lanes[1].pool.submit(self._prepare, folder)

    def ask(self, found: Plan, size: int, folder: str, engines: tuple[str, ...]) -> Asked:
        """What will be asked, and its ids where they were told before. `size`: the plan's."""
        asked = Asked(folder, engines, size <= self._settings.short_chars)
        asked.key = self._key(found, asked)
        if asked.key is not None and (same := self._same.one(asked.key)) is not None:
            self.recall.prompts["same"] += 1
            asked.ids = tuple([array("I", packed) for packed in same])
        return asked

    async def ids(self, found: Plan, asked: Asked) -> Result:
        """Ids of every prompt of a plan as all these engines see them, or why not."""
        work = self._begin(found, asked)
        if work is None:
            return None, "busy"
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                made, reason = await asyncio.wrap_future(work)
        except TimeoutError:
            return None, "slow"
        if asked.key is not None and made is not None and self._lasts(asked.folder):
            packed = tuple(array("I", ids).tobytes() for ids in made)
            self._same.put(asked.key, packed, len(asked.key[2]) + sum(map(len, packed)))
        return made, reason

    def _key(self, found: Plan, asked: Asked) -> Key | None:
        """All that decides the ids of a short prompt."""
        if not asked.short or not self._same.most_bytes:
            return None
        chat = found.messages, found.tools, found.open_turn, found.extra, found.choice, found.more
        try:
            text = msgspec.json.encode((found.texts, found.special, chat))
        except UnicodeEncodeError:
            return None
        # Tools and the like are not counted as size.
        long = len(text) >= 4 * self._settings.short_chars
        return None if long else (asked.folder, asked.engines, text)

    def _lasts(self, folder: str) -> bool:
        tokenizer = self._loaded.get(folder)
        return tokenizer is not None and tokenizer.timeless

    def _begin(self, found: Plan, asked: Asked) -> Future[Result] | None:
        """Hand the work to a thread; None where too much waits already."""
        if not self._lanes:
            return None
        lane = self._lanes[not asked.short]
        if not lane.places.acquire(blocking=False):
            return None
        work = lane.pool.submit(self._made, found, asked.folder, asked.engines)
        work.add_done_callback(lambda _: lane.places.release())  # also when it was cancelled
        return work

    # -- in a thread

    def _made(self, found: Plan, folder: str, engines: Collection[str]) -> Result:
        """Load the tokenizer where it is new, then tokenise."""
        tokenizer = self._tokenizer(folder)
        if tokenizer is None:
            return None, "broken_tokenizer"
        texts, special = found.texts, found.special
        try:
            if found.messages is not None:  # the template writes its own special tokens
                rendered = {_rendered(tokenizer, found, engine) for engine in engines}
                if len(rendered) > 1:
                    return None, "mixed_engines"
                texts, special = tuple(rendered), False
            return tuple(self.recall.encode_many(tokenizer, texts, special)), None
        except EncoderFailed as error:
            log.debug("tokenizer failed folder=%s error=%s", folder, error)
            return None, "broken_tokenizer"
        except TokensError as error:
            if found.messages is None:
                return None, "not_unicode"
            log.debug("template refused folder=%s error=%s", folder, error)
            return None, "template"  # the engine's template will say the same to the client

    def _prepare(self, folder: str) -> None:
        """Before the first request: all that takes long."""
        tokenizer = self._tokenizer(folder)
        if tokenizer is not None and self._settings.recall_bytes:
            log.debug("seams folder=%s %s", folder, tokenizer.seams)

    def _tokenizer(self, folder: str) -> Tokenizer | None:
        try:
            return self._loaded[folder]
        except KeyError:
            pass
        try:
            return self._loaded.setdefault(
                folder, Tokenizer.load(folder)
            )  # two may load: one stays
        except TokensError as error:
            log.error("tokenizer unusable folder=%s error=%s action=by-load", folder, error)
            return self._loaded.setdefault(folder, None)


def _rendered(tokenizer: Tokenizer, found: Plan, engine: str) -> str:
    """The text one engine makes of a chat. Raises TokensError."""
    chat = seen(engine, found)
    try:
        return _text(tokenizer, chat, engine)
    except TokensError:
        if (other := flat(engine, chat)) == chat:
            raise
        return _text(tokenizer, other, engine)


def _text(tokenizer: Tokenizer, chat: Plan, engine: str) -> str:
    messages = chat.messages or []
    return tokenizer.render(messages, chat.tools, chat.open_turn, chat.extra, joiner(engine))
