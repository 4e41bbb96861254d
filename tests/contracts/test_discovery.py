"""Discovery: what every source of workers keeps, over engines on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from kit.clock import FakeClock
from kit.engine import HANG, FakeEngine, fake_engine
from kit.ports import free_port
from kit.wait import until

from kvplane.router.discovery import DISCOVERIES, Static
from kvplane.router.settings import ProbeSettings
from kvplane.vocabulary import Pod, Role, WorkerUp

SETTINGS = ProbeSettings(interval_s=5.0, deadline_s=1.0, first_wait_s=0.1, most_wait_s=1.0)
INFO: dict[str, Any] = {
    "disaggregation_mode": "prefill", "page_size": 16, "kvplane": {"generation": "g1"},
}  # fmt: skip


class Heard:
    """What was told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ups: list[WorkerUp] = []
        self.signs: list[tuple[bool, str]] = []
        self.settled = True  # is a worker that is well left alone for a while?

    async def up(self, worker: WorkerUp) -> None:
        self.told.append(f"up {worker.pod} {worker.generation}")
        self.ups.append(worker)

    def down(self, pod: Pod) -> None:
        self.told.append(f"down {pod}")

    def health(self, pod: Pod, ok: bool, reason: str) -> bool:
        self.signs.append((ok, reason))
        return self.settled and ok


Begin = Callable[..., Any]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=sorted(DISCOVERIES))
async def begin(
    request: pytest.FixtureRequest, heard: Heard, clock: FakeClock
) -> AsyncIterator[Begin]:
    """Begin a discovery over these URLs; it is stopped at the end and leaves no task."""
    made: list[Any] = []
    async with aiohttp.ClientSession() as session:

        async def start(*urls: str) -> Any:
            workers = [
                WorkerUp(Pod(f"p{at + 1}"), url, Role.PREFILL) for at, url in enumerate(urls)
            ]
            kind = DISCOVERIES[request.param]
            found = kind(workers, session, clock, heard.up, heard.down, heard.health, SETTINGS)
            made.append(found)
            await found.start()
            return found

        yield start
        for found in made:
            await found.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("worker")] == []


async def tick(clock: FakeClock, condition: Callable[[], bool], step: float = 5.0) -> None:
    """Let time pass until it is so."""

    def so() -> bool:
        if condition():
            return True
        clock.advance(step)
        return condition()

    await until(so, timeout_s=10)


async def tick_looks(clock: FakeClock, engine: FakeEngine) -> None:
    """Let time pass until its metrics were read again, and what they said was told."""
    seen = engine.asked.count("/metrics")
    await tick(clock, lambda: engine.asked.count("/metrics") >= seen + 2)


async def test_a_living_engine_is_told_once_with_its_facts(begin: Begin, heard: Heard) -> None:
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told), timeout_s=5)
        assert heard.told == ["up p1 g1"]
        assert heard.ups[0].block_size == 16


async def test_a_worker_that_is_not_settled_is_looked_at_again_soon(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    """Whether it is, the one who hears the signs says: a circuit may be open while all is well."""
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told) and clock.sleeping() == 1)
        heard.settled = False
        clock.advance(SETTINGS.interval_s)
        for looks in range(1, 4):
            await until(lambda n=looks: len(heard.signs) == n and clock.sleeping() == 1)  # type: ignore[misc]
            clock.advance(SETTINGS.again_s)
        heard.settled = True
        await until(lambda: len(heard.signs) == 4 and clock.sleeping() == 1)
        clock.advance(SETTINGS.again_s)
        assert clock.sleeping() == 1, "it is left alone for longer now"
        clock.advance(SETTINGS.interval_s)
        await until(lambda: len(heard.signs) == 5)


async def test_start_does_not_wait_for_engines_that_are_down_or_silent(
    begin: Begin, heard: Heard
) -> None:
    async with fake_engine(health=HANG) as silent, fake_engine(server_info=INFO) as good:
        found = await begin(f"http://127.0.0.1:{free_port()}", silent.url, good.url)
        await until(lambda: heard.told == ["up p3 g1"], timeout_s=5)
        await until(lambda: "no answer" in found.waiting()[1].reason, timeout_s=5)
        assert [waiting.declared.pod for waiting in found.waiting()] == ["p1", "p2"]


async def test_an_engine_that_starts_later_is_found(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(health=503, server_info=INFO) as engine:
        found = await begin(engine.url)
        await tick(clock, lambda: engine.asked.count("/health") >= 3, step=1.0)
        assert heard.told == [] and "answered 503" in found.waiting()[0].reason
        engine.answers["/health"] = 200
        await tick(clock, lambda: heard.told == ["up p1 g1"], step=1.0)
        assert found.waiting() == ()


async def test_an_engine_that_goes_on_as_before_is_not_told_again(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await tick(clock, lambda: len(heard.signs) >= 4)
        assert heard.told == ["up p1 g1"]
        assert set(heard.signs) == {(True, "")}


async def test_a_new_generation_is_down_then_up(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told), timeout_s=5)
        engine.answers["/server_info"] = {**INFO, "kvplane": {"generation": "g2"}}
        await tick(clock, lambda: len(heard.told) == 3)
        assert heard.told == ["up p1 g1", "down p1", "up p1 g2"]


async def test_an_engine_in_trouble_is_a_sign_and_not_a_departure(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told), timeout_s=5)
        engine.answers["/health"] = 503
        await tick(clock, lambda: any(not ok for ok, _ in heard.signs))
        assert heard.signs[-1] == (False, "GET /health answered 503")
        engine.answers["/health"] = 200
        await tick(clock, lambda: heard.signs[-1][0])
        assert heard.told == ["up p1 g1"]


