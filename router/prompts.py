"""Prompts: which token ids will the engine see for this body?

Edge. plans.py says what to tokenise, tokenisers.py does it, off the event loop; engine_tokens.py
asks engines where there is no folder; gateway.py asks once per request, hashing and ranking follow.
Open it to change whose tokenizer is used.

    body -> plan: texts | ids | chat | a reason -> tokenizer of the model -> Prompt
                                                \\-- none, or found wrong: an engine's own /tokenize

Where ids cannot be had the reason says so and the request is routed by load: never silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvplane.recall import Recall

from .plans import BadPrompt, Body, Kind, Plan, Prompt, Reason, plan
from .settings import PromptSettings
from .tokenisers import Asked, Result, Tokenisers

__all__ = ["BadPrompt", "Prompt", "Prompts", "Reason"]

MOST_MODELS = 256  # remembered though nobody serves them; names come from engines
NAMED = frozenset({"lora_path", "cache_salt", "extra_key"})  # members that keep prompts apart
UNTOLD = Prompt(None, "no_tokenizer")
ASKED: tuple[Reason, ...] = ("no_tokenizer", "broken_tokenizer", "self_check")  # of an engine then


class Source(Protocol):
    """Who else can tell tokens; engine_tokens.py is one."""

    def tells(self, model: str) -> bool: ...  # is it of use to ask now?
    async def tokenise(self, found: Plan, body: Body, model: str) -> Result: ...


@dataclass(slots=True)
class Home:
    """Where the tokens of one model come from."""

    folder: str = ""
    engines: dict[str, str] = field(default_factory=dict)  # pod -> engine: whose ways count
    adapters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # pod -> further names
    wrong: dict[Kind, set[str]] = field(default_factory=dict)  # kinds that pods tokenise otherwise
    families: tuple[str, ...] = ("kvplane",)  # of the engines, each once


class Prompts:
    """Tokenises bodies with each model's own tokenizer. A Part."""

    def __init__(self, settings: PromptSettings | None = None, default: str = "") -> None:
        self._settings = settings or PromptSettings()
        self._tokenisers = Tokenisers(self._settings)
        self.source: Source | None = None  # asked where no folder tells
        self._default = default  # folder or "builtin" for models that name none
        self._homes: dict[str, Home] = {}  # by model

    async def start(self) -> None:
        """Begin to take work."""
        await self._tokenisers.start()
        self._tokenisers.load(self._default)

    async def stop(self) -> None:
        """Let go of the threads; what waits is dropped."""
        await self._tokenisers.stop()

    @property
    def recall(self) -> Recall:
        """What is remembered of earlier prompts."""
        return self._tokenisers.recall

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
        home.families = _families(home)
        self._tokenisers.load(home.folder)
        for name in [name for name, one in self._homes.items() if not one.engines]:
            if len(self._homes) > MOST_MODELS:
                del self._homes[name]

    def forget(self, pod: str) -> None:
        """A pod left. What it said of its model's folder stays for the next one."""
        for home in self._homes.values():
            home.engines.pop(pod, None)
            home.adapters.pop(pod, None)
            home.families = _families(home)
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
        self, path: str, body: Body, model: str = "", most_chars: int = 0, own: bool = False
    ) -> Prompt:
        """As `look` tells it, waited for."""
        found = self.look(path, body, model, most_chars, own=own)
        return found if isinstance(found, Prompt) else await found

    def untold(self, model: str) -> Prompt | None:
        """What `look` would say of a plain chat for a model by its own name, where it need not
        look: nobody tells tokens. None where it has to."""
        home = self._homes.get(model)
        if home is None or home.folder or self._default:
            return None
        if self.source is not None and home.engines and self.source.tells(model):
            return None
        return UNTOLD

    def look(
        self,
        path: str,
        body: Body,
        model: str = "",
        most_chars: int = 0,
        long: bool = False,
        own: bool = False,
    ) -> Prompt | Awaitable[Prompt]:
        """Token ids of each prompt in the body; `model` or an adapter of it, "" = the only one.
        At once where they are known or cannot be had; else to be waited for.

        `most_chars`: more cannot fit the model, so is left to the engine to refuse; 0 = not known.
        `long`: look at the body in a thread. `own`: by our tokenizer, whatever is held against it.
        Raises BadPrompt. Everything else that goes wrong is a reason. Bounded in time and number.
        """
        if long:
            return self._look_long(path, body, model, most_chars, own)
        return self._told(plan(path, body), body, model, most_chars, own)

    async def _look_long(
        self, path: str, body: Body, model: str, most_chars: int, own: bool
    ) -> Prompt:
        found = await asyncio.to_thread(plan, path, body)
        told = self._told(found, body, model, most_chars, own)
        return told if isinstance(told, Prompt) else await told

    def _told(
        self, found: Plan, body: Body, model: str, most_chars: int, own: bool
    ) -> Prompt | Awaitable[Prompt]:
        if found.reason is not None or found.ids is not None:
            return _prompt(body, found, found.ids, found.reason)
        model, home = self._of(model)
        folder = home.folder or self._default
        size = found.size if folder else 0
        reason = self._hindered(found, size, home, most_chars, own) if folder else "no_tokenizer"
        asked = None
        if reason is None:
            asked = self._tokenisers.ask(found, size, folder, home.families)
            if asked.ids is not None:
                return _prompt(body, found, asked.ids, None)
        elif reason not in ASKED or own or not self._others(model, home):
            return _prompt(body, found, None, reason)
        return self._waited(found, body, model, home, asked, reason, own)

    def _hindered(
        self, found: Plan, size: int, home: Home, most_chars: int, own: bool
    ) -> Reason | None:
        """Why the tokenizer is not asked that there is."""
        if home.wrong and home.wrong.get(found.kind) and not own:
            return "self_check"
        most = self._settings.most_chars
        return "too_large" if size > min(most, most_chars or most) else None

    def _others(self, model: str, home: Home) -> bool:
        """Is there an engine to ask?"""
        return self.source is not None and bool(home.engines) and self.source.tells(model)

    async def _waited(
        self,
        found: Plan,
        body: Body,
        model: str,
        home: Home,
        asked: Asked | None,
        reason: Reason | None,
        own: bool,
    ) -> Prompt:
        """By a tokenizer of ours, else by an engine."""
        ids = None
        if asked is not None:
            ids, reason = await self._tokenisers.ids(found, asked)
        if ids is None and reason in ASKED and not own and self._others(model, home):
            assert self.source is not None, "there are others"
            told = await self.source.tokenise(found, body, model)
            ids, reason = (None, reason) if told[1] == "no_tokenizer" else told
        return _prompt(body, found, ids, reason)


def _families(home: Home) -> tuple[str, ...]:
    return tuple(sorted({*home.engines.values()})) or ("kvplane",)


def _prompt(
    body: Body, found: Plan, ids: tuple[Sequence[int], ...] | None, reason: Reason | None
) -> Prompt:
    if NAMED.isdisjoint(body):
        return Prompt(ids, reason, found.batched)
    adapter, salt = body.get("lora_path"), body.get("cache_salt") or body.get("extra_key")
    return Prompt(
        ids,
        reason,
        found.batched,
        adapter if isinstance(adapter, str) else "",
        salt if isinstance(salt, str) else "",
    )
