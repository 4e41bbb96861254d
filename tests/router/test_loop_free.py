"""Long prompts are tokenised beside the event loop: what the loop itself does for each is short.

Measured is processor time of the loop's own thread, turn by turn, so that a busy machine does not
make it longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import answer, replies

from kvplane.router import api
from kvplane.router.request import COUNTS, LONG_BYTES
from kvplane.router.settings import PromptSettings, RetrySettings, RouterSettings
from kvplane.vocabulary import Epoch, Knowledge, Known, Pod, Worker

TOKENS = 100_000
CLIENTS = 10
MOST_S = 0.03  # of one turn, ten times what it takes; 100 000 tokens take 90 ms
SETTINGS = RouterSettings(
    tokenizer="builtin",
    retry=RetrySettings(retries=0),
    prompts=PromptSettings(deadline_s=120.0),  # a busy machine is no finding
)
ENGINE = replies(answer(b'{"usage":{"prompt_tokens":9}}'))


@contextlib.contextmanager
def turns() -> Iterator[list[float]]:
    """Processor seconds of every callback the loop runs, longest last when it ends."""
    found: list[float] = []
    before = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        before(handle)
        found.append(time.thread_time() - begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run)
        yield found
    found.sort()


def long_chat(number: int) -> bytes:
    words = f"{number} and some words more, " * (TOKENS // 20)
    messages = [{"role": "user", "content": words[:TOKENS]}]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


async def test_long_chats_hold_nobody_up() -> None:
    facts: dict[str, Any] = {"u1": {"events": ("tcp://x:1",), "engine": "kvplane"}}
    bodies = [long_chat(number) for number in range(CLIENTS)]
    async with gatehouse({"u1": ENGINE}, SETTINGS, facts=facts) as house:
        house.view.apply(Known(Worker(Pod("u1")), Epoch(1), Knowledge.EXACT, "", 0.0))
        await _short(house)  # everything is loaded
        with turns() as took:
            work = [house.post("/v1/chat/completions", body) for body in bodies]
            long = asyncio.gather(*work)
            while not long.done():
                await _short(house)
                status, _ = await house.get("/health")
                assert status == 200
            for status, said, headers in await long:
                assert (status, headers["x-kvplane-knowledge"]) == (200, "exact"), said
                assert int(headers["x-kvplane-depth"].partition("/")[2]) >= TOKENS // 16
        assert took[-1] < MOST_S, f"longest turns {took[-3:]}"
        assert not house.count("health_changes_total", worker="u1", state="unhealthy")
        assert all(target.healthy for target in house.fleet.targets())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_long_body_is_read_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    name, threads = ("read_ask" if path in COUNTS else "read_call"), list[str]()
    read = getattr(api, name)

    def noted(*of: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*of)

    monkeypatch.setattr(api, name, noted)
    here = threading.current_thread().name
    async with gatehouse({"u1": ENGINE}, SETTINGS) as house:
        for size in (10, LONG_BYTES):
            assert (await house.post(path, {"prompt": "a" * size, "input": "a"}))[0] == 200
    assert threads[0] == here != threads[1]


async def _short(house: Gatehouse) -> None:
    status, _, headers = await house.post("/generate", {"text": "hello"})
    assert (status, headers["x-kvplane-knowledge"]) == (200, "exact")
