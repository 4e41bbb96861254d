"""Workload: what engines would tell an index, and which prompts are then looked for.

Pure, and needs nothing but Python: a peer's environment runs it too. It keeps numbers, not blocks,
so that an index's memory can be measured beside it. Open it to change how caches live.

    conversation     system prompt | turn 1 | turn 2 | ...    a pod stores what it lacks, in pieces
    cache is full    the conversation that rested longest goes, its tail first
    prompt           0, 50 or 95 % of it lie on some pod, the rest is new to all
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHARES = (0.0, 0.5, 0.95)  # of a prompt that is held
AT_ONCE = 4  # conversations under way, per pod
FULL = 0.98  # of all that fits


@dataclass(frozen=True)
class Spec:
    """Size and manners of a fleet."""

    pods: int = 64
    prompt: int = 512  # blocks of a conversation at its end
    resident: int = 200_000  # (pod, block) pairs when all caches are full
    stems: int = 16  # system prompts, the first ones liked best
    stem_share: float = 0.25  # of a prompt that is system prompt
    turns: int = 6
    sticky: float = 0.9  # chance that a turn goes where the last one went
    piece: int = 64  # most blocks of one event
    churn: float = 0.5  # blocks stored after all is full, as a share of resident
    seed: int = 1


class Event(NamedTuple):
    """One pod stored these blocks behind `parent`, or removed them."""

    pod: int
    stored: bool
    parent: int | None
    blocks: Sequence[int]


class Query(NamedTuple):
    """One prompt; the best pod holds its first `hit` blocks."""

    blocks: list[int]
    hit: int
    share: float


class Talk:
    """One conversation."""

    __slots__ = ("ends", "number", "pod", "stem", "turn")

    def __init__(self, number: int, stem: int, ends: tuple[int, ...]) -> None:
        self.number, self.stem = number, stem
        self.ends = ends  # blocks after the system prompt, at the end of each turn
        self.turn, self.pod = 0, -1


class Cache:
    """What one pod holds."""

    __slots__ = ("held", "stems", "used")

    def __init__(self) -> None:
        self.used = 0  # blocks
        self.held: OrderedDict[Talk, int] = OrderedDict()  # the one that rested longest first
        self.stems: Counter[int] = Counter()  # talks that stand on it


class Workload:
    """First all of events(), then queries()."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self._chance = spec, random.Random(spec.seed)
        self.stem = max(1, int(spec.prompt * spec.stem_share))  # blocks
        self.body = spec.prompt - self.stem
        self.room = spec.resident // spec.pods  # blocks of one pod
        if self.room < 2 * spec.prompt:
            raise ValueError(f"a pod has to hold two prompts: {spec}")
        self.pods = [Cache() for _ in range(spec.pods)]
        self._numbers = spec.stems  # given out so far; the first are system prompts
        self._stems = [self.names(number, self.stem) for number in range(spec.stems)]
        self.stored = 0

    @property
    def resident(self) -> int:
        """(pod, block) pairs held now."""
        return sum(pod.used for pod in self.pods)

    def names(self, number: int, count: int) -> array[int]:
        """Blocks of what has this number."""
        found = array("Q")
        found.frombytes(random.Random(self.spec.seed << 40 | number).randbytes(8 * count))
        return found

    # -- engines -----------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Until all caches are full, then the churn."""
        spec, live, goal = self.spec, list[Talk](), None
        while goal is None or self.stored < goal:
            if len(live) < max(8, AT_ONCE * spec.pods):
                live.append(self._new_talk())
            at = self._chance.randrange(len(live))
            talk = live[at]
            talk.pod = self._place(talk, goal is None)
            yield from self._serve(talk, talk.pod)
            if talk.turn == len(talk.ends):
                live[at] = live[-1]
                live.pop()
            if goal is None and self.resident >= FULL * spec.resident:
                goal = self.stored + int(spec.churn * spec.resident)

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def _new_talk(self) -> Talk:
        chance, turns = self._chance, min(self.spec.turns, self.body)
        ends = (*sorted(chance.sample(range(1, self.body), turns - 1)), self.body)
        stem = min(int(chance.paretovariate(1.0)), self.spec.stems) - 1
        return Talk(self._new_number(), stem, ends)

    def _place(self, talk: Talk, filling: bool) -> int:
        chance, pods = self._chance, self.spec.pods
        if talk.pod >= 0 and chance.random() < self.spec.sticky:
            return talk.pod
        one, other = chance.randrange(pods), chance.randrange(pods)
        return one if not filling or self.pods[one].used < self.pods[other].used else other

    def _serve(self, talk: Talk, number: int) -> Iterator[Event]:
        """One turn: what the pod lacks of it is stored, and then what is too much goes."""
        pod, stem = self.pods[number], self._stems[talk.stem]
        held, end = pod.held.pop(talk, 0), talk.ends[talk.turn]
        talk.turn += 1
        if not held:
            if not pod.stems[talk.stem]:
                yield from self._store(number, None, stem)
            pod.stems[talk.stem] += 1
        if end > held:
            body = self.names(talk.number, self.body)
            yield from self._store(number, body[held - 1] if held else stem[-1], body[held:end])
        pod.held[talk] = max(held, end)
        while pod.used > self.room and len(pod.held) > 1:
            yield from self._evict(number)

    def _store(self, number: int, parent: int | None, blocks: Sequence[int]) -> Iterator[Event]:
        at = 0
        while at < len(blocks):
            piece = blocks[at : at + self._chance.randint(1, self.spec.piece)]
            self.stored += len(piece)
            self.pods[number].used += len(piece)
            yield Event(number, True, parent, piece)
            parent, at = piece[-1], at + len(piece)

    def _evict(self, number: int) -> Iterator[Event]:
        pod = self.pods[number]
        talk, held = next(iter(pod.held.items()))
        keep = max(0, held - min(pod.used - self.room, self.spec.piece))
        pod.held[talk] = keep
        yield from self._remove(number, self.names(talk.number, self.body)[keep:held])
        if not keep:
            del pod.held[talk]
            pod.stems[talk.stem] -= 1
            if not pod.stems[talk.stem]:
                yield from self._remove(number, self._stems[talk.stem])

    def _remove(self, number: int, blocks: Sequence[int]) -> Iterator[Event]:
        back = blocks[::-1]
        for at in range(0, len(back), self.spec.piece):
            piece = back[at : at + self.spec.piece]
            self.pods[number].used -= len(piece)
            yield Event(number, False, None, piece)

    # -- requests ----------------------------------------------------------------------------

    def queries(self, count: int) -> Iterator[Query]:
        """Prompts of full length, the shares in turn."""
        held = [(talk, self.stem + n) for pod in self.pods for talk, n in pod.held.items()]
        for number in range(count):
            share = SHARES[number % len(SHARES)]
            hit = int(self.spec.prompt * share)
            talk = self._chance.choice([talk for talk, depth in held if depth >= hit])
            body = self.names(talk.number, self.body)
            new = self.names(self._new_number(), self.spec.prompt - hit)
            yield Query([*(self._stems[talk.stem] + body)[:hit], *new], hit, share)
