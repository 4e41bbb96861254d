"""Terminal: the commands that ask a running plane and print text.

Door. Used by wiring.py: rank is here, tail in tailing.py, the question of a health check in
health.py. Open it to change what a person reads there.
"""

from __future__ import annotations

import os
import sys
from errno import ECONNREFUSED
from ssl import SSLError
from typing import Any

import aiohttp

from kvplane.index import IndexClient, IndexRefused
from kvplane.settings import Settings

TIMEOUT_S = 10.0  # one question


def say(line: str) -> None:
    """One line to standard output, at once."""
    sys.stdout.write(_one(line) + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """One line to standard error."""
    sys.stderr.write(f"kvplane: {_one(line)}\n")


def _one(line: str) -> str:
    """It may hold an engine's own words: these begin no line and move no cursor."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else " " for char in line)


class NotKvplane(Exception):
    """Something else answers at the URL; says what was asked and what came."""


async def rank(told: Settings) -> int:
    """Who holds the blocks of a prompt, deepest first; exit status 1 if that cannot be said."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(told["url"], timeout=timeout) as session:
        model = told["model"] or await _only_model(session)
        if not model:
            return 1
        client = IndexClient(session, f"{told['url']}/index", TIMEOUT_S)
        try:
            salt = {"salt": told["salt"]} if told["salt"] else {}
            found = await client.rank({"model": model, "prompt": told["prompt"], **salt})
        except IndexRefused as error:
            if error.status == 404 and not error.message.startswith("model: "):  # no such route
                said = f"/index/rank answered {error.status} {error.message}"
                raise NotKvplane(f"is this kvplane? {said}") from None
            complain(error.message)
            return 1
    say(f"{found['blocks']} blocks of {found['block_size']} tokens, model {model}")
    if not found["blocks"]:
        say("shorter than one block: no worker can hold any of it")
    for one in found["workers"]:
        tiers = "  ".join(f"{tier} {count}" for tier, count in one["tiers"].items() if count)
        depth = f"{one['depth_blocks']}/{one['blocks']}"
        say(f"{one['worker']:<24} {depth:>9}  {one['knowledge']:<8} {tiers}".rstrip())
    return 0


async def _only_model(session: aiohttp.ClientSession) -> str:
    """The one model that is served; else a complaint and the empty text."""
    async with session.get("/v1/models") as answer:
        found = await _json(answer)
    models = [str(one["id"]) for one in found.get("data", [])]
    if len(models) == 1:
        return models[0]
    served = f"served are {', '.join(models)}" if models else "no worker says which one it serves"
    complain(f"model is missing: name it with --model; {served}")
    return ""


async def _json(answer: aiohttp.ClientResponse) -> Any:
    try:
        found = await answer.json()
    except (aiohttp.ContentTypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        path = answer.url.path
        raise NotKvplane(f"is this kvplane? {path} answered {answer.status} without JSON")
    return found


def unreachable(url: str, error: BaseException) -> str:
    """Why a question to `url` got no answer, for a person."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = getattr(error, "os_error", None)  # a certificate that is not believed has none
        if isinstance(cause, SSLError):  # whose numbers are not the system's
            why = (cause.reason or str(cause)).replace("_", " ").lower()
            return f"{url} speaks no TLS that we do: {why}; is it http:// there? (--url)"
        number = getattr(cause, "errno", None) or 0
        if f"[Errno {ECONNREFUSED}]" in str(cause):  # of each address that a name has
            number = ECONNREFUSED
        why = getattr(cause, "strerror", None) or type(cause or error).__name__
        why = os.strerror(number) if number > 0 else why
        return f"{url} cannot be reached: {why}; is a gateway running there? (--url)"
    if isinstance(error, TimeoutError):
        return f"{url}: no answer in time"
    return f"{url}: {error or type(error).__name__}"
