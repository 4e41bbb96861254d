"""Doctor: what is wrong with a plane, as text; exit status 1 if anything blocks requests.

Door. Asks a running gateway for GET /diagnosis, or, where engines are named, goes to look for
itself (doctor_visit.py). Used by wiring.py. Open it to change what a person reads there.

    kvplane doctor --url URL                             a gateway that runs
    kvplane doctor --prefill URL [PORT] --decode URL     engines, without any gateway
    kvplane doctor                                       the usual gateway; where nobody answers
                                                         there, the workers of kvplane.toml
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp

from kvplane import terminal
from kvplane.settings import Settings

USUAL_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 15.0  # one question; a diagnosis asks engines and store for a second each
STAGE_WIDTH = 17
OTHERS = {  # what may answer where a gateway was meant: a route of it, a member of the answer
    "/index/stats": ("store_down_s", "an index process, which has no diagnosis"),
    "/v1/models": ("data", "an engine (to look at engines: --prefill, --decode)"),
    "/ranks": ("summary", "a prefill's rank directory"),
}


async def doctor(told: Settings) -> int:
    """The whole command."""
    terminal.say(which(told))
    if _visits(told):
        return await _visit(told)
    url = told["url"] or USUAL_URL
    try:
        return await examine(url, bearer(told["admin_key"]))
    except terminal.NotKvplane as error:
        terminal.complain(f"{url}: {error}")
        return 1
    except (aiohttp.ClientError, TimeoutError) as error:
        if told["url"] is None and told.workers:
            terminal.say(f"nobody answers there: {visiting(told)}")
            return await _visit(told)
        terminal.complain(terminal.unreachable(url, error))
        silent = isinstance(error, (aiohttp.ClientConnectorError, TimeoutError))
        terminal.say("BLOCKS   worker-pool       gateway")
        terminal.say(f"         {'nobody answers' if silent else 'no gateway answers'} at {url}")
        terminal.say("         next: start it (kvplane router, kvplane all), or name its --url")
        return 1


async def _visit(told: Settings) -> int:
    from kvplane.doctor_visit import visit  # a whole gateway: only who needs it waits for it

    return await visit(told)


def _visits(told: Settings) -> bool:
    """Workers named by flags, and no gateway beside them."""
    return told["url"] is None and told.by_flags


def which(told: Settings) -> str:
    """Which of the two this is, and how to do the other: requests cost engines something."""
    if _visits(told):
        return visiting(told)
    return (
        f"asking the gateway at {told['url'] or USUAL_URL}; to visit engines with real requests: "
        "kvplane doctor --prefill URL [PORT] --decode URL"
    )


def visiting(told: Settings) -> str:
    """Whom, and who named them."""
    count = len(told.workers)
    named = f"the {count} workers" if count > 1 else "the one worker"
    by = "that flags name" if told.by_flags else "that kvplane.toml names"
    return (
        f"visiting {named} {by}, with real requests; "
        "to ask a gateway that runs: kvplane doctor --url URL"
    )


def bearer(key: str) -> dict[str, str]:
    """How a key is shown."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def examine(url: str, headers: Mapping[str, str]) -> int:
    """Ask a gateway what is wrong and print it."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        found = await ask(session, url)
    for line in lines(found, url):
        terminal.say(line)
    return 1 if found["blocked"] else 0


async def ask(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """GET /diagnosis. Raises NotKvplane for something else that answers there."""
    async with session.get(f"{url}/diagnosis") as answer:
        if answer.status in (401, 403):
            raise terminal.NotKvplane("the admin key is needed: --admin-key or KVPLANE_ADMIN_KEY")
        try:
            found = await answer.json()
        except (aiohttp.ContentTypeError, ValueError):
            found = None
    if not isinstance(found, dict) or not isinstance(found.get("findings"), list):
        what = await _what(session, url) if answer.status == 404 else ""
        if what:
            raise terminal.NotKvplane(
                f"this is {what}; --url wants a gateway's address, like {USUAL_URL}"
            )
        raise terminal.NotKvplane(f"is this a gateway? /diagnosis answered {answer.status}")
    return found


async def _what(session: aiohttp.ClientSession, url: str) -> str:
    """What else of ours, or an engine, answers there; "" where that cannot be seen."""
    for path, (member, what) in OTHERS.items():
        async with session.get(url + path) as answer:
            try:
                found = await answer.json()
            except (aiohttp.ContentTypeError, ValueError):
                continue
        if isinstance(found, dict) and member in found:
            return what
    return ""


def lines(diagnosis: Mapping[str, Any], where: str) -> Iterator[str]:
    """A diagnosis for a person: what blocks first."""
    findings = diagnosis["findings"]
    if not findings:
        yield f"{where}: nothing is wrong"
        return
    blocking = sum(bool(one["blocks"]) for one in findings)
    worse = len(findings) - blocking
    counts = (
        [f"{blocking} {_things(blocking)} requests"] if blocking else ["nothing blocks requests"]
    )
    counts += [f"{worse} more to look at"] if worse else []
    yield f"{where}: {', '.join(counts)}"
    for one in findings:
        yield ""
        kind = "BLOCKS" if one["blocks"] else "look"
        yield f"{kind:<8} {one['stage']:<{STAGE_WIDTH}} {one['culprit']}"
        yield f"         {one['sentence']}"
        yield f"         next: {one['next_step']}"
        if one["rooms"]:
            yield f"         rooms: {' '.join(one['rooms'])}   (GET /rooms/ROOM)"


def _things(count: int) -> str:
    return "thing blocks" if count == 1 else "things block"
