"""The page in a browser: what a person sees of a running plane, and of one that breaks.

Pictures of it are kept under .run/page/. Where there is no Chromium, all of this is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kit.browser import Browser, Page, browser, chromium
from kit.house import House, Reply, Resident, house
from kit.plane import EngineSeat, together
from kit.wait import until

from kvplane.children import Child
from kvplane.runtime import Part

SHOTS = Path(__file__).parents[2] / ".run" / "page"
KEY = "the-admins-own-key"
QUESTION = "Which of you holds the blocks of this long question? " * 12
CHAT = [{"role": "user", "content": QUESTION}]
LOOKS = {"light": (1360, 900, False), "dark": (1360, 900, True), "narrow": (390, 844, False)}
FRESH = "document.querySelector('#main').dataset.fresh === 'yes'"
SERVING = "document.querySelectorAll('[data-worker][data-state=serving]').length === 3"
ROOM_LINK = "a[href^=\\'#room-\\']"  # as it stands in a text of JavaScript
# Of each line of the answer: whose it is, cells that are held, cells.
HELD = """[...document.querySelectorAll('#answer .held li')].map(line => [line.dataset.worker,
    line.querySelectorAll('.strip i.on').length, line.querySelectorAll('.strip i').length])"""

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Stage:
    """A plane, and a browser before it. One prefill is a process of its own: it can be killed."""

    house: House
    chrome: Browser
    words: list[str]
    gateway: Part
    other: Child
    seat: EngineSeat
    prefill: Resident

    async def page(self, fragment: str = "", **headers: str) -> Page:
        """A new tab that goes to the page."""
        page = await self.chrome.page()
        await page.look(1360, 900)
        if headers:
            await page.call("Network.enable")
            await page.call("Network.setExtraHTTPHeaders", headers=headers)
        await page.open(f"{self.house.url}/dashboard{fragment}")
        return page

    async def drawn(self, fragment: str = "") -> Page:
        """The same, with its first picture drawn."""
        page = await self.page(fragment)
        await page.until(FRESH)
        return page

    async def chat(self) -> Reply:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 4}
        return await self.house.post("/v1/chat/completions", body)

    async def exact(self) -> bool:
        found = (await self.house.get("/index/workers"))["workers"]
        return [one["knowledge"] for one in found] == ["exact"] * 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    seat = EngineSeat("prefill-2", "prefill")
    other = seat.child()
    async with house() as built, browser() as chrome, together([other]):
        prefill, decode = await built.pair()
        words = [*prefill.words, *decode.words, *seat.gateway_flags(), "--admin-key", KEY]
        gateway = await built.gateway(*words)
        made = Stage(built, chrome, words, gateway, other, seat, prefill)
        await until(made.exact, what="three workers that are known exactly")
        yield made


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def tidy(stage: Stage) -> AsyncIterator[None]:
    yield
    await stage.chrome.tidy()


async def replace(page: Page, text: str) -> None:
    """Type over what the box holds."""
    await page.js("document.querySelector('#ask-text').select()")
    await page.type(text)


async def test_it_draws_the_fleet_before_anything_was_asked(stage: Stage) -> None:
    page = await stage.drawn()
    await page.until(SERVING)
    state = await page.text("#state")
    assert "Serving" in state and "2 prefill, 1 decode" in state
    assert "No request yet" in await page.text("#requests-body")
    assert "exact" in await page.text("[data-role=prefill]")
    await page.until("document.querySelector('#findings').innerText.includes('Nothing is wrong')")
    assert await page.js("document.querySelector('#link').dataset.link") == "live"
    await page.shot(SHOTS / "empty.png")
    assert not page.errors


async def test_the_prompt_box_shows_the_blocks_that_rank_says_are_held(stage: Stage) -> None:
    assert (await stage.chat()).status == 200

    async def ranked() -> list[dict[str, Any]]:
        found = await stage.house.post("/index/rank", {"model": "tiny", "messages": CHAT})
        workers: list[dict[str, Any]] = found.body["workers"]
        return workers

    async def held() -> bool:
        return sum(one["depth_blocks"] > 4 for one in await ranked()) == 2

    await until(held, what="the index to hold what the chat left at both engines")
    page = await stage.drawn()
    await page.press("/", 191, "/")
    assert await page.js("document.activeElement.id") == "ask-text"
    await page.type(QUESTION)
    await page.until("document.querySelectorAll('#answer .held li').length === 3")
    told = [[one["worker"], one["depth_blocks"], one["blocks"]] for one in await ranked()]
    assert sorted(await page.js(HELD)) == sorted(told)
    chosen = await page.text("#answer .verdict b")
    headers = (await stage.chat()).headers
    assert chosen == f"{headers['x-kvplane-prefill']} → {headers['x-kvplane-decode']}"
    assert "to compute" in await page.text("#answer li .facts")
    assert not page.errors


async def test_what_is_pasted_is_read_as_what_it_is(stage: Stage) -> None:
    page = await stage.drawn()
    await page.js("document.querySelector('#ask-text').focus()")
    await page.type(json.dumps(CHAT))
    note = "document.querySelector('#prompt-note').innerText.includes"
    await page.until(f"{note}('read as a chat')")
    await page.shot(SHOTS / "prompt.png")
    await replace(page, json.dumps({"prompt": "[1] is not JSON to a model " * 9}))
    await page.until(f"{note}('read as a plain prompt')")
    await replace(page, json.dumps({"model": "nobody", "prompt": "x"}))
    await page.until("document.querySelector('#answer .fault')?.innerText.includes('nobody')")
    await page.js("document.querySelector('#ask-text').value = ''")
    await page.type(" ")
    await page.until("document.querySelector('#answer').innerText === ''")
    assert not [error for error in page.errors if "404" not in error]  # that model is not there


async def test_the_waterfall_of_a_failed_room_shows_the_stage_that_failed(stage: Stage) -> None:
    for url in (stage.prefill.url, stage.seat.url):
        fault = {"stage": "verify", "kind": "flip-byte", "count": 8}
        assert (await stage.house.post("/fault", fault, at=url)).status == 200
    answer = await stage.chat()
    assert answer.status >= 500
    room = answer.error["room"].split(",")[0]

    async def failed() -> list[str]:
        stages = (await stage.house.get(f"/rooms/{room}"))["stages"]
        told = [one for one in stages if one["outcome"] == "failed" and one["by"] != "gateway"]
        return [one["stage"] for one in told]

    (broken, *_) = await until(failed, what="the engines to tell which stage failed")
    page = await stage.drawn(f"#room-{room}")
    row = f".waterfall tr.failed[data-stage={broken}]"
    await page.until(f"document.querySelector('#room').open && document.querySelector('{row}')")
    assert f"{broken} failed" in await page.text(row)
    assert f"Stopped at {broken}" in await page.text("#room .fault")
    assert await page.js(f"document.querySelector('{row} .stage i').offsetWidth") >= 3
    lanes = await page.js("[...document.querySelectorAll('[data-lane]')].map(e => e.dataset.lane)")
    assert lanes == ["gateway", "prefill", "decode"]
    await page.shot(SHOTS / "room.png", whole=False)
    await page.press("Escape", 27)
    await page.until("!document.querySelector('#room').open && !location.hash")
    link = f"#findings a[href='#room-{room}']"  # the diagnosis leads there, too
    await page.until(f"document.querySelector({json.dumps(link)}) !== null")
    await page.click(link)
    await page.until("document.querySelector('#room').open")
    assert room in await page.text("#room-name")
    assert not page.errors


async def test_a_room_that_is_not_known_is_said_so(stage: Stage) -> None:
    page = await stage.drawn("#room-42")
    await page.until("document.querySelector('#room .fault')?.innerText.includes('not known')")


async def test_it_is_used_by_keyboard_alone(stage: Stage) -> None:
    await stage.chat()
    page = await stage.drawn()
    await page.press("Tab", 9)
    assert await page.js("document.activeElement.className") == "skip"
    await page.press("Enter", 13, "\r")
    await page.until("document.activeElement.id === 'fleet'")
    for _ in range(20):  # on to the newest request, whatever lies between
        await page.press("Tab", 9)
        if await page.js(f"document.activeElement.matches('{ROOM_LINK}')"):
            break
    await page.press("Enter", 13, "\r")
    await page.until("document.querySelector('#room').open && document.querySelector('.waterfall')")
    assert await page.js("document.activeElement.closest('dialog')?.id") == "room"
    await page.press("Escape", 27)
    await page.until(f"document.activeElement.matches('{ROOM_LINK}')")  # back where one was


@pytest.mark.parametrize("look", LOOKS)
async def test_nothing_keeps_anybody_out_of_it(stage: Stage, look: str) -> None:
    """By axe: names, roles, contrast; by day, by night, on a phone; the sheet of a room, too."""
    width, height, dark = LOOKS[look]
    await stage.chat()
    page = await stage.drawn()
    await page.look(width, height, dark)
    await page.js("document.querySelector('#ask-text').focus()")
    await page.type(QUESTION)
    await page.until("document.querySelector('#answer .held li')")
    assert await page.js("document.documentElement.scrollWidth <= window.innerWidth")
    await page.shot(SHOTS / f"{look}.png")
    await page.js(axe())
    # By night only colours are others, on a phone only places.
    rules = {"light": "[]", "dark": "['color-contrast']"}.get(
        look, "['scrollable-region-focusable']"
    )
    assert await serious(page, "main", rules) == []
    (room, *_) = (await stage.house.get("/rooms?limit=1"))["rooms"]
    await page.js(f"location.hash = 'room-{room['room']}'")
    await page.until("document.querySelector('.waterfall')")
    await page.shot(SHOTS / f"{look}-room.png", whole=False)
    assert await serious(page, "#room", rules) == []
    assert not page.errors
    if look == "light":  # and the check can fail
        await page.js(
            "void document.querySelector('#room').append(document.createElement('button'))"
        )
        assert "button-name" in str(await serious(page, "#room", rules))


async def test_a_theme_that_was_chosen_wins_over_the_systems_and_auto_follows_it(
    stage: Stage,
) -> None:
    page = await stage.drawn()
    seen: dict[tuple[str, bool], str] = {}
    for night in (False, True):
        await page.look(1360, 900, night)
        for _ in range(3):  # once around
            theme = await page.js("document.documentElement.dataset.theme")
            seen[theme, night] = await page.js("getComputedStyle(document.body).backgroundColor")
            await page.js("document.querySelector('#theme').click()")
    day, dark = seen["auto", False], seen["auto", True]
    assert day != dark and len(seen) == 6
    assert {seen["light", False], seen["light", True]} == {day}
    assert {seen["dark", False], seen["dark", True]} == {dark}


def axe() -> str:
    spec = importlib.util.find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None, "make test installs axe-core-python"
    return (Path(spec.origin).parent / "axe.min.js").read_text()


async def serious(page: Page, where: str, rules: str) -> list[str]:
    """What axe finds there; no rules are all rules, and then the whole document's are looked at."""
    place, only = ("document", "{}") if rules == "[]" else (f"'{where}'", f"{{runOnly: {rules}}}")
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]} {node.get('failureSummary', '')}"
        for one in await page.js(f"axe.run({place}, {only}).then(told => told.violations)")
        for node in one["nodes"]
        if one["impact"] in ("serious", "critical")
    ]


