"""Prompts: which token ids will the engine see for this body?

Edge: tokenising runs in threads, never on the event loop. plans.py says what to tokenise, ways.py
what an engine makes of a chat, engine_tokens.py asks engines where there is no folder; gateway.py
asks once per request, hashing and ranking follow. Open it to change whose tokenizer is used, or
what tokenising may cost.

    body -> plan: texts | ids | chat | a reason -> tokenizer of the model, or recall -> Prompt
                                                \\-- none, or found wrong: an engine's own /tokenize

Where ids cannot be had the reason says so and the request is routed by load: never silently.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from kvplane.recall import Recall
from kvplane.tokens import Tokenizer, TokensError

from .plans import BadPrompt, Body, Kind, Plan, Prompt, Reason, plan
from .settings import PromptSettings
from .ways import flat, joiner, seen

__all__ = ["BadPrompt", "Prompt", "Prompts", "Reason"]

log = logging.getLogger(__name__)

Result = tuple[tuple[Sequence[int], ...] | None, Reason | None]
MOST_MODELS = 256  # remembered though nobody serves them; names come from engines
ASKED: tuple[Reason, ...] = ("no_tokenizer", "broken_tokenizer", "self_check")  # of an engine then


class Source(Protocol):
    """Who else can tell tokens; engine_tokens.py is one."""

    async def tokenise(self, found: Plan, body: Body, model: str) -> Result: ...


@dataclass(slots=True)
class Home:
    """Where the tokens of one model come from."""

    folder: str = ""
    engines: dict[str, str] = field(default_factory=dict)  # pod -> engine: whose ways count
    adapters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # pod -> further names
    wrong: dict[Kind, set[str]] = field(default_factory=dict)  # kinds that pods tokenise otherwise


class Lane:
    """Threads for prompts of one size: a short one never waits behind long ones."""

    def __init__(self, threads: int, waiting: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self.places = threading.BoundedSemaphore(waiting)


class Prompts:
    """Tokenises bodies with each model's own tokenizer. A Part."""

    def __init__(self, settings: PromptSettings | None = None, default: str = "") -> None:
        self._settings = settings or PromptSettings()
        self.recall = Recall(self._settings.recall_bytes)
        self.source: Source | None = None  # asked where no folder tells
        self._default = default  # folder or "builtin" for models that name none
        self._homes: dict[str, Home] = {}  # by model
        self._loaded: dict[str, Tokenizer | None] = {}  # folder -> None where it is broken
        self._lanes: tuple[Lane, ...] = ()  # short prompts, long ones

    async def start(self) -> None:
        """Begin to take work."""
        settings = self._settings
        self._lanes = Lane(1, settings.waiting), Lane(settings.threads, settings.waiting)
        self._load(self._default)

    async def stop(self) -> None:
        """Let go of the threads; what waits is dropped."""
        for lane in self._lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        self._lanes = ()

    # -- what is known of models

    def learn(
        self,
        model: str,
        folder: str = "",
        engine: str = "kvplane",
        pod: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        """A pod serves a model and adapters of it: the folder of its tokenizer, and whose ways
        with chats count. Loaded at once; a folder that was broken is looked at again."""
        if pod:
            self.forget(pod)
        home = self._homes.setdefault(model, Home())
        home.folder = folder or home.folder
        home.engines[pod], home.adapters[pod] = engine, tuple(adapters)
        if self._loaded.get(home.folder, ...) is None:
            del self._loaded[home.folder]
        self._load(home.folder)
        for name in [name for name, one in self._homes.items() if not one.engines]:
            if len(self._homes) > MOST_MODELS:
                del self._homes[name]

    def forget(self, pod: str) -> None:
        """A pod left. What it said of its model's folder stays for the next one."""
        for home in self._homes.values():
            home.engines.pop(pod, None)
            home.adapters.pop(pod, None)
            for pods in home.wrong.values():
                pods.discard(pod)

    def distrust(self, model: str, kind: Kind, pod: str, wrong: bool = True) -> None:
        """The engine of a pod makes other tokens of such prompts than we do (or no longer): they
        are asked of engines."""
        pods = self._of(model)[1].wrong.setdefault(kind, set())
        (pods.add if wrong else pods.discard)(pod)

    def _of(self, model: str) -> tuple[str, Home]:
        """A model, or an adapter's base, and where it has its tokens from; "" is the only one."""
        if (home := self._homes.get(model)) is not None:
            return model, home
        if not model and len(self._homes) == 1:
            return next(iter(self._homes.items()))
        for base, home in self._homes.items():
            if model and any(model in names for names in home.adapters.values()):
                return base, home
        return model, Home()

    # -- what is asked

    async def tokenise(
        self,
        path: str,
        body: Body,
        model: str = "",
        most_chars: int = 0,
        long: bool = False,
        own: bool = False,
    ) -> Prompt:
        """Token ids of each prompt in the body; `model` or an adapter of it, "" = the only one.

        `most_chars`: more cannot fit the model, so is left to the engine to refuse; 0 = not known.
        `long`: look at the body in a thread. `own`: by our tokenizer, whatever is held against it.
        Raises BadPrompt. Everything else that goes wrong is a reason. Bounded in time and number.
        """
        found = await asyncio.to_thread(plan, path, body) if long else plan(path, body)
        if found.reason is not None or found.ids is not None:
            return _prompt(body, found, found.ids, found.reason)
        model, home = self._of(model)
        ids, reason = await self._here(found, home, most_chars, own)
        ask = ids is None and reason in ASKED and home.engines and not own
        if ask and self.source is not None:
            told = await self.source.tokenise(found, body, model)
            ids, reason = (None, reason) if told[1] == "no_tokenizer" else told
        return _prompt(body, found, ids, reason)

    async def _here(self, found: Plan, home: Home, most_chars: int, own: bool) -> Result:
        """By a tokenizer of ours."""
        folder = home.folder or self._default
        if not folder:
            return None, "no_tokenizer"
        if home.wrong.get(found.kind) and not own:
            return None, "self_check"
        most = self._settings.most_chars
        if found.size > min(most, most_chars or most):
            return None, "too_large"
        work = self._begin(found, folder, tuple({*home.engines.values()}) or ("kvplane",))
        if work is None:
            return None, "busy"
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            return None, "slow"

    def _begin(self, found: Plan, folder: str, engines: Collection[str]) -> Future[Result] | None:
        """Hand the work to a thread; None where too much waits already."""
        if not self._lanes:
            return None
        lane = self._lanes[found.size > self._settings.short_chars]
        if not lane.places.acquire(blocking=False):
            return None
        work = lane.pool.submit(self._ids_of, found, folder, engines)
        work.add_done_callback(lambda _: lane.places.release())  # also when it was cancelled
        return work

    def _load(self, folder: str) -> None:
        if folder and self._lanes:
            self._lanes[1].pool.submit(self._prepare, folder)

    # -- in a thread

    def _ids_of(self, found: Plan, folder: str, engines: Collection[str]) -> Result:
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


def _prompt(
    body: Body, found: Plan, ids: tuple[Sequence[int], ...] | None, reason: Reason | None
) -> Prompt:
    adapter, salt = body.get("lora_path"), body.get("cache_salt") or body.get("extra_key")
    return Prompt(
        ids,
        reason,
        found.batched,
        adapter if isinstance(adapter, str) else "",
        salt if isinstance(salt, str) else "",
    )
