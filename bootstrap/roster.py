"""Roster: which nodes of an instance are in, which are late, lost or another life of themselves.

Pure. Node 0 keeps one (rendezvous.py). Open it to change who may join or how people are told of
who is missing.

    absent -- joins --> joined -- link ends --> lost -- the same life joins --> joined
                           |                      |
                           +--- another life -----+--> joined, `lives` + 1, the old one is fenced
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvplane.vocabulary import Generation

from .joining import MOST_TEXT, PROTOCOL, Hello, facts_text

ABSENT, JOINED, LOST = "absent", "joined", "lost"
KEPT_LIVES = 64  # of each node, that may not come back


@dataclass(frozen=True, slots=True)
class Member:
    """Who a node is."""

    node_rank: int  # 1 .. nnodes - 1
    nnodes: int
    generation: Generation
    facts: Mapping[str, str] = field(default_factory=dict)  # must be equal on all nodes


@dataclass(frozen=True, slots=True)
class Announced:
    """What node 0 tells all others."""

    generation: Generation
    bootstrap_host: str  # "": the host under which node 0 is dialled; never a wildcard
    bootstrap_port: int
    facts: Mapping[str, str] = field(default_factory=dict)  # must be equal on all nodes


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as node 0 sees it."""

    rank: int
    state: str  # absent | joined | lost
    since: float  # monotonic seconds
    why: str = ""  # it was lost
    generation: Generation | None = None  # of its last life
    address: str = ""  # where that dialled from
    lives: int = 0  # how many have joined


@dataclass(frozen=True, slots=True)
class No:
    """Why a node may not join."""

    kind: str  # of a closed set, for counting
    reason: str
    final: bool = True  # dialling again changes nothing


class Roster:
    """All nodes but node 0."""

    def __init__(self, nnodes: int, facts: Mapping[str, str], now: float) -> None:
        if nnodes < 1:
            raise ValueError(f"nnodes {nnodes}: must be 1 or more")
        self.nnodes, self._facts, self._began = nnodes, dict(facts), now
        self._nodes = {rank: NodeState(rank, ABSENT, now) for rank in range(1, nnodes)}
        self._over: dict[int, deque[str]] = {r: deque(maxlen=KEPT_LIVES) for r in self._nodes}

    def refusal(self, hello: Hello) -> No | None:
        """None for a node that may join. Every differing fact is named with both values."""
        if hello.protocol != PROTOCOL:
            return No("protocol", f"protocol {hello.protocol[:MOST_TEXT]!r}: must be {PROTOCOL}")
        if hello.nnodes != self.nnodes:
            return No("nnodes", f"nnodes: {hello.nnodes} there, {self.nnodes} at node 0")
        if hello.node_rank not in self._nodes:
            want = f"must be 1 to {self.nnodes - 1}" if self.nnodes > 1 else "there is one node"
            return No("rank", f"node_rank {hello.node_rank}: {want}")
        if not 1 <= len(hello.generation) <= MOST_TEXT:
            return No("garbage", f"generation: must be 1 to {MOST_TEXT} characters")
        if wrong := facts_text(hello.facts) or self._differing(hello.facts):
            return No("facts", wrong)
        node = self._nodes[hello.node_rank]
        if hello.generation in self._over[hello.node_rank]:
            said = f"generation {hello.generation} was replaced by {node.generation}"
            return No("replaced", f"node {node.rank} of {self.nnodes}: {said}")
        return None

    def joined(self, hello: Hello, address: str, now: float) -> NodeState:
        """A node that may join has; the state before tells whether it is another life."""
        rank, life = hello.node_rank, Generation(hello.generation)
        before = self._nodes[rank]
        again = before.generation == life
        if before.generation is not None and not again:
            self._over[rank].append(before.generation)
        lives = before.lives + (not again)
        self._nodes[rank] = NodeState(rank, JOINED, now, "", life, address, lives)
        return before

    def lost(self, rank: int, why: str, now: float) -> None:
        """Its link ended."""
        self._nodes[rank] = replace(self._nodes[rank], state=LOST, since=now, why=why)

    def states(self) -> Mapping[int, NodeState]:
        """By rank."""
        return dict(self._nodes)

    def complete(self) -> bool:
        """Are all in?"""
        return all(node.state == JOINED for node in self._nodes.values())

    def missing(self, now: float) -> str:
        """One sentence that names every node that is not in; "" where all are."""
        said = []
        absent = [node.rank for node in self._nodes.values() if node.state == ABSENT]
        if absent:
            have = "has" if len(absent) == 1 else "have"
            waited = f"{now - self._began:.0f} s"
            said.append(f"{self._named(absent)} {have} not joined within {waited}")
        for node in self._nodes.values():
            if node.state == LOST:
                ago = f"{now - node.since:.0f} s ago"
                said.append(f"{self._named([node.rank])} was lost {ago}: {node.why}")
        return "; ".join(said)

    def _named(self, ranks: list[int]) -> str:
        word = "node" if len(ranks) == 1 else "nodes"
        return f"{word} {', '.join(map(str, ranks))} of {self.nnodes}"

    def _differing(self, facts: Mapping[str, str]) -> str:
        said = []
        for name in sorted(self._facts.keys() | facts.keys()):
            here, there = self._facts.get(name, "(absent)"), facts.get(name, "(absent)")
            if here != there:
                said.append(f"{name}: {there} there, {here} at node 0")
        return "; ".join(said)
