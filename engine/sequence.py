"""Sequence: from a prompt's pages to the answer's tokens.

Edge. The two halves that prefill.py, decode.py and a `both` engine are made of; model.py computes,
unit.py keeps the pages. Open it to change how a sequence takes turns with others.

    fill     prompt, a slice at a time, behind what was found in the cache   -> first token
    answer   one token after the other until it ends; full blocks are published as they fill
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvplane.tokens import Tokenizer

from .asks import Ask
from .cache import Lease
from .logprobs import Likely, likely
from .metrics import EngineMetrics
from .model import PAGE_TOKENS, Context
from .pieces import Piece, Written
from .unit import Unit

Emit = Callable[[Piece], None]


class Sequences:
    """Computes sequences of any dp rank; no state of its own."""

    def __init__(self, tokenizer: Tokenizer, slice_tokens: int, metrics: EngineMetrics) -> None:
        self._tokenizer, self._slice, self._metrics = tokenizer, slice_tokens, metrics

    async def local(self, unit: Unit, ask: Ask, emit: Emit) -> None:
        """Prompt and answer in one engine."""
        lease = await unit.lease(ask.ids, ask.max_new, ask.salt)
        try:
            context = await self.fill(unit, lease)
            first = await unit.compute.run(unit.model.answer, context)
            cached, inputs = lease.cached_tokens, await self.inputs(unit, ask)
            await self.answer(unit, lease, context, first, ask, emit, cached, inputs)
        finally:
            unit.give_back(lease)

    async def fill(self, unit: Unit, lease: Lease) -> Context:
        """The KV of all prompt tokens; what was cached is not computed again."""
        context = await unit.open(lease, lease.cached_tokens)
        prompt = tuple(lease.tokens)
        for at in range(lease.cached_tokens, len(prompt), self._slice):
            await unit.compute.run(unit.model.feed, context, prompt[at : at + self._slice])
            unit.computed(lease, context.length)
        self._metrics.tokens.labels("cached").inc(lease.cached_tokens)
        self._metrics.tokens.labels("prompt").inc(len(prompt) - lease.cached_tokens)
        return context

    async def answer(
        self,
        unit: Unit,
        lease: Lease,
        context: Context,
        first: int,
        ask: Ask,
        emit: Emit,
        cached_tokens: int,
        inputs: tuple[Likely, ...] = (),
    ) -> None:
        """Emit `first` and what follows it. The last token's KV is never needed."""
        written = Written(self._tokenizer.decode, ask.stops, ask.max_new, ask.ignore_eos)

        def step(token: int) -> int:
            unit.model.feed(context, (token,))
            return unit.model.answer(context)

        token = first
        while True:
            piece = written.add(ask.index, token, cached_tokens)
            if ask.wanted is not None:
                told = await unit.compute.run(self._likely, unit, context, token, ask.wanted.tops)
                piece, inputs = replace(piece, likely=told, inputs=inputs), ()
            emit(piece)
            self._metrics.tokens.labels("answer").inc()
            if piece.finish is not None:
                return
            lease.tokens.append(token)
            token = await unit.compute.run(step, token)
            unit.computed(lease, context.length)

    async def inputs(self, unit: Unit, ask: Ask) -> tuple[Likely, ...]:
        """How likely the prompt's own tokens were, where that is wanted. Computed aside, in memory
        of its own: of tokens in the cache only the KV is left."""
        if ask.wanted is None or ask.wanted.start is None:
            return ()
        pages = range(unit.cache.pages_for(len(ask.ids)))
        context = unit.model.open(unit.model.pool(len(pages)), pages)
        found: list[Likely] = []
        for at in range(0, len(ask.ids), PAGE_TOKENS):
            some = ask.ids[at : at + PAGE_TOKENS]
            found += await unit.compute.run(self._read, unit, context, some, ask.wanted.tops)
        return tuple(found[ask.wanted.start :])

    def _read(self, unit: Unit, context: Context, ids: Sequence[int], tops: int) -> list[Likely]:
        found = []
        for token in ids:
            found.append(self._likely(unit, context, token, tops))
            unit.model.feed(context, (token,))
        return found

    def _likely(self, unit: Unit, context: Context, token: int, tops: int) -> Likely:
        """Of a token behind what was fed."""
        weights = unit.model.weigh(context) if context.length else None
        return likely(weights, token, tops, self._tokenizer.decode)


def pages_of_prompt(unit: Unit, lease: Lease, ids: Sequence[int]) -> list[int]:
    """The pages that hold the prompt, the last one maybe in part."""
    return lease.pages[: unit.cache.pages_for(len(ids))]
