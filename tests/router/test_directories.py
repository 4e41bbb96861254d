"""Directories: when a prefill is found, when it is lost, and how often anybody is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.clock import FakeClock
from kit.wait import until

from kvplane.bootstrap import BootstrapError, NoDirectory, NotRegistered, Silent, Topology
from kvplane.router.directories import Directories
from kvplane.router.fleet import Fleet
from kvplane.router.settings import WatchSettings
from kvplane.vocabulary import Generation, Pod, Role, WorkerUp

P1, P2 = Pod("p1"), Pod("p2")
AT = "10.0.0.1:8998"
TOPOLOGY = Topology(attn_tp_size=4, attn_cp_size=1, dp_size=1, pp_size=2, page_size=64)
DOWN = NoDirectory(AT, "connection refused")


@dataclass
class Asked:
    """Answers what `says` holds at the moment; counts who asks."""

    says: BootstrapError | None = None
    calls: list[str] = field(default_factory=list)
    out: int = 0
    most_out: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def topology(
        self, address: str, deadline_s: float | None = None
    ) -> tuple[Topology, Generation | None]:
        self.calls.append(address)
        self.out += 1
        self.most_out = max(self.out, self.most_out)
        try:
            await self.gate.wait()
        finally:
            self.out -= 1
        if self.says is not None:
            raise self.says
        return TOPOLOGY, Generation("g")


@dataclass
class Desk:
    """A fleet, who watches it, and time."""

    asked: Asked
    fleet: Fleet
    clock: FakeClock
    directories: Directories
    outcomes: list[str]

    def up(self, pod: Pod, host: str = "10.0.0.1", **facts: object) -> None:
        worker = WorkerUp(pod, f"http://{host}:3", Role.PREFILL, **facts)  # type: ignore[arg-type]
        self.fleet.up(worker)
        self.directories.up(worker)

    def trouble(self, pod: Pod = P1) -> str:
        return next(t.trouble for t in self.fleet.targets() if t.worker.pod == pod)

    async def looks(self, count: int) -> None:
        await until(lambda: len(self.outcomes) >= count)
        await asyncio.sleep(0)  # what came of it is booked in the same step

    async def look(self, after_s: float) -> None:
        """Time passes; one more look is made."""
        seen = len(self.outcomes)
        await until(lambda: self.clock._sleepers)
        self.clock.advance(after_s)
        await self.looks(seen + 1)
        await until(lambda: self.clock._sleepers)


@pytest.fixture
async def desk(clock: FakeClock) -> AsyncIterator[Desk]:
    asked, fleet, outcomes = Asked(), Fleet(), list[str]()
    asked.gate.set()
    directories = Directories(asked, fleet, clock, WatchSettings(), outcomes.append)
    await directories.start()
    yield Desk(asked, fleet, clock, directories, outcomes)
    await directories.stop()


async def test_a_prefill_is_lost_until_its_directory_was_seen(desk: Desk) -> None:
    desk.up(P1, dp_size=2)
    assert desk.fleet.selectable(Role.PREFILL) == ()
    assert desk.trouble() == (
        "resolve-topology: the rank directory at 10.0.0.1:8998 was not looked at yet"
    )
    await until(lambda: desk.trouble() == "")
    found = desk.fleet.selectable(Role.PREFILL)
    assert [target.up.shape.page_size for target in found] == [64, 64]
    assert desk.asked.calls == [AT] and desk.outcomes == ["found"]


@pytest.mark.parametrize(
    ("says", "trouble"),
    [
        (DOWN, "register: no bootstrap server at 10.0.0.1:8998: connection refused"),
        (NotRegistered(AT, "2 of 4"), "register: bootstrap server 10.0.0.1:8998: 2 of 4"),
        (
            Silent(AT, 2.0),
            "resolve-topology: bootstrap server 10.0.0.1:8998: no answer within 2.0 s",
        ),
    ],
)
async def test_why_it_is_lost_is_named_by_stage_and_address(
    desk: Desk, says: BootstrapError, trouble: str
) -> None:
    desk.asked.says = says
    desk.up(P1)
    await until(lambda: desk.trouble() == trouble)
    assert desk.outcomes == [type(says).__name__]
    desk.asked.says = None
    await desk.look(1.3)
    assert desk.trouble() == ""


ELSEWHERE = (
    "resolve-topology: the rank directory at 10.0.0.1:8999 is another engine's: it was named with "
    "bootstrap port 8999, the engine itself says that its own is 8998"
)


@pytest.mark.parametrize(
    ("facts", "trouble"),
    [
        ({"generation": "other"}, ELSEWHERE),
        ({"generation": "other", "bootstrap_host": "10.0.0.1"}, ELSEWHERE),
        ({"engine": "sglang"}, ELSEWHERE),  # tells no life that a directory would tell
        ({"engine": "sglang", "generation": "started:1"}, ELSEWHERE),
        ({"generation": "g"}, ""),  # a forwarded port: its own life answers there
        ({"engine": "sglang", "bootstrap_host": "10.0.0.1"}, ""),  # named for the directory alone
        ({"own_bootstrap_port": None, "generation": "other"}, ""),  # it does not say
        ({"own_bootstrap_port": 8999, "generation": "other"}, ""),  # a new life, not asked yet
    ],
)
async def test_a_prefill_that_was_named_with_the_directory_of_another_is_lost(
    desk: Desk, facts: dict[str, Any], trouble: str
) -> None:
    desk.up(P2, bootstrap_port=8999, own_bootstrap_port=8999)
    desk.up(P1, **({"bootstrap_port": 8999, "own_bootstrap_port": 8998} | facts))
    await desk.looks(2)
    await until(lambda: desk.trouble() == trouble)
    serving = [target.worker.pod for target in desk.fleet.selectable(Role.PREFILL)]
    assert serving == ([P2] if trouble else [P1, P2])
    assert sorted(desk.outcomes) == (["Elsewhere", "found"] if trouble else ["found", "found"])


async def test_it_is_back_as_soon_as_it_is_named_with_its_own(desk: Desk) -> None:
    desk.up(P1, bootstrap_port=8999, own_bootstrap_port=8998)
    await until(lambda: desk.trouble() == ELSEWHERE)
    desk.up(P1, bootstrap_port=8998, own_bootstrap_port=8998)
    await until(lambda: desk.trouble() == "")


async def test_one_failure_of_a_found_one_is_a_blip_two_are_not(desk: Desk) -> None:
    desk.up(P1)
    await until(lambda: desk.trouble() == "")
    desk.asked.says = DOWN
    await desk.look(2.0)
    assert desk.trouble() == ""
    await desk.look(0.4)
    assert desk.trouble().startswith("register")


async def test_a_silent_address_is_asked_ever_more_seldom_and_by_one_at_a_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", max)  # no chance: the longer wait of each
    desk.asked.says, waits = Silent(AT, 2.0), list[float]()
    desk.asked.gate.clear()
    desk.up(P1)
    desk.up(P2)  # the same address: a second worker of this host that named no port
    await until(lambda: desk.asked.out == 1)
    desk.asked.gate.set()
    await desk.looks(2)
    for _ in range(6):
        await until(lambda: len(desk.clock._sleepers) == 2)
        waits.append(min(at for at, _ in desk.clock._sleepers) - desk.clock.now())
        seen = len(desk.outcomes)
        desk.clock.advance(7)
        await desk.looks(seen + 2)
    assert desk.asked.most_out == 1
    assert waits == pytest.approx([0.3, 0.6, 1.2, 2.4, 4.8, 6.0])


async def test_new_facts_of_a_found_one_do_not_lose_it(desk: Desk) -> None:
    desk.up(P1)
    await until(lambda: desk.trouble() == "")
    desk.up(P1, model="tiny")
    (target,) = desk.fleet.selectable(Role.PREFILL)
    assert (target.up.model, target.up.shape.tp) == ("tiny", 4)


async def test_one_that_left_is_looked_at_no_more_and_comes_back_as_a_stranger(desk: Desk) -> None:
    desk.up(P1)
    await until(lambda: desk.trouble() == "")
    desk.fleet.down(P1)
    await desk.directories.down(P1)
    desk.clock.advance(100)
    await desk.directories.down(P1)  # twice is nothing
    assert desk.outcomes == ["found"]
    desk.up(P1)
    assert "not looked at yet" in desk.trouble()


async def test_an_address_that_cannot_be_is_named(desk: Desk) -> None:
    desk.up(P1, bootstrap_host="a:b:c")
    await until(lambda: "a:b:c" in desk.trouble() and desk.outcomes)
    assert desk.asked.calls == [] and desk.outcomes == ["BadAddress"]


async def test_only_prefills_that_meet_through_a_directory_are_looked_for(desk: Desk) -> None:
    desk.up(P1, engine="vllm")
    decode = WorkerUp(P2, "http://d:1", Role.DECODE)
    desk.fleet.up(decode)
    desk.directories.up(decode)
    assert desk.trouble() == desk.trouble(P2) == ""
    assert desk.asked.calls == []


@pytest.mark.parametrize("facts", [{"engine": "vllm"}, {"handoff": "vllm-mooncake"}])
async def test_a_prefill_that_decodes_find_in_another_way_is_not_looked_for(
    desk: Desk, facts: dict[str, str]
) -> None:
    desk.up(P1, **facts)
    assert desk.trouble() == ""
    await asyncio.sleep(0)
    assert desk.asked.calls == []


async def test_a_pod_whose_engine_is_another_now_is_no_longer_lost(desk: Desk) -> None:
    desk.up(P1)
    assert "not looked at yet" in desk.trouble()
    desk.up(P1, engine="vllm")
    assert desk.trouble() == ""
