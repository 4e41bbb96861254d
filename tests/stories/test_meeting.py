"""Meeting: real engines behind a real gateway, and what keeps a prefill and a decode apart.

One story for each report of the field (FR-BS-*, FR-TR-*) that needs the whole plane.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kit.engine import fake_engine
from kit.house import House, house, prefill_facts, served
from kit.ports import free_port
from kit.wait import until

from kvplane.vocabulary import Role

PROMPT = list(range(40, 90))


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as built:
        yield built


async def test_a_prefill_that_cannot_register_is_named_at_once_and_not_selected(
    home: House,
) -> None:
    """FR-BS-02, second run: its bootstrap server was never started; its own health says so."""
    prefill = await home.engine(Role.PREFILL, directory=False)
    decode = await home.engine(Role.DECODE)
    await home.gateway(*prefill.words, *decode.words, ready=False)
    await until(lambda: waits_at_register(home, prefill.pod))
    found = await home.generate(PROMPT)
    assert (found.status, found.error["stage"]) == (503, "register")
    assert f"127.0.0.1:{prefill.bootstrap_port}" in found.error["message"]
    assert found.took_s < 2
    assert not (await home.worker(prefill.pod))["is_healthy"]


async def waits_at_register(home: House, pod: str) -> bool:
    return "regist" in (await home.worker(pod))["reason"]


async def test_a_prefill_that_looks_healthy_without_its_directory_gets_no_request(
    home: House,
) -> None:
    """FR-BS-02, second run, with an engine whose health knows nothing of its directory."""
    nobody = free_port()
    decode = await home.engine(Role.DECODE)
    async with fake_engine(**prefill_facts(nobody)) as prefill:
        await home.gateway("--prefill", prefill.url, str(nobody), *decode.words, ready=False)
        pod = prefill.url.removeprefix("http://")
        await until(lambda: waits_at_register(home, pod))
        found = await home.generate(PROMPT)
        assert (found.status, found.error["stage"]) == (503, "register")
        assert f"127.0.0.1:{nobody}: connection refused" in found.error["message"]
        assert found.took_s < 2 and served(prefill) == 0
        findings = (await home.get("/diagnosis"))["findings"]
        (said,) = (one["sentence"] for one in findings if one["culprit"] == pod and one["blocks"])
        assert f"register: no bootstrap server at 127.0.0.1:{nobody}" in said
