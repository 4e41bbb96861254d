"""Answering: a scripted engine on a real socket; each path has an answer that may be changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kit.peer import Call, Peer, answer, peer

HANG = object()  # an answer that never comes


@dataclass
class FakeEngine:
    """Change `answers` while it runs: a status, a JSON object, bytes, or HANG."""

    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    peer: Peer = field(default_factory=Peer)

    @property
    def url(self) -> str:
        return self.peer.url

    async def serve(self, call: Call) -> None:
        while request := await call.request():
            path = request.split(b" ", 2)[1].decode()
            self.asked.append(path)
            said = self.answers.get(path, 404)
            if said is HANG:
                await asyncio.Event().wait()
            elif isinstance(said, int):
                await call.send(answer(b"", said))
            elif isinstance(said, bytes):
                await call.send(answer(said))
            else:
                await call.send(answer(json.dumps(said).encode()))


@contextlib.asynccontextmanager
async def fake_engine(**answers: Any) -> AsyncIterator[FakeEngine]:
    """Paths as names: `health` is /health, `v1__models` is /v1/models."""
    paths = {"/" + name.replace("__", "/"): said for name, said in answers.items()}
    engine = FakeEngine({"/health": 200, **paths})
    async with peer(engine.serve) as state:
        engine.peer = state
        yield engine
