"""Prompts: which token ids will the engine see for this body?

Edge: tokenising runs in threads, never on the event loop. plans.py says what to tokenise,
gateway.py asks once per request, hashing and ranking follow. Open it to change whose tokenizer is
used, or what tokenising may cost.

    body -> plan: texts | ids | chat | a reason -> tokenizer of the model, or recall -> Prompt

Where ids cannot be had the reason says so and the request is routed by load: never silently.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvplane.recall import Recall
from kvplane.tokens import Tokenizer, TokensError

from .plans import BadPrompt, Body, Plan, Prompt, Reason, plan
from .settings import PromptSettings

__all__ = ["BadPrompt", "Prompt", "Prompts", "Reason"]

log = logging.getLogger(__name__)

JOINERS = {"sglang": " ", "vllm": "\n"}  # between text parts of a message; ours is as vLLM's
Result = tuple[tuple[Sequence[int], ...] | None, Reason | None]


class Prompts:
    """Tokenises bodies with each model's own tokenizer. A Part."""

    def __init__(self, settings: PromptSettings | None = None, default: str = "") -> None:
        self._settings = settings or PromptSettings()
        self.recall = Recall(self._settings.recall_bytes)
        self._default = default  # folder or "builtin" for models that name none
        self._folders: dict[str, tuple[str, str]] = {}  # model -> folder, engine
        self._loaded: dict[str, Tokenizer | None] = {}  # folder -> None where it is broken
        self._pool: ThreadPoolExecutor | None = None
        self._places = threading.BoundedSemaphore(self._settings.waiting)

    async def start(self) -> None:
        """Begin to take work."""
        self._pool = ThreadPoolExecutor(self._settings.threads, thread_name_prefix="prompts")
        if self._default:
            self._pool.submit(self._prepare, self._default)

    async def stop(self) -> None:
        """Let go of the threads; what waits is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def learn(self, model: str, folder: str = "", engine: str = "kvplane") -> None:
        """A model's tokenizer folder, and whose way to join text parts it is. Loaded at once."""
        folder = folder or self._folders.get(model, ("", ""))[0]
        self._folders[model] = (folder, engine)
        if folder and self._pool is not None:
            self._pool.submit(self._prepare, folder)

    async def tokenise(
        self, path: str, body: Body, model: str = "", most_chars: int = 0, long: bool = False
    ) -> Prompt:
        """Token ids of each prompt in the body; `model` as resolved, "" = the only one.

        `most_chars`: more cannot fit the model, so is left to the engine to refuse; 0 = not known.
        `long`: look at the body in a thread. Raises BadPrompt. Everything else that goes wrong is
        a reason. Bounded in time and number.
        """
        found = await asyncio.to_thread(plan, path, body) if long else plan(path, body)
        if found.reason is not None or found.ids is not None:
            return _prompt(body, found, found.ids, found.reason)
        folder, engine = self._home(model)
        if not folder:
            return _prompt(body, found, None, "no_tokenizer")
        most = self._settings.most_chars
        if found.size > min(most, most_chars or most):
            return _prompt(body, found, None, "too_large")
        work = self._begin(found, folder, JOINERS.get(engine, "\n"))
        if work is None:
            return _prompt(body, found, None, "busy")
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(work), self._settings.deadline_s)
        except TimeoutError:
            return _prompt(body, found, None, "slow")
        return _prompt(body, found, *result)

    def _begin(self, found: Plan, folder: str, joiner: str) -> Future[Result] | None:
        """Hand the work to a thread; None where too much waits already."""
        if self._pool is None or not self._places.acquire(blocking=False):
            return None
        work = self._pool.submit(self._ids_of, found, folder, joiner)
        work.add_done_callback(lambda _: self._places.release())  # also when it was cancelled
        return work

    def _home(self, model: str) -> tuple[str, str]:
        """Folder and engine of a model."""
        only = next(iter(self._folders.values())) if len(self._folders) == 1 else ("", "")
        folder, engine = self._folders.get(model, only if not model else ("", ""))
        return folder or self._default, engine

    def _ids_of(self, found: Plan, folder: str, joiner: str) -> Result:
        """In a thread: load the tokenizer where it is new, then tokenise."""
        tokenizer = self._tokenizer(folder)
        if tokenizer is None:
            return None, "broken_tokenizer"
        texts, special, messages = found.texts, found.special, found.messages
        try:
            if messages is not None:  # the template writes its own special tokens
                text = tokenizer.render(messages, found.tools, found.open_turn, found.extra, joiner)
                texts, special = (text,), False
            return tuple(self.recall.encode_many(tokenizer, texts, special)), None
        except TokensError as error:
            if messages is None:
                return None, "not_unicode"
            log.debug("template refused folder=%s error=%s", folder, error)
            return None, "template"  # the engine's template will say the same to the client

    def _prepare(self, folder: str) -> None:
        """In a thread, before the first request: all that takes long."""
        tokenizer = self._tokenizer(folder)
        if tokenizer is not None and self._settings.recall_bytes:
            log.debug("seams folder=%s %s", folder, tokenizer.seams)

    def _tokenizer(self, folder: str) -> Tokenizer | None:
        if folder not in self._loaded:
            try:
                self._loaded.setdefault(folder, Tokenizer.load(folder))  # two may load: one stays
            except TokensError as error:
                log.error("tokenizer unusable folder=%s error=%s action=by-load", folder, error)
                self._loaded[folder] = None
        return self._loaded[folder]


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
