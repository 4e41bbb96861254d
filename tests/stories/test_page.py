"""The page in a browser: what a person sees of a running plane, and of one that breaks.

Pictures of it are kept under .run/page/. Where there is no Chromium, all of this is skipped.
"""

from __future__ import annotations

import asyncio
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
from kit.plane import EngineSeat, Plane, plane
from kit.wait import until

SHOTS = Path(__file__).parents[2] / ".run" / "page"
KEY = "the-admins-own-key"
CHAT = [{"role": "user", "content": "Which of you holds the blocks of this long question? " * 12}]
LOOKS = {"light": (1360, 900, False), "dark": (1360, 900, True), "narrow": (390, 844, False)}

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Stage:
    """A plane, and a browser before it."""

    running: Plane
    chrome: Browser

    async def page(self, fragment: str = "", **headers: str) -> Page:
        """The page in a new tab, with its first picture drawn."""
        page = await self.chrome.page()
        await page.look(1360, 900)
        if headers:
            await page.call("Network.enable")
            await page.call("Network.setExtraHTTPHeaders", headers=headers)
        await page.open(f"{self.running.url}/dashboard{fragment}")
        return page

    async def drawn(self, fragment: str = "") -> Page:
        page = await self.page(fragment)
        await page.until("document.querySelector('#main').dataset.fresh === 'yes'")
        return page

    async def chat(self, **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 4, **more}
        return await self.running.ask("/v1/chat/completions", body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    seats = [EngineSeat(name, name[:-2]) for name in ("prefill-1", "prefill-2", "decode-1")]
    flags = ["--admin-key", KEY, "--health-check-interval-secs", "0.4"]
    async with plane(seats, flags) as running, browser() as chrome:
        yield Stage(running, chrome)


async def test_it_draws_the_fleet_before_anything_was_asked(stage: Stage) -> None:
    page = await stage.drawn()
    await page.until("document.querySelectorAll('[data-worker][data-state=serving]').length === 3")
    assert "Serving" in await page.text("#state") and "2 prefill, 1 decode" in await page.text(
        "#state"
    )
    assert "No request yet" in await page.text("#requests-body")
    assert "exact" in await page.text("[data-role=prefill]")
    await page.until("document.querySelector('#link').dataset.link === 'live'")
    await page.shot(SHOTS / "empty.png")
    assert not page.errors


async def test_the_prompt_box_shows_the_blocks_that_rank_says_are_held(stage: Stage) -> None:
    assert (await stage.chat())[0] == 200
    question = {"model": "tiny", "messages": [{"role": "user", "content": CHAT[0]["content"]}]}

    async def ranked() -> dict[str, Any]:
        return (await stage.running.ask("/index/rank", question))[1]

    async def held() -> bool:
        return max(one["depth_blocks"] for one in (await ranked())["workers"]) > 4

    await until(held, what="the index to hold what the chat left")
    page = await stage.drawn()
    await page.press("/", 191, "/")
    assert await page.js("document.activeElement.id") == "ask-text"
    await page.type(CHAT[0]["content"])
    await page.until("document.querySelectorAll('#answer .held li').length === 3")
    told = {one["worker"]: one for one in (await ranked())["workers"]}
    for worker, one in told.items():
        place = f"[...document.querySelectorAll('#answer li')].find(e => e.dataset.worker === '{worker}')"
        shown = await page.js(
            f"[{place}.querySelectorAll('.strip i.on').length, {place}.querySelectorAll('.strip i').length]"
        )
        assert shown == [one["depth_blocks"], one["blocks"]], worker
    chosen = await page.text("#answer .verdict b")
    _, _, headers = await stage.chat()
    assert chosen == f"{headers['x-kvplane-prefill']} → {headers['x-kvplane-decode']}"
    assert "to compute" in await page.text("#answer li .facts")
    # A pasted body is read as it stands; what is wrong with it is said.
    await page.js("document.querySelector('#ask-text').value = ''")
    await page.type(json.dumps({"model": "nobody", "prompt": "x" * 400}))
    await page.until("document.querySelector('#answer .fault')?.innerText.includes('nobody')")
    await page.js("document.querySelector('#ask-text').select()")
    await page.type(json.dumps(CHAT))
    await page.until("document.querySelector('#prompt-note').innerText.includes('read as a chat')")
    await page.shot(SHOTS / "prompt.png")
    assert [error for error in page.errors if "404" not in error] == []  # that model is not there


async def test_the_waterfall_of_a_failed_room_shows_the_stage_that_failed(stage: Stage) -> None:
    for name in ("prefill-1", "prefill-2"):
        await stage.running.fault(name, stage="verify", kind="flip-byte", count=50)
    status, body, _ = await stage.chat()
    assert status >= 500
    for name in ("prefill-1", "prefill-2"):
        await stage.running.fault(name, stage="verify", kind="flip-byte", count=0)
    room = body["error"]["room"].split(",")[0]

    async def failed() -> Any:
        found = await stage.running.get(f"/rooms/{room}")
        return [one["stage"] for one in found["stages"] if one["outcome"] == "failed"]

    (failed_stage, *_) = await until(failed, what="the stage that failed")
    page = await stage.drawn(f"#room-{room}")
    await page.until("document.querySelector('#room').open && document.querySelector('.waterfall')")
    assert (
        await page.js("document.querySelector('.waterfall tr.failed').dataset.stage")
        == failed_stage
    )
    assert f"{failed_stage} failed" in await page.text(".waterfall tr.failed")
    lanes = await page.js("[...document.querySelectorAll('[data-lane]')].map(e => e.dataset.lane)")
    assert {"prefill", "decode"} <= set(lanes)
    assert not await page.js(
        "document.querySelector('.waterfall tr.failed .stage i').offsetWidth < 2"
    )
    await page.shot(SHOTS / "room.png", whole=False)
    await page.press("Escape", 27)
    await page.until("!document.querySelector('#room').open && !location.hash")
    # The diagnosis names the room, and leads there.
    link = f"#findings a[href='#room-{room}']"
    await page.until(f"document.querySelector({json.dumps(link)}) !== null")
    await page.click(link)
    await page.until("document.querySelector('#room').open")
    assert room in await page.text("#room-name")
    assert not page.errors


async def test_a_room_that_is_not_known_is_said_so(stage: Stage) -> None:
    page = await stage.drawn("#room-42")
    await page.until("document.querySelector('#room .fault')?.innerText.includes('not known')")


@pytest.mark.parametrize("look", LOOKS)
async def test_nothing_keeps_anybody_out_of_it(stage: Stage, look: str) -> None:
    """By axe: names, roles, contrast; by day, by night, on a phone; the sheet of a room, too."""
    width, height, dark = LOOKS[look]
    page = await stage.drawn()
    await page.look(width, height, dark)
    await page.js("document.querySelector('#ask-text').focus()")
    await page.type(CHAT[0]["content"])
    await page.until("document.querySelector('#answer .held li') !== null")
    assert await page.js("document.documentElement.scrollWidth <= window.innerWidth")
    await page.shot(SHOTS / f"{look}.png")
    await page.js(axe())
    assert await serious(page) == []
    (room, *_) = (await stage.running.get("/rooms?limit=1"))["rooms"]
    await page.js(f"location.hash = 'room-{room['room']}'")
    await page.until("document.querySelector('.waterfall') !== null")
    await page.shot(SHOTS / f"{look}-room.png", whole=False)
    assert await serious(page) == []
    assert not page.errors


def axe() -> str:
    spec = importlib.util.find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None, "make test installs axe-core-python"
    return (Path(spec.origin).parent / "axe.min.js").read_text()


async def serious(page: Page) -> list[str]:
    found = await page.js("axe.run(document).then(told => told.violations)")
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]} {node.get('failureSummary', '')}"
        for one in found
        for node in one["nodes"]
        if one["impact"] in ("serious", "critical")
    ]


