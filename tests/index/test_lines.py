"""Lines: what was written before is never told when it is no longer true."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from kvplane.index import View, answers, chain, rank
from kvplane.index.lines import Lines
from kvplane.index.roster import Roster, roster
from kvplane.vocabulary import (
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Removed,
    Role,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

SIZES = (16, 32)
TOKENS = range(20 * 32)
CHAINS = {size: chain(TOKENS, Namespace("m", size)) for size in SIZES}
NAMES = [Worker(Pod(f"p{number}")) for number in range(12)]


def said(
    lines: Lines, seen: Roster, workers: list[Worker] | None = None, away_s: float = 0.0
) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines.ranking(seen, CHAINS, workers, away_s))
    return found


def slowly(
    view: View, seen: Roster, workers: list[Worker] | None, away_s: float = 0.0
) -> list[dict[str, Any]]:
    """The same, worker by worker, with nothing kept."""
    asked = list(seen.everybody(view)) if workers is None else workers
    found = []
    for held in rank(view, CHAINS, asked):
        state, reason = answers.trust(view, seen.fleet, held.worker, away_s)
        size = answers.block_size(view, seen.fleet, held.worker)
        found.append(
            {
                **answers.who(seen.fleet, held.worker),
                "epoch": held.epoch,
                "block_size": size,
                "blocks": len(CHAINS[size].blocks) if size in CHAINS else 0,
                "depth_blocks": held.depth_blocks,
                "depth_tokens": held.depth_tokens,
                "tiers": answers.shown_tiers(held.tiers),
                "knowledge": state,
                "reason": reason,
                **answers.odd_size(view, seen.fleet, held.worker),
            }
        )
    return found


class Chance:
    """Changes of all kinds, to few workers and blocks, so that they meet."""

    def __init__(self, seed: int, plain: bool) -> None:
        """`plain`: of one block size, in GPU memory, without further groups."""
        self.chance = random.Random(seed)
        self.sizes, self.tiers = (SIZES[:1], [Tier.GPU]) if plain else (SIZES, list(Tier))
        self.plain = plain
        self.size = {worker: self.chance.choice(self.sizes) for worker in NAMES}
        self.epoch = dict.fromkeys(NAMES, 1)

    def change(self) -> Change:
        chance = self.chance
        worker = chance.choice(NAMES)
        blocks = CHAINS[self.size[worker]].blocks
        tier, epoch = chance.choice(self.tiers), Epoch(self.epoch[worker])
        start = chance.choice((0, 0, chance.randrange(len(blocks))))
        some = blocks[start : start + chance.randint(1, len(blocks))]
        parent = blocks[start - 1] if start else None
        match chance.randrange(8):
            case 0 | 1 | 2:
                kept = Tier.GPU if chance.random() < 0.7 else tier
                return Stored(worker, epoch, kept, parent, some, self.size[worker])
            case 3:
                return Removed(worker, epoch, tier, some)
            case 4:
                self.epoch[worker] += 1
                self.size[worker] = chance.choice(self.sizes)
                reason = chance.choice((ClearReason.RESTART, ClearReason.GONE))
                return Cleared(worker, Epoch(self.epoch[worker]), reason)
            case 5 if not self.plain:
                rule = Group(1, GroupKind.WINDOW, 64)
                return Stored(worker, epoch, Tier.GPU, parent, some, self.size[worker], rule)
            case _:
                state = chance.choice(list(Knowledge)[:3])
                by, since = chance.choice("xyz"), chance.random()
                return Known(worker, epoch, state, f"says {by} {since:.1f}", since, by)


def up(worker: Worker, **more: Any) -> WorkerUp:
    return WorkerUp(worker.pod, f"http://{worker.pod}", Role.BOTH, **more)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_what_would_be_written_now(seed: int, plain: bool) -> None:
    chance, even = Chance(seed, plain), 0
    view, dice = View(), chance.chance
    ups = [up(worker, block_size=16) for worker in NAMES] if plain else list[WorkerUp]()
    lines, seen = Lines(view), None
    for _ in range(250):
        for _ in range(dice.randrange(3)):
            view.apply(chance.change())
        match dice.randrange(12):
            case 0:
                some = dice.sample(NAMES, len(NAMES) if plain else dice.randrange(len(NAMES)))
                sizes, ends = (16,) if plain else (None, 16, 64), ((), ("tcp://x:1",))
                ups = [up(w, block_size=dice.choice(sizes), events=dice.choice(ends)) for w in some]
            case 1 if ups and not plain:
                ups[0] = replace(ups[0], dp_size=2)
            case 2:
                view.living = dice.choice((None, frozenset("xy"), frozenset()))
            case 3:
                view.cut_off = frozenset(dice.sample(NAMES, 2))
        seen = roster(ups, seen)
        away_s = dice.choice((0.0, 0.6, 1.0, 1.2, 1.6, 7.4))
        everybody = list(seen.everybody(view))
        workers = dice.choice((None, dice.sample(everybody, len(everybody) // 2)))
        found = said(lines, seen, workers, away_s)
        assert found["workers"] == slowly(view, seen, workers, away_s)
        even += view.plain and len({one["block_size"] for one in found["workers"]}) == 1
        first = next((one for one in found["workers"] if one["depth_blocks"]), None)
        assert found["block_size"] == (first["block_size"] if first else min(SIZES))
        assert found["namespace"] == CHAINS[found["block_size"]].namespace.text()
        assert found["blocks"] == len(CHAINS[found["block_size"]].blocks)
    assert even > 100 if plain else even < 100  # those are written group by group


def test_a_fleet_that_is_the_same_is_worked_out_once() -> None:
    ups = [up(worker, model="m", adapters=("a",)) for worker in NAMES]
    seen = roster(ups)
    assert roster(list(ups), seen) is seen
    assert roster([replace(one) for one in ups], seen) is seen
    other = roster([*ups[1:], replace(ups[0], model="n", dp_size=2, block_size=16)], seen)
    assert other is not seen
    assert (other.served, other.bases["a"]) == ({"m", "n"}, "n")
    assert Worker(NAMES[0].pod, 1) in other.fleet and other.sizes == {16}


def test_names_with_odd_letters_are_written_as_json_has_them() -> None:
    view, odd = View(), Worker(Pod('p"\\é'), 3)
    view.apply(Stored(odd, Epoch(1), Tier.GPU, None, CHAINS[16].blocks, 16))
    view.apply(Known(odd, Epoch(1), Knowledge.PARTIAL, 'a "gap"\n', 1.0))
    (line,) = said(Lines(view), roster(()))["workers"]
    assert (line["worker"], line["reason"]) == (str(odd), 'a "gap"\n')


def test_nobody_at_all_is_an_empty_list() -> None:
    assert said(Lines(View()), roster(()))["workers"] == []


@pytest.mark.parametrize("listed", [True, False])
def test_the_last_one_who_goes_is_not_told_of_any_more(listed: bool) -> None:
    view, one, blocks = View(), NAMES[0], CHAINS[16].blocks
    lines, seen = Lines(view), roster([up(one)] if listed else [])
    for _ in range(2):
        view.apply(Stored(one, Epoch(1), Tier.GPU, None, blocks, 16))
        assert [line["depth_blocks"] for line in said(lines, seen)["workers"]] == [len(blocks)]
        view.apply(Cleared(one, Epoch(1), ClearReason.GONE))
        assert [line["depth_blocks"] for line in said(lines, seen)["workers"]] == [0] * listed
        assert said(lines, roster([]))["workers"] == []