async def test_a_caller_from_elsewhere_needs_the_key_and_sees_nothing_before(stage: Stage) -> None:
    page = await stage.page(**{"X-Forwarded-For": "192.0.2.7"})
    await page.until("!document.querySelector('#key').hidden")
    assert "127.0.0.1" not in await page.text("main")
    await page.shot(SHOTS / "locked.png")
    await page.js("document.querySelector('#key-text').focus()")
    await page.type("a-wrong-one")
    await page.press("Enter", 13, "\r")
    await page.until("document.querySelector('#key-text').value === ''")
    await page.type(KEY)
    await page.press("Enter", 13, "\r")
    await page.until(SERVING)
    assert KEY not in await page.js("document.documentElement.outerHTML")


async def test_a_prefill_that_is_killed_is_seen_within_two_seconds(stage: Stage) -> None:
    """First its events end, at once; that nobody answers is seen at the next look at it."""
    page, pod = await stage.drawn(), stage.seat.pod
    row = f"document.querySelector(`[data-worker='{pod}']`).dataset"
    assert await page.js(f"[{row}.state, {row}.knowledge]") == ["serving", "exact"]
    await page.js(COUNT)
    began = time.monotonic()
    await page.until("window.pictures >= 3")  # two beats of 0.5 s on a machine that has time
    slow = max(1.0, (time.monotonic() - began) / 1.5)
    stage.other.kill()
    killed = time.monotonic()
    await page.until(f"{row}.knowledge !== 'exact' || {row}.state !== 'serving'")
    assert time.monotonic() - killed < 2.0 * slow
    await page.until(f"{row}.state !== 'serving'")
    await page.until(f"document.querySelector('#findings').innerText.includes('{pod}')")
    await page.shot(SHOTS / "killed.png")
    assert not page.errors


COUNT = """window.pictures = 0; new MutationObserver(() => { window.pictures += 1 }).observe(
    document.querySelector('#figures'), {subtree: true, childList: true, attributes: true}); 0"""


async def test_it_says_when_the_gateway_is_gone_and_comes_back_by_itself(stage: Stage) -> None:
    page, port = await stage.drawn(), int(stage.house.url.rpartition(":")[2])
    await stage.house.end(stage.gateway)
    await page.until("!document.querySelector('#away').hidden")
    assert "Not connected" in await page.text("#away-text")
    assert await page.js("document.querySelector('#main').dataset.fresh") == "no"
    await page.shot(SHOTS / "away.png")
    await stage.house.gateway(*stage.words, port=port)
    await page.until(f"document.querySelector('#away').hidden && {FRESH}", 30)
