"""Terminal: the commands that ask a running plane and print text: rank, tail, healthy.

Door. Used by wiring.py. Open it to change what a person reads there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import aiohttp

from kvplane.settings import Settings

TIMEOUT_S = 10.0  # one question; tail has none, it follows until it is ended


def say(line: str) -> None:
    """One line to standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """One line to standard error."""
    sys.stderr.write(f"kvplane: {line}\n")


async def rank(told: Settings) -> int:
    """Who holds the blocks of a prompt, deepest first; exit status 1 if that cannot be said."""
    body: dict[str, Any] = {"prompt": told["prompt"]}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(told["url"], timeout=timeout) as session:
        body["model"] = told["model"] or await _only_model(session)
        async with session.post("/index/rank", json=body) as answer:
            found = await answer.json()
    if answer.status != 200:
        complain(found["error"]["message"])
        return 1
    say(f"{found['blocks']} blocks of {found['block_size']} tokens, model {body['model']}")
    for one in found["workers"]:
        tiers = "  ".join(f"{tier} {count}" for tier, count in one["tiers"].items() if count)
        depth = f"{one['depth_blocks']}/{one['blocks']}"
        say(f"{one['worker']:<24} {depth:>9}  {one['knowledge']:<8} {tiers}")
    return 0


async def _only_model(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as answer:
        models = [one["id"] for one in (await answer.json()).get("data", [])]
    return str(models[0]) if models else ""


async def tail(told: Settings) -> int:
    """Print each change as one line of JSON until ended; 1 if the cursor is too old."""
    query = {"after": told["after"]} if told["after"] else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(told["url"], timeout=timeout) as session,
        session.get("/index/changes", params=query) as answer,
    ):
        if answer.status != 200:
            complain(_reason(await answer.json()))
            return 1
        async for line in answer.content:
            if line.startswith(b"data:"):
                say(line[5:].decode().strip())
    return 0


def _reason(answer: Mapping[str, Any]) -> str:
    return str(answer.get("error", {}).get("message", answer))


async def healthy(told: Settings) -> int:
    """0 if the URL answers 200 within the time-out, else 1 with the reason."""
    timeout = aiohttp.ClientTimeout(total=2.0)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(told["url"]) as answer,
    ):
        if answer.status != 200:
            complain(f"{told['url']}: status {answer.status}")
        return 0 if answer.status == 200 else 1
