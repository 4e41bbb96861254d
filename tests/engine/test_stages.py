"""Stages: what several ranks saw is told once, and a failure with the rank it began in."""

from __future__ import annotations

from kvplane.engine.stages import Stages
from kvplane.vocabulary import Room, Stage, StageRecord


def seen(stage: Stage, outcome: str = "ok", detail: str = "", took: float = 0.0) -> StageRecord:
    return StageRecord(Room(7), stage, outcome, took, detail, "d", took)


def test_a_stage_is_told_when_the_last_rank_is_through_with_the_longest_time() -> None:
    told: list[StageRecord] = []
    stages = Stages(["tp=0", "tp=1"], told.append)
    with stages.room(Room(7)):
        stages.of("tp=1")(seen(Stage.CONNECT, detail="h:1", took=3.0))
        assert told == []
        stages.of("tp=0")(seen(Stage.CONNECT, detail="h:0", took=1.0))
    assert told == [seen(Stage.CONNECT, detail="tp=0: h:0; tp=1: h:1", took=3.0)]


def test_the_same_detail_of_all_ranks_is_told_once() -> None:
    told: list[StageRecord] = []
    stages = Stages(["tp=0", "tp=1"], told.append)
    with stages.room(Room(7)):
        for name in ("tp=0", "tp=1"):
            stages.of(name)(seen(Stage.RESOLVE_RANK, detail="h:8998"))
    assert told == [seen(Stage.RESOLVE_RANK, detail="h:8998")]


def test_the_first_failure_is_told_at_once_and_what_follows_from_it_is_not() -> None:
    told: list[StageRecord] = []
    stages = Stages(["tp=0", "tp=1"], told.append)
    with stages.room(Room(7)):
        stages.of("tp=0")(seen(Stage.CONNECT))
        stages.of("tp=1")(seen(Stage.CONNECT, "failed", "h:1 is gone"))
        assert [record.detail for record in told] == ["rank tp=1: h:1 is gone"]
        stages.of("tp=0")(seen(Stage.VERIFY, "failed", "cancelled"))
    assert len(told) == 1


def test_one_rank_alone_is_told_as_it_is_and_a_foreign_room_with_its_rank() -> None:
    told: list[StageRecord] = []
    Stages([""], told.append).of("")(seen(Stage.VERIFY))
    assert told == [seen(Stage.VERIFY)]
    Stages(["pp=0", "pp=1"], told.append).of("pp=1")(seen(Stage.VERIFY, detail="late"))
    assert told[1].detail == "rank pp=1: late"
