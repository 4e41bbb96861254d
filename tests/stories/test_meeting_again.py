"""Meeting again: a failed transfer, a stopped prefill, a directory that forgot; real engines.

What went wrong is named and harms nobody else; nobody is restarted for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from kit.house import House, Reply, house
from kit.plane import EngineSeat, together
from kit.ports import free_port
from kit.wait import until

from kvplane.vocabulary import Role

PROMPT = list(range(40, 90))
NO_RETRY = ("--retry-max-retries", "0")


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as built:
        yield built


async def test_one_failed_transfer_is_no_sentence_and_many_are_a_short_one(home: House) -> None:
    """FR-TR-06: the peer is used again at once, or after a pause that can be seen."""
    prefill, decode = await home.pair()
    pause = ("--cb-failure-threshold", "3", "--cb-timeout-duration-secs", "3")
    await home.gateway(*prefill.words, *decode.words, *NO_RETRY, *pause)
    await home.fault(prefill, stage="verify", kind="flip-byte", count=1)
    found = await home.generate(PROMPT)
    assert (found.status, found.error["stage"]) == (502, "verify")
    assert (await home.generate(PROMPT)).status == 200
    await home.fault(prefill, stage="verify", kind="flip-byte", count=9)
    failed = 0
    while (refused := await home.generate([70 + failed] * 40)).status == 502:
        failed += 1
    assert (refused.status, refused.error["code"]) == (503, "no_prefill_available")
    assert 0 < failed <= 3
    assert "failed too often" in refused.error["message"] and refused.headers["retry-after"]
    said = [one["sentence"] for one in (await home.get("/diagnosis"))["findings"]]
    assert f"prefill {prefill.pod} failed too often: its circuit is open" in said
    async with home.session.delete(f"{prefill.url}/fault"):
        pass  # the peer is fine
    await until(lambda: answered(home))
    assert (await home.generate(PROMPT)).status == 200


async def answered(home: House) -> bool:
    return (await home.generate(PROMPT)).status == 200


async def test_a_prefill_stopped_in_the_middle_of_transfers_harms_only_its_own(
    home: House,
) -> None:
    """FR-TR-10: the others keep their pace; its own requests fail or move within the deadline."""
    sick = EngineSeat("sick", "prefill")
    async with together([child := sick.child()]):
        well = [await home.engine(Role.PREFILL) for _ in range(2)]
        decodes = [await home.engine(Role.DECODE, room_s=2.0) for _ in range(2)]
        words = [word for engine in (*well, *decodes) for word in engine.words]
        spread = ("--policy", "round_robin", "--cb-failure-threshold", "2")
        await home.gateway(*words, *sick.gateway_flags(), *spread)
        await until(lambda: home.all_well(sick.pod, *(one.pod for one in well)))
        await home.post("/fault", {"stage": "verify", "kind": "delay", "count": 99}, at=sick.url)
        asked = [asyncio.create_task(home.generate([40 + n] * 60)) for n in range(9)]
        await until(lambda: rooms_open(home, sick))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        try:
            asked += [asyncio.create_task(home.generate([60 + n] * 60)) for n in range(9)]
            answers = await asyncio.gather(*asked)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        moved = 0
        for answer in answers:
            tried = await attempts(home, answer)
            assert answer.status == 200 or answer.error["stage"], answer.body
            moved += sick.pod in tried
            assert answer.took_s < (10 if sick.pod in tried else 2.0), (tried, answer)
        assert 3 <= moved <= 9
        assert all(answer.status == 200 for answer in answers), "each moved"


async def rooms_open(home: House, seat: EngineSeat) -> bool:
    return bool((await home.get("/truth", at=seat.url))["rooms"]["open"])


async def attempts(home: House, answer: Reply) -> list[str]:
    """The prefills a request was sent to, in order."""
    told = await home.get(f"/requests/{answer.headers['x-request-id']}")
    return [one["prefill"]["worker"] for one in told["attempts"]]


async def test_a_prefill_restarted_at_its_address_is_met_on_its_new_ports(home: House) -> None:
    """FR-BS-03: its directory stays; the gateway sees one new life, and no request is lost."""
    port = free_port()
    await home.directory(port)
    prefill = await home.engine(Role.PREFILL, directory=False, bootstrap_port=port)
    decode = await home.engine(Role.DECODE)
    looking = ("--health-check-interval-secs", "1")  # later than the first requests
    await home.gateway(*prefill.words, *decode.words, *looking)
    assert (await home.generate(PROMPT)).status == 200
    lives = [(await home.worker(prefill.pod))["generation"]]
    await home.leave(prefill)
    again = await home.engine(
        Role.PREFILL, directory=False, bootstrap_port=port, port=prefill.engine.settings.port
    )
    await until(lambda: again.engine.not_ready() is None)
    for number in range(3):
        found = await home.generate([60 + number] * 40)
        assert found.status == 200, found.body

    async def seen() -> bool:
        now = (await home.worker(prefill.pod)).get("generation")
        if now and now != lives[-1]:
            lives.append(now)
        return bool(now == again.engine.generation)

    await until(seen)
    assert lives == [prefill.engine.generation, again.engine.generation]
    await until(lambda: home.well(prefill.pod))
    assert (await home.generate(PROMPT)).status == 200


async def test_a_directory_that_comes_back_empty_is_filled_again_and_newcomers_meet(
    home: House,
) -> None:
    """FR-TR-09: in between the failure is named; nobody has to be restarted."""
    port = free_port()
    directory = await home.directory(port)
    prefill = await home.engine(Role.PREFILL, directory=False, bootstrap_port=port)
    decode = await home.engine(Role.DECODE)
    await home.gateway(*prefill.words, *decode.words, *NO_RETRY)
    assert (await home.generate(PROMPT)).status == 200
    await home.end(directory)
    await until(lambda: not_selected(home, prefill.pod))
    assert (await home.generate(PROMPT)).error["stage"] == "register"
    direct = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 77}
    body = {"input_ids": [45] * 40, "sampling_params": {"max_new_tokens": 2}} | direct
    found = await home.post("/generate", body, at=decode.url)
    assert found.error["stage"] == "register"
    assert f"no bootstrap server at 127.0.0.1:{port}" in found.error["message"]
    await home.directory(port)
    newcomer = await home.engine(Role.DECODE)
    await home.add(newcomer)
    await until(lambda: home.all_well(prefill.pod, newcomer.pod))
    answers = await asyncio.gather(*(home.generate([50 + n] * 40) for n in range(6)))
    assert {one.status for one in answers} == {200}
    assert {one.headers["x-kvplane-decode"] for one in answers} == {decode.pod, newcomer.pod}


async def not_selected(home: House, pod: str) -> bool:
    return not await home.well(pod)