async def test_an_engine_without_generation_that_came_back_changed_is_told_again(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    plain = {"disaggregation_mode": "prefill", "page_size": 16}
    async with fake_engine(server_info=plain, ready=200) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told), timeout_s=5)
        engine.answers["/ready"] = 500
        await tick(clock, lambda: (False, "GET /ready answered 500") in heard.signs)
        engine.answers |= {"/ready": 200, "/server_info": {**plain, "page_size": 32}}
        await tick(clock, lambda: len(heard.ups) == 2)
        assert [up.block_size for up in heard.ups] == [16, 32]
        assert heard.told == ["up p1 None", "up p1 None"]


def page(started: float, awake: int = 1) -> bytes:
    """What vLLM's /metrics says of its life."""
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started}",
        f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}.0',
        'vllm:cache_config_info{_block_size_resolved="True",block_size="32",engine="0"} 1.0',
    ]
    return "\n".join(lines).encode()


MODELS = {"data": [{"id": "tiny"}]}
FIRST = "up p1 started:1700000000"


async def test_an_engine_without_generation_restarted_when_its_process_is_younger(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(v1__models=MODELS, metrics=page(1_700_000_000.2)) as engine:
        await begin(engine.url)
        await until(lambda: heard.told == [FIRST], timeout_s=5)
        for said in (page(1_700_000_000.4), page(1_700_000_001.3), page(1_600_000_000), 404, 500):
            engine.answers["/metrics"] = said
            await tick_looks(clock, engine)
        assert heard.told == [FIRST]
        engine.answers["/metrics"] = page(1_700_000_009)
        await tick(clock, lambda: len(heard.told) == 3)
        assert heard.told == [FIRST, "down p1", "up p1 started:1700000009"]
        assert [up.block_size for up in heard.ups] == [32, 32]


async def test_a_start_that_is_told_late_is_no_restart(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(v1__models=MODELS, metrics=b"nothing\n") as engine:
        await begin(engine.url)
        await until(lambda: heard.told == ["up p1 None"], timeout_s=5)
        engine.answers["/metrics"] = page(1_700_000_000)
        await tick(clock, lambda: len(heard.told) == 2)
        assert heard.told == ["up p1 None", FIRST]


async def test_an_engine_that_sleeps_is_told_again_and_so_is_its_waking(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(v1__models=MODELS, metrics=page(1_700_000_000)) as engine:
        await begin(engine.url)
        await until(lambda: heard.told == [FIRST], timeout_s=5)
        engine.answers["/metrics"] = page(1_700_000_000, awake=0)
        await tick(clock, lambda: len(heard.ups) == 2)
        engine.answers["/metrics"] = 503  # says nothing new
        await tick_looks(clock, engine)
        engine.answers["/metrics"] = page(1_700_000_000)
        await tick(clock, lambda: len(heard.ups) == 3)
        assert [up.asleep for up in heard.ups] == [False, True, False]
        assert heard.told == [FIRST] * 3


async def test_an_engine_that_keeps_silent_about_itself_serves_and_is_asked_again(
    begin: Begin, heard: Heard, clock: FakeClock
) -> None:
    async with fake_engine(server_info=HANG) as engine:
        await begin(engine.url)
        await until(lambda: bool(heard.told), timeout_s=5)
        assert heard.ups[0].block_size is None
        engine.answers["/server_info"] = INFO
        await tick(clock, lambda: len(heard.ups) == 2)
        assert heard.ups[1].block_size == 16


async def test_a_callback_that_fails_is_called_again(
    begin: Begin, heard: Heard, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    really = heard.up

    async def up(worker: WorkerUp) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("store down")
        await really(worker)

    monkeypatch.setattr(heard, "up", up)
    async with fake_engine(server_info=INFO) as engine:
        await begin(engine.url)
        await tick(clock, lambda: heard.told == ["up p1 g1"])


# Static's own: workers at runtime ---------------------------------------------------------------


async def test_a_worker_can_be_added_and_removed_at_runtime(begin: Begin, heard: Heard) -> None:
    async with fake_engine(server_info=INFO) as engine:
        found: Static = await begin()
        found.add(WorkerUp(Pod("late"), engine.url, Role.PREFILL))
        with pytest.raises(ValueError, match="late: is already there"):
            found.add(WorkerUp(Pod("late"), engine.url, Role.PREFILL))
        await until(lambda: heard.told == ["up late g1"], timeout_s=5)
        assert await found.remove(Pod("late"))
        assert not await found.remove(Pod("late"))
        assert heard.told == ["up late g1", "down late"]


async def test_an_engine_has_one_name_however_often_it_is_added(begin: Begin, heard: Heard) -> None:
    """Those of `make demo` have names; a script knows where they are."""
    async with fake_engine(server_info=INFO) as engine:
        found: Static = await begin(engine.url)
        with pytest.raises(ValueError, match=f"{engine.url} is already there as p1"):
            found.add(WorkerUp(Pod("again"), engine.url, Role.BOTH))
        await until(lambda: heard.told == ["up p1 g1"], timeout_s=5)
        assert list(found.named()) == ["p1"]
        assert await found.remove(Pod("p1"))
        found.add(WorkerUp(Pod("again"), engine.url, Role.PREFILL))
        await until(lambda: heard.told[-1] == "up again g1", timeout_s=5)


async def test_removing_a_worker_that_never_served_tells_nothing(
    begin: Begin, heard: Heard
) -> None:
    found: Static = await begin(f"http://127.0.0.1:{free_port()}")
    assert await found.remove(Pod("p1"))
    assert heard.told == [] and found.waiting() == ()
