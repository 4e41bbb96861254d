"""Pairs of engines in this process: a prefill, a decode, and what is asked of both at once."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kit.wait import until
from kvplane.engine import blas
from kvplane.engine.model import PAGE_TOKENS, Model
from kvplane.vocabulary import Role

Start = Callable[..., Awaitable[Any]]
ROOMS = itertools.count(1000)


def prompt(tokens: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(256) for _ in range(tokens)]


def ask(tokens: int, seed: int = 0, new: int = 24) -> dict[str, Any]:
    """A body of /generate."""
    return asked(prompt(tokens, seed), new)


def asked(ids: list[int] | list[list[int]], new: int = 24) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": new, "ignore_eos": True}}


@cache
def _model() -> Model:
    blas.one_thread()  # as engines do: a sum that is split rounds in another order
    return Model("tiny")


def alone(ids: list[int], new: int) -> list[int]:
    """What one engine answers, computed here."""
    model = _model()
    pages = range(-(-(len(ids) + new) // PAGE_TOKENS))
    context = model.open(model.pool(len(pages)), pages)
    model.feed(context, ids)
    found = []
    for _ in range(new):
        found.append(model.answer(context))
        model.feed(context, found[-1:])
    return found


@dataclass
class Pair:
    prefill: Any
    decode: Any

    def triple(self, rooms: int | list[int]) -> dict[str, Any]:
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.engine.settings.bootstrap_port,
            "bootstrap_room": rooms,
        }

    async def post(self, path: str, **body: Any) -> tuple[tuple[int, Any], tuple[int, Any]]:
        """The two legs' answers, prefill first."""
        body = self.triple(next(ROOMS)) | body
        return await asyncio.gather(  # type: ignore[return-value]
            self.prefill.post(path, **body), self.decode.post(path, **body)
        )

    async def tokens(self, **body: Any) -> list[int]:
        """What the decode answers; both legs went well."""
        legs = await self.post("/generate", **body)
        assert [status for status, _ in legs] == [200, 200], legs
        return list(legs[1][1]["output_ids"])

    async def idle(self) -> None:
        """Nobody holds a page, no page is in quarantine, no rank holds anything of a room."""
        for side in (self.prefill, self.decode):
            for unit in side.engine.units:
                cache = unit.cache
                await until(lambda c=cache: c.at_work == 0 and c.pages().quarantined == 0)
                assert cache.pages().used == len(cache.blocks())
                assert cache.pages().free + cache.pages().used == cache.total
                for rank in unit.team.ranks:
                    for part in (rank.offers, rank.puller):
                        await until(lambda p=part: p is None or not any(p.counts().values()))


async def pair(start: Start, decode: dict[str, Any] | None = None, **both: Any) -> Pair:
    """`decode`: what it is told besides, or instead."""
    made = await asyncio.gather(
        start(Role.PREFILL, **both), start(Role.DECODE, **(both | (decode or {})))
    )
    return Pair(*made)
