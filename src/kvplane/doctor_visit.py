"""Doctor's visit: look at named engines step by step, without a gateway that runs.

Door. Brings a gateway of its own for a moment, on loopback, so that everything is judged by the
same rules: each engine is asked what it is, each prefill's rank directory and event stream are
looked at, then real requests go through every worker once. Used by doctor.py. Open it to change
what is tried.

    found? -> well? -> events heard? -> a request through each pair: its stages, one by one
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from kvplane import terminal
from kvplane.demo import Ports
from kvplane.doctor import STAGE_WIDTH, ask, bearer, lines
from kvplane.plane import GatewayPlane
from kvplane.runtime import running
from kvplane.settings import Settings, parser, resolve
from kvplane.vocabulary import Stage

SETTLE_S = 20.0  # until every engine was found and is heard
STEADY_S = 3.0  # the same reasons so long: that is what keeps them
REQUEST_S = 30  # one request; more is no answer
MOST_REQUESTS = 16
MOST_SAID = 300  # characters of an answer
AGAIN = 2  # a worker that refuses three in a row is named (router/patterns.py)


async def visit(told: Settings) -> int:
    """The whole visit; 1 if anything blocks."""
    port = Ports().take(0)
    words = ["all", "--port", str(port), "--retry-max-retries", "0"]
    words += ["--policy", "round_robin", "--decode-policy", "round_robin"]
    words += ["--request-timeout-secs", str(REQUEST_S), "--health-check-interval-secs", "1"]
    for key in ("tokenizer", "api_key"):
        words += [f"--{key.replace('_', '-')}", told[key]] if told[key] else []
    settings = resolve(vars(parser().parse_args(words)), {}, {})
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=2 * REQUEST_S)
    async with (
        running([GatewayPlane(settings, told.workers, port)]),
        aiohttp.ClientSession(url, timeout=timeout, headers=bearer(told["api_key"])) as session,
    ):
        workers = await _found(session)
        answers = [await _try(session, number + 1) for number in range(requests(workers))]
        found = await ask(session, url)
    terminal.say("")
    count = len(told.workers)
    more = [] if found["blocked"] else list(unexplained(answers))
    if found["findings"] or not more:
        for line in lines(found, f"{count} workers" if count > 1 else "1 worker"):
            terminal.say(line)
    for line in more:
        terminal.say(line)
    return 1 if found["blocked"] or more else 0


def unexplained(answers: Sequence[tuple[int, str]]) -> Iterator[str]:
    """A request of ours that failed is no caller's mistake, though no rule may tell why."""
    for number, (status, said) in enumerate(answers, 1):
        if status != 200:
            yield ""
            yield f"BLOCKS   {Stage.FIRST_BYTE:<{STAGE_WIDTH}} not known"
            yield f"         request {number} answered {status}: {said}"
            yield "         next: its stages stand above; look at the logs of both engines"


def requests(workers: Iterable[Mapping[str, Any]]) -> int:
    """As many as each worker, and each of its data-parallel ranks, needs to be met once."""
    ranks: Counter[str] = Counter()
    for one in workers:
        ranks[one["worker_type"]] += one["dp_size"] or 1
    return min(MOST_REQUESTS, max(ranks.values(), default=0))


async def _found(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """Until all can be used and are heard, or there is no more patience; then who they are."""
    until, since, before = time.monotonic() + SETTLE_S, time.monotonic(), None
    while True:
        workers = await _get(session, "/workers", "workers")
        known = {one["worker"]: one for one in await _get(session, "/index/workers", "workers")}
        well = all(one["is_healthy"] for one in workers)
        heard = all(
            known.get(one["pod"], {}).get("knowledge") == "exact" for one in _speaking(workers)
        )
        said = [(one["pod"], one["reason"], one["is_healthy"]) for one in workers]
        now = time.monotonic()
        since, before = (since, before) if said == before else (now, said)
        steady = now - since > STEADY_S and not any(_soon(one["reason"]) for one in workers)
        if (well and heard) or (steady and not well) or now > until:
            break
        await asyncio.sleep(0.1)
    for one in workers:
        terminal.say(_shown(one, known))
    return workers


def _soon(reason: str) -> bool:
    """Was nobody there yet to look?"""
    return reason.endswith(("not asked yet", "not looked at yet"))


def _speaking(workers: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (one for one in workers if one["events"])


def _shown(worker: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> str:
    kind = {"regular": "both"}.get(worker["worker_type"], worker["worker_type"])
    state = "well" if worker["is_healthy"] else f"not used: {worker['reason']}"
    facts = [f"model {worker['model_id'] or '?'}", f"engine {worker['engine']}"]
    if worker.get("bootstrap_port"):
        facts.append(f"bootstrap port {worker['bootstrap_port']}")
    if kind != "decode":
        facts.append(f"events {known.get(worker['pod'], {}).get('knowledge', 'off')}")
    return f"{kind:<8} {worker['pod']:<22} {state}   {', '.join(facts)}"


async def _get(session: aiohttp.ClientSession, path: str, member: str) -> list[dict[str, Any]]:
    async with session.get(path) as answer:
        found: list[dict[str, Any]] = (await answer.json()).get(member, [])
        return found


async def _try(session: aiohttp.ClientSession, number: int) -> tuple[int, str]:
    """One real request, and every stage that anybody saw of it; how it was answered."""
    models = [str(one["id"]) for one in await _get(session, "/v1/models", "data")]
    body = {
        "model": models[number % len(models)] if models else "",
        "prompt": f"kvplane doctor, request {number}: which pair is met here?",
        "max_tokens": 2,
        "temperature": 0,
    }
    name = f"doctor-{number}"
    status, said = await _ask(session, body, name)
    for again in range(AGAIN if 400 <= status < 500 else 0):
        await _ask(session, body, f"{name}-{again}")
    async with session.get(f"/requests/{name}") as answer:
        told = await answer.json() if answer.status == 200 else {"attempts": []}
    terminal.say("")
    terminal.say(f"request {number} answered {status}")
    for attempt in told["attempts"]:
        for stages in attempt["stages"].values():
            for stage in stages:
                terminal.say(_line(stage))
    return status, said


async def _ask(session: aiohttp.ClientSession, body: object, name: str) -> tuple[int, str]:
    async with session.post("/v1/completions", json=body, headers={"x-request-id": name}) as answer:
        text = await answer.text(errors="replace")
        return answer.status, " ".join(text.split())[:MOST_SAID]


def _line(stage: Mapping[str, Any]) -> str:
    took = "" if stage["duration_s"] is None else f"{stage['duration_s'] * 1000:.1f} ms"
    by = f"by {stage['by']}" if stage["by"] else ""
    text = f"   {stage['stage']:<{STAGE_WIDTH}} {stage['outcome']:<13} {took:>12}   {by:<26}"
    return f"{text} {stage['detail']}".rstrip()
