"""Browser: headless Chromium over its DevTools protocol: what a person would see and press."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from kit.wait import until

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
    "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--disable-features=Translate,OptimizationHints,MediaRouter", "--remote-debugging-port=0",
    "--force-color-profile=srgb", "--font-render-hinting=none", "--no-proxy-server",
)  # fmt: skip
START_S = 60.0
WAITING = """new Promise(done => { const look = () => {
    let seen = false;
    try { seen = Boolean(%s) } catch { /* not there yet */ }
    if (seen || performance.now() - began > %d) done(seen); else setTimeout(look, 25);
}; const began = performance.now(); look(); })"""


def chromium() -> str | None:
    """Where Chromium is; None where this machine has none."""
    told = os.environ.get("KVPLANE_TEST_CHROMIUM")
    return told or next(filter(None, map(shutil.which, NAMES)), None)


class PageFailed(AssertionError):
    """The page threw something."""


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self.target = browser, session, target
        self.errors: list[str] = []  # of the console, uncaught, or refused by the page's own policy

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, params, self._session)

    def heard(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.errors.append(f"{details['text']} {thrown}".strip())
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", one)) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}".strip())

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        complete = "document.readyState === 'complete' && location.href !== 'about:blank'"
        await until(lambda: self.js(complete), what=f"{url} to be loaded")

    async def js(self, expression: str) -> Any:
        """The value of an expression, a promise waited for. Raises PageFailed."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True,
            userGesture=True,
        )  # fmt: skip
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageFailed(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> None:
        """Wait for an expression that is true, as JavaScript sees it: an element is. The page looks
        itself, so that waiting costs next to nothing."""
        assert await self.js(WAITING % (expression, timeout_s * 1000)), (
            f"not within {timeout_s} s: the page: {expression}"
        )

    async def text(self, selector: str) -> str:
        """What stands there, as it is shown."""
        return str(
            await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    async def click(self, selector: str) -> None:
        """A press of the mouse in its middle."""
        place = await self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place
            )

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            told = {"key": key, "windowsVirtualKeyCode": code, "code": key}
            if text and kind == "keyDown":
                told["text"] = text
            await self.call("Input.dispatchKeyEvent", type=kind, **told)

    async def look(self, width: int, height: int, dark: bool = False) -> None:
        """As on a screen of this size, by day or night."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    async def shot(self, path: Path, whole: bool = True) -> None:
        """A picture of the page."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        await asyncio.to_thread(_keep, path, base64.b64decode(found["data"]))


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class Browser:
    """One process of Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._task = asyncio.create_task(self._hear())

    async def call(self, method: str, params: Any = None, session: str | None = None) -> Any:
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": params or {}}
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(told | ({"sessionId": session} if session else {}))
        return await asyncio.wait_for(self._waiting[number], START_S)

    async def page(self) -> Page:
        """A new tab."""
        target = (await self.call("Target.createTarget", {"url": "about:blank"}))["targetId"]
        attached = await self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        return page

    async def tidy(self) -> None:
        """Close all tabs: each of them holds one of the few connections a browser has to a host."""
        for page in list(self._pages.values()):
            await self.call("Target.closeTarget", {"targetId": page.target})
        self._pages.clear()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._socket.close()

    async def _hear(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (waiting := self._waiting.pop(told.get("id", 0), None)) is not None:
                if "error" in told:
                    waiting.set_exception(PageFailed(told["error"]["message"]))
                else:
                    waiting.set_result(told["result"])
            elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                page.heard(told["method"], told["params"])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Chromium with nothing open; gone at the end, and its profile with it."""
    found = chromium()
    assert found, "no Chromium here; ask chromium() before"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            found, *FLAGS, f"--user-data-dir={home}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HOME": home},
        )  # fmt: skip
        drain = None
        try:
            address = await asyncio.wait_for(_address(process), START_S)
            drain = asyncio.create_task(_drain(process))
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                made = Browser(socket)
                try:
                    yield made
                finally:
                    await made.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if drain is not None:
                await asyncio.gather(drain, return_exceptions=True)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = []
    async for line in process.stderr:
        said.append(line.decode(errors="replace"))
        if match := re.search(r"DevTools listening on (ws://\S+)", said[-1]):
            return match[1]
    raise AssertionError(f"Chromium ended: {''.join(said[-20:])}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65_536):
        pass
