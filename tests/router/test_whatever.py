"""Whatever: any fleet in any state, any attempts, and still a stage, a culprit and a next step.

Random scenes by seed. Each finding is as its row in the operator's guide has it, is said once, and
nothing blocks without somebody to blame.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from kit.rules import held

from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.diagnosis import Scene, findings, report
from kvplane.router.diagnosis_rooms import BIND, GIVEN_UP, NOBODY
from kvplane.router.discovery import Waiting
from kvplane.router.fleet import Fleet
from kvplane.router.meeting import Meeting
from kvplane.router.plans import REASONS
from kvplane.router.remembered import Party, Why
from kvplane.router.settings import BreakerSettings
from kvplane.router.target import Lost
from kvplane.vocabulary import (
    MEETING,
    Epoch,
    Knowledge,
    Known,
    Pod,
    Role,
    Room,
    Shape,
    Stage,
    StageRecord,
    Worker,
    WorkerUp,
)

NAMES = ("w1", "w2", "w3", "w4")
SAID = ("", "503", "fault", *GIVEN_UP)  # at any stage
DETAILS = {  # and at one alone
    Stage.REGISTER: ("dp rank 0 is not registered",),
    Stage.RESOLVE_TOPOLOGY: ("no bootstrap server at h:1", "not fully registered yet"),
    Stage.RESOLVE_RANK: ("Bootstrap info not found",),
    Stage.CONNECT: ("w1 does not fit: page_size", NOBODY, "generation 'b', expected 'a'", BIND),
    Stage.VERIFY: (
        "room mismatch (1 != 2)",
        "its own checksum does not fit",
        "the prefill's commit not within 60 s",
    ),
    Stage.CONSUME: ("no free page",),
}
WORDS = ("w1:1 refused the connection", "GET /health answered 503", "TLS: no", "rank is missing")
CODES = ("deadline_exceeded", "transfer_failed", "prefill_failed", "invalid_request", "overloaded")


def worker(chance: random.Random, name: str) -> WorkerUp:
    return WorkerUp(
        Pod(name), f"http://{name}:1", chance.choice(list(Role)),
        model=chance.choice(("", "tiny", "tiny", "big")),
        dp_size=chance.choice((1, 1, 2)), draining=chance.random() < 0.1,
        events=chance.choice(((), ("tcp://h:5557",))), bootstrap_port=chance.choice((None, 8998)),
        shape=Shape(page_size=chance.choice((16, 64))),
    )  # fmt: skip


def fleet(chance: random.Random) -> Fleet:
    found = Fleet()
    for name in NAMES:
        if chance.random() < 0.7:
            found.up(worker(chance, name))
            for _ in range(chance.choice((0, 0, 3))):
                found.mark_health(Pod(name), False, 0.0, chance.choice(WORDS))
            if chance.random() < 0.2:
                found.mark_lost(Pod(name), Lost(chance.choice(MEETING[:2]), chance.choice(WORDS)))
    return found


def attempt(chance: random.Random, number: int) -> Meeting:
    parties = [Party(name, f"http://{name}:1") for name in chance.sample(NAMES, 2)]
    prefill, decode = (one if chance.random() < 0.9 else None for one in parties)
    error = {
        "code": chance.choice(CODES), "message": chance.choice(("m", "", None)),
        "side": chance.choice(("prefill", "decode", "", None)),
        "leg": chance.choice((None, "Refused", "TimedOut", "Cut")),
        "stage": chance.choice((None, *(stage.value for stage in MEETING))),
        "status": chance.choice((None, 400, 401, 404, 405, 429, 502, 503)),
    }  # fmt: skip
    room = Room(number)
    made = Meeting(
        f"r{number // 2}", 1 + number % 2, "/generate", "tiny",
        (room,) if chance.random() < 0.9 else (), prefill, decode,
        Why(reason=chance.choice(("", *REASONS.values()))) if chance.random() < 0.5 else None,
        outcome=chance.choice(("open", "ok", "failed", "failed", "rejected", "client_gone")),
        error=error if chance.random() < 0.9 else None, begun=chance.uniform(0, 90),
        stopped=chance.choice(("", "no attempts left", "not retryable")),
    )  # fmt: skip
    made.ended = None if made.outcome == "open" else made.begun + chance.uniform(0, 9)
    made.first_byte = made.begun + 0.1 if chance.random() < 0.2 else None
    made.steps = [Stage.POOL, made.begun, Stage.FIRST_BYTE, made.begun]
    stages = chance.sample(MEETING, chance.randrange(3))
    made.stages = {
        room: [
            StageRecord(
                room,
                stage,
                chance.choice(("ok", "failed")),
                0.1,
                chance.choice((*SAID, *DETAILS[stage])),
                "w1",
            )
            for stage in stages
        ]
    }
    return made


def unchosen(chance: random.Random, number: int) -> Meeting:
    made = attempt(chance, number)
    made.rooms, made.prefill, made.decode, made.stages = (), None, None, {}
    made.steps = [Stage.POOL, made.begun, *chance.choice(((), (Stage.AVAILABILITY, made.begun)))]
    return made


def scene(chance: random.Random) -> Scene:
    found, breakers = fleet(chance), Breakers(BreakerSettings(faults=1))
    for target in found.targets():
        if chance.random() < 0.2 and (ticket := breakers.of(target.worker).admit(99.0)):
            breakers.of(target.worker).book(ticket, Outcome.FAULT, 99.0)

    def known(one: Worker) -> Known | None:
        state = chance.choice((None, *Knowledge))
        return None if state is None else Known(one, Epoch(1), state, "as told", 0.0)

    named = [worker(chance, name) for name in NAMES]
    waiting = [Waiting(replace(one, pod=Pod(f"{one.pod}x")), chance.choice(WORDS)) for one in named]
    return Scene(
        found, breakers, 100.0, known, waiting=waiting[: chance.randrange(3)],
        declared={one.pod: one for one in named}, told_ports={Pod("w1"): 9},
        meetings=[attempt(chance, number) for number in range(chance.randrange(30))],
        refused=[unchosen(chance, number) for number in range(chance.randrange(3))],
        store_down_s=chance.choice((0.0, 9.0)), ingest_lives=chance.random() < 0.9,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_every_scene_has_findings_that_the_guide_knows_and_none_twice(seed: int) -> None:
    chance, blocked = random.Random(seed), 0
    for _ in range(50):
        one = scene(chance)
        found = [held(finding) for finding in findings(one)]
        assert len({(each.rule, each.culprit, each.about) for each in found}) == len(found)
        assert all(each.culprit and each.next_step and each.sentence for each in found)
        assert [each.blocks for each in found] == sorted(
            (each.blocks for each in found), reverse=True
        )
        said = report(one)
        assert said["ok"] is not bool(said["findings"]) and said["blocked"] == (
            said["first"] is not None
        )
        blocked += said["blocked"]
    assert blocked > 10


def test_a_scene_in_which_nothing_is_wrong_says_nothing() -> None:
    quiet = Fleet()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        quiet.up(WorkerUp(Pod(name), f"http://{name}:1", role, model="m", events=("tcp://h:1",)))

    def known(one: Worker) -> Known:
        return Known(one, Epoch(1), Knowledge.EXACT, "", 0.0)

    assert findings(Scene(quiet, Breakers(), 100.0, known)) == []
