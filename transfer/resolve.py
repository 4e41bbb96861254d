"""Resolve: from a bootstrap triple to the prefill ranks that have our pages, each its part.

Edge, decode side. Used by pull.py; asks bootstrap's resolver and records resolve-topology and
resolve-rank. Open it to change which rank is asked, or what is said when there is none.

    dp rank: as the request says; else 0 of 1; else room mod size where the prefill follows rooms;
             else asked by room
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.bootstrap import BootstrapError, Targets, Topology, Unreachable, compatible, targets
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape, Stage

from .errors import LayoutMismatch, TransferError, Unresolved
from .metadata import Layout
from .shards import Grid, owned, shared
from .waiting import Steps, all_of

ANSWER_S = 0.2  # of a room's time is left for the answer to a question that waited


class Endpoint(Protocol):
    """Where one rank listens; kvplane.bootstrap.Endpoint is one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def generation(self) -> Generation | None: ...


class Resolved(Protocol):
    """A topology and the life of the directory that told it."""

    @property
    def topology(self) -> Topology: ...
    @property
    def generation(self) -> Generation | None: ...


class Resolver(Protocol):
    """What pull.py needs of bootstrap; kvplane.bootstrap.Resolver offers it."""

    async def topology(self, address: str) -> Resolved: ...
    async def endpoint(
        self,
        address: str,
        dp: int,
        cp: int,
        tp: int,
        pp: int,
        expected: Generation | None = None,
    ) -> Endpoint: ...
    async def dp_ranks(
        self, address: str, rooms: Sequence[Room], wait_s: float = 0.0
    ) -> Mapping[Room, int]: ...
    def forget(self, address: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank of the decode we are, and how its pages are cut."""

    layout: Layout
    grid: Grid

    def part_of(self, prefill: Grid) -> tuple[str, ...]:
        """The regions that a prefill rank has of ours; () where both are cut alike: all."""
        if (prefill.tp, prefill.pp) == (self.grid.tp, self.grid.pp):
            return ()
        return shared(owned(self.layout, self.grid), owned(self.layout, prefill))


@dataclass(frozen=True, slots=True)
class Source:
    """One prefill rank that sends to us, and what of each page; () = all of it."""

    endpoint: Endpoint
    regions: tuple[str, ...]
    name: str = ""  # `prefill tp=1`, where there are several


@dataclass(frozen=True, slots=True)
class Reach:
    """All of them."""

    sources: tuple[Source, ...]
    shards: int  # decode ranks that each of them serves


@dataclass(frozen=True, slots=True)
class _Plan:
    """The same before anybody knows where they listen: (cp, tp, pp), and the part."""

    ranks: tuple[tuple[int, int, int], ...]
    parts: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    shards: int


async def resolve(
    steps: Steps,
    resolver: Resolver,
    triple: BootstrapTriple,
    shape: Shape,
    rank: Rank,
    dp_rank: int | None,
) -> Reach:
    """The endpoints of all ranks that send; two stages, each recorded."""
    address = triple.address
    async with steps.stage(Stage.RESOLVE_TOPOLOGY, address, "its topology"):
        try:
            known = await resolver.topology(address)
        except Exception as error:
            raise _unresolved(address, error, Stage.RESOLVE_TOPOLOGY) from error
        topology = known.topology
        plan = _plan(address, topology, shape, rank)
    async with steps.stage(Stage.RESOLVE_RANK, address, "its rank") as step:
        try:
            wait_s = max(0.0, steps.left_s() - ANSWER_S)
            dp = await _dp_rank(resolver, topology, triple, dp_rank, wait_s)
            step.waiting_for = f"dp rank {dp}"
            life = known.generation  # a restart between the two questions is said by name
            found = await all_of(
                *(_found(resolver.endpoint(address, dp, *at, expected=life)) for at in plan.ranks)
            )
        except Exception as error:
            raise _unresolved(address, error, Stage.RESOLVE_RANK) from error
    sources = tuple(Source(*each) for each in zip(found, plan.parts, plan.names, strict=True))
    return Reach(sources, plan.shards)


async def _found(asked: Awaitable[Endpoint]) -> Endpoint:
    return await asked


async def _dp_rank(
    resolver: Resolver,
    topology: Topology,
    triple: BootstrapTriple,
    given: int | None,
    wait_s: float,
) -> int:
    """As the drawing above; a room that is told late is waited for."""
    size = topology.shape.dp
    if given is not None:
        if not 0 <= given < size:
            reason = f"dp rank {given}: the prefill has 0 to {size - 1}"
            raise Unresolved(triple.address, reason, Stage.RESOLVE_RANK)
        return given
    if size == 1:
        return 0
    if topology.follow_bootstrap_room:
        return triple.room % size
    known = await resolver.dp_ranks(triple.address, [triple.room], wait_s)
    if triple.room not in known:
        reason = f"dp rank of room {triple.room} is not known, {wait_s:.1f} s were waited"
        raise Unresolved(triple.address, reason, Stage.RESOLVE_RANK)
    return known[triple.room]


def _plan(address: str, prefill: Topology, decode: Shape, rank: Rank) -> _Plan:
    """Which prefill ranks send what. Raises LayoutMismatch with every field that is in the way."""
    fields = compatible(prefill.shape, decode)
    found: Targets | None = None
    if not fields:
        try:
            found = targets(prefill, decode, rank.grid.tp_rank, rank.grid.pp_rank)
        except Unreachable as error:
            fields = (str(error),)
    if found is None:
        raise LayoutMismatch(f"prefill {address}", fields, Stage.RESOLVE_TOPOLOGY)
    tp, pp = prefill.attn_tp_size, prefill.pp_size
    ranks = tuple(
        (cp, at, stage)
        for cp in found.cp_ranks
        for at in found.tp_ranks
        for stage in found.pp_ranks
    )
    try:
        parts = tuple(rank.part_of(Grid(tp, pp, at, stage)) for _, at, stage in ranks)
        wrong = _uncovered(rank, parts)
    except ValueError as error:
        parts, wrong = (), str(error)
    if wrong is not None:
        raise LayoutMismatch(f"prefill {address}", (wrong,), Stage.RESOLVE_TOPOLOGY)
    names = tuple(_name(prefill, rank) for rank in ranks)
    return _Plan(ranks, parts, names, found.dst_info_num)


def _name(prefill: Topology, rank: tuple[int, int, int]) -> str:
    """Of the axes that have several ranks; "" where the prefill is one."""
    sizes = (prefill.attn_cp_size, prefill.attn_tp_size, prefill.pp_size)
    axes = zip(("cp", "tp", "pp"), rank, sizes, strict=True)
    said = " ".join(f"{axis}={at}" for axis, at, size in axes if size > 1)
    return f"prefill {said}" if said else ""


def _uncovered(rank: Rank, parts: Sequence[tuple[str, ...]]) -> str | None:
    """Every part of our pages must come from exactly one prefill rank; what is against it."""
    if parts == ((),):
        return None
    ours = owned(rank.layout, rank.grid)
    times = Counter(name for part in parts for name in part or ours)
    for name in ours:
        if times[name] != 1:
            return f"region {name}: comes from {times[name]} prefill ranks, must be one"
    return None


def _unresolved(address: str, error: Exception, stage: Stage) -> TransferError:
    """Ours as it is; any other becomes one sentence."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, BootstrapError):
        return Unresolved(address, str(error), error.stage)  # register, where ranks are missing
    if isinstance(error, TimeoutError):
        return Unresolved(address, "no answer in time", stage)
    return Unresolved(address, str(error) or type(error).__name__, stage)