async def test_a_caller_from_elsewhere_needs_the_key_and_sees_nothing_before(stage: Stage) -> None:
    page = await stage.page(**{"X-Forwarded-For": "192.0.2.7"})
    await page.until("!document.querySelector('#key').hidden")
    assert "127.0.0.1" not in await page.text("main")
    await page.shot(SHOTS / "locked.png")
    await page.js("document.querySelector('#key-text').focus()")
    await page.type("wrong")
    await page.press("Enter", 13, "\r")
    await page.until("document.querySelector('#key-text').value === ''")
    await page.type(KEY)
    await page.press("Enter", 13, "\r")
    await page.until("document.querySelectorAll('[data-worker][data-state=serving]').length === 3")
    assert KEY not in await page.js("document.documentElement.outerHTML")


async def test_a_prefill_that_is_killed_is_seen_within_two_seconds(stage: Stage) -> None:
    page = await stage.drawn()
    seat = stage.running.engines["prefill-2"]
    row = f"document.querySelector(`[data-worker='{seat.pod}']`)"
    assert await page.js(f"{row}.dataset.state") == "serving"
    began = time.monotonic()  # pictures come each half second; what they are late, all is
    for _ in range(2):
        age = await page.js("document.querySelector('#figures').innerHTML")
        await until(lambda: _differs(page, age), what="another picture")
    slow = max(1.0, (time.monotonic() - began) / 1.5)
    stage.running.children["prefill-2"].kill()
    killed = time.monotonic()
    await page.until(f"{row}.dataset.state !== 'serving'")
    assert time.monotonic() - killed < 2.0 * slow
    await page.until(
        "document.querySelector('#findings').innerText.includes('next') || document.querySelector('#findings li') !== null"
    )
    await page.shot(SHOTS / "killed.png")
    assert not page.errors


async def _differs(page: Page, before: str) -> bool:
    return bool(await page.js("document.querySelector('#figures').innerHTML") != before)


async def test_it_says_when_the_gateway_is_gone_and_comes_back_by_itself(stage: Stage) -> None:
    page, gateway = await stage.drawn(), stage.running.children["gateway"]
    await gateway.stop()
    await page.until("!document.querySelector('#away').hidden")
    assert "Not connected" in await page.text("#away-text")
    assert await page.js("document.querySelector('#main').dataset.fresh") == "no"
    await page.shot(SHOTS / "away.png")
    await gateway.start()
    await page.until(
        "document.querySelector('#away').hidden && document.querySelector('#link').dataset.link === 'live'",
        30,
    )
    await asyncio.sleep(0)
